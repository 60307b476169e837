"""What every kind of storage provides. One subclass per kind; `raypd.storage.KINDS` lists them."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, ClassVar

from raypd.config import StorageConfig
from raypd.storage.common import Data, Object, OnHidden
from raypd.storage.threads import in_threads

_DELETE_THREADS = 16


class Backend(ABC):
    """Reads and writes the files of one kind of storage; many threads may share one instance.

    Every method raises FileNotFoundError or another OSError (`StorageError`, or its subclasses
    `Unavailable` and `Changed`). No message contains a secret.
    """

    # Prefixes of the paths that this kind serves, such as "s3://".
    schemes: ClassVar[tuple[str, ...]] = ()
    # Whether the stamp in a listing changes with every change of a file, so that it is the version.
    is_remote: ClassVar[bool] = True

    def __init__(self, settings: StorageConfig) -> None:
        self.settings = settings

    # ------------------------------------------------------------------------
    # Paths
    # ------------------------------------------------------------------------

    @abstractmethod
    def absolute(self, path: str) -> str:
        """Return a path that means the same in every process.

        Raises:
            InputError: If the path does not have the form that this kind of storage needs.
        """

    def join(self, root: str, *parts: str) -> str:
        """Return the path of `parts` below `root`."""
        return "/".join([root.rstrip("/"), *parts])

    # ------------------------------------------------------------------------
    # Listings
    # ------------------------------------------------------------------------

    @abstractmethod
    def find(self, path: str, on_hidden: OnHidden | None = None) -> Iterator[Object]:
        """Yield the files that a path, folder or glob refers to, ordered by name.

        In a glob, `*`, `?` and `[ab]` stop at `/`; `**` as a whole part does not. The text before
        the first of these narrows the listing.

        Args:
            path: A file, a folder or a glob.
            on_hidden: Called with every hidden file: a part of its name below the folder begins
                with `.` or `_` (a folder `_key=value` is a partition and not hidden). The file is
                yielded if the call returns True. None omits all hidden files.

        Raises:
            InputError: If nothing matches or access is denied.
            Unavailable: If the storage cannot be reached.
        """

    @abstractmethod
    def walk(self, folder: str) -> Iterator[Object]:
        """Yield every file below a folder; nothing if the folder does not exist."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files directly in a folder, without those that begin with
        a dot; an empty list if the folder does not exist.
        """

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the sorted names of the folders directly in a folder; an empty list if it does not
        exist.
        """

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder; on an object store, whether it has any object."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether a file exists (locally, a file or a folder)."""

    # ------------------------------------------------------------------------
    # Reading
    # ------------------------------------------------------------------------

    @abstractmethod
    def version(self, path: str) -> str:
        """Return a text that changes with the content: an object's ETag; a small local file's hash,
        or a large one's size and modification time.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def open_read(self, path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
        """Open a file to be read sequentially.

        Args:
            path: The file.
            offset: The byte to start from.
            version: The only version to read; None reads any version.

        Raises:
            Changed: Here or while reading, if the file is no longer that version.
        """

    @abstractmethod
    def open_file(self, path: str, version: str | None = None, size: int | None = None) -> Any:
        """Open a pyarrow file that can be read at any offset.

        Args:
            path: The file.
            version: As in `open_read`.
            size: The file's size in bytes, if known; it saves one request to an object store.
        """

    def object_store(self) -> dict[str, str]:
        """Return the storage options for libraries built on the Rust crate object_store."""
        return {}

    # ------------------------------------------------------------------------
    # Writing
    # ------------------------------------------------------------------------

    def make_folder(self, path: str) -> None:
        """Create a folder that only its owner can enter, unless it exists.

        Object stores have no folders, so nothing happens there.
        """
        return

    @abstractmethod
    def put_new(self, path: str, data: bytes, private: bool = False) -> str | None:
        """Write a file atomically unless it exists, creating its folders.

        A retried request whose first answer was lost counts as written if the file holds this data,
        so concurrent writers must write different data.

        Args:
            path: The file.
            data: Its whole content.
            private: Whether only the owner may read the file (local files only).

        Returns:
            The stamp that a listing shows for the new file (`Object.stamp`), or None if this call
            did not write it. Of many concurrent writers exactly one gets a stamp.
        """

    @abstractmethod
    def put(self, path: str, data: Data, private: bool = False) -> None:
        """Write a file atomically, replacing any existing one. Arguments as in `put_new`."""

    def put_file(self, path: str, file: str) -> None:
        """Write a file atomically from a local one, replacing any existing one.

        Args:
            path: The file.
            file: The local file, which is not empty. It is not read into memory.
        """
        with (
            open(file, "rb") as source,
            mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            self.put(path, data)

    @abstractmethod
    def put_if(self, path: str, data: bytes, version: str) -> str | None:
        """Replace exactly this version of a file atomically.

        Returns:
            The stamp of the new file, or None if the file has another version or does not exist.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; nothing happens if it does not exist."""

    def delete_all(self, paths: Iterable[str]) -> None:
        """Delete many files."""
        for _ in in_threads(self.delete, paths, _DELETE_THREADS):
            pass

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete a folder and all files below it; nothing happens if it does not exist."""

    def clean_temporary(self, folder: str) -> int:
        """Delete the files that dead writers left below a folder.

        Returns:
            The number of files deleted. An object store never holds a partial object.
        """
        return 0
