"""One candidate: trained on a share of the labels, run over the test part, scored, and measured on the corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypd import storage
from raypd.cluster.driver import run_extract
from raypd.config import RunConfig
from raypd.errors import UserError
from raypd.estimation import earlier
from raypd.estimation.checks import with_changes
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from raypd.evaluation.calibration import calibrate, calibration_error, confidences, reliability
from raypd.evaluation.score import evaluate, labelled_values
from raypd.fitting.labels import over
from raypd.fitting.result import CandidateScore
from raypd.run import layout, read, records
from raypd.run.records import Estimate, Figure
from raypd.run.training import TrainingRecord
from raypd.tasks.calibration import FILE
from raypd.training.job import run_training

_MEASURES = ("scored F1", "strict F1")  # the first that there is


@dataclass(frozen=True)
class Bench:
    """What all candidates share. folder: of the fit; limited: puts what is left of the budget into a configuration;
    ends: unix second of the deadline."""

    config: RunConfig
    folder: str
    limited: Callable[[RunConfig], RunConfig]
    ends: float | None
    verbose: bool
    say: Callable[[str], None]

    def part(self, name: str) -> str:
        return storage.join(self.folder, f"{name}.jsonl")


def training_config(bench: Bench, changes: dict[str, Any], documents: str, output: str) -> RunConfig:
    """The configuration of a candidate's training: `hyper_parallel`, unless the candidate says otherwise."""
    keys = {"decoding.method": "hyper_parallel", **changes, **over(documents), "output.path": output}
    keys |= {"training.labels": None, "training.validation": bench.part("validation")}
    return with_changes(bench.config, keys)


def train(bench: Bench, name: str, changes: dict[str, Any], labels: int, share: float) -> CandidateScore:
    """Trains a candidate on the first `labels` documents of the training part, and runs it over the test part.

    Raises what `run_training` and `run_extract` raise.
    """
    settings = [changes, bench.config.training.model_dump(mode="json"), bench.config.model.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    folder = storage.join(bench.folder, "candidates", f"{name}-{digest}", f"{100 * share:g}")
    documents = bench.part("train")
    if share < 1:
        lines = storage.read(documents).splitlines(keepends=True)[:labels]
        documents = storage.join(folder, "train.jsonl")
        storage.put(documents, b"".join(lines))
    config = training_config(bench, changes, documents, storage.join(folder, "training"))
    record = read.record(TrainingRecord, config.output.path, layout.TRAINING)
    if record is None or not storage.exists(record.weights):
        record = run_training(bench.limited(config), verbose=bench.verbose, say=bench.say, ends=bench.ends)
    made = {"decoding.method": config.decoding.method, **{k: v for k, v in changes.items() if k[:9] != "training."}}
    if record.weights.endswith("adapter"):
        made["model.adapter"] = record.weights
    else:
        made |= {"model.name": record.weights, "model.adapter": None, "model.revision": None}
    score = test(bench, name, made, storage.join(folder, "test"))
    if share == 1:
        _calibrate(bench, score, Path(record.weights), folder)
    score.labels, score.training_seconds, score.training_usd = record.data.documents, record.seconds, record.usd
    return score


def _calibrate(bench: Bench, score: CandidateScore, weights: Path, folder: str) -> None:
    """Puts a calibration beside the weights, made from the validation part; what it brings is told by the test part."""
    validation = storage.join(folder, "validation")
    _run(bench, score.changes, "validation", validation)
    column = bench.config.training.labels_column
    try:
        made = calibrate(labelled_values(validation, bench.part("validation"), column))
    except UserError as error:  # few labels, or no scikit-learn: confidences stay as the model has them
        bench.say(f"{score.name}: not calibrated: {error}")
        return
    made.write(weights / FILE)
    values = labelled_values(storage.join(folder, "test"), bench.part("test"), column)
    right = [value.right for value in values]
    for confidence in (np.array([value.confidence for value in values]), confidences(made, values)):
        points = reliability(confidence, right)
        score.calibration_error.append(calibration_error(points))
        score.reliability.append([list(point) for point in points])


def _run(bench: Bench, changes: dict[str, Any], part: str, output: str) -> RunConfig:
    keys = {**changes, **over(bench.part(part)), "output.path": output, "output.min_confidence": 0.0}
    config = with_changes(bench.config, {**keys, "model.calibration": "none"})
    run_extract(bench.limited(config), verbose=bench.verbose)
    return config


def test(bench: Bench, name: str, changes: dict[str, Any], output: str) -> CandidateScore:
    """Runs a model over the test part and scores its answers."""
    config = _run(bench, changes, "test", output)
    score = CandidateScore(name=name, method=config.decoding.method, changes=changes)
    score.measure, score.f1 = f1(output, bench)
    return score


def f1(output: str, bench: Bench) -> tuple[str, Figure]:
    """(name of the measure, its figure) of a run over the test part."""
    column = bench.config.training.labels_column
    of_all = {m.name: m for m in evaluate(output, bench.part("test"), labels_column=column).measures if not m.of}
    name = next(measure for measure in _MEASURES if measure in of_all)
    return name, Figure(of_all[name].value, of_all[name].low, of_all[name].high)


def measure(bench: Bench, score: CandidateScore, run: str | None = None) -> Figure:
    """Adds to a score what its model costs over the corpus; the corpus's documents.

    run: an earlier run whose speed counts; None: a sample is decoded now, once.
    """
    config = with_changes(bench.config, score.changes)
    path = storage.join(bench.folder, "estimates", f"{score.name}-{config.fingerprint()}.json".replace(" ", "-"))
    result = read.record(Estimate, path)
    if result is None:
        bench.say(f"{score.name}: measuring what the corpus would cost")
        if run is not None:
            result = earlier.estimate_from(config, EstimateOptions(run=run))
        else:
            result = estimate(
                config, EstimateOptions(bench.config.fit.sample, bench.config.fit.sample_minutes), bench.verbose
            )
        records.write(path, result)
    score.documents_per_second = result.speeds[0].documents_per_second
    if result.machines:
        machine = result.machines[0]  # this one, or the cheapest that has its GPU
        priced = machine.usd_per_hour > 0
        score.usd_per_1000 = machine.usd_per_1000 if priced else None
        score.corpus_hours, score.corpus_usd = machine.bills[0].hours, machine.bills[0].usd if priced else None
    return result.documents
