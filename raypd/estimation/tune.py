"""`raypd tune`: measures settings on a sample and writes the cheapest configuration that still
answers alike. Every measurement is a line of a file beside the new configuration, and is not made
again: Ctrl-C loses at most one.
"""

import contextlib
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.answering.check import check_model
from raypd.billing import prices
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.errors import ConfigError, RunError, UserError, raised_as
from raypd.estimation import sampling
from raypd.estimation.agreement import Floor, Judge, values_of
from raypd.estimation.bootstrap import exact
from raypd.estimation.machines import NodeKind, here, known_type
from raypd.estimation.profile import RemoteProfiler, WorkerFacts, check_sample, most_in_flight
from raypd.estimation.search import Changes, OutOfTime, Reference, Search, Trial
from raypd.run import records
from raypd.tasks.base import Document
from raypd.text import Say, counted

_IN_FLIGHT = 128  # documents, at a guess: how many there are is only seen when they are measured


@dataclass
class TuneOptions:
    sample: int = 32
    minutes: float | None = None
    budget_usd: float | None = None  # most money for measuring, at one node's price
    agreement: float = 0.9  # the floor, 0 to 1
    judge: Judge = "low"  # what of the agreement must reach the floor
    reference: Reference = "auto"  # with what answers are compared
    instance: str | None = None
    fresh: bool = False  # forget what the file of measurements holds


@dataclass
class TuneResult:
    search: Search
    best: Trial
    kind: NodeKind  # whose price stands
    documents: int
    reused: int  # measurements that stood in the file
    machine: str  # in words

    def usd_per_1000(self, trial: Trial) -> float | None:
        if not self.kind.usd_per_hour or not trial.usable:
            return None
        return float(self.kind.usd_per_1000(exact(1 / trial.speed))[0])


def tune(
    config: RunConfig,
    options: TuneOptions,
    measurements: Path,
    *,
    verbose: bool = False,
    say: Say = print,
) -> TuneResult:
    """Measures and searches, from the configuration as it is. measurements: the file from which the
    search goes on. Raises ConfigError, InputError or ModelError before anything is measured,
    RunError where nothing could be.
    """
    storage.configure(config.storage)
    check_model(config)
    documents = sampling.draw(config, options.sample).documents
    with RemoteProfiler(config, verbose) as profiler:
        facts = profiler.facts(config)
        kind = _kind(config, facts, options.instance)
        seconds = math.inf if options.minutes is None else 60 * options.minutes
        if options.budget_usd is not None:
            if not kind.usd_per_hour:
                raise ConfigError(
                    "--budget-usd: this machine has no price; cost.prices.local gives it one"
                )
            seconds = min(seconds, options.budget_usd / kind.usd_per_hour * 3600)
        if options.fresh:
            measurements.unlink(missing_ok=True)
        about = (
            f"{_hash([[document.id, document.fields] for document in documents])} {facts.machine}"
        )
        trials = _Trials(
            config, documents, profiler, measurements, about, time.monotonic() + seconds, say
        )
        floor = Floor(options.agreement, options.judge)
        gpu = facts.gpu is not None
        search = Search(
            config,
            trials.measure,
            floor,
            facts.types,
            facts.vllm,
            gpu,
            options.reference,
            trials.show,
        )
        best = search.run()
    if best is None:
        errors = [trial.error for trial in search.trials if trial.error is not None]
        advice = (
            "raise --minutes or --budget-usd, or lower --sample; the same command goes on with "
            "what was measured"
        )
        if errors and not any(trial.usable for trial in search.trials):
            advice = errors[0]
        raise RunError(f"no setting can be taken ({search.ended}): {advice}")
    return TuneResult(search, best, kind, len(documents), trials.reused, facts.machine)


def _kind(config: RunConfig, facts: WorkerFacts, instance: str | None) -> NodeKind:
    """Whose price counts: that of the type that is named, else what the configuration states of
    this machine.
    """
    if instance is None:
        return here(config, facts.machine)
    kind = known_type(instance)
    if kind.gpu != facts.gpu:
        raise ConfigError(
            f"--instance {instance}: this machine ({facts.machine}) has not the GPU of that type"
        )
    price = prices.price(instance, None, None, config.cost)
    return NodeKind(instance, kind.gpus, price.usd_per_hour, price.source)


