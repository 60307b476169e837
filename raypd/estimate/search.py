"""The search of `raypd tune`: one setting at a time, each from the best so far. It knows no worker and no time.

    1. The reference: the answers of autoregressive decoding; where too many of them are broken for the floor to be
       judged, those of guided decoding. Then the configuration as it is.
    2. For every method its own settings (isolation and stacking, contexts per prompt, most tokens of a value, or of a
       draft).
    3. On the best method: prompts at once and tokens per pass, doubled or halved as long as that pays; not where one
       prompt is decoded at a time (speculative).
    4. Weights in other types, each loaded once.
    5. The best two again, twice each, in turn: the median counts.

Best is the fastest among those that agree well enough with the reference; while none does, the one that agrees most.
Where not even the reference has enough values to judge that, settings that change answers are not tried: the best is
the configuration as it is with faster settings of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from raypd.config import METHODS, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.estimate.agreement import Agreement, Answers, Floor, compare

Changes = dict[str, Any]  # dotted key -> value
Reference = Literal["auto", "document", "guided"]
_MOST_BATCH, _MOST_BUDGET, _MOST_STACK, _MOST_DRAFT = 1024, 65536, 32, 80
_REPEATS = 3  # measurements of each of the best two, the first among them
_HIGHEST = 0.95  # a floor above it asks no more of the reference
_CUT = 3.0  # times slower than the best: its measurement is cut short


class OutOfTime(Exception):
    """There is no time or money for another measurement."""


@dataclass
class Trial:
    """One setting that was measured. error: why it has no speed. cut: it was stopped, being far slower than the best.

    speeds: documents a second of one worker, of each measurement. answers: of the first; None: the agreement stands.
    """

    changes: Changes
    speeds: list[float] = field(default_factory=list)
    agreement: Agreement = field(default_factory=lambda: Agreement(0, 0))
    error: str | None = None
    cut: bool = False
    answers: Answers | None = None

    @property
    def speed(self) -> float:
        return median(self.speeds) if self.speeds else 0.0

    @property
    def usable(self) -> bool:
        return self.error is None and not self.cut and self.speed > 0


# Measures the configuration with changes; `limit`: seconds a document after which it may be cut short.
Measure = Callable[[Changes, float | None], Trial]


@dataclass
class Search:
    """floor: what a setting's agreement must reach. types: (dtype, quantization) of weights to try.

    wanted: the reference that was asked for. show: is called with each trial, and whether it is the reference.
    reference: None before it was measured.
    """

    config: RunConfig
    measure: Measure
    floor: Floor
    types: Sequence[tuple[str, str]] = ()
    wanted: Reference = "auto"
    show: Callable[[Trial, bool], None] = lambda trial, reference: None
    reference: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    ended: str = "all settings were tried"

    def run(self) -> Trial | None:
        """The best setting; None where none can be used. Raises nothing at the end of the time: see `ended`."""
        try:
            self._all()
        except OutOfTime as why:
            self.ended = str(why)
        return self.best()

    def best(self) -> Trial | None:
        usable = [trial for trial in self.trials if trial.usable and (self.judged or _engine_only(trial.changes))]
        return max(usable, key=self._rank, default=None)

    @property
    def judged(self) -> bool:
        """Whether the reference has values enough to tell who reaches the floor."""
        return self.reference is not None and self.floor.judged(self.reference.agreement)

    @property
    def by_guided(self) -> bool:
        """Whether the reference is guided decoding."""
        return self.reference is not None and not self.autoregressive(self.reference)

    def autoregressive(self, trial: Trial) -> bool:
        return self._method_of(trial.changes) == "autoregressive"

    def agrees(self, trial: Trial) -> bool:
        """Whether a setting may be taken: it reaches the floor; where none can be judged, it changes no answers."""
        if not self.judged:
            return _engine_only(trial.changes)
        return trial is self.reference or self.floor.reached(trial.agreement)

    def unsure(self, trial: Trial) -> bool:
        """Whether the agreement may reach the floor, and the sample is too small to tell."""
        return self.floor.by == "low" and trial.agreement.interval()[1] >= self.floor.share

    def _rank(self, trial: Trial) -> tuple[int, float]:
        return (1, trial.speed) if self.agrees(trial) else (0, trial.agreement.share if trial.agreement.of else 0.0)

    def _all(self) -> None:
        self._refer()
        if self.reference is None or self.reference.error is not None:
            return
        if not self.judged:
            self._try({})
        else:
            parallel = [method for method in METHODS[self.config.task.kind] if REGISTRY[method].parallel]
            others = [] if self.config.decoding.method in parallel else parallel
            for base in ({}, *({"decoding.method": method} for method in others)):
                self._method(base)
        for key, most in (("engine.max_num_seqs", _MOST_BATCH), ("engine.max_num_batched_tokens", _MOST_BUDGET)):
            if self._method_of(self._best_changes()) != "speculative":
                self._climb(self._best_changes(), key, most)
        for dtype, quantization in self.types if self.judged else ():
            self._try({**self._best_changes(), "model.dtype": dtype, "model.quantization": quantization})
        self._repeat()

    def _refer(self) -> None:
        """Measures the reference."""
        extraction = self.config.task.kind == "extraction"
        if self.wanted != "guided" or not extraction:
            self._take(_AUTOREGRESSIVE)
        if extraction and (self.wanted == "guided" or (self.wanted == "auto" and self._poor())):
            self._take(_GUIDED)

    def _poor(self) -> bool:
        """Whether values that autoregressive decoding broke keep the floor from being judged, or are most of all."""
        found = self.reference.agreement if self.reference is not None else Agreement(0, 0)
        enough = Floor(min(self.floor.share, _HIGHEST)).judged(found)
        return found.of == 0 or (found.left_out > 0 and (found.left_out > found.of or not enough))

    def _take(self, changes: Changes) -> None:
        """Makes a setting the reference, with which all others are compared."""
        trial = self._try(changes, reference=True)
        if trial.error is None or self.reference is None:
            self.reference = trial
        for one in self.trials:
            self._compare(one)

    def _compare(self, trial: Trial) -> None:
        if self.reference is not None and self.reference.answers is not None and trial.answers is not None:
            trial.agreement = compare(self.reference.answers, trial.answers)

    def _method_of(self, changes: Changes) -> str:
        return str(changes.get("decoding.method", self.config.decoding.method))

    def _method(self, base: Changes) -> None:
        """The settings that only one method has, from `base`."""
        first = self._try(base)
        method = self._method_of(base)
        if method == "hyper_parallel":
            here = [first, *(self._try({**base, "decoding.isolate": way}) for way in ("documents", "values"))]
            here += self._stacks(base)
            start = max((trial for trial in here if trial.usable), key=self._rank, default=first)
            # More room for values cannot make them cheaper, but it can keep them from being cut.
            ways = (_halved,) if self.agrees(start) else (_doubled, _halved)
            self._climb(start.changes, "decoding.max_value_tokens", 256, ways)
        elif method == "intra_prompt":
            self._climb(base, "decoding.contexts_per_prompt", _MOST_STACK)
        elif method == "speculative" and self.config.decoding.draft_tokens is not None:
            self._climb(base, "decoding.draft_tokens", _MOST_DRAFT)

    def _stacks(self, base: Changes) -> list[Trial]:
        """Two documents in a prompt, four, ... as long as that is better, with as many documents at once as before."""
        found: list[Trial] = []
        batch, stack = self.config.engine.max_num_seqs, 2
        while stack <= min(_MOST_STACK, batch):
            together = {
                "decoding.isolate": "none",
                "decoding.stacked_documents": stack,
                "engine.max_num_seqs": batch // stack,
            }
            trial = self._try({**base, **together})
            if not trial.usable or (found and self._rank(trial) <= self._rank(found[-1])):
                break
            found.append(trial)
            stack *= 2
        return found

    def _best_changes(self) -> Changes:
        best = self.best()
        return best.changes if best is not None else {}

    def _climb(self, start: Changes, key: str, most: int, ways: Sequence[_Steps] | None = None) -> list[Trial]:
        """Doubles a setting while that is better, or else halves it while that is (or other `ways`)."""
        found = [self._try(start)]
        for steps in ways or (_doubled, _halved):
            best = found[0]
            for value in steps(int(start.get(key, _value(self.config, key))), most):
                trial = self._try({**start, key: value})
                found.append(trial)
                if not trial.usable or self._rank(trial) <= self._rank(best):
                    break
                best = trial
            if best is not found[0]:
                break
        return found

    def _try(self, changes: Changes, reference: bool = False) -> Trial:
        """Measures a setting, once: those that come out the same are one. reference: others are compared with it."""
        changes = {key: value for key, value in changes.items() if _value(self.config, key) != value}
        known = next((trial for trial in self.trials if trial.changes == changes), None)
        if known is not None:
            return known
        best = self.best()
        limit = _CUT / best.speed if best is not None and self.agrees(best) else None
        trial = self.measure(changes, limit)
        if reference and trial.error is None:
            self.reference = trial
        self._compare(trial)
        self.show(trial, trial is self.reference)
        self.trials.append(trial)
        return trial

    def _repeat(self) -> None:
        ranked = sorted((t for t in self.trials if t.usable), key=self._rank, reverse=True)
        for _ in range(_REPEATS - 1):
            for trial in ranked[:2]:
                again = self.measure(trial.changes, None)
                self._compare(again)
                self.show(again, False)
                if again.usable:
                    trial.speeds += again.speeds


_Steps = Callable[[int, int], Iterator[int]]
_AUTOREGRESSIVE = {"decoding.method": "autoregressive"}
_GUIDED = {"decoding.method": "guided"}


def _engine_only(changes: Changes) -> bool:
    """Whether a setting asks the model just what the configuration asks it."""
    return all(key in ("engine.max_num_seqs", "engine.max_num_batched_tokens") for key in changes)


def _doubled(value: int, most: int) -> Iterator[int]:
    while value * 2 <= most:
        value *= 2
        yield value


def _halved(value: int, _: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
