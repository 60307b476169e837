"""Local folders, and file systems that all machines of a cluster share."""

import contextlib
import difflib
import hashlib
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from raypd.errors import InputError, closest_file, did_you_mean
from raypd.storage.backend import Backend
from raypd.storage.common import Changed, Data, Object, OnHidden, StorageError, choose, literal

# A larger file is identified by size and modification time, because every worker would have to read
# all of it to compute a hash.
_HASHED_BYTES = 64 << 20
_TEMPORARY = ".tmp-"
# A temporary file of this age no longer has a writer, wherever it came from.
_STALE_SECONDS = 24 * 3600
_BUFFER_BYTES = 1 << 20
# Schemes that other tools use, and what raypd calls them.
_OTHER_SCHEMES = {
    "s3a": "s3",
    "s3n": "s3",
    "S3": "s3",
    "gcs": "gs",
    "abfs": "abfss",
    "azure": "az",
}
# Two extensions that are at least this similar are of the same kind of file: .json and .jsonl, .csv
# and .tsv.
_SAME_KIND = 0.7
_CONFIGURATIONS = (".yaml", ".yml")


class Local(Backend):
    """Files below the root of this machine. Also serves paths without a known scheme."""

    schemes = ("file://",)
    is_remote = False

    def absolute(self, path: str) -> str:
        return str(local_path(path))

    def join(self, root: str, *parts: str) -> str:
        return os.path.join(root, *parts)

    def find(self, path: str, on_hidden: OnHidden | None = None) -> Iterator[Object]:
        target = local_path(path)
        if target.is_file():
            yield _object(str(target), target.name)
        elif target.is_dir():
            yield from _find_below(path, target, on_hidden)
        elif literal(str(target)) == str(target):
            if os.path.lexists(target):
                raise InputError(f"{path}: {_not_a_file(target)}")
            reason = f"{path}: no such file or folder{_did_you_mean(target)}"
            raise InputError(reason + _why_missing(path))
        else:
            yield from _find_glob(path, str(target), on_hidden)

    def walk(self, folder: str) -> Iterator[Object]:
        for item in _objects(local_path(folder)):
            if not os.path.basename(item.name).startswith(_TEMPORARY):
                yield item

    def names(self, folder: str) -> list[str]:
        return _entries(folder, os.DirEntry.is_file)

    def folders(self, folder: str) -> list[str]:
        return _entries(folder, os.DirEntry.is_dir)

    def is_folder(self, path: str) -> bool:
        return local_path(path).is_dir()

    def exists(self, path: str) -> bool:
        return local_path(path).exists()

    def version(self, path: str) -> str:
        """Return a hash if the file is small: a copy has the same hash, such as one that `ray job
        submit --working-dir` makes.
        """
        file = local_path(path)
        try:
            status = os.stat(file)
        except FileNotFoundError:
            if not file.is_symlink():
                raise
            raise StorageError(_not_a_file(file)) from None
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(_not_a_file(file))
        if status.st_size > _HASHED_BYTES:
            return _stamp(status)
        return sha256(file)[:16]

    def read(self, path: str) -> bytes:
        return local_path(path).read_bytes()

    def open_read(self, path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
        file = open(local_path(path), "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115
        # The file is opened first: an open file keeps its content when the path is replaced.
        if version is not None and self.version(path) != version:
            file.close()
            raise Changed(path)
        file.seek(offset)
        return file

    def open_file(self, path: str, version: str | None = None, size: int | None = None) -> Any:
        import pyarrow as pa

        return pa.PythonFile(self.open_read(path, 0, version), mode="r")

    def make_folder(self, path: str) -> None:
        folder = local_path(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def put_new(self, path: str, data: bytes, private: bool = False) -> str | None:
        path = self.absolute(path)
        with _temporary_file(path, data, private) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return None
            except OSError:
                # The file system has no hard links. Renaming is not safe against two writers at
                # the same instant, but a reader never sees a partial file.
                if os.path.exists(path):
                    return None
                os.rename(temporary, path)
        return _stamp(os.stat(path))

    def put(self, path: str, data: Data, private: bool = False) -> None:
        path = self.absolute(path)
        with _temporary_file(path, data, private) as temporary:
            os.replace(temporary, path)

    def put_if(self, path: str, data: bytes, version: str) -> str | None:
        """Replace one version of a file.

        Concurrent calls exclude each other by a lock on a hidden file next to the file; other
        methods do not take that lock.
        """
        # Not every system has fcntl.
        import fcntl

        path = self.absolute(path)
        folder, name = os.path.split(path)
        try:
            with open(os.path.join(folder, f".{name}.lock"), "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self.version(path) != version:
                    return None
                self.put(path, data)
                return _stamp(os.stat(path))
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        local_path(path).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(local_path(folder))

    def clean_temporary(self, folder: str) -> int:
        """Delete temporary files whose process is gone or that are a day old."""
        files = local_path(folder).rglob(f"{_TEMPORARY}*")
        return sum(_delete_if_orphaned(file, _TEMPORARY) for file in files)


def local_path(path: str) -> Path:
    """Return a path in the configuration as an absolute one.

    Raises:
        InputError: If the path names another kind of storage.
    """
    scheme, separator, remainder = path.partition("://")
    if not separator:
        remainder = path
    elif scheme != "file":
        hint = "give a local path, s3://, gs:// or az://"
        if scheme in _OTHER_SCHEMES:
            hint = f"write {_OTHER_SCHEMES[scheme]}://"
        raise InputError(f"{path}: {scheme}:// is not a storage that raypd reads or writes; {hint}")
    return Path(os.path.abspath(os.path.expanduser(remainder)))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, computed once per process unless the file changes."""
    status = path.stat()
    return _sha256(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(path: Path, inode: int, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def writer_name() -> str:
    """Return a unique name that shows which process writes a file."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def clean_beside(path: Path, mark: str) -> int:
    """Delete the unfinished files that dead writers left next to a file.

    Args:
        path: The file.
        mark: The text between its name and `writer_name` in the name of an unfinished file.

    Returns:
        The number of files deleted.
    """
    prefix = path.name + mark
    deleted = 0
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path.parent):
            if name.startswith(prefix):
                deleted += _delete_if_orphaned(path.parent / name, prefix)
    return deleted


def _find_below(path: str, folder: Path, on_hidden: OnHidden | None) -> Iterator[Object]:
    listed = yield from choose(_objects(folder, include_special=True), None, on_hidden)
    if listed is None:
        return
    if listed:
        content = "only hidden files (a part of their names begins with . or _)"
    else:
        content = "no files"
    raise InputError(f"{path}: the folder holds {content}")


def _find_glob(path: str, glob: str, on_hidden: OnHidden | None) -> Iterator[Object]:
    root = Path(os.path.dirname(literal(glob)))
    listed = yield from choose(_objects(root, include_special=True), glob, on_hidden)
    if listed is not None:
        raise InputError(f"{path}: no file matches{_missing(root)}{_why_missing(path)}")


def _objects(root: Path, include_special: bool = False) -> Iterator[Object]:
    for path, name in _files(str(root), "", include_special):
        # A file may be deleted after it was listed.
        with contextlib.suppress(FileNotFoundError):
            yield _object(path, name)


def _object(path: str, name: str) -> Object:
    try:
        status = os.stat(path)
    except OSError:
        if not os.path.islink(path):
            raise
        # The link is dangling; `version` says so when the file is read.
        status = os.lstat(path)
    return Object(path, name, status.st_size, _stamp(status))


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _files(folder: str, prefix: str, include_special: bool) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder, ordered by the parts of their paths.

    A folder may have millions of files, so their paths are plain strings.

    Args:
        folder: The folder; nothing is yielded if it does not exist.
        prefix: The prefix of the names of its files.
        include_special: Whether to include pipes, dangling links and links to folders.

    Yields:
        The path of a file, and its name.
    """
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, f"{prefix}{entry.name}/", include_special)
        elif include_special or entry.is_file():
            yield entry.path, prefix + entry.name


def _entries(folder: str, is_kind: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the sorted names of one kind of entry in a folder, without those that begin with a
    dot.
    """
    try:
        with os.scandir(local_path(folder)) as entries:
            return sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and is_kind(entry)
            )
    except FileNotFoundError:
        return []


def _not_a_file(path: Path) -> str:
    if not path.exists():
        return f"a link to {os.readlink(path)}, which does not exist"
    if path.is_dir():
        return "a link to a folder; links are not followed, so name that folder in input.path"
    return "a pipe, socket or device; raypd reads files, so write its content to one"


def _missing(folder: Path) -> str:
    if folder.is_dir():
        return ""
    return f" (the folder {folder} does not exist)"


def _did_you_mean(path: Path) -> str:
    siblings = list(path.parent.iterdir()) if path.parent.is_dir() else []
    names = [sibling.name for sibling in siblings if _is_alike(path, sibling)]
    hint = did_you_mean(path.name, names, path.parent.joinpath)
    if hint:
        return f"; {hint}"
    return _missing(path.parent)


def _is_alike(wanted: Path, other: Path) -> bool:
    """Return whether a missing file may mean another: a.json may mean a.jsonl, but not a.yaml.

    The extension alone does not make two names similar: nope.csv does not mean answers.csv.
    Names of one or two letters are too short to be compared.
    """
    is_short = len(wanted.stem) <= 2 and len(other.stem) <= 2
    is_near = wanted.stem == other.stem or closest_file(wanted.stem, [other.stem]) is not None
    if not is_short and not is_near:
        return False
    if not wanted.suffix or other.is_dir() or set(wanted.suffixes) & set(other.suffixes):
        return other.suffix not in _CONFIGURATIONS or other.suffix == wanted.suffix
    likeness = difflib.SequenceMatcher(None, wanted.suffix, other.suffix).ratio()
    return likeness >= _SAME_KIND


def in_copy_of_job() -> bool:
    """Return whether this process is in the copy of a folder that `ray job submit` made."""
    folder = os.getcwd()
    return "runtime_resources/working_dir_files" in folder or "_ray_pkg_" in folder


def _why_missing(path: str) -> str:
    """Return where a submitted job looks for its files; "" if this is not such a job."""
    if not in_copy_of_job():
        return ""
    if os.path.isabs(path.removeprefix("file://")):
        return (
            ". This job runs on a node of the cluster, which lacks it: put it on S3 or a path that "
            "all nodes share"
        )
    return (
        ". This job runs in a copy of the folder that was submitted (--working-dir), without files "
        "that are outside of it or that .gitignore and .rayignore name: put the input on S3 or a "
        "path that all nodes share, and give that path in full"
    )


@contextlib.contextmanager
def _temporary_file(path: str, data: Data, private: bool = False) -> Iterator[str]:
    """Write a temporary file next to `path`, to be moved there, and delete what is left of it."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, _TEMPORARY + writer_name())
    mode = 0o600 if private else 0o666

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(temporary, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
        _sync_folder(folder)
    except OSError as error:
        # "No space left on device" alone does not say which device.
        error.filename = error.filename or path
        raise
    finally:
        # A full disk must not be filled further by leftovers.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete_if_orphaned(file: Path, prefix: str) -> bool:
    """Delete an unfinished file if its writer is gone or the file is a day old.

    Args:
        file: The unfinished file.
        prefix: The part of its name before `writer_name`.

    Returns:
        Whether the file was deleted.
    """
    with contextlib.suppress(FileNotFoundError):
        age = time.time() - file.stat().st_mtime
        if _writer_is_dead(file.name.removeprefix(prefix)) or age > _STALE_SECONDS:
            file.unlink()
            return True
    return False


def _writer_is_dead(writer: str) -> bool:
    """Return whether the process of a `writer_name` ran on this host and has ended."""
    host, _, process = writer.rpartition("-")[0].rpartition("-")
    if host != socket.gethostname() or not process.isdigit():
        return False
    return os.path.isdir("/proc") and not os.path.exists(f"/proc/{process}")
