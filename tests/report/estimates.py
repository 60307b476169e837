"""Estimates for the runs of `builder`, as `raypd estimate` writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from raypd.estimate.estimator import Array, exact
from raypd.estimate.machines import MethodSpeed, assemble
from raypd.estimate.options import EstimateOptions
from raypd.run.layout import ESTIMATE
from raypd.run.records import to_json

FINGERPRINT = "0123456789ab"  # of builder's runs


def spread(value: float, by: float) -> Array:
    """A quantity whose 95% interval goes from value / by to value * by."""
    return value * np.exp(np.r_[0.0, math.log(by) / 0.95 * np.linspace(-1, 1, 2001)])


def put(root: Path, documents: float = 1000, seconds: float = 1.3, **keys: Any) -> dict[str, Any]:
    """Puts an estimate into a run's folder; what it says.

    seconds: of a worker for one document. baseline: with autoregressive decoding, 5 times as slow. All other keys
    replace those of the file.
    """
    machines = keys.pop("instances", ["g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge"])
    method = keys.pop("method", "hyper_parallel")
    tokens = {"prefill_tokens": spread(310, 1.03), "shared_tokens": exact(400), "decode_tokens": spread(24.3, 1.05)}
    ours = MethodSpeed(
        method, spread(seconds, 1.062), "measured on NVIDIA L40S, 64 documents, 83 s", "L40S", "NVIDIA L40S", tokens
    )
    theirs = MethodSpeed(
        "autoregressive", 5 * exact(seconds), "measured on NVIDIA L40S, 64 documents, 9 s", "L40S", "NVIDIA L40S",
        {**tokens, "decode_tokens": spread(131, 1.05)},
    )  # fmt: skip
    baseline = [theirs] if keys.pop("baseline", True) else []
    options = EstimateOptions(instances=machines, head="none", nodes=keys.pop("nodes", 8))
    found = assemble(None, options, exact(documents), [ours], baseline, 48.0, keys.pop("said", []))
    found.fingerprint, found.model, found.task = FINGERPRINT, "Qwen/Qwen3-1.7B", "extraction"
    tree = {**to_json(found), "created": "2026-09-20T20:00:00+00:00", **keys}
    root.mkdir(parents=True, exist_ok=True)
    (root / ESTIMATE).write_text(json.dumps(tree, allow_nan=False))
    return tree
