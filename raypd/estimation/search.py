"""The search of `raypd tune`: it changes one setting at a time, starting from the best so far.

The search knows neither workers nor time. The best setting is the fastest that agrees well enough
with the reference, or else the one that agrees most. If the reference has too few values to judge
agreement, only settings of the engine are tried, because they change no answers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from raypd.config import METHODS, RunConfig, value_at
from raypd.decoding import REGISTRY
from raypd.estimation.agreement import Agreement, Answers, Floor, compare

Changes = dict[str, Any]  # dotted key -> value
Reference = Literal["auto", "document", "guided"]
# Settings that change no answers -> the largest value to try.
_ENGINE_LIMITS = {"engine.max_num_seqs": 1024, "engine.max_num_batched_tokens": 65536}
_MAX_STACKED = 32
_MAX_VALUE_TOKENS = 256
# The value of engine.max_num_seqs at which the search starts with vLLM.
_VLLM_SEQS = 64
# Measurements of each of the best two settings, including the first.
_REPEATS = 3
# A floor above this share needs no more values of the reference than this share does.
_HIGHEST_FLOOR = 0.95
# A measurement is stopped if the setting is this many times slower than the best.
_CUT = 3.0


class OutOfTime(Exception):
    """There is no time or money left for another measurement."""


@dataclass
class Trial:
    """A setting, and what was measured with it."""

    changes: Changes
    # Documents per second of one worker, one per measurement.
    speeds: list[float] = field(default_factory=list)
    agreement: Agreement = field(default_factory=lambda: Agreement(0, 0))
    error: str | None = None  # why it has no speed
    cut: bool = False  # it was stopped, because it was far slower than the best
    answers: Answers | None = None  # of the first measurement; None leaves the agreement unchanged

    @property
    def speed(self) -> float:
        if not self.speeds:
            return 0.0
        return median(self.speeds)

    @property
    def usable(self) -> bool:
        return self.error is None and not self.cut and self.speed > 0


@dataclass
class Search:
    """A search over the settings of a configuration.

    Attributes:
        config: The configuration from which the search starts.
        measure: Measures a setting. It may stop once a document takes more than the given seconds.
        floor: The floor that the agreement of a setting must reach.
        types: (dtype, quantization) of weights to try.
        vllm: Whether the worker has vLLM.
        gpu: Whether the worker has a GPU.
        reference_kind: Which decoding the answers are compared with.
        show: Is called with each trial, and whether it is the reference.
        reference: The first trial, or the one after it if the first was poor.
        trials: All trials so far.
        ended: Why the search ended, in words.
    """

    config: RunConfig
    measure: Callable[[Changes, float], Trial]
    floor: Floor
    types: Sequence[tuple[str, str]] = ()
    vllm: bool = False
    gpu: bool = False
    reference_kind: Reference = "auto"
    show: Callable[[Trial, bool], None] = lambda trial, reference: None
    reference: Trial = field(init=False)
    trials: list[Trial] = field(default_factory=list)
    ended: str = "all settings were tried"

    def run(self) -> Trial | None:
        """Search until all settings were tried or the time is over; see `ended`.

        Returns:
            The best setting; None if none can be used.
        """
        try:
            self._try_all()
        except OutOfTime as reason:
            self.ended = str(reason)
        return self._best()

    def _best(self) -> Trial | None:
        """Return the best usable trial so far."""
        candidates = []
        for trial in self.trials:
            if trial.usable and (self.judged or self.agrees(trial)):
                candidates.append(trial)
        return max(candidates, key=self._rank, default=None)

    def _best_changes(self) -> Changes:
        best = self._best()
        if best is None:
            return {}
        return best.changes

    @property
    def judged(self) -> bool:
        """Whether the reference has enough values to tell which settings reach the floor."""
        return self.floor.judged(self.reference.agreement)

    @property
    def reference_method(self) -> str:
        return str(self.value(self.reference.changes, "decoding.method"))

    def agrees(self, trial: Trial) -> bool:
        """Return whether a setting may be chosen.

        It must reach the floor or, if agreement cannot be judged, change no answers.
        """
        if not self.judged:
            return trial.changes.keys() <= _ENGINE_LIMITS.keys()
        return trial is self.reference or self.floor.reached(trial.agreement)

    def unsure(self, trial: Trial) -> bool:
        """Return whether the agreement may reach the floor, but the sample is too small to tell."""
        _, high = trial.agreement.interval()
        return self.floor.by == "low" and high >= self.floor.share

    def _rank(self, trial: Trial) -> tuple[int, float]:
        """Return the sort key: settings that agree rank by speed, above the others by agreement."""
        if self.agrees(trial):
            return (1, trial.speed)
        if not trial.agreement.of:
            return (0, 0.0)
        return (0, trial.agreement.share)

    def _try_all(self) -> None:
        self._try_references()
        if self.reference.error is not None:
            return
        if self.judged:
            self._try_methods()
        else:
            self._try({})
        if self.vllm and self.judged:
            self._try_vllm()
        for key, limit in _ENGINE_LIMITS.items():
            changes = self._best_changes()
            if self.value(changes, key) != "auto" or key != "engine.max_num_seqs":
                self._climb(changes, key, limit)
        if self.judged:
            for dtype, quantization in self.types:
                weights = {"model.dtype": dtype, "model.quantization": quantization}
                self._try({**self._best_changes(), **weights})
        self._repeat_best()

    def _try_references(self) -> None:
        """Measure the settings that answers are compared with."""
        extraction = self.config.task.kind == "extraction"
        if self.reference_kind != "guided" or not extraction:
            self._try({"decoding.method": "autoregressive"}, reference=True)
        if not extraction:
            return
        if self.reference_kind == "guided" or (self.reference_kind == "auto" and self._is_poor()):
            self._try({"decoding.method": "guided"}, reference=True)

    def _try_methods(self) -> None:
        """Measure the configured method or, if it is not parallel, all parallel methods as well."""
        parallel = [
            method for method in METHODS[self.config.task.kind] if REGISTRY[method].parallel
        ]
        self._try_method({})
        if self.config.decoding.method not in parallel:
            for method in parallel:
                self._try_method({"decoding.method": method})

    def _try_vllm(self) -> None:
        method = "autoregressive"
        if self.config.task.kind == "extraction":
            method = "guided"
        changes: Changes = {"engine.kind": "vllm", "decoding.method": method}
        if self.config.engine.max_num_seqs == "auto":
            changes["engine.max_num_seqs"] = _VLLM_SEQS
        if self._try(changes).usable:
            self._climb(changes, "engine.max_num_seqs", _ENGINE_LIMITS["engine.max_num_seqs"])

    def _repeat_best(self) -> None:
        """Measure the best two settings again, so that one lucky measurement does not decide."""
        usable = [trial for trial in self.trials if trial.usable]
        ranked = sorted(usable, key=self._rank, reverse=True)
        for trial in ranked[:2] * (_REPEATS - 1):
            repetition = self.measure(trial.changes, math.inf)
            self._compare(repetition)
            self.show(repetition, False)
            if repetition.usable:
                trial.speeds += repetition.speeds

    def _is_poor(self) -> bool:
        """Return whether autoregressive decoding has too many incomplete values for a reference.

        That is so if they are the majority, or if too few values are left to judge the floor.
        """
        agreement = self.reference.agreement
        if agreement.of == 0:
            return True
        if agreement.left_out == 0:
            return False
        enough = Floor(min(self.floor.share, _HIGHEST_FLOOR)).judged(agreement)
        return agreement.left_out > agreement.of or not enough

    def _try_method(self, base: Changes) -> None:
        """Measure a method and its own settings."""
        first = self._try(base)
        method = self.value(base, "decoding.method")
        if method == "hyper_parallel":
            trials = [first]
            for isolate in ("documents", "values"):
                trials.append(self._try({**base, "decoding.isolate": isolate}))
            trials += self._stacks(base)
            usable = [trial for trial in trials if trial.usable]
            start = max(usable, key=self._rank, default=first)
            # Longer limits cannot make values cheaper, but they can keep values from being cut.
            factors = (0.5,) if self.agrees(start) else (2, 0.5)
            self._climb(start.changes, "decoding.max_value_tokens", _MAX_VALUE_TOKENS, factors)
        elif method == "intra_prompt":
            self._climb(base, "decoding.options.contexts_per_prompt", _MAX_STACKED)

    def _stacks(self, base: Changes) -> list[Trial]:
        """Stack two documents in a prompt, then four and so on, as long as the speed improves.

        The number of documents in flight stays the same.
        """
        sequences = self.config.engine.max_num_seqs
        limit = _MAX_STACKED
        if sequences != "auto":
            limit = min(limit, sequences)

        def stacked(documents: int) -> Changes:
            changes = {**base, "decoding.isolate": "none", "decoding.stacked_documents": documents}
            if sequences != "auto":
                # A sequence is a prompt, which now has several documents.
                changes["engine.max_num_seqs"] = sequences // documents
            return changes

        return self._while_better([], stacked, 2, limit, 2)

    def value(self, changes: Changes, key: str) -> Any:
        """Return the value of a key in the configuration with these changes."""
        if key in changes:
            return changes[key]
        return value_at(self.config, key)

    def _climb(
        self, start: Changes, key: str, limit: int, factors: Sequence[float] = (2, 0.5)
    ) -> None:
        """Multiply a setting by a factor as long as that helps; if it never does, try the next."""
        first = self._try(start)
        value = self.value(start, key)
        if value == "auto":
            start_value = self.config.engine.batched_tokens(self.gpu)
        else:
            start_value = int(value)

        def changed(value: int) -> Changes:
            return {**start, key: value}

        for factor in factors:
            first_value = int(start_value * factor)
            improved = self._while_better(
                [first], changed, first_value, max(limit, start_value), factor
            )
            if len(improved) > 1:
                break

    def _while_better(
        self,
        trials: list[Trial],
        setting: Callable[[int], Changes],
        value: int,
        limit: int,
        factor: float,
    ) -> list[Trial]:
        """Measure values of a setting, each `factor` times the previous one, as long as it helps.

        Args:
            trials: The trials so far; the first value is compared with the last of them.
            setting: Returns the changes for a value.
            value: The first value.
            limit: The largest value.
            factor: The ratio of neighbouring values.

        Returns:
            `trials`, and the trials that were each better than the one before.
        """
        while 1 <= value <= limit:
            trial = self._try(setting(value))
            if not trial.usable or (trials and self._rank(trial) <= self._rank(trials[-1])):
                break
            trials = [*trials, trial]
            value = int(value * factor)
        return trials

    def _try(self, changes: Changes, reference: bool = False) -> Trial:
        """Measure a setting, unless an equal setting was measured before.

        Args:
            changes: The setting.
            reference: Whether other settings are compared with it.
        """
        changes = {
            key: value for key, value in changes.items() if value_at(self.config, key) != value
        }
        for trial in self.trials:
            if trial.changes == changes:
                return trial
        limit = math.inf
        best = self._best()
        if best is not None and self.agrees(best):
            limit = _CUT / best.speed
        trial = self.measure(changes, limit)
        if reference and (not self.trials or trial.error is None):
            self.reference = trial
        self.trials.append(trial)
        if trial is self.reference:
            for compared in self.trials:
                self._compare(compared)
        else:
            self._compare(trial)
        self.show(trial, trial is self.reference)
        return trial

    def _compare(self, trial: Trial) -> None:
        """Compare a trial's answers with those of the reference."""
        if self.reference.answers is not None and trial.answers is not None:
            trial.agreement = compare(self.reference.answers, trial.answers)
