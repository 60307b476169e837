"""Storage: the one module through which the cluster part touches files, in local folders and on S3 alike.

A path is a local one (or file://) or `s3://bucket/key`. Whole objects are written at once (`put_new` never overwrites),
read by range, listed in pages, and carry a version. What goes wrong is FileNotFoundError, another OSError
(StorageError; of these Unavailable for a store that does not answer at all, Changed) or, for what the user asked to be
read, InputError; no text of these holds a secret.

`configure` is called once a process, before anything else, with the section `storage` of the configuration: by the
command, and by every worker, which gets the configuration from it. A process that has none (a look at a run's folder)
need not call it: the SDK then finds endpoint, region and credentials in the environment (AWS_ENDPOINT_URL, AWS_REGION,
AWS_PROFILE, ...), in its files or from the instance's role.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from raypd.storage import local
from raypd.storage.common import Changed, Object, StorageError, Unavailable, outage

if TYPE_CHECKING:
    from raypd.config import StorageConfig

__all__ = [
    "Changed", "Object", "StorageError", "Unavailable", "absolute", "clean_temporary", "configure", "delete", "exists",
    "find", "folders", "is_folder", "is_remote", "join", "names", "open_file", "open_read", "outage", "put", "put_if",
    "put_new", "read", "size", "stamp", "temporary", "version", "walk",
]  # fmt: skip


def configure(settings: StorageConfig) -> None:
    """Takes a configuration's section `storage` for all that this process does on S3 from now on."""
    from raypd.storage import s3_client

    s3_client.configure(settings)


# ---------------------------------------------------------------------------------------------------------------- paths


def is_remote(path: str) -> bool:
    """Whether a path lies on S3."""
    return path.startswith("s3://")


def absolute(path: str) -> str:
    """A path that means the same in every process. Raises InputError for a kind of storage that raypd does not know."""
    if is_remote(path):
        from raypd.storage import s3_client

        s3_client.split(path)
        return path.rstrip("/")
    return str(local.local_path(path))


def join(root: str, *parts: str) -> str:
    """A path below a folder."""
    return "/".join([root.rstrip("/"), *parts]) if is_remote(root) else os.path.join(root, *parts)


# ----------------------------------------------------------------------------------------------------------------- list


def find(path: str, hidden: bool = False) -> Iterator[Object]:
    """The files that a path, a folder (all below it) or a glob (`*`, `**`, `?`, `[ab]`) stands for, one by one.

    hidden: also those of whose name below the folder a part begins with . or _. On S3 the part of a glob before its
    first special character narrows the listing. Raises InputError where there is no such file.
    """
    if is_remote(path):
        from raypd.storage import s3_list

        return s3_list.find(path, hidden)
    return local.find(path, hidden)


def walk(folder: str) -> Iterator[Object]:
    """Every file below a folder, one by one; none where there is nothing. Raises OSError."""
    if is_remote(folder):
        from raypd.storage import s3_list

        return s3_list.walk(folder)
    return local.walk(folder)


def names(folder: str) -> list[str]:
    """Names of the files right in a folder, sorted, those that begin with . left out; none where there is no folder."""
    if is_remote(folder):
        from raypd.storage import s3_list

        return s3_list.names(folder)
    return local.names(folder)


def folders(folder: str) -> list[str]:
    """Names of the folders right in a folder, sorted; none where there is no folder."""
    if is_remote(folder):
        from raypd.storage import s3_list

        return s3_list.folders(folder)
    return local.folders(folder)


def is_folder(path: str) -> bool:
    """Whether a path is a folder; on S3, whether anything lies below it."""
    if is_remote(path):
        from raypd.storage import s3_list

        return s3_list.is_folder(path)
    return local.local_path(path).is_dir()


# ----------------------------------------------------------------------------------------------------------------- read


def exists(path: str) -> bool:
    """Whether there is a file (or, locally, a folder) of this path."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.exists(path)
    return local.local_path(path).exists()


def size(path: str) -> int:
    """Bytes of a file. Raises FileNotFoundError, StorageError."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.head(path).size
    return local.local_path(path).stat().st_size


def version(path: str) -> str:
    """What changes when the content does: the ETag on S3, locally a hash, or size and time of change of a large file.

    Raises FileNotFoundError, StorageError.
    """
    if is_remote(path):
        from raypd.storage import s3

        return str(s3.head(path).version)
    return local.version(path)


def stamp(item: Object) -> str:
    """What tells without another request, or reading it, that a listed file is as it was before. Raises OSError."""
    if item.version is not None:
        return item.version
    found = local.local_path(item.path).stat()
    return f"{found.st_size}-{found.st_mtime_ns}"


def read(path: str) -> bytes:
    """A whole file. Raises FileNotFoundError, StorageError."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.read(path)
    return local.read(path)


def open_read(path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
    """The bytes of a file from `offset` on, to be read in sequence.

    version: insist on it. Never mixes two versions, and takes up a body that breaks off where it broke (S3).
    Raises FileNotFoundError, StorageError; Changed when the file is another by now, here or at a later read.
    """
    if is_remote(path):
        from raypd.storage import s3

        return s3.open_read(path, offset, version)
    return local.open_read(path, offset, version)


def open_file(path: str, version: str | None = None, size: int | None = None) -> Any:
    """A pyarrow file to be read here and there, as Parquet is; raises as open_read does.

    size: bytes, where a listing has told them: it saves a request on S3.
    """
    if is_remote(path):
        from raypd.storage import s3

        return s3.open_file(path, version, size)
    import pyarrow as pa

    return pa.PythonFile(local.open_read(path, 0, version), mode="r")


# ---------------------------------------------------------------------------------------------------------------- write


def put_new(path: str, data: bytes) -> bool:
    """Writes a file whole unless it exists; False when it does, and what is there stays as it is. Raises OSError.

    Of many writers at once one gets True (on a store that knows no conditional PUT: at least one). A writer whose
    answer was lost and finds its own bytes there gets True, so data by which writers want to know who was first must
    differ between them.
    """
    if is_remote(path):
        from raypd.storage import s3

        return s3.put_new(path, data)
    return local.put_new(path, data)


def put(path: str, data: bytes) -> None:
    """Writes a file whole in place of what is there. Raises OSError."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.put(path, data)
    return local.put(path, data)


def put_if(path: str, data: bytes, version: str) -> bool:
    """Replaces exactly this version of a file, whole; False when it is another or gone. Raises OSError."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.put_if(path, data, version)
    return local.put_if(path, data, version)


def delete(path: str) -> None:
    """Removes a file; nothing where there is none. Raises OSError."""
    if is_remote(path):
        from raypd.storage import s3

        return s3.delete(path)
    return local.delete(path)


def temporary(folder: str) -> list[str]:
    """Paths of half-written files below a folder, of writers at work and of dead ones. None on S3."""
    return [] if is_remote(folder) else local.temporary(folder)


def clean_temporary(folder: str) -> int:
    """Removes what writers that died left below a folder; how many. On S3 nothing half-written is ever there."""
    return 0 if is_remote(folder) else local.clean_temporary(folder)
