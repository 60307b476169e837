"""The search of `raypd tune`: one setting at a time, each from the best so far.

It knows no worker and no time. Best is the fastest that agrees well enough with the reference, or
else the one that agrees most. Where the reference has too few values to judge, only the engine's
settings are tried: they change no answers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import Any, Literal

from raypd.config import METHODS, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.estimation.agreement import Agreement, Answers, Floor, compare

Changes = dict[str, Any]  # dotted key -> value
Reference = Literal["auto", "document", "guided"]
# Key -> most; they change no answers.
_ENGINE = {"engine.max_num_seqs": 1024, "engine.max_num_batched_tokens": 65536}
_MOST_STACK = 32
_MOST_VALUE = 256
_VLLM_SEQS = 64  # from which its engine.max_num_seqs climbs
_REPEATS = 3  # measurements of each of the best two, the first among them
_HIGHEST = 0.95  # a floor above it asks no more of the reference
_CUT = 3.0  # times slower than the best: its measurement is cut short


class OutOfTime(Exception):
    """There is no time or money for another measurement."""


@dataclass
class Trial:
    changes: Changes
    # Documents a second of one worker, of each measurement.
    speeds: list[float] = field(default_factory=list)
    agreement: Agreement = field(default_factory=lambda: Agreement(0, 0))
    error: str | None = None  # why it has no speed
    cut: bool = False  # it was stopped, being far slower than the best
    answers: Answers | None = None  # of the first measurement; None: the agreement stands

    @property
    def speed(self) -> float:
        return median(self.speeds) if self.speeds else 0.0

    @property
    def usable(self) -> bool:
        return self.error is None and not self.cut and self.speed > 0


@dataclass
class Search:
    config: RunConfig
    # Of a setting; seconds a document after which it may be cut short.
    measure: Callable[[Changes, float], Trial]
    floor: Floor  # what a setting's agreement must reach
    types: Sequence[tuple[str, str]] = ()  # (dtype, quantization) of weights to try
    vllm: bool = False  # whether the worker has it
    gpu: bool = False  # likewise
    reference_kind: Reference = "auto"
    # Of each trial; whether it is the reference.
    show: Callable[[Trial, bool], None] = lambda trial, reference: None
    reference: Trial = field(init=False)  # the first trial, or the one after it where that was poor
    trials: list[Trial] = field(default_factory=list)
    ended: str = "all settings were tried"

    def run(self) -> Trial | None:
        """The best setting; None where none can be used.

        Raises nothing at the end of the time: see `ended`.
        """
        try:
            self._all()
        except OutOfTime as why:
            self.ended = str(why)
        return self._best()

    def _best(self) -> Trial | None:
        usable = [
            trial for trial in self.trials if trial.usable and (self.judged or self.agrees(trial))
        ]
        return max(usable, key=self._rank, default=None)

    @property
    def judged(self) -> bool:
        """Whether the reference has values enough to tell who reaches the floor."""
        return self.floor.judged(self.reference.agreement)

    @property
    def reference_method(self) -> str:
        return str(self.value(self.reference.changes, "decoding.method"))

    def agrees(self, trial: Trial) -> bool:
        """Whether a setting may be taken: it reaches the floor or, where none can be judged,
        changes no answers.
        """
        if not self.judged:
            return trial.changes.keys() <= _ENGINE.keys()
        return trial is self.reference or self.floor.reached(trial.agreement)

    def unsure(self, trial: Trial) -> bool:
        """Whether the agreement may reach the floor, and the sample is too small to tell."""
        return self.floor.by == "low" and trial.agreement.interval()[1] >= self.floor.share

    def _rank(self, trial: Trial) -> tuple[int, float]:
        if self.agrees(trial):
            return (1, trial.speed)
        return (0, trial.agreement.share if trial.agreement.of else 0.0)

    def _all(self) -> None:
        extraction = self.config.task.kind == "extraction"
        if self.reference_kind != "guided" or not extraction:
            self._try({"decoding.method": "autoregressive"}, reference=True)
        if extraction and (
            self.reference_kind == "guided" or (self.reference_kind == "auto" and self._poor())
        ):
            self._try({"decoding.method": "guided"}, reference=True)
        if self.reference.error is not None:
            return
        if not self.judged:
            self._try({})
        else:
            parallel = [
                method for method in METHODS[self.config.task.kind] if REGISTRY[method].parallel
            ]
            methods = [] if self.config.decoding.method in parallel else parallel
            for base in ({}, *({"decoding.method": method} for method in methods)):
                self._method(base)
        if self.vllm and self.judged:
            method = "guided" if self.config.task.kind == "extraction" else "autoregressive"
            vllm: Changes = {"engine.kind": "vllm", "decoding.method": method}
            if self.config.engine.max_num_seqs == "auto":
                vllm["engine.max_num_seqs"] = _VLLM_SEQS
            if self._try(vllm).usable:
                self._climb(vllm, "engine.max_num_seqs", _ENGINE["engine.max_num_seqs"])
        for key, limit in _ENGINE.items():
            best = (self._best() or Trial({})).changes
            if self.value(best, key) != "auto" or key != "engine.max_num_seqs":
                self._climb(best, key, limit)
        for dtype, quantization in self.types if self.judged else ():
            best = (self._best() or Trial({})).changes
            self._try({**best, "model.dtype": dtype, "model.quantization": quantization})
        ranked = sorted(
            (trial for trial in self.trials if trial.usable), key=self._rank, reverse=True
        )
        for trial in ranked[:2] * (_REPEATS - 1):
            again = self.measure(trial.changes, math.inf)
            self._compare(again)
            self.show(again, False)
            if again.usable:
                trial.speeds += again.speeds

    def _poor(self) -> bool:
        """Whether values that autoregressive decoding broke keep the floor from being judged, or
        are most of all.
        """
        agreement = self.reference.agreement
        enough = Floor(min(self.floor.share, _HIGHEST)).judged(agreement)
        return agreement.of == 0 or (
            agreement.left_out > 0 and (agreement.left_out > agreement.of or not enough)
        )

    def _method(self, base: Changes) -> None:
        first = self._try(base)
        method = self.value(base, "decoding.method")
        if method == "hyper_parallel":
            here = [
                first,
                *(self._try({**base, "decoding.isolate": way}) for way in ("documents", "values")),
            ]
            here += self._stacks(base)
            start = max((trial for trial in here if trial.usable), key=self._rank, default=first)
            # More room for values cannot make them cheaper, but it can keep them from being cut.
            factors = (0.5,) if self.agrees(start) else (2, 0.5)
            self._climb(start.changes, "decoding.max_value_tokens", _MOST_VALUE, factors)
        elif method == "intra_prompt":
            self._climb(base, "decoding.contexts_per_prompt", _MOST_STACK)

    def _stacks(self, base: Changes) -> list[Trial]:
        """Two documents in a prompt, four, ... as long as that is better, with as many documents at
        once as before.
        """
        batch = self.config.engine.max_num_seqs

        def stacked(documents: int) -> Changes:
            changes = {**base, "decoding.isolate": "none", "decoding.stacked_documents": documents}
            # Of prompts.
            if batch == "auto":
                return changes
            return {**changes, "engine.max_num_seqs": batch // documents}

        return self._while_better(
            [], stacked, 2, _MOST_STACK if batch == "auto" else min(_MOST_STACK, batch), 2
        )

    def value(self, changes: Changes, key: str) -> Any:
        return changes.get(key, attrgetter(key)(self.config))

    def _climb(
        self, start: Changes, key: str, limit: int, factors: Sequence[float] = (2, 0.5)
    ) -> None:
        """Doubles a setting while that is better, or else halves it while that is (or other
        `factors`).
        """
        first = self._try(start)
        value = self.value(start, key)
        began = self.config.engine.batched_tokens(self.gpu) if value == "auto" else int(value)
        for factor in factors:
            better = self._while_better(
                [first],
                lambda value: {**start, key: value},
                int(began * factor),
                max(limit, began),
                factor,
            )
            if len(better) > 1:
                break

    def _while_better(
        self,
        trials: list[Trial],
        setting: Callable[[int], Changes],
        value: int,
        limit: int,
        factor: float,
    ) -> list[Trial]:
        """Trials, and those of further values, each times `factor`, as long as each is better than
        the one before.
        """
        while 1 <= value <= limit:
            trial = self._try(setting(value))
            if not trial.usable or (trials and self._rank(trial) <= self._rank(trials[-1])):
                break
            trials = [*trials, trial]
            value = int(value * factor)
        return trials

    def _try(self, changes: Changes, reference: bool = False) -> Trial:
        """Measures a setting, once: those that come out the same are one. reference: others are
        compared with it.
        """
        changes = {
            key: value for key, value in changes.items() if attrgetter(key)(self.config) != value
        }
        earlier = next((trial for trial in self.trials if trial.changes == changes), None)
        if earlier is not None:
            return earlier
        best = self._best()
        trial = self.measure(
            changes, _CUT / best.speed if best is not None and self.agrees(best) else math.inf
        )
        if reference and (not self.trials or trial.error is None):
            self.reference = trial
        self.trials.append(trial)
        for affected in self.trials if trial is self.reference else [trial]:
            self._compare(affected)
        self.show(trial, trial is self.reference)
        return trial

    def _compare(self, trial: Trial) -> None:
        if self.reference.answers is not None and trial.answers is not None:
            trial.agreement = compare(self.reference.answers, trial.answers)
