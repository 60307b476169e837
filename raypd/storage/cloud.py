"""Google's and Azure's storage (gs://, az://, abfss://) through obstore.

It gives the same guarantees as S3. obstore finds the credentials in the environment or gets them
from the machine's identity.
"""

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from raypd.config import StorageConfig, without_credentials
from raypd.errors import ConfigError, InputError
from raypd.storage.common import Changed, Data, Object, StorageError, Unavailable
from raypd.storage.object_store import ObjectStore
from raypd.storage.range_reader import RangeReader

_SHAPE = re.compile(r"((?:gs|az)://[\w.-]+|abfss://[\w$-]+@[\w.-]+)(?:/(.*))?", re.DOTALL)
_UNAUTHENTICATED = re.compile(r"code: 401|AuthenticationFailed|token request|requesting token")


def split(path: str) -> tuple[str, str]:
    """Return (scheme and bucket, key) of a URI.

    Raises:
        InputError: If the URI does not have the form that its scheme needs.
    """
    match = _SHAPE.fullmatch(path)
    if match:
        return match[1], match[2] or ""
    try:
        shapes = (
            "gs://bucket/prefix, az://container/prefix or "
            "abfss://container@account.dfs.core.windows.net/prefix"
        )
        raise InputError(f"{without_credentials(path)}: write {shapes}")
    except ValueError as error:
        raise InputError(str(error)) from None


class CloudReader(RangeReader):
    """Reads one version of an object; every request carries If-Match."""

    def _fetch(self, begin: int, length: int) -> bytes:
        condition = {"if_match": f'"{self.version}"'} if self.version else {}
        try:
            with self._store.opened(self.path, "read") as (obstore, store, key):
                answer = obstore.get(
                    store, key, options={"range": (begin, begin + length), **condition}
                )
                data = answer.bytes().to_bytes()
                current = answer.meta
        except StorageError as error:
            if " 416 " not in str(error):
                raise
            # The range is beyond the end.
            if self._size is None:
                self._size = begin
            return b""
        # Some stores ignore If-Match.
        if self.version not in (None, _stamp(current)):
            raise Changed(self.path)
        self.version = _stamp(current)
        self._size = current["size"]
        return data


