"""`raypd fit`: labels, candidates, figures, and the cheapest model whose F1 surely holds the floor.

Every step is a run or a training of its own in a folder of the fit, so that the same command does
nothing that is done.
"""

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.answering.check import check_model
from raypd.billing.budget import BudgetReached
from raypd.cluster import ray_session
from raypd.config import RunConfig, deadline_at, rewrite
from raypd.config.load import load_config
from raypd.errors import ConfigError, UserError
from raypd.fitting import candidate, labels, page
from raypd.fitting.result import AS_CONFIGURED, TEACHER, CandidateScore, FitResult
from raypd.models.load import check_model_config
from raypd.run import console, layout, records
from raypd.run.lease import held
from raypd.run.text import Say, usd
from raypd.training.data import check

_SOURCE: Any = {
    "fit": {"labels", "teacher"},
    "input": True,
    "task": True,
    "training": {"labels_column", "seed"},
}
# Which documents are in which part, and what their labels are.
_DECIDES: Any = {**_SOURCE, "fit": {*_SOURCE["fit"], "documents", "test_share", "validation_share"}}


def run_fit(
    path: str, overrides: list[str], *, verbose: bool = False, say: Say = console.say
) -> FitResult:
    """Fits a model to the documents of a configuration, or goes on where the same command was cut
    off.

    path, overrides: the user's YAML and key=value over it, which the recommended configuration is
    made from. Raises ConfigError, InputError, ModelError before anything is trained (also: the
    folder is another fit's); RunError: it cannot go on, and what is done is kept; Interrupted at
    SIGINT or SIGTERM.
    """
    config = load_config(path, [*overrides, "cascade.model=null"])  # each model is measured alone
    storage.configure(config.storage)
    folder = config.fit.path or config.output.path.rstrip("/") + "-fit"
    if storage.is_remote(folder):
        words = "weights are trained into a folder that all workers share; give a local one"
        raise ConfigError(f"fit.path {folder}: {words}")
    folder = storage.absolute(folder)
    result, kept = _begin(config, folder), storage.join(folder, layout.FIT)
    ends = None if config.cost.deadline is None else deadline_at(config.cost.deadline, time.time())
    context = labels.FitContext(config, folder, verbose, say, ends)
    _check(context)
    try:
        with held(folder, say):
            if not storage.exists(context.part("train")):
                records.write(kept, result)
            # Once for all runs and trainings.
            with console.signals(), ray_session.connected(config.cluster, verbose):
                Fit(context, result).run()
    except BudgetReached as reached:
        result.stopped = str(reached)
    except (KeyboardInterrupt, console.Interrupted):
        raise console.Interrupted("interrupted; the same command goes on from there") from None
    result.usd, result.recommended = context.spent(), recommend(result)
    target, choice = Path(result.path, "recommended.yaml"), result.choice
    target.unlink(missing_ok=True)  # of an earlier recommendation
    if choice is not None and choice.f1 is not None:
        why = (
            f"{choice.name}: {result.measure} {choice.f1.value:.3f} on "
            f"{result.documents['test']} documents"
        )
        # As it was scored.
        changes = {**choice.changes, "cascade.model": None, "output.min_confidence": 0.0}
        rewrite.write(Path(path), overrides, changes, target, why, "raypd fit")
        result.configuration = str(target)
    records.write(kept, result)
    page.write(result, missing(result))
    return result


class Fit:
    """The steps of a fit: labels, candidates with all labels, what is not trained, the curve, and
    costs.
    """

    def __init__(self, context: labels.FitContext, result: FitResult) -> None:
        self.config, self.context, self.result, self.say = (
            context.config,
            context,
            result,
            context.say,
        )

    def run(self) -> None:
        """Does what is not done yet.

        Raises BudgetReached at the end of the money or of the time.
        """
        fit, result, context = self.config.fit, self.result, self.context
        result.documents = {part: len(rows) for part, rows in labels.parts_of(context).items()}
        documents = result.documents["train"]
        run = storage.join(result.path, "configured")
        self._add(
            result.scores, AS_CONFIGURED, partial(candidate.test, context, AS_CONFIGURED, {}, run)
        )
        if fit.teacher is not None:
            # That labelled.
            run = storage.join(
                result.path, "teacher" if result.gold else f"teacher-{fit.documents}"
            )
            keys = labels.teacher_keys(self.config)
            unscored = partial(
                CandidateScore,
                name=TEACHER,
                method=str(keys.get("decoding.method", "")),
                changes=keys,
            )
            tested = partial(candidate.test, context, TEACHER, keys, run)
            self._add(result.scores, TEACHER, tested if result.gold else unscored, run)
        for name, changes in fit.candidates.items():
            self._add(
                result.scores,
                name,
                partial(candidate.train, context, name, changes, documents, 1.0),
            )
        for name, changes in fit.candidates.items():
            for share in fit.curve:
                make = partial(
                    candidate.train, context, name, changes, max(1, round(share * documents)), share
                )
                self._add(result.curve, name, make)

    def _add(
        self,
        scores: list[CandidateScore],
        name: str,
        make: Callable[[], CandidateScore],
        run: str | None = None,
    ) -> None:
        """Makes a score; what fails by itself is one with the error, and the fit goes on. run:
        whose speed counts; None: a sample's. Of the curve no costs are measured. Raises
        BudgetReached at the end of money or time.
        """
        budget, spent = self.config.cost.budget_usd, self.context.spent()
        if budget is not None and spent >= budget:
            raise BudgetReached(
                f"cost.budget_usd {usd(budget)} is spent; the same command with more goes on"
            )
        if self.context.ends is not None and time.time() > self.context.ends:
            raise BudgetReached(
                "cost.deadline is reached; the same command with a later one goes on"
            )
        self.say(
            f"{name}: {'training and ' if name not in (AS_CONFIGURED, TEACHER) else ''}running "
            "over the test part"
        )
        score = CandidateScore(name=name, method="")
        try:
            score = make()
            if scores is self.result.scores:
                self.result.corpus_documents = candidate.measure(self.context, score, run)
        except (BudgetReached, console.Interrupted, ConfigError):
            raise
        except UserError as error:
            self.say(f"{name}: {error}")
            score.error = str(error)
        scores.append(score)


