"""`raypd verify`: what is wrong is found and named, and a good output passes; `raypd errors`: by
reason.
"""

import csv
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypd import storage
from raypd.answering import components
from raypd.cli.main import app
from raypd.config import RunConfig
from raypd.dataset import planner, writer
from raypd.errors import ConfigError, RunError
from raypd.run import retry_policy
from raypd.run.failure_reasons import normalize, of_input
from raypd.run.load import load_run
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import QUESTION_ANSWERING
from raypd.verify import dead_letters, export, findings
from raypd.verify.verification import Verification, verify
from tests.faults.apart import apart, mount
from tests.processes import ended, start
from tests.runs import committed, run_config, run_here, says, with_values, write_jsonl


def look(run: RunConfig) -> Verification:
    return verify(run.output.path, load_run(run.output.path, []), threads=2)


def objects(run: RunConfig) -> list[Path]:
    return sorted(Path(run.output.path).glob("units/*.parquet"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **summary: int) -> None:
    """Writes an object again with other rows and a summary that fits them."""
    kept = writer.read_summary(str(path.parents[1]), path.stem)
    table = change(pq.read_table(path))
    ok, failed = writer.count_documents(table)
    made = replace(
        kept,
        **{
            "ok": ok,
            "failed": failed,
            "documents": ok + failed,
            **summary,
        },
    )
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
    assert result.units == 4
    assert result.objects == 4
    assert result.documents == 28
    assert result.found == 28
    assert result.passed is True
    assert result.ok == 25
    assert result.failed == 3
    # Both files number their documents from 0.
    assert result.repeated_ids.units == 3
    assert result.repeated_ids.documents == 6
    assert result.doubled.documents == 0
    text = findings.describe(result)
    assert "3 ids of the input belong to 6 documents" in text
    assert text.splitlines()[-1].startswith("ok: every document of the input")


def test_an_object_that_is_gone_is_missing_until_the_run_is_resumed(run, tmp_path) -> None:
    command = CliRunner()
    gone = objects(run)[0]
    gone.unlink()
    done = command.invoke(app, ["verify", run.output.path, "--json"])
    tree = json.loads(done.output)
    assert done.exit_code == 1
    assert tree["passed"] is False
    assert tree["missing"]["documents"] == 10
    assert tree["missing"]["units"] == 1
    assert gone.stem in tree["missing"]["examples"][0]
    planner.plan(run).keep(run.output.path)
    done = command.invoke(
        app,
        [
            "export",
            run.output.path,
            str(tmp_path / "a.csv"),
        ],
    )
    says(done.output, "18 documents", "incomplete: 3 of 4 units are committed")
    (tmp_path / "in").rename(tmp_path / "moved")
    done = command.invoke(app, ["verify", run.output.path, f"input.path={tmp_path / 'moved'}"])
    says(done.output, "missing: 10 documents", "run the same command again")
    (tmp_path / "moved").rename(tmp_path / "in")
    run_here(run)
    done = command.invoke(app, ["verify", run.output.path])
    assert done.exit_code == 0
    assert done.output.splitlines()[-2][:3] == "ok:"
    assert done.output.splitlines()[-1].startswith("Next: ")


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
    assert result.passed is False
    assert result.damaged.units == 1
    says(result.damaged.examples[0], path.name, "delete")


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
        path.write_bytes(whole)
        assert rows.equals(writer.read_table(run.output.path, path.stem)[1]), at


def test_an_object_with_other_columns_or_a_summary_of_other_rows_is_damaged(run) -> None:
    first, second = objects(run)[:2]
    rewrite(first, lambda table: table.rename_columns([*table.column_names[:-1], "answes"]))
    result = look(run)
    assert result.damaged.units == 1
    assert result.missing.documents == 0
    assert "columns differ from those of most" in result.damaged.examples[0]
    rewrite(second, lambda table: table, ok=3)
    damaged = look(run).damaged
    assert damaged.units == 2
    assert "its summary says" in damaged.examples[0]


def place(folder: Path, line: int) -> int:
    """The byte at which a line of in/a.jsonl begins."""
    return sum(map(len, (folder / "in/a.jsonl").read_bytes().splitlines(keepends=True)[:line]))


def test_rows_that_are_missing_doubled_or_foreign_inside_an_object(run, tmp_path) -> None:
    lost, doubled, strange = objects(run)[:3]
    rewrite(lost, lambda table: table.slice(1))
    rewrite(doubled, lambda table: pa.concat_tables([table, table.slice(4, 1)]))
    rewrite(
        strange, lambda table: with_values(table, "id", ["nobody", *table["id"].to_pylist()[:-1]])
    )
    result = look(run)
    assert result.passed is False
    assert result.doubled.documents == 1
    assert result.doubled.examples == [f"14 (a.jsonl, at {place(tmp_path, 14)})"]
    # Every id of the third object stands one row too low: rows of other documents, and none of its
    # own.
    assert result.foreign.documents == 5
    assert result.missing.documents == 1 + 5
    assert result.missing.examples[0] == "0 (a.jsonl, at 0)"
    assert f"nobody (a.jsonl, at {place(tmp_path, 20)})" in result.foreign.examples


def test_an_object_that_the_input_does_not_have_is_foreign_and_doubles_are_found(
    run, tmp_path, config
) -> None:
    # The same documents in other units.
    other = config(str(tmp_path / "in"), "other", unit_documents=7)
    run_here(other)
    copied = objects(other)[0]
    shutil.copy(copied, objects(run)[0].parent)
    result = look(run)
    assert result.passed is False
    assert result.foreign.units == 1
    assert result.foreign.documents == 0
    assert result.doubled.documents == 7
    assert copied.stem in result.doubled.examples[0]
    for path in objects(run):
        if path.name != copied.name:
            path.unlink()
    result = look(run)  # alone it doubles nothing, and is no unit of the run either
    assert result.doubled.documents == 0
    assert result.foreign.units == 1
    assert result.missing.documents == 28


def test_an_input_that_changed_after_the_run(run, tmp_path) -> None:
    write_jsonl(tmp_path / "in/b.jsonl", ["changed"] * 3)
    write_jsonl(tmp_path / "in/c.jsonl", ["new"] * 2)
    result = look(run)
    assert result.missing.documents == 5
    assert result.doubled.documents == 0
    assert result.foreign.units == 1
    assert "new output.path" in findings.describe(result)


def test_an_object_that_cannot_be_read_while_it_is_compared(run, tmp_path, between) -> None:
    between((tmp_path / "in/b.jsonl").unlink)
    result = look(run)
    assert result.passed is False
    assert result.unreadable.units == 1
    assert "b.jsonl" in result.unreadable.examples[0]


def test_files_in_the_units_folder_that_are_no_units(run) -> None:
    folder = objects(run)[0].parent
    (folder / ".tmp-host-1-x").write_bytes(b"PAR1")  # as a dead writer leaves it: no fault
    assert look(run).passed
    (folder / "notes.txt").write_text("x")
    result = look(run)
    assert result.passed is False
    assert "notes.txt" in result.foreign.examples[0]


def test_a_run_that_cannot_be_read_or_whose_answers_would_be_others(run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="now has the fingerprint"):
        load_run(run.output.path, ["decoding.max_value_tokens=3"])
    (tmp_path / "out/run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run.json: cannot be read"):
        load_run(run.output.path, [])


def test_a_generated_answer_that_is_not_of_the_input_stands_twice_in_an_object(
    tmp_path, config
) -> None:
    tree = config(str(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]))).model_dump(
        include={"input", "output"}
    )
    tree["task"] = {"kind": "generation", "prompt_column": "title"}
    fast = {"load_seconds": 0, "step_seconds": 0}
    run = RunConfig.model_validate({**tree, "model": {"name": "fake", "fake": fast}})
    run_here(run, components.build)
    assert look(run).passed
    (path,) = objects(run)
    strange = with_values(pq.read_table(path).slice(0, 1), "row", [77])
    rewrite(path, lambda table: pa.concat_tables([table, table.slice(1), strange, strange]))
    result = look(run)
    assert result.doubled.documents == 1
    assert result.foreign.documents == 1
    assert result.missing.documents == 0
    assert result.foreign.examples == ["0 (a.jsonl, at 77)"]


