"""What all object stores share: the methods of `Backend` that follow from a few requests."""

import contextlib
import io
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from raypd.errors import InputError, did_you_mean
from raypd.storage.backend import Backend
from raypd.storage.common import Object, OnHidden, StorageError, Unavailable, choose, literal
from raypd.storage.range_reader import RangeReader

_BUFFER_BYTES = 1 << 20


class ObjectStore(Backend):
    """A backend whose files are objects in buckets: no folders, no renames, whole objects only.

    Its paths are scheme://bucket/key.
    """

    @abstractmethod
    def reader(self, path: str, version: str | None, size: int | None, ahead: bool) -> RangeReader:
        """Return a reader of one version of an object; see `RangeReader` for the arguments."""

    @abstractmethod
    def head(self, path: str) -> Object:
        """Return an object's size and version. Raises FileNotFoundError or StorageError."""

    @abstractmethod
    def single(self, path: str) -> Object | None:
        """Return the object of exactly this path, or None if there is none."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterator[Object]:
        """Yield the objects whose paths begin with a prefix, ordered by path.

        The name of each is its path after the last slash of the prefix (`Object.name`).
        """

    @abstractmethod
    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        """Yield pages of the names directly in a folder: of folders, and of objects."""

    def find(self, path: str, on_hidden: OnHidden | None = None) -> Iterator[Object]:
        try:
            if not path.endswith("/"):
                single = self.single(path)
                if single is not None:
                    yield single
                    return
            # The text before the first special character of a glob narrows the listing.
            prefix = literal(path)
            if prefix == path:
                yield from self._find_below(path, on_hidden)
            else:
                yield from self._find_glob(path, prefix, on_hidden)
        except Unavailable:
            raise
        except (StorageError, FileNotFoundError) as error:
            raise InputError(str(error)) from None

    def _find_below(self, path: str, on_hidden: OnHidden | None) -> Iterator[Object]:
        listed = yield from choose(self.objects(path.rstrip("/") + "/"), None, on_hidden)
        if listed is None:
            return
        if listed:
            raise InputError(
                f"{path}: it holds only hidden objects (a part of their names begins with . or _)"
            )
        hint = self._did_you_mean(path.rstrip("/"))
        raise InputError(f"{path}: no such object, and none under it{hint}")

    def _find_glob(self, glob: str, prefix: str, on_hidden: OnHidden | None) -> Iterator[Object]:
        listed = yield from choose(self.objects(prefix), glob, on_hidden)
        if listed is None:
            return
        has_key = any(prefix.split("/", 3)[3:])
        if has_key and not listed:
            raise InputError(f"{glob}: no object matches; none is under {prefix} at all")
        raise InputError(f"{glob}: no object matches")

    def _did_you_mean(self, path: str) -> str:
        """Return a hint at the sibling that a misspelt key most likely means."""
        parent, _, name = path.rpartition("/")
        is_bucket = parent.endswith("/")
        if is_bucket:
            return ""
        try:
            siblings = [name for page in next(self.level(parent), ()) for name in page]
            hint = did_you_mean(name, siblings, lambda key: f"{parent}/{key}")
        except OSError:
            return ""
        return f"; {hint}" if hint else ""

    def walk(self, folder: str) -> Iterator[Object]:
        return self.objects(folder.rstrip("/") + "/")

    def names(self, folder: str) -> list[str]:
        names: list[str] = []
        for _, objects in self.level(folder):
            names += [name for name in objects if name and not name.startswith(".")]
        return sorted(names)

    def folders(self, folder: str) -> list[str]:
        names: list[str] = []
        for folders, _ in self.level(folder):
            names += folders
        return sorted(names)

    def is_folder(self, path: str) -> bool:
        return next(self.walk(path), None) is not None

    def exists(self, path: str) -> bool:
        is_bucket = not any(path.split("/", 3)[3:])
        if is_bucket:
            return False
        with contextlib.suppress(FileNotFoundError):
            self.head(path)
            return True
        return False

    def version(self, path: str) -> str:
        return self.head(path).stamp

    def read(self, path: str) -> bytes:
        return self.reader(path, None, None, ahead=True).readall()

    def open_read(self, path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
        reader = self.reader(path, version, None, ahead=True)
        reader.seek(offset)
        return cast(BinaryIO, io.BufferedReader(reader, _BUFFER_BYTES))

    def open_file(self, path: str, version: str | None = None, size: int | None = None) -> Any:
        import pyarrow as pa

        return pa.PythonFile(self.reader(path, version, size, ahead=False), mode="r")

    def delete_folder(self, folder: str) -> None:
        for item in self.walk(folder):
            self.delete(item.path)

    def stamp_if_holds(self, path: str, data: bytes) -> str | None:
        """Return the stamp of an object that contains exactly this data, or None if it does not.

        A request whose answer was lost is sent again, and then finds what the first one wrote.
        """
        with contextlib.suppress(FileNotFoundError):
            current = self.head(path)
            if current.size == len(data) and self.read(path) == data:
                return current.stamp
        return None
