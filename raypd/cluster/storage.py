"""Files: the one module through which the cluster part touches storage.

Local folders today. What the rest relies on is small enough for an object store: whole objects are written at once
(`put_new` never overwrites, as a conditional PUT; `put` replaces), read by range, listed, and carry a version.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from raypd.errors import InputError

# Above this a file is known by size and time of change: every worker would have to read all of it for a hash.
HASHED_BYTES = 64 << 20
TEMPORARY = ".tmp-"
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Object:
    """An input file. `name` is its path below the folder that was asked for: the same wherever that folder lies."""

    path: str
    name: str
    size: int


def local_path(path: str) -> Path:
    """A path of the configuration as an absolute local one. Raises InputError for a URI of another kind of storage."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        raise InputError(f"{path}: {scheme}:// is not a storage that raypd reads or writes; give a local path")
    return Path(os.path.abspath(os.path.expanduser(rest if separator else path)))


def find(path: str, hidden: bool = False) -> Iterator[Object]:
    """The files that a path, folder (all below it) or glob stands for, in the order of their names.

    Raises InputError where there is no such file, or a glob or folder is empty.
    """
    at = local_path(path)
    if at.is_file():
        yield Object(str(at), at.name, at.stat().st_size)
        return
    if at.is_dir():
        root, found = at, [p for p in at.rglob("*") if p.is_file()]
        if not found:
            raise InputError(f"{path}: the folder holds no files")
    elif glob.has_magic(str(at)):
        parts = at.parts
        root = Path(*parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
        found = [Path(p) for p in glob.glob(str(at), recursive=True) if os.path.isfile(p)]
        if not found:
            raise InputError(f"{path}: no file matches{_existing_part(root)}")
    else:
        raise InputError(f"{path}: no such file or folder{_near(at)}")
    for file in sorted(found):
        name = file.relative_to(root).as_posix()
        if hidden or not any(part.startswith((".", "_")) for part in Path(name).parts):
            yield Object(str(file), name, file.stat().st_size)


def _existing_part(folder: Path) -> str:
    return f" (the folder {folder} does not exist)" if not folder.is_dir() else ""


def _near(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return _existing_part(path.parent)
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def open_read(path: str, offset: int = 0) -> BinaryIO:
    """The bytes of a file from `offset` on. Raises OSError."""
    file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115
    file.seek(offset)
    return file


def version(path: str) -> str:
    """What changes when the content does: a hash, or for a large file its size and time of change.

    A hash survives a copy of the file, as `ray job submit --working-dir` makes one. Raises OSError.
    """
    stat = os.stat(path)
    if stat.st_size > HASHED_BYTES:
        return f"{stat.st_size}-{stat.st_mtime_ns}"
    return _hash(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _hash(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------- write


def put_new(path: str, data: bytes) -> bool:
    """Writes a file whole and durably unless it exists; False when it does (what is there stays as it is)."""
    temporary = _write_temporary(path, data)
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            # File systems without hard links: not safe against two writers at one instant, but never torn.
            if os.path.exists(path):
                return False
            os.rename(temporary, path)
        _sync_folder(os.path.dirname(path))
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def put(path: str, data: bytes) -> None:
    """Writes a file whole and durably in place of what is there."""
    temporary = _write_temporary(path, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(path))


def _write_temporary(path: str, data: bytes) -> str:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    temporary = os.path.join(folder, f"{TEMPORARY}{owner}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # a full disk must not be filled further by what is left over
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return temporary


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str) -> bytes:
    """A whole file. Raises FileNotFoundError."""
    return Path(path).read_bytes()


def names(folder: str) -> list[str]:
    """Names of the files in a folder, temporary ones left out; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())
    except FileNotFoundError:
        return []


def clean_temporary(folder: str) -> int:
    """Removes what dead writers left in a folder (their process is gone, or the file is a day old); how many."""
    try:
        entries = [e for e in os.scandir(folder) if e.name.startswith(TEMPORARY)]
    except FileNotFoundError:
        return 0
    removed = 0
    for entry in entries:
        host, _, rest = entry.name.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
        dead = host == socket.gethostname() and rest.isdigit() and not os.path.exists(f"/proc/{rest}")
        with contextlib.suppress(FileNotFoundError):
            if (dead and os.path.isdir("/proc")) or time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)
                removed += 1
    return removed
