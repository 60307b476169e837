"""Local folders, and file systems that all machines of a cluster share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from raypd.errors import InputError
from raypd.storage.common import MAGIC, Changed, Object, hidden, near, pattern

# Above this a file is known by size and time of change: every worker would have to read all of it for a hash.
HASHED_BYTES = 64 << 20
TEMPORARY = ".tmp-"
_STALE_SECONDS = 24 * 3600


def local_path(path: str) -> Path:
    """A path of the configuration as an absolute one. Raises InputError for a URI of another kind of storage."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        known = "; write s3://" if scheme in ("s3a", "s3n", "S3") else "; give a local path or s3://bucket/prefix"
        raise InputError(f"{path}: {scheme}:// is not a storage that raypd reads or writes{known}")
    return Path(os.path.abspath(os.path.expanduser(rest if separator else path)))


# ----------------------------------------------------------------------------------------------------------------- list


def find(path: str, include_hidden: bool) -> Iterator[Object]:
    """The files that a path, folder (all below it) or glob stands for, in the order of their names.

    Raises InputError where there is none.
    """
    at = local_path(path)
    if at.is_file():
        yield _object(at, at.name)
        return
    if at.is_dir():
        root, wanted = at, None
    elif MAGIC.search(str(at)):
        parts = at.parts
        root = Path(*parts[: next(i for i, part in enumerate(parts) if MAGIC.search(part))])
        wanted = pattern(str(at))
    else:
        raise InputError(f"{path}: no such file or folder{_near(at)}")
    found = any_at_all = False
    for file in _files(root):
        any_at_all = True
        name = file.relative_to(root).as_posix()
        if (wanted is None or wanted.fullmatch(str(file))) and (include_hidden or not hidden(name)):
            found = True
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                yield _object(file, name)
    if found:
        return
    if wanted is not None:
        raise InputError(f"{path}: no file matches{_existing_part(root)}")
    only = "only hidden files (a part of their names begins with . or _)" if any_at_all else "no files"
    raise InputError(f"{path}: the folder holds {only}")


def walk(folder: str) -> Iterator[Object]:
    """Every file below a folder, hidden ones too except what is being written; none where there is no folder."""
    root = local_path(folder)
    for file in _files(root):
        if not file.name.startswith(TEMPORARY):
            with contextlib.suppress(FileNotFoundError):
                yield _object(file, file.relative_to(root).as_posix())


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder in the order of their parts; links to folders are not followed."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _object(file: Path, name: str) -> Object:
    return Object(str(file), name, file.stat().st_size)


def _existing_part(folder: Path) -> str:
    return f" (the folder {folder} does not exist)" if not folder.is_dir() else ""


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return _existing_part(path.parent)
    meant = near(path.name, os.listdir(path.parent))
    return f"; did you mean {path.parent / meant}?" if meant else ""


def folders(folder: str) -> list[str]:
    """Names of the folders right in a folder, hidden ones left out; none where there is no folder."""
    try:
        with os.scandir(local_path(folder)) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    except FileNotFoundError:
        return []


# ----------------------------------------------------------------------------------------------------------------- read


def open_read(path: str, offset: int, wanted: str | None) -> BinaryIO:
    """The bytes of a file from `offset` on. Raises OSError; Changed when it is not the version wanted."""
    file = open(local_path(path), "rb", buffering=1 << 20)  # noqa: SIM115
    # Opened first: a file that is replaced later stays as it is for who has it open.
    if wanted is not None and version(path) != wanted:
        file.close()
        raise Changed(path)
    file.seek(offset)
    return file


def version(path: str) -> str:
    """What changes when the content does: a hash, or for a large file its size and time of change.

    A hash survives a copy of the file, as `ray job submit --working-dir` makes one. Raises OSError.
    """
    at = local_path(path)
    stat = os.stat(at)
    if stat.st_size > HASHED_BYTES:
        return f"{stat.st_size}-{stat.st_mtime_ns}"
    return _hash(str(at), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _hash(path: str, inode: int, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def read(path: str) -> bytes:
    """A whole file. Raises FileNotFoundError."""
    return local_path(path).read_bytes()


def names(folder: str) -> list[str]:
    """Names of the files right in a folder, hidden ones left out; none where there is no folder."""
    try:
        with os.scandir(local_path(folder)) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())
    except FileNotFoundError:
        return []


# --------------------------------------------------------------------------------------------------------------- write


def put_new(path: str, data: bytes) -> bool:
    """Writes a file whole and durably unless it exists; False when it does (what is there stays as it is)."""
    path = str(local_path(path))
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


def put_if(path: str, data: bytes, wanted: str) -> bool:
    """Replaces exactly this version of a file; False when it is another or gone.

    Safe against other calls of put_if, and no others: they take a lock on a hidden file beside it.
    """
    path = str(local_path(path))
    folder, name = os.path.split(path)
    try:
        handle = os.open(os.path.join(folder, f".{name}.lock"), os.O_CREAT | os.O_RDWR, 0o666)
    except FileNotFoundError:  # not even the folder
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            if version(path) != wanted:
                return False
        except FileNotFoundError:
            return False
        put(path, data)
        return True
    finally:
        os.close(handle)


def put(path: str, data: bytes) -> None:
    """Writes a file whole and durably in place of what is there."""
    path = str(local_path(path))
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
    except BaseException as error:  # a full disk must not be filled further by what is left over
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = path  # "No space left on device" alone does not say which
        raise
    return temporary


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(folder: str) -> list[str]:
    """Paths of half-written files below a folder, sorted."""
    found = (os.path.join(at, name) for at, _, names in os.walk(local_path(folder)) for name in names)
    return sorted(path for path in found if os.path.basename(path).startswith(TEMPORARY))


def clean_temporary(folder: str) -> int:
    """Removes what dead writers left below a folder (their process is gone, or the file is a day old); how many."""
    removed = 0
    for path in temporary(folder):
        name = os.path.basename(path).removeprefix(TEMPORARY)
        host, _, process = name.rpartition("-")[0].rpartition("-")
        dead = host == socket.gethostname() and process.isdigit() and not os.path.exists(f"/proc/{process}")
        with contextlib.suppress(FileNotFoundError):
            if (dead and os.path.isdir("/proc")) or time.time() - os.stat(path).st_mtime > _STALE_SECONDS:
                os.unlink(path)
                removed += 1
    return removed


def delete(path: str) -> None:
    """Removes a file; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(local_path(path))
