"""Inspects one file of the input: whether it can be read, and the parts that it is cut into."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from raypd import storage
from raypd.config import ClusterConfig, InputConfig
from raypd.dataset.formats import FORMATS, SeenColumns
from raypd.dataset.jsonl import LARGE_WINDOW, window_bytes
from raypd.dataset.listing import InputObject, partition_keys
from raypd.dataset.wanted_columns import WantedColumns
from raypd.errors import InputError
from raypd.run import Part

_one_large_window = threading.Lock()


@dataclass
class Inspected:
    """A file that was inspected."""

    object: InputObject
    # Made on demand. A damaged file has a single part without documents.
    parts: Iterator[Part]
    columns: SeenColumns | None = None
    damaged: str | None = None  # why it cannot be read


def inspect(
    item: InputObject, source: InputConfig, cluster: ClusterConfig, columns: WantedColumns
) -> Inspected:
    """Inspect a file; the result says what is wrong with it, if anything.

    Args:
        item: The file.
        source: Section `input`.
        cluster: Section `cluster`, which has a unit's documents and bytes.
        columns: The columns that the file must have.

    Raises:
        storage.Unavailable: The storage is out of reach, so nothing is known about the file.
    """
    format = FORMATS[item.format]
    try:
        version = item.stamp if storage.is_remote(item.path) else storage.version(item.path)
        part = item.as_part(version)
        with _window_memory(part):
            parts, seen = format.split(part, source, cluster, columns.read)
        seen.names = _with_partition_keys(seen.names, item.name)
        reason = columns.lacks(seen)
    except InputError as error:
        reason = str(error)
    except (pa.ArrowException, OSError) as error:
        outage = storage.outage(error, item.path)
        if outage is not None:
            raise outage from None
        suffix = f" as {format.title}" if format.title else ""
        reason = f"cannot be read{suffix}: {error}"
    if reason is not None:
        damaged = replace(item.as_part(item.stamp), end=item.size, exact=False, bytes=item.size)
        return Inspected(item, iter([damaged]), damaged=f"{item.path}: {reason}")
    filled = (part for part in parts if part.expected or not part.exact)
    return Inspected(item, filled, seen)


def _with_partition_keys(columns: list[str], name: str) -> list[str]:
    """Return a file's columns and those that the folders in its name give, each once."""
    names = dict.fromkeys(column.strip() for column in columns)
    names.update(dict.fromkeys(partition_keys(name)))
    return list(names)


@contextlib.contextmanager
def _window_memory(part: Part) -> Iterator[None]:
    """Let one thread at a time plan a zstd file with a large window, which takes up to 2 GiB."""
    is_large = False
    if part.compression == "zst":
        with storage.open_read(part.path, version=part.version) as raw:
            is_large = window_bytes(raw) > LARGE_WINDOW
    if not is_large:
        yield
        return
    with _one_large_window:
        yield
