"""`raypd verify`: what is wrong with an output is found and named, and a good one passes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypd.answering import components
from raypd.cli.main import app
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.errors import ConfigError, RunError
from raypd.run.load import load_run
from raypd.verify import findings
from raypd.verify.verification import Verification, verify
from tests.runs import run_here, with_values, write_jsonl


def look(run: RunConfig) -> Verification:
    return verify(run.output.path, load_run(run.output.path, []), threads=2)


def objects(run: RunConfig) -> list[Path]:
    return sorted(Path(run.output.path).glob("units/*.parquet"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **summary: int) -> None:
    """Writes an object again with other rows and a summary that fits them."""
    kept = writer.read_summary(str(path.parents[1]), path.stem)
    table = change(pq.read_table(path))
    ok, failed = writer.count_documents(table)
    made = replace(kept, **{"ok": ok, "failed": failed, "documents": ok + failed, **summary})
    path.unlink()
    assert writer.commit(str(path.parents[1]), table, made)


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """A finished run: two files, 25 and 3 documents, in 4 units; two documents failed."""
    write_jsonl(tmp_path / "in/a.jsonl", ["a"] * 22 + ["", "finish", "b"])
    write_jsonl(tmp_path / "in/b.jsonl", ["a"] * 3)
    made = config(str(tmp_path / "in"), unit_documents=10)
    run_here(made)
    return made


def test_a_good_run_passes_and_ids_that_the_input_repeats_are_told_apart(run) -> None:
    result = look(run)
    assert result.passed
    assert (result.units, result.objects, result.documents, result.found) == (4, 4, 28, 28)
    assert (result.ok, result.failed) == (25, 3)
    # Both files number their documents from 0.
    assert (result.repeated_ids.units, result.repeated_ids.documents) == (3, 6)
    assert result.doubled.documents == 0
    text = findings.describe(result)
    assert "3 ids of the input stand on 6 documents" in text
    assert text.splitlines()[-1].startswith("ok: every document of the input")


def test_an_object_that_is_gone_is_missing_until_the_run_is_resumed(run, tmp_path) -> None:
    command = CliRunner()
    gone = objects(run)[0]
    gone.unlink()
    done = command.invoke(app, ["verify", run.output.path, "--json"])
    tree = json.loads(done.output)
    assert (done.exit_code, tree["passed"]) == (1, False)
    assert (tree["missing"]["documents"], tree["missing"]["units"]) == (10, 1)
    assert gone.stem in tree["missing"]["examples"][0]
    (tmp_path / "in").rename(tmp_path / "moved")
    done = command.invoke(app, ["verify", run.output.path, f"input.path={tmp_path / 'moved'}"])
    assert "missing: 10 documents" in done.output
    assert "run the same command again" in done.output
    (tmp_path / "moved").rename(tmp_path / "in")
    run_here(run)
    done = command.invoke(app, ["verify", run.output.path])
    assert (done.exit_code, done.output.splitlines()[-1][:3]) == (0, "ok:")


@pytest.mark.parametrize("where", ["middle", "footer", "cut"])
def test_a_damaged_object_is_named(run, where) -> None:
    path = objects(run)[1]
    data = bytearray(path.read_bytes())
    if where == "cut":
        data = data[:-20]
    else:
        data[len(data) - 6 if where == "footer" else 60] ^= 0xFF
    path.write_bytes(data)
    result = look(run)
    assert (result.passed, result.damaged.units) == (False, 1)
    assert path.name in result.damaged.examples[0]
    assert "delete" in result.damaged.examples[0]


def test_every_byte_of_the_rows_is_under_a_checksum(run) -> None:
    path = objects(run)[0]
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(4, footer, 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        # Of a page's header some bits are of no consequence: then the rows must be what they were.
        try:
            _, rows = writer.read_table(run.output.path, path.stem)
        except RunError:
            continue
        else:
            path.write_bytes(whole)
            assert rows.equals(writer.read_table(run.output.path, path.stem)[1]), at


def test_an_object_with_other_columns_or_a_summary_of_other_rows_is_damaged(run) -> None:
    first, second = objects(run)[:2]
    rewrite(first, lambda table: table.rename_columns([*table.column_names[:-1], "answes"]))
    result = look(run)
    assert (result.damaged.units, result.missing.documents) == (1, 0)
    assert "other columns than most" in result.damaged.examples[0]
    rewrite(second, lambda table: table, ok=3)
    result = look(run)
    assert result.damaged.units == 2
    assert "its summary says" in result.damaged.examples[0]


def place(folder: Path, line: int) -> int:
    """The byte at which a line of in/a.jsonl begins."""
    return sum(map(len, (folder / "in/a.jsonl").read_bytes().splitlines(keepends=True)[:line]))


def test_rows_that_are_missing_doubled_or_foreign_inside_an_object(run, tmp_path) -> None:
    lost, doubled, strange = objects(run)[:3]
    rewrite(lost, lambda table: table.slice(1))
    rewrite(doubled, lambda table: pa.concat_tables([table, table.slice(4, 1)]))
    rewrite(strange, lambda table: with_values(table, "id", ["nobody", *table["id"].to_pylist()[:-1]]))
    result = look(run)
    assert not result.passed
    assert result.doubled.documents == 1
    assert result.doubled.examples == [f"14 (a.jsonl, at {place(tmp_path, 14)})"]
    # Every id of the third object stands one row too low: rows of other documents, and none of its own.
    assert result.foreign.documents == 5
    assert result.missing.documents == 1 + 5
    assert result.missing.examples[0] == "0 (a.jsonl, at 0)"
    assert f"nobody (a.jsonl, at {place(tmp_path, 20)})" in result.foreign.examples


def test_an_object_that_the_input_does_not_have_is_foreign_and_doubles_are_found(run, tmp_path, config) -> None:
    other = config(str(tmp_path / "in"), "other", unit_documents=7)  # the same documents in other units
    run_here(other)
    copied = objects(other)[0]
    shutil.copy(copied, objects(run)[0].parent)
    result = look(run)
    assert not result.passed
    assert result.foreign.units == 1
    assert (result.foreign.documents, result.doubled.documents) == (0, 7)
    assert copied.stem in result.doubled.examples[0]
    for path in objects(run):
        if path.name != copied.name:
            path.unlink()
    result = look(run)  # alone it doubles nothing, and is no unit of the run either
    assert (result.doubled.documents, result.foreign.units, result.missing.documents) == (0, 1, 28)


def test_an_input_that_changed_after_the_run(run, tmp_path) -> None:
    write_jsonl(tmp_path / "in/b.jsonl", ["changed"] * 3)
    write_jsonl(tmp_path / "in/c.jsonl", ["new"] * 2)
    result = look(run)
    assert (result.missing.documents, result.doubled.documents, result.foreign.units) == (5, 0, 1)
    assert "new output.path" in findings.describe(result)


def test_an_object_that_cannot_be_read_while_it_is_compared(run, tmp_path, between) -> None:
    between((tmp_path / "in/b.jsonl").unlink)
    result = look(run)
    assert not result.passed
    assert result.unreadable.units == 1
    assert "b.jsonl" in result.unreadable.examples[0]


def test_files_in_the_units_folder_that_are_no_units(run) -> None:
    folder = objects(run)[0].parent
    (folder / ".tmp-host-1-x").write_bytes(b"PAR1")  # as a dead writer leaves it: no fault
    assert look(run).passed
    (folder / "notes.txt").write_text("x")
    result = look(run)
    assert not result.passed
    assert "notes.txt" in result.foreign.examples[0]


def test_a_run_that_cannot_be_read_or_whose_answers_would_be_others(run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="makes the fingerprint"):
        load_run(run.output.path, ["decoding.max_value_tokens=3"])
    (tmp_path / "out/run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run.json: cannot be read"):
        load_run(run.output.path, [])


def test_a_generated_answer_that_is_not_of_the_input_stands_twice_in_an_object(tmp_path, config) -> None:
    tree = config(str(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]))).model_dump(include={"input", "output"})
    tree["task"] = {"kind": "generation", "prompt_column": "title"}
    fast = {"load_seconds": 0, "step_seconds": 0}
    run = RunConfig.model_validate({**tree, "model": {"name": "fake", "fake": fast}})
    run_here(run, components.build)
    assert look(run).passed
    (path,) = objects(run)
    strange = with_values(pq.read_table(path).slice(0, 1), "row", [77])
    rewrite(path, lambda table: pa.concat_tables([table, table.slice(1), strange, strange]))
    result = look(run)
    assert (result.doubled.documents, result.foreign.documents, result.missing.documents) == (1, 1, 0)
    assert result.foreign.examples == ["0 (a.jsonl, at 77)"]
