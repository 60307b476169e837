"""Recognizes secrets by the name of their key or by their form.

No configuration may contain one, and no page or log shows one.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator

HIDDEN = "(hidden)"
_KEYS = re.compile(
    r"(^|[_\-.])(password|passwd|passphrase|secret|secrets|credential|credentials|authorization|auth|private_key"
    r"|api_?key|access_?key(_id)?|secret_?key|token)$",
    re.IGNORECASE,
)
# A part of a URL that grants access like a password.
SIGNED = re.compile(
    r"(?i)([?&](?:x-amz-[a-z-]+|sig|signature|token|access_token|key|api_?key|secret|password|awsaccesskeyid)=)[^&\s\"']+"
)
_VALUES = [
    # user:password@host, first after a scheme and then without one.
    (re.compile(r"(?<=://)[^/@\s]+@"), f"{HIDDEN}@"),
    (re.compile(r"(?<![^\s'\"=])[^\s/@'\"]*:[^\s/@'\"]+@(?=[^\s/@]+:\d)"), f"{HIDDEN}@"),
    (SIGNED, rf"\1{HIDDEN}"),
    # Access keys of AWS, followed by tokens of the Hub and of APIs.
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_-]{20,}"), HIDDEN),
    (re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}"), f"Bearer {HIDDEN}"),
]
SECRETS = re.compile(r"secret|access_?key|token|password|credential", re.I)
_SECRET_NAMES = re.compile(r"api_?key|access_?key|secret|password|credential", re.I)
# In an Azure URI, an @ separates the container from the host.
_AZURE = re.compile(r"abfss://[a-z0-9$-]{3,63}@[a-z0-9.-]+")


def without_credentials(uri: str) -> str:
    """Return a URI unchanged if it contains no credentials.

    Raises:
        ValueError: The URI contains credentials, which the message does not repeat.
    """
    scheme, separator, rest = uri.partition("://")
    host = rest.split("/")[0]
    has_user = "@" in host and not _AZURE.fullmatch(f"{scheme}://{host}")
    # A secret key of S3 can contain a slash, so the @ is not in what looks like the host.
    has_s3_keys = scheme.startswith("s3") and ":" in host and "@" in rest
    if separator and (has_user or has_s3_keys or SIGNED.search(rest)):
        raise ValueError(
            "a URI must hold no credentials: use the environment, "
            "storage.options.profile or the "
            "instance's role"
        )
    return uri


def without_password(address: str) -> str:
    """Return an address, which may have a scheme, unchanged if it contains no password.

    Raises:
        ValueError: The address contains a user or a password, which the message does not repeat.
    """
    if "@" in address:
        raise ValueError(
            "an address is host:port and holds no user and password; Ray's own is RAY_AUTH_TOKEN"
        )
    return address


Uri = Annotated[str, AfterValidator(without_credentials)]
Address = Annotated[str, AfterValidator(without_password)]


def check_secrets(value: Any) -> Any:
    """Return a value of keys that no section of the configuration checks, if it has no secrets.

    Raises:
        ValueError: The value, or a key or value inside it, looks like a secret.
    """
    if isinstance(value, str):
        without_credentials(value)
    elif isinstance(value, list):
        for item in value:
            check_secrets(item)
    elif isinstance(value, dict):
        for name, inner in value.items():
            is_key = isinstance(inner, str) and _KEYS.search(str(name))
            if is_key or _SECRET_NAMES.search(str(name)):
                raise ValueError(
                    f"{name}: a configuration must not hold secrets; model.endpoint.key_variable "
                    "names the environment variable that holds a key"
                )
            check_secrets(inner)
    return value


def redact(value: Any, key: str = "") -> Any:
    """Return a tree with its secrets hidden.

    Keys such as token_budget or max_value_tokens do not name secrets, so their values stay.

    Args:
        value: A tree of plain values.
        key: The key of the tree, if it has one.
    """
    if key and _KEYS.search(key) and value not in (None, "", [], {}):
        return HIDDEN
    if isinstance(value, dict):
        return {str(k): redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    if isinstance(value, str):
        for form, instead in _VALUES:
            value = form.sub(instead, value)
    return value
