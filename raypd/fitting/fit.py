"""`raypd fit`: find the cheapest model whose F1 surely holds the floor.

It labels documents, trains candidates, and scores and prices each. Every step is a run or a
training of its own in the fit's folder, so that the same command repeats nothing that is done.
"""

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import raypd.fitting.candidate as candidate
import raypd.fitting.page as page
from raypd import storage
from raypd.answering import check_model
from raypd.billing import BudgetReached
from raypd.cluster import ray_session
from raypd.config import RunConfig, deadline_at, load_config, rewrite
from raypd.errors import ConfigError, InputError, UserError
from raypd.fitting.context import FitContext, is_run, teacher_config, teacher_keys
from raypd.fitting.labels import UNLABELLED, asks_teacher
from raypd.fitting.parts import PARTS, parts_of
from raypd.fitting.result import AS_CONFIGURED, TEACHER, CandidateScore, FitResult
from raypd.run import Manifest, console, held, layout, read, records
from raypd.text import Say, counted, duration, usd
from raypd.training import check_training, check_weights

# The keys that decide which labelled documents there are.
_MEASURABLE = 0.5  # seconds of prefill from which a speed is known
_SOURCE: Any = {
    "fit": {"labels", "teacher"},
    "input": True,
    "task": True,
    "training": {"labels_column", "seed"},
}
# The keys that decide which documents are in which part, and what their labels are.
_IDENTITY: Any = {
    **_SOURCE,
    "fit": {"labels", "teacher", "documents", "test_share"},
    "training": {"labels_column", "seed", "validation_share"},
}


def run_fit(
    path: str, overrides: list[str], *, verbose: bool = False, say: Say = console.say
) -> FitResult:
    """Fit a model to the documents of a configuration, or resume an interrupted fit.

    Args:
        path: The user's YAML, from which the recommended configuration is made.
        overrides: key=value, each of which replaces a key of the YAML.
        verbose: Whether Ray's own messages are shown.
        say: Shows the user a line.

    Returns:
        The result that was written into the fit's folder.

    Raises:
        ConfigError, InputError, ModelError: Before anything is trained; also if the folder holds
            another fit.
        RunError: If the fit cannot continue. What is done is kept.
        Interrupted: At SIGINT or SIGTERM.
    """
    # Each model is measured alone, so the cascade is switched off.
    config = load_config(path, [*overrides, "cascade.model=null"])
    storage.configure(config.storage)
    folder = _folder(config)
    result = _begin(config, folder)
    result_path = storage.join(folder, layout.FIT)
    ends = None
    if config.cost.deadline is not None:
        ends = deadline_at(config.cost.deadline, time.time())
    context = FitContext(config, folder, verbose, say, ends)
    _check(context)
    is_new = not storage.is_folder(folder)
    try:
        with held(folder, say):
            if not storage.exists(context.part("train")):
                records.write(result_path, result)
            with console.signals():
                if not asks_teacher(config):
                    # Too few labels are an error, which need not wait for Ray.
                    parts_of(context)
                # One connection serves all runs and trainings.
                with ray_session.connected(config.cluster, verbose):
                    Fit(context, result).run()
    except BudgetReached as reached:
        result.stopped = str(reached)
    except (ConfigError, InputError):
        if is_new:
            _remove_unbegun(folder)
        raise
    except (KeyboardInterrupt, console.Interrupted):
        raise console.Interrupted("interrupted; run the same command again to resume") from None
    result.usd = context.spent()
    result.recommended = recommend(result)
    _write_recommended(result, path, overrides)
    records.write(result_path, result)
    page.write(result, missing(result))
    return result


def _folder(config: RunConfig) -> str:
    """Return the absolute folder of a fit; raise ConfigError for one that workers cannot share."""
    folder = config.fit.path or config.output.path.rstrip("/") + "-fit"
    if storage.is_remote(folder):
        raise ConfigError(
            f"fit.path {folder}: weights are trained into a folder that all workers share; give a "
            "local one"
        )
    return storage.absolute(folder)


