"""What a committed unit contains, as a row of a table."""

from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.run import Commit, UnitSummary, from_json, layout, tree

COUNTS = ("prefill_tokens", "shared_tokens", "decode_tokens", "steps")
USAGE = {
    "category": pa.string(),
    "model": pa.string(),
    "documents": pa.int64(),
    "prefill_tokens": pa.int64(),
    "shared_tokens": pa.int64(),
    "decode_tokens": pa.int64(),
    "seconds": pa.float64(),
}
_REASON = {"reason": pa.string(), "documents": pa.int64(), "can_change": pa.bool_()}
SCHEMA = pa.schema(
    {
        # The object below the folder of the units, and its stamp in a listing.
        "name": pa.string(),
        "stamp": pa.string(),
        "unit": pa.string(),
        "fingerprint": pa.string(),
        "session": pa.string(),
        "source": pa.string(),
        "start": pa.int64(),
        "documents": pa.int64(),
        "ok": pa.int64(),
        "failed": pa.int64(),
        "seconds": pa.float64(),
        "committed_at": pa.float64(),
        "counts": pa.struct(dict.fromkeys(COUNTS, pa.int64())),
        "worker": pa.string(),
        "began": pa.float64(),
        "busy_seconds": pa.float64(),
        "categories": pa.list_(pa.struct(USAGE)),
        "retries": pa.int64(),
        "truncated": pa.int64(),
        "reasons": pa.list_(pa.struct(_REASON)),
        "retriable": pa.int64(),
        "first_id": pa.string(),
        "last_id": pa.string(),
    }
)


def row_of(commit: Commit) -> dict[str, Any]:
    """Return a commit as a row of SCHEMA."""
    row = {"name": commit.name, "stamp": commit.stamp, **tree(commit.summary)}
    # Usage without any category is an empty object.
    row["categories"] = row["categories"] or []
    return row


def summary_of(row: dict[str, Any]) -> UnitSummary:
    """Return the summary in a row of SCHEMA."""
    counts = {kind: count or 0 for kind, count in (row["counts"] or {}).items()}
    return from_json(UnitSummary, {**row, "counts": counts}, row["name"])


def path_of(output: str, name: str) -> str:
    """Return the path of the object that a row names."""
    return storage.join(output, layout.UNITS, *name.split("/"))
