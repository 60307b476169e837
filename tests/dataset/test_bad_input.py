"""Bad input: each kind has one outcome, is named, and costs no other document anything."""

import gzip
import json
import os
import re
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from raypd.cluster import driver
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError, RunError
from raypd.report import page
from raypd.report.data import load
from raypd.run import left_out
from raypd.run.unit import Part, make_unit
from raypd.run.unreadable import Unreadable
from raypd.verify import findings, verification
from tests.cluster import fakes
from tests.runs import (
    extraction,
    parquet,
    read_all,
    run_config,
    run_here,
    says,
    with_keys,
    write_jsonl,
    write_rows,
)

LINES = b"".join(
    b'{"id": "x%d", "title": "%s"}\n' % (i, os.urandom(60).hex().encode()) for i in range(400)
)
WHOLE = parquet({"id": ["p"] * 50, "title": [os.urandom(30).hex() for _ in range(50)]})
NO_TITLE = "no column 'title' (input.text_columns"
DAMAGED = {
    "m.jsonl.gz": (gzip.compress(LINES)[:-500], "cannot be read as gz after line "),
    "m.ndjson.gz": (b"\x1f\x8b\x08\x00", "cannot be read as gz after line 0"),
    "mm.jsonl.gz": (LINES, "cannot be read as gz after line 0: Not a gzipped file"),
    "m.jsonl.zst": (zstandard.compress(LINES)[:-9], "cannot be read as zst after line "),
    "mm.jsonl.zst": (LINES, "cannot be read as zst after line 0"),
    "m.parquet": (WHOLE[:-4], "cannot be read as Parquet: "),
    "mm.parquet": (b"", "cannot be read as Parquet: "),
    "footer.parquet": (WHOLE[:-60] + b"\xff" * 52 + WHOLE[-8:], "cannot be read as Parquet: "),
    "schema.parquet": (parquet({"id": ["q"], "name": ["x"]}), NO_TITLE),
    "keys.jsonl": (b'{"id": 1, "headline": "x"}\n' * 3, NO_TITLE),
}
BAD = [
    (b"{not json", "a.jsonl, byte {}: not JSON"),
    (b"[1, 2]", "a.jsonl, byte {}: expected a JSON object, found a list"),
    (b"null", "a.jsonl, byte {}: expected a JSON object, found null"),
    (b'{"id": 1, "title": "\xff\xfe"}', "a.jsonl, byte {}: not UTF-8"),
    (b'{"id": 1, "title": "a\x00b"}', "a.jsonl, byte {}: not JSON"),
    (b'{"id": 1, "title": "a\\u0000b"}', "a.jsonl, byte {}: column 'title' holds NUL"),
    (b'{"id": 1, "title": "\\ud800"}', "a.jsonl, byte {}: column 'title' holds half a surrogate"),
    (b'{"id": 1, "title": "  "}', "a.jsonl, byte {}: no text in title"),
    (b'{"id": 1}', "a.jsonl, byte {}: no text in title"),
    (b'{"id": 1, "title": {"a": 1}}', "a.jsonl, byte {}: column 'title' holds an object"),
    (
        b'{"id": 1, "title": "' + b"x" * 3000 + b'"}',
        "a.jsonl, byte {}: the document has 3000 bytes",
    ),
    (b'{"id": 1, "title": "' + b"x" * 200_000 + b'"}', "a.jsonl, byte {}: the line has 2000"),
    (b"[" * 60_000, "a.jsonl, byte {}: not JSON that can be read: nested too deeply"),
    (b'{"id": 1, "title": ' + b"[" * 3000 + b"]" * 3000 + b"}", "a.jsonl, byte {}: "),
    (b"9" * 5000, "a.jsonl, byte {}: not JSON: a number has more digits than can be read"),
]


def ids(run) -> Counter[str]:
    """Return how often each id occurs in the output."""
    return Counter(pq.read_table(f"{run.output.path}/units")["id"].to_pylist())


