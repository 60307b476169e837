"""NaN is missing in every format, and cells of other types than text are read as text."""

import datetime
import json
import math
import uuid
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd import api
from raypd.dataset.label_file import label_rows
from raypd.dataset.reader import read_table
from raypd.tasks.documents import unpacked
from raypd.tasks.missing import plain_value
from tests.runs import read_all

NAN = float("nan")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_nan_is_missing_in_every_format(tmp_path, config, suffix) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = [
        {"id": NAN, "title": 1.5, "category": NAN},
        {"id": 2.0, "title": NAN, "category": NAN},
    ]
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        table = pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]})
        assert table["title"].null_count == 0
        if suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
                file.write_table(table)
    keys = {"text_columns": ["title", "category"], "category_column": "category"}
    first, second = read_all(config(str(path), **keys))
    assert first.id == "a." + suffix + ":0"
    assert first.fields["title"] == "1.5"
    assert first.fields.get("category") is None
    assert second.id == "2"
    assert "no text in title" in (second.error or "")


def test_a_whole_id_that_pandas_stores_as_a_float_finds_its_label(tmp_path, config) -> None:
    ids = pd.Series([17, None, 2.5])
    pd.DataFrame({"id": ids, "title": ["a", "b", "c"]}).to_parquet(tmp_path / "a.parquet")
    documents = read_all(config(str(tmp_path / "a.parquet")))
    assert [document.id for document in documents] == ["17", "a.parquet:1", "2.5"]
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"id": 17, "title": "x"}\n{"id": 17.0, "title": "x"}\n')
    assert [key for _, key, _ in label_rows(str(labels), "id")] == ["17", "17"]


def test_missing_items_of_a_list_of_texts_are_left_out(tmp_path, config) -> None:
    lines = '{"title": ["a", NaN, "b", null]}\n{"title": [NaN]}\n{"title": ["a", 1]}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    first, second, third = read_all(config(str(tmp_path / "a.jsonl"), id_column=None))
    assert first.fields["title"] == "a\nb"
    assert "no text in title" in (second.error or "")
    assert "a list with a number in it" in (third.error or "")


ZONE = datetime.timezone(datetime.timedelta(hours=2))
CELLS = [
    (pa.array([Decimal("249.90")], pa.decimal128(10, 2)), "249.90"),
    # As a number of 64 bits it would be 0.10000000149011612.
    (pa.array([0.1], pa.float32()), "0.1"),
    (pa.array([2.0], pa.float32()), "2.0"),
    (pa.array([Decimal("1E+3")], pa.decimal256(40, 0)), "1000"),
    (pa.array([datetime.date(2026, 11, 21)]), "2026-11-21"),
    (pa.array([datetime.datetime(2026, 11, 21, 8, 30)]), "2026-11-21 08:30:00"),
    (
        pa.array([datetime.datetime(2026, 11, 21, 8, tzinfo=ZONE)], pa.timestamp("s", "+02:00")),
        "2026-11-21 08:00:00+02:00",
    ),
    (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    (pa.array([datetime.time(8, 30)]), "08:30:00"),
    (pa.array([datetime.timedelta(seconds=90)]), "0:01:30"),
    (pa.array([True]), "true"),
    (pa.array([7]), "7"),
    (pa.array([np.float16(0.5)]), "0.5"),
    (pa.array([uuid.UUID(int=5).bytes], pa.uuid()), str(uuid.UUID(int=5))),
]


@pytest.mark.parametrize(("column", "expected"), CELLS, ids=[str(c.type) for c, _ in CELLS])
def test_cells_of_other_types_work_as_text(tmp_path, config, column, expected) -> None:
    table = pa.table({"id": ["a"], "title": column})
    pq.write_table(table, tmp_path / "a.parquet")
    run = config(str(tmp_path / "a.parquet"))
    (document,) = read_all(run)
    assert document.error is None
    assert document.fields["title"] in (expected, "0 days 00:01:30")
    (in_memory,) = read_table(table, run)
    assert in_memory.fields["title"] == document.fields["title"]


def test_what_a_reader_yields_is_taken_in_plain_types() -> None:
    row = {
        "nan": NAN,
        "float32": np.float32("nan"),
        "decimal": Decimal("NaN"),
        "exponent": Decimal("1E+3"),
        "nat": pd.NaT,
        "na": pd.NA,
        "number": np.int64(5),
        "flag": np.bool_(True),
        "array": np.array([1.5, NAN]),
        "nested": {"list": [NAN, datetime.date(2026, 1, 2)]},
        "large": math.inf,
    }
    assert plain_value(row) == {
        "nan": None,
        "float32": None,
        "decimal": None,
        "exponent": "1000",
        "nat": None,
        "na": None,
        "number": 5,
        "flag": True,
        "array": [1.5, None],
        "nested": {"list": [None, "2026-01-02"]},
        "large": math.inf,
    }


def test_rows_and_frames_in_memory_take_nan_as_missing() -> None:
    rows = [
        {
            "id": "a",
            "title": "x",
            "price": 1.0,
        },
        {"id": NAN, "title": NAN, "price": NAN},
    ]
    for source in (rows, pd.DataFrame(rows), pd.DataFrame(rows, dtype=object)):
        (table,) = api._in_memory(source).batches()
        assert [column.null_count for column in table.columns] == [1, 1, 1]


def test_labels_take_nan_as_missing_and_decimals_as_text(tmp_path) -> None:
    assert unpacked("NaN") is None
    (tmp_path / "a.jsonl").write_text('{"id": NaN, "Price": NaN}\n{"id": null, "Price": 2}\n')
    rows = [(id, row["Price"]) for _, id, row in label_rows(str(tmp_path / "a.jsonl"), "id")]
    assert rows == [("a.jsonl:0", None), ("a.jsonl:26", 2)]
    table = {
        "id": ["1", "2"],
        "Price": [Decimal("2.50"), None],
        "Weight": [NAN, 1.0],
    }
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    first, second = [row for _, _, row in label_rows(str(tmp_path / "b.parquet"), "id")]
    assert first == {"id": "1", "Price": "2.50", "Weight": None}
    assert second == {"id": "2", "Price": None, "Weight": 1.0}
