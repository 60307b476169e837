"""Estimates for the runs of `builder`, as `raypd estimate` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raypd.estimate.estimate_options import Options
from raypd.estimate.estimation import Mean, Speed
from raypd.estimate.machines import assemble
from raypd.run.layout import ESTIMATE

FINGERPRINT = "0123456789ab"  # of builder's runs


def put(root: Path, documents: float = 1000, seconds: float = 1.3, **keys: Any) -> dict[str, Any]:
    """Puts an estimate into a run's folder; what it says.

    seconds: of a worker for one document. baseline: with autoregressive decoding, 5 times as slow. All other keys
    replace those of the file.
    """
    machines = keys.pop("instances", ["g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge"])
    method = keys.pop("method", "hyper_parallel")
    tokens = {"prefill_tokens": Mean(310, 4, 60), "shared_tokens": Mean(400), "decode_tokens": Mean(24.3, 0.6, 60)}
    ours = Speed(method, Mean(seconds, 0.03 * seconds, 40), "measured on NVIDIA L40S, 64 documents, 83 s",
                 "L40S", "NVIDIA L40S", **tokens)  # fmt: skip
    theirs = Speed("autoregressive", Mean(5 * seconds, 0.2 * seconds, 30), "measured on NVIDIA L40S, 64 documents, 9 s",
                   "L40S", "NVIDIA L40S", **{**tokens, "decode_tokens": Mean(131, 3, 60)})  # fmt: skip
    baseline = [theirs] if keys.pop("baseline", True) else []
    options = Options(instances=machines, head="none", nodes=keys.pop("nodes", 8))
    found = assemble(None, options, Mean(documents), [ours], baseline, 48.0, keys.pop("said", []))
    found.fingerprint, found.model, found.task = FINGERPRINT, "Qwen/Qwen3-1.7B", "extraction"
    tree = {**found.tree(), "created": "2026-09-20T20:00:00+00:00", **keys}
    root.mkdir(parents=True, exist_ok=True)
    (root / ESTIMATE).write_text(json.dumps(tree, allow_nan=False))
    return tree
