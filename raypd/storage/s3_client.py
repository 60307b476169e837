"""The connection to S3, made from the settings, and readable messages for its errors.

docs/storage.md says why it uses boto3, and how it retries.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from raypd.config import StorageConfig, without_credentials
from raypd.errors import InputError
from raypd.storage.common import Changed, StorageError, Unavailable

MISSING = ("NoSuchKey", "404", "NotFound")
_FORBIDDEN = ("AccessDenied", "403", "Forbidden", "AllAccessDisabled")
UNMET = ("PreconditionFailed", "412")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN_CALLER = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "InvalidClientTokenId",
)
_ELSEWHERE = (
    "PermanentRedirect",
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_BUSY = ("SlowDown", "ServiceUnavailable", "503", "429", "TooManyRequests", "RequestLimitExceeded")
_UNREACHABLE = (
    "EndpointConnectionError",
    "ConnectionClosedError",
    "SSLError",
    "ProxyConnectionError",
)
_ADVICE = {
    "NoCredentialsError": ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, storage.options.profile, an instance's "  # noqa: E501
    "role, or "
    "storage.options.anonymous=true for a public bucket",
    "ProfileNotFound": "; it is storage.options.profile or AWS_PROFILE",
    "NoRegionError": "; set storage.options.region",
    "InvalidRegionError": "; set storage.options.region",
}
# Errors in the settings or the name that the SDK finds before it sends a request.
_BEFORE = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "NoRegionError",
    "InvalidRegionError",
    "ParamValidationError",
)


def split(path: str) -> tuple[str, str]:
    """Return (bucket, key) of an s3:// URI. Raises InputError."""
    bucket, _, key = path.removeprefix("s3://").partition("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        try:
            without_credentials(path)
        except ValueError as error:
            raise InputError(str(error)) from None
        raise InputError(
            f"{path}: {bucket!r} is not the name of a bucket; write s3://bucket/prefix"
        )
    return bucket, key


def target(path: str) -> dict[str, str]:
    bucket, key = split(path)
    return {"Bucket": bucket, "Key": key}


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


class BrokenOff(Unavailable):
    """The body of an answer that is not an object, such as an error, broke off."""


class S3Client:
    """boto3's client under the settings of a configuration, made when it is first needed.

    Many threads may use it.
    """

    def __init__(self, settings: StorageConfig) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self._boto: Any = None
        self._credentials: Any = None  # botocore's, which renews them
        self._source = ""  # of the credentials
        self._secrets: list[str] = []

    def boto(self) -> Any:
        """Return boto3's client. Raises StorageError if none can be made from the settings."""
        with self.lock:
            if self._boto is None:
                self._boto = self._make()
            return self._boto

    def _make(self) -> Any:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        requests = self.settings.requests
        config = Config(
            connect_timeout=requests.connect_timeout,
            read_timeout=requests.read_timeout,
            retries={"mode": "standard", "total_max_attempts": requests.max_attempts},
            max_pool_connections=32,
            signature_version=UNSIGNED if requests.anonymous else None,
        )
        try:
            session = boto3.Session(profile_name=requests.profile, region_name=requests.region)
            client = session.client("s3", endpoint_url=requests.endpoint_url, config=config)
            if not requests.anonymous and (credentials := session.get_credentials()) is not None:
                frozen = credentials.get_frozen_credentials()
                self._secrets = [secret for secret in (frozen.secret_key, frozen.token) if secret]
                self._credentials = credentials
                self._source = credentials.method
        except (BotoCoreError, ValueError) as error:
            raise StorageError(f"storage: {self._text(error)}") from None
        client.meta.events.register("provide-client-params.s3", self._add_to_request)
        return client

    def object_store(self) -> dict[str, str]:
        """Return the same settings and credentials for libraries that are built on the Rust crate
        object_store, such as deltalake.
        """
        requests = self.settings.requests
        client = self.boto()
        endpoint = client.meta.endpoint_url
        options = {
            "aws_endpoint_url": endpoint,
            "aws_region": client.meta.region_name,
            "aws_allow_http": str(endpoint.startswith("http://")).lower(),
            "aws_conditional_put": "etag",
            "aws_skip_signature": str(requests.anonymous).lower(),
            "aws_request_payer": str(requests.requester_pays).lower(),
            "aws_server_side_encryption": requests.sse if requests.sse != "none" else None,
            "aws_sse_kms_key_id": requests.kms_key_id,
        }
        if self._credentials is not None:
            credentials = self._credentials.get_frozen_credentials()
            options |= {
                "aws_access_key_id": credentials.access_key,
                "aws_secret_access_key": credentials.secret_key,
            }
            options["aws_session_token"] = credentials.token
        return {name: value for name, value in options.items() if value}

    def _add_to_request(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        requests = self.settings.requests
        extra = {
            "RequestPayer": "requester" if requests.requester_pays else None,
            "SSEKMSKeyId": requests.kms_key_id,
            "ServerSideEncryption": requests.sse if requests.sse != "none" else None,
        }
        params.update(
            {
                key: value
                for key, value in extra.items()
                if value and key in model.input_shape.members
            }
        )

    def first(self, bucket: str, prefix: str) -> dict[str, Any] | None:
        """Return the first entry of a listing. Raises botocore's errors."""
        page = self.boto().list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return next(iter(page.get("Contents", [])), None)

    @contextlib.contextmanager
    def translated(self, path: str, action: str) -> Iterator[None]:
        """Raise botocore's errors as FileNotFoundError, StorageError or Unavailable.

        Args:
            path: The object.
            action: The permission that the credentials need.
        """
        try:
            try:
                yield
            except ClientError as error:
                raise self._explained(self._detailed(error, path), path, action) from None
        except BotoCoreError as error:
            kind = StorageError if type(error).__name__ in _BEFORE else Unavailable
            raise kind(f"{path}: {self._text(error)}") from None
        # The body of an answer broke off: botocore neither retries this nor wraps the error.
        except HTTPError as error:
            raise BrokenOff(f"{path}: {self._text(error)}") from None
        # botocore raises this if credentials have expired although they were renewed.
        except RuntimeError as error:
            if "credentials" not in str(error).lower():
                raise
            text = (
                f"{path}: {self._text(error)}; renew the credentials, then run the same command "
                "again to resume"
            )
            raise Unavailable(text) from None

    def _detailed(self, error: ClientError, path: str) -> ClientError:
        """Return an error with the reason for an answer without one, found by listing that one key.

        An answer to HEAD has no body, and a missing key is "forbidden" if s3:ListBucket is allowed
        only under a prefix, as in infra/iam.
        """
        bucket, key = split(path)
        of_object = error.operation_name in ("HeadObject", "GetObject") and key
        if not of_object or code_of(error) not in (*_FORBIDDEN, "400"):
            return error
        try:
            first = self.first(bucket, key)
        except ClientError as reason:
            return error if code_of(reason) in _FORBIDDEN else reason
        if first is not None and first["Key"] == key:
            return error
        return ClientError({"Error": {"Code": "NoSuchKey"}}, error.operation_name)

    def _explained(self, error: ClientError, path: str, action: str) -> OSError:
        """Return a refusal of the server as an error that says what to do; Unavailable if it would
        refuse any other object, too.
        """
        code = code_of(error)
        bucket = split(path)[0]
        endpoint = self.settings.requests.endpoint_url
        address = f" at {endpoint}" if endpoint else ""
        message = self._scrubbed(str(error.response.get("Error", {}).get("Message", "")))
        if message and message not in (code, "Forbidden", "Not Found"):
            quote = f" (the store says: {message})"
        else:
            quote = ""
        metadata = error.response.get("ResponseMetadata", {})
        headers = metadata.get("HTTPHeaders", {})
        tries = metadata.get("RetryAttempts", 0) + 1
        status = int(metadata.get("HTTPStatusCode", 0))
        if code == "NoSuchBucket":
            return StorageError(
                f"{path}: there is no bucket {bucket!r}{address}; check name and "
                "storage.options.endpoint_url"
            )
        if code in UNMET:
            return Changed(path)
        if code in MISSING:
            return FileNotFoundError(f"{path}: no such object")
        if code in _ELSEWHERE or (code == "400" and headers.get("x-amz-bucket-region")):
            region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get(
                "Region"
            )
            named, value = (
                (f"region {region}", f"={region}") if region else ("another region", " to it")
            )
            return StorageError(
                f"{path}: the bucket {bucket!r} is in {named}: set storage.options.region{value}"
            )
        if code in _EXPIRED:
            return Unavailable(
                f"{path}: the credentials have expired: renew them, then run the same "
                f"command again to resume{quote}"
            )
        if code in _UNKNOWN_CALLER:
            return Unavailable(
                f"{path}: the store{address} does not accept the credentials {self._whose()}{quote}"
            )
        if code == "RequestTimeTooSkewed":
            return Unavailable(f"{path}: the clock of this machine is wrong; set it{quote}")
        if code in _FORBIDDEN:
            return StorageError(
                f"{path}: forbidden: the credentials {self._whose()} need {action} here{quote}"
            )
        if code == "InvalidObjectState":
            return StorageError(f"{path}: the object is archived; restore it first{quote}")
        if code in _BUSY or "Throttl" in code or status in (429, 503):
            return Unavailable(
                f"{path}: the store is overloaded ({code}), still so at attempt {tries}{quote}"
            )
        # 501 is a request that the store does not know, not one that it fails at.
        passes = code in ("InternalError", "RequestTimeout") or (status >= 500 and status != 501)
        kind = Unavailable if passes else StorageError
        return kind(f"{path}: the store answered {code} to {action}, attempt {tries}{quote}")

    def _whose(self) -> str:
        """Return where the credentials came from, which is often not where the user expects."""
        if self.settings.requests.anonymous:
            return "(none: storage.options.anonymous is set)"
        name = self.settings.requests.profile
        profile = f", profile {name}" if name else ""
        return f"({self._source or 'in use'}{profile})"

    def _text(self, error: Exception) -> str:
        """Return the text of an error that the SDK itself raised, with advice on what to do."""
        name = type(error).__name__
        advice = _ADVICE.get(name, "")
        if "Timeout" in name or name in _UNREACHABLE:
            gave_up = f"gave up at attempt {self.settings.requests.max_attempts}"
            advice = f" ({gave_up}); is storage.options.endpoint_url right and reachable from here?"
        elif not advice and ("Token" in name or "SSO" in name or "Credential" in name):
            advice = "; renew the credentials, then run the same command again to resume"
        return self._scrubbed(str(error).strip().rstrip(".")) + advice

    def _scrubbed(self, text: str) -> str:
        """Return the text without secrets, because a server may send back what it received."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
