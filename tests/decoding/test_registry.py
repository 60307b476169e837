"""The registry against the files of methods, the configuration and the writers that use it."""

from __future__ import annotations

import importlib

import pytest

from raypd.config import METHODS, DecodingConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.tasks.writers import _WRITERS


def test_every_method_has_its_program_where_its_name_says():
    for name in set(REGISTRY) - {"speculative"}:  # that is transformers' own, in assisted.py
        module = importlib.import_module(f"raypd.decoding.methods.{name}")
        assert callable(getattr(module, name))


def test_every_method_of_generation_has_a_writer():
    assert set(METHODS["generation"]) == set(_WRITERS)


@pytest.mark.parametrize("name", REGISTRY)
def test_keys_are_those_of_the_configuration(name):
    keys = {key for keys in REGISTRY[name].answer_keys.values() for key in keys}
    assert keys <= set(DecodingConfig.model_fields)
    assert ("heads" in keys, "draft_model" in keys) == (REGISTRY[name].heads, REGISTRY[name].draft_model)
    assert all(name in METHODS[kind] for kind in REGISTRY[name].answer_keys)


def test_the_default_of_a_task_is_the_first_that_does_it():
    assert {kind: methods[0] for kind, methods in METHODS.items()} == {
        "extraction": "hyper_parallel",
        "question_answering": "intra_prompt",
        "generation": "autoregressive",
    }
