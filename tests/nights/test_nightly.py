"""Nightly runs: only what changed is extracted; the Delta table; and what a changed schema asks
for.
"""

import io
import json
import os
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from rich.console import Console
from typer.testing import CliRunner

from raypd import storage
from raypd.answering.components import WorkerComponents
from raypd.billing import book
from raypd.billing.bill import Bill
from raypd.cli.main import app
from raypd.config import Category, RunConfig
from raypd.dataset import compaction, planner, table_writer
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError, RunError
from raypd.nights import changes, delta, index, nightly, published
from raypd.nights.nightly import Night, run_night
from raypd.nights.schema_change import Change, compare, join, only_added
from raypd.nights.state import NightState, Shard
from raypd.nights.table_check import verify_table
from raypd.report import data, page, terminal
from raypd.report.status import Watch
from raypd.run import Part, load, make_unit, manifest, records
from raypd.run.lease import RunLease
from raypd.tasks.base import Record, Request
from raypd.verify import dead_letters
from raypd.verify.export import export
from raypd.verify.scratch import Scratch
from tests import s3
from tests.cluster import fakes
from tests.dataset.test_bad_input import damage_pages
from tests.fault_proxy import Faults
from tests.processes import LONG, start
from tests.runs import extraction, run_config, says, with_keys

pytestmark = pytest.mark.usefixtures("in_process")
DOCUMENTS = {f"d{i}": f"title {i}" for i in range(25)}
TYPES = ("text", "number", "text")
A, B, C = (
    {"name": n, "description": "", "type": t, "values": []}
    for n, t in zip("abc", TYPES, strict=True)
)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    """The index of some documents has several shards, as that of millions has."""
    monkeypatch.setattr(index, "SHARD_ROWS", 3)


