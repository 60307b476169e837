"""The nightly table as a Delta table, which follows raypd's own list: a log of which objects each
night shows.
"""

import json
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
# VACUUM deletes what no version within these days shows, and of the folder all else that is older:
# raypd's own files.
_PROPERTIES = {
    f"delta.{name}Duration": "interval 3650 days"
    for name in ("deletedFileRetention", "logRetention")
}


def check_installed() -> None:
    """Raises ConfigError where the package deltalake is missing."""
    try:
        import deltalake  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the Delta table needs the package deltalake: pip install 'raypd[delta]'"
        ) from None


def register(root: str, night: str, objects: Iterable[str]) -> None:
    """Makes the Delta table show exactly these objects, in at most one commit.

    Raises RunError: it stays as it was.
    """
    from deltalake import CommitProperties, Schema
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import RemoveAction, create_table_with_add_actions

    try:
        listed, (table, present) = {_place(path) for path in objects}, _opened(root)
        added = sorted(listed - present.keys())
        gone = sorted(present.keys() - listed)
        if not added and not gone:
            return
        now = int(time.time() * 1000)
        footers = list(
            storage.in_threads(lambda place: _add_action(root, place, now), added, _THREADS)
        )
        actions: list[Any] = [action for action, _ in footers]
        columns_of = dict.fromkeys(schema for _, schema in footers)
        # Without NOT NULL, which is a feature that some readers of Delta tables do not have.
        schemas = [
            pa.schema([column.with_nullable(True) for column in schema]) for schema in columns_of
        ]
        # Some stay, with the columns that they have.
        if table is not None and (len(gone) < len(present) or not added):
            schemas.insert(0, pa.schema(table.schema().to_arrow()))
        columns = pa.unify_schemas(schemas)
        commit = CommitProperties(custom_metadata={"raypd.night": night})
        if table is None:
            create_table_with_add_actions(
                root,
                Schema.from_arrow(columns),
                actions,
                configuration=_PROPERTIES,
                storage_options=storage.object_store(root),
                commit_properties=commit,
            )
            return
        overwrites = len(gone) == len(present)
        actions += (
            []
            if overwrites
            else [RemoveAction(place, True, now, present[place], {}) for place in gone]
        )
        mode = "overwrite" if overwrites else "append"
        table.create_write_transaction(actions, mode, columns, commit_properties=commit)
    except (DeltaError, OSError, pa.ArrowException) as error:
        failure = (
            f"its Delta table could not be brought to it: {_words(error)}. The same command "
            "tries again"
        )
        raise RunError(
            f"{root}: the night {night} is complete, and {layout.CURRENT} lists it; {failure}"
        ) from None


def difference(root: str, objects: Iterable[str]) -> str:
    """How the Delta table differs from a list of objects, in words; "" where it does not or there
    is none.
    """
    if not storage.is_folder(storage.join(root, _LOG)):
        return ""
    check_installed()
    from deltalake.exceptions import DeltaError

    try:
        listed = {_place(path) for path in objects}
        present = _opened(root)[1].keys()
    except (DeltaError, OSError) as error:
        return f"the Delta table cannot be read: {_words(error)}"
    lacks = len(listed - present)
    extra = len(present - listed)
    if not lacks and not extra:
        return ""
    return (
        f"the Delta table lacks {counted(lacks, 'object')} of {layout.CURRENT} and shows "
        f"{extra} that it does not list"
        f"; raypd nightly with nightly.delta brings it up to date (without it, delete {_LOG})"
    )


def _opened(root: str) -> "tuple[DeltaTable | None, dict[str, int]]":
    """The Delta table, None where there is none, and the objects that it shows: place below the
    root -> bytes.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        table = DeltaTable(root, storage_options=storage.object_store(root))
    except TableNotFoundError:
        return None, {}
    actions = pa.table(table.get_add_actions())
    return table, dict(
        zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True)
    )


def _words(error: Exception) -> str:
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", str(error)).split())


def _place(path: str) -> str:
    return f"{layout.NIGHTS}/{path.rpartition(f'/{layout.NIGHTS}/')[2]}"


def _add_action(root: str, place: str, now: int) -> tuple[Any, pa.Schema]:
    """What adds an object, and its columns. now: unix milliseconds."""
    from deltalake.transaction import AddAction

    with storage.open_file(storage.join(root, place)) as file:
        size = file.size()
        footer = pq.ParquetFile(file)
        stats = json.dumps({"numRecords": footer.metadata.num_rows})
        return AddAction(place, size, {}, now, True, stats), footer.schema_arrow.remove_metadata()
