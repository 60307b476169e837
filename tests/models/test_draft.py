"""A draft model as a run loads it, beside the model."""

import json

import pytest
import torch

from raypd.answering.components import build
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.control_tokens import add_control_tokens
from raypd.models.load import LoadedModel
from raypd.tasks.base import Document
from tests.runs import answer, extraction, run_config
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["Hi", "How are you today?", "größe {}"]
SHOES = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])


def load(config: ModelConfig) -> LoadedModel:
    """A tiny model; the name tells which."""
    model = tiny_model("llama", seed=int(config.name == "other weights"))
    tokenizer = tiny_tokenizer()
    if config.name == "other tokenizer":
        add_control_tokens(model, tokenizer, "space")
    return LoadedModel(model, tokenizer, config.name, model.dtype, torch.device("cpu"), 4096)


def texts(**decoding) -> tuple[list[str], list[dict]]:
    """The texts and their counters, in the order of the prompts."""
    config = run_config({"kind": "generation"}, decoding={"max_new_tokens": 30, **decoding})
    parts = build(config, None, load)
    documents = [Document(row, f"id{row}", {"prompt": text}) for row, text in enumerate(PROMPTS)]
    records, _ = answer(parts.task, documents, parts.engine, sampling=parts.sampling)
    records = sorted(records, key=lambda record: record.index)
    counters = [json.loads(record.columns["counters"]) for record in records]
    return [record.columns["text"] for record in records], counters


@pytest.mark.parametrize("draft_model", ["same weights", "other weights", None])
def test_texts_are_those_of_autoregressive_whatever_drafts(draft_model):
    expected, _ = texts(method="autoregressive")
    found, counters = texts(
        method="speculative",
        options={"draft_model": draft_model, "draft_tokens": 3, "min_confidence": 0.0},
    )
    assert found == expected
    assert any(expected)
    if draft_model == "same weights":
        assert all(count["accepted"] == count["drafted"] > 0 for count in counters)


def test_extraction_writes_the_tokens_of_autoregressive():
    def tokens(**decoding) -> tuple[list[int], list[str]]:
        """The tokens of a record, and the models that were loaded for it."""
        loaded: list[str] = []
        config = run_config(SHOES, decoding={"max_new_tokens": 40, **decoding})
        parts = build(config, None, lambda model: loaded.append(model.name) or load(model))
        document = Document(0, "a", {"title": "A shoe of size 7", "category": "shoes"})
        (request,) = parts.task.plan([document])
        (record,) = parts.engine.run([request.program])
        return record.tokens, loaded

    expected, _ = tokens(method="autoregressive")
    found, loaded = tokens(
        method="speculative", options={"draft_model": "same weights", "min_confidence": 0.0}
    )
    assert found == expected
    assert len(expected) == 40
    assert loaded[1:] == ["same weights"]


def test_a_draft_model_of_another_tokenizer_is_refused():
    with pytest.raises(ModelError, match=r"its tokenizer differs .*'\[Mask\]'"):
        texts(method="speculative", options={"draft_model": "other tokenizer"})
