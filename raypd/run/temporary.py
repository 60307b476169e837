"""Folders for temporary files of this machine, in TMPDIR.

Each has a file that its process keeps locked. A process that was killed leaves its folder behind,
but not the lock, and the next start removes such folders.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from io import FileIO
from typing import Self

from raypd.errors import RunError

_PREFIX = "raypd-"
_LOCK = ".lock"


class TemporaryFolder:
    """A folder of this process. It is removed by `close`, or together with this object."""

    def __init__(self, purpose: str) -> None:
        """Create the folder, and remove those of processes that were killed.

        Args:
            purpose: A word for the folder's name.

        Raises:
            RunError: TMPDIR cannot be written to.
        """
        remove_orphans()
        with temporary_space(OSError):
            directory = None
            while directory is None:
                directory = tempfile.TemporaryDirectory(
                    prefix=f"{_PREFIX}{purpose}-", ignore_cleanup_errors=True
                )
                lock = _locked(directory.name, create=True)
                if lock is None:  # another process took it for an orphan before it was locked
                    directory.cleanup()
                    directory = None
        self._directory = directory
        self._lock = lock
        self.path = directory.name

    def close(self) -> None:
        """Remove the folder."""
        self._directory.cleanup()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _locked(folder: str, create: bool = False) -> FileIO | None:
    """Lock a folder until the returned file is closed.

    Returns:
        The file; None if another process has locked the folder or has removed it.

    Raises:
        OSError: The folder has no such file, or it cannot be opened.
    """
    import fcntl  # not on every system

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    if create:
        flags |= os.O_CREAT
    path = os.path.join(folder, _LOCK)
    file = FileIO(os.open(path, flags, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if os.fstat(file.fileno()).st_nlink == 0:
        file.close()
        return None
    return file


def remove_orphans() -> int:
    """Remove the folders of this user's processes that were killed.

    Returns:
        The number of folders that were removed.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError):  # such as a folder without a lock file
                removed += _remove_orphan(entry)
    return removed


def _remove_orphan(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    lock = _locked(entry.path)
    if lock is None:
        return False
    try:
        shutil.rmtree(entry.path)
    finally:
        lock.close()
    return True


@contextlib.contextmanager
def temporary_space(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds, which are about temporary files, with advice on what to do.

    Raises:
        RunError: Temporary files cannot be written.
    """
    try:
        yield
    except kinds as error:
        folder = _current_folder()
        try:
            free = f"{shutil.disk_usage(folder).free >> 20:,} MiB are free there"
        except OSError:
            free = "it cannot be used"
        raise RunError(
            f"temporary files cannot be written to {folder} ({free}): {error}. Set TMPDIR to a "
            "folder with more space and run the same command again"
        ) from error


def _current_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # neither TMPDIR nor a default folder can be written to
        return os.environ.get("TMPDIR", "any default folder")
