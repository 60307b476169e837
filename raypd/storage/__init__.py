"""Files in local folders and on object stores, behind one set of functions.

A path is local (or `file://`), `s3://bucket/key`, `gs://bucket/key`, `az://container/key` or
`abfss://container@account.dfs.core.windows.net/key`. The kind of storage is chosen once from the
path (`backend`); each function then calls the method of the same name, which `Backend` documents.

docs/architecture.md (A kind of storage) says how to add one.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from raypd.config import StorageConfig
from raypd.storage.backend import Backend
from raypd.storage.cloud import CloudStore
from raypd.storage.common import (
    SINCE_PLANNED,
    Changed,
    Object,
    OnHidden,
    StorageError,
    Unavailable,
    literal,
    outage,
)
from raypd.storage.local import Local, in_copy_of_job, sha256
from raypd.storage.s3 import S3
from raypd.storage.threads import in_threads

__all__ = [
    "KINDS",
    "SINCE_PLANNED",
    "Backend",
    "Changed",
    "Object",
    "OnHidden",
    "Storage",
    "StorageError",
    "Unavailable",
    "absolute",
    "backend",
    "clean_temporary",
    "configure",
    "decoding_threads",
    "delete",
    "delete_all",
    "delete_folder",
    "exists",
    "find",
    "folders",
    "in_copy_of_job",
    "in_threads",
    "is_folder",
    "is_remote",
    "join",
    "literal",
    "make_folder",
    "names",
    "object_store",
    "open_file",
    "open_read",
    "outage",
    "put",
    "put_file",
    "put_if",
    "put_new",
    "read",
    "sha256",
    "version",
    "walk",
]

_REMOTE_DECODING_THREADS = 8
_LOCAL_DECODING_THREADS = 2
# The registry of kinds. `Local` also serves every path without a known scheme.
KINDS: tuple[type[Backend], ...] = (Local, S3, CloudStore)


class Storage:
    """One backend of each kind under the same settings; many threads may use it.

    The SDK finds what the settings leave open (endpoint, region, credentials) in environment
    variables (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...), in its files or from the role of the
    instance.
    """

    def __init__(self, settings: StorageConfig | None = None) -> None:
        self._use(settings or StorageConfig())

    def _use(self, settings: StorageConfig) -> None:
        self.settings = settings
        self._backends: dict[str, Backend] = {}
        for kind in KINDS:
            instance = kind(settings)
            for scheme in kind.schemes:
                self._backends[scheme] = instance

    def configure(self, settings: StorageConfig) -> None:
        """Apply the section `storage` of a configuration to all later calls."""
        if settings != self.settings:
            self._use(settings)

    def backend(self, path: str) -> Backend:
        """Return the backend that serves a path."""
        name, separator, _ = path.partition("://")
        scheme = name + separator
        if scheme in self._backends:
            return self._backends[scheme]
        return self._backends["file://"]


default = Storage()
configure = default.configure
backend = default.backend


def is_remote(path: str) -> bool:
    """Return whether a path is on an object store."""
    return backend(path).is_remote


def decoding_threads(path: str) -> int:
    """Return how many threads should read and decode the objects of a folder.

    On an object store most of the time is spent waiting. Decoding local files is bound by the
    processor, and Python runs one thread at a time: more threads only keep more files in memory.
    """
    if is_remote(path):
        return _REMOTE_DECODING_THREADS
    return _LOCAL_DECODING_THREADS


def absolute(path: str) -> str:
    """See `Backend.absolute`."""
    return backend(path).absolute(path)


def join(root: str, *parts: str) -> str:
    """See `Backend.join`."""
    return backend(root).join(root, *parts)


def find(path: str, on_hidden: OnHidden | None = None) -> Iterator[Object]:
    """See `Backend.find`."""
    return backend(path).find(path, on_hidden)


def walk(folder: str) -> Iterator[Object]:
    """See `Backend.walk`."""
    return backend(folder).walk(folder)


def names(folder: str) -> list[str]:
    """See `Backend.names`."""
    return backend(folder).names(folder)


def folders(folder: str) -> list[str]:
    """See `Backend.folders`."""
    return backend(folder).folders(folder)


def is_folder(path: str) -> bool:
    """See `Backend.is_folder`."""
    return backend(path).is_folder(path)


def exists(path: str) -> bool:
    """See `Backend.exists`."""
    return backend(path).exists(path)


def version(path: str) -> str:
    """See `Backend.version`."""
    return backend(path).version(path)


def read(path: str) -> bytes:
    """See `Backend.read`."""
    return backend(path).read(path)


def open_read(path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
    """See `Backend.open_read`."""
    return backend(path).open_read(path, offset, version)


def open_file(path: str, version: str | None = None, size: int | None = None) -> Any:
    """See `Backend.open_file`."""
    return backend(path).open_file(path, version, size)


def object_store(path: str) -> dict[str, str]:
    """See `Backend.object_store`."""
    return backend(path).object_store()


def make_folder(path: str) -> None:
    """See `Backend.make_folder`."""
    backend(path).make_folder(path)


def put_new(path: str, data: bytes, private: bool = False) -> str | None:
    """See `Backend.put_new`."""
    return backend(path).put_new(path, data, private)


def put(path: str, data: bytes, private: bool = False) -> None:
    """See `Backend.put`."""
    backend(path).put(path, data, private)


def put_file(path: str, file: str) -> None:
    """See `Backend.put_file`."""
    backend(path).put_file(path, file)


def put_if(path: str, data: bytes, version: str) -> str | None:
    """See `Backend.put_if`."""
    return backend(path).put_if(path, data, version)


def delete(path: str) -> None:
    """See `Backend.delete`."""
    backend(path).delete(path)


def delete_all(paths: Iterable[str]) -> None:
    """See `Backend.delete_all`; all paths are of one kind of storage."""
    remaining = iter(paths)
    first_path = next(remaining, None)
    if first_path is not None:
        backend(first_path).delete_all(itertools.chain([first_path], remaining))


def delete_folder(folder: str) -> None:
    """See `Backend.delete_folder`."""
    backend(folder).delete_folder(folder)


def clean_temporary(folder: str) -> int:
    """See `Backend.clean_temporary`."""
    return backend(folder).clean_temporary(folder)
