"""Training examples of attribute value extraction: for `hyper_parallel` (HPD, section 4.4) and, as its control, for
`autoregressive`. Prompts, skeletons and stacks are those of the extraction task itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import Attribute, ExtractionConfig, RunConfig
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Prompt
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import value_in
from raypd.tasks.documents import category_of
from raypd.tasks.extraction import ExtractionTask
from raypd.tasks.prompting import encode, end_of_turn
from raypd.training.example import Example, Skip, check_usable, trace
from raypd.training.labels import record_text, slots_teacher, text_teacher, value_text


class ExtractionExamples:
    """Makes examples of documents with labels, for the task and decoding that the model will be run with.

    `skipped` counts what was left out by its reason, `lost` documents, `lost_labels` single labels of other documents,
    of `labels` that have a value.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        assert isinstance(config.task, ExtractionConfig)
        self.config, self.task_config, self.labels_column = config, config.task, config.training.labels_column
        self.tokenizer = tokenizer
        self.task = ExtractionTask(config, tokenizer, context_length)
        self.skipped: Counter[str] = Counter()
        self.lost = self.labels = self.lost_labels = 0

    def __call__(self, documents: Sequence[Document]) -> Iterator[Example]:
        """Examples of the documents, in the task's order."""
        usable = {document.index: document for document in documents if self._is_labelled(document)}
        for request in self.task.plan(list(usable.values())):
            if isinstance(request, Record):
                self._skip(str(request.error))
                continue
            try:
                yield self._example(request.program, [usable[row] for row in request.documents])
            except Skip as reason:
                self._skip(str(reason), len(request.documents))

    def _skip(self, reason: str, documents: int = 1) -> None:
        self.skipped[reason] += documents
        self.lost += documents

    def _skip_label(self, reason: str) -> None:
        self.skipped[reason] += 1
        self.lost_labels += 1

    def _example(self, program: Program[Any], stack: list[Document]) -> Example:
        if self.config.decoding.method == "autoregressive":
            (document,) = stack
            text = record_text(self._attributes(document), document.fields[self.labels_column])
            return self._whole(next(program), [*self._encode(text), end_of_turn(self.tokenizer)])
        texts = [
            value_text(attribute, value_in(document.fields[self.labels_column], attribute))
            for document in stack
            for attribute in self._attributes(document)
        ]
        example, values = trace(program, slots_teacher([self._encode(text) for text in texts]))
        ends = [int(example.positions[index]) for index in sorted(example.targets) if example.steps[index] == 0]
        limit = self.config.decoding.max_value_tokens
        for end, value in zip(ends, values, strict=True):
            if not value.closed:  # its tokens stay, as when decoding cuts a value, but are no targets
                self._skip_label(f"values of more than {limit} tokens (decoding.max_value_tokens)")
                gap = range(end, end + limit)
                example.targets = {i: t for i, t in example.targets.items() if example.positions[i] not in gap}
        return example

    def _whole(self, prompt: Feed, answer: list[int]) -> Example:
        """A record token by token, to its end: decoding stops at the last value, other servers wait for the end."""
        limit = self.config.decoding.max_new_tokens
        if len(answer) > limit:
            raise Skip(f"answers of more than {limit} tokens")
        program = autoregressive(Prompt(prompt.tokens, prompt.shared), limit, lambda tokens: len(tokens) == len(answer))
        return trace(program, text_teacher(answer))[0]

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=False)

    def _attributes(self, document: Document) -> list[Attribute]:
        categories = self.task_config.categories
        return categories[category_of(document, self.config.input, categories)].attributes

    def _is_labelled(self, document: Document) -> bool:
        """Whether a document has labels; what is wrong with it, or with single labels, is counted."""
        try:
            check_usable(document)
            self._check_labels(document)
        except (Skip, ValueError) as reason:
            self._skip(str(reason))
            return False
        return True

    def _check_labels(self, document: Document) -> None:
        """Raises Skip for labels that cannot be used, ValueError for a document without a category."""
        column, labels = self.labels_column, document.fields.get(self.labels_column)
        if isinstance(labels, str):  # Parquet has no maps of mixed values
            try:
                labels = document.fields[column] = json.loads(labels)
            except ValueError:
                labels = None
        if not isinstance(labels, dict):
            raise Skip(f"column {column!r}: expected an object of attribute: value")
        if not labels:
            raise Skip(f"column {column!r}: empty")
        attributes = self._attributes(document)
        names = {name for attribute in attributes for name in (attribute.name, attribute.place[0])}
        self.labels += sum(value is not None for value in labels.values())
        for name, value in labels.items():
            if value is not None and name not in names:
                self._skip_label(f"labels of {name!r}, which the category does not have")
        for attribute in attributes:  # one bad label spoils the document: a wrong value or null would be learned
            value_text(attribute, value_in(labels, attribute))
