"""Objects on S3 and on stores with its API: listings, ranged reads, conditional writes."""

import itertools
import logging
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from raypd.storage.common import Changed, Data, Object, StorageError, Unavailable
from raypd.storage.object_store import ObjectStore
from raypd.storage.range_reader import RangeReader
from raypd.storage.s3_client import MISSING, UNMET, BrokenOff, S3Client, code_of, split, target

# A larger object is sent in parts of PART_BYTES.
MULTIPART_BYTES = 64 << 20
PART_BYTES = 16 << 20
_DELETE_OBJECTS = 1000  # keys of one request
# Attempts of a conditional write that collides with another one in progress.
_CONFLICT_ATTEMPTS = 6
_CONFLICT_CODES = ("ConditionalRequestConflict", "OperationAborted", "409")
# A body that breaks off loses at most this many bytes.
_CHUNK = 64 << 10
# Seconds to wait at most before a broken body is requested again.
_LONGEST_WAIT = 20.0

_log = logging.getLogger("raypd.storage")


class S3Reader(RangeReader):
    """Reads one version of an object on S3; every request carries If-Match."""

    def _fetch(self, begin: int, length: int) -> bytes:
        # If a body breaks off, the next request starts where it ended.
        data = bytearray()
        attempts = self._store.settings.requests.max_attempts
        for attempt in range(1, attempts + 1):
            try:
                response = self._get(begin + len(data), begin + length)
                if response is None:
                    break
                length = min(length, self.size() - begin)
                reason = _drain(response["Body"], data, length)
            except BrokenOff as error:
                reason = str(error)
            if reason is None and len(data) >= length:
                break
            if attempt == attempts:
                why = f"at byte {begin + len(data)} ({reason or 'the answer was too short'})"
                raise Unavailable(
                    f"{self.path}: the body broke off {attempts} times, the last time {why}"
                )
            time.sleep(random.random() * min(_LONGEST_WAIT, 0.1 * 2**attempt))
        return bytes(data)

    def _get(self, begin: int, end: int) -> Any:
        """Return the answer to one ranged GET, or None if the range is beyond the end."""
        keys = {"Range": f"bytes={begin}-{end - 1}"}
        if self.version:
            keys["IfMatch"] = f'"{self.version}"'
        with self._store.translated(self.path, "s3:GetObject"):
            try:
                response = self._store.boto().get_object(**target(self.path), **keys)
            except ClientError as error:
                if code_of(error) in ("InvalidRange", "416", "RequestedRangeNotSatisfiable"):
                    if self._size is None:
                        self._size = begin
                    return None
                raise
        version = response["ETag"].strip('"')
        # Some stores ignore If-Match.
        if self.version is not None and version != self.version:
            response["Body"].close()
            raise Changed(self.path)
        self.version = version
        _, _, total = response.get("ContentRange", "").rpartition("/")
        if total.isdigit():
            self._size = int(total)
        elif begin == 0:
            # Some stores send all of a small object and no range.
            self._size = int(response["ContentLength"])
        else:
            response["Body"].close()
            raise StorageError(
                f"{self.path}: the store does not answer requests for a range of bytes"
            )
        return response


def _drain(body: Any, data: bytearray, length: int) -> str | None:
    """Append a body to `data` up to a length.

    Returns:
        The name of the error that interrupted the body, or None if all of it arrived.
    """
    try:
        for chunk in body.iter_chunks(_CHUNK):
            data += chunk
            if len(data) >= length:
                break
        del data[length:]
        return None
    except (BotoCoreError, HTTPError, OSError) as error:
        return type(error).__name__
    finally:
        body.close()


