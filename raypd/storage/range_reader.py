"""What all object stores share, and a file-like view of one version of an object, read by
ranges.
"""

import contextlib
import io
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from raypd.storage.common import Changed, Object

# Bytes of the first range read in sequence; each further one is twice as long, up to _MOST.
_FIRST = 1 << 20
_MOST = 8 << 20
_LEAST_RANDOM = 64 << 10


class RangeReader(io.RawIOBase):
    """A file-like view of an object that never mixes two versions of it: every request names the
    one that it wants. Raises Changed, FileNotFoundError, StorageError. version: the ETag to insist
    on; None: the one that the first answer brings. ahead: read ahead, for reading in sequence.
    client: with `head`.
    """

    def __init__(
        self, client: Any, path: str, version: str | None, size: int | None, ahead: bool
    ) -> None:
        self._client = client
        self.path = path
        self._pinned = version is not None
        self.version = version
        self._size = size
        self._position = 0
        self._window = b""
        self._begin = 0  # of the window
        self._ahead = _FIRST if ahead else 0

    @abstractmethod
    def _fetch(self, begin: int, length: int) -> bytes:
        """Bytes [begin, begin + length) as far as the object has them; sets `version` and, where it
        can, `_size`.
        """

    def readable(self) -> bool:
        return True

    seekable = readable

    def size(self) -> int:
        if self._size is None:
            current = self._client.head(self.path)
            if self._pinned and self.version != current.stamp:
                raise Changed(self.path)
            self._size = current.size
            self.version = current.stamp
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: 0}[whence]
        self._position = (self.size() if whence == io.SEEK_END else base) + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer; less than all of it at the end of the object alone, as pyarrow takes
        it.
        """
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view) and (self._size is None or self._position < self._size):
            index = self._position - self._begin
            if not 0 <= index < len(self._window):
                self._begin = self._position
                index = 0
                try:
                    self._window = self._fetch(
                        self._position, max(len(view) - filled, self._ahead or _LEAST_RANDOM)
                    )
                except FileNotFoundError:
                    if self._pinned:
                        raise Changed(self.path) from None
                    raise
                self._ahead = min(2 * self._ahead, _MOST)
            count = min(len(view) - filled, len(self._window) - index)
            if not count:
                break
            view[filled : filled + count] = memoryview(self._window)[index : index + count]
            self._position += count
            filled += count
        return filled


class ObjectStore:
    """The methods that follow from others; see `Storage` for each."""

    reader: type[RangeReader]

    @abstractmethod
    def head(self, path: str) -> Object:
        """An object's size and version. Raises FileNotFoundError, StorageError."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterator[Object]:
        """What begins with a prefix."""

    @abstractmethod
    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        """Pages of names right in a folder: of folders, and of objects."""

    def names(self, folder: str) -> list[str]:
        return sorted(
            name for _, names in self.level(folder) for name in names if name and name[0] != "."
        )

    def folders(self, folder: str) -> list[str]:
        return sorted(name for names, _ in self.level(folder) for name in names)

    def beside(self, folder: str) -> list[str]:
        """From one page."""
        return [name for names in next(self.level(folder), ()) for name in names]

    def walk(self, folder: str) -> Iterator[Object]:
        return self.objects(folder.rstrip("/") + "/")

    def read(self, path: str) -> bytes:
        return self.reader(self, path, None, None, ahead=True).readall()

    def exists(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.split("/", 3)[3:]) and bool(self.head(path))  # a bucket itself is none
        return False

    def holds(self, path: str, data: bytes) -> bool:
        """A request whose answer was lost is sent again; then the first one was written."""
        with contextlib.suppress(FileNotFoundError):
            return self.head(path).size == len(data) and self.read(path) == data
        return False
