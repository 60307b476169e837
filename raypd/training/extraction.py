"""Training examples of extraction, for `hyper_parallel` (HPD, section 4.4) and `autoregressive`:
values as decoded.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import NUMBERS, Attribute, Category, RunConfig
from raypd.decoding.program import Feed, Program
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import lacks, value_in
from raypd.tasks.documents import category_of
from raypd.tasks.extraction import ExtractionTask
from raypd.tasks.labels import labels_of
from raypd.tasks.prompting import end_of_turn
from raypd.tasks.values import CheckedValue, check
from raypd.training.example import Example, Examples, Skip, Teacher, check_usable, trace, written

_NULL = "null says that there is no value"


class ExtractionExamples(Examples):
    """Makes examples of documents with labels, for the task and decoding that the model will be run
    with.
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
    ) -> None:
        super().__init__(config, tokenizer)
        self.categories = config.extraction.categories
        self.task = ExtractionTask(config, tokenizer, context_length)

    def __call__(self, documents: Sequence[Document]) -> Iterator[Example]:
        usable = {}
        for document in documents:
            try:
                check_usable(document)
                self._check_labels(document)
                usable[document.index] = document
            except (Skip, ValueError) as reason:
                self.skip(reason)
        for request in self.task.plan(list(usable.values())):
            if isinstance(request, Record):
                self.skip(request.error)
                continue
            try:
                yield self._example(request.program, [usable[row] for row in request.documents])
            except Skip as reason:
                self.skip(reason, len(request.documents))

    def _skip_label(self, reason: str) -> None:
        self.skipped[reason] += 1
        self.lost_labels += 1

    def _example(self, program: Program[Any], stack: list[Document]) -> Example:
        if self.config.decoding.method == "autoregressive":
            (document,) = stack
            text = record_text(self._category(document).attributes, document.fields[self.column])
            # Decoding stops at the last value; other servers wait for the end of the turn.
            answer, prompt = [*self.encode(text), end_of_turn(self.tokenizer)], next(program)
            if len(answer) > (limit := self.config.decoding.max_new_tokens):
                raise Skip(f"answers of more than {limit} tokens")
            return written(list(prompt.tokens), answer, prompt.shared)
        schemas = [(document.fields[self.column], self._category(document)) for document in stack]
        asked = [
            (labels, a, lacks(labels, a, category))
            for labels, category in schemas
            for a in category.attributes
        ]
        bare = self.config.decoding.bare
        texts = (
            "\n" if lacking else value_text(a, value_in(labels, a), bare)
            for labels, a, lacking in asked
        )
        example, values = trace(program, slots_teacher(list(map(self.encode, texts))))
        ends = [
            int(example.positions[index])
            for index in sorted(example.targets)
            if example.steps[index] == 0
        ]
        limit = self.config.decoding.max_value_tokens
        for end, value, (*_, lacking) in zip(ends, values, asked, strict=True):
            if lacking:
                self.skipped[f"attributes without a label; {_NULL}"] += 1
            elif not value.closed:
                self._skip_label(f"values of more than {limit} tokens (decoding.max_value_tokens)")
            else:
                continue
            # Its tokens stay, as when decoding cuts a value, but are no targets.
            gap = range(end, end + limit)
            example.targets = {
                i: t for i, t in example.targets.items() if example.positions[i] not in gap
            }
        if not example.targets:
            raise Skip("no label that can be trained on")
        return example

    def _category(self, document: Document) -> Category:
        return self.categories[category_of(document, self.config.input, self.categories)]

    def _check_labels(self, document: Document) -> None:
        """Raises Skip for labels that cannot be used, ValueError for a document without a
        category.
        """
        category = self._category(document)
        attributes = category.attributes
        try:
            labels = labels_of(document.fields, self.column, attributes, self.config.text_columns())
        # Without the text, so that all of its kind are counted together.
        except ValueError as error:
            raise Skip(f"a label {str(error)[str(error).find('is no value') :]}") from None
        if not isinstance(labels, dict):
            raise Skip(f"column {self.column!r}: expected an object of attribute: value")
        if not labels and any(lacks(labels, attribute, category) for attribute in attributes):
            raise Skip(f"column {self.column!r}: empty")
        document.fields[self.column] = labels
        names = {name for attribute in attributes for name in (attribute.name, attribute.place[0])}
        self.labels += sum(value is not None for value in labels.values())
        for name, value in labels.items():
            if value is not None and name not in names:
                self._skip_label(f"labels of {name!r}, which the category does not have")
        # One bad label spoils the document: a wrong value or null would be learned.
        for attribute in attributes:
            if not (attribute.nullable and lacks(labels, attribute, category)):
                value_text(attribute, value_in(labels, attribute))
            elif self.config.decoding.method == "autoregressive":  # writes all of them
                raise Skip(f"attribute {attribute.name!r}: no label; {_NULL}")