@pytest.fixture
def faulty(tmp_path: Path, config) -> RunConfig:
    titles = ["a"] * 30
    titles[3] = titles[17] = ""
    titles[12] = "program"
    titles[13] = "plan"
    made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=10)
    run_here(made)
    return made


def test_reasons_are_grouped_without_their_numbers_and_places(faulty) -> None:
    summary = dead_letters.summarize(faulty.output.path)
    assert summary.documents == sum(r.documents for r in summary.reasons)
    found = {r.reason: (r.documents, r.can_change) for r in summary.reasons}
    assert found["no text in title"] == (2, False)
    assert found["ValueError: the program failed"][1]
    assert found["ValueError: the plan failed"] == (1, True)
    counts = [r.documents for r in summary.reasons]
    assert counts == sorted(counts, reverse=True)
    text = findings.describe_errors(summary)
    assert "2  no text in title  [caused by the input]" in text
    assert "3 (a.jsonl, at 72, attempts 1): a.jsonl, byte 72: no text in title" in text


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("a.jsonl:13: not JSON: line 1 column 30 (char 29)", "not JSON: line N column N (char N)"),
        ("a.jsonl, byte 13: not JSON", "not JSON"),
        ("ValueError: b.jsonl:13: no", "ValueError: b.jsonl:N: no"),
        ("a.jsonl: not UTF-8: invalid byte", "not UTF-8: invalid byte"),
        ("b.jsonl:13: not JSON", "b.jsonl:N: not JSON"),
        ("the document has 1,234.5 bytes", "the document has N bytes"),
        (
            "the document has 2,345 bytes; input.max_document_bytes is 1000",
            "the document has N bytes; input.max_document_bytes is 1000",
        ),
        ("more than 65536 bytes of blank lines at 17", "more than 65536 bytes of blank lines at N"),
        ("it can be another, such as cp1252", "it can be another, such as cp1252"),
        ("not iso8859-15 at 7 of doc12", "not iso8859-15 at N of docN"),
        ("object at 0x7f3a21 is gone", "object at X is gone"),
        (None, "no reason"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'", "KeyError: 'x'"),
        (
            "a.jsonl, byte 13: not UTF-8: invalid start byte at byte 21 of UTF-16",
            "not UTF-8: invalid start byte at byte N of UTF-16",
        ),
    ],
)
def test_reasons_without_places_and_which_are_of_the_input(reason, expected) -> None:
    assert normalize("a.jsonl", reason) == expected
    assert of_input("a.jsonl", reason) == (reason or "").startswith("a.jsonl")


