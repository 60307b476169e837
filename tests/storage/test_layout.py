"""The rows of a run as others read them: pyarrow's datasets, pandas, DuckDB; one schema whatever a unit holds."""

import datetime
from unittest import mock

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from raypd import storage
from raypd.config import OutputConfig
from raypd.dataset import writer
from raypd.errors import ConfigError, RunError
from raypd.run.records import UnitSummary
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from tests import s3

FULL = {"extraction": {"category": "c", "values": [{"name": "Color", "value": "red"}], "truncated": False},
        "question_answering": {"question_id": "q", "question": "Who?", "answer": "me"},
        "generation": {"sample": 0, "text": "words", "warnings": ["none"]}}  # fmt: skip
SCHEMAS = {kind: shape.schema for kind, shape in columns.SHAPES.items()}


def write(output: str, number: int, records, schema: pa.Schema, **partition: str) -> None:
    """Commits a unit of four documents."""
    documents = [Document(row, f"{number}-{row}", {}, source="a.jsonl", place=4 * number + row) for row in range(4)]
    table = writer.make_table(documents, [records(row) for row in range(4)], schema, 1)
    ok, failed = writer.count_documents(table)
    summary = UnitSummary(f"u-{number}", "f" * 12, "s", "a.jsonl", 4 * number, 4, ok, failed, 0.1)
    assert writer.commit(output, table, summary, partition)


def fill(output: str, kind: str, **partition: str) -> None:
    """Three units: with answers, with nothing but nulls, with nothing but errors."""
    for number, own in enumerate(({"columns": FULL[kind]}, {"columns": {}}, {"error": "it failed\0"})):
        write(output, number, lambda row, own=own: Record(row, **own), SCHEMAS[kind], **partition)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_units_have_one_schema_and_pyarrow_pandas_and_duckdb_read_a_run_as_it_is(tmp_path, kind: str) -> None:
    fill(str(tmp_path), kind, date="2026-11-21", market="de")
    write(str(tmp_path), 3, lambda row: Record(row, {}), SCHEMAS[kind], date="2026-11-22", market="de")
    (tmp_path / "units/date=2026-11-21/market=de/.tmp-host-1-2").write_bytes(b"PAR1 torn")  # a writer at work
    folder = tmp_path / "units"
    schemas = [pq.read_schema(path).remove_metadata() for path in folder.glob("*/*/u-*.parquet")]
    assert schemas == [writer.output_schema(SCHEMAS[kind])] * 4  # also where all are nulls, or errors
    want = sorted(f"{unit}-{row}" for unit in range(4) for row in range(4))
    table = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
    assert (sorted(table["id"].to_pylist()), table.schema.names[-2:]) == (want, ["date", "market"])
    frame = pd.read_parquet(folder)
    assert (sorted(frame["id"]), sorted(frame["status"].value_counts().items())) == (want, [("error", 4), ("ok", 12)])
    rows = f"read_parquet('{folder}/**/*.parquet', hive_partitioning=true)"
    query = f"select date::varchar, market, count(*), count(error) from {rows} group by all order by all"
    assert duckdb.sql(query).fetchall() == [("2026-11-21", "de", 12, 4), ("2026-11-22", "de", 4, 0)]
    if kind == "extraction":
        query = f"select v.value from (select unnest(values) as v from {rows})"
        assert duckdb.sql(query).fetchall() == [("red",)] * 4


def test_a_run_on_s3_is_read_by_pyarrow_pandas_and_duckdb(connected: s3.Server, bucket: str) -> None:
    """DuckDB through pyarrow's dataset: its own extension for S3 is a download at run time."""
    fill(f"{bucket}/run", "extraction")
    files = pyarrow.fs.S3FileSystem(access_key=s3.KEY_ID, secret_key=s3.SECRET,
                                    endpoint_override=connected.url.removeprefix("http://"), scheme="http",
                                    region="us-east-1")  # fmt: skip
    folder = f"{bucket.removeprefix('s3://')}/run/units"
    dataset = ds.dataset(folder, filesystem=files, format="parquet")
    assert len(dataset.to_table()) == 12
    query = "SELECT status, count(*) FROM run GROUP BY ALL ORDER BY ALL"
    assert duckdb.from_arrow(dataset).query("run", query).fetchall() == [("error", 4), ("ok", 8)]
    assert pd.read_parquet(folder, filesystem=files)["status"].tolist().count("error") == 4


def test_units_in_partitions_are_found_without_knowing_which(tmp_path) -> None:
    output = str(tmp_path)
    fill(output, "generation", date="2026-11-21")
    write(output, 3, lambda row: Record(row, {}), columns.GENERATION)
    assert (writer.committed(output), writer.read_summary(output, "u-2").failed) == ({"u-0", "u-1", "u-2", "u-3"}, 4)
    assert writer.read_rows(output, "u-0", 1)[0]["text"] == "words"
    assert writer.is_committed(output, "u-0", {"date": "2026-11-21"})
    assert not writer.is_committed(output, "u-3", {"date": "2026-11-21"})


def test_partitions_that_cannot_be_are_refused() -> None:
    settings = OutputConfig(path="x", partition={"date": datetime.date(2026, 11, 21), "run": 7})  # as YAML reads them
    assert settings.partition == {"date": "2026-11-21", "run": "7"}
    for wrong, message in (({"Date": "x"}, "a key is of"), ({"a": "b/c"}, "a value is of"), ({"a": ""}, "a value")):
        with pytest.raises(ValidationError, match=message):
            OutputConfig(path="x", partition=wrong)
    with pytest.raises(ConfigError, match=r"output.partition: 'status' is a column of the output"):
        writer.output_schema(columns.GENERATION, {"status": "x"})


def test_out_of_reach_is_not_damaged(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody must be told to delete a unit because the network is down."""
    fill(str(tmp_path), "generation")
    for error, words in (
        (storage.StorageError("s3://b/x: the store is overloaded"), "same command resumes|cannot be read"),
        (OSError(5, "Input/output error"), "same command resumes|cannot be read"),
        (OSError("Couldn't deserialize thrift"), "delete it")):  # fmt: skip
        monkeypatch.setattr(storage, "open_file", mock.Mock(side_effect=error))
        with pytest.raises(RunError, match=words) as caught:
            writer.read_summary(str(tmp_path), "u-0")
        assert ("delete" in str(caught.value)) == (words == "delete it")