def _write_recommended(result: FitResult, path: str, overrides: list[str]) -> None:
    """Write the configuration of the recommended score, or else of the best one."""
    recommended = Path(result.path, "recommended.yaml")
    below_floor = Path(result.path, "best.yaml")
    result.configuration = None
    result.best = None
    result.best_configuration = None
    for target in (recommended, below_floor):
        target.unlink(missing_ok=True)
    choice = result.choice or result.best_score
    if choice is None or choice.f1 is None:
        return
    output = load_config(path, overrides).output.path.rstrip("/") + "-fitted"
    comment = (
        f"{choice.name}: {result.measure} {choice.f1.value:.3f} on "
        f"{result.documents['test']} documents"
    )
    target = recommended
    if result.choice is None:
        target = below_floor
        comment += f"; not certain to reach fit.f1_floor, {result.floor:g}"
        result.best = choice.name
        result.best_configuration = str(target)
    else:
        result.configuration = str(target)
    if choice.labels:
        comment += f"\nIts model was trained on {choice.labels} labelled documents of this fit."
    comment += f"\nMade from {path}, without its comments. Answers go to {output}."
    changes = {
        **choice.changes,
        # The model was scored without a cascade, and with every value.
        "cascade.model": None,
        "output.min_confidence": 0.0,
        # The folder of the user's configuration may hold the run that was reviewed.
        "output.path": output,
    }
    rewrite.write(Path(path), overrides, changes, target, comment, "raypd fit", keep_comments=False)


class Fit:
    """The steps of a fit: labels, the models that are not trained, candidates, and the curve."""

    def __init__(self, context: FitContext, result: FitResult) -> None:
        self.context = context
        self.config = context.config
        self.result = result
        self.candidates = candidate.candidates_of(context.config)

    def run(self) -> None:
        """Do whatever is not done yet.

        Raises:
            BudgetReached: If the budget is spent or the deadline is over.
        """
        fit = self.config.fit
        parts = parts_of(self.context)
        self.result.documents = {part: len(rows) for part, rows in parts.items()}
        labels = self.result.documents["train"]
        self._add_configured(labels)
        if fit.teacher is not None:
            self._add_teacher()
        for name, changes in self.candidates.items():
            make = partial(candidate.train, self.context, name, changes, labels, 1.0)
            self._add(self.result.scores, name, make)
        for name, changes in self.candidates.items():
            for share in fit.curve:
                fewer = max(1, round(share * labels))
                make = partial(candidate.train, self.context, name, changes, fewer, share)
                self._add(self.result.curve, name, make, labels=fewer)

    def _say_how_long(self, labels: int) -> None:
        """Tell about how long the trainings take, from the speed of the run that was just made.

        A training step computes a pass forward and two backward, so it counts as three prefills. It
        computes an instruction that documents share once for all of them, which is not counted.
        """
        fit = self.config.fit
        run = storage.join(self.result.path, "configured")
        manifest = read.record(Manifest, run, layout.MANIFEST)
        if manifest is None or manifest.cost is None:
            return
        prefill_seconds = manifest.cost.seconds.get("prefill", 0.0)
        if not manifest.documents or not manifest.prefill_tokens or prefill_seconds < _MEASURABLE:
            return
        tokens = manifest.prefill_tokens + manifest.decode_tokens
        seconds_per_token = prefill_seconds / manifest.prefill_tokens
        document_seconds = 3 * seconds_per_token * tokens / manifest.documents
        trainings = 0
        seconds = 0.0
        for name, changes in self.candidates.items():
            epochs = float(changes.get("training.epochs", self.config.training.epochs))
            rates = changes.get("training.learning_rates", self.config.training.learning_rates)
            for share in (1.0, *fit.curve):
                if candidate.is_trained(self.context, name, changes, share):
                    # A resumed fit does not repeat it.
                    continue
                trainings += 1
                seconds += document_seconds * labels * epochs * share * len(rates)
                # The run over the test part follows.
                seconds += manifest.seconds
        if not trainings:
            return
        shorter = []
        if len(self.candidates) > 1:
            shorter.append("with fewer candidates (fit.candidates)")
        if fit.curve:
            shorter.append("without the learning curve (fit.curve=[])")
        advice = ""
        if shorter:
            advice = f"; it is faster {' or '.join(shorter)}"
        self.context.say(
            f"{counted(trainings, 'training')} on up to {counted(labels, 'document')}, each scored "
            f"on {self.result.documents['test']}: about {duration(seconds)} on this machine if "
            f"nothing else runs on it, from the speed of the first run{advice}. Measuring the "
            f"cost of each model comes on top, up to {fit.sample_minutes:g} min each "
            "(fit.sample_minutes)"
        )

    def _add_configured(self, labels: int) -> None:
        """Score the model that the configuration names, without training.

        Its run tells how long everything takes, which is said before its costs are measured.
        """
        run = storage.join(self.result.path, "configured")

        def make() -> CandidateScore:
            score = candidate.test(self.context, AS_CONFIGURED, {}, run)
            self._say_how_long(labels)
            return score

        self._add(self.result.scores, AS_CONFIGURED, make)

    def _add_teacher(self) -> None:
        """Score the teacher; where the labels are its own, only its costs are measured."""
        keys = teacher_keys(self.config)
        if self.result.gold:
            run = storage.join(self.result.path, "teacher")
            make = partial(candidate.test, self.context, TEACHER, keys, run)
        else:
            run = storage.join(self.result.path, f"teacher-{self.config.fit.documents}")
            method = str(keys.get("decoding.method", ""))
            make = partial(CandidateScore, name=TEACHER, method=method, changes=keys)
        self._add(self.result.scores, TEACHER, make, run)

    def _add(
        self,
        scores: list[CandidateScore],
        name: str,
        make: Callable[[], CandidateScore],
        run: str | None = None,
        labels: int | None = None,
    ) -> None:
        """Make a score and append it to `scores`.

        If it fails by itself, the error becomes its score and the fit continues. Costs are measured
        of `result.scores` alone, and not of the curve. `run` is the folder of a run whose speed
        counts; None to measure that of a sample. `labels` is how many labelled documents a score of
        the curve is trained on, which its line names.
        """
        self._check_limits()
        is_trained = name not in (AS_CONFIGURED, TEACHER)
        action = "training and running" if is_trained else "running"
        shown = name
        if labels is not None:
            shown += f" with {labels} of the labels"
        self.context.say(f"{shown}: {action} over the test part")
        score = CandidateScore(name=name, method="")
        try:
            score = make()
            if scores is self.result.scores:
                self.result.corpus_documents = candidate.add_costs(self.context, score, run)
        except (BudgetReached, console.Interrupted, ConfigError):
            raise
        except UserError as error:
            self.context.say(f"{name}: {error}")
            score.error = str(error)
        scores.append(score)

    def _check_limits(self) -> None:
        budget = self.config.cost.budget_usd
        if budget is not None and self.context.spent() >= budget:
            raise BudgetReached(
                f"cost.budget_usd {usd(budget)} is spent; raise it and run the same command to "
                "resume"
            )
        if self.context.ends is not None and time.time() > self.context.ends:
            raise BudgetReached(
                "cost.deadline is reached; set a later one and run the same command to resume"
            )


