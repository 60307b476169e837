"""What engines have answered, out of their tokens, and how often two of them agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.works import Work


def read(
    found: list[Any], shape: str | None, work: Work, tokenizer: PreTrainedTokenizerBase
) -> list[Any]:
    """Answers in one order for all engines: values of documents, attribute by attribute, or texts.

    Args:
        found: what the engine's process has sent: ids of every request, or what raypd has read
            itself (`units`).
        shape: of its requests.
        work: that they are of.
        tokenizer: of the model.
    """
    if shape == "units":
        if work.unit == "questions":
            return [text or "" for text in found]
        return [
            one.get(name) for one, names in zip(found, work.names, strict=True) for name in names
        ]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    if work.unit == "questions":
        lines = (text.strip().partition("\n")[0].rstrip() for text in texts)
        return ["" if line.strip(" \"'.").lower() == "null" else line for line in lines]
    if shape == "each":
        return [_value(text) for text in texts]
    # The opening brace may stand in the prompt.
    objects = [
        _value("{" * asked.get("opened", False) + text)
        for asked, text in zip(work.whole, texts, strict=True)
    ]
    named = [one if isinstance(one, dict) else {} for one in objects]
    return [one.get(name) for one, names in zip(named, work.names, strict=True) for name in names]


def agreement(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The share of answers that are the same; blanks at their ends and an empty text for no value
    do not count.
    """
    pairs = list(zip(ours, theirs, strict=True))
    return sum(_plain(one) == _plain(other) for one, other in pairs) / max(len(pairs), 1)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _plain(value: Any) -> str:
    return "" if value is None else str(value).strip()
