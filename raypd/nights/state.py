"""The state of nightly runs: what the last successful night left behind."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Shard:
    """A file of the index: documents with ids from `first` up to the `first` of the next shard."""

    file: str  # below the nightly root
    first: str
    rows: int = 0
    documents: int = 0  # that the table shows
    failed: int = 0  # of these


@dataclass
class NightState:
    """state.json: the last successful night."""

    night: str
    fingerprint: str
    base: str  # the fingerprint without the categories
    documents: int  # of the table
    failed: int  # of the table
    objects: int  # of the table
    config: dict[str, Any]
    hash_column: str | None = None
    # The index: its documents, in order of their ids, and the files of its units, below the root.
    shards: list[Shard] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    # Instead of these two, in the first versions: the files of one list, below the root.
    index: list[str] = field(default_factory=list)
    # Digest of the input's files, sizes and versions; "" if an object could not be read.
    listing: str = ""
    hidden: str = ""  # digest of the objects that could not be read; "" if there were none
    ended: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)