def test_units_without_a_commit_are_listed_and_finished_ones_are_not(faulty) -> None:
    done = sorted(writer.committed(faulty.output.path))[0]
    storage.put(retry_policy.failure_path(faulty.output.path, done), b"RuntimeError: old")
    failed = retry_policy.failure_path(faulty.output.path, "other-unit")
    storage.put(failed, b"Traceback\nRuntimeError: the device is gone\n")
    storage.put(
        retry_policy.failure_path(faulty.output.path, retry_policy.START), b"RuntimeError: no unit"
    )
    summary = dead_letters.summarize(faulty.output.path)
    assert summary.units == [{"unit": "other-unit", "reason": "RuntimeError: the device is gone"}]
    assert "other-unit: RuntimeError" in findings.describe_errors(summary)


def test_a_document_counts_once_however_many_of_its_questions_failed(tmp_path) -> None:
    reasons = ["question 1 (0): no", "question 2 (1): no", "x.jsonl:3: no question"]
    records = [Record(0, {"question_id": str(n)}, reason) for n, reason in enumerate(reasons)]
    config = run_config("question_answering")
    document = Document(0, "a", source="x.jsonl")
    run = committed(tmp_path / "out", config, [document], records, QUESTION_ANSWERING)
    summary = dead_letters.summarize(run)
    assert summary.documents == 1
    assert [group.documents for group in summary.reasons] == [1, 1]
    assert summary.retried == 1
    assert write_letters(run, tmp_path / "errors.csv") == 1


def write_letters(run: str, path: Path) -> int:
    return export.write_file(str(path), dead_letters.SCHEMA, dead_letters.letters(run))


