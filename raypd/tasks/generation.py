"""Generation: prompts or conversations in, text out.

Of a list of role/content records the next turn is written; a list of strings are a user's turns:
each is answered, with the answers before it in its context.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raypd.config import GenerationConfig, RunConfig
from raypd.decoding import (
    ANY_OBJECT,
    REGISTRY,
    Bounded,
    GeneratedText,
    Grammar,
    Program,
    Prompt,
    Sampling,
    TextAnswer,
    TextDrafter,
    TextMethod,
    TextModel,
    Vocabulary,
    autoregressive,
)
from raypd.models import (
    answer_range,
    control_token,
    is_mark,
    load_heads,
    markup_bytes,
    opens_reasoning,
    token_bytes,
)
from raypd.tasks.automata import json_object, vocabulary_of
from raypd.tasks.base import Document, Record, Request, confidence, seed_of
from raypd.tasks.json_schema import mismatch
from raypd.tasks.openai_batch import (
    RESPONSE_FORMAT,
    SCHEMA,
    TOO_LONG,
    ChatRequest,
    Parameters,
    read_request,
)
from raypd.tasks.prompting import decode_answer, encode, end_of_turn, end_tokens, rendered

_MARK = "\u241eturn {}\u241e"  # stands for the text of a turn while the chat template is applied
Turns = list[dict[str, str]]  # of role and content
_METHODS = 64  # kept: one for every way that documents are to be answered in


@dataclass
class _Chat:
    document: Document
    sample: int
    request: ChatRequest  # its turns so far
    turn: int = 0


class StopStrings:
    """Says that an answer is complete: at an end token, or at a stop string, which may begin in an
    earlier token.
    """

    def __init__(self, table: list[bytes], ends: frozenset[int], stop: Sequence[str]) -> None:
        self._table = table
        self._ends = ends
        self._stops = [text.encode() for text in stop]
        self._longest = max(map(len, self._stops), default=0)
        self._tail = b""
        self._read = 0

    def __call__(self, tokens: Sequence[int]) -> bool:
        for token in tokens[self._read :]:
            if token in self._ends:
                return True
            if self._stops:
                self._tail += self._table[token]
                if any(stop in self._tail for stop in self._stops):
                    return True
                self._tail = self._tail[-self._longest :]
        self._read = len(tokens)
        return False


class GenerationTask:
    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: PreTrainedModel | None,
        drafter: TextDrafter | None = None,
    ) -> None:
        assert isinstance(config.task, GenerationConfig)
        self.config = config
        self.task = config.task
        self.tokenizer = tokenizer
        self.context_length = context_length
        # Others take a prompt alone.
        self._here = config.engine.kind == "raypd" and config.model.endpoint is None
        self._bytes = token_bytes(tokenizer)
        self._ends = end_tokens(tokenizer)
        options = config.decoding
        spec = REGISTRY[config.decoding.method]
        self._text_model = TextModel(
            options=options,
            context_length=context_length,
            ends=self._ends,
            sampling=Sampling(
                options.sampling.temperature, options.sampling.top_k, options.sampling.top_p
            ),
            control_tokens=tuple(
                control_token(tokenizer, t, config.model.name)
                for t in spec.required_tokens(options.method_options)
            ),
            heads=load_heads(str(options.heads), model) if spec.heads else None,
            encode=partial(encode, tokenizer, special=True),
            token_bytes=lambda: markup_bytes(tokenizer),
            decode=partial(_decoded, tokenizer, self._ends, _reasoning_tokens(tokenizer)),
            next_turn=self._next_turn,
            drafter=drafter,
        )
        self._method_class: type[TextMethod] = resolve_name(spec.text_method)
        self._method = lru_cache(_METHODS)(self._method_for)
        self._rules = lru_cache(_METHODS)(self._rules_for)
        # What cannot be had is said at once.
        self._method(config.decoding.max_new_tokens, self._text_model.sampling)

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        for document in documents:
            try:
                if document.error is not None:
                    raise ValueError(document.error)
                request = read_request(document, self.config)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            for sample in range(request.parameters.samples):
                yield self._next(_Chat(document, sample, request))

    @cached_property
    def end(self) -> int:
        """The id that an answer is trained to end with. Raises ModelError where there is none."""
        return end_of_turn(self.tokenizer)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer)

    def _rules_for(self, pattern: str | None, limit: int) -> Bounded:
        """What holds answers of `limit` tokens to a schema's pattern, or to any JSON object.

        Raises ValueError.
        """
        try:
            grammar = Grammar(json_object(pattern), self._vocabulary)
        except ValueError:
            raise ValueError(
                f"{SCHEMA}: too large, or with a pattern that cannot be decoded"
            ) from None
        if pattern is None:  # no bound on what is open: an answer that is too long is cut
            return Bounded(grammar, None)
        if grammar.distance() > limit:
            raise ValueError(
                f"{SCHEMA}: its shortest answer takes {grammar.distance()} tokens, {limit} may "
                "be written"
            )
        return Bounded(grammar, limit)

    def _program(
        self, method: TextMethod, parameters: Parameters, tokens: list[int], seed: int
    ) -> Program[Any]:
        stops = StopStrings(self._bytes, self._ends, parameters.stop)
        if not parameters.json:
            return method.program(Prompt(tokens), stops, seed)
        rules = self._rules(parameters.pattern, parameters.max_new_tokens)
        return autoregressive(
            Prompt(tokens),
            parameters.max_new_tokens,
            lambda answer: rules.stops(answer) or stops(answer),
            rules.allowed_token_ids,
            parameters.pattern or ANY_OBJECT,
            rules.forced if self._here else lambda answer: (),
        )

    def _method_for(self, max_new_tokens: int, sampling: Sampling) -> TextMethod:
        options = self._text_model.options.model_copy(update={"max_new_tokens": max_new_tokens})
        return self._method_class(
            dataclasses.replace(self._text_model, options=options, sampling=sampling)
        )

    def _next(self, chat: _Chat) -> Request | Record:
        parameters = chat.request.parameters
        prompt = chat.request.unanswered[0]
        failed = partial(Record, chat.document.index, {"sample": chat.sample, "turn": chat.turn})
        sampling = Sampling(
            parameters.temperature, self.config.decoding.sampling.top_k, parameters.top_p
        )
        method = self._method(parameters.max_new_tokens, sampling)
        turns = [*chat.request.turns, {"role": "user", "content": prompt}]
        tokens = self.tokens_of(
            [*chat.request.turns, {"role": "user", "content": method.user_turn(prompt)}]
        )
        room = self.context_length - parameters.max_new_tokens - method.extra_positions()
        if room < 1 or (len(tokens) > room and self.task.too_long == "refuse"):
            key = "max_tokens" if self.task.openai else "decoding.max_new_tokens"
            reason = (
                f"{TOO_LONG}: {len(tokens)} tokens, at most {max(0, room)} leave room for {key} "
            )
            reason += (
                f"({parameters.max_new_tokens}) in the model's context of {self.context_length}"
            )
            return failed(reason)
        tokens = tokens[-room:]
        if parameters.seed is None:
            seed = seed_of(
                self.config.decoding.sampling.seed, [chat.document.id, chat.sample, chat.turn]
            )
        else:
            seed = seed_of(parameters.seed, [chat.sample, chat.turn])
        try:
            program = self._program(method, parameters, tokens, seed)
        except ValueError as error:
            return failed(str(error))
        # A template may open the reasoning, and an answer held to a schema has none.
        opened = not parameters.json and opens_reasoning(self.tokenizer.decode(tokens[-64:]))

        def finish(answer: TextAnswer) -> list[Record | Request]:
            return self._finish(chat, turns, len(tokens), answer, opened)

        return Request(
            [chat.document.index], program, finish, seed, lambda why: [failed(why)], sampling
        )

    def tokens_of(self, turns: Turns) -> list[int]:
        """Ids of a conversation; control strings in the text of a turn stay text."""
        if not (self.task.chat_template and self.tokenizer.chat_template):
            text = (self.tokenizer.bos_token or "") + "\n\n".join(turn["content"] for turn in turns)
            return encode(self.tokenizer, text, special=True)
        marks = [_MARK.format(number) for number in range(len(turns))]
        marked = [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)]
        text = rendered(self.tokenizer, marked, thinking=self.task.thinking)
        tokens: list[int] = []
        for turn, mark in zip(turns, marks, strict=True):
            # A template may leave out what it does not know, such as a system turn.
            if mark in text:
                before, _, text = text.partition(mark)
                tokens += encode(self.tokenizer, before, special=True)
                tokens += encode(self.tokenizer, turn["content"], special=False)
        return tokens + encode(self.tokenizer, text, special=True)

    def _next_turn(self, content: str, answer: str) -> list[int]:
        """Return ids that end the model's turn, ask for `content`, and begin with `answer`."""
        between, behind = self._around_turn
        return [
            *between,
            *encode(self.tokenizer, content, special=False),
            *behind,
            *encode(self.tokenizer, answer, special=False),
        ]

    @cached_property
    def _around_turn(self) -> tuple[list[int], list[int]]:
        """Ids before and behind the text of a user's turn that follows on a turn of the model."""
        if not (self.task.chat_template and self.tokenizer.chat_template):
            blank = encode(self.tokenizer, "\n\n", special=True)
            return blank, blank
        answered = _MARK.format(0)
        asked = _MARK.format(1)
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": answered},
            {"role": "user", "content": asked},
        ]
        text = rendered(self.tokenizer, turns, thinking=self.task.thinking)
        between, _, behind = text.partition(answered)[2].partition(asked)
        return (
            encode(self.tokenizer, between, special=True),
            encode(self.tokenizer, behind, special=True),
        )

    def _finish(
        self, chat: _Chat, turns: Turns, prompt_tokens: int, answer: TextAnswer, opened: bool
    ) -> list[Record | Request]:
        """The record of an answer, and the request of the next turn.

        Args:
            chat: The conversation and its turn.
            turns: What stands before the answer.
            prompt_tokens: Tokens of the prompt.
            answer: What the method decoded.
            opened: Whether the prompt has opened the model's reasoning.
        """
        generated = answer.generated(self._text_model.decode)
        parameters = chat.request.parameters
        text, stopped = _cut(generated, parameters.stop)
        raw = generated.raw
        # An endpoint has taken the reasoning off already.
        if self.config.model.endpoint is None:
            span = answer_range(text, opened)
            if span is None:
                return [self._without_answer(chat, stopped)]
            begin, end = span
            if (begin, end) != (0, len(text)) and raw is None:
                raw = text
            text = text[begin:end]
        if parameters.json and stopped:
            reason = mismatch(text, parameters.schema)
            if reason is not None:
                where = {"sample": chat.sample, "turn": chat.turn}
                error = f"{RESPONSE_FORMAT}: the answer does not match it: {reason}"
                return [Record(chat.document.index, where, error)]
        columns = {
            "sample": chat.sample,
            "turn": chat.turn,
            "text": text,
            "finish_reason": "stop" if stopped else "length",
            "tokens": generated.tokens,
            "confidence": confidence(generated.logprobs),
            "raw": raw,
            "counters": json.dumps({"prompt_tokens": prompt_tokens, **generated.counters}),
            "warnings": generated.warnings,
        }
        done: list[Record | Request] = [Record(index=chat.document.index, columns=columns)]
        if unanswered := chat.request.unanswered[1:]:
            turns = [*turns, {"role": "assistant", "content": text}]
            request = ChatRequest(turns, unanswered, chat.request.parameters)
            done.append(self._next(_Chat(chat.document, chat.sample, request, chat.turn + 1)))
        return done

    def _without_answer(self, chat: _Chat, stopped: bool) -> Record:
        """The error row of an answer that is reasoning to its end."""
        reason = "reasoning without an answer"
        if not stopped:
            limit = chat.request.parameters.max_new_tokens
            key = "max_tokens" if self.task.openai else "decoding.max_new_tokens"
            reason += f": its {limit:,} tokens ended before the reasoning did; raise {key}"
        columns = {"sample": chat.sample, "turn": chat.turn}
        return Record(chat.document.index, columns, reason)


def _reasoning_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens that mark a model's reasoning; most models have none that is special."""
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return frozenset(id for id, text in special if is_mark(text))


def _decoded(
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    marks: frozenset[int],
    tokens: Sequence[int],
) -> str:
    """Return the text of ids without special tokens and ends, but with marks of reasoning."""
    if marks.isdisjoint(tokens):
        return decode_answer(tokenizer, ends, tokens)
    special = frozenset([*tokenizer.all_special_ids, *ends]) - marks
    shown = [token for token in tokens if token not in special]
    return str(tokenizer.decode(shown, skip_special_tokens=False))


def _cut(generated: GeneratedText, stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop string, and whether all that stands in it came to its end."""
    end = min((place for stop in stops if (place := generated.text.find(stop)) >= 0), default=None)
    return generated.text[:end], generated.cut is None or (end is not None and end < generated.cut)
