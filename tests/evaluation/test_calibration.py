"""Calibrated confidences: against draws whose chances are known, in a task, and as a command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raypd.answering.components import build
from raypd.cluster import driver
from raypd.config import ModelConfig
from raypd.errors import ConfigError, InputError, ModelError
from raypd.evaluation import score
from raypd.evaluation.calibrate import calibrate_run
from raypd.evaluation.calibration import LabelledValue, calibrate, calibration_error, reliability
from raypd.evaluation.score import labelled_values
from raypd.tasks.calibration import FILE, Calibration, calibration_of
from tests.runs import with_keys, write_jsonl
from tests.tasks.test_extraction import answers, document, make


def drawn(count: int, seed: int) -> list[LabelledValue]:
    """Values that are surer than right: by a power, the more for Color, the less where they stand in the document."""
    draw, values = np.random.default_rng(seed), []
    for number in range(count):
        attribute, sure, stands = ("Brand", "Color")[number % 2], draw.uniform(0.3, 1.0), bool(draw.random() < 0.5)
        chance = sure ** {"Brand": 2, "Color": 6}[attribute] * (1.0 if stands else 0.6)
        values.append(LabelledValue("shoes", attribute, sure, False, stands, bool(draw.random() < chance)))
    return values


@pytest.mark.parametrize("count", [400, 4000])
def test_calibrated_confidences_are_the_share_of_right_values(count):
    made, fresh = calibrate(drawn(count, 0)), drawn(4000, 1)
    assert calibration_error(reliability(fresh)) > 0.3
    assert calibration_error(reliability(fresh, made)) < 0.04
    for kind in ({"attribute": "Color"}, {"attribute": "Brand"}, {"stands": True}, {"stands": False}):
        values = [value for value in fresh if kind.items() <= vars(value).items()]
        assert calibration_error(reliability(values, made)) < 0.07, kind


def test_the_error_is_the_mean_gap_over_values():
    sure = [(0.05, False), (0.15, True), (0.15, False), (1.0, True)]
    points = reliability([LabelledValue("", "", confidence, False, False, right) for confidence, right in sure])
    assert points == [(0.05, 0.0, 1), (0.15, 0.5, 2), (1.0, 1.0, 1)]
    assert calibration_error(points) == pytest.approx((0.05 * 1 + 0.35 * 2) / 4)


def test_a_task_calibrates_and_leaves_out_what_is_unsure(tmp_path):
    path = tmp_path / FILE
    Calibration([0.5, 0.0, 1.0, 2.0], -0.5, {"shoes/Brand": 0.3}).write(path)
    (plain,), (calibrated,), (strict,) = (
        answers(make(**keys), [document(0)]).values()
        for keys in ({}, {"model": {"calibration": str(path)}}, {"output": {"path": "out", "min_confidence": 0.999}})
    )
    made = calibration_of(ModelConfig(calibration=str(path)))
    assert made is not None
    for before, after in zip(plain.columns["values"], calibrated.columns["values"], strict=True):
        place = ("shoes", before["name"], before["confidence"])
        expected = made.confidence(*place, null=before["value"] is None, stands=before["span"] is not None)
        assert after == {**before, "confidence": pytest.approx(expected)}
    unsure = [value for value in strict.columns["values"] if value["status"] == "unsure"]
    assert unsure
    for value in unsure:
        assert (value["value"], value["confidence"] < 0.999, bool(value["raw"])) == (None, True, True)
        assert json.loads(strict.columns["record"])[value["name"]] is None


def test_the_command_writes_what_a_run_reads(config, tmp_path, in_process, monkeypatch):
    run = with_keys(config(str(write_jsonl(tmp_path / "in.jsonl", ["x", "xx"]))), model={"name": "fake"})
    driver.run_extract(run, build=build)
    labels, output = tmp_path / "labels.jsonl", str(tmp_path / "made.json")
    labels.write_text('{"id": "0", "target": {"a": "b"}}')
    with pytest.raises(ConfigError, match="lie in no folder here; --output names a file"):
        calibrate_run(run.output.path, str(labels))
    with pytest.raises(InputError, match="0 labelled values"):  # the fake engine is never sure
        calibrate_run(run.output.path, str(labels), output)
    monkeypatch.setattr("raypd.evaluation.calibrate.labelled_values", lambda *_: drawn(400, 0))
    assert "fitted on 400 values" in calibrate_run(run.output.path, str(labels), output)
    calibrated = with_keys(run, model={"calibration": output}, output={"path": str(tmp_path / "next")})
    assert calibrated.fingerprint() != run.fingerprint()
    driver.run_extract(calibrated, build=build)
    with pytest.raises(ConfigError, match="calibrated already; run it with model"):
        calibrate_run(calibrated.output.path, str(labels), output)


def test_the_labels_of_a_run_are_joined_by_attribute(monkeypatch):
    """A null is right where the label is null, and only there."""
    names = {"Size": "size.eu", "Color": "Color", "Fit": "Fit", "Sport": "Sport"}
    record = {"size": {"eu": "7"}, "Color": None, "Fit": None, "Sport": "golf"}
    texts = {"Size": "7", "Color": None, "Fit": None, "Sport": "golf"}
    values = [{"name": name, "value": text, "confidence": 0.5, "span": None} for name, text in texts.items()]
    row = {"id": "0", "category": "shoes", "record": json.dumps(record), "values": values}
    target = {"size": {"eu": "8"}, "Color": None, "Fit": "wide", "Sport": None}
    gold = {"id": "0", "target": target, "accepted": {"size.eu": ["8", "7"]}}
    monkeypatch.setattr(score, "read_answers", lambda run: {"0": [row], "1": []})
    monkeypatch.setattr(score, "read_labels", lambda *_: {"0": gold})
    monkeypatch.setattr(score, "asked_attributes", lambda run: {"shoes": names})
    joined = [(value.attribute, value.null, value.right) for value in labelled_values("run", "labels")]
    assert joined == [("Size", False, True), ("Color", True, True), ("Fit", True, False), ("Sport", False, False)]


def test_weights_of_any_size_give_a_confidence():
    sure = [Calibration([w, 0, 0, 0], 0.0, {}).confidence("c", "a", 0.01, False, False) for w in (1e6, 0.0, -1e6)]
    assert sure == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("text", ["{", "{}", '{"weights": [1], "intercept": 0, "attributes": {}}', "[1]"])
def test_a_file_that_is_none_is_refused(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelError, match=r"calibration\.json: cannot be read"):
        calibration_of(ModelConfig(name=str(tmp_path)))
    assert calibration_of(ModelConfig(name=str(tmp_path), calibration="none")) is None
