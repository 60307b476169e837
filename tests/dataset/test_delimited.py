"""CSV, TSV and JSONL: every record is read once, wherever a file is cut; what is broken is named by
its line.
"""

import csv
import gzip
import io
import itertools
import tracemalloc

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings, strategies as st
from pydantic import ValidationError

from raypd.dataset import delimited
from raypd.dataset.formats import json_lines
from raypd.dataset.formats.ranges import cut_rows
from raypd.dataset.jsonl import BOM, lines, lines_of_range
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from raypd.run.unit import make_unit
from raypd.storage.local import Local
from tests.runs import read_all

FIELD = st.text(st.sampled_from('ab,"\t\n\r\u00e9 '), max_size=6)
HIVE = "country=DE/date=2026-11-21"
LINE = st.one_of(
    st.sampled_from(
        [b"", b" ", b"\t ", b'{"id": 1}', b"\xff\xfe", b"\x00", b"\r", b"{" * 30, b"x" * 70, BOM]
    ),
    st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"n")),
)
END = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
BAD = b"""id,title,note
1,fine,
2,short
3,one,too,many
4,"two\nlines",""

5,"closed" too early,x
6,not \xff text,x
7,,x
8,"opened\n9,swallowed,x\n10,"closed",x
11,"5"" wide",5" tall
"""
ENCODING = "; set input.encoding to another, such as cp1252, or to auto to detect it"
ENDLESS = b'id,title\n1,fine\n2,"never ends\n' + b"3,x\n" * 100
UNREADABLE = {
    "twice.csv": (
        b"id,title,title\n1,a,b\n",
        "twice.csv: the header, line 1: 2 columns are named 'title'",
    ),
    "columns.csv": (b"id,titel\n1,a\n", "columns.csv: no column 'title' .*did you mean 'titel'"),
    "endless.csv": (ENDLESS, "endless.csv: line 3: a quoted field of this record is never closed"),
    "long.csv": (
        ENDLESS + b"x\n" * 50_000,
        r"long.csv: line \d+: its record has more than 69536 bytes so far",
    ),
    "line.csv": (
        b"id,title\n" + b"x" * (1 << 20),
        "line.csv: line 2: its record has more than 69536 bytes",
    ),
    "header.csv": (
        b"id,\xfftitle\n1,a\n",
        "header.csv: the header, line 1: not UTF-8: invalid start byte",
    ),
    "cut.csv.gz": (gzip.compress(BAD * 50)[:-20], "cut.csv.gz: cannot be read as gz after line "),
}


@given(
    st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=12),
    st.sampled_from(["csv,", "csv;", "csv|", "tsv\t"]),
    st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "utf-16", "cp500"]),
    st.sampled_from(["", ".gz", ".zst"]),
    st.integers(1, 5),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_a_csv_writer_wrote_is_read(
    tmp_path, config, rows, form, encoding, compression, size, quoting
) -> None:
    text = io.StringIO(newline="")
    begins = []
    writer = csv.writer(text, delimiter=form[3], quoting=quoting)
    for row in [("title", "n"), *((f"x{title}", n) for title, n in rows)]:
        begins.append(text.tell())
        writer.writerow(row)
    content = text.getvalue()
    data = content.encode(encoding)
    path = tmp_path / f"a.{form[:3]}{compression}"
    path.write_bytes(
        {
            "": bytes,
            ".gz": gzip.compress,
            ".zst": zstandard.compress,
        }[compression](data)
    )
    setting = "utf-8" if encoding == "utf-8-sig" else encoding  # a byte order mark needs no word
    run = config(
        str(path),
        id_column=None,
        encoding=setting,
        unit_documents=size,
    )
    planned = plan(run)
    documents = [read_unit(unit, run) for unit in planned]
    assert [(d.fields["title"], d.fields["n"]) for unit in documents for d in unit] == [
        (f"x{t}", n) for t, n in rows
    ]
    assert all(len(unit) <= size for unit in documents)
    assert planned.exact
    assert planned.documents == len(rows)
    as_read = data if encoding in ("utf-8-sig", "latin-1") else content.encode()
    mark = 3 if encoding == "utf-8-sig" else 0
    of_letters = "latin-1" if encoding == "latin-1" else "utf-8"
    widths = [len(content[:begin].encode(of_letters)) + mark for begin in begins]
    assert [d.row for unit in documents for d in unit] == widths[1:]
    assert all(as_read[place:].lstrip(b'"').startswith(b"x") for place in widths[1:])


