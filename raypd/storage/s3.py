"""Objects on S3: looked at, read whole, written under conditions, deleted. See `Storage` for each function."""

import contextlib
import logging
import time
import uuid

from botocore.exceptions import BotoCoreError, ClientError

from raypd.storage.s3_client import MISSING, UNMET, S3Client, code_of, split, target
from raypd.storage.s3_list import beside, folders, is_folder, names, objects, single, walk
from raypd.storage.s3_read import S3Reader, head

MULTIPART_BYTES = 64 << 20  # above this an object is sent in parts
PART_BYTES = 16 << 20
_CONFLICTS = 6  # tries of a conditional write that meets another one in progress

_log = logging.getLogger("raypd.storage")


def exists(client: S3Client, path: str) -> bool:
    try:  # a bucket itself is none
        return bool(split(path)[1] and head(client, path))
    except FileNotFoundError:
        return False


def read(client: S3Client, path: str) -> bytes:
    return S3Reader(client, path, None, None, ahead=True).readall()


def put(client: S3Client, path: str, data: bytes) -> None:
    with client.translated(path, "s3:PutObject"):
        _send(client, path, data, {})


def put_new(client: S3Client, path: str, data: bytes) -> bool:
    conditional = _knows_conditions(client, path)
    # Some stores know the condition for a single PUT alone.
    unsure = not conditional or (len(data) > MULTIPART_BYTES and client.settings.endpoint_url)
    if unsure and exists(client, path):
        return False
    return _put_if(client, path, data, {"IfNoneMatch": "*"} if conditional else {})


def put_if(client: S3Client, path: str, data: bytes, version: str) -> bool:
    if _knows_conditions(client, path):
        return _put_if(client, path, data, {"IfMatch": f'"{version}"'})
    try:
        return head(client, path).stamp == version and _put_if(client, path, data, {})
    except FileNotFoundError:
        return False


def _put_if(client: S3Client, path: str, data: bytes, condition: dict[str, str]) -> bool:
    with client.translated(path, "s3:PutObject"):
        attempt = 1
        while True:
            try:
                _send(client, path, data, condition)
                return True
            except ClientError as error:
                code = code_of(error)
                if code in UNMET:
                    # The SDK tries again when an answer is lost; then it is our own first try that is in the way.
                    again = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0 or attempt > 1
                    return again and _holds(client, path, data)
                if code in MISSING and "IfMatch" in condition:
                    return False
                if code not in ("ConditionalRequestConflict", "OperationAborted", "409") or attempt == _CONFLICTS:
                    raise
            time.sleep(0.2 * 2**attempt)
            attempt += 1


def _holds(client: S3Client, path: str, data: bytes) -> bool:
    try:
        return head(client, path).size == len(data) and read(client, path) == data
    except FileNotFoundError:
        return False


def _send(client: S3Client, path: str, data: bytes, condition: dict[str, str]) -> None:
    """One PUT, or a multipart upload whose completion carries the condition. Raises botocore's errors."""
    boto, place = client.boto(), target(path)
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
        boto.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **place, **condition)
    except BaseException:
        try:  # the parts that were sent cost money and show in no listing of objects
            boto.abort_multipart_upload(UploadId=upload, **place)
        except (BotoCoreError, ClientError):
            _log.warning("a multipart upload could not be aborted: %s", path)
        raise


def _knows_conditions(client: S3Client, path: str) -> bool:
    """Whether the store refuses a conditional PUT on a key that exists. Found out by trying, once a bucket."""
    endpoint, bucket = client.boto().meta.endpoint_url, split(path)[0]
    if ".amazonaws." in endpoint:
        return True
    with client.lock:
        if bucket not in client.probed:
            client.probed[bucket] = _probe(client, f"{path.rpartition('/')[0]}/.probe-{uuid.uuid4().hex}")
            if not client.probed[bucket]:
                _log.warning(
                    "raypd: the store at %s does not know conditional writes (If-None-Match): two runs at once into "
                    "one folder can write a unit twice, though never tear one",
                    endpoint,
                )
        return client.probed[bucket]


def _probe(client: S3Client, path: str) -> bool:
    boto, place = client.boto(), target(path)
    with client.translated(path, "s3:PutObject"):
        try:
            for body in (b"first", b"second"):
                boto.put_object(Body=body, IfNoneMatch="*", **place)
            return False
        except ClientError as error:
            if code_of(error) in UNMET:
                return True
            if code_of(error) in ("NotImplemented", "501", "InvalidArgument", "400", "InvalidRequest"):
                return False
            raise
        finally:
            # A role that may not delete leaves an object of a few bytes.
            with contextlib.suppress(BotoCoreError, ClientError):
                boto.delete_object(**place)


def delete(client: S3Client, path: str) -> None:
    with client.translated(path, "s3:DeleteObject"):
        client.boto().delete_object(**target(path))


class S3(S3Client):
    """A client with what is done through it as methods, the same as those of `CloudStore`."""

    single, objects, beside, walk, names, folders, is_folder = single, objects, beside, walk, names, folders, is_folder
    head, exists, read, put, put_new, put_if, delete = head, exists, read, put, put_new, put_if, delete
    reader = S3Reader
