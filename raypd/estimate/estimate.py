"""`raypd estimate`: what a corpus will take and cost, before it is run.

The speed of a document comes from one of three places: a sample that is decoded here (`sampling`, `measuring`,
`weighing`), an earlier run (`earlier`), or the user. `machines` has what the corpus takes at that speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raypd import storage
from raypd.billing import prices
from raypd.config import METHODS, RunConfig
from raypd.errors import ConfigError
from raypd.estimate import earlier, sampling
from raypd.estimate.estimate_options import Given, Options
from raypd.estimate.estimate_result import Estimate
from raypd.estimate.estimation import Mean, Speed
from raypd.estimate.machines import assemble
from raypd.estimate.weighing import check_sample, notes_of, speed_of

if TYPE_CHECKING:
    from raypd.cluster import worker


def estimate(
    config: RunConfig | None,
    options: Options,
    *,
    verbose: bool = False,
    build: Callable[[RunConfig, int | None], worker.WorkerComponents] | None = None,
) -> Estimate:
    """Makes the estimate. build: as in `driver.run_extract`.

    Raises ConfigError, InputError, ModelError before anything is measured; RunError when the sample cannot be decoded.
    """
    if config is not None:
        storage.configure(config.storage)
    if options.throughput:
        result = _fed(config, options)
    elif config is None:
        raise ConfigError("give a configuration, or --throughput with --documents and --instance")
    elif options.run is not None:
        result = earlier.estimate_from(config, options)
    else:
        result = _measured(config, options, verbose, build)
    if config is not None:
        result.fingerprint, result.model, result.task = config.fingerprint(), config.model.name, config.task.kind
    return result


def _measured(
    config: RunConfig,
    options: Options,
    verbose: bool,
    build: Callable[[RunConfig, int | None], worker.WorkerComponents] | None,
) -> Estimate:
    from raypd.estimate.bench import Workbench

    check_model(config)
    sample = sampling.draw(config, options.sample, seed=options.seed)
    documents = sampling.ring_order(sample.documents, options.seed)
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    notes: list[str] = []
    with Workbench(config, verbose, build) as bench:
        measured = bench.measure(config, documents, _left(ends), f"measure {config.decoding.method}")
        startup = bench.startup_seconds + measured.load_seconds
        check_sample(measured, documents)
        ours = speed_of(sample, documents, measured, notes)
        baseline: list[Speed] = []
        if options.baseline and config.decoding.method != "autoregressive":
            theirs = with_method(config, "autoregressive")
            if ends is not None and time.monotonic() > ends:
                notes.append("no time was left to measure autoregressive decoding: raise --minutes")
            else:
                found = bench.measure(theirs, documents, _left(ends), "measure autoregressive")
                if found.documents and found.seconds > 0:
                    baseline = [speed_of(sample, documents, found, notes)]
                else:
                    notes.append("autoregressive decoding came to no figure in the time given: raise --minutes")
    total = sample.look.documents if options.documents is None else Mean(options.documents)
    notes += notes_of(config, sample, measured)
    result = assemble(config, options, total, [ours], baseline, startup, notes)
    result.sample = {
        "documents": len(documents),
        "strata": len(sample.strata),
        "seconds": round(measured.seconds, 3),
        "warmup_seconds": round(measured.warmup_seconds, 3),
        "load_seconds": round(measured.load_seconds, 3),
        "machine": measured.machine,
        "complete": measured.complete,
    }
    return result


def check_model(config: RunConfig) -> None:
    """Raises ModelError for what can be known before any weights are loaded."""
    if not config.model.is_fake:
        from raypd.models.check_method import check_method
        from raypd.models.load import check_model_config

        check_model_config(config.model, machine=False)
        check_method(config)


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(1.0, ends - time.monotonic())


def with_method(config: RunConfig, method: str) -> RunConfig:
    """The configuration with another decoding method. Raises ConfigError where the task has no such method."""
    if method not in METHODS[config.task.kind]:
        raise ConfigError(f"decoding.method {method} does not do {config.task.kind}")
    tree = config.model_dump()
    tree["decoding"] |= {"method": method}
    return RunConfig.model_validate(tree)


def _fed(config: RunConfig | None, options: Options) -> Estimate:
    """From throughputs that were given; the corpus is planned unless its size was given."""
    if options.documents is not None:
        total = Mean(options.documents)
    elif config is not None:
        total = sampling.look(config, options.seed).documents
    else:
        raise ConfigError("--throughput without a configuration: give --documents, too")
    method = config.decoding.method if config is not None else "given"

    def speeds(given: Sequence[Given], method: str) -> list[Speed]:
        found = []
        for one in given:
            gpu = one.gpu or _gpu_of_instances(options.instances)
            found.append(Speed(method, Mean(1 / one.per_second), "as given", gpu))
        return found

    ours, theirs = speeds(options.throughput, method), speeds(options.baseline_throughput, "autoregressive")
    return assemble(config, options, total, ours, theirs, None, [])


def _gpu_of_instances(names: Sequence[str]) -> str:
    gpus = {prices.INSTANCES[name].gpu for name in names}
    if len(gpus) != 1:
        known = sorted({i.gpu for i in prices.INSTANCES.values() if i.gpu})
        raise ConfigError(
            "which GPU does --throughput hold for? Give --instance with types of one GPU, or --throughput GPU=RATE "
            f"with one of {', '.join(known)}"
        )
    return gpus.pop()