def test_a_large_file_is_cut_into_units_that_each_read_their_own_part_alone(
    tmp_path, config, monkeypatch
) -> None:
    path = tmp_path / "a.csv"
    titles = ["x" * 200_000, *(f'line\n"{i}", and more' * 20 for i in range(1, 4999))]
    pd.DataFrame({"id": range(4999), "title": titles}).to_csv(path, index=False)
    before = path.read_bytes()
    path.write_bytes(before + b"4999\n")
    run = config(str(path), unit_documents=100)
    units = list(plan(run, str(tmp_path / "out")))  # with smaller ones at its end
    assert {unit.rows for unit in units} == {100, 25}
    offsets = []
    real = Local.open_read

    def open_read(self, path, offset=0, version=None):
        offsets.append(offset)
        return real(self, path, offset, version)

    monkeypatch.setattr(Local, "open_read", open_read)
    documents = read_unit(units[-1], run)
    assert [d.id for d in documents[:-1]] == [str(i) for i in range(4975, 4999)]
    assert offsets == [0, documents[0].row]  # the header, and where the unit begins
    *complete, last = (d for unit in units for d in read_unit(unit, run))
    assert (
        last.error == f"a.csv, line {len(before.splitlines()) + 1}: 1 field, but the header has 2"
    )
    expected = pd.read_csv(io.BytesIO(before), dtype=str)
    assert [(d.id, d.fields["title"]) for d in complete] == [
        *zip(expected["id"], expected["title"], strict=True)
    ]


