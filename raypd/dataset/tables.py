"""Delta and Iceberg tables as input.

A version of a table is a list of Parquet files, read as any others; one of which rows were deleted
beside these files is refused. A plan keeps its version, so that a resumed run reads the same.
"""

import re
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from raypd import storage
from raypd.config import TABLES, InputConfig, RunConfig
from raypd.errors import ConfigError, InputError

_METADATA = "metadata"
_NUMBER = re.compile(r"v?(\d+)[^/]*\.metadata\.json")


def pinned(source: InputConfig, version: int | None) -> InputConfig:
    """A table with its version: as asked, else of an earlier plan, or the newest.

    Raises ConfigError, InputError.
    """
    if source.format not in TABLES or source.version is not None:
        return source
    if version is None and source.format == "delta":
        version = int(_delta(str(source.path), None).version())
    elif (
        version is None and (snapshot := _iceberg(str(source.path)).current_snapshot()) is not None
    ):
        version = int(snapshot.snapshot_id)
    return source.model_copy(update={"version": version})


def kind_of(folder: str) -> str | None:
    """Whether a folder is of such a table, whose files are not all of its newest version."""
    if storage.is_folder(storage.join(folder, "_delta_log")):
        return "delta"
    return (
        "iceberg"
        if any(map(_NUMBER.fullmatch, storage.names(storage.join(folder, _METADATA))))
        else None
    )


def folder(source: InputConfig) -> str:
    """The folder of a table's files; of Iceberg the path may be a metadata file in it."""
    root, inside, _ = str(source.path).rpartition(f"/{_METADATA}/")
    return root if inside and str(source.path).endswith(".json") else str(source.path)


def optional_columns(source: InputConfig, config: RunConfig) -> set[str]:
    """The columns of a table's version that are null in files which lack them: those that were
    written before. Raises ConfigError; InputError, also where files may have a wanted column under
    another name.
    """
    if source.format == "delta":
        table = _delta(str(source.path), source.version)
        partitions, fields = table.metadata().partition_columns, table.schema().fields
        renamed = {
            f.name
            for f in fields
            if f.metadata.get("delta.columnMapping.physicalName", f.name) != f.name
        }
        optional = {f.name for f in fields if f.nullable and f.name not in partitions}
    elif source.format == "iceberg":
        table = _iceberg(str(source.path), source.version)
        partitions = {field.source_id for spec in table.specs().values() for field in spec.fields}
        fields = table.scan(snapshot_id=source.version).projection().fields
        ever = {(f.name, f.field_id) for schema in table.schemas().values() for f in schema.fields}
        renamed = {
            f.name for f in fields if any((n == f.name) != (i == f.field_id) for n, i in ever)
        }
        added = (f for f in fields if not f.required and f.initial_default is None)
        optional = {f.name for f in added if f.field_id not in partitions}
    else:
        return set()
    if other := renamed.intersection(config.wanted_columns().values()):
        raise InputError(
            f"{source.path}: column {min(other)!r} was renamed, or replaces another: write the "
            "table anew"
        )
    return optional


def file_names(source: InputConfig) -> set[str]:
    """The files of a table's version, below its folder. Raises ConfigError, InputError."""
    root = str(source.path)
    if source.format == "delta":
        table = _delta(root, source.version)
        if "deletionVectors" in (table.protocol().reader_features or ()):
            advice = (
                "REORG TABLE ... APPLY (PURGE), then ALTER TABLE ... DROP FEATURE deletionVectors"
            )
            raise InputError(
                f"{root}: the table may have deletion vectors, rows deleted beside its files: "
                f"{advice}"
            )
        return {
            unquote(path)
            for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
        }
    table = _iceberg(root, source.version)
    names, location = set(), table.location().rstrip("/") + "/"
    try:
        tasks = (
            list(table.scan(snapshot_id=source.version).plan_files())
            if source.version is not None
            else []
        )
    except Exception as error:  # pyiceberg's, and any of Python's for a damaged file
        raise _unread(error, root, f"its snapshot {source.version} cannot be read") from None
    for task in tasks:
        if task.delete_files:
            advice = "rewrite_data_files puts them into these"
            raise InputError(f"{root}: rows were deleted beside the table's files: {advice}")
        if not task.file.file_path.startswith(location):
            raise InputError(
                f"{root}: {task.file.file_path} of the table is not below its location, {location}"
            )
        names.add(task.file.file_path.removeprefix(location))
    return names


def _delta(root: str, version: int | None) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError:
        raise ConfigError(
            "input.format delta needs the package deltalake: pip install 'raypd[delta]'"
        ) from None
    try:
        return DeltaTable(storage.absolute(root), version, storage.object_store(root))
    except TableNotFoundError:
        raise InputError(f"{root}: no Delta table here (no _delta_log)") from None
    except (DeltaError, OSError) as error:
        asked = "" if version is None else f" in version {version}"
        raise InputError(f"{root}: the Delta table cannot be read{asked}: {error}") from None


def _iceberg(path: str, version: int | None = None) -> Any:
    try:
        from pyiceberg.table import StaticTable
    except ImportError:
        raise ConfigError(
            "input.format iceberg needs the package pyiceberg: pip install 'raypd[iceberg]'"
        ) from None
    metadata = path if path.endswith(".json") else _newest_metadata(path)
    try:
        table = StaticTable.from_metadata(storage.absolute(metadata), _properties(path))
    except Exception as error:  # pyiceberg's, pydantic's and pyarrow's
        raise _unread(
            error, metadata, "cannot be read as the metadata of an Iceberg table"
        ) from None
    if version is not None and table.snapshot_by_id(version) is None:
        raise InputError(f"{path}: input.version {version}: no such snapshot, or it has expired")
    return table


def _unread(error: Exception, path: str, what: str) -> Exception:
    return storage.outage(error, path) or InputError(
        f"{path}: {what}: {error or type(error).__name__}"
    )


def _newest_metadata(root: str) -> str:
    folder = storage.join(root, _METADATA)
    numbered = [
        (int(match[1]), name)
        for name in storage.names(folder)
        if (match := _NUMBER.fullmatch(name))
    ]
    if not numbered:
        raise InputError(f"{root}: no Iceberg table here (no metadata/*.metadata.json)")
    return storage.join(folder, max(numbered)[1])


def _properties(path: str) -> dict[str, str]:
    """pyiceberg's names of the settings and credentials that S3 is reached with."""
    options = storage.object_store(path)
    names = ("region", "access-key-id", "secret-access-key", "session-token")
    keys = {"endpoint": "aws_endpoint_url", "anonymous": "aws_skip_signature"}
    keys |= {name: f"aws_{name}".replace("-", "_") for name in names}
    return {f"s3.{name}": options[key] for name, key in keys.items() if key in options}
