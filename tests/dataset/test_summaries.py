"""Files of summaries: they say what the units' own footers say, or they do not count."""

from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd import storage
from raypd.dataset import CommittedUnits, rows_of, summaries, summary_rows, unit_rows, writer
from raypd.run.failure_reasons import FailureReason
from raypd.run.unit import Commit, UnitSummary
from raypd.run.unit_totals import SessionUnits, UnitTotals
from raypd.run.usage import SECOND, UsageKey
from raypd.tasks.base import Document, Record

COLUMNS = pa.schema([("answer", pa.string())])
LAMPS = UsageKey("lamp")
SOFAS = UsageKey("sofa", SECOND)


def make_summary(number: int, session: str = "s-0") -> UnitSummary:
    counts = {"prefill_tokens": number, "shared_tokens": 1, "decode_tokens": 5, "steps": 7}
    usage = {"documents": 2, "prefill_tokens": number, "shared_tokens": 1, "decode_tokens": 5}
    return UnitSummary(
        f"u-{number:03d}",
        "f" * 12,
        session,
        f"{number % 3}.jsonl",
        number,
        2,
        1,
        1,
        0.5,
        counts=counts,
        categories={LAMPS: {**usage, "seconds": 0.25}, SOFAS: {**usage, "seconds": 0.5}},
        reasons=[FailureReason("no text", 1, can_change=False)],
        truncated=number % 2,
    )


def commit(output: str, number: int, session: str = "s-0", **partition: str) -> Commit:
    documents = [
        Document(
            i,
            str(i),
            source="a.jsonl",
            row=i,
        )
        for i in range(2)
    ]
    table = writer.make_table(documents, [Record(0, {"answer": "yes"})], COLUMNS, 1)
    summary = make_summary(number, session)
    done = writer.commit(output, table, summary, partition)
    assert done is not None
    return done


