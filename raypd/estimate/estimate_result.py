"""What an estimate found: for the screen (`estimate_view`), as JSON, and as a file in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from raypd import storage
from raypd.config import RunConfig
from raypd.errors import RunError
from raypd.estimate import estimation
from raypd.estimate.estimation import Bill, Machines, Mean, Speed
from raypd.run import layout


@dataclass
class Row:
    """One kind of machine with what the corpus takes on 1, 2, 4, ... nodes of it."""

    machines: Machines
    ours: Speed
    baseline: Speed | None
    bills: list[Bill]
    saved: Mean | None

    def tree(self) -> dict[str, Any]:
        machines = self.machines
        return {
            "name": machines.name,
            "instance_type": machines.instance_type,
            "gpu": self.ours.gpu,
            "workers": machines.workers,
            "market": machines.market,
            "usd_per_hour": machines.usd_per_hour,
            "price_source": machines.source,
            "usd_per_1000": estimation.usd_per_1000(self.ours, machines).tree(),
            "baseline_usd_per_1000": estimation.usd_per_1000(self.baseline, machines).tree() if self.baseline else None,
            "saved_usd": self.saved.tree() if self.saved else None,
            "bills": [bill.tree() for bill in self.bills],
        }


@dataclass
class Estimate:
    """All that was found. notes: what a reader has to know of how far it holds. model, task: of the configuration."""

    documents: Mean
    ours: list[Speed]
    baseline: list[Speed]
    rows: list[Row]
    not_measured: dict[str, list[str]]  # GPU -> instance types
    startup_seconds: float | None
    notes: list[str]
    fingerprint: str | None = None
    model: str | None = None
    task: str | None = None
    sample: dict[str, Any] | None = None

    def gain(self, speed: Speed) -> Mean | None:
        """How many times as fast as autoregressive decoding on the same GPU; None where that was not measured."""
        theirs = next((one for one in self.baseline if one.gpu == speed.gpu), None)
        return estimation.product(speed.per_second, theirs.per_second.inverse()) if theirs is not None else None

    def _speed(self, speed: Speed) -> dict[str, Any]:
        gain = self.gain(speed)
        return speed.tree() | {"times_autoregressive": gain.tree() if gain is not None else None}

    def tree(self) -> dict[str, Any]:
        """As JSON, for --json and the run's folder. Rates are of one worker, prices USD."""
        return {
            "fingerprint": self.fingerprint,
            "model": self.model,
            "task": self.task,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "documents": self.documents.tree(),
            "speeds": [self._speed(speed) for speed in self.ours],
            "baseline": [speed.tree() for speed in self.baseline],
            "machines": [row.tree() for row in self.rows],
            "not_measured": self.not_measured,
            "startup_seconds": self.startup_seconds,
            "sample": self.sample,
            "notes": self.notes,
        }


def families(instance_types: Sequence[str]) -> str:
    """In few words: g5.*, g6.*"""
    return ", ".join(f"{family}.*" for family in dict.fromkeys(name.partition(".")[0] for name in instance_types))


def write(result: Estimate, config: RunConfig) -> str | None:
    """Puts the estimate into the run's folder, for its report; its path, or None where the folder is another run's."""
    from raypd.cluster.driver import output_folder

    output = output_folder(config)
    try:
        theirs = json.loads(storage.read(storage.join(output, layout.RUN))).get("fingerprint")
    except FileNotFoundError:
        theirs = None
    except (ValueError, AttributeError):
        return None
    if theirs not in (None, config.fingerprint()):
        return None
    path = storage.join(output, layout.ESTIMATE)
    try:
        storage.put(path, (json.dumps(result.tree(), indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunError(f"output.path {output}: cannot be written: {error}") from None
    return path