@pytest.fixture
def corpus(tmp_path, config):
    """Three good files with the ids 0 to 29; a test puts bad ones between them."""
    for name, first in (("a", 0), ("k", 10), ("z", 20)):
        rows = [{"id": str(number), "title": "t"} for number in range(first, first + 10)]
        write_rows(tmp_path / f"in/{name}.jsonl", rows)
    return config(str(tmp_path / "in"))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_listed_and_no_other_document_is_lost(tmp_path, corpus, name) -> None:
    data, reason = DAMAGED[name]
    (tmp_path / "in" / name).write_bytes(data)
    units = plan(corpus)
    (bad,) = units.damaged()
    assert f"{name}: {reason}" in (bad.damaged or "")
    assert bad.name == name
    assert bad.bytes == len(data)
    assert units.documents == 30
    assert units.totals.damaged == 1
    assert Counter(d.id for d in read_all(corpus)) == Counter(map(str, range(30)))
    with pytest.raises(InputError, match=name):
        read_unit(bad, corpus)


def test_a_run_ends_with_the_damaged_files_and_reads_them_once_they_are_repaired(
    tmp_path, corpus, in_process
) -> None:
    (tmp_path / "in/m.jsonl.gz").write_bytes(gzip.compress(LINES)[:-500])
    (tmp_path / "in/m.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunError) as caught:
        driver.run_extract(corpus, build=fakes.build)
    says(
        caught.value,
        "2 units of the input cannot be read",
        "m.jsonl.gz: ",
        "m.parquet: ",
        "manifest.json",
        "same command",
    )
    assert getattr(caught.value, "exit_code", 1) == 1
    assert ids(corpus) == Counter(map(str, range(30)))
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    assert tree["documents"] == 30
    assert tree["units_unreadable"] == 2
    assert [entry["source"] for entry in tree["unreadable"]] == ["m.jsonl.gz", "m.parquet"]
    for entry in tree["unreadable"]:
        assert entry["error"]
        assert entry["bytes"] > 0
    skip = with_keys(corpus, input={"on_damaged": "skip"})
    assert skip.fingerprint() == corpus.fingerprint()
    # With on_damaged=skip the run succeeds.
    assert driver.run_extract(skip, build=fakes.build).units_unreadable == 2
    (tmp_path / "in/m.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "in/m.parquet").unlink()
    result = driver.run_extract(corpus, build=fakes.build)
    assert result.documents == 430
    assert result.units_unreadable == 0
    expected = [str(number) for number in range(30)]
    expected += [f"x{number}" for number in range(400)]
    assert ids(corpus) == Counter(expected)


def test_a_pipe_or_broken_link_is_unreadable_and_a_file_of_another_type_is_named(
    tmp_path, corpus, capsys
) -> None:
    os.mkfifo(tmp_path / "in/pipe.parquet")
    write_jsonl(tmp_path / "other/x.jsonl", ["lost"])
    write_jsonl(tmp_path / "in/deep/READ.ME", ["lost"])
    (tmp_path / "in/b.xlsx").write_bytes(b"PK")
    links = {
        "gone.jsonl": "../elsewhere.jsonl",
        "loop.jsonl": "loop.jsonl",
        "linked": tmp_path / "other",
    }
    for name, target in links.items():
        (tmp_path / "in" / name).symlink_to(target)
    units = plan(corpus)
    assert units.documents == 30
    assert units.totals.damaged == 3
    for unit, words in zip(
        units.damaged(),
        (
            "gone.jsonl: cannot be read: a link to ../elsewhere.jsonl, which does not exist",
            "symbolic links",
            "a pipe, socket or device; raypd reads files",
        ),
        strict=True,
    ):
        assert words in (unit.damaged or "")
    run_here(corpus)
    with pytest.raises(
        RunError, match=r"(?s)3 units of the input cannot be read.*gone.jsonl: .*pipe.parquet: "
    ):
        driver.run_extract(corpus)
    by_reason = {group.reason: group.examples for group in units.left_out}
    assert sorted(by_reason.values()) == [
        ["b.xlsx"],
        ["deep/READ.ME"],
        ["linked"],
    ]
    line = left_out.describe(units.left_out)
    assert capsys.readouterr().err.count(line) == 1
    result = verification.verify(corpus.output.path, corpus)
    assert not result.passed
    assert result.damaged_input.units == 3
    assert f"note: {line}" in findings.describe(result)
    for unit in units.damaged():
        (tmp_path / "in" / unit.name).unlink()
    # A file of another type does not make the run fail.
    assert driver.run_extract(corpus).units_unreadable == 0
    result = verification.verify(corpus.output.path, corpus)
    assert result.passed
    assert line in findings.describe(result)


def test_ten_thousand_tiny_files_share_units(tmp_path, config, in_process) -> None:
    (tmp_path / "in").mkdir()
    for number in range(10_000):
        (tmp_path / f"in/{number}.jsonl").write_text(f'{{"id": {number}, "title": "t"}}\n')
    run = config(str(tmp_path / "in"), unit_documents=500)
    assert driver.run_extract(run, build=fakes.build).units <= 30
    assert ids(run) == Counter(map(str, range(10_000)))


@pytest.mark.parametrize(
    ("limit", "lengths", "error"),
    [
        (1_000_000, [0, 1, 1], "input.max_document_bytes is 1000000"),
        (6_000_000, [5_000_000, 1, 1], "None"),
    ],
)
def test_a_row_of_five_megabytes_is_answered_only_if_the_limit_allows_it(
    tmp_path, config, in_process, limit: int, lengths: list[int], error: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["b" * 5_000_000, "a", "c"])
    run = config(str(path), max_document_bytes=limit)
    driver.run_extract(run, build=fakes.build)
    rows = pq.read_table(f"{run.output.path}/units").sort_by("row").to_pylist()
    assert [len(row["category"] or "") for row in rows] == lengths
    assert error in str(rows[0]["error"])


def test_the_size_of_a_document_is_counted_in_bytes_of_utf_8(tmp_path, config) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["u" * 1000, "ü" * 500, "ü" * 501])
    fits, fits_too, too_large = read_all(config(str(path), max_document_bytes=1000))
    assert (fits.error, fits_too.error) == (None, None)
    assert "1002 bytes; input.max_document_bytes is 1000" in str(too_large.error)


def test_an_id_that_is_an_object_or_a_list_is_replaced_by_the_offset(tmp_path, config) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"id": {"a": 1}, "title": "x"}\n{"id": ["b"], "title": "y"}\n'
    )
    read = [(d.id, d.error) for d in read_all(config(str(tmp_path / "a.jsonl")))]
    assert read == [("a.jsonl:0", None), ("a.jsonl:31", None)]