def recommend(result: FitResult) -> str | None:
    """The name of the cheapest score whose F1 surely holds the floor; None: there is none.

    By USD per 1,000 documents, then by speed: where the machine has no price, a server that has one
    comes last.
    """
    costs = {
        s.name: (s.usd_per_1000.value if s.usd_per_1000 else 0.0, 1 / s.documents_per_second.value)
        for s in result.scores
        if s.holds(result.floor) and s.documents_per_second
    }
    return min(costs, key=costs.__getitem__, default=None)


def missing(result: FitResult) -> str:
    """Why no score holds the floor, and what would help, in words."""
    scores = [score for score in result.scores if score.f1 is not None and score.name != TEACHER]
    teacher = next(
        (score.f1 for score in result.scores if score.name == TEACHER and score.f1), None
    )
    if teacher is not None and teacher.value < result.floor:
        return (
            f"fit.f1_floor {result.floor:g} is above the F1 of the teacher itself, "
            f"{teacher.value:.3f}"
        )
    if not scores:
        return "no candidate could be scored"
    best = max(scores, key=lambda score: score.f1.value if score.f1 else 0.0)
    assert best.f1 is not None
    lines = [f"the best is {best.name}, {best.f1.value:.3f}"]
    if best.f1.value > result.floor and best.f1.low is not None:
        tests = result.documents["test"]
        needed = tests * ((best.f1.value - best.f1.low) / (best.f1.value - result.floor)) ** 2
        lines.append(
            f"it is above the floor, but not surely (from {best.f1.low:.3f}): about "
            f"{needed:,.0f} test documents "
            f"would tell, and there are {tests} (fit.documents)"
        )
    fewer = [score.f1.value for score in result.curve if score.name == best.name and score.f1]
    if fewer:
        gain = best.f1.value - fewer[-1]
        more = "more labels would help" if gain > 0.01 else "more labels would help little"
        lines.append(
            f"from {max(s.labels for s in result.curve if s.name == best.name)} to "
            f"{best.labels} labels it "
            f"gained {gain:+.3f}: {more}"
        )
    return "; ".join(lines)


def _begin(config: RunConfig, folder: str) -> FitResult:
    """The result to fill.

    Raises ConfigError where the folder is another fit's, of which labels are there or asked.
    """
    # Which a model has made where there are none but a teacher, or they are a run's.
    source = config.fit.labels
    gold = config.fit.teacher is None if source is None else not labels.is_run(source)
    trees = (
        json.dumps(config.model_dump(mode="json", include=k), sort_keys=True)
        for k in (_DECIDES, _SOURCE)
    )
    identity, of_source = (hashlib.sha256(tree.encode()).hexdigest()[:12] for tree in trees)
    floor, kind, model = config.fit.f1_floor, config.task.kind, config.model.name
    result = FitResult(
        path=folder,
        identity=identity,
        source=of_source,
        floor=floor,
        gold=gold,
        task=kind,
        model=model,
    )
    try:
        before = records.read(FitResult, storage.join(folder, layout.FIT))
    except FileNotFoundError:
        if set(storage.names(folder)) - {layout.LEASE, layout.SESSIONS}:
            raise ConfigError(
                f"fit.path {folder}: is not empty, and no fit's; give another fit.path"
            ) from None
        return result
    except records.RecordError as error:
        raise ConfigError(f"{error}; give another fit.path") from None
    parted = storage.exists(storage.join(folder, f"{labels.PARTS[0]}.jsonl"))
    # The teacher, of this source.
    asked = any(name.startswith(labels.UNLABELLED) for name in storage.names(folder))
    if before.identity != result.identity if parted else asked and before.source != result.source:
        advice = "give another fit.path, or go back to that configuration"
        raise ConfigError(
            f"fit.path {folder}: holds the fit of other documents, labels or attributes; {advice}"
        )
    return result


def _check(context: labels.FitContext) -> None:
    """Raises what every candidate, and the teacher, would fail at, before anything is done."""
    config, folder = context.config, context.folder
    if config.task.kind != "extraction":
        raise ConfigError(f"task.kind {config.task.kind}: `raypd fit` is for extraction")
    if "id" in config.text_columns() and config.input.id_column != "id":
        raise ConfigError(
            "input.text_columns: a fit keeps a document's id in `id`: give that column another name"
        )
    for name, changes in config.fit.candidates.items():
        try:
            made = candidate.training_config(context, changes, context.part("train"), folder)
            check(made)
            check_model_config(made.model, machine=False)
        except UserError as error:
            raise type(error)(f"fit.candidates.{name}: {error}") from None
    if config.fit.teacher is not None:
        try:
            check_model(labels.teacher_config(config, context.part("test"), folder))
        except UserError as error:
            raise type(error)(f"fit.teacher: {error}") from None