class S3(S3Client, ObjectStore):
    """Objects on S3 through boto3."""

    schemes = ("s3://",)

    def absolute(self, path: str) -> str:
        split(path)
        return path.rstrip("/")

    def reader(self, path: str, version: str | None, size: int | None, ahead: bool) -> RangeReader:
        return S3Reader(self, path, version, size, ahead)

    def head(self, path: str) -> Object:
        with self.translated(path, "s3:GetObject"):
            answer = self.boto().head_object(**target(path))
        return Object(
            path, path.rpartition("/")[2], answer["ContentLength"], answer["ETag"].strip('"')
        )

    def single(self, path: str) -> Object | None:
        bucket, key = split(path)
        if not key:
            return None
        # A listing, because HEAD needs another permission and its refusal has no reason.
        with self.translated(path, "s3:ListBucket"):
            item = self.first(bucket, key)
        if item is None or item["Key"] != key:
            return None
        return _object(path, item)

    def objects(self, prefix: str) -> Iterator[Object]:
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                # Some tools create keys that end in / to represent folders.
                if not item["Key"].endswith("/"):
                    yield _object(prefix, item)

    def _pages(self, path: str, **options: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing, of a thousand keys each."""
        bucket, prefix = split(path)
        with self.translated(path, "s3:ListBucket"):
            paginator = self.boto().get_paginator("list_objects_v2")
            yield from paginator.paginate(Bucket=bucket, Prefix=prefix, **options)

    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        for page in self._pages(folder.rstrip("/") + "/", Delimiter="/"):
            prefixes = page.get("CommonPrefixes", [])
            folders = [prefix["Prefix"].split("/")[-2] for prefix in prefixes]
            objects = [item["Key"].rpartition("/")[2] for item in page.get("Contents", [])]
            yield folders, objects

    def is_folder(self, path: str) -> bool:
        with self.translated(path, "s3:ListBucket"):
            return self.first(*split(path.rstrip("/") + "/")) is not None

    def put(self, path: str, data: Data, private: bool = False) -> None:
        with self.translated(path, "s3:PutObject"):
            self._send(path, data, {})

    def put_new(self, path: str, data: bytes, private: bool = False) -> str | None:
        # Some stores check the condition on a single PUT only, not on a multipart upload.
        if len(data) > MULTIPART_BYTES and self.exists(path):
            return None
        return self._put_if(path, data, {"IfNoneMatch": "*"})

    def put_if(self, path: str, data: bytes, version: str) -> str | None:
        return self._put_if(path, data, {"IfMatch": f'"{version}"'})

    def _put_if(self, path: str, data: bytes, condition: dict[str, str]) -> str | None:
        with self.translated(path, "s3:PutObject"):
            attempt = 1
            while True:
                try:
                    return self._send(path, data, condition)
                except ClientError as error:
                    code = code_of(error)
                    if code in UNMET:
                        # The SDK retries when an answer is lost; then the first try was written.
                        sdk_retries = error.response.get("ResponseMetadata", {}).get(
                            "RetryAttempts", 0
                        )
                        if sdk_retries > 0 or attempt > 1:
                            return self.stamp_if_holds(path, data)
                        return None
                    if code in MISSING and "IfMatch" in condition:
                        return None
                    if code not in _CONFLICT_CODES or attempt == _CONFLICT_ATTEMPTS:
                        raise
                time.sleep(0.2 * 2**attempt)
                attempt += 1

    def _send(self, path: str, data: Data, condition: dict[str, str]) -> str:
        """Send one PUT, or a multipart upload whose completion carries the condition.

        Raises botocore's errors.

        Returns:
            The ETag of the new object.
        """
        boto = self.boto()
        keys = target(path)
        if len(data) <= MULTIPART_BYTES:
            answer = boto.put_object(Body=bytes(data), **keys, **condition)
            return str(answer["ETag"]).strip('"')
        upload = boto.create_multipart_upload(**keys)["UploadId"]
        try:
            parts = []
            for number, begin in enumerate(range(0, len(data), PART_BYTES), 1):
                body = memoryview(data)[begin : begin + PART_BYTES].tobytes()
                answer = boto.upload_part(Body=body, PartNumber=number, UploadId=upload, **keys)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            answer = boto.complete_multipart_upload(
                UploadId=upload, MultipartUpload={"Parts": parts}, **keys, **condition
            )
            return str(answer["ETag"]).strip('"')
        except BaseException:
            # The uploaded parts cost money and appear in no listing of objects.
            try:
                boto.abort_multipart_upload(UploadId=upload, **keys)
            except (BotoCoreError, ClientError):
                _log.warning("a multipart upload could not be aborted: %s", path)
            raise

    def delete(self, path: str) -> None:
        with self.translated(path, "s3:DeleteObject"):
            self.boto().delete_object(**target(path))

    def delete_all(self, paths: Iterable[str]) -> None:
        remaining = iter(paths)
        batch = list(itertools.islice(remaining, _DELETE_OBJECTS))
        while batch:
            keys = [{"Key": split(path)[1]} for path in batch]
            request = {"Objects": keys, "Quiet": True}
            with self.translated(batch[0], "s3:DeleteObject"):
                answer = self.boto().delete_objects(Bucket=split(batch[0])[0], Delete=request)
                for error in answer.get("Errors", []):
                    raise ClientError({"Error": error}, "DeleteObjects")
            batch = list(itertools.islice(remaining, _DELETE_OBJECTS))


def _object(prefix: str, item: dict[str, Any]) -> Object:
    path = f"s3://{split(prefix)[0]}/{item['Key']}"
    return Object(path, path[prefix.rfind("/") + 1 :], item["Size"], item["ETag"].strip('"'))
