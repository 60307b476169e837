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
    """How often each id stands in the output."""
    return Counter(pq.read_table(f"{run.output.path}/units")["id"].to_pylist())


@pytest.fixture
def corpus(tmp_path, config):
    """Good files around what a test puts between them: 30 documents with ids 0 to 29."""
    for name, first in (("a", 0), ("k", 10), ("z", 20)):
        write_rows(
            tmp_path / f"in/{name}.jsonl", ({"id": str(first + i), "title": "t"} for i in range(10))
        )
    return config(str(tmp_path / "in"))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_object_is_listed_and_nothing_else_is_lost(tmp_path, corpus, name) -> None:
    data, reason = DAMAGED[name]
    (tmp_path / "in" / name).write_bytes(data)
    units = plan(corpus)
    (bad,) = units.damaged()
    assert f"{name}: {reason}" in (bad.damaged or "")
    assert (bad.name, bad.bytes) == (name, len(data))
    assert (units.documents, units.totals.damaged) == (30, 1)
    assert Counter(d.id for d in read_all(corpus)) == Counter(map(str, range(30)))
    with pytest.raises(InputError, match=name):
        read_unit(bad, corpus)


def test_a_run_ends_with_what_is_damaged_and_does_it_when_it_is_put_right(
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
    assert (getattr(caught.value, "exit_code", 1), ids(corpus)) == (1, Counter(map(str, range(30))))
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (tree["documents"], tree["units_unreadable"]) == (30, 2)
    assert [entry["source"] for entry in tree["unreadable"]] == ["m.jsonl.gz", "m.parquet"]
    assert all(entry["error"] and entry["bytes"] for entry in tree["unreadable"])
    skip = with_keys(corpus, input={"on_damaged": "skip"})
    assert skip.fingerprint() == corpus.fingerprint()
    assert driver.run_extract(skip, build=fakes.build).units_unreadable == 2  # and it ends well
    (tmp_path / "in/m.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "in/m.parquet").unlink()
    result = driver.run_extract(corpus, build=fakes.build)
    assert (result.documents, result.units_unreadable) == (430, 0)
    assert ids(corpus) == Counter([*map(str, range(30)), *(f"x{i}" for i in range(400))])


def test_what_is_no_file_is_unreadable_and_what_is_of_no_format_is_named(
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
    assert (units.documents, units.totals.damaged) == (30, 3)
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
        driver.run_extract(corpus)  # exit code 1
    by_reason = {group.reason: group.examples for group in units.left_out}
    assert sorted(by_reason.values()) == [["b.xlsx", "deep/READ.ME"], ["linked"]]
    line = left_out.describe(units.left_out)
    assert capsys.readouterr().err.count(line) == 1
    result = verification.verify(corpus.output.path, corpus)
    assert (result.passed, result.damaged_input.units) == (False, 3)
    assert f"note: {line}" in findings.describe(result)
    for unit in units.damaged():
        (tmp_path / "in" / unit.name).unlink()
    # Files of other formats end no run badly.
    assert driver.run_extract(corpus).units_unreadable == 0
    result = verification.verify(corpus.output.path, corpus)
    assert result.passed
    assert line in findings.describe(result)


def test_ten_thousand_tiny_files_are_one_run(tmp_path, config, in_process) -> None:
    (tmp_path / "in").mkdir()
    for number in range(10_000):
        (tmp_path / f"in/{number}.jsonl").write_text(f'{{"id": {number}, "title": "t"}}\n')
    run = config(str(tmp_path / "in"), unit_documents=500)
    assert driver.run_extract(run, build=fakes.build).units <= 30
    assert ids(run) == Counter(map(str, range(10_000)))


@pytest.mark.parametrize("most", [1_000_000, 6_000_000])
def test_a_row_of_five_megabytes_is_an_error_row_or_an_answer(
    tmp_path, config, in_process, most: int
) -> None:
    run = config(
        str(write_jsonl(tmp_path / "a.jsonl", ["b" * 5_000_000, "a", "c"])), max_document_bytes=most
    )
    driver.run_extract(run, build=fakes.build)
    rows = pq.read_table(f"{run.output.path}/units").sort_by("row").to_pylist()
    assert [len(row["category"] or "") for row in rows] == [
        5_000_000 if most > 5_000_000 else 0,
        1,
        1,
    ]
    assert ("input.max_document_bytes is 1000000" in str(rows[0]["error"])) == (most < 5_000_000)


def test_ids_that_are_objects_are_none_and_the_place_stands_for_them(tmp_path, config) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"id": {"a": 1}, "title": "x"}\n{"id": ["b"], "title": "y"}\n'
    )
    read = [(d.id, d.error) for d in read_all(config(str(tmp_path / "a.jsonl")))]
    assert read == [("a.jsonl:0", None), ("a.jsonl:31", None)]


def test_a_category_named_as_a_path_writes_nothing_outside_the_output(tmp_path, in_process) -> None:
    name = "../../x"
    path = write_rows(tmp_path / "a/b/in.jsonl", [{"id": "0", "title": "t", "category": name}])
    sections = {"input": {"text_columns": ["title"]}, "model": {"name": "fake"}}
    run = run_config(extraction(**{name: ["a"]}), path, tmp_path / "a/b/out", **sections)
    assert driver.run_extract(run).ok == 1
    page.write(load(run.output.path))
    assert {p for p in tmp_path.rglob("*") if p.is_file() and "a/b/out/" not in str(p)} == {path}


def test_many_files_of_no_format_are_counted(tmp_path, corpus) -> None:
    for number in range(1200):
        (tmp_path / f"in/{number:04d}.txt").touch()
    (group,) = plan(corpus).left_out
    assert group.files == 1200
    assert group.examples == ["0000.txt", "0001.txt", "0002.txt", "0003.txt", "0004.txt"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_path_that_is_no_file_is_named_and_never_offered_again(tmp_path, config, kind) -> None:
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


def test_one_file_of_many_units_is_told_once_beside_the_others(
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
    assert len(messages) == len(set(messages)) == 4
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    assert sorted(entry["source"] for entry in tree["unreadable"]) == [
        f"{name}.jsonl" for name in "abcd"
    ]
    assert sum(entry["units"] for entry in tree["unreadable"]) == tree["units_unreadable"] >= 33
    assert sum(ids(run).values()) == 10  # all that can be read is done


def test_the_advice_for_a_file_that_changed_in_mid_run_works(
    tmp_path, config, ray_here, between, monkeypatch
) -> None:
    path = write_jsonl(tmp_path / "in/a.jsonl", ["a"] * 40)
    write_jsonl(tmp_path / "in/b.jsonl", ["b"] * 10)
    run, before = config(str(tmp_path / "in")), path.read_bytes()
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
    # Which would not help.
    assert not re.search("same command tries|on_damaged=skip", str(caught.value))
    with pytest.raises(ConfigError, match=r"a\.jsonl was replaced"):
        driver.run_extract(run, build=fakes.build)
    anew = with_keys(run, output={"path": str(tmp_path / "anew")})
    assert driver.run_extract(anew, build=fakes.build).documents == 50
    path.write_bytes(before)
    assert driver.run_extract(run, build=fakes.build).documents == 50


def test_what_can_be_done_about_each_file() -> None:
    part, unreadable = Part("/in/x", "x", "v", "s", 9, "jsonl", None), Unreadable()
    changed = [
        ("a", "has changed since it was planned"),
        ("b", "cannot be read: no"),
        ("c", "gone"),
    ]
    for name, error in (*changed, *((f"d{n}", "gone") for n in range(12))):
        unreadable.add(make_unit([replace(part, name=name)], "f"), error)
    assert unreadable.shown().endswith("  gone\n  and 5 more\n")
    again = "Repair or remove the files, and the same command tries them again."
    assert (
        unreadable.advice(())
        == f"{again} With input.on_damaged=skip the run leaves them out and succeeds."
    )
    assert unreadable.advice({"b"}).startswith("Some units of b are committed. Once repaired, ")
    assert "tries the others again" in unreadable.advice({"a", "b"})
    assert "tries" not in unreadable.advice(unreadable.files.keys())


def damage_pages(path, groups) -> None:
    """Damages the second column, in some of the row groups of a Parquet file."""
    data, metadata = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata
    for chunk in (metadata.row_group(group).column(1) for group in groups):
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        for position in range(begin, begin + chunk.total_compressed_size):
            data[position] ^= 0x5A
    path.write_bytes(data)


def test_a_page_that_is_damaged_costs_the_units_that_touch_it_and_verify_names_each_file(
    tmp_path, config
) -> None:
    table = pa.table(
        {"id": [str(i) for i in range(30)], "title": [os.urandom(40).hex() for _ in range(30)]}
    )
    (tmp_path / "in").mkdir()
    for name, groups in (("a", [1]), ("b", [0, 1, 2]), ("c", [0, 1, 2])):
        pq.write_table(
            table, tmp_path / f"in/{name}.parquet", row_group_size=10, compression="zstd"
        )
        damage_pages(tmp_path / f"in/{name}.parquet", groups)
    run = config(str(tmp_path / "in/a.parquet"))
    first, second, third = plan(run)
    assert [int(d.id) for unit in (first, third) for d in read_unit(unit, run)] == [
        *range(10),
        *range(20, 30),
    ]
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read"):
        read_unit(second, run)
    run = config(str(tmp_path / "in"))
    unreadable = verification.verify(run.output.path, run).damaged_input
    assert (unreadable.units, len(unreadable.examples)) == (7, 3)
    assert all(
        f"in/{name}.parquet: " in text
        for name, text in zip("abc", unreadable.examples, strict=True)
    )


def test_a_column_that_is_missing_everywhere_is_the_configurations_fault(tmp_path, config) -> None:
    for name in "abc":
        (tmp_path / f"{name}.parquet").write_bytes(parquet({"id": ["1"], "titles": ["x"]}))
    with pytest.raises(
        InputError,
        match=r"(?s)a.parquet: no column 'title'.*did you mean 'titles'.*none of the 3 obj",
    ):
        plan(config(str(tmp_path / "*.parquet")))
    for i in range(120):
        (tmp_path / f"b{i:03d}.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"so it is with the first 100 objects"):
        plan(config(str(tmp_path / "*.parquet")))


def test_columns_of_another_type_are_read_as_they_are(tmp_path, config) -> None:
    (tmp_path / "in").mkdir()
    for name, columns in {
        "a": {"id": ["1"], "title": ["text"]},
        "b": {"id": [2], "title": [3.5], "extra": [1]},
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


def test_of_columns_that_differ_in_case_the_one_that_is_named_is_read(tmp_path, config) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet({"id": ["1"], "Title": ["other"], "title": ["x"]}))
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
def test_ids_that_are_not_strings(tmp_path, config, column, expected) -> None:
    pq.write_table(pa.table({"id": column, "title": ["t"] * len(column)}), tmp_path / "a.parquet")
    assert [d.id for d in read_all(config(str(tmp_path / "a.parquet")))] == expected


def test_ids_that_repeat_keep_a_row_each(tmp_path, config) -> None:
    run = config(str(write_rows(tmp_path / "a.jsonl", [{"id": "same", "title": "t"}] * 25)))
    run_here(run)
    rows = [row for unit in plan(run) for row in writer.read_rows(run.output.path, unit.id, 100)]
    assert ({row["id"] for row in rows}, len({(row["source"], row["row"]) for row in rows})) == (
        {"same"},
        25,
    )


def test_every_kind_of_bad_line_is_a_document_with_an_error(tmp_path, config) -> None:
    good = b'{"id": "good", "title": "text"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(part for bad, _ in BAD for part in (bad, good)))
    documents, place = read_all(config(str(tmp_path / "a.jsonl"), max_document_bytes=2000)), 0
    for (bad, message), of_bad, of_good in zip(BAD, documents[::2], documents[1::2], strict=True):
        assert message.format(place) in (of_bad.error or ""), of_bad
        assert (of_good.id, of_good.error) == ("good", None)
        place += len(bad) + len(good) + 2


def test_lists_and_numbers_and_ids_become_text_and_ids_are_made_where_they_are_missing(
    tmp_path, config
) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", ({"title": title} for title in (["a", "b"], 7, True, ["a", 1]))
    )
    documents = read_all(config(str(path), id_column=None))
    assert [d.fields.get("title") for d in documents] == ["a\nb", "7", "true", None]
    assert "holds a list with a number in it, not text" in (documents[3].error or "")
    rows = [{"id": 7}, {"id": "x"}, {}, {"id": None}, {"id": "x"}, {"id": ["no"]}, {"id": "\ud800"}]
    texts = [json.dumps({**row, "title": "t"}) + "\n" for row in rows]
    path.write_text("".join(texts))
    made = [f"a.jsonl:{sum(map(len, texts[:i]))}" for i in range(len(texts))]
    expected = ["7", "x", made[2], made[3], "x", made[5], "?"]
    assert [(d.id, d.error) for d in read_all(config(str(path)))] == [(id, None) for id in expected]
    assert [d.id for d in read_all(config(str(path), id_column=None))] == made


def test_parquet_values_become_text_and_bad_ones_errors(tmp_path, config) -> None:
    path = tmp_path / "a.parquet"
    title = pa.Array.from_buffers(
        pa.string(), 4, pa.array([b"fine", b"\xff", None, b"a\x00"], pa.binary()).buffers()
    )
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "title": title, "other": [1, 2, 3, 4]}), path)
    run = config(str(path))
    (unit,) = plan(run)
    documents = read_unit(unit, run)
    assert [d.error for d in documents] == [
        None,
        "a.parquet, row 1: column 'title' is not UTF-8",
        "a.parquet, row 2: no text in title",
        "a.parquet, row 3: column 'title' holds NUL characters",
    ]
    assert (documents[0].fields, read_unit(unit, run, ["other"])[0].fields["other"]) == (
        {"id": 1, "title": "fine"},
        1,
    )


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
