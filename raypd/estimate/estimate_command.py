"""The command `raypd estimate`: reads its options, prints the result, and puts it into the run's folder."""

from __future__ import annotations

import difflib
import json
from typing import Any

from raypd.billing import prices
from raypd.cluster.driver import Interrupted
from raypd.config import RunConfig
from raypd.errors import ConfigError
from raypd.estimate.estimate import estimate
from raypd.estimate.estimate_options import HEAD, Given, Options
from raypd.estimate.estimate_result import write
from raypd.estimate.machines import gpu_kind


def options(
    *,
    throughput: list[str] | None = None,
    baseline_throughput: list[str] | None = None,
    documents: float | None = None,
    instances: list[str] | None = None,
    head: str = HEAD,
    **more: Any,
) -> Options:
    """The options as they were typed. Raises ConfigError at an instance type, a GPU or a rate that is none."""
    for name in [*(instances or []), *([head] if head != "none" else [])]:
        if name not in prices.INSTANCES:
            near = difflib.get_close_matches(name, prices.INSTANCES, 1)
            hint = f"; did you mean {near[0]}?" if near else "; `raypd prices show` lists those that are known"
            raise ConfigError(f"{name}: no such instance type{hint}")
    return Options(
        throughput=[_given("--throughput", text) for text in throughput or []],
        baseline_throughput=[_given("--baseline", text) for text in baseline_throughput or []],
        documents=None if documents is None else int(documents),
        instances=instances or [],
        head=head,
        **more,
    )


def _given(option: str, text: str) -> Given:
    gpu, _, rate = text.rpartition("=")
    known = {gpu_kind(i.gpu, i.gpu_memory_gib) for i in prices.INSTANCES.values() if i.gpu}
    if gpu and gpu not in known:
        raise ConfigError(f"{option} {text}: no instance type has a {gpu}; choose from {', '.join(sorted(known))}")
    try:
        per_second = float(rate)
    except ValueError:
        per_second = 0.0
    if not 0 < per_second < float("inf"):
        raise ConfigError(f"{option} {text}: give documents per second of one GPU, as in {option} L40S=6.28")
    return Given(gpu, per_second)


def run(config: RunConfig | None, options: Options, as_json: bool, verbose: bool) -> None:
    """Estimates, prints, and writes estimate.json into the run's folder."""
    try:
        result = estimate(config, options, verbose=verbose)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was written") from None
    path = write(result, config) if config is not None else None
    if as_json:
        print(json.dumps(result.tree(), indent=2, allow_nan=False))
        return
    from raypd.estimate.estimate_view import show

    show(result)
    if path is not None:
        print(f"estimate: {path}")
        print(f"next: `raypd report {path.rpartition('/')[0]}` shows it as a page, and after the run beside the bill")
