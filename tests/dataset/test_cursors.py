"""Units of one file that cannot be entered in its middle read its bytes about once."""

import gzip
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raypd.dataset.cursors as cursors
from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner, read_unit
from tests.runs import run_config

ROWS = 2000


def texts() -> list[str]:
    draw = random.Random(0)
    return [f"{i} " + "".join(draw.choices("abcdefgh ", k=400)) for i in range(ROWS)]


@pytest.fixture(params=["jsonl.gz", "parquet", "json", "csv.gz"])
def run(request, tmp_path, bucket) -> RunConfig:
    rows = [{"id": str(i), "title": text} for i, text in enumerate(texts())]
    path = tmp_path / f"in.{request.param}"
    if request.param == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=ROWS)
    elif request.param == "json":
        path.write_text(json.dumps(rows))
    else:
        lines = ["id,title", *(f"{row['id']},{row['title']}" for row in rows)]
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    uri = f"{bucket}/{path.name}"
    storage.put(uri, path.read_bytes())
    source = {"text_columns": ["title"], "category_column": None}
    if request.param == "json":
        source["format"] = "json"
    return run_config(
        None,
        uri,
        tmp_path / "out",
        input=source,
        cluster={"unit_documents": 50},
    )


@pytest.fixture
def read_bytes(monkeypatch):
    """Counts the bytes that are read of the input."""
    from raypd.storage.s3 import S3Reader

    counts = [0]
    fetch = S3Reader._fetch

    def counted(self, begin, length):
        data = fetch(self, begin, length)
        counts[0] += len(data)
        return data

    monkeypatch.setattr(S3Reader, "_fetch", counted)
    monkeypatch.setattr(cursors, "default", cursors.Cursors())
    return counts


def test_units_in_order_read_each_byte_about_once(run, read_bytes):
    units = list(planner.plan(run))
    assert len(units) == ROWS // 50
    size = units[0].parts[0].size
    read_bytes[0] = 0
    ids = [document.id for unit in units for document in read_unit(unit, run)]
    assert ids == [str(i) for i in range(ROWS)]
    assert read_bytes[0] < 1.5 * size + (1 << 17)


def test_units_of_several_threads_have_their_own_documents(run, read_bytes):
    units = list(planner.plan(run))
    expected = texts()

    def read(unit):
        documents = read_unit(unit, run)
        return [(int(document.id), document.fields["title"].strip()) for document in documents]

    with ThreadPoolExecutor(4) as pool:
        found = [pair for pairs in pool.map(read, units) for pair in pairs]
    assert found == [(i, text.strip()) for i, text in enumerate(expected)]


def test_units_in_any_order_have_their_own_documents(run, read_bytes):
    units = list(planner.plan(run))
    random.Random(1).shuffle(units)
    ids = {document.id for unit in units for document in read_unit(unit, run)}
    for unit in units[:5]:
        assert len(read_unit(unit, run)) == 50
    assert ids == {str(i) for i in range(ROWS)}