@dataclass
class _Trials:
    """Measures settings for the search, and keeps the measurements as lines of a file, one JSON
    object each.
    """

    config: RunConfig
    documents: Sequence[Document]
    profiler: RemoteProfiler
    path: Path
    about: str  # sample and machine; lines of others are left alone
    ends: float  # by `time.monotonic`, when the time is over
    say: Say
    count: int = 0  # settings to measure
    measured: int = 0  # those that could be
    reused: int = 0  # from the file

    def __post_init__(self) -> None:
        self._known: dict[str, list[Trial]] = defaultdict(list)
        for text in (
            self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        ):
            # It was being written when the process died.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["about"] == self.about:
                    self._known[line["key"]].append(
                        records.from_json(Trial, line["trial"], str(self.path))
                    )

    def measure(self, changes: Changes, limit: float) -> Trial:
        """One measurement, from the file if it stands there. Raises OutOfTime."""
        self.count += 1
        try:
            changed = with_changes(self.config, changes)
        except ConfigError as error:
            return Trial(changes, error=str(error))
        key = _hash(
            [
                changed.fingerprint(),
                changed.model_dump(mode="json", include={"model", "decoding", "engine"}),
            ]
        )
        if self._known[key]:
            trial = self._known[key].pop(0)
            self.reused += 1
        else:
            trial = Trial(changes)
            self._fill(trial, changed, limit)
            self._keep(key, trial)
        self.measured += trial.error is None
        return replace(trial, changes=changes)

    def _fill(self, trial: Trial, config: RunConfig, limit: float) -> None:
        """limit: seconds a document."""
        limit = min(
            self._left(),
            limit * (len(self.documents) + 3 * min(_IN_FLIGHT, most_in_flight(config))),
        )
        try:
            label = f"{self.count}. {describe(trial.changes)}"
            profiled = self.profiler.profile(config, self.documents, limit, label)
            if not profiled.complete:
                self._left()  # cut short by the end of the time, not for being slow
                trial.cut = True
                if not any(profiled.costs):
                    return
            check_sample(profiled)
        except UserError as error:
            if not self.measured and isinstance(error, RunError):
                raise
            trial.error = str(error)
        else:
            trial.speeds, trial.answers = (
                [profiled.documents_per_second],
                [values_of(cost) for cost in profiled.costs],
            )

    def _left(self) -> float:
        """Seconds. Raises OutOfTime at the end."""
        remaining = self.ends - time.monotonic()
        if remaining <= 0:
            raise OutOfTime("the time or money given was used up")
        return remaining

    def _keep(self, key: str, trial: Trial) -> None:
        tree = asdict(trial)
        del tree["agreement"]  # the reference decides it
        line = {"key": key, "about": self.about, "at": time.time(), "trial": tree}
        with raised_as(
            RunError, f"{self.path}: cannot be written", advice="; --output names another place"
        ):
            torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b"")
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps(line) + "\n")

    def show(self, trial: Trial, reference: bool) -> None:
        outcome = f"{trial.speed:.3g} documents/s"
        same = trial.agreement
        values = counted(same.of, "value")
        if trial.error is not None:
            outcome = trial.error.splitlines()[0]
        elif trial.cut:
            outcome = "stopped: far slower than the best so far"
        elif reference:
            outcome += f", {values} to compare others with"
            outcome += f", {same.left_out} are not whole" if same.left_out else ""
        else:
            outcome += (
                f", {same.share:.1%} of {values} agree"
                if same.of
                else ", no whole value to compare"
            )
        self.say(f"{self.count}. {describe(trial.changes)}: {outcome}")


def describe(changes: Changes) -> str:
    return (
        ", ".join(f"{key.partition('.')[2]}={value}" for key, value in changes.items())
        or "as it is"
    )


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:16]
