"""Local folders, and file systems that all machines of a cluster share.

See `Storage` for each function.
"""

import contextlib
import hashlib
import os
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from raypd.errors import InputError, did_you_mean
from raypd.storage.common import Changed, Object, StorageError, choose, literal

# Above this a file is known by size and time of change: every worker would have to read all of it
# for a hash.
_HASHED_BYTES = 64 << 20
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 24 * 3600


def local_path(path: str) -> Path:
    """A path of the configuration as an absolute one.

    Raises InputError for a URI of another kind of storage.
    """
    scheme, separator, remainder = path.partition("://")
    if separator and scheme != "file":
        near = {
            "s3a": "s3",
            "s3n": "s3",
            "S3": "s3",
            "gcs": "gs",
            "abfs": "abfss",
            "azure": "az",
        }.get(scheme)
        hint = f"; write {near}://" if near else "; give a local path, s3://, gs:// or az://"
        raise InputError(f"{path}: {scheme}:// is not a storage that raypd reads or writes{hint}")
    return Path(os.path.abspath(os.path.expanduser(remainder if separator else path)))


def find(path: str) -> Iterator[Object]:
    place = local_path(path)
    if place.is_file():
        yield _object(place, place.parent)
        return
    start = literal(str(place))
    glob = None if place.is_dir() else str(place)
    if glob == start:
        if os.path.lexists(place):
            raise InputError(f"{path}: {_no_file(place)}")
        raise InputError(f"{path}: no such file or folder{_near(place)}")
    root = place if glob is None else Path(os.path.dirname(start))

    listed = yield from choose(_objects(root, every=True), glob)
    if listed is not None and glob is not None:
        raise InputError(f"{path}: no file matches{_missing(root)}")
    if listed is not None:
        if listed:
            only = "only hidden files (a part of their names begins with . or _)"
        else:
            only = "no files"
        raise InputError(f"{path}: the folder holds {only}")


def walk(folder: str) -> Iterator[Object]:
    return (
        item
        for item in _objects(local_path(folder))
        if not os.path.basename(item.name).startswith(_TEMPORARY)
    )


def _objects(root: Path, every: bool = False) -> Iterator[Object]:
    for file in _files(root, every):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            yield _object(file, root)


def _object(file: Path, root: Path) -> Object:
    try:
        status = file.stat()
    except OSError:
        if not file.is_symlink():
            raise
        status = file.lstat()  # of a link to nothing: `version` tells
    return Object(str(file), file.relative_to(root).as_posix(), status.st_size, _stamp(status))


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _files(folder: Path, every: bool) -> Iterator[Path]:
    """The files below a folder in the order of their parts; every: also pipes, links to nothing and
    to folders.
    """
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), every)
        elif every or entry.is_file():
            yield Path(entry.path)


def _no_file(path: Path) -> str:
    if not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    if path.is_dir():
        return "a link to a folder, which is not followed: name that folder in input.path"
    return "a pipe, socket or device: raypd reads files; write what comes out of it to one"


def _missing(folder: Path) -> str:
    return "" if folder.is_dir() else f" (the folder {folder} does not exist)"


def _near(path: Path) -> str:
    hint = did_you_mean(
        path.name, os.listdir(path.parent) if path.parent.is_dir() else [], path.parent.joinpath
    )
    return f"; {hint}" if hint else _missing(path.parent)


def names(folder: str, kind: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Names of what is of a kind right in a folder, hidden ones left out; none where there is no
    folder.
    """
    try:
        with os.scandir(local_path(folder)) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and kind(e))
    except FileNotFoundError:
        return []


def open_read(path: str, offset: int, expected: str | None) -> BinaryIO:
    """The bytes of a file from `offset` on.

    Raises OSError; Changed when it is not the version wanted.
    """
    file = open(local_path(path), "rb", buffering=1 << 20)  # noqa: SIM115
    # Opened first: an open file stays as it is when the path is replaced.
    if expected is not None and version(path) != expected:
        file.close()
        raise Changed(path)
    file.seek(offset)
    return file


def version(path: str) -> str:
    """A hash survives a copy of the file, as `ray job submit --working-dir` makes one."""
    place = local_path(path)
    try:
        status = os.stat(place)
    except FileNotFoundError:
        if not place.is_symlink():
            raise
        raise StorageError(_no_file(place)) from None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe is to wait for its writer
        raise StorageError(_no_file(place))
    return _stamp(status) if status.st_size > _HASHED_BYTES else sha256(place)[:16]


def sha256(path: Path) -> str:
    """Of a file; computed once in a process unless it changes."""
    status = path.stat()
    return hashed(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def hashed(path: Path, inode: int, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: str) -> None:
    folder = local_path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def put_new(path: str, data: bytes, private: bool) -> bool:
    path = str(local_path(path))
    with _written(path, data, 0o600 if private else 0o666) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            # File systems without hard links: not safe against two writers at one instant, but
            # never torn.
            if os.path.exists(path):
                return False
            os.rename(temporary, path)
    return True


def put_if(path: str, data: bytes, expected: str) -> bool:
    """Safe against other calls of it alone: they take a lock on a hidden file beside the file."""
    import fcntl  # not on every system

    path = str(local_path(path))
    folder, name = os.path.split(path)
    try:
        with open(os.path.join(folder, f".{name}.lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if version(path) != expected:
                return False
            put(path, data)
            return True
    except FileNotFoundError:
        return False


def put(path: str, data: bytes, private: bool = False) -> None:
    path = str(local_path(path))
    with _written(path, data, 0o600 if private else 0o666) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def _written(path: str, data: bytes, mode: int = 0o666) -> Iterator[str]:
    """A temporary file of this content beside `path`, to be moved there; what stays of it is
    removed.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(
        folder, f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # "No space left on device" alone does not say which.
        error.filename = error.filename or path
        raise
    finally:  # a full disk must not be filled further by remains
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def clean_temporary(folder: str) -> int:
    """Removes what dead writers left below a folder (their process is gone, or the file is a day
    old); how many.
    """
    removed = 0
    for path in local_path(folder).rglob(f"{_TEMPORARY}*"):
        host, _, process = path.name.removeprefix(_TEMPORARY).rpartition("-")[0].rpartition("-")
        dead = (
            host == socket.gethostname()
            and process.isdigit()
            and not os.path.exists(f"/proc/{process}")
        )
        with contextlib.suppress(FileNotFoundError):
            if (
                dead and os.path.isdir("/proc")
            ) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
                removed += 1
    return removed
