"""Delta and Iceberg tables as input, local and on a real S3 server, written by deltalake and pyiceberg."""

import shutil
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import tables
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from tests.runs import config_tree


def rows(*titles: str, country: str = "New York") -> pa.Table:
    return pa.table({"id": list(titles), "title": list(titles), "country": [country] * len(titles)})


class Delta:
    def __init__(self, root: str) -> None:
        self.root = self.path = root

    def write(self, table: pa.Table, overwrite: bool = False) -> int:
        mode = "overwrite" if overwrite else "append"
        options = storage.object_store(self.root)
        deltalake.write_deltalake(self.root, table, partition_by=["country"], mode=mode, storage_options=options)
        return deltalake.DeltaTable(self.root, storage_options=options).version()


class Iceberg:
    def __init__(self, root: str) -> None:
        self.catalog = InMemoryCatalog("tests", warehouse=root, **tables._properties(root))
        self.catalog.create_namespace("shop")
        self.table = self.catalog.create_table("shop.products", rows("x").schema)
        self.path = self.table.location()

    def write(self, table: pa.Table, overwrite: bool = False) -> int:
        (self.table.overwrite if overwrite else self.table.append)(table)
        return self.table.current_snapshot().snapshot_id


@pytest.fixture(params=["delta", "iceberg", "delta on S3", "iceberg on S3"])
def made(request, tmp_path: Path):
    root = request.getfixturevalue("bucket") + "/a b" if "S3" in request.param else str(tmp_path / "a b")
    return request.param.partition(" ")[0], (Delta if "delta" in request.param else Iceberg)(root)


def config(format: str, path: str, version: int | None = None) -> RunConfig:
    given = {"path": path, "format": format, "version": version, "category": "c", "category_column": None}
    return RunConfig.model_validate(config_tree(input={**given, "text_columns": ["title", "country"]}))


def titles(config: RunConfig, output: str | None = None) -> list[str]:
    result = plan(config, output)
    if output is not None:
        result.keep(output)
    documents = [document for unit in result for document in read_unit(unit, config)]
    assert {document.fields["country"] for document in documents} <= {"New York", "a/b"}
    return sorted(document.fields["title"] for document in documents)


def test_a_table_is_read_in_its_newest_version_and_a_resumed_run_reads_the_same(made, tmp_path) -> None:
    format, table = made
    output = str(tmp_path / "out")
    table.write(rows("a", "b"))
    first = table.write(rows("c", country="a/b"))
    assert titles(config(format, table.path), output) == ["a", "b", "c"]
    table.write(rows("d"))
    second = table.write(rows("e"), overwrite=True)
    assert titles(config(format, table.path)) == ["e"]
    assert titles(config(format, table.path, first)) == ["a", "b", "c"]
    assert titles(config(format, table.path), output) == ["a", "b", "c"]
    assert titles(config(format, table.path, second), output) == ["e"]  # because it was asked for


def test_what_is_wrong_with_a_table_is_one_line(made, tmp_path) -> None:
    format, table = made
    table.write(rows("a"))
    table.write(rows("b"))
    with pytest.raises(InputError, match=r"version|snapshot"):
        plan(config(format, table.path, 77))
    with pytest.raises(InputError, match=f"no {format.title()} table here"):
        plan(config(format, str(tmp_path / "empty")))
    with pytest.raises(InputError, match=f"set input.format to {format}; or to parquet"):
        plan(config("auto", table.path))
    storage.delete(next(item.path for item in storage.walk(table.path) if item.name.endswith(".parquet")))
    with pytest.raises(InputError, match=r"1 file of version \d+ of the table cannot be found, the first: .*\.parquet"):
        plan(config(format, table.path))


def test_an_iceberg_table_by_the_metadata_file_that_its_catalog_names(tmp_path) -> None:
    table = Iceberg(str(tmp_path / "warehouse"))
    table.write(rows("a"))
    before = table.table.metadata_location.removeprefix("file://")
    table.write(rows("b"))
    assert titles(config("iceberg", before)) == ["a"]
    for manifests in (tmp_path / "warehouse").rglob("snap-*.avro"):
        manifests.write_bytes(b"broken")
    with pytest.raises(InputError, match=r"its snapshot \d+ cannot be read: "):
        plan(config("iceberg", table.path))
    Path(before).write_text("{")
    with pytest.raises(InputError, match="cannot be read as the metadata of an Iceberg table"):
        plan(config("iceberg", before))


def test_a_table_with_rows_deleted_beside_its_files_is_refused(tmp_path) -> None:
    table = Delta(str(tmp_path / "t"))
    table.write(rows("a"))
    log = tmp_path / "t/_delta_log/00000000000000000000.json"
    feature = '"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["deletionVectors"],'
    feature += '"writerFeatures":["deletionVectors"]'
    text = log.read_text()
    log.write_text(text.replace('"minReaderVersion":1,"minWriterVersion":2', feature))
    assert log.read_text() != text
    with pytest.raises(InputError, match="may have deletion vectors"):
        plan(config("delta", table.path))
    shutil.rmtree(tmp_path / "t/_delta_log")
    with pytest.raises(InputError, match="no Delta table here"):
        plan(config("delta", table.path))