def value_text(attribute: Attribute, value: object, bare: bool = False) -> str:
    """A gold value as it stands behind its key, up to the closing quote or newline. bare: texts
    have no quotes. Raises Skip for another type.
    """
    bare = bare and attribute.type == "text" and not attribute.many
    if value is None:
        if not attribute.nullable:
            raise Skip(f"attribute {attribute.name!r}: it is required, and has no label")
        return "\n" if bare else " null\n"
    if (
        attribute.type == "rows"
        and isinstance(value, list)
        and all(isinstance(row, dict) for row in value)
    ):
        value = [
            {column.name: row.get(column.name) for column in attribute.columns} for row in value
        ]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table that lacks some has all as floats
    exact = attribute.many or attribute.regex is not None or attribute.type == "integer"
    if exact or (attribute.type == "number" and attribute.values):
        text = json.dumps(value, ensure_ascii=False)
        if check(attribute, text) != CheckedValue("ok", value, text) or (
            attribute.regex is not None and "\\" in text
        ):
            raise Skip(
                f"attribute {attribute.name!r}: a label is no "
                f"{'list of ' * attribute.many}{attribute.type}"
            )
        return f" {text}\n" if attribute.type in NUMBERS and not attribute.many else f" {text}"
    if attribute.type == "number":
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float, str))
            or not any(map(str.isdigit, str(value)))
        ):
            raise Skip(f"attribute {attribute.name!r}: a label is no number")
        return f" {value}\n"
    if attribute.type == "boolean":
        if not isinstance(value, bool):
            raise Skip(f"attribute {attribute.name!r}: a label is not true, false or null")
        return f" {json.dumps(value)}\n"
    text = value if isinstance(value, str) else json.dumps(value)
    if attribute.type == "enum" and text not in attribute.values:
        raise Skip(f"attribute {attribute.name!r}: a label is none of its values")
    if not text.strip():
        raise Skip(f"attribute {attribute.name!r}: a label is empty text; {_NULL}")
    return (
        f" {' '.join(text.split())}\n"
        if bare
        else f" {json.dumps(text.strip(), ensure_ascii=False)}"
    )


def record_text(attributes: Sequence[Attribute], target: dict[str, Any]) -> str:
    """The whole answer behind its opening brace and newline, as an autoregressive model is to write
    it.
    """
    names = (json.dumps(attribute.name, ensure_ascii=False) for attribute in attributes)
    values = (
        value_text(attribute, value_in(target, attribute)).rstrip() for attribute in attributes
    )
    return ",\n".join(f"{name}:{value}" for name, value in zip(names, values, strict=True)) + "\n}"


def slots_teacher(gold: Sequence[Sequence[int]]) -> Teacher:
    """Answers the slots of `hyper_parallel` with their values' tokens.

    Its first feed asks at the end of every slot; the k-th behind it feeds the last token of every
    open slot, whose place is k tokens behind the slot's end.
    """
    numbers: dict[int, int] = {}  # position of a slot's end -> number of the slot
    feeds = count()

    def teacher(feed: Feed) -> list[int]:
        k = next(feeds)
        ends = [feed.positions[index] - k for index in feed.sample_at]
        if k == 0:
            numbers.update(zip(ends, count()))
        return [gold[numbers[end]][k] for end in ends]

    return teacher
