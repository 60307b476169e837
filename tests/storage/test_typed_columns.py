"""Rows as pyarrow, pandas and DuckDB read them; and output.columns typed: columns of their own
types.
"""

import datetime
import json
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
from raypd.answering import components
from raypd.config import OWN_COLUMNS, OutputConfig, RunConfig, with_changes
from raypd.dataset import writer
from raypd.errors import ConfigError, RunError
from raypd.evaluation.score import evaluate
from raypd.report.sample import document_of
from raypd.run import manifest
from raypd.run.unit import UnitSummary
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import columns_of, record_row, rows_of, value_row
from raypd.tasks.record import record_of
from raypd.training import teacher
from raypd.verify.export import export
from tests import s3
from tests.runs import FAKE, TITLES, extraction, run_config, run_here, write_jsonl

SHOES = [
    {"name": "Brand"},
    {"name": "Size", "type": "number"},
    {"name": "Count", "type": "integer"},
    {"name": "Lit", "type": "boolean"},
    {"name": "Since", "type": "date"},
    {"name": "Opens", "type": "time"},
    {
        "name": "Colors",
        "type": "enum",
        "values": ["red", "blue"],
        "many": True,
    },
    {
        "name": "Lines",
        "type": "rows",
        "columns": [{"name": "on", "type": "date"}, {"name": "n", "type": "integer"}],
    },
    {"name": "maker.country", "path": ["maker", "country"]},
    {
        "name": "maker.days",
        "path": ["maker", "days"],
        "type": "date",
        "many": True,
    },
]
TEA = [{"name": "Kind"}, {"name": "Brand"}]
FOUND = {
    "Brand": "Acme",
    "Size": 7,
    "Count": 2**62,
    "Lit": False,
    "Since": "2024-02-29",
    "Opens": "18:30:00",
    "Colors": ["red", "blue"],
    "Lines": [{"on": "2024-01-31", "n": None}],
    "maker.country": None,
    "maker.days": ["2024-01-31"],
}
SPAN = {
    "span": {
        "begin": 3,
        "end": 7,
        "page": 2,
    },
    "span_exact": True,
}
NO_SPAN = {"span": None, "span_exact": None}
FULL = {
    "extraction": {
        "category": "c",
        "values": [{"name": "Color", "value": "red"}],
        "truncated": False,
    },
    "question_answering": {"question_id": "q", "question": "Who?", "answer": "me"},
    "generation": {"sample": 0, "text": "words", "warnings": ["none"]},
}
SCHEMAS = {kind: shape.schema for kind, shape in columns.SHAPES.items()}


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return run_config(extraction(shoes=SHOES, tea=TEA), "x", tmp_path, output={"columns": "typed"})


def in_record(config: RunConfig, category: str, entries):
    """The columns that the task makes."""
    schema = config.task.categories[category]
    given = [(a.name, entries.get(a.name)) for a in schema.attributes]
    values = [
        value_row(name, value, "null" if value is None else "ok", 0.5)
        | (SPAN if name == "Brand" else NO_SPAN)
        for name, value in given
    ]
    record = record_of(schema, entries)
    return {"category": category, "record": record, "values": values, "truncated": False}


def commit(config: RunConfig, output, typed: bool) -> None:
    documents = [
        Document(
            row,
            f"d{row}",
            {},
            source="a.jsonl",
            row=row,
        )
        for row in range(3)
    ]
    records = [
        Record(0, in_record(config, "shoes", FOUND)),
        Record(1, in_record(config, "tea", {"Kind": "green", "Brand": "B"})),
        Record(2, error="too long"),
    ]
    mode = "typed" if typed else "record"
    made = with_changes(config, {"output.columns": mode})
    table = writer.make_table(documents, rows_of(records, made), columns_of(made), 1)
    assert writer.count_documents(table) == (2, 1)
    assert writer.commit(
        str(output), table, UnitSummary("u-0", "f" * 12, "s", "a.jsonl", 0, 3, 2, 1, 0.1)
    )


