"""Solved examples of question answering: rows as of the input, and the answers beside them."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from raypd.config import QuestionAnsweringConfig
from raypd.errors import ConfigError, in_words


def load_examples(task: QuestionAnsweringConfig) -> list[dict[str, Any]]:
    """The rows of `task.few_shot` as the template shows them. Raises ConfigError with file and line.

    An answer is the letters of `answer_idx` where there are choices, else `answer` or the first of `answers`, or null.
    """
    if task.few_shot is None:
        return []
    path = Path(task.few_shot)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: task.few_shot cannot be read: {error}") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            questions = [_solved(question) for question in row[task.questions_column]]
            examples.append({"context": row[task.context_column].strip(), "questions": questions})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{path}:{number}: not a solved example ({type(error).__name__}: {in_words(error)}); it needs "
                f"{task.context_column}, and {task.questions_column} as a list of objects with question and answers"
            ) from None
    return examples


def _solved(question: dict[str, Any]) -> dict[str, str]:
    text, choices = question["question"].strip(), question.get("choices") or []
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        text += f"\n{letter}. {choice}"
    if choices:
        index = question["answer_idx"]
        indices = index if isinstance(index, list) else [index]
        return {"text": text, "answer": ", ".join(ascii_uppercase[range(len(choices))[i]] for i in indices)}
    answers = question["answers"] if "answers" in question else [question["answer"]]
    answer = answers[0] if answers else None
    return {"text": text, "answer": "null" if answer is None else str(answer).strip()}
