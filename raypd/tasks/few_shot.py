"""Solved examples in a prompt: rows as of the input, and the answers beside them."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from raypd.config import Category, QuestionAnsweringConfig, RunConfig
from raypd.errors import ConfigError, in_words, raised_as
from raypd.tasks.base import Document
from raypd.tasks.columns import value_in
from raypd.tasks.documents import category_of, text_of, words_of
from raypd.tasks.labels import labels_of
from raypd.tasks.missing import parse_json


def load_examples(task: QuestionAnsweringConfig) -> list[dict[str, Any]]:
    """The rows of `task.few_shot` as the template shows them.

    Raises ConfigError with file and line. An answer: the letters of `answer_idx` where there are
    choices, else `answer`, the first of `answers`, or null.
    """
    if task.few_shot is None:
        return []
    examples = []
    for place, row in _rows(task.few_shot, "task.few_shot"):
        try:
            questions = [_solved(question) for question in row[task.questions_column]]
            examples.append({"context": row[task.context_column].strip(), "questions": questions})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{place}: not a solved example ({type(error).__name__}: "
                f"{in_words(error)}); it needs "
                f"{task.context_column}, and {task.questions_column} as a list of objects "
                "with question and answers"
            ) from None
    return examples


def _rows(path: str, key: str) -> Iterator[tuple[str, Any]]:
    """(file:line, what stands there) of JSON lines. Raises ConfigError."""
    with raised_as(ConfigError, f"{path}: {key} cannot be read", OSError, UnicodeDecodeError):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            with raised_as(ConfigError, f"{path}:{number}: not JSON", ValueError):
                yield f"{path}:{number}", parse_json(line)


def _solved(question: dict[str, Any]) -> dict[str, str]:
    text, choices = question["question"].strip(), question.get("choices") or []
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        text += f"\n{letter}. {choice}"
    if choices:
        index = question["answer_idx"]
        indices = index if isinstance(index, list) else [index]
        return {
            "text": text,
            "answer": ", ".join(ascii_uppercase[range(len(choices))[i]] for i in indices),
        }
    answers = question["answers"] if "answers" in question else [question["answer"]]
    answer = answers[0] if answers else None
    return {"text": text, "answer": "null" if answer is None else str(answer).strip()}


# ------------------------------------------------------------------------
# of extraction
class LabelledExamples:
    """The rows of `task.examples`, by category."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError with file and line, or where there is no example."""
        self.settings, categories = config.extraction.examples, config.extraction.categories
        # (text, as a prompt shows it)
        self._of: dict[str, list[tuple[str, str]]] = {name: [] for name in categories}
        self._similar = cache(self._similarity)
        if self.settings is None:
            return
        for place, row in _rows(self.settings.path, "task.examples.path"):
            try:
                document = Document(0, "", row)
                name, text = (
                    category_of(document, config.input, categories),
                    text_of(document, config.text_columns()),
                )
                column, attributes = self.settings.labels_column, categories[name].attributes
                if (labels := labels_of(row, column, attributes, config.text_columns())) is None:
                    raise ValueError("no labels")
                answer = _answer(categories[name], labels)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{place}: not a labelled document ({type(error).__name__}: "
                    f"{in_words(error)}); it needs the "
                    f"columns of the input and {self.settings.labels_column!r} "
                    "(task.examples.labels_column)"
                ) from None
            self._of[name].append((text, f"<document>\n{text}\n</document>\n{answer}\n\n"))
        if not any(self._of.values()):
            raise ConfigError(f"{self.settings.path}: task.examples.path holds no example")

    def first(self, category: str) -> str:
        """What the prompts of a category show in common."""
        return "".join(shown for _, shown in self.in_common(category))

    def in_common(self, category: str) -> list[tuple[str, str]]:
        """The same, (text, as a prompt shows it) of each."""
        return (
            []
            if self.settings is None or self.settings.nearest
            else self._of[category][: self.settings.count]
        )

    def nearest(
        self, category: str, text: str, encode: Callable[[str], list[int]], limit: int
    ) -> list[int]:
        """What a document's prompt shows, the most alike last, in at most `limit` tokens; none that
        says the same.
        """
        examples = self._of[category]
        if self.settings is None or not self.settings.nearest or not examples:
            return []
        alike = self._similar(category)(text)
        ranked, words = sorted(range(len(alike)), key=lambda n: (-alike[n], n)), words_of(text)
        others = (n for n in ranked if words_of(examples[n][0]) != words)
        tokens: list[int] = []
        for n in islice(others, self.settings.count):
            example = encode(examples[n][1])
            if len(example) + len(tokens) > limit:
                break
            tokens = example + tokens
        return tokens

    def _similarity(self, category: str) -> Callable[[str], Sequence[float]]:
        """Of a text to each example of a category."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 4), sublinear_tf=True)
        known = vectorizer.fit_transform([text for text, _ in self._of[category]])
        return lambda text: (known @ vectorizer.transform([text]).T).toarray()[:, 0]


def _answer(category: Category, target: Any) -> str:
    """A record as it is to be written.

    Raises ValueError for a label that does not fit its attribute's type.
    """
    lines = []
    for attribute in category.attributes:
        value = value_in(target, attribute)
        if value is not None and not attribute.fits(value):
            raise ValueError(f"attribute {attribute.name!r}: a label does not fit its type")
        lines.append(
            f"{json.dumps(attribute.name, ensure_ascii=False)}: "
            f"{json.dumps(value, ensure_ascii=False)}"
        )
    return "{\n" + ",\n".join(lines) + "\n}"
