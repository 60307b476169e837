"""`raypd tune`: find the cheapest settings whose answers still agree.

Settings are measured on a sample. Each measurement is a line of a file next to the new
configuration and is not repeated, so that Ctrl-C loses at most one measurement.
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

import raypd.estimation.sampling as sampling
from raypd import storage
from raypd.answering import check_model
from raypd.billing import prices
from raypd.config import RunConfig, with_changes
from raypd.errors import ConfigError, RunError, UserError, raised_as
from raypd.estimation.agreement import Floor, Judge, values_of
from raypd.estimation.bootstrap import exact
from raypd.estimation.machines import NodeKind, here, known_type
from raypd.estimation.profile import RemoteProfiler, WorkerFacts, check_sample, most_in_flight
from raypd.estimation.search import Changes, OutOfTime, Reference, Search, Trial
from raypd.run import records
from raypd.tasks import Document
from raypd.text import Say, counted

# A guess at the number of documents in flight, which is known only after a measurement.
_IN_FLIGHT = 128


@dataclass
class TuneOptions:
    """Options of `raypd tune`."""

    sample: int = 32  # documents to measure with
    minutes: float | None = None  # limit of all measurements
    budget_usd: float | None = None  # limit of their price on one node
    agreement: float = 0.9  # the floor, 0 to 1
    judge: Judge = "low"  # what must reach the floor
    reference: Reference = "auto"  # which decoding the answers are compared with
    instance: str | None = None  # the instance type whose price is used
    fresh: bool = False  # whether to discard earlier measurements


@dataclass
class TuneResult:
    """What the search found."""

    search: Search
    best: Trial
    kind: NodeKind  # the machine whose price is used
    documents: int
    reused: int  # measurements that were in the file
    machine: str  # in words

    def usd_per_1000(self, trial: Trial) -> float | None:
        """Return the price of 1,000 documents with a setting; None if it is not known."""
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
    """Measure settings and search for the best one, starting from the configuration.

    Args:
        config: The configuration.
        options: The options of the command.
        measurements: The file of measurements, with which the search resumes.
        verbose: Whether to show the messages of Ray and the worker.
        say: Is called with a line per measurement.

        Raises:
        ConfigError, InputError, ModelError: Before anything is measured.
        RunError: If nothing could be measured, or no setting can be used.
    """
    storage.configure(config.storage)
    check_model(config)
    documents = sampling.draw(config, options.sample).documents
    with RemoteProfiler(config, verbose) as profiler:
        facts = profiler.facts(config)
        kind = _kind(config, facts, options.instance)
        seconds = _seconds(options, kind)
        if options.fresh:
            measurements.unlink(missing_ok=True)
        sample_hash = _hash([[document.id, document.fields] for document in documents])
        trials = _Trials(
            config=config,
            documents=documents,
            profiler=profiler,
            path=measurements,
            about=f"{sample_hash} {facts.machine}",
            deadline=time.monotonic() + seconds,
            say=say,
        )
        search = Search(
            config,
            trials.measure,
            floor=Floor(options.agreement, options.judge),
            types=facts.types,
            vllm=facts.vllm,
            gpu=facts.gpu is not None,
            reference_kind=options.reference,
            show=trials.show,
        )
        best = search.run()
    if best is None:
        raise RunError(f"no setting can be used ({search.ended}): {_advice(search)}")
    return TuneResult(
        search=search,
        best=best,
        kind=kind,
        documents=len(documents),
        reused=trials.reused,
        machine=facts.machine,
    )


def _seconds(options: TuneOptions, kind: NodeKind) -> float:
    """Return the seconds that all measurements may take."""
    seconds = math.inf
    if options.minutes is not None:
        seconds = 60 * options.minutes
    if options.budget_usd is not None:
        if not kind.usd_per_hour:
            raise ConfigError(
                "--budget-usd: this machine has no price; set cost.prices.local (USD per hour)"
            )
        seconds = min(seconds, options.budget_usd / kind.usd_per_hour * 3600)
    return seconds


def _advice(search: Search) -> str:
    """Return what to do after a search without a result."""
    errors = [trial.error for trial in search.trials if trial.error is not None]
    if errors and not any(trial.usable for trial in search.trials):
        return errors[0]
    return (
        "raise --minutes or --budget-usd, or lower --sample; run the same command again to "
        "resume with the measurements so far"
    )


def _kind(config: RunConfig, facts: WorkerFacts, instance: str | None) -> NodeKind:
    """Return the machine whose price is used: the named instance type, or else this machine."""
    if instance is None:
        return here(config, facts.machine)
    kind = known_type(instance)
    if kind.gpu != facts.gpu:
        raise ConfigError(
            f"--instance {instance}: this machine ({facts.machine}) does not have the GPU of that "
            "type; name another type, or measure on a node of that type"
        )
    price = prices.price(instance, None, None, config.cost)
    return NodeKind(instance, kind.gpus, price.usd_per_hour, price.source)


@dataclass
class _Trials:
    """Measures settings for the search, and keeps each measurement as a line (JSON) of a file.

    Attributes:
        config: The configuration from which the search starts.
        documents: The sample.
        profiler: The worker to measure on.
        path: The file of measurements.
        about: Names the sample and the machine; lines about others are ignored.
        deadline: When the time is over, on the clock of `time.monotonic`.
        say: Is called with a line per measurement.
        count: Settings that were asked for.
        measured: Settings that could be measured.
        reused: Measurements that were in the file.
    """

    config: RunConfig
    documents: Sequence[Document]
    profiler: RemoteProfiler
    path: Path
    about: str
    deadline: float
    say: Say
    count: int = 0
    measured: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        self._stored: dict[str, list[Trial]] = defaultdict(list)
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8").splitlines():
            # A line is incomplete if the process died while writing it.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["about"] == self.about:
                    trial = records.from_json(Trial, line["trial"], str(self.path))
                    self._stored[line["key"]].append(trial)

    def measure(self, changes: Changes, limit: float) -> Trial:
        """Measure a setting once, or take its measurement from the file.

        Args:
            changes: The setting.
            limit: Seconds per document after which the measurement stops.

        Raises:
            OutOfTime: If the time is over.
        """
        self.count += 1
        try:
            changed = with_changes(self.config, changes)
        except ConfigError as error:
            return Trial(changes, error=str(error))
        settings = changed.model_dump(mode="json", include={"model", "decoding", "engine"})
        key = _hash([changed.fingerprint(), settings])
        if self._stored[key]:
            trial = self._stored[key].pop(0)
            self.reused += 1
        else:
            trial = Trial(changes)
            self._fill(trial, changed, limit)
            self._store(key, trial)
        self.measured += trial.error is None
        return replace(trial, changes=changes)

    def _fill(self, trial: Trial, config: RunConfig, limit: float) -> None:
        """Measure a setting into a trial. The limit is in seconds per document."""
        documents = len(self.documents) + 3 * min(_IN_FLIGHT, most_in_flight(config))
        seconds = min(self._remaining(), limit * documents)
        label = f"{self.count}. {describe(trial.changes)}"
        try:
            profiled = self.profiler.profile(config, self.documents, seconds, label)
            if not profiled.complete:
                # This raises an error if the time is over: in that case, the setting is not
                # necessarily slow.
                self._remaining()
                trial.cut = True
                if not any(profiled.costs):
                    return
            check_sample(profiled)
        except UserError as error:
            if not self.measured and isinstance(error, RunError):
                raise
            trial.error = str(error)
            return
        trial.speeds = [profiled.documents_per_second]
        trial.answers = [values_of(cost) for cost in profiled.costs]

    def _remaining(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            OutOfTime: If the deadline has passed.
        """
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise OutOfTime("the time or money given was used up")
        return remaining

    def _store(self, key: str, trial: Trial) -> None:
        """Append a measurement to the file."""
        tree = asdict(trial)
        # The agreement depends on the reference, so it is computed again.
        del tree["agreement"]
        line = {"key": key, "about": self.about, "at": time.time(), "trial": tree}
        with raised_as(
            RunError, f"{self.path}: cannot be written", advice="; --output names another place"
        ):
            text = json.dumps(line) + "\n"
            incomplete = self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b"")
            if incomplete:
                text = "\n" + text
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)

    def show(self, trial: Trial, reference: bool) -> None:
        """Print a line about a trial."""
        self.say(f"{self.count}. {describe(trial.changes)}: {_outcome(trial, reference)}")


def _outcome(trial: Trial, reference: bool) -> str:
    """Describe the result of a trial in words."""
    if trial.error is not None:
        return trial.error.splitlines()[0]
    if trial.cut:
        return "stopped: far slower than the best so far"
    speed = f"{trial.speed:.3g} documents/s"
    agreement = trial.agreement
    values = counted(agreement.of, "value")
    if reference:
        outcome = f"{speed}, {values} to compare others with"
        if agreement.left_out:
            outcome += f", {agreement.left_out} are incomplete"
        return outcome
    if not agreement.of:
        return f"{speed}, no complete value to compare"
    return f"{speed}, {agreement.share:.1%} of {values} agree"


def describe(changes: Changes) -> str:
    """Describe a setting by the keys that it changes."""
    if not changes:
        return "as it is"
    return ", ".join(f"{key.partition('.')[2]}={value}" for key, value in changes.items())


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:16]