def test_what_is_wrong_with_a_record_is_its_own_error_with_the_line(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_bytes(BAD)
    documents = {
        d.fields.get("id", d.row): d
        for d in read_all(config(str(tmp_path / "a.csv"), unit_documents=2))
    }
    assert {d.error for d in documents.values() if d.error} == {
        "a.csv, line 3: 2 fields, but the header has 3",
        "a.csv, line 4: 4 fields, but the header has 3",
        "a.csv, line 8: not CSV: ',' expected after '\"'",
        "a.csv, line 10: no text in title",
        f"a.csv, line 9: not UTF-8: invalid start byte at byte 6 of line 9{ENCODING}",
        "a.csv, line 11: not CSV: ',' expected after '\"' (lines 11 to 13 were read as one record)",
    }
    fine = {id: d.fields for id, d in documents.items() if d.error is None}
    assert fine == {
        "1": {"id": "1", "title": "fine", "note": ""},
        "4": {"id": "4", "title": "two\nlines", "note": ""},
        "11": {"id": "11", "title": '5" wide', "note": '5" tall'},
    }
    assert len(documents) == 9


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_understood_is_named_and_the_others_are_read(
    tmp_path, config, name
) -> None:
    data, message = UNREADABLE[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        plan(config(str(tmp_path / "in"), max_document_bytes=1000))
    for good, text in {
        "a.csv": "title,id\nfine,1\n",
        "b.jsonl": '{"title": "fine", "id": 2}\n',
        "empty.csv": "\n",
        "empty.jsonl": "\n\n",
        "header.tsv": "id\ttitle\n",
    }.items():
        (tmp_path / "in" / good).write_text(text)
    run = config(str(tmp_path / "in"), max_document_bytes=1000)
    (bad,) = plan(run).damaged()
    assert bad.name == name
    assert [d.id for d in read_all(run)] == ["1", "2"]


def test_another_encoding_is_used_as_given_and_one_that_is_wrong_is_seen(tmp_path, config) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("id,title\n1,größe\n2,plain\n".encode("cp1252"))
    run = config(str(path), encoding="cp1252")
    wrong = f"not UTF-8: invalid start byte at byte 4 of line 2{ENCODING}"
    assert [d.error for d in read_all(config(str(path)))] == [f"a.csv, line 2: {wrong}", None]
    assert [d.fields["title"] for d in read_all(run)] == ["größe", "plain"]
    assert run.fingerprint() != config(str(path)).fingerprint()
    with pytest.raises(InputError, match=r"a.csv: not UTF-16 after line 0: .*BOM|a.csv: .*UTF-16"):
        plan(config(str(path), encoding="utf-16"))
    for wrong in ("cp9999", "base64"):
        with pytest.raises(ValidationError, match=f"{wrong}.*Python's names are"):
            config(str(path), encoding=wrong)


def test_a_quote_that_never_ends_takes_bounded_memory(tmp_path, config) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,title\n1,"' + b"some words\n" * 4_000_000)
    run = config(str(path), max_document_bytes=100_000)
    tracemalloc.start()
    with pytest.raises(InputError, match="max_document_bytes, 100000, is too small"):
        plan(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_folders_of_a_path_are_columns_where_the_file_has_none(
    tmp_path, config, suffix
) -> None:
    folder = tmp_path / "in" / HIVE
    folder.mkdir(parents=True)
    for name in ("a%2Fb", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"in/country={name}").mkdir()
    rows = pd.DataFrame({"title": ["x", "y"], "country": ["own", "too"]})
    write = {
        "csv": lambda frame, path: frame.to_csv(path, index=False),
        "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
        "parquet": lambda frame, path: frame.to_parquet(path),
    }[suffix]
    write(rows[["title"]], folder / f"a.{suffix}")
    write(rows, folder / f"b.{suffix}")
    write(rows[["title"]], tmp_path / f"in/country=a%2Fb/c.{suffix}")
    write(rows[["title"]], tmp_path / f"in/country=__HIVE_DEFAULT_PARTITION__/d.{suffix}")
    keys = {"text_columns": ["title", "country"], "id_column": None, "category_column": "country"}
    fields = [d.fields for d in read_all(config(str(tmp_path / "in"), **keys))]
    assert [d["country"] for d in fields] == ["DE", "DE", "own", "too", None, None, "a/b", "a/b"]
    assert "date" not in fields[0]
    # Of the folder that is given itself.
    with pytest.raises(InputError, match=f"c.{suffix}: no column 'country'"):
        plan(
            config(
                str(tmp_path / "in/country=a%2Fb"),
                text_columns=["country"],
                id_column=None,
            )
        )
    run = config(str(tmp_path / "in/country=DE"), id_column="date")
    assert [d.id for d in read_all(run)] == ["2026-11-21"] * 4
    (unit, *_) = plan(run)  # the keys stand in the object's name, part of its id
    moved = unit.parts[0].__class__(
        **{**vars(unit.parts[0]), "name": unit.parts[0].name.replace("21", "22")}
    )
    assert make_unit([moved], run.fingerprint()).id != unit.id


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A file of odd lines, with or without a byte order mark and a last line break."""
    parts = draw(st.lists(st.tuples(LINE, END), max_size=12))
    text = b"".join(line + end for line, end in parts) + draw(st.one_of(st.just(b""), LINE))
    return draw(st.sampled_from([b"", BOM])) + text


def naive(text: bytes) -> list[tuple[int, bytes]]:
    """(offset, line without its end) of every line that is not blank, by splitting the whole."""
    expected = []
    offset = 0
    for line in text.split(b"\n"):
        if (line.removeprefix(BOM) if offset == 0 else line).strip():
            expected.append((offset, line.rstrip(b"\r")))
        offset += len(line) + 1
    return expected


@given(texts(), st.lists(st.integers(0, 400), max_size=8), st.integers(1, 100))
@example(b"a\nb", [2], 10)  # a line begins right at the border
@example(b"a\r\nb\r\n", [2], 10)  # the border lies between CR and LF
@example(b"x" * 300 + b"\ny", [10, 20, 300, 301], 5)  # ranges within one line
@settings(max_examples=400, deadline=None)
def test_every_line_is_in_exactly_one_range(text: bytes, cuts: list[int], limit: int) -> None:
    bounds = sorted(
        {
            0,
            len(text),
            *(cut for cut in cuts if cut < len(text)),
        }
    )
    found_lines = []
    for start, end in itertools.pairwise(bounds):
        file = io.BytesIO(text)
        file.seek(max(0, start - 1))
        ranged = list(lines_of_range(file, limit, start, end))
        assert all(start <= line.offset < end for line in ranged)
        found_lines += ranged
    expected = naive(text)
    assert [line.offset for line in found_lines] == [offset for offset, _ in expected]
    for line, (_, bare) in zip(found_lines, expected, strict=True):
        assert line.data is None or line.data.rstrip(b"\r\n") == bare.rstrip(b"\r\n")
        assert (line.data is None) == (len(bare.rstrip(b"\r\n")) > limit)
    all_lines = list(lines(io.BytesIO(text), limit))
    assert [line._replace(number=0) for line in found_lines] == [
        line._replace(number=0) for line in all_lines
    ]


@given(texts(), st.integers(1, 9), st.integers(1, 200), st.sampled_from([4, 64, 1 << 20]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_plan_and_read_together_lose_and_double_nothing(
    tmp_path, config, text, documents, size, head
) -> None:
    text = b'{"id": "first"}\n' + text
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    run = config(
        str(path), text_columns=["id"], id_column=None, unit_documents=documents, unit_bytes=size
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "HEAD_BYTES", head)
        planned = plan(run)
        pairs = [(unit, read_unit(unit, run)) for unit in planned]
    assert [d.row for _, part in pairs for d in part] == [offset for offset, _ in naive(text)]
    assert all(unit.rows in (None, len(part)) for unit, part in pairs)
    assert planned.exact == (len(text) <= head)
    if planned.exact:
        assert planned.documents == len(naive(text))
        assert all(len(part) <= documents for _, part in pairs)


@pytest.mark.slow
def test_a_line_of_30_mb_among_ranges_is_read_once_in_bounded_memory(tmp_path, config) -> None:
    path = tmp_path / "a.jsonl"
    short = [b'{"id": "%d"}\n' % i for i in range(400)]
    path.write_bytes(
        b"".join([*short[:200], b'{"id": "' + b"x" * (30 << 20) + b'"}\n', *short[200:]])
    )
    run = config(
        str(path), text_columns=["id"], id_column=None, unit_documents=256, unit_bytes=8 << 20
    )
    read_unit(next(iter(plan(run))), run)  # what is imported at the first use does not count
    tracemalloc.start()
    planned = plan(run)
    documents = [d for unit in planned for d in read_unit(unit, run)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [d.fields.get("id") for d in documents if d.error is None] == [
        str(i) for i in range(400)
    ]
    (bad,) = [d for d in documents if d.error is not None]
    assert "the line has 31457" in (bad.error or "")
    assert peak < 24 << 20, peak
    assert not planned.exact
    assert planned.units >= 6


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4000)), max_size=6),
    st.integers(1, 30),
    st.integers(1, 900),
)
@example([(1, 2), (1, 0)], 2, 1)
def test_rows_are_cut_without_gap_and_within_the_limits(groups: list, rows: int, size: int) -> None:
    cut = list(cut_rows(groups, rows, size))
    total = sum(count for count, _ in groups)
    assert [start for start, _ in cut] == [0, *(end for _, end in cut)][: len(cut)]
    assert (cut[-1][1] if cut else 0) == total
    each = [length / count for count, length in groups for _ in range(count)]
    for start, end in cut:
        assert 1 <= end - start <= rows
        assert end - start == 1 or sum(each[start:end]) <= size + 1e-6


@pytest.mark.parametrize("mark", ["sep=;", "SEP=;", '"sep=;"', "\ufeffsep=;"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
@pytest.mark.parametrize("line_end", ["\r\n", "\n", "\r"])
def test_the_first_line_of_excel_names_the_delimiter(
    tmp_path, config, mark, encoding, line_end
) -> None:
    lines = [mark, "id;title", "s0;Bose, black", "s1;größe"]
    text = "".join(line + line_end for line in lines)
    if encoding != "utf-8":
        text = text.removeprefix("\ufeff")
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(encoding))
    documents = read_all(
        config(
            str(path),
            encoding=encoding,
            unit_documents=1,
        )
    )
    assert [(d.id, d.fields["title"]) for d in documents] == [
        ("s0", "Bose, black"),
        ("s1", "größe"),
    ]
    # Offsets in UTF-16 are those of the text as UTF-8.
    as_read = text.encode("utf-8" if encoding == "utf-16" else encoding)
    assert [as_read[d.row :][:2] for d in documents] == [b"s0", b"s1"]


def test_blank_records_may_stand_above_the_header(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_text("\n  \n,\n\nid,title\n1,a\n")
    (document,) = read_all(config(str(tmp_path), unit_documents=1))
    assert (document.id, document.fields["title"]) == ("1", "a")


def test_documents_without_an_id_are_told_apart(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_text("id,title\n,a\n  ,b\n1,c\n")
    (tmp_path / "b.jsonl").write_text('{"id": "", "title": "d"}\n{"id": NaN, "title": "e"}\n')
    documents = read_all(config(str(tmp_path)))
    assert [d.id for d in documents] == ["a.csv:9", "a.csv:12", "1", "b.jsonl:0", "b.jsonl:25"]


def test_a_delimiter_that_excel_names_may_be_any_and_a_column_may_be_called_sep(
    tmp_path, config
) -> None:
    for name, text in (
        ("caret.csv", "sep=^\nid^title\n1^a,b\n"),
        ("tab.csv", "sep=\t\nid\ttitle\n2\ta,b\n"),
        ("comma.tsv", "sep=,\nid,title\n3,a\tb\n"),
        ("column.csv", "sep=x,id,title\n,4,a\n"),
        # A spreadsheet has saved it again.
        ("filled.csv", "sep=;,,\nid;title\n5;a,b\n"),
    ):
        (tmp_path / name).write_text(text)
    documents = read_all(config(str(tmp_path)))
    read = {d.source: (d.id, d.fields["title"]) for d in documents}
    assert read == {
        "caret.csv": ("1", "a,b"),
        "tab.csv": ("2", "a,b"),
        "comma.tsv": ("3", "a\tb"),
        "column.csv": ("4", "a"),
        "filled.csv": ("5", "a,b"),
    }
    # A label file is read in the same way.
    cells = [cells for _, cells in delimited.table(str(tmp_path / "caret.csv"))]
    assert cells == [{"id": "1", "title": "a,b"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "mac_roman", "utf-16", "cp500"])
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_file_whose_lines_end_in_carriage_returns_alone_is_read(
    tmp_path, config, encoding, compression
) -> None:
    rows = [(str(number), f"größe {number}") for number in range(50)]
    # Excel for the Mac writes a line feed within a cell.
    rows[7] = ("7", "two\nlines")
    rows[8] = ("8", "two\rlines")
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "title"), *rows])
    data = text.getvalue().encode(encoding)
    path = tmp_path / f"a.csv{compression}"
    path.write_bytes(gzip.compress(data) if compression else data)
    setting = "utf-8" if encoding == "utf-8-sig" else encoding
    run = config(str(path), encoding=setting, unit_documents=7)
    planned = plan(run, str(tmp_path / "out"))
    assert planned.documents == 50
    assert planned.units >= 8
    documents = [d for unit in planned for d in read_unit(unit, run)]
    assert [(d.id, d.fields.get("title"), d.error) for d in documents] == [
        (id, title, None) for id, title in rows
    ]


def test_a_carriage_return_within_a_line_is_no_line_end(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,title,"no\rte"\n1,"a\rb",x\n2,c,x\n')
    (tmp_path / "b.csv").write_bytes(b"id,title\r\n3,d\r\n")
    documents = read_all(config(str(tmp_path)))
    assert [(d.id, d.fields["title"]) for d in documents] == [
        ("1", "a\rb"),
        ("2", "c"),
        ("3", "d"),
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet", "arrow"])
def test_white_space_around_the_names_of_columns_does_not_count(tmp_path, config, suffix) -> None:
    frame = pd.DataFrame(
        {
            " id ": ["1"],
            "\u00a0title": ["x"],
            "note\t": ["n"],
        }
    )
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path)
    elif suffix == "arrow":
        table = pa.Table.from_pandas(frame)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    else:
        frame.to_json(path, orient="records", lines=suffix == "jsonl")
    # Spaces in the configuration do not count either.
    run = config(
        str(path),
        text_columns=["title ", "note"],
        id_column="id",
    )
    (document,) = read_all(run)
    assert document.id == "1"
    assert document.fields["title"] == "x"
    assert document.fields["note"] == "n"


def test_of_two_columns_whose_names_differ_in_white_space_none_is_guessed(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_text("id,title,title \n1,a,b\n")
    with pytest.raises(InputError, match="2 columns are named 'title'"):
        plan(config(str(tmp_path / "a.csv")))
    # A name that is exactly that of the configuration comes first.
    (tmp_path / "b.jsonl").write_text('{"title ": "other", "title": "x", " title": "other"}\n')
    rows = pa.table(
        {
            "title ": ["other"],
            "title": ["x"],
            " title": ["other"],
        }
    )
    pq.write_table(rows, tmp_path / "c.parquet")
    for name in ("b.jsonl", "c.parquet"):
        (document,) = read_all(config(str(tmp_path / name), id_column=None))
        assert document.fields["title"] == "x"


# ruff: noqa: RUF001 -- letters of other alphabets are the point
TEXTS = {
    "cp1252": [
        "Größe und Überzug für die Jacke, schön weiß",
        "Écran très lumineux, idéal pour l'été; reçu à Noël",
        "El niño comió una manzana; ¿qué tal? Corazón",
        "größe",
    ],
    "cp1250": ["Zażółć gęślą jaźń, kurtka męska czarna", "Příliš žluťoučký kůň úpěl ďábelské ódy"],
    "cp1251": ["Наушники беспроводные черного цвета, отличное качество звука"],
    "koi8_r": ["Наушники беспроводные черного цвета, отличное качество звука"],
    "cp1253": ["Ακουστικά ασύρματα σε μαύρο χρώμα, εξαιρετική ποιότητα ήχου"],
    "cp1254": ["Kablosuz kulaklık siyah renk, mükemmel ses kalitesi, şık görünüş, ağırlığı düşük"],
    "cp932": ["ワイヤレスヘッドホン、黒色、素晴らしい音質です。"],
    "gb18030": ["无线耳机，黑色，音质非常好，价格便宜，适合运动。"],
    "cp949": ["무선 헤드폰, 검은색, 음질이 매우 좋습니다."],
    "mac_roman": ["Größe und Überzug für die Jacke, schön weiß"],
    "utf-8": ["Größe ワイヤレス ağırlığı"],
    "utf-16": ["Größe ワイヤレス ağırlığı"],
    "utf-16-le": ["size, then größe"],
    "utf-16-be": ["size, then größe"],
    "utf-32": ["Größe ワイヤレス"],
}


@pytest.mark.parametrize("suffix", ["csv", "txt", "html"])
def test_the_encoding_of_each_file_is_detected(tmp_path, config, suffix) -> None:
    expected = {}
    (tmp_path / "in").mkdir()
    for encoding, texts_of_encoding in TEXTS.items():
        for number, text in enumerate(texts_of_encoding):
            name = f"{encoding}-{number}.{suffix}"
            expected[name] = text
            content = text
            if suffix == "csv":
                content = f'id;title\n1;plain\n2;"{text}"\n'
            (tmp_path / "in" / name).write_bytes(content.encode(encoding))
    if suffix == "csv":
        run = config(str(tmp_path / "in"), encoding="auto")
        read = {d.source: d.fields.get("title") for d in read_all(run) if d.id == "2"}
    else:
        run = config(
            str(tmp_path / "in"),
            encoding="auto",
            format="files",
            text_columns=["text"],
        )
        read = {d.source: d.fields.get("text") for d in read_all(run)}
    assert read == expected


def test_the_charset_that_a_page_declares_comes_before_a_guess(tmp_path, config) -> None:
    page = '<meta charset="iso-8859-5"><p>Цена 5</p>'
    (tmp_path / "a.html").write_bytes(page.encode("iso-8859-5"))
    run = config(
        str(tmp_path / "a.html"),
        encoding="auto",
        text_columns=["text"],
    )
    assert [d.fields["text"] for d in read_all(run)] == ["Цена 5"]


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path, config) -> None:
    lines = b"".join(b"%d,gr\xc3\xb6\xc3\x9fe\n" % number for number in range(20))
    (tmp_path / "a.csv").write_bytes(b"id,title\n" + lines + b"20,\xff\n")
    *fine, bad = read_all(config(str(tmp_path / "a.csv"), encoding="auto"))
    assert {d.fields["title"] for d in fine} == {"größe"}
    assert "not UTF-8" in (bad.error or "")


def test_a_detected_encoding_is_kept_in_the_plan(tmp_path, config, monkeypatch) -> None:
    path = tmp_path / "in" / "a.csv"
    path.parent.mkdir()
    path.write_bytes("id,title\n1,größe\n2,x\n".encode("cp1252"))
    run = config(str(tmp_path / "in"), encoding="auto", unit_documents=1)
    plan(run, str(tmp_path / "out")).keep(str(tmp_path / "out"))
    monkeypatch.setattr("raypd.dataset.encodings.detect", None)
    units = [*plan(run, str(tmp_path / "out"))]
    assert [read_unit(unit, run)[0].fields["title"] for unit in units] == ["größe", "x"]