@pytest.fixture(params=["local", "s3"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/out"
    return str(tmp_path / "out")


def no_footer(*_: object) -> None:
    raise AssertionError("a footer was read")


def totals(output: str, keep: bool = False) -> UnitTotals:
    return summaries.totals(summaries.read(CommittedUnits(output), keep))


def expected(numbers: list[int], session: str = "s-0") -> SessionUnits:
    return UnitTotals([make_summary(number, session) for number in numbers]).all()


def without_time(units: SessionUnits) -> dict[str, object]:
    return {**vars(units), "last_commit": 0.0}


def test_the_totals_of_files_are_those_of_the_footers(output, monkeypatch):
    summary_writer = summaries.SummaryWriter(output)
    for number in range(7):
        session = "s-1" if number > 4 else "s-0"
        summary_writer.add(commit(output, number, session))
    from_footers = totals(output)
    summary_writer.flush()
    monkeypatch.setattr(summaries, "of_footer", no_footer)
    from_files = totals(output)
    assert dict(from_files.sessions) == dict(from_footers.sessions)
    assert from_files.fingerprints == from_footers.fingerprints == {"f" * 12: "u-000"}
    assert without_time(from_files.sessions["s-0"]) == without_time(expected([*range(5)]))
    assert without_time(from_files.sessions["s-1"]) == without_time(expected([5, 6], "s-1"))
    assert from_files.sessions["s-1"].last_commit > 1.7e9


def test_a_row_is_the_summary_of_its_unit(output):
    summary_writer = summaries.SummaryWriter(output)
    done = commit(output, 3, shop="a")
    summary_writer.add(done)
    summary_writer.flush()
    (table,) = summaries.read(CommittedUnits(output))
    (row,) = table.to_pylist()
    assert summaries.summary_of(row) == done.summary
    assert writer.read_summary("", "", summaries.path_of(output, row["name"])) == done.summary
    assert row["name"] == "shop=a/u-003.parquet"


def test_a_file_has_and_adds_up_every_field_of_a_summary(output):
    values = {int: 7, float: 0.5, str: "x", str | None: "x"}
    plain = {item.name: values[item.type] for item in fields(UnitSummary) if item.type in values}
    summary = replace(make_summary(1), **plain)
    row = summary_rows.row_of(Commit(summary, "x.parquet", "stamp"))
    table = pa.Table.from_pylist([row], summary_rows.SCHEMA)
    assert summaries.summary_of(table.to_pylist()[0]) == summary
    assert summaries.totals([table]).sessions == UnitTotals([summary]).sessions
    assert summaries.totals([table]).total("retriable") == 7


def test_what_no_file_has_is_read_from_footers_and_kept(output, monkeypatch):
    summary_writer = summaries.SummaryWriter(output)
    for number in range(6):
        done = commit(output, number)
        if number % 2:
            summary_writer.add(done)
    summary_writer.flush()
    before = storage.names(storage.join(output, "summaries"))
    assert without_time(totals(output).all()) == without_time(expected([*range(6)]))
    assert storage.names(storage.join(output, "summaries")) == before
    totals(output, keep=True)
    assert len(storage.names(storage.join(output, "summaries"))) == 2
    monkeypatch.setattr(summaries, "of_footer", no_footer)
    assert totals(output).total("units") == 6


def test_a_row_of_a_unit_that_was_replaced_or_deleted_does_not_count(output):
    summary_writer = summaries.SummaryWriter(output)
    for number in range(3):
        summary_writer.add(commit(output, number))
    summary_writer.flush()
    path = writer.unit_path(output, "u-001")
    summary, table = writer.read_table(output, "u-001")
    summary.truncated = 90
    assert writer.replace_rows(output, path, table, summary, storage.version(path))
    storage.delete(writer.unit_path(output, "u-002"))
    found = totals(output)
    assert found.total("units") == 2
    assert found.total("truncated") == 90


def test_a_unit_that_stands_twice_counts_once(output):
    for _ in range(2):
        summary_writer = summaries.SummaryWriter(output)
        for number in (1, 2, 1):
            path = writer.unit_path(output, f"u-{number:03d}")
            if not storage.exists(path):
                commit(output, number)
            item = next(item for item in storage.walk(f"{output}/units") if item.path == path)
            summary_writer.add(Commit(make_summary(number), item.name, item.stamp))
        summary_writer.flush()
    assert totals(output).total("units") == 2


def test_a_damaged_file_is_as_good_as_none(output):
    summary_writer = summaries.SummaryWriter(output)
    summary_writer.add(commit(output, 1))
    summary_writer.flush()
    (name,) = storage.names(storage.join(output, "summaries"))
    path = storage.join(output, "summaries", name)
    storage.put(path, storage.read(path)[:-50])
    assert totals(output).total("units") == 1


def test_a_file_without_the_newest_columns_is_read(tmp_path):
    output = str(tmp_path)
    summary_writer = summaries.SummaryWriter(output)
    summary_writer.add(commit(output, 1))
    summary_writer.flush()
    (path,) = (tmp_path / "summaries").iterdir()
    pq.write_table(pq.read_table(path).drop_columns(["reasons", "retriable"]), path)
    (table,) = summaries.read(CommittedUnits(output))
    (row,) = table.to_pylist()
    summary = summaries.summary_of(row)
    assert summary.reasons is None
    assert summary.retriable == 0
    assert summary.truncated == 1


def test_files_have_a_limited_number_of_units(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "_FILE_UNITS", 4)
    output = str(tmp_path)
    for number in range(10):
        commit(output, number)
    sizes = [len(table) for table in summaries.read(CommittedUnits(output), keep=True)]
    assert sizes == [4, 4, 2]
    assert len(list((tmp_path / "summaries").iterdir())) == 3
    chosen = list(summaries.spread(summaries.read(CommittedUnits(output)), 10, 4))
    assert sum(map(len, chosen)) == 4


def test_committed_units_are_a_set_of_ids(output):
    assert not CommittedUnits(output)
    commit(output, 1)
    commit(output, 2, shop="a")
    units = CommittedUnits(output)
    assert units == {"u-001", "u-002"}
    assert "u-003" not in units
    assert len(units) == 2


def test_rows_are_found_by_ids_and_units_that_cannot_have_them_are_not_read(output, monkeypatch):
    summary_writer = summaries.SummaryWriter(output)
    for number in range(4):
        ids = [f"{number}-{i}" for i in range(3)]
        if number == 3:
            ids[1] = "long" * 100
        documents = [
            Document(
                i,
                id,
                source="a.jsonl",
                row=3 * number + i,
            )
            for i, id in enumerate(ids)
        ]
        records = [Record(i, {"answer": id}) for i, id in enumerate(ids)]
        table = writer.make_table(documents, records, COLUMNS, 1)
        summary = make_summary(number)
        summary.documents = 3
        summary.first_id, summary.last_id = writer.id_range(table)
        summary_writer.add(writer.commit(output, table, summary))
    summary_writer.flush()
    opened = []
    read_table = writer.read_table

    def recorded(*arguments):
        opened.append(arguments[3].rpartition("/")[2])
        return read_table(*arguments)

    monkeypatch.setattr(writer, "read_table", recorded)
    rows, documents = unit_rows.with_ids(output, ["1-1", "2-5", "3-2"])
    assert sorted(row["answer"] for row in rows) == ["1-1", "3-2"]
    assert documents == 12
    # The last one has an id that is too long for its summary.
    assert sorted(opened) == ["u-001.parquet", "u-003.parquet"]
    assert len(list(rows_of(output, ["id"]))) == 12
