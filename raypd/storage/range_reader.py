"""A file-like view of one version of an object, read by ranges."""

import io
from abc import abstractmethod
from typing import Any

from raypd.storage.common import Changed

# Sequential reading starts with a range of this many bytes; each further range is twice as long.
_FIRST_RANGE = 1 << 20
_LONGEST_RANGE = 8 << 20
# A request at a random offset reads at least this many bytes.
_SHORTEST_RANGE = 64 << 10


class RangeReader(io.RawIOBase):
    """Reads one version of an object; every request names that version, so versions never mix.

    Args:
        store: The object store, whose `head` tells the object's size.
        path: The object.
        version: The required ETag; None takes the version that the first answer names.
        size: The object's size in bytes, if known.
        ahead: Whether to read ahead, for sequential reading.

    Reading raises Changed, FileNotFoundError or StorageError.
    """

    def __init__(
        self, store: Any, path: str, version: str | None, size: int | None, ahead: bool
    ) -> None:
        self._store = store
        self.path = path
        self._pinned = version is not None
        self.version = version
        self._size = size
        self._position = 0
        # The bytes read last, and their offset in the object.
        self._window = b""
        self._window_begin = 0
        self._read_ahead = _FIRST_RANGE if ahead else 0

    @abstractmethod
    def _fetch(self, begin: int, length: int) -> bytes:
        """Return bytes [begin, begin + length), fewer at the end of the object and none after it.

        Sets `version` and, if the answer tells it, `_size`. Raises Changed if the object has
        another version than `version`, and FileNotFoundError if there is no object.
        """

    def readable(self) -> bool:
        return True

    seekable = readable

    def size(self) -> int:
        """Return the object's size in bytes."""
        if self._size is None:
            current = self._store.head(self.path)
            if self._pinned and self.version != current.stamp:
                raise Changed(self.path)
            self._size = current.size
            self.version = current.stamp
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            base = self._position
        elif whence == io.SEEK_END:
            base = self.size()
        else:
            base = 0
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, because pyarrow takes a partly filled buffer for the end of the file."""
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view) and (self._size is None or self._position < self._size):
            index = self._position - self._window_begin
            if not 0 <= index < len(self._window):
                self._load_window(len(view) - filled)
                index = 0
            count = min(len(view) - filled, len(self._window) - index)
            if count == 0:
                break
            view[filled : filled + count] = memoryview(self._window)[index : index + count]
            self._position += count
            filled += count
        return filled

    def _load_window(self, min_bytes: int) -> None:
        """Fetch at least `min_bytes` bytes from the current position into the window."""
        length = max(min_bytes, self._read_ahead or _SHORTEST_RANGE)
        try:
            self._window = self._fetch(self._position, length)
        except FileNotFoundError:
            if self._pinned:
                raise Changed(self.path) from None
            raise
        self._window_begin = self._position
        self._read_ahead = min(2 * self._read_ahead, _LONGEST_RANGE)