def test_a_category_named_as_a_path_writes_nothing_outside_the_output(tmp_path, in_process) -> None:
    name = "../../x"
    path = write_rows(
        tmp_path / "a/b/in.jsonl",
        [
            {
                "id": "0",
                "title": "t",
                "category": name,
            }
        ],
    )
    sections = {"input": {"text_columns": ["title"]}, "model": {"name": "fake"}}
    run = run_config(extraction(**{name: ["a"]}), path, tmp_path / "a/b/out", **sections)
    assert driver.run_extract(run).ok == 1
    page.write(load(run.output.path))
    assert {p for p in tmp_path.rglob("*") if p.is_file() and "a/b/out/" not in str(p)} == {path}


def test_many_files_of_another_type_are_counted(tmp_path, corpus) -> None:
    for number in range(1200):
        (tmp_path / f"in/{number:04d}.txt").touch()
    (group,) = plan(corpus).left_out
    assert group.files == 1200
    assert group.examples == ["0000.txt", "0001.txt", "0002.txt", "0003.txt", "0004.txt"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_path_that_is_no_file_is_named_and_not_offered_as_a_correction(
    tmp_path, config, kind
) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("gone")
    words = {
        "link": "a link to gone, which does not exist",
        "pipe": "a pipe, socket or device",
        "folder": "no such file",
    }
    with pytest.raises(InputError, match=words[kind]) as caught:
        plan(config(str(path)))
    assert "did you mean" not in str(caught.value)


def test_a_changed_file_of_many_units_is_reported_once(
    tmp_path, config, ray_here, between, capfd
) -> None:
    for name, documents in (("a", 300), ("b", 10), ("c", 10), ("d", 10), ("e", 10)):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [f"{name} {i}" for i in range(documents)])
    run = config(str(tmp_path / "in"))
    between(lambda: [write_jsonl(tmp_path / f"in/{name}.jsonl", ["other"] * 10) for name in "abcd"])
    with pytest.raises(RunError, match="units of the input cannot be read") as caught:
        driver.run_extract(run, build=fakes.build)
    for name in "abcd":
        assert str(caught.value).count(f"in/{name}.jsonl: has changed since it was planned") == 1
    assert re.search(r"replaced or deleted \(\d\d units of it\)", str(caught.value))
    messages = [line for line in capfd.readouterr().err.splitlines() if "has changed since" in line]
    assert len(messages) == 4
    assert len(set(messages)) == 4
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    sources = sorted(entry["source"] for entry in tree["unreadable"])
    assert sources == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    assert tree["units_unreadable"] >= 33
    assert sum(entry["units"] for entry in tree["unreadable"]) == tree["units_unreadable"]
    # The file that can be read is processed.
    assert sum(ids(run).values()) == 10


