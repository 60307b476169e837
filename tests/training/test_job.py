"""A tiny random model is trained through Ray Train and then decodes, through the engine, what it was trained on."""

from __future__ import annotations

import json

import pytest

from raypd.cluster.driver import run_extract
from raypd.config.load import make_config
from raypd.errors import ModelError
from raypd.training.job import run_training
from tests.tiny import save_tiny
from tests.training.data import tree, write_corpus


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("base"), hidden_size=64))


def answers(config):
    import pyarrow.dataset as ds

    table = ds.dataset(config.output.path + "/units").to_table()
    return {row["id"]: json.loads(row["record"]) for row in table.to_pylist()}


def test_trained_values_are_decoded_in_parallel(tmp_path, base):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    training = {"weights": "full", "learning_rates": [3e-3], "epochs": 40, "validation": str(corpus), "batch_size": 24,
                "evaluations": 2}  # fmt: skip
    config = make_config(tree(corpus, tmp_path / "trained", base, training=training))
    lines = []
    done = run_training(config, say=lines.append)
    assert done.best.validation_loss < 0.1, lines
    assert "tokens/s" in lines[-1]
    decoded = make_config(
        tree(corpus, tmp_path / "run", str(tmp_path / "trained" / "model"), decoding={"isolate": "documents"})
    )
    run_extract(decoded)
    want = {row["id"]: row["target"] for row in map(json.loads, corpus.read_text().splitlines())}
    got = answers(decoded)
    right = sum(got[key] == target for key, target in want.items())
    assert right >= 22, (got, want)
    with pytest.raises(ModelError, match="max_value_tokens 12"):
        run_extract(make_config(tree(corpus, tmp_path / "other", str(tmp_path / "trained" / "model"),
                                     decoding={"max_value_tokens": 20})))  # fmt: skip
