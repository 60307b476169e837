"""Delta and Iceberg tables as input, local and on a real S3 server, written by deltalake and
pyiceberg.
"""

import shutil
from collections.abc import Sequence
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

TEXTS = ("title", "country")


def rows(*titles: str, country: str = "New York") -> pa.Table:
    return pa.table(
        {
            "id": list(titles),
            "title": list(titles),
            "country": [country] * len(titles),
        }
    )


class Delta:
    def __init__(self, root: str) -> None:
        self.root = self.path = root

    def write(self, table: pa.Table, overwrite: bool = False) -> int:
        mode = "overwrite" if overwrite else "append"
        options = storage.object_store(self.root)
        how = {"mode": mode, "schema_mode": "merge", "storage_options": options}
        deltalake.write_deltalake(self.root, table, partition_by=["country"], **how)
        return deltalake.DeltaTable(self.root, storage_options=options).version()


class Iceberg:
    def __init__(self, root: str) -> None:
        self.catalog = InMemoryCatalog(
            "tests",
            warehouse=root,
            **tables._properties(root),
        )
        self.catalog.create_namespace("shop")
        self.table = self.catalog.create_table("shop.products", rows("x").schema)
        self.path = self.table.location()

    def write(self, table: pa.Table, overwrite: bool = False) -> int:
        with self.table.update_schema() as update:
            update.union_by_name(table.schema)
        (self.table.overwrite if overwrite else self.table.append)(table)
        return self.table.current_snapshot().snapshot_id


@pytest.fixture(params=["delta", "iceberg", "delta on S3", "iceberg on S3"])
def made(request, tmp_path: Path):
    if "S3" in request.param:
        root = request.getfixturevalue("bucket") + "/a b"
    else:
        root = str(tmp_path / "a b")
    return request.param.partition(" ")[0], (Delta if "delta" in request.param else Iceberg)(root)


def config(
    format: str, path: str, version: int | None = None, texts: Sequence[str] = TEXTS
) -> RunConfig:
    given = {
        "path": path,
        "format": format,
        "version": version,
        "category": "c",
        "category_column": None,
    }
    return RunConfig.model_validate(config_tree(input={**given, "text_columns": [*texts]}))


def titles(config: RunConfig, output: str | None = None) -> list[str]:
    result = plan(config, output)
    if output is not None:
        result.keep(output)
    documents = [document for unit in result for document in read_unit(unit, config)]
    assert {document.fields["country"] for document in documents} <= {"New York", "a/b"}
    return sorted(document.fields["title"] for document in documents)


def test_a_table_is_read_in_its_newest_version_and_a_resumed_run_reads_the_same(
    made, tmp_path
) -> None:
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
    for path in (table.path, table.path.rpartition("/")[0], f"{table.path}/**/*.parquet"):
        with pytest.raises(
            InputError, match=f"{table.path}: set .* input.format to {format}, or to parquet"
        ):
            plan(config("auto", path))
    (file, *_) = (item.path for item in storage.walk(table.path) if item.name.endswith(".parquet"))
    assert plan(config("auto", file, texts=["title"])).documents == 1  # a file by its name is read
    storage.delete(
        next(item.path for item in storage.walk(table.path) if item.name.endswith(".parquet"))
    )
    with pytest.raises(
        InputError,
        match=r"1 file of version \d+ of the table cannot be found, the first: .*\.parquet",
    ):
        plan(config(format, table.path))


def test_a_column_that_came_later_is_null_in_files_from_before(made) -> None:
    format, table = made
    table.write(rows("a"))
    table.write(rows("b").append_column("color", [["blue"]]))
    run = config(format, table.path, texts=["title", "color"])
    documents = [document for unit in plan(run) for document in read_unit(unit, run)]
    assert {d.fields["title"]: d.fields.get("color") for d in documents} == {"a": None, "b": "blue"}
    with pytest.raises(InputError, match="no column 'colour'"):
        plan(config(format, table.path, texts=["title", "colour"]))


def test_a_column_that_files_have_under_another_name_is_refused(tmp_path) -> None:
    table = Iceberg(str(tmp_path / "warehouse"))
    table.write(rows("a"))
    with table.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("country")
    with table.table.update_schema() as update:
        update.rename_column("title", "country")
    table.table.append(rows("b").select(["id", "country"]))
    delta = Delta(str(tmp_path / "delta"))
    delta.write(rows("a"))
    log = tmp_path / "delta/_delta_log/00000000000000000000.json"
    mapped = r"\"name\":\"title\",\"type\":\"string\",\"nullable\":true,\"metadata\":{"
    assert mapped in log.read_text()
    log.write_text(
        log.read_text().replace(
            mapped, mapped + r"\"delta.columnMapping.physicalName\":\"country\""
        )
    )
    for format, path, name in (("iceberg", table.path, "country"), ("delta", delta.path, "title")):
        with pytest.raises(InputError, match=f"column {name!r} was renamed, or replaces another"):
            plan(config(format, path, texts=[name]))
        assert plan(config(format, path, texts=["id"])).documents >= 1


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
