"""Training examples of extraction, for `hyper_parallel` (HPD, section 4.4) and `autoregressive`.

An example contains values in the form in which the method decodes them.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import Category, RunConfig
from raypd.decoding import Feed, Program
from raypd.schema import Attribute, LabelError
from raypd.tasks import (
    Document,
    ExtractionTask,
    Record,
    category_of,
    end_of_turn,
    labels_of,
    lacks,
    value_in,
)
from raypd.training.example import Example, Examples, Skip, Teacher, check_usable, trace, written

_NULL = "null says that there is no value"


class ExtractionExamples(Examples):
    """Makes examples from documents with labels, for the task and method of a configuration."""

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
                stack = [usable[row] for row in request.documents]
                if self.config.decoding.method == "autoregressive":
                    (document,) = stack
                    yield self._autoregressive(request.program, document)
                else:
                    yield self._hyper_parallel(request.program, stack)
            except Skip as reason:
                self.skip(reason, len(request.documents))

    def _skip_label(self, reason: str) -> None:
        self.skipped[reason] += 1
        self.lost_labels += 1

    def _autoregressive(self, program: Program[Any], document: Document) -> Example:
        """Return the example of a document whose record is written token by token."""
        labels = document.fields[self.column]
        text = record_text(self._category(document).attributes, labels)
        # Decoding stops at the last value, but other servers wait for the end of the turn.
        answer = [*self.encode(text), end_of_turn(self.tokenizer)]
        limit = self.config.decoding.max_new_tokens
        if len(answer) > limit:
            raise Skip(f"answers of more than {limit} tokens")
        prompt = next(program)
        return written(list(prompt.tokens), answer, prompt.shared)

    def _hyper_parallel(self, program: Program[Any], stack: list[Document]) -> Example:
        """Return the example of documents whose values are decoded in parallel."""
        texts = []
        is_lacking = []  # whether a slot has no label
        for document in stack:
            labels = document.fields[self.column]
            category = self._category(document)
            for attribute in category.attributes:
                if lacks(labels, attribute, category):
                    is_lacking.append(True)
                    texts.append("\n")
                else:
                    is_lacking.append(False)
                    value = value_in(labels, attribute)
                    texts.append(value_text(attribute, value, self.config.decoding.bare))
        gold = [self.encode(text) for text in texts]
        example, values = trace(program, slots_teacher(gold))
        ends = [
            int(example.positions[index])
            for index in sorted(example.targets)
            if example.steps[index] == 0
        ]
        limit = self.config.decoding.max_value_tokens
        for end, value, lacking in zip(ends, values, is_lacking, strict=True):
            if lacking:
                self.skipped[f"attributes without a label; {_NULL}"] += 1
                _drop_targets(example, range(end, end + limit))
            elif not value.closed:
                self._skip_label(f"values of more than {limit} tokens (decoding.max_value_tokens)")
                _drop_targets(example, range(end, end + limit))
        if not example.targets:
            raise Skip("no usable label")
        return example

    def _category(self, document: Document) -> Category:
        return self.categories[category_of(document, self.config.input, self.categories)]

    def _check_labels(self, document: Document) -> None:
        """Check the labels of a document, and store them in its column of labels.

        Raises Skip for labels that cannot be used, ValueError for a document without a category.
        """
        category = self._category(document)
        labels = self._labels_of(document, category)
        document.fields[self.column] = labels
        self.labels += sum(value is not None for value in labels.values())
        names = {attribute.name for attribute in category.attributes}
        names |= {attribute.key_path[0] for attribute in category.attributes}
        for name, value in labels.items():
            if value is not None and name not in names:
                self._skip_label(f"labels of {name!r}, which the category does not have")
        # One bad label makes the document unusable: the model would learn a wrong value or null.
        for attribute in category.attributes:
            if not attribute.nullable or not lacks(labels, attribute, category):
                value_text(attribute, value_in(labels, attribute))
            elif self.config.decoding.method == "autoregressive":  # which writes every attribute
                raise Skip(f"attribute {attribute.name!r}: no label; {_NULL}")

    def _labels_of(self, document: Document, category: Category) -> dict[str, Any]:
        """Return the labels of a document by attribute; raise Skip if their form differs."""
        attributes = category.attributes
        try:
            labels = labels_of(document.fields, self.column, attributes, self.config.text_columns())
        except ValueError as error:
            # The label's own text is left out, so that all errors of one kind are counted together.
            message = str(error)
            raise Skip(f"a label {message[message.find('is not a value') :]}") from None
        if not isinstance(labels, dict):
            raise Skip(f"column {self.column!r}: expected an object of attribute: value")
        if not labels and any(lacks(labels, attribute, category) for attribute in attributes):
            raise Skip(f"column {self.column!r}: empty")
        return labels


def _drop_targets(example: Example, positions: range) -> None:
    """Remove the targets at some positions.

    The tokens stay, as they do when decoding cuts a value.
    """
    example.targets = {
        index: token
        for index, token in example.targets.items()
        if example.positions[index] not in positions
    }


def value_text(attribute: Attribute, value: object, bare: bool = False) -> str:
    """Write a label as it is decoded: after its key, up to the closing quote or newline.

    Args:
        attribute: The attribute.
        value: Its label.
        bare: Whether texts have no quotes.

    Raises:
        Skip: If the label is not a value of the attribute.
    """
    if value is None:
        if not attribute.nullable:
            raise Skip(f"attribute {attribute.name!r}: it is required, and has no label")
        return attribute.value_type.null_text(bare)
    if isinstance(value, float) and value.is_integer():
        # A column of whole numbers with missing values is read as floats.
        value = int(value)
    try:
        return attribute.value_type.label_text(value, bare)
    except LabelError as error:
        raise Skip(f"attribute {attribute.name!r}: {error}") from None


def record_text(attributes: Sequence[Attribute], target: dict[str, Any]) -> str:
    """Return the answer that an autoregressive model should write after the opening brace.

    Args:
        attributes: The attributes of the category.
        target: The labels by attribute.
    """
    lines = []
    for attribute in attributes:
        name = json.dumps(attribute.name, ensure_ascii=False)
        value = value_text(attribute, value_in(target, attribute)).rstrip()
        lines.append(f"{name}:{value}")
    return ",\n".join(lines) + "\n}"


def slots_teacher(gold: Sequence[Sequence[int]]) -> Teacher:
    """Return a teacher that fills the slots of `hyper_parallel`.

    The first feed samples at the end of every slot. The k-th feed after it contains the last token
    of every open slot, whose position is k after the slot's end.

    Args:
        gold: Per slot, the token ids of its value.
    """
    slots: dict[int, int] = {}  # position of a slot's end -> number of the slot
    feeds = count()

    def teacher(feed: Feed) -> list[int]:
        k = next(feeds)
        ends = [feed.positions[index] - k for index in feed.sample_at]
        if k == 0:
            for number, end in enumerate(ends):
                slots[end] = number
        return [gold[slots[end]][k] for end in ends]

    return teacher
