"""Keys that have another name now: refused in what a user writes, understood in the record of an older run."""

from __future__ import annotations

from typing import Any

RENAMED = {  # the key, dotted -> its name now
    "engine.batch": "max_num_seqs",
    "engine.token_budget": "max_num_batched_tokens",
}


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration with the names of now; the record itself stays as it is."""
    out = dict(tree)
    for key, name in RENAMED.items():
        section, _, old = key.partition(".")
        if isinstance(out.get(section), dict) and old in out[section]:
            out[section] = {name if k == old else k: v for k, v in out[section].items()}
    return out
