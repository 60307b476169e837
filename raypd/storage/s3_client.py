"""The connection to S3: one client a process, made from the settings, and its errors in words.

boto3 does all of it, reading too: pyarrow's S3FileSystem cannot ask for one version of an object (If-Match) nor write
only where nothing is, and would find credentials, retry and time out by rules of its own.
Retries are botocore's mode `standard` (time-outs, reset connections, 500, 503 SlowDown and the like; exponential
backoff with jitter up to 20 s); `adaptive` would also slow a client down that was throttled once, to half a request a
second, though a worker makes only a few.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raypd.config import StorageConfig, without_credentials
from raypd.errors import InputError
from raypd.storage.common import StorageError, Unavailable

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

POOL = 32  # connections kept open
MISSING = ("NoSuchKey", "404", "NotFound")
FORBIDDEN = ("AccessDenied", "403", "Forbidden", "AllAccessDisabled")
UNMET = ("PreconditionFailed", "412")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN_CALLER = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId")
_ELSEWHERE = ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_BUSY = ("SlowDown", "ServiceUnavailable", "503", "429", "TooManyRequests", "RequestLimitExceeded")
# What the SDK finds wrong before it asks anybody, or with the one name that it was given.
_OF_THE_SETTINGS = ("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "InvalidRegionError")
_OF_THE_NAME = ("ParamValidationError",)

_lock = threading.Lock()
_settings = StorageConfig()
_client: Any = None
_secrets: tuple[str, ...] = ()


def configure(settings: StorageConfig) -> None:
    """Takes the settings for all that this process reads and writes on S3 from now on."""
    global _settings, _client
    with _lock:
        if settings != _settings:
            _settings, _client = settings, None


def settings() -> StorageConfig:
    return _settings


def client() -> Any:
    """The process's S3 client; boto3's clients may be used from many threads."""
    global _client
    with _lock:
        if _client is None:
            _client = _make(_settings)
        return _client


def _make(wanted: StorageConfig) -> Any:
    global _secrets
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(
        connect_timeout=wanted.connect_timeout,
        read_timeout=wanted.read_timeout,
        retries={"mode": "standard", "total_max_attempts": wanted.max_attempts},
        max_pool_connections=POOL,
        signature_version=UNSIGNED if wanted.anonymous else None,
    )
    try:
        session = boto3.Session(profile_name=wanted.profile, region_name=wanted.region)
        made = session.client("s3", endpoint_url=wanted.endpoint_url, config=config)
        found = None if wanted.anonymous else session.get_credentials()
        if found is not None:
            # Kept so that no error text of a server that sends back what it got can show them.
            frozen = found.get_frozen_credentials()
            _secrets = tuple(s for s in (frozen.secret_key, frozen.token) if s)
        return made
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"storage: {_said(error)}{_advice(error)}") from None


def split(path: str) -> tuple[str, str]:
    """(bucket, key) of an s3:// URI. Raises InputError."""
    bucket, _, key = path.removeprefix("s3://").partition("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        try:
            without_credentials(path)
        except ValueError as error:
            raise InputError(str(error)) from None
        raise InputError(f"{path}: {bucket!r} is not the name of a bucket; write s3://bucket/prefix")
    return bucket, key


def extra() -> dict[str, Any]:
    """What every request on an object carries."""
    return {"RequestPayer": "requester"} if _settings.requester_pays else {}


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def translated(path: str, action: str) -> Iterator[None]:
    """Raises botocore's errors as FileNotFoundError, StorageError or Unavailable with `path` and what to do.

    action: the permission that the call needs, for instance s3:GetObject.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        try:
            yield
        except ClientError as error:
            raise explain(_detailed(error, path), path, action) from None
    except BotoCoreError as error:
        own = type(error).__name__ in (*_OF_THE_SETTINGS, *_OF_THE_NAME)
        raise (StorageError if own else Unavailable)(f"{path}: {_said(error)}{_advice(error)}") from None
    except RuntimeError as error:  # so botocore calls credentials that were renewed and have expired all the same
        if "credentials" not in str(error).lower():
            raise
        raise Unavailable(f"{path}: {_said(error)}; renew the credentials, and the same command resumes") from None


def _detailed(error: ClientError, path: str) -> ClientError:
    """The reason behind an answer that names none, by a listing of that one key.

    An answer to HEAD has no body; and a key that does not exist is "forbidden" where s3:ListBucket is allowed only
    under a prefix, as in infra/iam.
    """
    from botocore.exceptions import ClientError

    bucket, key = split(path)
    if error.operation_name not in ("HeadObject", "GetObject") or not key or code_of(error) not in (*FORBIDDEN, "400"):
        return error
    try:
        page = client().list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1, **extra())
    except ClientError as reason:
        return error if code_of(reason) in FORBIDDEN else reason
    if [item["Key"] for item in page.get("Contents", [])] == [key]:
        return error
    return ClientError({"Error": {"Code": "NoSuchKey"}}, error.operation_name)


def explain(error: ClientError, path: str, action: str) -> OSError:
    """A refusal of the server as an error that says what to do; Unavailable where any object would fare alike."""
    code, bucket = code_of(error), split(path)[0]
    at = f" at {_settings.endpoint_url}" if _settings.endpoint_url else ""
    said = _scrubbed(str(error.response.get("Error", {}).get("Message", "")))
    quote = f" (the store says: {said})" if said and said not in (code, "Forbidden", "Not Found") else ""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    tries = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) + 1
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        return StorageError(f"{path}: there is no bucket {bucket!r}{at}; check the name and storage.endpoint_url")
    if code in MISSING:
        return FileNotFoundError(f"{path}: no such object")
    if code in _ELSEWHERE or (code == "400" and headers.get("x-amz-bucket-region")):
        region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
        named = f" is in region {region}" if region else " is in another region"
        wanted = f"={region}" if region else " to it"
        return StorageError(f"{path}: the bucket {bucket!r}{named}: set storage.region{wanted}")
    if code in _EXPIRED:
        return Unavailable(f"{path}: the credentials have expired: renew them; the same command resumes{quote}")
    if code in _UNKNOWN_CALLER:
        return Unavailable(f"{path}: the store{at} does not accept the credentials {_whose()}{quote}")
    if code == "RequestTimeTooSkewed":
        return Unavailable(f"{path}: the clock of this machine is wrong; set it{quote}")
    if code in FORBIDDEN:
        return StorageError(f"{path}: forbidden: the credentials {_whose()} need {action} here{quote}")
    if code == "InvalidObjectState":
        return StorageError(f"{path}: the object is archived; restore it first{quote}")
    if code in _BUSY or "Throttl" in code or status in (429, 503):
        return Unavailable(f"{path}: the store is overloaded ({code}), still so at attempt {tries}{quote}")
    # 501 is a request that the store does not know, not one that it fails at.
    passes = code in ("InternalError", "RequestTimeout") or (status >= 500 and status != 501)
    kind = Unavailable if passes else StorageError
    return kind(f"{path}: the store answered {code} to {action}, attempt {tries}{quote}")


def _whose() -> str:
    """Where the credentials came from: most often it is not where one thought."""
    if _settings.anonymous:
        return "(none: storage.anonymous is set)"
    found = getattr(getattr(client(), "_request_signer", None), "_credentials", None)
    source = {
        "env": "of the environment variables",
        "shared-credentials-file": "of the shared credentials file",
        "iam-role": "of the instance's role",
        "container-role": "of the container's role",
        "assume-role": "of an assumed role",
        "assume-role-with-web-identity": "of a web identity",
        "sso": "of a single sign-on",
    }.get(getattr(found, "method", ""), "in use")
    return f"{source} (profile {_settings.profile})" if _settings.profile else source


def _advice(error: Exception) -> str:
    """What to do about an error that the SDK raised by itself."""
    name = type(error).__name__
    if name == "NoCredentialsError":
        return (
            ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, storage.profile, an instance's role, or "
            "storage.anonymous=true for a public bucket"
        )
    if name == "ProfileNotFound":
        return "; it is storage.profile or AWS_PROFILE"
    if name in ("NoRegionError", "InvalidRegionError"):
        return "; set storage.region"
    if "Timeout" in name or name in (
        "EndpointConnectionError",
        "ConnectionClosedError",
        "SSLError",
        "ProxyConnectionError",
    ):
        return f" (gave up at attempt {_settings.max_attempts}); is storage.endpoint_url right and reachable from here?"
    if "Token" in name or "SSO" in name or "Credential" in name:
        return "; renew the credentials, and the same command resumes"
    return ""


def _said(error: Exception) -> str:
    return _scrubbed(str(error).strip().rstrip("."))


def _scrubbed(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text
