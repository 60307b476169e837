"""Speculative decoding, the baseline, where a run, an estimate and a tuning meet it."""

import pytest

from raypd.answering.components import build
from raypd.config import ModelConfig, RunConfig
from raypd.decoding.assisted import AssistedEngine
from raypd.errors import ModelError
from raypd.estimation import profile, sampling
from raypd.estimation.checks import with_changes
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from raypd.estimation.profile import Profiler, most_in_flight
from raypd.estimation.tune import TuneOptions, tune
from raypd.models.check_method import check_method
from raypd.models.load import LoadedModel, load_model
from tests.runs import extraction, run_config, write_jsonl
from tests.tiny import nearly, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A model, a draft model for it, and documents."""
    save_tiny(tmp_path / "model")
    nearly(tiny_model("llama"), 0.1).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    write_jsonl(tmp_path / "in.jsonl", [f"title {n} " * (n + 1) for n in range(5)])
    return tmp_path


def make(folder, draft: str = "draft") -> RunConfig:
    """Extraction from the documents."""
    own = {"method": "speculative", "draft_model": str(folder / draft), "draft_tokens": 7, "max_new_tokens": 30}
    return run_config(extraction(c=["a", {"name": "b", "type": "number"}]), folder / "in.jsonl", folder / "out",
                      input={"text_columns": ["title"], "category": "c", "id_column": "id"},
                      model={"name": str(folder / "model"), "dtype": "float32"}, decoding=own)  # fmt: skip


def test_a_worker_has_the_two_models_and_the_numbers_of_the_configuration(folder) -> None:
    """A revision belongs to the model alone."""
    config = with_changes(make(folder), {"model.revision": "v1"})
    with pytest.raises(ModelError, match=f"'{folder}/model' is local"):  # a folder has none
        check_method(config)
    asked = []

    def load(model: ModelConfig) -> LoadedModel:
        asked.append((model.name, model.revision))
        return load_model(model.model_copy(update={"revision": None}))

    engine = build(config, 1, load).engine
    assert asked == [(str(folder / "model"), "v1"), (str(folder / "draft"), None)]
    assert isinstance(engine, AssistedEngine)
    draft = engine.draft_model.generation_config
    numbers = (draft.num_assistant_tokens, draft.assistant_confidence_threshold, engine.max_new_tokens)
    assert (numbers, draft.num_assistant_tokens_schedule) == ((7, 0, 30), "constant")
    theirs, ours = (next(model.parameters()) for model in (engine.draft_model, engine.model))
    assert not theirs.equal(ours)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft", "model"])
def test_a_measurement_takes_it_and_its_records_are_those_of_autoregressive_decoding(folder, draft: str) -> None:
    """The model itself as draft model is a second copy of it, in a measurement too, which keeps models."""
    config = make(folder, draft)
    documents = sampling.draw(config, 5).documents
    assert most_in_flight(config) == 1
    profiler, runs = Profiler(1), (config, with_changes(config, {"decoding.method": "autoregressive"}))
    ours, theirs = (profiler.profile(run, documents) for run in runs)
    assert (ours.method, ours.complete, theirs.complete) == ("speculative", True, True)
    assert [cost.error for cost in ours.costs if cost] == [None] * 5
    for one, other in zip(ours.costs, theirs.costs, strict=True):
        assert one.decode_tokens == other.decode_tokens + 1  # the engine does not feed the last token
        said, wanted = ([(row["record"], [v | {"confidence": None} for v in row["values"]]) for row in cost.rows]
                        for cost in (one, other))  # fmt: skip
        assert said == wanted


@pytest.mark.parametrize(
    "forecast", [lambda c, p: estimate(c, EstimateOptions()), lambda c, p: tune(c, TuneOptions(), p)]
)
def test_a_draft_model_that_is_missing_is_told_before_anything_is_measured(folder, monkeypatch, forecast) -> None:
    monkeypatch.setattr(profile.RemoteProfiler, "__enter__", lambda _: pytest.fail("a worker was started"))
    with pytest.raises(ModelError, match="no folder"):
        forecast(make(folder, "nowhere/"), folder / "measurements.jsonl")