def test_the_advice_for_a_file_that_changed_during_a_run_works(
    tmp_path, config, ray_here, between, monkeypatch
) -> None:
    path = write_jsonl(tmp_path / "in/a.jsonl", ["a"] * 40)
    write_jsonl(tmp_path / "in/b.jsonl", ["b"] * 10)
    run = config(str(tmp_path / "in"))
    before = path.read_bytes()
    with pytest.raises(RunError, match="cut off"):
        run_here(run, most=2)
    between(lambda: write_jsonl(path, ["other"] * 40))
    with pytest.raises(RunError) as caught:
        driver.run_extract(run, build=fakes.build)
    monkeypatch.undo()
    assert (
        "Units of a.jsonl were committed before the content changed. Restore the old content"
        in str(caught.value)
    )
    # Neither would help here.
    assert not re.search("Repair or remove|on_damaged=skip", str(caught.value))
    with pytest.raises(ConfigError, match=r"a\.jsonl was replaced"):
        driver.run_extract(run, build=fakes.build)
    anew = with_keys(run, output={"path": str(tmp_path / "anew")})
    assert driver.run_extract(anew, build=fakes.build).documents == 50
    path.write_bytes(before)
    assert driver.run_extract(run, build=fakes.build).documents == 50


def test_the_advice_depends_on_the_files_that_have_committed_units() -> None:
    part = Part("/in/x", "x", "v", "s", 9, "jsonl", None)
    unreadable = Unreadable()
    changed = [
        ("a", "has changed since it was planned"),
        ("b", "cannot be read: no"),
        ("c", "gone"),
    ]
    deleted = [(f"d{number}", "gone") for number in range(12)]
    for name, error in changed + deleted:
        unreadable.add(make_unit([replace(part, name=name)], "f"), error)
    assert unreadable.shown().endswith("  gone\n  and 5 more\n")
    again = "Repair or remove the files, then run the same command to retry them."
    assert (
        unreadable.advice(())
        == f"{again} With input.on_damaged=skip the run leaves them out and succeeds."
    )
    assert unreadable.advice({"b"}).startswith("Some units of b are committed. Once repaired, ")
    assert "retry the others" in unreadable.advice({"a", "b"})
    assert "tries" not in unreadable.advice(unreadable.files.keys())


def damage_pages(path, groups) -> None:
    """Damage the second column in some of the row groups of a Parquet file."""
    data = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata
    for group in groups:
        chunk = metadata.row_group(group).column(1)
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        for position in range(begin, begin + chunk.total_compressed_size):
            data[position] ^= 0x5A
    path.write_bytes(data)