class CloudStore(ObjectStore):
    """Objects on Google's and Azure's storage, with one obstore client per bucket."""

    schemes = ("gs://", "az://", "abfss://")

    def __init__(self, settings: StorageConfig) -> None:
        super().__init__(settings)
        self._stores: dict[str, Any] = {}

    def absolute(self, path: str) -> str:
        split(path)
        return path.rstrip("/")

    def reader(self, path: str, version: str | None, size: int | None, ahead: bool) -> RangeReader:
        return CloudReader(self, path, version, size, ahead)

    def object_store(self) -> dict[str, str]:
        # The crate finds everything else in the environment by itself.
        if self.settings.requests.anonymous:
            return {"skip_signature": "true"}
        return {}

    def single(self, path: str) -> Object | None:
        key = split(path)[1]
        if not key:
            return None
        with contextlib.suppress(FileNotFoundError):
            return self.head(path)
        return None

    def objects(self, prefix: str) -> Iterator[Object]:
        # obstore only lists whole folders, so the folder of the prefix is listed and filtered.
        bucket, key = split(prefix)
        folder = key.rpartition("/")[0] or None
        with self.opened(prefix, "list") as (obstore, store, _):
            for page in obstore.list(store, folder):
                for item in page:
                    if item["path"].startswith(key):
                        yield _object(f"{bucket}/{item['path']}", prefix, item)

    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        with self.opened(folder, "list") as (obstore, store, key):
            page = obstore.list_with_delimiter(store, key.rstrip("/") or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in page["common_prefixes"]]
        objects = [item["path"].rpartition("/")[2] for item in page["objects"]]
        yield folders, objects

    def head(self, path: str) -> Object:
        return _object(path, path, self._head(path))

    def _head(self, path: str) -> Any:
        with self.opened(path, "read") as (obstore, store, key):
            return obstore.head(store, key)

    def put(self, path: str, data: Data, private: bool = False) -> None:
        self._put(path, bytes(data), "overwrite")

    def put_file(self, path: str, file: str) -> None:
        with self.opened(path, "write") as (obstore, store, key):
            obstore.put(store, key, Path(file), mode="overwrite", use_multipart=False)

    def _put(self, path: str, data: bytes, mode: Any) -> str:
        with self.opened(path, "write") as (obstore, store, key):
            return _stamp(obstore.put(store, key, data, mode=mode, use_multipart=False))

    def put_new(self, path: str, data: bytes, private: bool = False) -> str | None:
        return self._put_if(path, data, "create")

    def _put_if(self, path: str, data: bytes, mode: Any) -> str | None:
        try:
            return self._put(path, data, mode)
        except Changed:
            return self.stamp_if_holds(path, data)

    def put_if(self, path: str, data: bytes, version: str) -> str | None:
        try:
            current = self._head(path)
        except FileNotFoundError:
            return None
        if _stamp(current) != version:
            return None
        # Azure compares the ETag, Google the version.
        mode = {key: current[key] for key in ("e_tag", "version") if current[key]}
        return self._put_if(path, data, mode)

    def delete(self, path: str) -> None:
        with (
            contextlib.suppress(FileNotFoundError),
            self.opened(path, "delete") as (obstore, store, key),
        ):
            obstore.delete(store, key)

    @contextlib.contextmanager
    def opened(self, path: str, action: str) -> Iterator[tuple[Any, Any, str]]:
        """Yield obstore, the store and the key of a path, and translate obstore's errors.

        Args:
            path: The object.
            action: The permission that the credentials need: read, write, list or delete.

        Raises:
            FileNotFoundError, Changed, StorageError, Unavailable: In place of obstore's errors.
        """
        bucket, key = split(path)
        try:
            import obstore
        except ImportError:
            raise ConfigError(
                f"{path} needs the package obstore: pip install 'raypd[cloud]'"
            ) from None
        errors = obstore.exceptions
        try:
            if bucket not in self._stores:
                self._stores[bucket] = self._make(bucket)
            yield obstore, self._stores[bucket], key
        except (errors.AlreadyExistsError, errors.PreconditionError, errors.NotModifiedError):
            raise Changed(path) from None
        except (FileNotFoundError, errors.BaseError, ValueError) as error:
            raise _explained(error, path, action) from None

    def _make(self, bucket: str) -> Any:
        from obstore import store

        settings = self.settings
        hour = timedelta(hours=1)
        connect = timedelta(seconds=settings.requests.connect_timeout)
        read = timedelta(seconds=settings.requests.read_timeout)
        return cast(Any, store.from_url)(
            bucket,
            config={"skip_signature": True} if settings.requests.anonymous else None,
            # http is for an emulator that the environment names.
            client_options={
                "connect_timeout": connect,
                "read_timeout": read,
                "timeout": hour,
                "allow_http": True,
            },
            retry_config={"max_retries": settings.requests.max_attempts - 1, "retry_timeout": hour},
        )


def _stamp(item: Any) -> str:
    return str(item["e_tag"]).strip('"')


def _object(path: str, prefix: str, item: Any) -> Object:
    return Object(path, path[prefix.rfind("/") + 1 :], item["size"], _stamp(item))


def _explained(error: Exception, path: str, action: str) -> Exception:
    """Return an error with a message to act on, without body or query, which may hold a token."""
    text = str(error)
    status = re.search(r"status code: (\d{3}) ?([^:\n]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    number = 0
    answer = ""
    if status:
        number = int(status[1])
        answer = f"{number} {code[1] if code else status[2]} "
    if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", text):
        return StorageError(f"{path}: there is no {split(path)[0]}; check the name and the account")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path}: no such object")
    if _UNAUTHENTICATED.search(text):
        variables = "AZURE_STORAGE_ACCOUNT_NAME and _KEY"
        if path.startswith("gs://"):
            variables = "GOOGLE_APPLICATION_CREDENTIALS"
        return Unavailable(
            f"{path}: {answer}the store refuses these credentials: renew them, or set {variables} "
            "(docs/storage.md); run the same command again to resume"
        )
    is_transient = number in (408, 429) or number >= 500
    reason = f"the store answered {answer}to {action}"
    if number == 403:
        reason = (
            f"forbidden: the credentials must allow to {action} here (the store says: "
            f"{answer.strip()})"
        )
    elif not status:
        reason = re.sub(r"\?\S+", "", text.split("\n\nDebug source")[0]).strip()
        is_transient = "HTTP error" in reason or "Error performing" in reason
    kind = Unavailable if is_transient else StorageError
    return kind(f"{path}: {reason}")
