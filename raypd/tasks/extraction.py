"""Attribute value extraction: a document of a category becomes a record of typed values (HPD,
sections 3 and 4). The answer is JSON. For `hyper_parallel` its skeleton, all keys without values,
is part of the prompt and every value is a slot; for `guided` its values come one after the other;
for `autoregressive` and `speculative` the model writes it whole.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding import (
    REGISTRY,
    UNREACHABLE,
    Continuation,
    Grammar,
    Program,
    Prompt,
    PromptLookup,
    Slot,
    SlottedPrompt,
    TextDrafter,
    Value,
    Vocabulary,
    autoregressive,
    guided,
    hyper_parallel,
    speculative,
)
from raypd.errors import ConfigError, raised_as
from raypd.models import token_texts
from raypd.schema import Attribute, record_pattern, record_schema
from raypd.tasks.automata import automaton_of, vocabulary_of
from raypd.tasks.base import Document, Record, Request, confidence, seed_of
from raypd.tasks.calibration import calibration_of
from raypd.tasks.columns import record_of, value_row
from raypd.tasks.documents import category_of, text_of
from raypd.tasks.few_shot import LabelledExamples
from raypd.tasks.prompting import DOCUMENTS, decode_answer, encode, end_tokens, messages, pieces
from raypd.tasks.values import (
    CheckedValue,
    JsonObjectEnd,
    Rated,
    check,
    find_value,
    span_of,
    span_source,
)
from raypd.tasks.windows import merged, windows


@dataclass
class _CategoryPrompt:
    """A category's prompt, before and behind the documents, and its skeleton as token ids."""

    name: str
    attributes: list[Attribute]
    before: list[int]
    behind: list[int]
    keys: list[list[int]]  # the skeleton's piece before each slot; the first opens the object
    grammars: list[Grammar]
    # Of the answer, for an engine that holds it to one by itself.
    pattern: str | dict[str, Any] | None = None


@dataclass
class _Body:
    """A document, or a window of one, ready to be put into a prompt."""

    document: Document
    text: str
    tokens: list[int]
    examples: list[int] = field(default_factory=list)  # of its own, in front of it
    truncated: bool = False
    begin: int = 0  # character of the document's text at which its own begins