def recommend(result: FitResult) -> str | None:
    """Return the name of the cheapest score whose F1 surely holds the floor.

    Scores are compared by USD per 1,000 documents, and then by speed. Where the machine has no
    price, a server that has one comes last.

    Args:
        result: The result with its scores.

    Returns:
        The name; None if no score holds the floor.
    """
    costs = {}
    for score in result.scores:
        if score.holds(result.floor) and score.documents_per_second:
            price = score.usd_per_1000.value if score.usd_per_1000 else 0.0
            costs[score.name] = (price, 1 / score.documents_per_second.value)
    return min(costs, key=costs.__getitem__, default=None)


def missing(result: FitResult) -> str:
    """Explain why no score holds the floor, and what would help.

    Args:
        result: The result with its scores.
    """
    teacher = None
    scores = []
    for score in result.scores:
        if score.f1 is None:
            continue
        if score.name != TEACHER:
            scores.append(score)
        elif teacher is None:
            teacher = score.f1
    if teacher is not None and teacher.value < result.floor:
        return (
            f"fit.f1_floor {result.floor:g} is above the F1 of the teacher itself, "
            f"{teacher.value:.3f}"
        )
    if not scores:
        return "no candidate could be scored"
    best = max(scores, key=lambda score: score.f1.value if score.f1 else 0.0)
    assert best.f1 is not None
    reasons = [f"the best is {best.name}, {best.f1.value:.3f}"]
    if best.f1.value > result.floor and best.f1.low is not None:
        documents = result.documents["test"]
        # An interval narrows with the root of the number of documents.
        ratio = (best.f1.value - best.f1.low) / (best.f1.value - result.floor)
        reasons.append(
            f"it is above the floor, but its 95% interval begins at {best.f1.low:.3f}: about "
            f"{documents * ratio**2:,.0f} test documents would settle it, and there are "
            f"{documents} (fit.documents)"
        )
    fewer_labels = [score for score in result.curve if score.name == best.name]
    scored = [score.f1.value for score in fewer_labels if score.f1]
    if scored:
        gain = best.f1.value - scored[-1]
        advice = "more labels would help" if gain > 0.01 else "more labels would hardly help"
        reasons.append(
            f"from {max(score.labels for score in fewer_labels)} to {best.labels} labels it "
            f"gained {gain:+.3f}: {advice}"
        )
    return "; ".join(reasons)


