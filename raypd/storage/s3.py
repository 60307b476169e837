"""Objects on S3: looked at, read whole, written under conditions, deleted."""

from __future__ import annotations

import io
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from raypd.storage import s3_client
from raypd.storage.common import Changed, Object
from raypd.storage.s3_client import code_of, split, translated
from raypd.storage.s3_read import S3Reader

MULTIPART_BYTES = 64 << 20  # above this an object is sent in parts
PART_BYTES = 16 << 20
_CONFLICTS = 6  # tries of a conditional write that meets another one in progress

_log = logging.getLogger("raypd.storage")
_probed: dict[str, bool] = {}  # bucket at its endpoint -> whether it knows conditional writes
_probing = threading.Lock()


# -------------------------------------------------------------------------------------------------------------- reading


def head(path: str, version: str | None = None) -> Object:
    """An object's size and version. Raises FileNotFoundError, StorageError; Changed when it is not that version."""
    bucket, key = split(path)
    with translated(path, "s3:GetObject"):
        answer = s3_client.client().head_object(Bucket=bucket, Key=key, **s3_client.extra())
    found = Object(path, key.rpartition("/")[2], answer["ContentLength"], answer["ETag"].strip('"'))
    if version is not None and version != found.version:
        raise Changed(path)
    return found


def exists(path: str) -> bool:
    """Whether there is an object of this key (a bucket itself is none). Raises StorageError."""
    if not split(path)[1]:
        return False
    try:
        head(path)
        return True
    except FileNotFoundError:
        return False


def read(path: str) -> bytes:
    """A whole object. Raises FileNotFoundError, StorageError."""
    return S3Reader(path, None, None, ahead=True).readall()


def open_read(path: str, offset: int, version: str | None) -> BinaryIO:
    """An object's bytes from `offset` on, in sequence."""
    reader = S3Reader(path, version, None, ahead=True)
    reader.seek(offset)
    return cast(BinaryIO, io.BufferedReader(reader, 1 << 20))


def open_file(path: str, version: str | None, size: int | None) -> Any:
    """An object for pyarrow to read here and there."""
    import pyarrow as pa

    return pa.PythonFile(S3Reader(path, version, size, ahead=False), mode="r")


# -------------------------------------------------------------------------------------------------------------- writing


def put(path: str, data: bytes) -> None:
    """Writes an object in place of what is there. Raises StorageError."""
    with translated(path, "s3:PutObject"):
        _send(path, data, {})


def put_new(path: str, data: bytes) -> bool:
    """Writes an object unless there is one of this key; False when there is. Raises StorageError."""
    if not _knows_conditions(path) and exists(path):
        return False
    if len(data) > MULTIPART_BYTES and s3_client.settings().endpoint_url and exists(path):
        return False  # some stores know the condition for a single PUT alone
    return _put_if(path, data, {"IfNoneMatch": "*"} if _knows_conditions(path) else {})


def put_if(path: str, data: bytes, version: str) -> bool:
    """Replaces exactly this version of an object; False when it is another or gone. Raises StorageError."""
    if not _knows_conditions(path):
        try:
            if head(path).version != version:
                return False
        except FileNotFoundError:
            return False
        return _put_if(path, data, {})
    return _put_if(path, data, {"IfMatch": f'"{version}"'})


def _put_if(path: str, data: bytes, condition: dict[str, str]) -> bool:
    from botocore.exceptions import ClientError

    with translated(path, "s3:PutObject"):
        for attempt in range(1, _CONFLICTS + 1):
            try:
                _send(path, data, condition)
                return True
            except ClientError as error:
                code = code_of(error)
                if code in s3_client.UNMET:
                    # The SDK tries again when an answer is lost; then it is our own first try that is in the way.
                    again = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0 or attempt > 1
                    return again and _holds(path, data)
                if code in s3_client.MISSING and "IfMatch" in condition:
                    return False
                if code not in ("ConditionalRequestConflict", "OperationAborted", "409") or attempt == _CONFLICTS:
                    raise
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")


def _holds(path: str, data: bytes) -> bool:
    """Whether an object holds exactly these bytes."""
    try:
        return head(path).size == len(data) and read(path) == data
    except FileNotFoundError:
        return False


def _send(path: str, data: bytes, condition: dict[str, str]) -> None:
    """One PUT, or a multipart upload whose completion carries the condition. Raises botocore's errors."""
    bucket, key = split(path)
    client, target = s3_client.client(), {"Bucket": bucket, "Key": key, **s3_client.extra()}
    if len(data) <= MULTIPART_BYTES:
        client.put_object(Body=data, **target, **_encryption(), **condition)
        return
    upload = client.create_multipart_upload(**target, **_encryption())["UploadId"]
    try:
        parts = []
        for number, begin in enumerate(range(0, len(data), PART_BYTES), 1):
            body = memoryview(data)[begin : begin + PART_BYTES].tobytes()
            answer = client.upload_part(Body=body, PartNumber=number, UploadId=upload, **target)
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        client.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **target, **condition)
    except BaseException:
        _abort(client, target, upload)
        raise


def _abort(client: Any, target: dict[str, Any], upload: str) -> None:
    """Frees the parts that were sent: they cost money and show in no listing of objects."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client.abort_multipart_upload(UploadId=upload, **target)
    except (BotoCoreError, ClientError):
        _log.warning("a multipart upload could not be aborted: %s/%s", target["Bucket"], target["Key"])


def _encryption() -> dict[str, str]:
    wanted = s3_client.settings()
    if wanted.sse == "none":
        return {}
    key = {"SSEKMSKeyId": wanted.kms_key_id} if wanted.kms_key_id else {}
    return {"ServerSideEncryption": wanted.sse, **key}


def _knows_conditions(path: str) -> bool:
    """Whether the store refuses a conditional PUT on a key that exists. Found out once a process by trying."""
    endpoint, bucket = s3_client.client().meta.endpoint_url, split(path)[0]
    if ".amazonaws." in endpoint:
        return True
    place = f"{endpoint} {bucket}"
    with _probing:
        if place not in _probed:
            _probed[place] = _probe(path)
            if not _probed[place]:
                _log.warning(
                    "raypd: the store at %s does not know conditional writes (If-None-Match): two runs at once into "
                    "one folder can write a unit twice, though never tear one",
                    endpoint,
                )
        return _probed[place]


def _probe(path: str) -> bool:
    from botocore.exceptions import ClientError

    folder = path.rpartition("/")[0]
    bucket, key = split(f"{folder}/.probe-{uuid.uuid4().hex}")
    client, target = s3_client.client(), {"Bucket": bucket, "Key": key, **s3_client.extra()}
    with translated(f"s3://{bucket}/{key}", "s3:PutObject"):
        try:
            for body in (b"first", b"second"):
                client.put_object(Body=body, IfNoneMatch="*", **target, **_encryption())
            return False
        except ClientError as error:
            if code_of(error) in s3_client.UNMET:
                return True
            if code_of(error) in ("NotImplemented", "501", "InvalidArgument", "400", "InvalidRequest"):
                return False
            raise
        finally:
            _quietly(lambda: client.delete_object(**target))


def _quietly(call: Callable[[], Any]) -> None:
    """For what is nice to have: a role that may not delete leaves an object of a few bytes."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        call()
    except (BotoCoreError, ClientError):
        return


def delete(path: str) -> None:
    """Removes an object; nothing where there is none. Raises StorageError."""
    bucket, key = split(path)
    with translated(path, "s3:DeleteObject"):
        s3_client.client().delete_object(Bucket=bucket, Key=key, **s3_client.extra())
