"""The registry: every method has its file, and a method of somebody else needs its file and an entry, nothing more."""

import json
from pkgutil import resolve_name

import pytest

from raypd.config import METHODS, DecodingConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.decoding.text import TextMethod
from tests.processes import ended, start


@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_has_its_program_where_its_name_says_and_keys_of_the_configuration(name):
    spec = REGISTRY[name]
    assert spec.text_method or callable(resolve_name(f"raypd.decoding.methods.{name}:{name}"))
    keys = {key for keys in spec.answer_keys.values() for key in keys}
    assert {*keys, spec.tokens_option or "method"} <= set(DecodingConfig.model_fields)
    assert ("heads" in keys) == spec.heads
    assert all(name in METHODS[kind] for kind in spec.answer_keys)
    assert ("generation" in spec.answer_keys) == bool(spec.text_method)
    assert not spec.text_method or issubclass(resolve_name(spec.text_method), TextMethod)


def test_a_method_is_a_file_and_an_entry():
    """In a process of its own, since the configuration reads the registry when it is imported."""
    row = json.loads(ended(start("-m", "tests.decoding.toy_method")))
    counters = {"prompt_tokens": 19, "repeated": 3}
    assert (row["tokens"], json.loads(row["counters"]), row["finish_reason"]) == (6, counters, "length")
    assert row["text"][0] == row["text"][1]
