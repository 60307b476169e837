"""The registry: every method has its file. tests/tasks/test_toy_task.py has a method of somebody else."""

from pkgutil import resolve_name

import pytest

from raypd.config import METHODS, DecodingConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.decoding.text import TextMethod


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
