"""One candidate of a fit: trained on a share of the labels, scored on test, and priced."""

import hashlib
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config import RunConfig, with_changes
from raypd.errors import UserError
from raypd.estimation import Estimate, EstimateOptions, Figure, estimate
from raypd.evaluation import (
    AttributeScore,
    attributes_of,
    calibration_error,
    f1_of,
    fit_calibration,
    is_improved,
    labelled_values,
    read_answers,
    read_labels,
    reliability,
)
from raypd.fitting.context import UNCALIBRATED, FitContext, extract, input_keys
from raypd.fitting.result import AttributeResult, CandidateScore
from raypd.models import find_source, read_config
from raypd.report import answer_check
from raypd.run import TrainingRecord, layout, read, records
from raypd.tasks import calibration as tasks_calibration
from raypd.training import run_training

# What an estimate depends on.
_MEASURED: Any = {
    "input": True,
    "model": True,
    "decoding": True,
    "engine": True,
    "cost": True,
    "cluster": True,
    "fit": {"sample", "sample_minutes"},
}
_LIMITS: Any = {"cost": {"budget_usd", "deadline"}}
_DEFAULT_EPOCHS = 2.0
# Of the keys of a training, in the name of its folder.
_DIGEST_CHARACTERS = 8
# The folder of the training in a candidate's folder.
_TRAINING = "training"
# The best learning rate for all weights was found to be about _FULL_RATE at this hidden size, to
# fall with the size to this power, and to be ten times as high for an adapter (Thinking Machines
# Lab, "LoRA Without Regret", 2025). For the embedded model, whose hidden size is 576, it is 1.3e-3.
_FULL_RATE = 5e-5
_ADAPTER_FACTOR = 10
_RATE_HIDDEN_SIZE = 2_000
_RATE_POWER = 0.78


def candidates_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the candidates of a fit: those of `fit.candidates`, or else one.

    Keys of section `training` that the user has set stay as they are.

    Args:
        config: The configuration.

    Raises:
        ModelError: There are no candidates in `fit.candidates`, and the model cannot be found.
    """
    if config.fit.candidates:
        return config.fit.candidates
    training = config.training
    weights = training.weights
    changes: dict[str, Any] = {"training.weights": weights}
    if "epochs" not in training.model_fields_set:
        changes["training.epochs"] = _DEFAULT_EPOCHS
    if "learning_rates" not in training.model_fields_set:
        hidden_size = read_config(find_source(config.model)).hidden_size
        changes["training.learning_rates"] = [_learning_rate(hidden_size, weights)]
    return {weights: changes}


def _learning_rate(hidden_size: int, weights: str) -> float:
    """Return a learning rate for a model, with two significant digits."""
    rate = _FULL_RATE * (_RATE_HIDDEN_SIZE / hidden_size) ** _RATE_POWER
    if weights == "lora":
        rate *= _ADAPTER_FACTOR
    return float(f"{rate:.1e}")


def training_config(
    context: FitContext, changes: dict[str, Any], documents: str, output: str
) -> RunConfig:
    """Return the configuration of a candidate's training.

    A candidate is trained for `hyper_parallel` with slots unless its keys say otherwise.

    Args:
        context: The fit.
        changes: The candidate's keys.
        documents: The file of labelled documents.
        output: The folder of the training.
    """
    keys = {
        "decoding.method": "hyper_parallel",
        "decoding.skeleton": "slots",
        **changes,
        **input_keys(documents),
        "output.path": output,
        "training.labels": None,
        "training.validation": context.part("validation"),
    }
    return with_changes(context.config, keys)


def train(
    context: FitContext, name: str, changes: dict[str, Any], labels: int, share: float
) -> CandidateScore:
    """Train a candidate, and score it on test.

    Args:
        context: The fit.
        name: The candidate's name.
        changes: The candidate's keys.
        labels: The number of first documents of train that are used.
        share: Their share of train. With 1 the confidences are calibrated, too.

    Raises:
        UserError: Whatever the training and the run over test raise.
    """
    folder = _candidate_folder(context, name, changes, share)
    if not storage.is_folder(folder) and _was_trained_otherwise(context, name, share):
        context.say(
            f"{name}: its keys have changed since it was trained here, so its training begins "
            "again; the earlier training stays in the folder, and is used again with its former "
            "keys"
        )
    documents = context.part("train")
    if share < 1:
        lines = storage.read(documents).splitlines(keepends=True)[:labels]
        documents = storage.join(folder, "train.jsonl")
        storage.put(documents, b"".join(lines))
    config = training_config(context, changes, documents, storage.join(folder, _TRAINING))
    record = _complete_training(folder)
    if record is None:
        record = run_training(
            context.limited(config), verbose=context.verbose, say=context.say, ends=context.ends
        )
    keys = _trained_keys(config, changes, record.weights)
    score = test(context, name, keys, storage.join(folder, "test"))
    if share == 1:
        _calibrate(context, score, Path(record.weights), folder)
    score.labels = record.data.documents
    score.training_seconds = record.seconds
    score.training_usd = record.usd
    return score


def is_trained(context: FitContext, name: str, changes: dict[str, Any], share: float) -> bool:
    """Return whether a training of a candidate is complete, so that a fit does not repeat it.

    Args:
        context: The fit.
        name: The candidate's name.
        changes: The candidate's keys.
        share: The share of train that the training uses.
    """
    return _complete_training(_candidate_folder(context, name, changes, share)) is not None


def _complete_training(folder: str) -> TrainingRecord | None:
    """Return the record of the training in a candidate's folder; None without its weights."""
    record = read.record(TrainingRecord, storage.join(folder, _TRAINING), layout.TRAINING)
    if record is None or not storage.exists(record.weights):
        return None
    return record


