"""Attribute value extraction: a document of a category becomes a record of typed values.

HPD describes the task in sections 3 and 4. The answer is JSON. `hyper_parallel` decodes all values
at the same time and `guided` decodes one after the other, both after the keys of the skeleton. With
`autoregressive` and `speculative`, the model writes the whole record.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding import (
    Program,
    PromptLookup,
    TextDrafter,
    autoregressive,
    guided,
    hyper_parallel,
    speculative,
)
from raypd.models import token_texts
from raypd.tasks.base import Document, Record, Request, seed_of
from raypd.tasks.documents import category_of
from raypd.tasks.extraction_answer import ExtractionAnswers, ValueSource
from raypd.tasks.extraction_prompt import CategoryPrompt, DocumentText, ExtractionPrompts
from raypd.tasks.prompting import end_tokens
from raypd.tasks.values import JsonObjectEnd, Rated
from raypd.tasks.windows import merged

# Reads a program's answer: for each document of its prompt, the value of each attribute.
Reader = Callable[[Any], list[list[Rated]]]


class ExtractionTask:
    """The task `extraction`.

    Attributes:
        prompts: Builds the prompts.
        answers: Reads the answers.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: object = None,
        drafter: TextDrafter | None = None,
    ) -> None:
        """Prepare the prompts of all categories.

        Args:
            config: The run's configuration.
            tokenizer: The tokenizer of the model.
            context_length: The number of positions of the model.
            model: Not used.
            drafter: The draft model of `speculative`; None drafts from the prompt.

        Raises:
            ConfigError: If a category cannot be decoded in the context, or a template or an
                example cannot be used.
            ModelError: If the model's calibration cannot be read.
        """
        if drafter is None and config.decoding.method == "speculative":
            drafter = PromptLookup(config.decoding.method_options.max_ngram)
        self.tokenizer = tokenizer
        self.input = config.input
        self.decoding = config.decoding
        self.prompts = ExtractionPrompts(config, tokenizer, context_length)
        self.answers = ExtractionAnswers(config, tokenizer, self.prompts.vocabulary)
        self._drafter = drafter
        self._token_texts = token_texts(tokenizer)
        self._end_tokens = end_tokens(tokenizer)

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield a request per document, per window of a long document, or per stack of documents
        that share a prompt.
        """
        # The documents of each category that wait until their prompt is full.
        stacks: dict[str, list[DocumentText]] = {}
        for document in documents:
            try:
                category = self._category(document)
                texts = self.prompts.texts_of(document, category)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            if len(texts) > 1:
                yield from self._window_requests(category, texts)
            elif self.decoding.stacked:
                yield from self._stack(stacks, category, texts[0])
            else:
                yield self._request(category, texts)
        for name, stack in stacks.items():
            yield self._request(self.prompts.categories[name], stack)

    def _category(self, document: Document) -> CategoryPrompt:
        """Return the prompt of a document's category; raise ValueError if it cannot be answered."""
        if document.error is not None:
            raise ValueError(document.error)
        categories = self.prompts.categories
        return categories[category_of(document, self.input, categories)]

    def _stack(
        self, stacks: dict[str, list[DocumentText]], category: CategoryPrompt, text: DocumentText
    ) -> Iterator[Request]:
        """Add a document to the stack of its category, and yield the requests that are now
        complete.
        """
        stack = stacks.setdefault(category.name, [])
        tokens = len(text.tokens) + sum(len(stacked.tokens) for stacked in stack)
        if stack and tokens > self.prompts.remaining_tokens(category, len(stack) + 1):
            yield self._request(category, stack)
            stack = []
            stacks[category.name] = stack
        stack.append(text)
        if len(stack) == self.decoding.stacked_documents:
            del stacks[category.name]
            yield self._request(category, stack)

    def _request(self, category: CategoryPrompt, texts: Sequence[DocumentText]) -> Request:
        """Return the request of documents that share a prompt."""
        program, read = self._program(category, texts)

        def finish(answer: Any) -> list[Record]:
            records = []
            for text, values in zip(texts, read(answer), strict=True):
                sources = [ValueSource(text, None, rated) for rated in values]
                records.append(self.answers.record(category, sources))
            return records

        seed = seed_of(self.decoding.sampling.seed, [text.document.id for text in texts])
        return Request([text.document.index for text in texts], program, finish, seed)

    def _window_requests(
        self, category: CategoryPrompt, texts: Sequence[DocumentText]
    ) -> Iterator[Request]:
        """Yield a request per window; the last one to finish returns the document's record."""
        answers = _WindowAnswers(self.answers, category, texts)
        for window in range(len(texts)):
            yield self._window_request(category, texts[window], window, answers)

    def _window_request(
        self, category: CategoryPrompt, text: DocumentText, window: int, answers: "_WindowAnswers"
    ) -> Request:
        program, read = self._program(category, [text])

        def finish(answer: Any) -> list[Record]:
            (values,) = read(answer)
            return answers.take(window, values)

        def failed(reason: str) -> list[Record]:
            return answers.take(window, reason)

        seed = seed_of(self.decoding.sampling.seed, [text.document.id, window])
        return Request([text.document.index], program, finish, seed, failed=failed)

    def _program(
        self, category: CategoryPrompt, texts: Sequence[DocumentText]
    ) -> tuple[Program[Any], Reader]:
        """Return the program that answers a prompt, and the function that reads its answer."""

        def read_record(answer: Any) -> list[list[Rated]]:
            return [self.answers.read_json(category, answer)]

        def read_slots(values: Any) -> list[list[Rated]]:
            return self.answers.read_slots(category, len(texts), values)

        if self.prompts.writes_record or self.prompts.uses_pattern:
            return self._record_program(category, texts), read_record
        prompt = self.prompts.slotted_prompt(category, texts)
        value_tokens = self.decoding.max_value_tokens
        if self.decoding.method == "guided":
            return guided(prompt, value_tokens), read_slots
        if self.decoding.method == "hyper_parallel":
            isolate = self.decoding.isolate == "values"
            return hyper_parallel(prompt, value_tokens, isolate), read_slots
        raise NotImplementedError(f"extraction has no program for {self.decoding.method}")

    def _record_program(
        self, category: CategoryPrompt, texts: Sequence[DocumentText]
    ) -> Program[Any]:
        """Return the program with which the model writes a whole record."""
        prompt = self.prompts.record_prompt(category, texts)
        names = [attribute.name for attribute in category.attributes]
        stops = JsonObjectEnd(self._token_texts, self._end_tokens, names)
        length = self.decoding.max_new_tokens
        if not self.prompts.writes_record:
            length = category.answer_tokens(self.decoding.max_value_tokens)
        if self._drafter is not None:
            draft_tokens = self.decoding.method_options.draft_tokens
            return speculative(prompt, length, stops, self._drafter, draft_tokens)
        return autoregressive(prompt, length, stops, pattern=category.pattern)


class _WindowAnswers:
    """Collects the answers of a document's windows until the last one has come."""

    def __init__(
        self, answers: ExtractionAnswers, category: CategoryPrompt, texts: Sequence[DocumentText]
    ) -> None:
        self._answers = answers
        self._category = category
        self._texts = texts
        # For each window, its values, or the reason why it has none.
        self._results: dict[int, list[Rated] | str] = {}

    def take(self, window: int, result: list[Rated] | str) -> list[Record]:
        """Record the result of a window, and return the document's record if it was the last
        one.
        """
        self._results[window] = result
        if len(self._results) < len(self._texts):
            return []
        values_of_windows = []
        for number in range(len(self._texts)):
            values = self._results[number]
            if isinstance(values, str):
                error = f"window {number + 1} of {len(self._texts)}: {values}"
                return [Record(self._texts[0].document.index, error=error)]
            values_of_windows.append(values)
        sources = []
        for chosen, rated in merged(self._category.attributes, values_of_windows):
            sources.append(ValueSource(self._texts[chosen], chosen, rated))
        return [self._answers.record(self._category, sources)]
