"""What decides whether a finished document is done again: for the same answers the same digits, in every raypd."""

from __future__ import annotations

import pytest

from raypd.config_file import make_config

EXTRACTION = {
    "input": {"path": "in.jsonl"},
    "output": {"path": "out"},
    "task": {"categories": {"shoes": {"attributes": [{"name": "Brand"}, {"name": "Size", "type": "number"}]}}},
}
QUESTIONS = {"input": {"path": "in.jsonl"}, "output": {"path": "out"}, "task": {"kind": "question_answering"}}


def test_it_is_what_it_was() -> None:
    """A change here makes every user's next nightly do its whole corpus again: is that meant? Then raise _ANSWERS."""
    assert make_config(EXTRACTION).fingerprint() == "17aa22ea4902"
    assert make_config(QUESTIONS).fingerprint() == "2febfacd2fad"


@pytest.mark.parametrize(
    "key",
    [
        "decoding.method=hyper_parallel",
        "model.dtype=auto",
        "task.categories.shoes.attributes=[{name: Brand, type: text}, {name: Size, type: number}]",
    ],
)
def test_a_default_that_is_written_out_changes_nothing(key: str) -> None:
    assert make_config(EXTRACTION, [key]).fingerprint() == make_config(EXTRACTION).fingerprint()


@pytest.mark.parametrize(
    "key",
    ["decoding.method=autoregressive", "decoding.max_value_tokens=7", "model.dtype=float32", "model.name=other",
     "input.text_columns=[title]", "task.categories.shoes.attributes=[{name: Brand}, {name: Size}]"],
)  # fmt: skip
def test_what_changes_answers_changes_it(key: str) -> None:
    assert make_config(EXTRACTION, [key]).fingerprint() != make_config(EXTRACTION).fingerprint()


@pytest.mark.parametrize(
    "key", ["output.path=elsewhere", "engine.batch=3", "cluster.max_workers=9", "input.path=b.jsonl"]
)
def test_what_does_not_does_not(key: str) -> None:
    assert make_config(EXTRACTION, [key]).fingerprint() == make_config(EXTRACTION).fingerprint()
