"""The nightly table as a Delta table: a log of the objects that each night's table has.

It is kept in step with raypd's own list of objects.
"""

import json
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import ConfigError, RunError
from raypd.run import layout
from raypd.text import counted

if TYPE_CHECKING:
    from deltalake import DeltaTable

_LOG = "_delta_log"
_THREADS = 8
_MAX_BOUND = 128  # characters
# VACUUM deletes files that no version within this time lists. It would also delete older files of
# raypd in the same folder.
_PROPERTIES = {
    "delta.deletedFileRetentionDuration": "interval 3650 days",
    "delta.logRetentionDuration": "interval 3650 days",
}


@dataclass
class _DeltaTable:
    """The Delta table as it is now."""

    table: "DeltaTable | None"  # None if it does not exist yet
    # Of its objects: path below the root -> bytes.
    sizes: dict[str, int] = field(default_factory=dict)


def check_installed() -> None:
    """Check that the package deltalake is installed.

    Raises:
        ConfigError: If it is missing.
    """
    try:
        import deltalake  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the Delta table needs the package deltalake: pip install 'raypd[delta]'"
        ) from None


def register(root: str, night: str, objects: Iterable[str]) -> None:
    """Make the Delta table show exactly these objects, in at most one commit.

    Args:
        root: The nightly root.
        night: The name of the night.
        objects: The paths of the objects.

    Raises:
        RunError: If the table cannot be changed; it is then left as it was.
    """
    from deltalake.exceptions import DeltaError

    try:
        _register(root, night, {_below_root(path) for path in objects})
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise RunError(
            f"{root}: the night {night} is complete, and {layout.CURRENT} lists it; its Delta "
            f"table could not be updated: {_one_line(error)}. Run the same command to retry"
        ) from None


def _register(root: str, night: str, listed: set[str]) -> None:
    """Commit the difference between the Delta table and the listed objects (below the root)."""
    from deltalake import CommitProperties, Schema
    from deltalake.transaction import RemoveAction, create_table_with_add_actions

    current = _open(root)
    added = sorted(listed - current.sizes.keys())
    removed = sorted(current.sizes.keys() - listed)
    if not added and not removed:
        return
    now = int(time.time() * 1000)
    added_objects = list(
        storage.in_threads(lambda path: _add_action(root, path, now), added, _THREADS)
    )
    actions: list[Any] = [action for action, _ in added_objects]
    schemas = [_nullable(schema) for schema in dict.fromkeys(schema for _, schema in added_objects)]
    replaces_all = len(removed) == len(current.sizes)
    commit = CommitProperties(custom_metadata={"raypd.night": night})
    if current.table is None:
        create_table_with_add_actions(
            root,
            Schema.from_arrow(pa.unify_schemas(schemas)),
            actions,
            configuration=_PROPERTIES,
            storage_options=storage.object_store(root),
            commit_properties=commit,
        )
        return
    if not replaces_all or not added:
        # The objects that stay keep their columns.
        schemas.insert(0, pa.schema(current.table.schema().to_arrow()))
    mode: Literal["append", "overwrite"] = "overwrite"
    if not replaces_all:
        mode = "append"
        for path in removed:
            actions.append(RemoveAction(path, True, now, current.sizes[path], {}))
    columns = pa.unify_schemas(schemas)
    current.table.create_write_transaction(actions, mode, columns, commit_properties=commit)


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Return a schema without NOT NULL, a feature that some readers of Delta tables lack."""
    return pa.schema([column.with_nullable(True) for column in schema])


def difference(root: str, objects: Iterable[str]) -> str:
    """Describe how the Delta table differs from a list of objects.

    Args:
        root: The nightly root.
        objects: The paths of the objects.

    Returns:
        A description of the difference; empty if there is none, or no Delta table.
    """
    if not storage.is_folder(storage.join(root, _LOG)):
        return ""
    check_installed()
    from deltalake.exceptions import DeltaError

    try:
        listed = {_below_root(path) for path in objects}
        present = _open(root).sizes.keys()
    except (DeltaError, OSError) as error:
        return f"the Delta table cannot be read: {_one_line(error)}"
    missing = len(listed - present)
    extra = len(present - listed)
    if not missing and not extra:
        return ""
    return (
        f"the Delta table lacks {counted(missing, 'object')} of {layout.CURRENT} and shows "
        f"{extra} that it does not list; raypd nightly with nightly.delta brings it up to date "
        f"(without it, delete {_LOG})"
    )


def _open(root: str) -> _DeltaTable:
    """Open the Delta table and list its objects."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        table = DeltaTable(root, storage_options=storage.object_store(root))
    except TableNotFoundError:
        return _DeltaTable(None)
    actions = pa.table(table.get_add_actions())
    paths = actions["path"].to_pylist()
    sizes = actions["size_bytes"].to_pylist()
    return _DeltaTable(table, dict(zip(paths, sizes, strict=True)))


def _one_line(error: Exception) -> str:
    """Return an error in one line, without colors."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", str(error)).split())


def _below_root(path: str) -> str:
    """Return the path of an object or of a table file below the nightly root."""
    for folder in (layout.NIGHTS, layout.TABLE):
        _, separator, name = path.rpartition(f"/{folder}/")
        if separator:
            return f"{folder}/{name}"
    return path


def _add_action(root: str, path: str, now: int) -> tuple[Any, pa.Schema]:
    """Return the action that adds an object, and the object's columns.

    Args:
        root: The nightly root.
        path: The object, below the root.
        now: The time in Unix milliseconds.
    """
    from deltalake.transaction import AddAction

    with storage.open_file(storage.join(root, *path.split("/"))) as file:
        size = file.size()
        footer = pq.ParquetFile(file)
        statistics = json.dumps(_statistics(footer.metadata))
        schema = footer.schema_arrow.remove_metadata()
        return AddAction(path, size, {}, now, True, statistics), schema


def _statistics(metadata: Any) -> dict[str, Any]:
    """Return the statistics of an object by which readers of Delta tables skip it.

    They are the smallest and the largest value of each column that is not nested, if the footer has
    them for all row groups.
    """
    smallest: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    for index in range(metadata.num_columns):
        name = metadata.schema.column(index).path
        if "." in name:
            continue
        bounds = _bounds(metadata, index)
        if bounds is not None:
            smallest[name], largest[name] = bounds
    return {"numRecords": metadata.num_rows, "minValues": smallest, "maxValues": largest}


def _bounds(metadata: Any, index: int) -> tuple[Any, Any] | None:
    """Return the smallest and the largest value of a column; None if they are not known."""
    values: list[Any] = []
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(index)
        statistics = chunk.statistics
        if statistics is None or not statistics.has_null_count:
            return None
        if statistics.null_count == chunk.num_values:
            continue
        if not statistics.has_min_max:
            return None
        values += [statistics.min, statistics.max]
    if not values or not all(map(_is_comparable, values)):
        return None
    bounds = (min(values), max(values))
    if isinstance(values[0], date):
        return bounds[0].isoformat(), bounds[1].isoformat()
    return bounds


def _is_comparable(value: Any) -> bool:
    """Return whether a value may be a bound in the log: numbers, dates and short texts."""
    if isinstance(value, str):
        return len(value) <= _MAX_BOUND
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (int, date)) and not isinstance(value, (bool, datetime))
