"""Secrets, by the name of their key or by their form: no configuration may hold them, no page or
log show them.
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
SIGNED = re.compile(  # a part of a URL that is as good as a password
    r"(?i)([?&](?:x-amz-[a-z-]+|sig|signature|token|access_token|key|api_?key|secret|password|awsaccesskeyid)=)[^&\s\"']+"
)
_VALUES = [
    (re.compile(r"(?<=://)[^/@\s]+@"), f"{HIDDEN}@"),  # user:password@host
    # The same without ://.
    (re.compile(r"(?<![^\s'\"=])[^\s/@'\"]*:[^\s/@'\"]+@(?=[^\s/@]+:\d)"), f"{HIDDEN}@"),
    (SIGNED, rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),  # AWS access keys
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_-]{20,}"), HIDDEN),  # Hub and API tokens
    (re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}"), f"Bearer {HIDDEN}"),
]
SECRETS = re.compile(r"secret|access_?key|token|password|credential", re.I)
_SECRET_NAMES = re.compile(r"api_?key|access_?key|secret|password|credential", re.I)
_AZURE = re.compile(r"abfss://[a-z0-9$-]{3,63}@[a-z0-9.-]+")  # a container and where it is


def without_credentials(uri: str) -> str:
    """The URI. Raises ValueError, which does not repeat it, where it holds credentials."""
    scheme, separator, rest = uri.partition("://")
    host = rest.split("/")[0]  # a secret key can hold a / itself
    named = ("@" in host and not _AZURE.fullmatch(f"{scheme}://{host}")) or (
        scheme.startswith("s3") and ":" in host and "@" in rest
    )
    if separator and (named or SIGNED.search(rest)):
        raise ValueError(
            "a URI must hold no credentials: use the environment, "
            "storage.options.profile or the "
            "instance's role"
        )
    return uri


def without_password(address: str) -> str:
    """The address, with or without a scheme.

    Raises ValueError, which does not repeat it, where it holds a password.
    """
    if "@" in address:
        raise ValueError(
            "an address is host:port and holds no user and password; Ray's own is RAY_AUTH_TOKEN"
        )
    return address


Uri = Annotated[str, AfterValidator(without_credentials)]
Address = Annotated[str, AfterValidator(without_password)]


def check_secrets(value: Any) -> Any:
    """The value.

    Raises ValueError for a secret in keys that no section checks before they are used: a run has
    them.
    """
    if isinstance(value, str):
        without_credentials(value)
    parts: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, inner in parts:
        if _SECRET_NAMES.search(str(name)) or (isinstance(inner, str) and _KEYS.search(str(name))):
            raise ValueError(
                f"{name}: a configuration holds no secrets; model.endpoint.key_variable names "
                "a variable"
            )
        check_secrets(inner)
    return value


def redact(value: Any, key: str = "") -> Any:
    """The same tree without secrets.

    Keys such as token_budget or max_value_tokens name no secret and stay.
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
