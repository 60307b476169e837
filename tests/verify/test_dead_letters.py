"""`raypd errors`: failed documents by reason, and units that nobody could finish."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypd import storage
from raypd.cli.main import app
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.errors import ConfigError
from raypd.run import retry_policy
from raypd.verify import dead_letters, findings
from raypd.verify.dead_letters import normalize, of_input
from tests.runs import run_here, write_jsonl


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    titles = ["a"] * 30
    titles[3] = titles[17] = ""
    titles[12], titles[13] = "program", "plan"
    made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=10)
    run_here(made)
    return made


def test_reasons_are_grouped_without_their_numbers_and_places(run) -> None:
    summary = dead_letters.summarize(run.output.path)
    assert summary.documents == sum(r.documents for r in summary.reasons)
    found = {r.reason: (r.documents, r.can_change) for r in summary.reasons}
    assert found["no text in title"] == (2, False)
    assert found["ValueError: the program failed"][1]
    assert found["ValueError: the plan failed"] == (1, True)
    counts = [r.documents for r in summary.reasons]
    assert counts == sorted(counts, reverse=True)
    text = findings.describe_errors(summary)
    assert "2  no text in title  [as it stands in the input]" in text
    assert "3 (a.jsonl, at 72, attempts 1): a.jsonl, byte 72: no text in title" in text


@pytest.mark.parametrize(("reason", "expected"), [
    ("a.jsonl:13: not JSON: line 1 column 30 (char 29)", "not JSON: line N column N (char N)"),
    ("a.jsonl, byte 13: not JSON", "not JSON"), ("ValueError: b.jsonl:13: no", "ValueError: b.jsonl:N: no"),
    ("b.jsonl:13: not JSON", "b.jsonl:N: not JSON"), ("the document has 1,234.5 bytes", "the document has N bytes"),
    ("object at 0x7f3a21 is gone", "object at X is gone"), (None, "no reason"),
    ("Traceback (most recent call last):\n  File\nKeyError: 'x'", "KeyError: 'x'"),
    ("a.jsonl, byte 13: not UTF-8: invalid start byte at byte 21 of UTF-16",
     "not UTF-8: invalid start byte at byte N of UTF-16")])  # fmt: skip
def test_reasons_without_places_and_which_are_of_the_input(reason, expected) -> None:
    assert normalize("a.jsonl", reason) == expected
    assert of_input("a.jsonl", reason) == (reason or "").startswith("a.jsonl")


def test_units_without_a_commit_are_listed_and_finished_ones_are_not(run) -> None:
    done = sorted(writer.committed(run.output.path))[0]
    storage.put(retry_policy.failure_path(run.output.path, done), b"RuntimeError: old")
    failed = retry_policy.failure_path(run.output.path, "other-unit")
    storage.put(failed, b"Traceback\nRuntimeError: the device is gone\n")
    summary = dead_letters.summarize(run.output.path)
    assert summary.units == [{"unit": "other-unit", "reason": "RuntimeError: the device is gone"}]
    assert "other-unit: RuntimeError" in findings.describe_errors(summary)


def test_all_of_them_into_a_file(run, tmp_path) -> None:
    readers = {"csv": csv.DictReader, "jsonl": lambda lines: map(json.loads, lines)}
    for suffix in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"errors.{suffix}"
        count = findings.write_letters(run.output.path, str(path))
        read = readers.get(suffix)
        rows = list(read(path.open(newline=""))) if read else pq.read_table(path).to_pylist()
        assert count == len(rows) == dead_letters.summarize(run.output.path).documents
        assert {str(row["id"]) for row in rows} >= {"3", "12", "13", "17"}
        assert set(rows[0]) == {"id", "source", "row", "attempts", "reason", "unit"}
    assert [p.name for p in tmp_path.iterdir() if ".part" in p.name] == []
    for path, message in (("errors.txt", "ends in .csv, .jsonl, .parq"), ("no/such/errors.csv", "cannot be written")):
        with pytest.raises(ConfigError, match=message):
            findings.write_letters(run.output.path, str(tmp_path / path))


def test_the_command(run, tmp_path, config) -> None:
    command = CliRunner()
    done = command.invoke(app, ["errors", run.output.path])
    assert done.exit_code == 0
    assert "--retry-errors tries" in done.output
    tree = json.loads(command.invoke(app, ["errors", run.output.path, "--json"]).output)
    every = command.invoke(app, ["errors", run.output.path, "--all"]).output.splitlines()
    assert len(every) == 1 + tree["documents"]
    assert every[0].split("\t") == ["id", "source", "row", "attempts", "reason", "unit"]
    good = config(str(write_jsonl(tmp_path / "good.jsonl", ["a"])), "good")
    run_here(good)
    assert command.invoke(app, ["errors", good.output.path]).output.endswith("no dead letters\n")
