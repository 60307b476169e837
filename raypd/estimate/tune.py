"""`raypd tune`: measures settings on a sample and writes the cheapest configuration that still answers alike.

The order of things tried is in `search`. Every measurement is a line of a file beside the new configuration, and a
measurement that stands there is not made again: Ctrl-C loses at most the one in hand.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypd import storage
from raypd.billing import prices
from raypd.config import RunConfig
from raypd.errors import ConfigError, RunError, UserError
from raypd.estimate import agreement, sampling
from raypd.estimate.agreement import Floor, Judge
from raypd.estimate.bench import Workbench
from raypd.estimate.estimate import check_model
from raypd.estimate.estimation import Machines
from raypd.estimate.log import Log, read_answers, write_answers
from raypd.estimate.machines import has_gpu, here, instance_gpu
from raypd.estimate.measuring import Facts, in_flight
from raypd.estimate.search import Changes, OutOfTime, Reference, Search, Trial
from raypd.estimate.weighing import check_sample

if TYPE_CHECKING:
    from raypd.cluster.components import WorkerComponents
    from raypd.tasks.base import Document


@dataclass
class Options:
    """Of the command line. agreement: the floor, 0 to 1. budget_usd: most money for measuring, at one node's price.

    judge: what of the agreement must reach the floor. reference: with what answers are compared. fresh: forget what the
    file of measurements holds.
    """

    sample: int = 32
    minutes: float | None = None
    budget_usd: float | None = None
    agreement: float = 0.9
    judge: Judge = "low"
    reference: Reference = "auto"
    instance: str | None = None
    fresh: bool = False
    seed: int = 0


@dataclass
class Result:
    """What was found. best: None where nothing could be measured. machines: whose price stands."""

    search: Search
    best: Trial | None
    machines: Machines
    documents: int
    taken: int  # measurements that stood in the file
    machine: str
    busy: str | None  # why the figures are less sure than usual

    def usd_per_1000(self, trial: Trial) -> float | None:
        if not self.machines.usd_per_hour or not trial.speed:
            return None
        return 1000 * self.machines.usd_per_hour / self.machines.workers / 3600 / trial.speed


def tune(
    config: RunConfig,
    options: Options,
    measurements: Path,
    *,
    verbose: bool = False,
    build: Callable[[RunConfig, int | None], WorkerComponents] | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """Measures and searches.

    measurements: the file of what was measured. build: as in `driver.run_extract`. say: tells the user of each.

    Raises ConfigError, InputError, ModelError before anything is measured; RunError where nothing can be.
    """
    storage.configure(config.storage)
    check_model(config)
    sample = sampling.draw(config, options.sample, seed=options.seed)
    documents = sampling.ring_order(sample.documents, options.seed)
    with Workbench(config, verbose, build) as bench:
        facts = bench.facts(config)
        machines = _machines(config, facts, options.instance)
        clock = _Clock(_seconds(options, machines))
        log = Log(measurements, f"{_digest(documents)} {facts.machine}", options.fresh)
        tester = _Tester(config, documents, bench, log, clock, say)
        floor = Floor(options.agreement, options.judge)
        search = Search(config, tester.measure, floor, _types(config, facts), options.reference)
        search.tell = lambda trial: tester.tell(trial, trial is search.reference)
        best = search.run()
    if best is None and any(trial.usable for trial in search.trials):
        raise RunError(
            f"{search.ended} before the configuration itself was measured: raise --minutes or --budget-usd; what was "
            f"measured stands in {measurements}, and the same command goes on from there"
        )
    errors = [trial.error for trial in search.trials if trial.error is not None]
    if best is None:
        raise RunError(f"nothing could be measured ({search.ended}){': ' + errors[0] if errors else ''}")
    return Result(search, best, machines, len(documents), log.taken, facts.machine, _busy(search, best))


def _machines(config: RunConfig, facts: Facts, instance: str | None) -> Machines:
    """Whose price the money is counted at: the type that is named, else what the configuration says of this machine.

    Raises ConfigError where the named type has another GPU than this machine, or no known price.
    """
    if instance is None:
        return here(config, facts.machine)
    if instance not in prices.INSTANCES:
        raise ConfigError(
            f"--instance {instance}: no such instance type; `raypd prices show` lists those that are known"
        )
    gpu = instance_gpu(facts.gpu, facts.gpu_memory_gib) if facts.gpu else None
    if gpu is None or not has_gpu(instance, gpu):
        raise ConfigError(f"--instance {instance}: this machine ({facts.machine}) has not the GPU of that type")
    price = prices.price(instance, None, None, config.cost)
    return Machines(instance, prices.INSTANCES[instance].gpus, price.usd_per_hour, price.source)


def _seconds(options: Options, machines: Machines) -> float | None:
    """How long it may measure."""
    limits = [60 * options.minutes] if options.minutes is not None else []
    if options.budget_usd is not None:
        if not machines.usd_per_hour:
            raise ConfigError("--budget-usd: this machine has no price; cost.prices.local gives it one")
        limits.append(options.budget_usd / machines.usd_per_hour * 3600)
    return min(limits, default=None)


def _types(config: RunConfig, facts: Facts) -> list[tuple[str, str]]:
    """(dtype, quantization) of weights that are worth a try on the machine, the present ones left out."""
    now = config.model.quantization
    found = [(dtype, "none") for dtype in facts.fast_dtypes if (dtype, "none") != (facts.dtype, now)]
    return found + [(config.model.dtype, kind) for kind in facts.quantizations if kind != now]


def _busy(search: Search, best: Trial) -> str | None:
    speeds = best.speeds
    if len(speeds) > 1 and max(speeds) > 1.15 * min(speeds):
        return (
            f"measurements of the same setting differ by {max(speeds) / min(speeds) - 1:.0%}: the machine has other "
            "work; tune on an idle one for surer figures"
        )
    return None


class _Clock:
    """The time that is left for measuring."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Raises OutOfTime at the end."""
        if self._ends is None:
            return None
        left = self._ends - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time or money given was used up")
        return left


