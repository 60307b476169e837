"""Delta and Iceberg tables as input.

A version of a table is a list of Parquet files, which are read like any others. A table with
deletion vectors or delete files is refused. A plan keeps its version, so that a resumed run reads
the same rows.
"""

import itertools
import re
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from raypd import storage
from raypd.config import TABLES, InputConfig
from raypd.errors import ConfigError, InputError

_METADATA = "metadata"  # the folder of an Iceberg table's metadata files
_METADATA_FILE = re.compile(r"v?(\d+)[^/]*\.metadata\.json")
_PHYSICAL_NAME = "delta.columnMapping.physicalName"
# What deltalake's messages say about storage that does not answer, and about a body that broke off.
_STORE_ERROR = re.compile(r"Generic \w+ error")
_BROKEN_BODY = "body error"
_COLORS = re.compile(r"\x1b\[[\d;]*m")
_MAX_ATTEMPTS = 8
_RETRY_SECONDS = 0.5
# pyiceberg's names of the settings for S3, and their names in `Backend.object_store`.
_S3_PROPERTIES = {
    "s3.endpoint": "aws_endpoint_url",
    "s3.anonymous": "aws_skip_signature",
    "s3.region": "aws_region",
    "s3.access-key-id": "aws_access_key_id",
    "s3.secret-access-key": "aws_secret_access_key",
    "s3.session-token": "aws_session_token",
}


def pinned(source: InputConfig, version: int | None) -> InputConfig:
    """Return section `input` with the version of its table; unchanged if there is no table.

    Args:
        source: Section `input`. The version that it sets takes precedence.
        version: The version of an earlier plan; None for the newest.

    Raises:
        ConfigError: The package that reads such tables is not installed.
        InputError: There is no such table, or it cannot be read.
    """
    if source.format not in TABLES or source.version is not None:
        return source
    if version is None:
        version = _newest_version(source)
    return source.model_copy(update={"version": version})


def _newest_version(source: InputConfig) -> int | None:
    """Return the newest version of a table; None for an Iceberg table without a snapshot."""
    if source.format == "delta":
        return int(_delta(str(source.path), None).version())
    snapshot = _iceberg(str(source.path)).current_snapshot()
    if snapshot is None:
        return None
    return int(snapshot.snapshot_id)


def kind_of(folder: str) -> str | None:
    """Return "delta" or "iceberg" if a folder is such a table, else None."""
    if storage.is_folder(storage.join(folder, "_delta_log")):
        return "delta"
    for name in storage.names(storage.join(folder, _METADATA)):
        if _METADATA_FILE.fullmatch(name):
            return "iceberg"
    return None


def folder(source: InputConfig) -> str:
    """Return the folder of a table's files.

    Args:
        source: Section `input`, whose path is this folder or a metadata file of an Iceberg table.
    """
    path = str(source.path)
    root, is_inside, _ = path.rpartition(f"/{_METADATA}/")
    if is_inside and path.endswith(".json"):
        return root
    return path


def optional_columns(source: InputConfig, columns: Collection[str]) -> set[str]:
    """Return the columns of a table's version that are null in files that lack them.

    Files lack a column if they were written before it was added.

    Args:
        source: Section `input`; a table has its version.
        columns: The columns that the input must have.

    Raises:
        ConfigError: The package that reads such tables is not installed.
        InputError: The table cannot be read, or files may have a wanted column under another name.
    """
    if source.format == "delta":
        optional, renamed = _delta_columns(source)
    elif source.format == "iceberg":
        optional, renamed = _iceberg_columns(source)
    else:
        return set()
    missing = renamed.intersection(columns)
    if missing:
        raise InputError(
            f"{source.path}: column {min(missing)!r} was renamed, or replaces another: "
            "rewrite the table"
        )
    return optional


def _delta_columns(source: InputConfig) -> tuple[set[str], set[str]]:
    """Return the optional columns of a Delta table, and those that were renamed."""
    table = _delta(str(source.path), source.version)
    partitions = table.metadata().partition_columns
    optional = set()
    renamed = set()
    for field in table.schema().fields:
        if field.metadata.get(_PHYSICAL_NAME, field.name) != field.name:
            renamed.add(field.name)
        if field.nullable and field.name not in partitions:
            optional.add(field.name)
    return optional, renamed


def _iceberg_columns(source: InputConfig) -> tuple[set[str], set[str]]:
    """Return the optional columns of an Iceberg table, and those that were renamed."""
    table = _iceberg(str(source.path), source.version)
    partitions = {field.source_id for spec in table.specs().values() for field in spec.fields}
    # Every column that the table has ever had, as (name, id).
    all_columns = set()
    for schema in table.schemas().values():
        all_columns |= {(field.name, field.field_id) for field in schema.fields}
    optional = set()
    renamed = set()
    for field in table.scan(snapshot_id=source.version).projection().fields:
        for name, field_id in all_columns:
            if (name == field.name) != (field_id == field.field_id):
                renamed.add(field.name)
        is_nullable = not field.required and field.initial_default is None
        if is_nullable and field.field_id not in partitions:
            optional.add(field.name)
    return optional, renamed


