"""A tiny random model that is trained on a few answers writes them, decoded by the method that it was trained for."""

from __future__ import annotations

import json

import pytest
import torch

from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.models.control_tokens import add_control_tokens
from raypd.models.load import LoadedModel
from raypd.tasks import build_task
from raypd.tasks.base import Document
from raypd.training.generation import GenerationExamples
from raypd.training.packing import batches
from raypd.training.trainer import make_trainable, make_trainer
from tests.runs import answer
from tests.tiny import tiny_model, tiny_tokenizer

LIST = """Do:

1. Rise: at seven every single day.
2. Walk: for half an hour or so.
3. Read: a good old paper book.

Bye."""
ANSWERS = {"How?": LIST, "Who?": "It was me, nobody else.", "Then?": "A. B.\n\nOne. " + LIST[:9]}


def trained(method, tmp_path, epochs, **decoding):
    """(what was decoded for every prompt, as rows; the trainer's last loss)"""
    tokenizer, model = tiny_tokenizer(), tiny_model("llama")
    if method in ("apar", "space"):
        add_control_tokens(model, tokenizer, method)
    config = RunConfig.model_validate(
        {
            "input": {"path": "none"},
            "output": {"path": "none"},
            "task": {"kind": "generation", "prompt_column": "turns"},
            "model": {"dtype": "float32", "device": "cpu"},
            "decoding": {"method": method, "max_new_tokens": 200, **decoding},
            "training": {"labels_column": "responses", "weights": "full", "epochs": epochs, "evaluations": 1},
        }
    )
    loaded = LoadedModel(model, tokenizer, "tiny", torch.float32, torch.device("cpu"), 4096)
    make_trainable(loaded, config)
    documents = [Document(i, str(i), {"turns": [q], "responses": [a]}) for i, (q, a) in enumerate(ANSWERS.items())]
    make = GenerationExamples(config, tokenizer, 4096)
    passes = 8 * list(batches(list(make(documents)), 1, 9999, 0))
    losses = []
    trainer = make_trainer(loaded, config, passes, passes[:3], tmp_path, 2e-3, lambda p: losses.append(p.loss))
    trainer.train()
    task = build_task(config, tokenizer, 4096, model)
    records, _ = answer(task, documents, Engine(model.eval()))
    return [record.columns for record in sorted(records, key=lambda record: record.index)], losses[-1]


def test_autoregressive_writes_what_it_learned(tmp_path):
    rows, _ = trained("autoregressive", tmp_path, 5)
    assert [row["text"] for row in rows] == list(ANSWERS.values())


def test_apar_forks_where_the_data_forks(tmp_path):
    rows, _ = trained("apar", tmp_path, 16)
    assert rows[0]["text"] == LIST
    counters = json.loads(rows[0]["counters"])
    assert counters["threads"] == 4
    assert counters["longest_path"] < 0.6 * len(LIST)
    assert [json.loads(row["counters"])["threads"] for row in rows[1:]] == [1, 1] or rows[2]["text"] == ANSWERS["Then?"]


def test_pasta_keeps_its_promises(tmp_path):
    rows, _ = trained("pasta", tmp_path, 16, max_new_tokens=500)
    assert rows[0]["text"] == LIST
    assert rows[0]["raw"].count("<promise ") == rows[0]["raw"].count("</async>") == 3
    assert rows[0]["warnings"] == []
    assert json.loads(rows[0]["counters"])["longest_path"] < 0.9 * rows[0]["tokens"]


def test_space_accepts_what_it_drafts(tmp_path):
    rows, _ = trained("space", tmp_path, 40, mask_tokens=3)
    assert [row["text"] for row in rows] == list(ANSWERS.values())
    for row in rows:
        counters = json.loads(row["counters"])
        assert counters["average_accepted_tokens"] > 1.8, counters


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_model_that_cannot_be_trained_is_refused(kind):
    from raypd.errors import ModelError
    from raypd.training.trainer import _check_attention

    model = tiny_model(kind, sliding_window=8)
    with pytest.raises(ModelError, match="cannot train it yet"):
        _check_attention(model, kind)