class Task(fakes.FakeTask):
    """Answers every attribute of a document's category with `attribute:title`; a title `bad`
    fails.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def plan(self, documents):
        for document in documents:
            if document.error is not None:
                yield Record(document.index, error=document.error)
                continue
            title = document.fields["title"]
            if title == "bad":
                yield Record(document.index, error="it is bad")
            else:
                category = document.fields.get("category") or "c"
                texts = {
                    a.name: f"{a.name}:{title}"
                    for a in self.config.task.categories[category].attributes
                }
                values = [
                    {
                        "name": name,
                        "value": text,
                        "status": "ok",
                    }
                    for name, text in texts.items()
                ]
                answer = {
                    "category": category,
                    "record": texts,
                    "values": values,
                    "truncated": False,
                }
                record = Record(document.index, answer)
                yield Request([document.index], ["x"], lambda _, record=record: [record])


def build(config: RunConfig, threads: int | None) -> WorkerComponents:
    return WorkerComponents(
        fakes.FakeEngine(config.engine.most_seqs), Task(config), None, config.engine.max_num_seqs
    )


@pytest.fixture
def run(config, tmp_path):
    """Makes a configuration of nights over the folder `in`, whose output is the folder `root`."""

    def make(path=None, attributes: str = "a", **keys) -> RunConfig:
        made = config(
            path or str(tmp_path / "in"), "root", category_column="category", category="c", **keys
        )
        return with_keys(made, task=extraction(c=attributes, d="a"))

    return make


@pytest.fixture
def write(tmp_path):
    """Writes documents into a file of the folder `in`."""

    def make(name: str, documents: dict[str, str], **more) -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True)
        rows = [
            {
                "id": id,
                "title": title,
                "category": "c",
                **more,
            }
            for id, title in documents.items()
        ]
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


def night(config: RunConfig, **keys) -> Night:
    return run_night(config, build=build, **keys)


def files(config: RunConfig) -> list[str]:
    return Path(config.output.path, "current/files.txt").read_text().splitlines()


def after(config: RunConfig, **keys) -> dict[str, str | None]:
    """`titles` behind another night."""
    night(config, **keys)
    return titles(config)


def rows(config: RunConfig):
    """id -> row of the table, as a reader reads it by the recipe of the documentation; every id
    once.
    """
    found = ds.dataset(files(config), format="parquet").to_table().to_pylist()
    made = {row["id"]: {**row, "record": json.loads(row["record"] or "null")} for row in found}
    assert len(made) == len(found)
    return made


def titles(config: RunConfig) -> dict[str, str | None]:
    """id -> the title that its answer was made of."""
    return {
        id: row["record"] and row["record"]["a"].removeprefix("a:")
        for id, row in rows(config).items()
    }


def extracted(config: RunConfig, made: Night) -> list[str]:
    """Ids that a night has put through the model."""
    folder = Path(config.output.path, "nights", made.name, "units")
    return sorted(
        id for path in folder.glob("*.parquet") for id in pq.read_table(path)["id"].to_pylist()
    )


@pytest.mark.slow
def test_of_two_nights_at_once_one_is_refused_and_nothing_is_lost(run, write, tmp_path) -> None:
    write("a.jsonl", DOCUMENTS)
    config = with_keys(run(), model={"name": "fake", "fake": {"load_seconds": 5}})
    (tmp_path / "night.yaml").write_text(config.model_dump_json())
    both = [start("-m", "raypd", "nightly", str(tmp_path / "night.yaml")) for _ in range(2)]
    said = [process.communicate(timeout=LONG) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    assert sum("has been working on it since" in err for _, err in said) == 1
    assert rows(config).keys() == DOCUMENTS.keys()
    assert verify_table(config.output.path, config).passed


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_only_changed_documents_of_a_rewritten_object_are_extracted(
    tmp_path, write, run, suffix
) -> None:
    write(f"a.{suffix}", DOCUMENTS)
    config = run()
    first = night(config)
    assert first.new == 25
    assert first.extracted == 25
    assert first.documents == 25
    assert titles(config) == DOCUMENTS
    # Every document is of the first night's units, so no row was copied.
    assert not Path(config.output.path, "nights", first.name, "table").exists()
    changed = {**DOCUMENTS, "d7": "other", "new": "fresh"}
    del changed["d3"]
    write(f"a.{suffix}", changed)
    second = night(config)
    assert second.new == 1
    assert second.changed == 1
    assert second.removed == 1
    assert second.unchanged == 23
    assert extracted(config, second) == ["d7", "new"]
    assert titles(config) == changed
    if suffix == "parquet":  # where each stands tonight, not where it stood
        assert {id: row["row"] for id, row in rows(config).items()} == {
            id: i for i, id in enumerate(changed)
        }
    third = night(config)
    assert third.nothing_new is True
    assert third.name == second.name
    assert titles(config) == changed
    (tmp_path / f"in/a.{suffix}").rename(tmp_path / f"in/z.{suffix}")
    config = run(unit_documents=4)  # other units of the same documents cost nothing
    fourth = night(config)
    assert fourth.extracted == 0
    assert fourth.unchanged == 25
    assert titles(config) == changed
    assert {row["source"] for row in rows(config).values()} == {f"z.{suffix}"}


def test_objects_that_did_not_change_are_neither_read_nor_written(write, run, monkeypatch) -> None:
    for name in "abc":
        write(f"{name}.jsonl", {f"{name}{i}": "x" for i in range(5)})
    config = run(unit_documents=5)
    units_read = []
    read_unit = nightly.changes.read_unit

    def recorded(unit, *arguments):
        units_read.append(unit.name)
        return read_unit(unit, *arguments)

    night(config)
    before = files(config)
    write("b.jsonl", {f"b{i}": "y" if i == 2 else "x" for i in range(5)})
    monkeypatch.setattr(nightly.changes, "read_unit", recorded)
    assert night(config).extracted == 1
    assert set(units_read) == {"b.jsonl"}
    assert len(set(before) & set(files(config))) == 2
    assert titles(config)["b2"] == "y"


def units_of(config: RunConfig, made: Night) -> list[int]:
    """Return how many documents each unit has that a night has put through the model."""
    folder = Path(config.output.path, "nights", made.name, "units")
    return sorted(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_changed_documents_of_several_units_are_answered_in_one_unit(write, run, suffix) -> None:
    documents = {f"d{number:02d}": "x" for number in range(24)}
    names = list(documents)
    for file in range(3):
        rows_of_file = {name: documents[name] for name in names[file * 8 : file * 8 + 8]}
        write(f"{file}.{suffix}", rows_of_file)
    config = run(unit_documents=4)
    assert units_of(config, night(config)) == [4] * 6
    # One document of each of the first four units, and all documents of the last unit.
    changed = dict.fromkeys(["d01", "d06", "d08", "d15", *names[20:]], "y")
    documents |= changed
    for file in range(3):
        rows_of_file = {name: documents[name] for name in names[file * 8 : file * 8 + 8]}
        write(f"{file}.{suffix}", rows_of_file)
    second = night(config)
    assert extracted(config, second) == sorted(changed)
    assert units_of(config, second) == [4, 4]
    assert titles(config) == documents
    # The object of the unit that changed as a whole is an object of the table.
    fresh = f"nights/{second.name}/units/"
    assert sum(fresh in file for file in files(config)) == 1
    assert night(config).nothing_new is True


def test_a_unit_of_changed_documents_has_at_most_unit_documents(write, run) -> None:
    documents = {f"d{number:02d}": "x" for number in range(40)}
    write("a.jsonl", documents)
    config = run(unit_documents=4)
    night(config)
    changed = {f"d{number:02d}": "y" for number in range(0, 40, 4)}
    write("a.jsonl", documents | changed)
    assert units_of(config, night(config)) == [2, 4, 4]
    assert titles(config) == documents | changed


def test_a_unit_of_changed_documents_has_at_most_unit_bytes(run) -> None:
    units = []
    for number in range(6):
        part = Part("p", f"{number}", "v", "s", 4000, "jsonl", None, expected=4, bytes=4000)
        pending = nightly.changes.PendingDocuments(number, 4, [1])
        units.append((make_unit([part], "f"), pending))
    config = run(unit_documents=100, unit_bytes=2500)
    # A document takes 1,000 bytes.
    merged = list(nightly.changes.merged_units(units, config))
    assert [unit.only for unit in merged] == [(1, 5)] * 3
    assert [part.name for unit in merged for part in unit.parts] == list("012345")


def test_the_last_document_of_an_id_wins_and_the_one_before_comes_back_when_it_goes(
    tmp_path, write, run
) -> None:
    write("1.jsonl", {"x": "old", "y": "only"})
    write("2.jsonl", {"x": "newer"})
    config = run()
    first = night(config)
    assert first.shadowed == 1
    assert titles(config) == {"x": "newer", "y": "only"}
    assert extracted(config, first) == ["x", "y"]  # what nobody sees is not paid for
    write("3.jsonl", {"x": "newest"})
    assert after(config) == {"x": "newest", "y": "only"}
    (tmp_path / "in/3.jsonl").unlink()
    # Its answer was still there.
    assert night(config).extracted == 0
    assert titles(config) == {"x": "newer", "y": "only"}
    (tmp_path / "in/2.jsonl").unlink()
    assert night(config).extracted == 1
    assert titles(config) == {"x": "old", "y": "only"}


def test_documents_that_the_input_does_not_have_anymore(tmp_path, write, run) -> None:
    write("1.jsonl", {"x": "1", "y": "1"})
    write("2.jsonl", {"z": "2"})
    drop = run()
    keep = with_keys(run(), nightly={"removed": "keep"})
    night(keep)
    (tmp_path / "in/1.jsonl").unlink()
    write("3.jsonl", {"y": "3"})
    older = verify_table(drop.output.path, drop)
    assert older.missing.documents == 1
    assert older.foreign.documents == 2
    made = night(keep)
    assert verify_table(keep.output.path, keep).passed
    assert titles(keep) == {"x": "1", "y": "3", "z": "2"}
    assert made.removed == 0
    assert made.extracted == 1
    (tmp_path / "in/3.jsonl").unlink()
    write("4.jsonl", {"z": "4"})
    assert after(keep) == {"x": "1", "y": "3", "z": "4"}
    assert after(drop) == {"z": "4"}
    write("5.jsonl", {"v": "5"})
    assert after(drop) == {"z": "4", "v": "5"}


def test_a_document_whose_category_changed_is_extracted_again(write, run) -> None:
    config = run(attributes="ax")
    write("a.jsonl", {"x": "1", "y": "1"})
    night(config)
    assert rows(config)["x"]["record"] == {"a": "a:1", "x": "x:1"}
    write("a.jsonl", {"x": "1", "y": "1"}, category="d")
    assert night(config).changed == 2
    assert rows(config)["x"]["category"] == "d"
    assert rows(config)["x"]["record"] == {"a": "a:1"}


def test_a_hash_column_says_what_has_changed_and_a_place_stands_for_an_id(write, run) -> None:
    write("a.jsonl", {"x": "1", "y": "1"}, etag="e1")
    config = with_keys(run(), nightly={"hash_column": "etag"})
    night(config)
    # Without it: content.
    for etag, title, changed in (("e1", "2", 0), ("e2", "2", 2), (None, "2", 2), (None, "3", 2)):
        write("a.jsonl", {"x": title, "y": title}, etag=etag)
        made = night(config)
        assert made.changed == changed
        assert made.extracted == changed
    with pytest.raises(ConfigError, match=r"nightly.hash_column was etag"):
        night(run())
    places = run(id_column=None)
    assert night(places, full=True).extracted == 2
    write("a.jsonl", {"x": "3", "y": "2"})
    assert night(places).extracted == 1


def test_a_cascade_is_asked_for_attributes_of_other_categories_than_the_input_s(run) -> None:
    config = with_keys(run(attributes="a"), cascade={"model": "fake"})
    added = only_added(config, Change(added={"d": config.extraction.categories["d"].attributes}))
    assert added.input.category is None
    assert [*added.second_model().extraction.categories] == ["d"]


def test_added_attributes_alone_are_extracted_and_joined(write, run) -> None:
    write("a.jsonl", {**DOCUMENTS, "failed": "bad"})
    write("b.jsonl", {"other": "of d"}, category="d")
    assert night(run(attributes="ax")).failed == 1
    write("c.jsonl", {"new": "fresh"})
    config = run(attributes="bax")
    made = night(config)
    assert made.extracted == 2 + 25
    assert made.failed == 1
    assert made.added_attributes == "c: b"
    assert extracted(config, made) == ["failed", "new"]  # whole
    added = pq.read_table(
        next(Path(config.output.path, "nights", made.name, "added/units").iterdir())
    )
    assert set(json.loads(added["record"][0].as_py())) == {"b"}
    found = rows(config)
    assert len(found) == 28
    assert [v["name"] for v in found["d3"]["values"]] == ["b", "a", "x"]
    for id, names, title in (
        ("d3", "bax", "title 3"),
        ("new", "bax", "fresh"),
        ("other", "a", "of d"),
    ):
        assert [*found[id]["record"].items()] == [(name, f"{name}:{title}") for name in names]
    assert night(config).nothing_new
    config = run(attributes="ax")  # removed again: of what has an answer no model is asked
    assert extracted(config, night(config)) == ["failed"]
    assert rows(config)["d3"]["record"] == {"a": "a:title 3", "x": "x:title 3"}


def test_any_other_change_asks_for_full_and_a_folder_of_an_ordinary_run_is_refused(
    write, run
) -> None:
    write("a.jsonl", {"x": "1"})
    night(run())
    config = with_keys(run(), decoding={"max_value_tokens": 3})
    with pytest.raises(ConfigError, match=r"decoding.max_value_tokens.*--full"):
        night(config)
    assert night(config, full=True).extracted == 1
    assert night(config).nothing_new is True
    manifest.claim(config, config.output.path)
    with pytest.raises(ConfigError, match="an ordinary run"):
        night(config)


def test_tables_of_typed_columns(write, run) -> None:
    config = with_keys(run(), output={"columns": "typed", "min_confidence": 0.5})
    for documents in ({"x": "1", "y": "1"}, {"x": "1", "y": "2"}):
        write("a.jsonl", documents)
        made = night(config)
        found = ds.dataset(files(config), format="parquet").to_table().select(["id", "a"])
        assert found["a"].to_pylist() == [f"a:{title}" for title in documents.values()]
    tree = json.loads(Path(config.output.path, "nights", made.name, "run.json").read_text())
    assert made.unchanged == 1
    assert tree["config"]["output"]["min_confidence"] == 0.5
    assert export(config.output.path, f"{config.output.path}.csv") == 2
    assert verify_table(config.output.path, config).passed
    with pytest.raises(
        ConfigError,
        match=r"with output\.columns=typed the table's columns as well\. .* with --full",
    ):
        night(with_keys(config, task=extraction(c="ab", d="a")))


def test_errors_are_tried_again_on_request(write, run) -> None:
    write("a.jsonl", {"x": "bad", "y": "good"})
    config = run()
    night(config)
    assert night(config).nothing_new
    assert extracted(config, night(config, retry_errors=True)) == ["x"]
    assert {id: row["status"] for id, row in rows(config).items()} == {"x": "error", "y": "ok"}
    printed = CliRunner().invoke(app, ["errors", config.output.path]).output
    assert re.search(r"(?s)1  it is bad.*x \(a.jsonl, at 0, attempts 1\): it is bad", printed)


def test_a_document_of_several_rows_is_ok_when_all_of_them_are(tmp_path) -> None:
    rows = {
        "source": ["a"] * 4,
        "row": [0, 0, 1, 1],
        "status": ["ok", "error", "ok", "ok"],
    }
    pq.write_table(pa.table(rows), tmp_path / "u.parquet")
    with Scratch() as scratch:
        nightly.table.add_answers(scratch, "answered", str(tmp_path), ["u.parquet"])
        found = list(scratch.rows("SELECT row, ok FROM answered ORDER BY row"))
    assert found == [{"row": 0, "ok": False}, {"row": 1, "ok": True}]


def test_a_night_that_was_cut_off_while_an_object_could_not_be_read_is_another(
    write, run, in_process, monkeypatch
):
    documents = {
        name: {f"{name}{n}": "x" for n in range(count)}
        for name, count in (("a", 4), ("b", 4), ("c", 8))
    }
    for name, titles_of in documents.items():  # b is in a unit with a, which is done alone
        write(f"{name}.jsonl", titles_of)
    config = with_keys(run(), input={"on_damaged": "skip"})
    forbidden = mock.Mock(side_effect=InputError("forbidden"))

    def in_file(unit):
        return unit.parts[-1].name

    in_process(1)
    with monkeypatch.context() as patched:

        def reads(unit, *rest):
            return (forbidden if in_file(unit) == "b.jsonl" else read_unit)(unit, *rest)

        patched.setattr(changes, "read_unit", reads)
        with pytest.raises(RunError, match="cut off"):
            night(config)
    in_process(None)
    assert after(config) == {
        **documents["a"],
        **documents["b"],
        **documents["c"],
    }
    assert len([*Path(config.output.path, "nights").iterdir()]) == 2


@pytest.mark.parametrize("late", [{}, {"late": "late"}])
def test_a_night_that_is_cut_off_goes_on_where_it_was(write, run, in_process, late) -> None:
    write("a.jsonl", DOCUMENTS)
    config = run()
    in_process(2)
    with pytest.raises(RunError, match="cut off"):
        night(config)
    assert not Path(config.output.path, "state.json").exists()
    done = {
        path: path.stat().st_mtime_ns
        for path in Path(config.output.path).glob("nights/*/units/*.parquet")
    }
    assert len(done) == 2
    in_process(None)
    if late:
        write("b.jsonl", late)
    made = night(config)
    assert titles(config) == {**DOCUMENTS, **late}
    assert {path: path.stat().st_mtime_ns for path in done} == done
    # Of another input: another night.
    assert ({path.parts[-3] for path in done} == {made.name}) is not bool(late)


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (nightly.table, "compose"),
        (index.Index, "write"),
        (nightly.NightRun, "_replace_state"),
        (nightly.NightRun, "_repair_list"),
    ],
)
def test_a_crash_while_the_table_is_made_loses_nothing(
    write, run, monkeypatch, owner, step
) -> None:
    write("a.jsonl", DOCUMENTS)
    config = run()
    night(config)
    changed = {**DOCUMENTS, "d7": "other"}
    write("a.jsonl", changed)
    real = [getattr(owner, step)] * (step == "_repair_list")  # the look at the start
    crash = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(
            owner, step, lambda *args, **keys: (real.pop() if real else crash)(*args, **keys)
        )
        with pytest.raises(KeyboardInterrupt):
            night(config)
    assert titles(config) == DOCUMENTS  # readers have the night before, whole
    assert night(config).nothing_new == (step == "_repair_list")
    assert titles(config) == changed


def test_started_twice_one_says_so_and_an_overtaken_one_changes_nothing(
    write, run, monkeypatch
) -> None:
    write("a.jsonl", DOCUMENTS)
    config = run()
    first = RunLease(config.output.path)
    with pytest.raises(RunError, match=f"session {first.id} has been working on it since"):
        night(config)
    first.end("complete")
    write_index = index.Index.write
    state = f"{config.output.path}/state.json"

    def interfering(*arguments, **keys):
        storage.put(state, b"{}")
        return write_index(*arguments, **keys)

    monkeypatch.setattr(index.Index, "write", interfering)
    with pytest.raises(RunError, match="completed a night in the meantime"):
        night(config)
    assert storage.read(state) == b"{}"


def test_verify_compares_the_table_with_the_input_of_now(tmp_path, write, run) -> None:
    write("1.jsonl", DOCUMENTS)
    write("2.jsonl", {"d7": "later", "bad": "bad"})
    config = run(unit_documents=10)
    night(config)
    found = load.load_run(config.output.path, [])
    result = verify_table(config.output.path, found)
    assert result.passed is True
    assert result.documents == 26
    assert result.found == 26
    assert result.failed == 1
    command = CliRunner().invoke(app, ["verify", config.output.path])
    assert command.exit_code == 0, command.output
    assert "26 documents" in command.output, command.output
    listed = Path(config.output.path, "current/files.txt")
    whole = files(config)
    listed.write_text("\n".join(whole[1:]))
    # One of the unit's ten is hidden.
    assert verify_table(config.output.path, found).missing.documents == 9
    listed.write_text("\n".join([*whole, str(tmp_path / "twice.parquet")]))
    pq.write_table(pq.read_table(whole[0]), tmp_path / "twice.parquet")
    assert verify_table(config.output.path, found).doubled.documents == 9
    listed.write_text("\n".join(whole))
    Path(whole[0]).write_bytes(b"PAR1")
    result = verify_table(config.output.path, found)
    assert result.damaged.units == 1
    assert result.missing.documents == 9
    assert result.passed is False


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_many_nights_of_random_changes_end_where_one_full_night_does(
    tmp_path, write, run, seed
) -> None:
    draw = random.Random(seed)
    config = run(unit_documents=3)
    for _ in range(6):
        for name in "abcd":
            file = f"{name}.{'parquet' if name == 'd' else 'jsonl'}"
            if draw.random() < 0.3:
                (tmp_path / "in" / file).unlink(missing_ok=True)
            elif draw.random() < 0.6:
                ids = draw.sample(range(20), draw.randrange(1, 12))
                write(file, {f"d{i}": draw.choice(["one", "two", "bad", "three"]) for i in ids})
        if not any((tmp_path / "in").glob("*")):
            write("a.jsonl", {"d0": "one"})
        lines = [
            pq.read_table(path).to_pylist()
            if path.suffix == ".parquet"
            else list(map(json.loads, path.open()))
            for path in sorted((tmp_path / "in").iterdir())
        ]
        want = {
            row["id"]: None if row["title"] == "bad" else row["title"]
            for found in lines
            for row in found
        }
        made = night(config)
        assert titles(config) == want
        assert made.documents == len(want)
        assert made.failed == [*want.values()].count(None)
        assert made.shadowed == sum(map(len, lines)) - len(want)


def shards(config: RunConfig) -> list[Shard]:
    """The shards of the index of the last successful night."""
    return records.read(NightState, f"{config.output.path}/state.json").shards


def test_only_shards_with_a_change_are_read_and_written(write, run, monkeypatch) -> None:
    documents = {f"{name}{number}": "x" for name in "abc" for number in range(9)}
    for name in "abc":
        write(f"{name}.jsonl", {id: "x" for id in documents if id[0] == name})
    config = run(unit_documents=3)
    night(config)
    before = shards(config)
    assert [shard.rows for shard in before] == [3] * 9
    read = []
    real = index.read_object

    def recorded(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(index, "read_object", recorded)
    write("b.jsonl", {f"b{number}": "y" if number == 4 else "x" for number in range(9)})
    made = night(config)
    assert extracted(config, made) == ["b4"]
    assert titles(config) == {**documents, "b4": "y"}
    after = shards(config)
    # Every unit of the rewritten object is another.
    kept = {shard.file for shard in before if shard.first == "" or shard.first[0] in "ac"}
    assert kept < {shard.file for shard in after}
    assert len({shard.file for shard in after} - {shard.file for shard in before}) == 3
    assert {path for path in read if "shard-" in path} == {
        f"{config.output.path}/{shard.file}" for shard in before if shard.file not in kept
    }
    assert (made.documents, made.changed, made.unchanged) == (27, 1, 26)
    assert verify_table(config.output.path, config).passed


def test_a_document_that_hides_one_of_a_far_shard_takes_its_whole_unit(write, run) -> None:
    # The ids of a unit lie far from each other, so its documents are in several shards.
    write("1.jsonl", {f"{'az'[number % 2]}{number}": "old" for number in range(24)})
    config = run(unit_documents=24)
    night(config)
    write("2.jsonl", {"a0": "new"})
    made = night(config)
    assert (made.extracted, made.shadowed, made.documents) == (1, 1, 24)
    assert titles(config)["a0"] == "new"
    assert [*titles(config).values()].count("old") == 23
    assert verify_table(config.output.path, config).passed


def test_an_index_of_the_first_versions_is_converted(write, run) -> None:
    write("a.jsonl", {**DOCUMENTS, "bad": "bad"})
    write("b.jsonl", {"d7": "later"})
    keep = with_keys(run(unit_documents=10), nightly={"removed": "keep"})
    night(keep)
    write("a.jsonl", DOCUMENTS)
    root = Path(keep.output.path)
    night(keep)
    state = records.read(NightState, str(root / "state.json"))
    with duckdb.connect() as database:
        units = [str(root / file) for file in state.units]
        files = [str(root / shard.file) for shard in state.shards]
        whole = database.sql(f"""
            SELECT d.* REPLACE (CASE WHEN winner THEN u.file ELSE d.file END AS file), u.live,
                coalesce(u.night, '{state.night}') AS night, 0 AS ordinal
            FROM read_parquet({files}) d JOIN read_parquet({units}) u USING (unit)
            """).to_arrow_table()
    assert len(whole) == 27
    assert whole["live"].to_pylist().count(False) == 1
    pq.write_table(whole, root / "old.parquet")
    old = replace(
        state,
        shards=[],
        units=[],
        index=["old.parquet"],
    )
    records.write(str(root / "state.json"), old)
    assert night(keep).nothing_new is True
    write("c.jsonl", {"c": "fresh"})
    made = night(keep)
    assert extracted(keep, made) == ["c"]
    wanted = {**DOCUMENTS, "d7": "later", "c": "fresh", "bad": None}
    assert titles(keep) == wanted
    assert made.failed == 1
    converted = records.read(NightState, str(root / "state.json"))
    assert sum(shard.rows for shard in converted.shards) == 28
    assert converted.index == []
    write("c.jsonl", {"c": "other", "d3": "late"})
    assert extracted(keep, night(keep)) == ["c", "d3"]
    assert titles(keep) == {**wanted, "c": "other", "d3": "late"}


@pytest.mark.parametrize("kind", ["footer", "page"])
def test_a_night_with_damaged_objects_does_what_it_can_and_ends_with_an_error(
    tmp_path, write, run, kind
) -> None:
    config = run()
    broken = tmp_path / "in/b.parquet"
    write("a.parquet", {"a": "1"})
    write("b.parquet", {"b": "1", "c": "1"})
    night(config)
    write("a.parquet", {"a": "2", "new": "2"})
    if kind == "page":
        damage_pages(write("b.parquet", {"b": "2", "c": "2"}), [0])
    else:
        broken.write_bytes(b"PAR1")
    words = (
        r"(?s)1 object of the input cannot be read; everything else was processed:\n"
        r"  \S+b.parquet: cannot be read.*"
    )
    more = (
        r"1 new, 1 changed.*2 documents of objects that cannot be read keep their rows.*"
        r"Every night retries"
    )
    with pytest.raises(RunError, match=words + more) as caught:
        night(config)
    assert getattr(caught.value, "exit_code", 1) == 1
    # What could be done stands in the table; what stood there of the damaged object does, too.
    assert titles(config) == {
        "a": "2",
        "new": "2",
        "b": "1",
        "c": "1",
    }
    found = verify_table(config.output.path, config)
    counts = (found.damaged_input.units, found.missing.documents, found.foreign.documents)
    assert counts == (1, 0, 0)
    assert found.passed is False
    for _ in range(2):  # it is not passed over because nothing else is new
        with pytest.raises(RunError, match=words + "nothing new since the night"):
            night(config)
    skip = with_keys(config, input={"on_damaged": "skip"})
    made = night(skip)
    assert made.nothing_new is True
    assert made.damaged.units == 1
    assert "b.parquet: cannot be read" in made.describe()
    assert verify_table(config.output.path, skip).passed
    write("b.parquet", {"b": "3", "c": "1"})
    assert extracted(config, night(config)) == ["b"]  # the answer of c was kept
    assert titles(config) == {
        "a": "2",
        "new": "2",
        "b": "3",
        "c": "1",
    }
    assert verify_table(config.output.path, config).passed
    broken.write_bytes(b"PAR1")
    assert night(skip).stale == 2
    broken.unlink()
    assert night(skip).removed == 2
    assert titles(config) == {"a": "2", "new": "2"}


def test_a_damaged_object_that_was_never_read_is_done_when_it_is_put_right(write, run) -> None:
    config = run()
    write("a.parquet", {"a": "1"})
    damage_pages(write("b.parquet", {"b": "1"}), [0])
    write("c.parquet", {"c": "1"})
    for _ in range(2):
        with pytest.raises(RunError, match=r"b.parquet: cannot be read"):
            night(config)
        assert titles(config) == {"a": "1", "c": "1"}  # which share its unit
    write("b.parquet", {"b": "1"})
    assert extracted(config, night(config)) == ["b"]
    assert titles(config) == {"a": "1", "b": "1", "c": "1"}


def test_a_night_that_can_read_nothing_leaves_the_table_alone(write, run, monkeypatch) -> None:
    config = run(on_damaged="skip")
    write("a.parquet", {"a": "1"})
    night(config)
    damage_pages(write("a.parquet", {"a": "2"}), [0])
    with pytest.raises(
        RunError,
        match=r"(?s)nothing of the input could be read, 1 object.*The table stays as it is",
    ):
        night(config)
    write("b.jsonl", {"b": "1"})
    with monkeypatch.context() as patch:
        away = mock.Mock(side_effect=storage.Unavailable("the store is overloaded"))
        patch.setattr(nightly.changes, "read_unit", away)
        with pytest.raises(RunError, match="overloaded"):  # an outage is no damage
            night(config)
    assert titles(config) == {"a": "1"}
    assert night(config).extracted == 1
    assert titles(config) == {"a": "1", "b": "1"}


def test_status_and_report_are_of_the_table_and_of_all_nights(tmp_path, write, run) -> None:
    config = run()
    root = str(tmp_path / "root")
    (tmp_path / "root/nights/2026-01-01").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no night has succeeded yet"):
        Watch(root)
    for documents, usd in (
        ({"a": "1", "b": "bad", "c": "3"}, 0.2),
        (
            {
                "a": "2",
                "b": "bad",
                "c": "3",
                "d": "4",
            },
            0.1,
        ),
    ):
        write("a.jsonl", documents)
        made = night(config)
        bill = Bill(f"session {made.name}", 1.0, usd, until=5.0, final=True)
        book.write(storage.join(root, "nights", made.name), bill)
    found = Watch(root).look()
    assert found.documents == 4
    assert found.failed == 1
    assert found.exact is True
    assert found.extracted == 5
    assert found.state == "complete"
    assert found.usd == pytest.approx(0.3)
    assert found.units == 2
    console = Console(file=io.StringIO(), width=120)
    console.print(terminal.render(found))
    # Of five extracted.
    says(
        console.file.getvalue(),
        "documents   4; 1 failed",
        "$60.00 per 1,000 documents",
        f"the table is that of the night {made.name}; 5 documents extracted in all nights",
    )
    says(
        page.render(data.load(root)),
        ">4<",
        ">3 answered<",
        ">1 failed (25%)<",
        ">$0.30<",
        "; 5 extracted<",
    )


@pytest.fixture
def nights(run):
    """Nights with a Delta table."""
    return with_keys(run(unit_documents=5), nightly={"delta": True})


def shown(config, version: int | None = None, **options) -> dict[str, str | None]:
    """id -> the title that its answer was made of, as DuckDB reads a version of the Delta table;
    every id once.
    """
    table = DeltaTable(
        config.output.path,
        version=version,
        **options,
    ).to_pyarrow_dataset()
    found = duckdb.from_arrow(table).select("id", "record").fetchall()
    made = {id: record and json.loads(record)["a"].removeprefix("a:") for id, record in found}
    assert len(made) == len(found)
    return made


def versions(config) -> list[tuple[int, str]]:
    """(version, night) of every commit, the first one first."""
    return [
        (c["version"], c["raypd.night"]) for c in reversed(DeltaTable(config.output.path).history())
    ]


def test_every_night_is_a_version_and_unchanged_objects_stay(tmp_path, nights, write) -> None:
    for name in "abc":
        write(f"{name}.jsonl", {f"{name}{i}": "x" for i in range(5)})
    first = night(nights)
    one = titles(nights)
    assert shown(nights) == one
    before = set(DeltaTable(nights.output.path).file_uris())
    write("b.jsonl", {f"b{i}": "y" if i == 2 else "x" for i in range(4)})
    (tmp_path / "in/c.jsonl").unlink()
    second = night(nights)
    assert shown(nights) == titles(nights) == {**dict.fromkeys([*one][:9], "x"), "b2": "y"}
    after = DeltaTable(nights.output.path)
    assert set(after.file_uris()) == set(files(nights))
    assert len(before & set(after.file_uris())) == 1  # a's, as it was
    assert shown(nights, version=0) == one
    assert night(nights).nothing_new is True
    assert versions(nights) == [(0, first.name), (1, second.name)]
    (tmp_path / "in/a.jsonl").unlink()  # and nothing is new
    night(nights)
    assert (
        shown(nights)
        == titles(nights)
        == {
            "b0": "x",
            "b1": "x",
            "b2": "y",
            "b3": "x",
        }
    )
    assert DeltaTable(nights.output.path).version() == 2
    assert sum(pa.table(after.get_add_actions())["num_records"].to_pylist()) == 9
    for path in Path(nights.output.path).rglob("*"):
        os.utime(path, (0, 1_700_000_000))  # 2023
    assert after.vacuum(dry_run=True, full=True) == []  # not even what is no object of the table
    assert verify_table(nights.output.path, nights).passed


def test_what_a_cut_off_night_did_not_commit_the_next_command_does(
    nights, write, monkeypatch
) -> None:
    write("a.jsonl", DOCUMENTS)
    first = night(nights)
    write("a.jsonl", {**DOCUMENTS, "d7": "other"})

    def crash(*args) -> None:
        if args[1] != first.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nightly.delta, "register", crash)
        with pytest.raises(KeyboardInterrupt):
            night(nights)
    assert titles(nights)["d7"] == "other"
    assert shown(nights) == DOCUMENTS  # the night before, whole
    result = CliRunner().invoke(app, ["verify", nights.output.path])
    words = (
        r"(?s)delta: the Delta table lacks \d objects of current/files.txt and shows \d that "
        r"it.*same command again"
    )
    assert result.exit_code == 1
    assert re.search(words, result.output) is not None
    assert night(nights).nothing_new
    assert shown(nights) == titles(nights)
    assert [version for version, _ in versions(nights)] == [0, 1]
    assert CliRunner().invoke(app, ["verify", nights.output.path]).exit_code == 0


def test_a_large_table_is_published_in_table_files(nights, write, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(published, "_MEBIBYTE", 3 << 10)
    monkeypatch.setattr(table_writer, "_ROW_GROUP_BYTES", 500)
    nights = with_keys(nights, output={"target_file_mb": 1})
    root = nights.output.path
    documents = {}
    for name in "abcdef":
        titles_of_file = {f"{name}{i}": "bad" if i == 7 else "x" for i in range(20)}
        documents |= titles_of_file
        write(f"{name}.jsonl", titles_of_file)
    first = night(nights)
    answered = {id: None if title == "bad" else title for id, title in documents.items()}
    before = files(nights)
    assert 3 <= len(before) < 24
    assert {str(Path(path).parent) for path in before} == {f"{root}/table/{first.name}"}
    assert shown(nights) == titles(nights) == answered
    actions = pa.table(DeltaTable(root).get_add_actions(flatten=True))
    assert actions["num_records"].to_pylist() == [pq.read_metadata(p).num_rows for p in before]
    # By these, readers of Delta tables skip files.
    for action in actions.to_pylist():
        ids = pq.read_table(f"{root}/{action['path']}")["id"].to_pylist()
        assert (action["min.id"], action["max.id"]) == (min(ids), max(ids))
    # raypd's own commands read them, too.
    assert verify_table(root, nights).passed
    for folder in (root, f"{root}/nights/{first.name}"):
        with pytest.raises(ConfigError, match="holds nightly runs"):
            compaction.compact_run(nights, folder)
    export(root, str(tmp_path / "answers.csv"))
    assert (tmp_path / "answers.csv").read_text().count("\n") == 121
    summary = dead_letters.summarize(root)
    assert (summary.documents, len(summary.reasons[0].examples)) == (6, 3)
    # A night that is cut off while it copies leaves the readers' files as they were.
    write("b.jsonl", {**{f"b{i}": "x" for i in range(20)}, "b3": "y"})
    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_file", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            night(nights)
    assert files(nights) == before
    assert shown(nights) == titles(nights) == answered
    night(nights)
    answered |= {"b3": "y", "b7": "x"}
    assert shown(nights) == titles(nights) == answered
    # Files without documents of b stay.
    kept = set(before) & set(files(nights))
    assert len(kept) >= 1
    assert kept < set(before)
    assert verify_table(root, nights).passed
    assert night(nights).nothing_new
    # The objects themselves are listed again with another setting and the next change.
    write("c.jsonl", {f"c{i}": "z" for i in range(20)})
    night(with_keys(nights, output={"target_file_mb": None}))
    assert all("/nights/" in path for path in files(nights))
    assert titles(nights) == shown(nights) == answered | {f"c{i}": "z" for i in range(20)}


def test_a_folder_of_nights_gets_a_delta_table_later_and_other_columns_with_full(
    nights, write, monkeypatch
) -> None:
    write("a.jsonl", DOCUMENTS)
    night(with_keys(nights, nightly={"delta": False}))
    assert not Path(nights.output.path, "_delta_log").exists()
    assert night(nights).nothing_new is True
    assert shown(nights) == DOCUMENTS
    # A raypd whose table has another column: beside objects that stay, then in place of all.
    real = nightly.table.write_object

    def scores(table):
        return pa.array([1.5] * len(table))

    def with_column(path, table):
        return real(path, table.append_column("score", scores(table)))

    monkeypatch.setattr(nightly.table, "write_object", with_column)
    changed = {id: title for id, title in DOCUMENTS.items() if id != "d3"}
    write("a.jsonl", changed)
    write("b.jsonl", {"b": "fresh"})  # its object is the run's own
    night(nights)
    table = DeltaTable(nights.output.path)
    changed["b"] = "fresh"
    assert shown(nights) == changed
    assert set(table.to_pyarrow_table()["score"].to_pylist()) == {None, 1.5}
    assert shown(nights, version=0) == DOCUMENTS
    night(nights, full=True)
    assert shown(nights) == changed
    assert "score" not in DeltaTable(nights.output.path).to_pyarrow_table().column_names


def test_a_commit_that_fails_says_so_and_the_table_is_there(nights, write, monkeypatch) -> None:
    write("a.jsonl", DOCUMENTS)
    log = Path(nights.output.path, "_delta_log")
    log.parent.mkdir(parents=True)
    log.write_text("no folder")
    with pytest.raises(
        RunError, match=r"its Delta table could not be updated: .*same command to retry"
    ):
        night(nights)
    assert titles(nights) == DOCUMENTS
    log.unlink()
    assert night(nights).nothing_new is True
    assert shown(nights) == DOCUMENTS
    (log / "00000000000000000000.json").write_text("{")
    assert "the Delta table cannot be read" in verify_table(nights.output.path, nights).delta
    shutil.rmtree(log)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'raypd\[delta\]'"):
        night(nights)


def test_two_commands_with_one_list_commit_it_once(nights, write) -> None:
    write("a.jsonl", DOCUMENTS)
    made = night(nights)
    for _ in range(2):
        delta.register(nights.output.path, made.name, files(nights))
    assert versions(nights) == [(0, made.name)]


def test_nights_on_s3_by_the_settings_of_raypd(nights, write, bucket, s3_server) -> None:
    write("a.jsonl", DOCUMENTS)
    config = with_keys(
        nights,
        output={"path": f"{bucket}/my nights"},
        storage={"options": {"endpoint_url": s3_server.url}},
    )
    night(config)
    write("a.jsonl", {**DOCUMENTS, "d7": "other"})
    night(config)
    options = {
        "storage_options": {
            "AWS_ENDPOINT_URL": s3_server.url,
            "AWS_ALLOW_HTTP": "true",
            **s3.environment(),
        }
    }
    assert shown(config, **options) == {**DOCUMENTS, "d7": "other"}
    assert shown(config, version=0, **options) == DOCUMENTS
    assert verify_table(config.output.path, config).passed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_delta_table_under_faults_has_every_night_once(
    nights, write, bucket, proxy, seed, s3_server
) -> None:
    """A commit whose answer is lost is not made twice."""
    config = with_keys(
        nights,
        output={"path": f"{bucket}/nights"},
        storage={"options": {"endpoint_url": proxy.url, "max_attempts": 6}},
    )
    wanted = dict(DOCUMENTS)
    for number in range(3):
        wanted[f"d{number}"] = f"other {number}"
        write("a.jsonl", wanted)
        proxy.faults = Faults(share=0.15, seed=10 * seed + number)
        for _ in range(20):
            try:
                night(config)
                break
            except (RunError, storage.StorageError):
                pass  # the same command again
        proxy.faults = Faults()
        # Not through the proxy: some calls of deltalake hold the lock that its threads need.
        options = {
            "AWS_ENDPOINT_URL": s3_server.url,
            "AWS_ALLOW_HTTP": "true",
            **s3.environment(),
        }
        assert shown(config, storage_options=options) == wanted
    history = DeltaTable(config.output.path, storage_options=options).history()
    assert [entry["version"] for entry in history] == [2, 1, 0]
    assert proxy.failed.total() > 5
    assert verify_table(config.output.path, config).passed


def config(*attributes) -> RunConfig:
    return run_config(extraction(x=attributes), model="fake")


@pytest.mark.parametrize(
    ("old", "new", "asked"),
    [
        ({"x": [A], "y": [A]}, {"x": [A, B, C], "y": [A]}, "x: b, c"),
        ({"x": [A, B]}, {"x": [{**A, "description": "in cm"}, B]}, "x: a"),  # another attribute
        ({"x": [A, B]}, {"x": [{**A, "type": "number"}, B]}, "x: a"),
        ({"x": [A, B]}, {"x": [B, A]}, "attributes were removed, and there is nothing to extract"),
        ({"x": [A, B]}, {"x": [B]}, "attributes were removed, and there is nothing to extract"),
        ({"x": [A]}, {"x": [B]}, "x: everything"),
        ({"x": [A]}, {"y": [A]}, "x: everything"),  # y had no documents with answers
    ],
)
def test_what_is_extracted_after_a_change(old, new, asked: str) -> None:
    before = {name: {"attributes": attributes} for name, attributes in old.items()}
    found = compare(
        before, {name: Category(attributes=attributes) for name, attributes in new.items()}
    )
    assert found.describe() == asked
    assert compare(before, {"x": Category(attributes=old["x"], description="other")}).anew == set(
        old
    )


def row(values: dict[str, str | None], **more: object):
    own = {
        "id": "1",
        "status": "ok",
        "error": None,
        "attempts": 1,
        "truncated": False,
        "category": "x",
    }
    listed = [{"name": k, "value": v} for k, v in values.items()]
    return {
        **own,
        "record": json.dumps(values) if values else None,
        "values": listed or None,
        **more,
    }


NEW = row(
    {"c": "3", "b": None},
    truncated=True,
    attempts=2,
)
FAILED = row({}, status="error", error="too long")


@pytest.mark.parametrize(
    ("attributes", "added", "record", "names", "own"),
    [
        (
            (C, B, A),
            NEW,
            {"c": "3", "b": None, "a": "1"},
            "cba",
            {"status": "ok", "truncated": True, "attempts": 2},
        ),
        (
            (A, B),
            FAILED,
            {"a": "1", "b": None},
            "a",
            {"status": "error", "error": "added attributes: too long"},
        ),
        # B is another, and nobody was asked.
        ((A, B), None, {"a": "1", "b": None}, "a", {"status": "ok"}),
        # Removed attributes leave the row without any run.
        ((A,), None, {"a": "1"}, "a", {"status": "ok"}),
    ],
)
def test_one_row_with_old_and_added_values_in_the_order_of_the_schema(
    attributes, added, record, names, own
) -> None:
    change = Change({"x": config(B, C).extraction.categories["x"].attributes})
    made = join(
        row(
            {
                "a": "1",
                "gone": "2",
                "b": "of the old b",
            }
        ),
        added,
        config(*attributes),
        change,
    )
    assert list(json.loads(made["record"]).items()) == list(record.items())
    assert [v["name"] for v in made["values"]] == list(names)
    assert own.items() <= made.items()


def test_a_row_of_a_category_that_is_gone_stays() -> None:
    old = row({"a": "1"}, category="gone")
    assert join(old, None, config(A), Change()) == old


def test_a_night_with_nothing_new_costs_a_listing_and_others_look_into_new_files_alone(
    run, write, monkeypatch
) -> None:
    config = run()
    write("a.parquet", {"1": "one", "2": "two"})
    write("b.parquet", {"3": "three"})
    night(config)
    looked = []
    inspect = planner.inspect

    def recorded(item, *arguments):
        looked.append(item.name)
        return inspect(item, *arguments)

    with monkeypatch.context() as patched:
        # Neither the plan nor the index is read.
        patched.setattr(planner, "plan", None)
        patched.setattr(changes, "read_input", None)
        assert night(config).nothing_new is True
    monkeypatch.setattr(planner, "inspect", recorded)
    write("c.parquet", {"4": "four"})
    assert after(config) == {
        "1": "one",
        "2": "two",
        "3": "three",
        "4": "four",
    }
    assert looked == ["c.parquet"]
    write("b.parquet", {"3": "other"})
    assert after(config)["3"] == "other"
    # These two share a unit.
    assert sorted(looked[1:]) == ["a.parquet", "b.parquet"]
