"""Secrets, by the name of their key or by their form: no configuration may hold them, no page or log show them."""

import re
from typing import Any

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
    (re.compile(r"(?<![^\s'\"=])[^\s/@'\"]*:[^\s/@'\"]+@(?=[^\s/@]+:\d)"), f"{HIDDEN}@"),  # the same without ://
    (SIGNED, rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),  # AWS access keys
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_-]{20,}"), HIDDEN),  # Hub and API tokens
    (re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}"), f"Bearer {HIDDEN}"),
]


def redact(value: Any, key: str = "") -> Any:
    """The same tree without secrets. Keys such as token_budget or max_value_tokens name no secret and stay."""
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
