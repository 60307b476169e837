"""CSV, TSV and JSONL: every record is read once, wherever a file is cut; what is broken is named by
its line.
"""

import csv
import gzip
import io
import itertools
import tracemalloc

import pandas as pd
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from raypd.dataset import split
from raypd.dataset.jsonl import BOM, lines, lines_of_range
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.dataset.split import cut_rows
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
ENCODING = "; input.encoding can be another, such as cp1252"
ENDLESS = b'id,title\n1,fine\n2,"never ends\n' + b"3,x\n" * 100
UNREADABLE = {
    "twice.csv": (
        b"id,title,title\n1,a,b\n",
        "twice.csv: the header, line 1: 2 columns are called 'title'",
    ),
    "columns.csv": (b"id,titel\n1,a\n", "columns.csv: no column 'title' .*did you mean 'titel'"),
    "endless.csv": (ENDLESS, "endless.csv: line 3: a quoted field of this record never ends"),
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
    text, begins = io.StringIO(newline=""), []
    writer = csv.writer(text, delimiter=form[3], quoting=quoting)
    for row in [("title", "n"), *((f"x{title}", n) for title, n in rows)]:
        begins.append(text.tell())
        writer.writerow(row)
    content = text.getvalue()
    data, path = content.encode(encoding), tmp_path / f"a.{form[:3]}{compression}"
    path.write_bytes(
        {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression](data)
    )
    setting = "utf-8" if encoding == "utf-8-sig" else encoding  # a byte order mark needs no word
    run = config(str(path), id_column=None, encoding=setting, unit_documents=size)
    planned = plan(run)
    documents = [read_unit(unit, run) for unit in planned]
    assert [(d.fields["title"], d.fields["n"]) for unit in documents for d in unit] == [
        (f"x{t}", n) for t, n in rows
    ]
    assert all(len(unit) <= size for unit in documents)
    assert (planned.exact, planned.documents) == (True, len(rows))
    as_read = data if encoding in ("utf-8-sig", "latin-1") else content.encode()
    mark, of_letters = (
        3 if encoding == "utf-8-sig" else 0,
        "latin-1" if encoding == "latin-1" else "utf-8",
    )
    widths = [len(content[:begin].encode(of_letters)) + mark for begin in begins]
    assert [d.place for unit in documents for d in unit] == widths[1:]
    assert all(as_read[place:].lstrip(b'"').startswith(b"x") for place in widths[1:])


def test_a_large_file_is_cut_into_units_that_each_read_their_own_part_alone(
    tmp_path, config, monkeypatch
) -> None:
    path, titles = (
        tmp_path / "a.csv",
        ["x" * 200_000, *(f'line\n"{i}", and more' * 20 for i in range(1, 4999))],
    )
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
    assert offsets == [0, documents[0].place]  # the header, and where the unit begins
    *complete, last = (d for unit in units for d in read_unit(unit, run))
    assert (
        last.error == f"a.csv, line {len(before.splitlines()) + 1}: 1 field where the header has 2"
    )
    expected = pd.read_csv(io.BytesIO(before), dtype=str)
    assert [(d.id, d.fields["title"]) for d in complete] == [
        *zip(expected["id"], expected["title"], strict=True)
    ]


def test_what_is_wrong_with_a_record_is_its_own_error_with_the_line(tmp_path, config) -> None:
    (tmp_path / "a.csv").write_bytes(BAD)
    documents = {
        d.fields.get("id", d.place): d
        for d in read_all(config(str(tmp_path / "a.csv"), unit_documents=2))
    }
    assert {d.error for d in documents.values() if d.error} == {
        "a.csv, line 3: 2 fields where the header has 3",
        "a.csv, line 4: 4 fields where the header has 3",
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
    assert (bad.name, [d.id for d in read_all(run)]) == (name, ["1", "2"])


def test_another_encoding_is_used_as_given_and_one_that_is_wrong_is_seen(tmp_path, config) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("id,title\n1,größe\n2,plain\n".encode("cp1252"))
    run, wrong = (
        config(str(path), encoding="cp1252"),
        f"not UTF-8: invalid start byte at byte 4 of line 2{ENCODING}",
    )
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
        plan(config(str(tmp_path / "in/country=a%2Fb"), text_columns=["country"], id_column=None))
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
    expected, offset = [], 0
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
    bounds, found_lines = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))}), []
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
    text, path = b'{"id": "first"}\n' + text, tmp_path / "a.jsonl"
    path.write_bytes(text)
    run = config(
        str(path), text_columns=["id"], id_column=None, unit_documents=documents, unit_bytes=size
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "HEAD_BYTES", head)
        planned = plan(run)
        pairs = [(unit, read_unit(unit, run)) for unit in planned]
    assert [d.place for _, part in pairs for d in part] == [offset for offset, _ in naive(text)]
    assert all(unit.rows in (None, len(part)) for unit, part in pairs)
    assert planned.exact == (len(text) <= head)
    if planned.exact:
        assert planned.documents == len(naive(text))
        assert all(len(part) <= documents for _, part in pairs)


@pytest.mark.slow
def test_a_line_of_30_mb_among_ranges_is_read_once_in_bounded_memory(tmp_path, config) -> None:
    path, short = tmp_path / "a.jsonl", [b'{"id": "%d"}\n' % i for i in range(400)]
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
    assert (planned.exact, planned.units >= 6) == (False, True)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4000)), max_size=6),
    st.integers(1, 30),
    st.integers(1, 900),
)
@example([(1, 2), (1, 0)], 2, 1)
def test_rows_are_cut_without_gap_and_within_the_limits(groups: list, rows: int, size: int) -> None:
    cut, total = list(cut_rows(groups, rows, size)), sum(count for count, _ in groups)
    assert ([start for start, _ in cut], cut[-1][1] if cut else 0) == (
        [0, *(end for _, end in cut)][: len(cut)],
        total,
    )
    each = [length / count for count, length in groups for _ in range(count)]
    for start, end in cut:
        assert 1 <= end - start <= rows
        assert end - start == 1 or sum(each[start:end]) <= size + 1e-6