def test_a_damaged_page_costs_the_units_that_contain_it_and_verify_names_each_file(
    tmp_path, config
) -> None:
    titles = [os.urandom(40).hex() for _ in range(30)]
    table = pa.table({"id": [str(i) for i in range(30)], "title": titles})
    (tmp_path / "in").mkdir()
    for name, groups in (("a", [1]), ("b", [0, 1, 2]), ("c", [0, 1, 2])):
        path = tmp_path / f"in/{name}.parquet"
        pq.write_table(table, path, row_group_size=10, compression="zstd")
        damage_pages(path, groups)
    run = config(str(tmp_path / "in/a.parquet"))
    first, second, third = plan(run)
    assert [int(d.id) for d in read_unit(first, run)] == [*range(10)]
    assert [int(d.id) for d in read_unit(third, run)] == [*range(20, 30)]
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read"):
        read_unit(second, run)
    run = config(str(tmp_path / "in"))
    unreadable = verification.verify(run.output.path, run).damaged_input
    assert unreadable.units == 7
    first_file, second_file, third_file = unreadable.examples
    assert "in/a.parquet: " in first_file
    assert "in/b.parquet: " in second_file
    assert "in/c.parquet: " in third_file


def test_a_column_that_no_file_has_is_reported_and_planning_ends_early(tmp_path, config) -> None:
    for name in "abc":
        (tmp_path / f"{name}.parquet").write_bytes(parquet({"id": ["1"], "titles": ["x"]}))
    with pytest.raises(
        InputError,
        match=r"(?s)a.parquet: no column 'title'.*did you mean 'titles'.*none of the 3 obj",
    ):
        plan(config(str(tmp_path / "*.parquet")))
    for i in range(120):
        (tmp_path / f"b{i:03d}.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"None of the first 100 objects can be read"):
        plan(config(str(tmp_path / "*.parquet")))


def test_columns_of_other_types_become_text_or_an_error(tmp_path, config) -> None:
    (tmp_path / "in").mkdir()
    for name, columns in {
        "a": {"id": ["1"], "title": ["text"]},
        "b": {
            "id": [2],
            "title": [3.5],
            "extra": [1],
        },
        "c": {"title": [{"a": 1}, None], "id": [3, 4]},
        "d": {"title": [["a", "b"]], "id": [5]},
    }.items():
        (tmp_path / f"in/{name}.parquet").write_bytes(parquet(columns))
    text, number, tree, nothing, texts = read_all(config(str(tmp_path / "in")))
    rows = [(d.source, d.id, d.fields.get("title")) for d in (text, number, texts)]
    assert rows == [
        ("a.parquet", "1", "text"),
        ("b.parquet", "2", "3.5"),
        ("d.parquet", "5", "a\nb"),
    ]
    assert "holds an object, not text" in (tree.error or "")
    assert "no text in title" in (nothing.error or "")


def test_names_of_columns_are_compared_with_their_case(tmp_path, config) -> None:
    (tmp_path / "a.parquet").write_bytes(
        parquet(
            {
                "id": ["1"],
                "Title": ["other"],
                "title": ["x"],
            }
        )
    )
    (tmp_path / "b.jsonl").write_text('{"id": "1", "Title": "other", "title": "x"}\n')
    (tmp_path / "c.csv").write_text("id,Title,title\n1,other,x\n")
    assert [(d.fields["title"], d.error) for d in read_all(config(str(tmp_path)))] == [
        ("x", None)
    ] * 3


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([7, None]), ["7", "a.parquet:1"]),
        (pa.array([7.5, 1e300]), ["7.5", "1e+300"]),
        (pa.array([True, False]), ["True", "False"]),
        (pa.array([b"k1", b"k2"]), ["k1", "k2"]),
        (pa.array([1], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001"]),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        (pa.array([["x"], ["y"]]), ["a.parquet:0", "a.parquet:1"]),
    ],
)
def test_ids_of_other_types_become_text(tmp_path, config, column, expected) -> None:
    pq.write_table(pa.table({"id": column, "title": ["t"] * len(column)}), tmp_path / "a.parquet")
    assert [d.id for d in read_all(config(str(tmp_path / "a.parquet")))] == expected