def _candidate_folder(context: FitContext, name: str, changes: dict[str, Any], share: float) -> str:
    """Return the folder of a candidate, which differs with every key that changes its weights."""
    config = training_config(context, changes, context.part("train"), context.folder)
    identity = config.model_dump_json(include={"model", "decoding", "training"})
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return storage.join(context.folder, "candidates", f"{name}-{digest}", f"{100 * share:g}")


def _was_trained_otherwise(context: FitContext, name: str, share: float) -> bool:
    """Return whether the fit has a training of a candidate, of whichever keys."""
    candidates = storage.join(context.folder, "candidates")
    for folder in storage.folders(candidates):
        own_name, _, digest = folder.rpartition("-")
        is_training = storage.is_folder(storage.join(candidates, folder, f"{100 * share:g}"))
        if own_name == name and len(digest) == _DIGEST_CHARACTERS and is_training:
            return True
    return False


def _trained_keys(config: RunConfig, changes: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return the keys of the user's configuration that decode with trained weights."""
    keys: dict[str, Any] = {
        "decoding.method": config.decoding.method,
        "decoding.skeleton": config.decoding.skeleton,
    }
    for key, value in changes.items():
        if not key.startswith("training."):
            keys[key] = value
    if config.model.calibration not in (None, "none"):
        # The file was made for other weights.
        keys["model.calibration"] = None
    if weights.endswith("adapter"):
        keys["model.adapter"] = weights
    else:
        keys["model.name"] = weights
        keys["model.adapter"] = None
        keys["model.revision"] = None
    return keys


def _calibrate(context: FitContext, score: CandidateScore, weights: Path, folder: str) -> None:
    """Write a calibration beside the weights, fitted on validation, if it improves confidences.

    Add the calibration error on test, and that with the calibration if there is one.
    """
    validation = storage.join(folder, "validation")
    _run(context, score.changes, "validation", validation)
    column = context.config.training.labels_column
    try:
        # The candidate's learning rate was chosen on these documents, and it was not trained on
        # them.
        part = context.part("validation")
        values, _ = labelled_values(validation, part, column, with_trained=True)
        calibration = fit_calibration(values)
    except UserError as error:
        # With few labels, or without scikit-learn, confidences stay as the model has them.
        context.say(f"{score.name}: not calibrated: {error}")
        return
    path = weights / tasks_calibration.FILE
    calibrations: list[tasks_calibration.Calibration | None] = [None]
    if is_improved(values):
        calibration.method = score.method
        calibration.write(path)
        calibrations.append(calibration)
    else:
        # An earlier version wrote a file whatever its use. The weights are the fit's own.
        path.unlink(missing_ok=True)
        context.say(
            f"{score.name}: its confidences stay uncalibrated, because a calibration is not "
            "certain to improve them"
        )
    values, _ = labelled_values(storage.join(folder, "test"), context.part("test"), column)
    for used in calibrations:
        points = reliability(values, used)
        score.calibration_error.append(calibration_error(points))
        score.reliability.append([list(point) for point in points])


def _run(context: FitContext, changes: dict[str, Any], part: str, output: str) -> RunConfig:
    """Run a model over a part; return the configuration of the run."""
    keys = {**changes, **input_keys(context.part(part)), "output.path": output, **UNCALIBRATED}
    config = with_changes(context.config, keys)
    extract(context, config)
    return config


def test(context: FitContext, name: str, changes: dict[str, Any], output: str) -> CandidateScore:
    """Run a model over test, and score it.

    Args:
        context: The fit.
        name: The name of the score.
        changes: The keys that make the model from the configuration of the fit.
        output: The folder of the run.

    Raises:
        UserError: Whatever the run raises.
    """
    config = _run(context, changes, "test", output)
    gold = read_labels(context.part("test"), config.training.labels_column, output)
    answers = read_answers(output)
    measure = f1_of(answers, gold, config)
    return CandidateScore(
        name=name,
        method=config.decoding.method,
        changes=changes,
        measure=measure.name,
        f1=Figure(measure.value, measure.low, measure.high),
        attributes=_attributes(attributes_of(answers, gold, config), config, output),
    )


def _attributes(
    scores: list[AttributeScore], config: RunConfig, output: str
) -> list[AttributeResult]:
    """Add to the scores of attributes what a run warns about without labels."""
    # Labels name a nested attribute by its path.
    path_of = {}
    for category, schema in config.extraction.categories.items():
        for attribute in schema.attributes:
            path_of[category, attribute.name] = ".".join(attribute.key_path)
    results = {(score.category, score.attribute): AttributeResult(score=score) for score in scores}
    for fault in answer_check.faults_of(output):
        result = results.get((fault.category, path_of.get((fault.category, fault.attribute), "")))
        if result is not None:
            result.faults[fault.kind] = fault.text
    return list(results.values())


def add_costs(context: FitContext, score: CandidateScore, run: str | None = None) -> Figure:
    """Add to a score what its model costs over the corpus.

    Args:
        context: The fit.
        score: The score, which is changed in place.
        run: The folder of a run whose speed counts; None to measure that of a sample.

    Returns:
        The number of documents in the corpus.

    Raises:
        UserError: Whatever the estimate raises.
    """
    config = with_changes(context.config, score.changes)
    result = _estimate(context, config, score.name, run)
    score.documents_per_second = result.speeds[0].documents_per_second
    server_usd = float((result.sample or {}).get("server_usd", 0.0))  # per document
    if result.machines:
        machine = result.machines[0]  # the local one, or the cheapest that has its GPU
        bill = machine.bills[0]
        score.corpus_hours = bill.hours
        if machine.usd_per_hour > 0 or server_usd > 0:
            score.usd_per_1000 = machine.usd_per_1000.times(1, plus=1000 * server_usd)
            score.corpus_usd = bill.usd.times(1, plus=result.documents.value * server_usd)
    return result.documents


def _estimate(context: FitContext, config: RunConfig, name: str, run: str | None) -> Estimate:
    """Return the estimate of a configuration, from the fit's folder if it was made before."""
    measured = config.model_dump_json(include=_MEASURED, exclude=_LIMITS)
    digest = hashlib.sha256(f"{config.fingerprint()} {measured}".encode()).hexdigest()[:12]
    file = f"{name}-{digest}.json".replace(" ", "-")
    path = storage.join(context.folder, "estimates", file)
    result = read.record(Estimate, path)
    if result is None:
        context.say(f"{name}: measuring what the corpus would cost")
        fit = context.config.fit
        options = EstimateOptions(
            fit.sample,
            fit.sample_minutes,
            run=run,
            sample_option="fit.sample",
            minutes_option="fit.sample_minutes",
        )
        result = estimate.estimate(config, options, context.verbose)
        records.write(path, result)
    return result
