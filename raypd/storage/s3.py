"""Objects on S3: listed, looked at, read by ranges, written under conditions.

See `Storage` for each function.
"""

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from raypd.storage.common import Changed, Object, StorageError, Unavailable
from raypd.storage.range_reader import ObjectStore, RangeReader
from raypd.storage.s3_client import MISSING, UNMET, BrokenOff, S3Client, code_of, split, target

MULTIPART_BYTES = 64 << 20  # above this an object is sent in parts
PART_BYTES = 16 << 20
_CONFLICTS = 6  # tries of a conditional write that meets another one in progress
_CHUNK = 64 << 10  # what of a body is lost at most when it breaks off
_LONGEST_WAIT = 20.0  # before it is taken up

_log = logging.getLogger("raypd.storage")


class S3Reader(RangeReader):
    """Every request carries If-Match; its client is an S3."""

    def _fetch(self, begin: int, length: int) -> bytes:
        """A cut body is taken up where it broke off."""
        data = bytearray()
        attempts = self._client.settings.max_attempts
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
        """The answer to one ranged GET; None where the range lies behind the end."""
        keys = {
            "Range": f"bytes={begin}-{end - 1}",
            **({"IfMatch": f'"{self.version}"'} if self.version else {}),
        }
        with self._client.translated(self.path, "s3:GetObject"):
            try:
                response = self._client.boto().get_object(**target(self.path), **keys)
            except ClientError as error:
                if code_of(error) in ("InvalidRange", "416", "RequestedRangeNotSatisfiable"):
                    self._size = begin if self._size is None else self._size
                    return None
                raise
        version = response["ETag"].strip('"')
        # A store that does not know If-Match.
        if self.version is not None and version != self.version:
            response["Body"].close()
            raise Changed(self.path)
        self.version = version
        _, _, total = response.get("ContentRange", "").rpartition("/")
        if total.isdigit():
            self._size = int(total)
        elif begin == 0:  # a store that sends the whole of a small object without a range
            self._size = int(response["ContentLength"])
        else:
            response["Body"].close()
            raise StorageError(
                f"{self.path}: the store does not answer requests for a range of bytes"
            )
        return response


def _drain(body: Any, data: bytearray, length: int) -> str | None:
    """Appends a body to the data up to a length; why it broke off, or None where it came whole."""
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
    reader = S3Reader

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
        # Not HEAD: it needs another permission, and has no reason.
        with self.translated(path, "s3:ListBucket"):
            item = self.first(bucket, key)
        return _object(path, item) if item is not None and item["Key"] == key else None

    def objects(self, prefix: str) -> Iterator[Object]:
        for page in self._pages(prefix):
            # Keys that end in / are folders that some tools make.
            yield from (
                _object(prefix, item)
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")
            )

    def _pages(self, path: str, **options: str) -> Iterator[dict[str, Any]]:
        """Of a thousand keys, of which one is held at a time."""
        bucket, prefix = split(path)
        with self.translated(path, "s3:ListBucket"):
            yield from (
                self.boto()
                .get_paginator("list_objects_v2")
                .paginate(Bucket=bucket, Prefix=prefix, **options)
            )

    def level(self, folder: str) -> Iterator[tuple[list[str], list[str]]]:
        for page in self._pages(folder.rstrip("/") + "/", Delimiter="/"):
            names = [prefix["Prefix"].split("/")[-2] for prefix in page.get("CommonPrefixes", [])]
            yield names, [item["Key"].rpartition("/")[2] for item in page.get("Contents", [])]

    def is_folder(self, path: str) -> bool:
        with self.translated(path, "s3:ListBucket"):
            return self.first(*split(path.rstrip("/") + "/")) is not None

    def put(self, path: str, data: bytes) -> None:
        with self.translated(path, "s3:PutObject"):
            self._send(path, data, {})

    def put_new(self, path: str, data: bytes) -> bool:
        # Some stores know the condition for a single PUT alone.
        if len(data) > MULTIPART_BYTES and self.exists(path):
            return False
        return self._put_if(path, data, {"IfNoneMatch": "*"})

    def put_if(self, path: str, data: bytes, version: str) -> bool:
        return self._put_if(path, data, {"IfMatch": f'"{version}"'})

    def _put_if(self, path: str, data: bytes, condition: dict[str, str]) -> bool:
        with self.translated(path, "s3:PutObject"):
            attempt = 1
            while True:
                try:
                    self._send(path, data, condition)
                    return True
                except ClientError as error:
                    code = code_of(error)
                    if code in UNMET:
                        # The SDK tries again when an answer is lost; then the first try was
                        # written.
                        again = (
                            error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0
                            or attempt > 1
                        )
                        return again and self.holds(path, data)
                    if code in MISSING and "IfMatch" in condition:
                        return False
                    if (
                        code not in ("ConditionalRequestConflict", "OperationAborted", "409")
                        or attempt == _CONFLICTS
                    ):
                        raise
                time.sleep(0.2 * 2**attempt)
                attempt += 1

    def _send(self, path: str, data: bytes, condition: dict[str, str]) -> None:
        """One PUT, or a multipart upload whose completion carries the condition.

        Raises botocore's errors.
        """
        boto = self.boto()
        place = target(path)
        if len(data) <= MULTIPART_BYTES:
            boto.put_object(Body=data, **place, **condition)
            return
        upload = boto.create_multipart_upload(**place)["UploadId"]
        try:
            parts = []
            for number, begin in enumerate(range(0, len(data), PART_BYTES), 1):
                body = memoryview(data)[begin : begin + PART_BYTES].tobytes()
                answer = boto.upload_part(Body=body, PartNumber=number, UploadId=upload, **place)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            boto.complete_multipart_upload(
                UploadId=upload, MultipartUpload={"Parts": parts}, **place, **condition
            )
        except BaseException:
            try:  # the parts that were sent cost money and show in no listing of objects
                boto.abort_multipart_upload(UploadId=upload, **place)
            except (BotoCoreError, ClientError):
                _log.warning("a multipart upload could not be aborted: %s", path)
            raise

    def delete(self, path: str) -> None:
        with self.translated(path, "s3:DeleteObject"):
            self.boto().delete_object(**target(path))


def _object(prefix: str, item: dict[str, Any]) -> Object:
    path = f"s3://{split(prefix)[0]}/{item['Key']}"
    return Object(path, path[prefix.rfind("/") + 1 :], item["Size"], item["ETag"].strip('"'))