class _Tester:
    """Measures settings for the search."""

    def __init__(
        self,
        config: RunConfig,
        documents: Sequence[Document],
        bench: Workbench,
        log: Log,
        clock: _Clock,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.documents, self.bench = config, documents, bench
        self.log, self.clock, self.say = log, clock, say
        self._count = self._measured = 0

    def measure(self, changes: Changes, limit: float | None) -> Trial:
        """One measurement, from the file if it stands there. Raises OutOfTime."""
        self._count += 1
        label = f"{self._count}. {describe(changes)}"
        try:
            changed = with_changes(self.config, changes)
        except ConfigError as error:
            return Trial(changes, error=str(error))
        key = _key(changed)
        known = self.log.take(key)
        if known is None:
            known = self._fresh(changed, key, label, limit)
        trial = Trial(changes, [known["speed"]] if known["speed"] else [], error=known["error"], cut=known["cut"])
        if trial.error is None:
            trial.answers = read_answers(known["answers"])
            self._measured += 1
        return trial

    def tell(self, trial: Trial, reference: bool) -> None:
        """Says what the last measurement found."""
        self.say(f"{self._count}. {describe(trial.changes)}: {_found(trial, reference)}")

    def _fresh(self, config: RunConfig, key: str, label: str, limit: float | None) -> dict[str, Any]:
        left = self.clock.left()
        most = [] if limit is None else [limit * (len(self.documents) + 3 * in_flight(config))]
        line: dict[str, Any] = {"key": key, "at": time.time(), "speed": 0.0, "error": None, "cut": False, "answers": []}
        try:
            most += [left] if left is not None else []
            found = self.bench.measure(config, self.documents, min(most, default=None), label)
            if not found.complete:
                self.clock.left()  # cut short by the end of the time, not for being slow
                line["cut"] = True
            check_sample(found, self.documents)
        except UserError as error:
            if not self._measured and isinstance(error, RunError):
                raise
            line["error"] = str(error)
            self.log.add(line)
            return line
        answers = [agreement.said_of(cost) for cost in found.costs]
        line |= {"speed": found.documents_per_second, "answers": write_answers(answers)}
        line |= {"seconds": found.seconds, "load_seconds": found.load_seconds, "config": _settings(config)}
        self.log.add(line)
        return line


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """The configuration with some keys changed. Raises ConfigError where they do not fit together."""
    tree = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    try:
        return RunConfig.model_validate(tree)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def describe(changes: Changes) -> str:
    """The changed keys in one line."""
    return ", ".join(f"{key.partition('.')[2]}={value}" for key, value in changes.items()) or "as it is"


def _found(trial: Trial, reference: bool) -> str:
    if trial.error is not None:
        return trial.error.splitlines()[0]
    if trial.cut:
        return "stopped: far slower than the best so far"
    same = trial.agreement
    if reference:
        broken = f", {same.left_out} are not whole" if same.left_out else ""
        return f"{trial.speed:.3g} documents/s, {same.of} values to compare others with{broken}"
    agree = f"{same.share:.1%} of {same.of} values agree" if same.of else "no whole value to compare"
    return f"{trial.speed:.3g} documents/s, {agree}"


def _settings(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return {section: tree[section] for section in ("model", "decoding", "engine")}


def _key(config: RunConfig) -> str:
    """Of all that a speed and an answer depend on, beside the sample and the machine."""
    text = json.dumps([config.fingerprint(), _settings(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(documents: Sequence[Document]) -> str:
    text = json.dumps([[d.id, d.fields] for d in documents], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