def test_duckdb_and_arrow_read_every_column_in_its_type(config: RunConfig, tmp_path) -> None:
    commit(config, tmp_path, typed=True)
    rows = f"FROM read_parquet('{tmp_path}/units/*.parquet')"
    names = "Brand, Size, Count, Lit, Since, Opens, Colors, Lines, maker, Kind"
    relation = duckdb.sql(f"SELECT {names} {rows} ORDER BY id")
    assert [str(t) for t in relation.types] == [
        "VARCHAR",
        "DOUBLE",
        "BIGINT",
        "BOOLEAN",
        "DATE",
        "VARCHAR",
        "VARCHAR[]",
        'STRUCT("on" DATE, n BIGINT)[]',
        'STRUCT(country VARCHAR, "days" DATE[])',
        "VARCHAR",
    ]
    day = datetime.date(2024, 2, 29)
    maker = {"country": None, "days": [datetime.date(2024, 1, 31)]}
    assert relation.fetchall() == [
        (
            "Acme",
            7.0,
            2**62,
            False,
            day,
            "18:30:00",
            ["red", "blue"],
            [{"on": datetime.date(2024, 1, 31), "n": None}],
            maker,
            None,
        ),
        ("B", *(None,) * 8, "green"),
        (None,) * 10,
    ]
    query = f"SELECT Brand__confidence, Brand__span.begin, maker__status.country {rows}"
    assert duckdb.sql(query).fetchall()[0] == (0.5, 3, "null")
    schema = ds.dataset(tmp_path / "units").schema
    assert schema.field("Brand__confidence").type == pa.float32()
    assert schema.field("Size__span").type == schema.field("Brand__span").type
    assert not {"Lit__span", "Colors__span", "record", "values"} & set(schema.names)
    own = [*OWN_COLUMNS, "category", "truncated"]
    assert [name for name in schema.names if name in own] == own


def test_an_export_is_the_same_whatever_the_columns_of_the_run(config: RunConfig, tmp_path) -> None:
    for typed in (True, False):
        manifest.claim(config, str(tmp_path / str(typed)))
        commit(config, tmp_path / str(typed), typed)
        for suffix in ("csv", "jsonl", "parquet"):
            assert export(str(tmp_path / str(typed)), str(tmp_path / f"{typed}.{suffix}")) == 3
    texts = [
        [(tmp_path / f"{typed}.{suffix}").read_text() for suffix in ("csv", "jsonl")]
        for typed in (True, False)
    ]
    assert texts[0] == texts[1]
    rows = [json.loads(line) for line in texts[0][1].splitlines()]
    assert rows[0]["Colors"] == ["red", "blue"]
    assert rows[0]["Brand__confidence"] == 0.5
    assert rows[2]["error"] == "too long"
    assert "Brand__span" not in rows[0]


def test_typed_rows_are_records_again(config: RunConfig, tmp_path) -> None:
    for typed in (True, False):
        manifest.claim(config, str(tmp_path / str(typed)))
        commit(config, tmp_path / str(typed), typed)
    typed_rows, untyped_rows = (
        writer.read_rows(str(tmp_path / str(typed)), "u-0", 9) for typed in (True, False)
    )
    for mine, untyped_row in zip(typed_rows, untyped_rows, strict=True):
        for row in (mine, untyped_row):
            row["record"] = row["record"] and json.loads(row["record"])
            row["values"] = row["values"] and sorted(row["values"], key=lambda value: value["name"])
            for value in row["values"] or []:
                value["number"] = value["number"] and float(value["number"])
                value["value"] = "7" if value["value"] == "7.0" else value["value"]
        assert mine == untyped_row
        mine, untyped_row = ({**row, "record": None} for row in (mine, untyped_row))
        assert document_of([mine]).entries == document_of([untyped_row]).entries
        assert record_row(untyped_row) is untyped_row
    target = {
        "Brand": "acme",
        "Colors": ["red", "blue"],
        "Lines": [{"on": "2024-01-31", "n": None}],
        "maker": {"country": "de", "days": None},
    }
    (tmp_path / "labels.jsonl").write_text(json.dumps({"id": "d0", "target": target}) + "\n")
    measures, of_untyped = (
        evaluate(str(tmp_path / typed), str(tmp_path / "labels.jsonl")).measures
        for typed in ("True", "False")
    )
    assert measures == of_untyped
    right = next(measure.value for measure in measures if measure.name == "values right")
    # Brand, Colors, Lines; the maker's country is missing, and days of which it has none.
    assert right == 0.6
    document = Document(0, "d0", {}, source="a.jsonl", row=0)
    teacher.label_documents([document], str(tmp_path / "True"), run_config())
    assert document.fields["target"]["Colors"] == ["red", "blue"]
    assert document.fields["target"]["Lines"] == [{"on": "2024-01-31", "n": None}]


def test_a_local_run_writes_typed_columns(tmp_path) -> None:
    run = run_config(
        extraction(c=["a", {"name": "b", "type": "integer"}]),
        write_jsonl(tmp_path / "in.jsonl", ["one", "two", ""]),
        tmp_path / "out",
        input=TITLES,
        output={"columns": "typed"},
        model=FAKE,
    )
    run_here(run, components.build)
    rows = ds.dataset(tmp_path / "out/units").to_table().to_pylist()
    assert [(row["status"], row["a"], row["b"]) for row in rows] == [("ok", "fake", None)] * 2 + [
        ("error", None, None)
    ]


