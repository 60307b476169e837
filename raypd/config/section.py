"""What all parts of the configuration have in common."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from raypd.config.secrets import SIGNED


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are checked."""

    # Values are not repeated in errors by pydantic: a misplaced secret would be among them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


SECRETS = re.compile(r"secret|access_?key|token|password|credential", re.I)


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
            "a URI must hold no credentials: give them through the environment, storage.profile or the instance's role"
        )
    return uri


def without_password(address: str) -> str:
    """The address, with or without a scheme. Raises ValueError, which does not repeat it, where it holds a password."""
    if "@" in address:
        raise ValueError("an address is host:port and holds no user and password; Ray's own is RAY_AUTH_TOKEN")
    return address


Uri = Annotated[str, AfterValidator(without_credentials)]
Address = Annotated[str, AfterValidator(without_password)]


_SECRET_NAMES = re.compile(r"api_?key|access_?key|secret|password|credential", re.I)


def check_secrets(value: object) -> None:
    """Raises ValueError for a secret in keys that no section checks before they are used: a run records them."""
    if isinstance(value, str):
        without_credentials(value)
    for name, inner in value.items() if isinstance(value, dict) else ():
        if _SECRET_NAMES.search(str(name)):
            raise ValueError(f"{name}: a configuration holds no secrets; model.endpoint.key_variable names a variable")
        check_secrets(inner)
