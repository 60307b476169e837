"""Shows solved examples in prompts: rows like those of the input, with their answers."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from raypd.config import Category, ExtractionConfig, InputConfig, QuestionAnsweringConfig
from raypd.errors import ConfigError, in_words, raised_as
from raypd.tasks.base import Document
from raypd.tasks.documents import category_of, text_of, with_nested, words_of
from raypd.tasks.labels import labels_of
from raypd.tasks.missing import parse_json
from raypd.tasks.record import value_in


def load_examples(task: QuestionAnsweringConfig) -> list[dict[str, Any]]:
    """Return the rows of `task.few_shot` in the form that the template shows.

    The answer of a question with choices is the letters of `answer_idx`. The answer of any other
    question is `answer`, the first of `answers`, or null.

    Returns:
        For each row, its `context` and its `questions`, each with `text` and `answer`.

    Raises:
        ConfigError: The file cannot be read, or a row is not a solved example. The message names
            the file and the line.
    """
    if task.few_shot is None:
        return []
    examples = []
    for location, row in _rows(task.few_shot, "task.few_shot"):
        try:
            questions = [_solved(question) for question in row[task.questions_column]]
            examples.append({"context": row[task.context_column].strip(), "questions": questions})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{location}: not a solved example ({type(error).__name__}: "
                f"{in_words(error)}); it needs "
                f"{task.context_column}, and {task.questions_column} as a list of objects "
                "with question and answers"
            ) from None
    return examples


def _rows(path: str, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the location (file:line) and the value of each JSON line; raise ConfigError if one is
    invalid.
    """
    with raised_as(ConfigError, f"{path}: {key} cannot be read", OSError, UnicodeDecodeError):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            with raised_as(ConfigError, f"{path}:{number}: not JSON", ValueError):
                yield f"{path}:{number}", parse_json(line)


def _solved(question: dict[str, Any]) -> dict[str, str]:
    text = question["question"].strip()
    choices = question.get("choices") or []
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        text += f"\n{letter}. {choice}"
    if choices:
        indices = question["answer_idx"]
        if not isinstance(indices, list):
            indices = [indices]
        # Indexing a slice of the alphabet raises IndexError for an index without a choice.
        letters = ascii_uppercase[: len(choices)]
        return {"text": text, "answer": ", ".join(letters[index] for index in indices)}
    if "answers" in question:
        answers = question["answers"]
    else:
        answers = [question["answer"]]
    if not answers or answers[0] is None:
        return {"text": text, "answer": "null"}
    return {"text": text, "answer": str(answers[0]).strip()}


class LabelledExamples:
    """The labelled documents of `task.examples`, which prompts of an extraction show."""

    def __init__(self, task: ExtractionConfig, source: InputConfig) -> None:
        """Read the examples.

        Args:
            task: Section `task`.
            source: Section `input`.

        Raises:
            ConfigError: A row is not a labelled document, with the file and line, or the file
                contains no example.
        """
        self.settings = task.examples
        categories = task.categories
        text_columns = task.text_columns(source)
        # By category: the text of each example, and its form in the prompt.
        self._of: dict[str, list[tuple[str, str]]] = {name: [] for name in categories}
        self._similar = cache(self._similarity)
        if self.settings is None:
            return
        for location, row in _rows(self.settings.path, "task.examples.path"):
            try:
                row = with_nested(row, [*text_columns, source.category_column])
                document = Document(0, "", row)
                name = category_of(document, source, categories)
                text = text_of(document, text_columns)
                column = self.settings.labels_column
                attributes = categories[name].attributes
                labels = labels_of(row, column, attributes, text_columns)
                if labels is None:
                    raise ValueError("no labels")
                answer = _answer(categories[name], labels)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{location}: not a labelled document ({type(error).__name__}: "
                    f"{in_words(error)}); it needs the "
                    f"columns of the input and {self.settings.labels_column!r} "
                    "(task.examples.labels_column)"
                ) from None
            self._of[name].append((text, f"<document>\n{text}\n</document>\n{answer}\n\n"))
        if not any(self._of.values()):
            raise ConfigError(f"{self.settings.path}: task.examples.path holds no example")

    def first(self, category: str) -> str:
        """Return the examples that all prompts of a category show, as text."""
        return "".join(shown for _, shown in self.in_common(category))

    def in_common(self, category: str) -> list[tuple[str, str]]:
        """Return the text of each such example and its form in the prompt."""
        if self.settings is None or self.settings.nearest:
            return []
        return self._of[category][: self.settings.count]

    def nearest(
        self, category: str, text: str, encode: Callable[[str], list[int]], limit: int
    ) -> list[int]:
        """Return the examples most similar to a document, the most similar one last.

        Args:
            category: The category of the document.
            text: The text of the document. An example with the same words is left out, because it
                would reveal the answer.
            encode: Turns text into token ids.
            limit: The maximum number of tokens of all examples together.

        Returns:
            Their token ids; none if `task.examples.nearest` is off.
        """
        examples = self._of[category]
        if self.settings is None or not self.settings.nearest or not examples:
            return []
        similarity = self._similar(category)(text)
        ranked = sorted(range(len(similarity)), key=lambda n: (-similarity[n], n))
        words = words_of(text)
        tokens: list[int] = []
        count = 0
        for number in ranked:
            example_text, shown = examples[number]
            if words_of(example_text) == words:
                continue
            example = encode(shown)
            if len(example) + len(tokens) > limit:
                break
            tokens = example + tokens
            count += 1
            if count == self.settings.count:
                break
        return tokens

    def _similarity(self, category: str) -> Callable[[str], Sequence[float]]:
        """Return a function that computes a text's similarity to each example of a category."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 4), sublinear_tf=True)
        examples = vectorizer.fit_transform([text for text, _ in self._of[category]])

        def similarity(text: str) -> Sequence[float]:
            products: Any = examples @ vectorizer.transform([text]).T
            return products.toarray()[:, 0]

        return similarity


def _answer(category: Category, target: Any) -> str:
    """Return the answer that a model should write for an example.

    Raises:
        ValueError: If a label does not fit its attribute's type.
    """
    lines = []
    for attribute in category.attributes:
        value = value_in(target, attribute)
        if value is not None and not attribute.fits(value):
            raise ValueError(f"attribute {attribute.name!r}: a label does not fit its type")
        key = json.dumps(attribute.name, ensure_ascii=False)
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"
