"""Training examples of extraction: for `hyper_parallel` (HPD, section 4.4) and, as its control, `autoregressive`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import Attribute, ExtractionConfig, RunConfig
from raypd.decoding.program import Program
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import value_in
from raypd.tasks.documents import category_of
from raypd.tasks.extraction import ExtractionTask
from raypd.tasks.prompting import end_of_turn
from raypd.training.example import Example, Examples, Skip, check_usable, trace, written
from raypd.training.labels import record_text, slots_teacher, value_text


class ExtractionExamples(Examples):
    """Makes examples of documents with labels, for the task and decoding that the model will be run with."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        super().__init__(config, tokenizer)
        assert isinstance(config.task, ExtractionConfig)
        self.categories = config.task.categories
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
            text = record_text(self._attributes(document), document.fields[self.column])
            # Decoding stops at the last value; other servers wait for the end of the turn.
            answer, prompt = [*self.encode(text), end_of_turn(self.tokenizer)], next(program)
            if len(answer) > (limit := self.config.decoding.max_new_tokens):
                raise Skip(f"answers of more than {limit} tokens")
            return written(list(prompt.tokens), answer, prompt.shared)
        pairs = [(document.fields[self.column], a) for document in stack for a in self._attributes(document)]
        texts = [value_text(attribute, value_in(labels, attribute)) for labels, attribute in pairs]
        example, values = trace(program, slots_teacher([self.encode(text) for text in texts]))
        ends = [int(example.positions[index]) for index in sorted(example.targets) if example.steps[index] == 0]
        limit = self.config.decoding.max_value_tokens
        for end, value in zip(ends, values, strict=True):
            if not value.closed:  # its tokens stay, as when decoding cuts a value, but are no targets
                self._skip_label(f"values of more than {limit} tokens (decoding.max_value_tokens)")
                gap = range(end, end + limit)
                example.targets = {i: t for i, t in example.targets.items() if example.positions[i] not in gap}
        return example

    def _attributes(self, document: Document) -> list[Attribute]:
        return self.categories[category_of(document, self.config.input, self.categories)].attributes

    def _check_labels(self, document: Document) -> None:
        """Raises Skip for labels that cannot be used, ValueError for a document without a category."""
        labels = document.fields.get(self.column)
        if isinstance(labels, str):  # Parquet has no maps of mixed values
            with suppress(ValueError):
                labels = document.fields[self.column] = json.loads(labels)
        if not isinstance(labels, dict):
            raise Skip(f"column {self.column!r}: expected an object of attribute: value")
        if not labels:
            raise Skip(f"column {self.column!r}: empty")
        attributes = self._attributes(document)
        names = {name for attribute in attributes for name in (attribute.name, attribute.place[0])}
        self.labels += sum(value is not None for value in labels.values())
        for name, value in labels.items():
            if value is not None and name not in names:
                self._skip_label(f"labels of {name!r}, which the category does not have")
        for attribute in attributes:  # one bad label spoils the document: a wrong value or null would be learned
            value_text(attribute, value_in(labels, attribute))