def test_all_of_them_into_a_file(faulty, tmp_path) -> None:
    readers = {"csv": csv.DictReader, "jsonl": lambda lines: map(json.loads, lines)}
    for suffix in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"errors.{suffix}"
        count = write_letters(faulty.output.path, path)
        read = readers.get(suffix)
        rows = list(read(path.open(newline=""))) if read else pq.read_table(path).to_pylist()
        assert count == len(rows) == dead_letters.summarize(faulty.output.path).documents
        assert {str(row["id"]) for row in rows} >= {"3", "12", "13", "17"}
        assert set(rows[0]) == {"id", "source", "row", "attempts", "reason", "unit"}
    assert [p.name for p in tmp_path.iterdir() if ".part" in p.name] == []
    for path, message in (
        ("errors.txt", "ends in .csv, .jsonl, .parq"),
        ("no/such/errors.csv", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_letters(faulty.output.path, tmp_path / path)


def test_no_cell_or_header_of_a_csv_begins_as_a_formula(tmp_path) -> None:
    texts = {
        "=1+1": "'=1+1",
        "\t=1+1": "'\t=1+1",
        "\n=1+1": "'\n=1+1",
        "  @x": "'  @x",
        "\uff1d1": "'\uff1d1",
        "\u00a0+a": "'\u00a0+a",
        "\tx": "'\tx",
        "-3.5": "-3.5",
        "+49 30": "'+49 30",
        "a=b": "a=b",
    }
    schema = pa.schema(
        {
            "source": "string",
            "row": "int64",
            "=color": "string",
            "rows": "string",
        }
    )
    rows = [
        {"source": "a", "row": number, "=color": text, "rows": "x"}
        for number, text in enumerate(texts)
    ]
    table = pa.Table.from_pylist(rows, schema)
    assert export.write_file(str(tmp_path / "a.csv"), schema, [table]) == len(texts)
    with (tmp_path / "a.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == ["source", "row", "'=color", "rows"]
    assert [row["'=color"] for row in written] == list(texts.values())
    export.write_file(str(tmp_path / "a.parquet"), schema, [table])
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == rows


def test_whole_numbers_of_a_csv_have_no_fraction(tmp_path) -> None:
    schema = pa.schema(
        {
            "source": pa.string(),
            "row": pa.int64(),
            "Salary": pa.float64(),
            "Sizes": pa.list_(pa.float64()),
            "Salary__confidence": pa.float32(),
        }
    )
    numbers = [36.0, 0.5, None, -0.0, 1e300]
    rows = [
        {
            "source": "a",
            "row": place,
            "Salary": number,
            "Sizes": [2.0, 2.5],
            "Salary__confidence": 0.7,
        }
        for place, number in enumerate(numbers)
    ]
    export.write_file(str(tmp_path / "a.csv"), schema, [pa.Table.from_pylist(rows, schema)])
    with (tmp_path / "a.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["Salary"] for row in written] == ["36", "0.5", "", "0", "1e+300"]
    assert {row["Sizes"] for row in written} == {"[2, 2.5]"}
    assert {row["Salary__confidence"] for row in written} == {"0.7"}


def test_a_file_that_a_killed_export_left_is_removed_by_the_next(faulty, tmp_path) -> None:
    host = os.uname().nodename
    orphan = tmp_path / f"errors.csv.part-{host}-99999999-aa"
    other_host = tmp_path / "errors.csv.part-elsewhere-99999999-aa"
    other_file = tmp_path / f"more.csv.part-{host}-99999999-aa"
    live = tmp_path / f"errors.csv.part-{host}-{os.getpid()}-aa"
    for path in (orphan, other_host, other_file, live):
        path.touch()
    write_letters(faulty.output.path, tmp_path / "errors.csv")
    assert not orphan.exists()
    assert other_host.exists()
    assert other_file.exists()
    assert live.exists()


def fill_tmpdir(folder: Path) -> str:
    """Runs commands whose TMPDIR is full, in a namespace of their own; what they print."""
    full = folder / "full"
    full.mkdir()
    mount(str(full), "size=64k")
    (full / "fill").write_bytes(b"x" * 60_000)
    commands = (
        ["verify", str(folder / "out")],
        ["export", str(folder / "out"), str(folder / "answers.csv")],
        ["extract", str(folder / "run.yaml")],
    )
    output = ""
    for command in commands:
        output += ended(start("-m", "raypd", *command, TMPDIR=str(full)), code=1)
    return output


def test_a_full_tmpdir_is_named_by_every_command(run, tmp_path) -> None:
    tree = {
        "input": {"path": str(tmp_path / "in"), "text_columns": ["title"]},
        "output": {"path": str(tmp_path / "new")},
        "task": {"kind": "extraction", "categories": {"c": {"attributes": [{"name": "Color"}]}}},
        "model": {"name": "fake"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    output = apart(fill_tmpdir, tmp_path)
    assert "Traceback" not in output
    words = f"error: temporary files cannot be written to {tmp_path / 'full'} (0 MiB are free"
    assert output.count(words) == 3


def test_the_command(faulty, tmp_path, config) -> None:
    command = CliRunner()
    done = command.invoke(app, ["errors", faulty.output.path])
    assert done.exit_code == 0
    assert "with --retry-errors to retry" in done.output
    tree = json.loads(command.invoke(app, ["errors", faulty.output.path, "--json"]).output)
    command.invoke(
        app,
        [
            "errors",
            faulty.output.path,
            "-o",
            str(tmp_path / "errors.csv"),
        ],
    )
    every = (tmp_path / "errors.csv").read_text().splitlines()
    assert len(every) == 1 + tree["documents"]
    assert every[0] == "id,source,row,attempts,reason,unit"
    good = config(str(write_jsonl(tmp_path / "good.jsonl", ["a"])), "good")
    run_here(good)
    assert "no document failed" in command.invoke(app, ["errors", good.output.path]).output
