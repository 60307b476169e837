"""Commits: written once, whole, with one schema; and the folder that they live in."""

import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd import storage
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.run.unit import UnitSummary
from raypd.tasks import columns
from raypd.tasks.base import Document, Record

COLUMNS = pa.schema([("answer", pa.string()), ("price", pa.float64())])
DOCUMENTS = [
    Document(0, "a", source="a.jsonl", row=10),
    Document(1, "b", source="a.jsonl", row=11),
    Document(2, "c", error="a.jsonl, byte 12: not JSON", source="a.jsonl", row=12),
]


def table(records: list[Record]) -> pa.Table:
    return writer.make_table(DOCUMENTS, records, COLUMNS, 1)


def test_rows_are_the_input_s_in_order_with_errors_for_values_that_cannot_be_written() -> None:
    records = [Record(1, {"answer": "B"}), Record(0, {"answer": "A", "price": 2.5})]
    rows = (unit_table := table(records)).to_pylist()
    assert [(r["id"], r["row"], r["status"], r["answer"]) for r in rows] == [
        ("a", 10, "ok", "A"),
        ("b", 11, "ok", "B"),
        ("c", 12, "error", None),
    ]
    assert rows[2]["error"] == "a.jsonl, byte 12: not JSON"
    assert writer.count_documents(unit_table) == (2, 1)
    with pytest.raises(RunError, match="1 answers of a unit occur twice"):
        table([*records, Record(1, {"answer": "B2"})])
    assert [r["error"] for r in table([]).to_pylist()][:2] == ["it got no answer"] * 2
    assert table([]).schema == unit_table.schema  # errors alone: the same schema
    rows = table(
        [Record(0, {"answer": "A", "price": "cheap"}), Record(1, {"answer": "\ud800"})]
    ).to_pylist()
    assert [r["status"] for r in rows] == ["error"] * 3
    assert "cannot be written" in rows[0]["error"]
    with pytest.raises(ValueError, match="'status'"):
        writer.output_schema(pa.schema([("status", pa.string())]))


def test_the_writer_fills_every_column_that_all_tables_have() -> None:
    row = columns.own_columns(
        Document(
            0,
            "a",
            source="in.jsonl",
            row=7,
        ),
        Record(0),
        attempts=2,
    )
    assert list(row) == columns.OWN.names, (
        "own_columns (raypd/tasks/columns.py) must return a value for each column of OWN_COLUMNS "
        "(raypd/config/tasks.py), in the same order"
    )
    assert row["row"] == 7
    assert row["attempts"] == 2


def test_the_second_commit_changes_nothing(tmp_path) -> None:
    for answer, ok in (("first", 1), ("second", 2)):
        summary = UnitSummary(
            "u-1", "f" * 12, "s", "a.jsonl", 10, 3, ok, 3 - ok, 1.5, counts={"steps": 7}
        )
        commit = writer.commit(str(tmp_path), table([Record(0, {"answer": answer})]), summary)
        assert (commit is not None) == (answer == "first")
    assert writer.committed(str(tmp_path)) == {"u-1"}
    assert writer.is_committed(str(tmp_path), "u-1")
    summary = writer.read_summary(str(tmp_path), "u-1")
    assert summary.ok == 1
    assert summary.counts == {"steps": 7}
    assert writer.read_rows(str(tmp_path), "u-1", 1)[0]["answer"] == "first"
    assert os.listdir(tmp_path / "units") == ["u-1.parquet"]


def test_torn_writes_are_no_commits_and_are_cleaned_when_their_writer_is_gone(tmp_path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    host = os.uname().nodename
    mine = units / f".tmp-{host}-{os.getpid()}-1"
    dead = units / f".tmp-{host}-99999999-1"
    foreign = units / ".tmp-other-host-5-1"
    old = units / ".tmp-other-host-6-1"
    for path in (mine, dead, foreign, old):
        path.write_bytes(b"PAR1 torn")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert writer.committed(str(tmp_path)) == set()
    assert storage.clean_temporary(str(units)) == 2
    assert sorted(p.name for p in units.iterdir()) == sorted([mine.name, foreign.name])


def test_a_damaged_object_is_named(tmp_path) -> None:
    (tmp_path / "units").mkdir()
    (tmp_path / "units/u.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "units/v.parquet")
    for unit, words in (
        ("u", r"u.parquet: damaged, not a whole unit .* delete it"),
        ("v", r"v.parquet"),
    ):
        with pytest.raises(RunError, match=words):
            writer.read_summary(str(tmp_path), unit)
