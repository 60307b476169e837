"""The state of nightly runs: what the last successful night left behind."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class NightState:
    """state.json: the last good night."""

    night: str
    fingerprint: str
    base: str  # the fingerprint without the categories
    documents: int  # of the table
    failed: int  # of the table
    objects: int  # of the table
    index: list[str]  # its files, below the nightly root
    config: dict[str, Any]
    hash_column: str | None = None
    # Digest of the input's files, sizes and versions; "" if an object could not be read.
    listing: str = ""
    hidden: str = ""  # digest of the objects that could not be read; "" where all could
    ended: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)
