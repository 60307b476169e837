"""One candidate: trained on a share of the labels, run over the test part, scored, and measured on
the corpus.
"""

import hashlib
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.errors import UserError
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from raypd.evaluation.calibration import calibrate, calibration_error, reliability
from raypd.evaluation.score import f1_of, labelled_values, read_answers, read_labels
from raypd.fitting.labels import UNCALIBRATED, FitContext, answered, input_keys
from raypd.fitting.result import CandidateScore
from raypd.run import layout, read, records
from raypd.run.training import TrainingRecord
from raypd.tasks.calibration import FILE
from raypd.training.job import run_training

_SETTINGS = dict.fromkeys(("input", "model", "decoding", "engine", "cost", "cluster"), True)
_MEASURED: Any = {**_SETTINGS, "fit": {"sample", "sample_minutes"}}  # what an estimate depends on


def training_config(
    context: FitContext, changes: dict[str, Any], documents: str, output: str
) -> RunConfig:
    """The configuration of a candidate's training: `hyper_parallel` in slots, unless the candidate
    says otherwise.
    """
    keys = {
        "decoding.method": "hyper_parallel",
        "decoding.skeleton": "slots",
        **changes,
        **input_keys(documents),
    }
    keys |= {
        "output.path": output,
        "training.labels": None,
        "training.validation": context.part("validation"),
    }
    return with_changes(context.config, keys)


def train(
    context: FitContext, name: str, changes: dict[str, Any], labels: int, share: float
) -> CandidateScore:
    """Trains a candidate on the first `labels` of the training part, runs it over the test part.

    Raises as these do.
    """
    whole = training_config(context, changes, context.part("train"), context.folder)
    digest = hashlib.sha256(
        whole.model_dump_json(include={"model", "decoding", "training"}).encode()
    ).hexdigest()[:8]
    folder = storage.join(context.folder, "candidates", f"{name}-{digest}", f"{100 * share:g}")
    documents = context.part("train")
    if share < 1:
        lines = storage.read(documents).splitlines(keepends=True)[:labels]
        documents = storage.join(folder, "train.jsonl")
        storage.put(documents, b"".join(lines))
    config = training_config(context, changes, documents, storage.join(folder, "training"))
    record = read.record(TrainingRecord, config.output.path, layout.TRAINING)
    if record is None or not storage.exists(record.weights):
        record = run_training(
            context.limited(config), verbose=context.verbose, say=context.say, ends=context.ends
        )
    made = {f"decoding.{key}": getattr(config.decoding, key) for key in ("method", "skeleton")}
    made |= {key: value for key, value in changes.items() if not key.startswith("training.")}
    if config.model.calibration not in (None, "none"):  # a file that is of other weights
        made["model.calibration"] = None
    if record.weights.endswith("adapter"):
        made["model.adapter"] = record.weights
    else:
        made |= {"model.name": record.weights, "model.adapter": None, "model.revision": None}
    score = test(context, name, made, storage.join(folder, "test"))
    if share == 1:
        _calibrate(context, score, Path(record.weights), folder)
    score.labels, score.training_seconds, score.training_usd = (
        record.data.documents,
        record.seconds,
        record.usd,
    )
    return score


def _calibrate(context: FitContext, score: CandidateScore, weights: Path, folder: str) -> None:
    """Puts a calibration beside the weights, made from the validation part; what it brings is told
    by the test part.
    """
    validation = storage.join(folder, "validation")
    _run(context, score.changes, "validation", validation)
    column = context.config.training.labels_column
    try:
        made = calibrate(labelled_values(validation, context.part("validation"), column))
    # Few labels, or no scikit-learn: confidences stay as the model has them.
    except UserError as error:
        context.say(f"{score.name}: not calibrated: {error}")
        return
    made.method = score.method
    made.write(weights / FILE)
    values = labelled_values(storage.join(folder, "test"), context.part("test"), column)
    for calibration in (None, made):
        points = reliability(values, calibration)
        score.calibration_error.append(calibration_error(points))
        score.reliability.append([list(point) for point in points])


def _run(context: FitContext, changes: dict[str, Any], part: str, output: str) -> RunConfig:
    keys = {**changes, **input_keys(context.part(part)), "output.path": output, **UNCALIBRATED}
    config = with_changes(context.config, keys)
    answered(context, config)
    return config


def test(context: FitContext, name: str, changes: dict[str, Any], output: str) -> CandidateScore:
    config = _run(context, changes, "test", output)
    gold = read_labels(context.part("test"), config.training.labels_column, output)
    best = f1_of(read_answers(output), gold, config)
    f1 = records.Figure(best.value, best.low, best.high)
    return CandidateScore(
        name=name, method=config.decoding.method, changes=changes, measure=best.name, f1=f1
    )


def measure(context: FitContext, score: CandidateScore, run: str | None = None) -> records.Figure:
    """Adds what a score's model costs over the corpus; its documents. run: whose speed counts
    (None: a sample's).
    """
    config = with_changes(context.config, score.changes)
    text = config.model_dump_json(
        include=_MEASURED, exclude={"cost": {"budget_usd", "reserve_seconds", "deadline"}}
    )
    digest = hashlib.sha256(f"{config.fingerprint()} {text}".encode()).hexdigest()[:12]
    path = storage.join(
        context.folder, "estimates", f"{score.name}-{digest}.json".replace(" ", "-")
    )
    result = read.record(records.Estimate, path)
    if result is None:
        context.say(f"{score.name}: measuring what the corpus would cost")
        fit = context.config.fit
        result = estimate(
            config, EstimateOptions(fit.sample, fit.sample_minutes, run=run), context.verbose
        )
        records.write(path, result)
    score.documents_per_second = result.speeds[0].documents_per_second
    server = float((result.sample or {}).get("server_usd", 0.0))  # for the tokens of a document
    if result.machines:
        machine = result.machines[0]  # this one, or the cheapest that has its GPU
        bill, score.corpus_hours = machine.bills[0], machine.bills[0].hours
        if machine.usd_per_hour > 0 or server > 0:
            score.usd_per_1000 = machine.usd_per_1000.times(1, plus=1000 * server)
            score.corpus_usd = bill.usd.times(1, plus=result.documents.value * server)
    return result.documents
