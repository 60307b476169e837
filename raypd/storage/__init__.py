"""Files in local folders and on object stores: a path is local (or file://), `s3://bucket/key`,
`gs://bucket/key`, `az://container/key` or `abfss://container@account.dfs.core.windows.net/key`.
Every function raises FileNotFoundError, another OSError (StorageError, of these Unavailable or
Changed) or, for what the user asked to be read, InputError; no text of these holds a secret. The
functions are the methods of one `Storage` (`configure`).
"""
# ruff: noqa: F401 -- what the other rooms import from here

import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from raypd.config import StorageConfig
from raypd.storage import cloud, local
from raypd.storage.common import Changed, Object, StorageError, Unavailable, find_objects, outage
from raypd.storage.s3 import S3
from raypd.storage.s3_client import split
from raypd.storage.threads import in_threads


def is_remote(path: str) -> bool:
    return path.startswith(("s3://", *cloud.SCHEMES))


def absolute(path: str) -> str:
    """A path that means the same in every process.

    Raises InputError for an unknown kind of storage.
    """
    if not is_remote(path):
        return str(local.local_path(path))
    (split if path.startswith("s3://") else cloud.split)(path)
    return path.rstrip("/")


def join(root: str, *parts: str) -> str:
    return "/".join([root.rstrip("/"), *parts]) if is_remote(root) else os.path.join(root, *parts)


def clean_temporary(folder: str) -> int:
    """Removes files of dead writers below a folder; how many.

    On an object store nothing is ever half-written.
    """
    return 0 if is_remote(folder) else local.clean_temporary(folder)


class Storage:
    """Local folders and object stores under one set of settings; its connections may be used from
    many threads. What the settings leave open (endpoint, region, credentials) the SDK finds in
    environment variables (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...), in its files or from the
    instance's role.
    """

    def __init__(self, settings: StorageConfig | None = None) -> None:
        self.s3, self.clouds = (
            S3(settings or StorageConfig()),
            cloud.CloudStore(settings or StorageConfig()),
        )

    def configure(self, settings: StorageConfig) -> None:
        """Takes a configuration's section `storage` for all that is done on object stores from now
        on.
        """
        if settings != self.s3.settings:
            self.s3, self.clouds = S3(settings), cloud.CloudStore(settings)

    def _remote(self, path: str) -> S3 | cloud.CloudStore:
        return self.s3 if path.startswith("s3://") else self.clouds

    def find(self, path: str) -> Iterator[Object]:
        """The files that a path, folder or glob stands for, by name.

        Raises InputError (none, no access), Unavailable. Hidden ones (a part of the name below the
        folder begins with . or _) are left out. In a glob `*`, `?` and `[ab]` stop at /, `**` as a
        whole part does not; what stands before the first of these narrows a listing of objects.
        """
        return find_objects(self._remote(path), path) if is_remote(path) else local.find(path)

    def walk(self, folder: str) -> Iterator[Object]:
        """Every file below a folder, one by one; none where there is nothing."""
        return self._remote(folder).walk(folder) if is_remote(folder) else local.walk(folder)

    def names(self, folder: str) -> list[str]:
        """Sorted names of the files right in a folder but those that begin with .; none where there
        is no folder.
        """
        if is_remote(folder):
            return self._remote(folder).names(folder)
        return local.names(folder, os.DirEntry.is_file)

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders right in a folder; none where there is no folder."""
        if is_remote(folder):
            return self._remote(folder).folders(folder)
        return local.names(folder, os.DirEntry.is_dir)

    def is_folder(self, path: str) -> bool:
        """Whether a path is a folder; on an object store, whether anything lies below it."""
        if is_remote(path):
            return self._remote(path).is_folder(path)
        return local.local_path(path).is_dir()

    def exists(self, path: str) -> bool:
        """Whether there is a file (or, locally, a folder) of this path."""
        if is_remote(path):
            return self._remote(path).exists(path)
        return local.local_path(path).exists()

    def version(self, path: str) -> str:
        """What changes with the content: an object's ETag, a file's hash, or size and time of
        change of a large one.
        """
        return self._remote(path).head(path).stamp if is_remote(path) else local.version(path)

    def read(self, path: str) -> bytes:
        if is_remote(path):
            return self._remote(path).read(path)
        return local.local_path(path).read_bytes()

    def open_read(self, path: str, offset: int = 0, version: str | None = None) -> BinaryIO:
        """A file to be read in sequence; an object's body that breaks off is taken up there.
        version: the only one to read. Raises, here or later, FileNotFoundError, StorageError,
        Changed where the file is another by now.
        """
        if not is_remote(path):
            return local.open_read(path, offset, version)
        reader = self._remote(path).reader(self._remote(path), path, version, None, ahead=True)
        reader.seek(offset)
        return cast(BinaryIO, io.BufferedReader(reader, 1 << 20))

    def open_file(self, path: str, version: str | None = None, size: int | None = None) -> Any:
        """A pyarrow file to be read anywhere; raises as open_read does. size: bytes, which saves an
        object's HEAD.
        """
        import pyarrow as pa

        if not is_remote(path):
            return pa.PythonFile(local.open_read(path, 0, version), mode="r")
        return pa.PythonFile(
            self._remote(path).reader(self._remote(path), path, version, size, ahead=False),
            mode="r",
        )

    def object_store(self, path: str) -> dict[str, str]:
        """How a library that uses the Rust crate object_store is to open a path: its storage
        options.
        """
        return self._remote(path).object_store() if is_remote(path) else {}

    def make_folder(self, path: str) -> None:
        """Makes a folder that its owner alone can enter; one that is there stays as it is.

        Nothing on object stores.
        """
        if not is_remote(path):
            local.make_folder(path)

    def put_new(self, path: str, data: bytes, private: bool = False) -> bool:
        """Writes a file whole, and its folders, unless it exists: False, and what is there stays as
        it is. Of many writers at once one gets True, and so does one whose answer was lost, if it
        finds its data; so these must differ between writers. private: only its owner reads it.
        """
        if is_remote(path):
            return self._remote(path).put_new(path, data)
        return local.put_new(path, data, private)

    def put(self, path: str, data: bytes, private: bool = False) -> None:
        """Writes a file whole, and its folders, in place of what is there. private: as in
        `put_new`.
        """
        if is_remote(path):
            return self._remote(path).put(path, data)
        return local.put(path, data, private)

    def put_if(self, path: str, data: bytes, version: str) -> bool:
        """Replaces exactly this version of a file, whole; False when the file is another version,
        or gone.
        """
        if is_remote(path):
            return self._remote(path).put_if(path, data, version)
        return local.put_if(path, data, version)

    def delete(self, path: str) -> None:
        """Removes a file; nothing where there is none."""
        if is_remote(path):
            return self._remote(path).delete(path)
        return local.local_path(path).unlink(missing_ok=True)


default = Storage()
configure = default.configure
find = default.find
walk = default.walk
names = default.names
folders = default.folders
is_folder = default.is_folder
exists = default.exists
version = default.version
read = default.read
open_read = default.open_read
open_file = default.open_file
delete = default.delete
put_new = default.put_new
put = default.put
put_if = default.put_if
make_folder = default.make_folder
object_store = default.object_store