def test_documents_with_the_same_id_keep_a_row_each(tmp_path, config) -> None:
    run = config(str(write_rows(tmp_path / "a.jsonl", [{"id": "same", "title": "t"}] * 25)))
    run_here(run)
    rows = [row for unit in plan(run) for row in writer.read_rows(run.output.path, unit.id, 100)]
    assert {row["id"] for row in rows} == {"same"}
    assert len({(row["source"], row["row"]) for row in rows}) == 25


def test_every_kind_of_bad_line_is_a_document_with_an_error(tmp_path, config) -> None:
    good = b'{"id": "good", "title": "text"}'
    content = b""
    for bad, _ in BAD:
        content += bad + b"\n" + good + b"\n"
    (tmp_path / "a.jsonl").write_bytes(content)
    documents = read_all(config(str(tmp_path / "a.jsonl"), max_document_bytes=2000))
    offset = 0
    pairs = zip(documents[::2], documents[1::2], strict=True)
    for (bad, message), (bad_document, good_document) in zip(BAD, pairs, strict=True):
        assert message.format(offset) in str(bad_document.error)
        assert good_document.id == "good"
        assert good_document.error is None
        offset += len(bad) + len(good) + 2


def test_lists_and_numbers_become_text_and_missing_ids_are_made_of_the_offset(
    tmp_path, config
) -> None:
    titles = (["a", "b"], 7, True, ["a", 1])
    path = write_rows(tmp_path / "a.jsonl", [{"title": title} for title in titles])
    documents = read_all(config(str(path), id_column=None))
    assert [d.fields.get("title") for d in documents] == ["a\nb", "7", "true", None]
    assert "holds a list with a number in it, not text" in (documents[3].error or "")
    rows = [
        {"id": 7},
        {"id": "x"},
        {},
        {"id": None},
        {"id": "x"},
        {"id": ["no"]},
        {"id": "\ud800"},
    ]
    texts = [json.dumps({**row, "title": "t"}) + "\n" for row in rows]
    path.write_text("".join(texts))
    default_ids = []
    offset = 0
    for text in texts:
        default_ids.append(f"a.jsonl:{offset}")
        offset += len(text)
    documents = read_all(config(str(path)))
    assert {document.error for document in documents} == {None}
    expected = ["7", "x", default_ids[2], default_ids[3], "x", default_ids[5], "?"]
    assert [document.id for document in documents] == expected
    numbered = read_all(config(str(path), id_column=None))
    assert [document.id for document in numbered] == default_ids


def test_parquet_values_become_text_and_bad_values_become_errors(tmp_path, config) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array([b"fine", b"\xff", None, b"a\x00"], pa.binary())
    title = pa.Array.from_buffers(pa.string(), 4, values.buffers())
    pq.write_table(
        pa.table(
            {
                "id": [1, 2, 3, 4],
                "title": title,
                "other": [1, 2, 3, 4],
            }
        ),
        path,
    )
    run = config(str(path))
    (unit,) = plan(run)
    documents = read_unit(unit, run)
    assert [d.error for d in documents] == [
        None,
        "a.parquet, row 1: column 'title' is not UTF-8",
        "a.parquet, row 2: no text in title",
        "a.parquet, row 3: column 'title' holds NUL characters",
    ]
    assert documents[0].fields == {"id": 1, "title": "fine"}
    assert read_unit(unit, run, ["other"])[0].fields["other"] == 1


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path, config) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    run = config(str(path))
    (unit,) = plan(run)
    write_jsonl(path, ["a", "c"])
    with pytest.raises(InputError, match="has changed since"):
        read_unit(unit, run)
    path.unlink()
    with pytest.raises(InputError, match="is gone since"):
        read_unit(unit, run)