class ExtractionTask:
    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: object = None,
        drafter: TextDrafter | None = None,
    ) -> None:
        if drafter is None and config.decoding.method == "speculative":
            drafter = PromptLookup(config.decoding.method_options.max_ngram)
        self._drafter = drafter
        self.input = config.input
        self.task = config.extraction
        self.decoding = config.decoding
        self._calibration = calibration_of(config.model, config.decoding.method)
        self._min_confidence = config.output.min_confidence
        self._writes_keys = REGISTRY[self.decoding.method].whole_record  # the model does
        server = config.model.endpoint
        self._by_schema = server is not None and server.response_format == "json_schema"
        # ... as the engine makes it.
        self._by_pattern = config.engine.kind == "vllm" and not self._writes_keys
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._encode = partial(encode, tokenizer, special=False)
        self.texts = token_texts(tokenizer)
        self.ends = end_tokens(tokenizer)
        self._text = partial(decode_answer, tokenizer, self.ends)
        self._examples = LabelledExamples(config)
        # Then documents stand behind the answer's header.
        bare = self.decoding.bare and not self.decoding.stacked
        self._open, self._close = map(
            self._encode, ("", "\n") if bare else ("<document>\n", "\n</document>\n")
        )
        self._vocabulary = vocabulary_of(tokenizer)
        self._of_type: dict[str, Grammar] = {}
        self._categories = {
            name: self._ready(name, message) for name, message in messages(config).items()
        }

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        stacks: dict[str, list[_Body]] = {}
        for document in documents:
            try:
                if document.error is not None:
                    raise ValueError(document.error)
                category = self._categories[category_of(document, self.input, self._categories)]
                bodies = self._bodies(document, category)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            if len(bodies) > 1:
                yield from self._of_windows(category, bodies)
                continue
            if not self.decoding.stacked:
                yield self._request(category, bodies)
                continue
            (body,) = bodies
            stack = stacks.setdefault(category.name, [])
            if stack and sum(len(b.tokens) for b in (*stack, body)) > self._remaining_tokens(
                category, len(stack) + 1
            ):
                yield self._request(category, stack)
                stack = stacks[category.name] = []
            stack.append(body)
            if len(stack) == self.decoding.stacked_documents:
                yield self._request(category, stacks.pop(category.name))
        for name, stack in stacks.items():
            yield self._request(self._categories[name], stack)

    def _ready(self, name: str, message: str) -> _CategoryPrompt:
        category = self.task.categories[name]
        names = [attribute.name for attribute in category.attributes]
        if self.decoding.bare:
            # The token that asks for the value is one behind that which names it.
            colon = self._encode(":")
            keys = [
                key + colon for key in shortest_keys([self._encode(f" {name}") for name in names])
            ]
        else:
            quoted = [json.dumps(name, ensure_ascii=False) for name in names]
            keys = [self._encode(f"{',' if i else '{'}\n{name}:") for i, name in enumerate(quoted)]
        grammars = [self._grammar(name, attribute) for attribute in category.attributes]
        before, behind = pieces(self.tokenizer, message, [DOCUMENTS])
        before += self._encode(self._examples.first(name))
        if not self._open:
            before = before + behind
            behind = []
        ready = _CategoryPrompt(name, category.attributes, before, behind, keys, grammars)
        if self._by_pattern or self._by_schema:
            ready.pattern = (record_schema if self._by_schema else record_pattern)(
                category.attributes
            )
        if self._remaining_tokens(ready) < 16:
            key = "max_new_tokens" if self._writes_keys else "max_value_tokens"
            raise ConfigError(
                f"task.categories.{name}: instruction, {len(keys)} attributes and their "
                "answers leave no room for a "
                f"document in the model's context of {self.context_length} tokens; lower "
                f"decoding.{key} "
                f"({getattr(self.decoding, key)}) or split the category"
            )
        return ready

    def _grammar(self, category: str, attribute: Attribute) -> Grammar:
        """The slot rules of an attribute; those that read alike share them."""
        rules = {
            "type",
            "values",
            "many",
            "max_items",
            "min_items",
            "columns",
            "pattern",
            "required",
        }
        key = attribute.model_dump_json(include=rules)
        if key not in self._of_type:
            where = f"task.categories.{category}: {attribute.name!r}"
            with raised_as(ConfigError, where, ValueError):
                grammar = Grammar(automaton_of(attribute, self.decoding.bare), self._vocabulary)
            if not self._writes_keys:
                _check_length(
                    attribute, grammar, self._vocabulary, self.decoding.max_value_tokens, where
                )
            self._of_type[key] = grammar
        return self._of_type[key]

    def _bodies(self, document: Document, category: _CategoryPrompt) -> list[_Body]:
        """The document's text as ids: cut to what fits, or as windows.

        Raises ValueError where it cannot be used.
        """
        text = text_of(document, list(self.input.text_columns))
        tokens = self._encode(text)
        limit = self._remaining_tokens(category)
        examples = self._examples.nearest(category.name, text, self._encode, limit // 2)
        limit -= len(examples)
        if self.task.max_document_tokens is not None:
            limit = min(limit, self.task.max_document_tokens)
        if len(tokens) <= limit:
            return [_Body(document, text, tokens, examples)]
        if self.task.too_long == "windows":
            cut = windows(text, self._encode, limit)
            return [_Body(document, piece, ids, examples, begin=begin) for begin, piece, ids in cut]
        if self.task.too_long == "refuse":
            raise ValueError(
                f"too long: {len(tokens)} tokens, at most {limit} fit (task.too_long is refuse)"
            )
        return [_Body(document, text, tokens[:limit], examples, truncated=True)]

    def _of_windows(self, category: _CategoryPrompt, bodies: list[_Body]) -> Iterator[Request]:
        """A request a window; the last one to end makes the document's record."""
        answers: dict[int, list[Rated] | str] = {}  # by window; of one that failed the reason

        def collect(window: int, answer: list[Rated] | str) -> list[Record]:
            answers[window] = answer
            if len(answers) < len(bodies):
                return []
            windows_rated = []
            for number, result in sorted(answers.items()):
                if isinstance(result, str):
                    return [
                        Record(
                            bodies[0].document.index,
                            error=f"window {number + 1} of {len(bodies)}: {result}",
                        )
                    ]
                windows_rated.append(result)
            best = merged(category.attributes, windows_rated)
            return [
                self._record(category, [(bodies[window], window, rated) for window, rated in best])
            ]

        for window, body in enumerate(bodies):
            program, read = self._program(category, [body])
            yield Request(
                [body.document.index],
                program,
                lambda answer, window=window, read=read: collect(window, read(answer)[0]),  # type: ignore[misc]
                seed_of(self.decoding.sampling.seed, [body.document.id, window]),
                failed=partial(collect, window),
            )

    def _remaining_tokens(self, category: _CategoryPrompt, documents: int = 1) -> int:
        """Tokens that are left for the text of `documents` documents (all together) in one
        context.
        """
        fixed = len(category.before) + len(category.behind)
        # 4: an id in <document id="12">, a key in the answer.
        frame = len(self._open) + len(self._close) + 4
        if self._writes_keys:
            return (
                self.context_length
                - fixed
                - frame
                - len(category.keys[0])
                - self.decoding.max_new_tokens
            )
        answer = sum(map(len, category.keys)) + len(category.keys) * self.decoding.max_value_tokens
        return self.context_length - fixed - documents * (frame + answer + 8)

    def _request(self, category: _CategoryPrompt, stack: list[_Body]) -> Request:
        program, read = self._program(category, stack)

        def finish(answer: Any) -> list[Record]:
            answers = zip(stack, read(answer), strict=True)
            return [
                self._record(category, [(body, None, value) for value in rated])
                for body, rated in answers
            ]

        seed = seed_of(self.decoding.sampling.seed, [body.document.id for body in stack])
        return Request([body.document.index for body in stack], program, finish, seed)

    def _program(
        self, category: _CategoryPrompt, stack: list[_Body]
    ) -> tuple[Program[Any], Callable[[Any], list[list[Rated]]]]:
        value_tokens = self.decoding.max_value_tokens
        if self._writes_keys or self._by_pattern:
            prompt = Prompt(*self._prompt(category, stack, self._encode("{\n")))
            stops = JsonObjectEnd(
                self.texts, self.ends, [attribute.name for attribute in category.attributes]
            )
            length = self.decoding.max_new_tokens
            if not self._writes_keys:
                length = sum(map(len, category.keys)) + len(category.keys) * value_tokens
            if self._drafter is not None:
                drafts = self.decoding.method_options.draft_tokens
                program: Program[Any] = speculative(prompt, length, stops, self._drafter, drafts)
            else:
                program = autoregressive(prompt, length, stops, pattern=category.pattern)
            return program, lambda answer: [self._read_json(category, answer)]
        slotted = self._slotted(category, stack)
        if self.decoding.method == "guided":
            slots = guided(slotted, value_tokens)
        else:
            slots = hyper_parallel(slotted, value_tokens, self.decoding.isolate == "values")
        return slots, lambda values: self._read_slots(category, len(stack), values)

    def _prompt(
        self, category: _CategoryPrompt, stack: list[_Body], answer: list[int]
    ) -> tuple[list[int], int]:
        """(tokens, how many of them are shared): instruction, documents, and the answer's
        beginning.
        """
        tokens = list(category.before)
        for number, body in enumerate(stack, 1):
            opening = self._open if len(stack) == 1 else self._encode(f'<document id="{number}">\n')
            tokens += [*body.examples, *opening, *body.tokens, *self._close]
        return [*tokens, *category.behind, *answer], len(category.before)

    def _slotted(self, category: _CategoryPrompt, stack: list[_Body]) -> SlottedPrompt:
        """The prompt with the skeleton of every document behind it (section 4.3.1; stacked: section
        4.3.5).
        """
        tokens, shared = self._prompt(category, stack, [])
        slots: list[Slot] = []
        for number in range(1, len(stack) + 1):
            if len(stack) > 1:
                tokens += self._encode(("{" if number == 1 else "},") + f'\n"{number}": ')
            for key, grammar in zip(category.keys, category.grammars, strict=True):
                tokens += key
                slots.append(Slot(len(tokens) - 1, grammar))
        return SlottedPrompt(tokens, slots, shared)

    def _read_slots(
        self, category: _CategoryPrompt, documents: int, values: list[Value]
    ) -> list[list[Rated]]:
        checked: list[Rated] = []
        for attribute, value in zip(category.attributes * documents, values, strict=True):
            choice = value.completion
            text = self._text(value.tokens) if choice is None else choice.encode("latin-1").decode()
            rated = confidence(value.logprobs, choice=choice is not None)
            # A list that took all there was may have been made to end.
            closed = value.closed and not (
                attribute.many and len(value.tokens) == self.decoding.max_value_tokens
            )
            checked.append((check(attribute, text, closed, self.decoding.bare), rated))
        count = len(category.attributes)
        return [checked[n * count : (n + 1) * count] for n in range(documents)]

    def _read_json(self, category: _CategoryPrompt, answer: Continuation) -> list[Rated]:
        text = self._text(answer.tokens)
        starts = self._starts(answer.tokens, len(text))
        checked: list[Rated] = []
        for attribute in category.attributes:
            place = find_value(text, attribute.name)
            if place is None:
                checked.append((CheckedValue("invalid", None, ""), None))
                continue
            start, end, closed = place
            # What no comma or brace ends is whole where the answer is.
            if text[start : start + 1] != '"':
                closed = answer.stopped or text[end:].strip(" ") not in ("", ",")
            covers = [
                p
                for p, a, b in zip(answer.logprobs, starts, starts[1:], strict=False)
                if a < end and b > start
            ]
            checked.append((check(attribute, text[start:end], closed), confidence(covers)))
        return checked

    def _starts(self, tokens: Sequence[int], length: int) -> list[int]:
        """Where each token's text begins in the decoded answer of some length (and, last, where the
        answer ends).
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = [0]
        end = 0
        for token in tokens:
            end += len(decoder.decode(self._vocabulary.texts[token].encode("latin-1")))
            # A part of a character is shown as one.
            starts.append(end + bool(decoder.getstate()[0]))
        # The blank before a text, which some tokenizers do not write.
        lost = max(0, starts[-1] - length)
        return [max(0, start - lost) for start in starts]

    def _record(
        self, category: _CategoryPrompt, answers: list[tuple[_Body, int | None, Rated]]
    ) -> Record:
        """A document's record. answers: of each attribute the body that it was found in, the
        window, the value.
        """
        first = answers[0][0]
        source = span_source(first.document, self.input.text_columns)
        shift = len(source) - len(source.lstrip())
        values = []
        named = {}
        for attribute, (body, window, (checked, rating)) in zip(
            category.attributes, answers, strict=True
        ):
            span = span_of(checked.value, body.text, shift + body.begin, source)
            if rating is not None and self._calibration is not None:
                null = checked.value is None
                stands = span["span"] is not None
                rating = self._calibration.confidence(
                    category.name, attribute.name, rating, null, stands
                )
            if checked.value is not None and rating is not None and rating < self._min_confidence:
                checked = CheckedValue("unsure", None, checked.raw)
            row = value_row(attribute.name, checked.value, checked.status, rating, checked.raw)
            values.append({**row, **span, "window": window})
            named[attribute.name] = checked.value
        record = record_of(self.task.categories[category.name], named)
        columns: dict[str, Any] = {
            "category": category.name,
            "record": json.dumps(record, ensure_ascii=False),
        }
        return Record(
            first.document.index, {**columns, "values": values, "truncated": first.truncated}
        )


def shortest_keys(names: Sequence[list[int]]) -> list[list[int]]:
    """Of each name the shortest beginning that no other has; of one that begins another the
    whole.
    """
    keys: list[list[int]] = []
    for name in names:
        others = [other for other in names if other is not name]
        lengths = range(1, len(name))
        keys.append(
            next(
                (name[:n] for n in lengths if all(name[:n] != other[:n] for other in others)), name
            )
        )
    return keys


def _check_length(
    attribute: Attribute, grammar: Grammar, vocabulary: Vocabulary, limit: int, where: str
) -> None:
    """Raises ConfigError where the longest value does not fit `decoding.max_value_tokens`."""
    # Of a list its longest items, the fewest that it has: one of more is cut behind a whole one.
    if attribute.many:
        shortest = attribute.model_copy(update={"max_items": attribute.min_items or 1})
        grammar = Grammar(automaton_of(shortest), vocabulary)
    needed = grammar.needed()
    if needed >= UNREACHABLE:
        raise ConfigError(
            f"{where}: no value of its pattern {attribute.pattern!r} can be written without quotes"
        )
    if needed > limit:
        raise ConfigError(
            f"{where} needs {needed} tokens for its longest value; decoding.max_value_tokens "
            f"is {limit}"
        )
