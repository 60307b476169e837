"""Reading one version of an S3 object by ranges."""

import random
import time
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from raypd.storage.common import Changed, StorageError, Unavailable
from raypd.storage.range_reader import RangeReader
from raypd.storage.s3_client import code_of, target

_CHUNK = 64 << 10  # what of a body is lost at most when it breaks off
_LONGEST_WAIT = 20.0


class S3Reader(RangeReader):
    """Every request carries If-Match; its client is an S3."""

    def _fetch(self, begin: int, length: int) -> bytes:
        """A cut body is taken up where it broke off."""
        data = bytearray()
        attempts = self._client.settings.max_attempts
        for attempt in range(1, attempts + 1):
            response = self._get(begin + len(data), begin + length)
            if response is None:
                break
            length = min(length, self.size() - begin)
            reason = _drain(response["Body"], data, length)
            if reason is None and len(data) >= length:
                break
            if attempt == attempts:
                raise Unavailable(
                    f"{self.path}: the body broke off {attempts} times, the last time at byte {begin + len(data)} "
                    f"({reason or 'the answer was too short'})"
                )
            time.sleep(random.random() * min(_LONGEST_WAIT, 0.1 * 2**attempt))
        return bytes(data)

    def _get(self, begin: int, end: int) -> Any:
        """The answer to one ranged GET; None where the range lies behind the end."""
        condition = {"IfMatch": f'"{self.version}"'} if self.version else {}
        with self._client.translated(self.path, "s3:GetObject"):
            try:
                response = self._client.boto().get_object(
                    **target(self.path), Range=f"bytes={begin}-{end - 1}", **condition
                )
            except ClientError as error:
                if code_of(error) in ("InvalidRange", "416", "RequestedRangeNotSatisfiable"):
                    self._size = begin if self._size is None else self._size
                    return None
                raise
        version = response["ETag"].strip('"')
        if self.version is not None and version != self.version:  # a store that does not know If-Match
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
            raise StorageError(f"{self.path}: the store does not answer requests for a range of bytes")
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