def _begin(config: RunConfig, folder: str) -> FitResult:
    """Return the result to fill.

    Raises:
        ConfigError: If the folder holds another fit that has labels or asked a teacher.
        InputError: If the labels do not exist.
    """
    labels = config.fit.labels
    if labels is not None and not is_run(labels):
        # Otherwise an existing fit hides that the file is missing.
        next(storage.find(labels))
    result = FitResult(
        path=folder,
        identity=_digest(config, _IDENTITY),
        source=_digest(config, _SOURCE),
        floor=config.fit.f1_floor,
        # A model made the labels if they are a run's, or if there is nothing but a teacher.
        gold=config.fit.teacher is None if labels is None else not is_run(labels),
        task=config.task.kind,
        model=config.model.name,
        id_column=config.input.id_column,
    )
    try:
        before = records.read(FitResult, storage.join(folder, layout.FIT))
    except FileNotFoundError:
        if set(storage.names(folder)) - {layout.LEASE, layout.SESSIONS}:
            raise ConfigError(
                f"fit.path {folder}: is not empty and contains no fit; choose another fit.path"
            ) from None
        return result
    except records.RecordError as error:
        raise ConfigError(f"{error}; choose another fit.path") from None
    if storage.exists(storage.join(folder, f"{PARTS[0]}.jsonl")):
        is_other = before.identity != result.identity
    else:
        # Without parts, only what the teacher was asked has to be of this source.
        has_asked = any(name.startswith(UNLABELLED) for name in storage.names(folder))
        is_other = has_asked and before.source != result.source
    if is_other:
        advice = "choose another fit.path, or restore that configuration"
        raise ConfigError(
            f"fit.path {folder}: holds the fit of other documents, labels or attributes; {advice}"
        )
    return result


def _remove_unbegun(folder: str) -> None:
    """Delete the folder of a fit that was refused before anything was labelled."""
    if set(storage.names(folder)) <= {layout.LEASE, layout.SESSIONS, layout.FIT}:
        storage.delete_folder(folder)


def _digest(config: RunConfig, include: Any) -> str:
    """Return a digest of some keys of a configuration."""
    tree = json.dumps(config.model_dump(mode="json", include=include), sort_keys=True)
    return hashlib.sha256(tree.encode()).hexdigest()[:12]


def _check(context: FitContext) -> None:
    """Check the task, every candidate and the teacher before anything is done."""
    config = context.config
    folder = context.folder
    if config.task.kind != "extraction":
        raise ConfigError(f"task.kind {config.task.kind}: `raypd fit` is for extraction")
    if "id" in config.text_columns() and config.input.id_column != "id":
        raise ConfigError(
            "input.text_columns: a fit keeps a document's id in `id`: give that column another name"
        )
    for name, changes in candidate.candidates_of(config).items():
        try:
            training = candidate.training_config(context, changes, context.part("train"), folder)
            check_training(training)
            check_weights(training)
        except UserError as error:
            raise type(error)(f"fit.candidates.{name}: {error}") from None
    if config.fit.teacher is not None:
        try:
            check_model(teacher_config(config, context.part("test"), folder))
        except UserError as error:
            raise type(error)(f"fit.teacher: {error}") from None
