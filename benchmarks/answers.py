"""Read the answers of engines from their tokens, and count how often two engines agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.works import Work


def read(
    output: list[Any], shape: str | None, work: Work, tokenizer: PreTrainedTokenizerBase
) -> list[Any]:
    """Return answers in one order for all engines.

    Args:
        output: What the engine's process sent: the token ids per request, or what raypd has read
            itself (shape "units").
        shape: The shape of the engine's requests: "units", "whole" or "each".
        work: The work of the requests.
        tokenizer: The tokenizer of the model.

    Returns:
        The values of documents, attribute by attribute, or the texts of answers to questions.
    """
    if shape == "units":
        if work.unit == "questions":
            return [text or "" for text in output]
        return _in_order(output, work)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in output]
    if work.unit == "questions":
        return [_first_line(text) for text in texts]
    if shape == "each":
        return [_parsed(text) for text in texts]
    records = []
    for request, text in zip(work.whole, texts, strict=True):
        # The opening brace may stand in the prompt.
        if request.get("opened", False):
            text = "{" + text
        record = _parsed(text)
        records.append(record if isinstance(record, dict) else {})
    return _in_order(records, work)


def _in_order(records: Sequence[dict[str, Any]], work: Work) -> list[Any]:
    """Return the values of records in the order of the documents' attributes."""
    values = []
    for record, names in zip(records, work.names, strict=True):
        values += [record.get(name) for name in names]
    return values


def _first_line(text: str) -> str:
    """Return the first line of an answer to a question; "" if it says null."""
    line = text.strip().partition("\n")[0].rstrip()
    if line.strip(" \"'.").lower() == "null":
        return ""
    return line


def agreement(answers: Sequence[Any], other_answers: Sequence[Any]) -> float:
    """Return the share of answers that are equal.

    Blanks at the ends are ignored, and an empty text equals no value.
    """
    equal = 0
    for answer, other_answer in zip(answers, other_answers, strict=True):
        equal += _plain(answer) == _plain(other_answer)
    return equal / max(len(answers), 1)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _plain(value: Any) -> str:
    return "" if value is None else str(value).strip()