def file_names(source: InputConfig) -> set[str]:
    """Return the names of the files of a table's version, below the table's folder.

    Args:
        source: Section `input` with the version.

    Raises:
        ConfigError: The package that reads such tables is not installed.
        InputError: The table cannot be read, or it has deletion vectors or delete files.
    """
    if source.format == "delta":
        return _delta_files(str(source.path), source.version)
    return _iceberg_files(str(source.path), source.version)


def _delta_files(root: str, version: int | None) -> set[str]:
    table = _delta(root, version)
    if "deletionVectors" in (table.protocol().reader_features or ()):
        raise InputError(
            f"{root}: the table may have deletion vectors, which raypd does not read: run REORG "
            "TABLE ... APPLY (PURGE), then ALTER TABLE ... DROP FEATURE deletionVectors"
        )
    actions = pa.table(table.get_add_actions(flatten=True))
    return set(map(unquote, actions["path"].to_pylist()))


def _iceberg_files(root: str, version: int | None) -> set[str]:
    table = _iceberg(root, version)
    if version is None:
        # The table has no snapshot yet, and so no files.
        return set()
    location = table.location().rstrip("/") + "/"
    try:
        tasks = list(table.scan(snapshot_id=version).plan_files())
    except Exception as error:  # pyiceberg's errors, and any Python error for a damaged file
        raise _read_error(error, root, f"its snapshot {version} cannot be read") from None
    names = set()
    for task in tasks:
        if task.delete_files:
            raise InputError(
                f"{root}: the table has delete files, which raypd does not read: run "
                "rewrite_data_files first"
            )
        path = task.file.file_path
        if not path.startswith(location):
            raise InputError(f"{root}: {path} of the table is not below its location, {location}")
        names.add(path.removeprefix(location))
    return names


def _delta(root: str, version: int | None) -> Any:
    """Return a Delta table in a version, or in its newest one."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError:
        raise ConfigError(
            "input.format delta needs the package deltalake: pip install 'raypd[delta]'"
        ) from None
    for attempt in itertools.count(1):
        try:
            return DeltaTable(storage.absolute(root), version, storage.object_store(root))
        except TableNotFoundError:
            raise InputError(f"{root}: no Delta table here (no _delta_log)") from None
        except (DeltaError, OSError) as error:
            reason = " ".join(_COLORS.sub("", str(error)).split())
            # deltalake retries all requests except those whose body broke off.
            if _BROKEN_BODY in reason and attempt < _MAX_ATTEMPTS:
                time.sleep(_RETRY_SECONDS)
                continue
            if _STORE_ERROR.search(reason):
                raise storage.Unavailable(
                    f"{root}: {reason}; run the same command again to resume"
                ) from None
            suffix = "" if version is None else f" in version {version}"
            raise InputError(f"{root}: the Delta table cannot be read{suffix}: {reason}") from None


def _iceberg(path: str, version: int | None = None) -> Any:
    """Return an Iceberg table, after checking that it has the snapshot `version`."""
    try:
        from pyiceberg.table import StaticTable
    except ImportError:
        raise ConfigError(
            "input.format iceberg needs the package pyiceberg: pip install 'raypd[iceberg]'"
        ) from None
    metadata = path if path.endswith(".json") else _newest_metadata(path)
    try:
        table = StaticTable.from_metadata(storage.absolute(metadata), _properties(path))
    except Exception as error:  # errors of pyiceberg, pydantic and pyarrow
        reason = "cannot be read as the metadata of an Iceberg table"
        raise _read_error(error, metadata, reason) from None
    if version is not None and table.snapshot_by_id(version) is None:
        raise InputError(f"{path}: input.version {version}: no such snapshot, or it has expired")
    return table


def _read_error(error: Exception, path: str, reason: str) -> Exception:
    """Return what to raise if a table cannot be read: the outage of its storage, or InputError."""
    outage = storage.outage(error, path)
    if outage is not None:
        return outage
    return InputError(f"{path}: {reason}: {error or type(error).__name__}")


def _newest_metadata(root: str) -> str:
    """Return the path of an Iceberg table's newest metadata file."""
    metadata_folder = storage.join(root, _METADATA)
    numbered = []
    for name in storage.names(metadata_folder):
        match = _METADATA_FILE.fullmatch(name)
        if match is not None:
            numbered.append((int(match[1]), name))
    if not numbered:
        raise InputError(f"{root}: no Iceberg table here (no metadata/*.metadata.json)")
    _, newest = max(numbered)
    return storage.join(metadata_folder, newest)


def _properties(path: str) -> dict[str, str]:
    """Return the settings and credentials that S3 is reached with, by pyiceberg's names."""
    options = storage.object_store(path)
    return {
        property_name: options[option]
        for property_name, option in _S3_PROPERTIES.items()
        if option in options
    }