def write(output: str, number: int, records, schema: pa.Schema, **partition: str) -> None:
    """Commits a unit of four documents."""
    documents = [
        Document(
            row,
            f"{number}-{row}",
            {},
            source="a.jsonl",
            row=4 * number + row,
        )
        for row in range(4)
    ]
    table = writer.make_table(documents, [records(row) for row in range(4)], schema, 1)
    ok, failed = writer.count_documents(table)
    summary = UnitSummary(f"u-{number}", "f" * 12, "s", "a.jsonl", 4 * number, 4, ok, failed, 0.1)
    assert writer.commit(output, table, summary, partition)


def fill(output: str, kind: str, **partition: str) -> None:
    """Three units: with answers, with nothing but nulls, with nothing but errors."""
    for number, own in enumerate(
        ({"columns": FULL[kind]}, {"columns": {}}, {"error": "it failed\0"})
    ):
        write(output, number, lambda row, own=own: Record(row, **own), SCHEMAS[kind], **partition)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_units_have_one_schema_and_pyarrow_pandas_and_duckdb_read_a_run_as_it_is(
    tmp_path, kind: str
) -> None:
    fill(str(tmp_path), kind, date="2026-11-21", market="de")
    write(
        str(tmp_path), 3, lambda row: Record(row, {}), SCHEMAS[kind], date="2026-11-22", market="de"
    )
    # A writer at work.
    (tmp_path / "units/date=2026-11-21/market=de/.tmp-host-1-2").write_bytes(b"PAR1 torn")
    folder = tmp_path / "units"
    schemas = [pq.read_schema(path).remove_metadata() for path in folder.glob("*/*/u-*.parquet")]
    # Also where all are nulls, or errors.
    assert schemas == [writer.output_schema(SCHEMAS[kind])] * 4
    want = sorted(f"{unit}-{row}" for unit in range(4) for row in range(4))
    table = ds.dataset(
        folder,
        format="parquet",
        partitioning="hive",
    ).to_table()
    assert sorted(table["id"].to_pylist()) == want
    assert table.schema.names[-2:] == ["date", "market"]
    frame = pd.read_parquet(folder)
    assert sorted(frame["id"]) == want
    assert sorted(frame["status"].value_counts().items()) == [("error", 4), ("ok", 12)]
    rows = f"read_parquet('{folder}/**/*.parquet', hive_partitioning=true)"
    query = (
        f"select date::varchar, market, count(*), count(error) from {rows} group by all order "
        "by all"
    )
    assert duckdb.sql(query).fetchall() == [("2026-11-21", "de", 12, 4), ("2026-11-22", "de", 4, 0)]
    if kind == "extraction":
        query = f"select v.value from (select unnest(values) as v from {rows})"
        assert duckdb.sql(query).fetchall() == [("red",)] * 4


def test_a_run_on_s3_is_read_by_pyarrow_pandas_and_duckdb(
    connected: s3.Server, bucket: str
) -> None:
    """DuckDB through pyarrow's dataset: its own extension for S3 is a download at run time."""
    fill(f"{bucket}/run", "extraction")
    files = pyarrow.fs.S3FileSystem(
        access_key=s3.KEY_ID,
        secret_key=s3.SECRET,
        endpoint_override=connected.url.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
    )
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
    assert writer.committed(output) == {"u-0", "u-1", "u-2", "u-3"}
    assert writer.read_summary(output, "u-2").failed == 4
    assert writer.read_rows(output, "u-0", 1)[0]["text"] == "words"
    assert writer.is_committed(output, "u-0", {"date": "2026-11-21"})
    assert not writer.is_committed(output, "u-3", {"date": "2026-11-21"})


def test_partitions_that_cannot_be_are_refused() -> None:
    # As YAML reads them.
    settings = OutputConfig(path="x", partition={"date": datetime.date(2026, 11, 21), "run": 7})
    assert settings.partition == {"date": "2026-11-21", "run": "7"}
    for wrong, message in (
        ({"Date": "x"}, "use only a-z, 0-9 and _"),
        ({"a": "b/c"}, "use only letters, digits"),
        ({"a": ""}, "use only letters"),
    ):
        with pytest.raises(ValidationError, match=message):
            OutputConfig(path="x", partition=wrong)
    with pytest.raises(ConfigError, match=r"output.partition: 'status' is a column of the output"):
        writer.output_schema(columns.GENERATION, {"status": "x"})


def test_out_of_reach_is_not_damaged(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(str(tmp_path), "generation")
    for error, words in (
        (
            storage.StorageError("s3://b/x: the store is overloaded"),
            "same command again|cannot be read",
        ),
        (OSError(5, "Input/output error"), "same command again|cannot be read"),
        (OSError("Couldn't deserialize thrift"), "delete it"),
    ):
        monkeypatch.setattr(storage, "open_file", mock.Mock(side_effect=error))
        with pytest.raises(RunError, match=words) as caught:
            writer.read_summary(str(tmp_path), "u-0")
        assert ("delete" in str(caught.value)) == (words == "delete it")
