"""Google's and Azure's storage (gs://, az://, abfss://) through obstore, under the promises of S3;
see `Storage`. Credentials are those that obstore finds in the environment or gets from the
machine's identity.
"""

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

from raypd.config import StorageConfig, without_credentials
from raypd.errors import ConfigError, InputError
from raypd.storage.common import Changed, Object, StorageError, Unavailable
from raypd.storage.range_reader import ObjectStore, RangeReader

SCHEMES = ("gs://", "az://", "abfss://")
_SHAPE = re.compile(r"((?:gs|az)://[\w.-]+|abfss://[\w$-]+@[\w.-]+)(?:/(.*))?", re.DOTALL)
_NOBODY = re.compile(r"code: 401|AuthenticationFailed|token request|requesting token")


def split(path: str) -> tuple[str, str]:
    """(scheme and bucket, key) of a URI. Raises InputError."""
    if match := _SHAPE.fullmatch(path):
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
    def _fetch(self, begin: int, length: int) -> bytes:
        condition = {"if_match": f'"{self.version}"'} if self.version else {}
        try:
            with self._client.opened(self.path, "read") as (obstore, store, key):
                answer = obstore.get(
                    store, key, options={"range": (begin, begin + length), **condition}
                )
                data = answer.bytes().to_bytes()
                current = answer.meta
        except StorageError as error:
            if " 416 " not in str(error):
                raise
            self._size = begin if self._size is None else self._size
            return b""  # behind the end
        if self.version not in (None, _stamp(current)):  # a store that does not know If-Match
            raise Changed(self.path)
        self.version = _stamp(current)
        self._size = current["size"]
        return data


class CloudStore(ObjectStore):
    """The stores of all buckets that were asked for, by their URI; for many threads."""

    reader = CloudReader

    def __init__(self, settings: StorageConfig) -> None:
        self.settings = settings
        self._stores: dict[str, Any] = {}

    def object_store(self) -> dict[str, str]:
        """Beside what the crate object_store finds in the environment by itself."""
        return {"skip_signature": "true"} if self.settings.anonymous else {}

    def single(self, path: str) -> Object | None:
        with contextlib.suppress(FileNotFoundError):
            return self.head(path) if split(path)[1] else None
        return None

    def objects(self, prefix: str) -> Iterator[Object]:
        """What begins with a prefix; the folder that it lies in is listed, as obstore asks for
        whole names.
        """
        bucket, key = split(prefix)
        with self.opened(prefix, "list") as (obstore, store, _):
            for page in obstore.list(store, key.rpartition("/")[0] or None):
                items = (item for item in page if item["path"].startswith(key))
                yield from (_object(f"{bucket}/{item['path']}", prefix, item) for item in items)

    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        with self.opened(folder, "list") as (obstore, store, key):
            page = obstore.list_with_delimiter(store, key.rstrip("/") or None)
        names = [path.rstrip("/").rpartition("/")[2] for path in page["common_prefixes"]]
        yield names, [item["path"].rpartition("/")[2] for item in page["objects"]]

    def is_folder(self, path: str) -> bool:
        return next(self.walk(path), None) is not None

    def head(self, path: str) -> Object:
        return _object(path, path, self._head(path))

    def _head(self, path: str) -> Any:
        with self.opened(path, "read") as (obstore, store, key):
            return obstore.head(store, key)

    def put(self, path: str, data: bytes, mode: Any = "overwrite") -> None:
        with self.opened(path, "write") as (obstore, store, key):
            obstore.put(store, key, data, mode=mode, use_multipart=False)

    def put_new(self, path: str, data: bytes, mode: Any = "create") -> bool:
        try:
            self.put(path, data, mode)
            return True
        except Changed:
            return self.holds(path, data)

    def put_if(self, path: str, data: bytes, version: str) -> bool:
        try:
            current = self._head(path)
        except FileNotFoundError:
            return False
        # Azure compares one, Google the other.
        mode = {key: current[key] for key in ("e_tag", "version") if current[key]}
        return _stamp(current) == version and self.put_new(path, data, mode)

    def delete(self, path: str) -> None:
        with (
            contextlib.suppress(FileNotFoundError),
            self.opened(path, "delete") as (obstore, store, key),
        ):
            obstore.delete(store, key)

    @contextlib.contextmanager
    def opened(self, path: str, action: str) -> Iterator[tuple[Any, Any, str]]:
        """obstore, the store and the key of a path; obstore's errors become FileNotFoundError,
        Changed, StorageError or Unavailable. action: what the credentials must allow.
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
        connect = timedelta(seconds=settings.connect_timeout)
        read = timedelta(seconds=settings.read_timeout)
        return cast(Any, store.from_url)(
            bucket,
            config={"skip_signature": True} if settings.anonymous else None,
            # http: for an emulator that the environment names.
            client_options={
                "connect_timeout": connect,
                "read_timeout": read,
                "timeout": hour,
                "allow_http": True,
            },
            retry_config={"max_retries": settings.max_attempts - 1, "retry_timeout": hour},
        )


def _stamp(item: Any) -> str:
    return str(item["e_tag"]).strip('"')


def _object(path: str, prefix: str, item: Any) -> Object:
    return Object(path, path[prefix.rfind("/") + 1 :], item["size"], _stamp(item))


def _explained(error: Exception, path: str, action: str) -> Exception:
    """An error in words; never its body or query, in which a token may stand."""
    text = str(error)
    status, code = (
        re.search(p, text) for p in (r"status code: (\d{3}) ?([^:\n]*)", r"<Code>(\w+)</Code>")
    )
    number, said = (
        (int(status[1]), f"{status[1]} {code[1] if code else status[2]} ") if status else (0, "")
    )
    if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", text):
        return StorageError(f"{path}: there is no {split(path)[0]}; check the name and the account")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path}: no such object")
    if _NOBODY.search(text):
        if path.startswith("gs://"):
            names = "GOOGLE_APPLICATION_CREDENTIALS"
        else:
            names = "AZURE_STORAGE_ACCOUNT_NAME and _KEY"
        return Unavailable(
            f"{path}: {said}the store refuses these credentials: renew them, or set {names} "
            "(docs/storage.md); the same command resumes"
        )
    passes = number in (408, 429) or number >= 500
    reason = f"the store answered {said}to {action}"
    if number == 403:
        reason = (
            f"forbidden: the credentials must allow to {action} here (the store says: "
            f"{said.strip()})"
        )
    elif not status:
        reason = re.sub(r"\?\S+", "", text.split("\n\nDebug source")[0]).strip()
        passes = "HTTP error" in reason or "Error performing" in reason
    return (Unavailable if passes else StorageError)(f"{path}: {reason}")
