"""Generation: prompts or conversations in, text out.

For a list of role/content records, the model writes the next turn. A list of strings is a sequence
of user turns: the model answers each of them, with the earlier answers in its context.
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
from raypd.tasks.chat_tokens import ChatTokens, Turns
from raypd.tasks.json_schema import mismatch
from raypd.tasks.openai_batch import (
    RESPONSE_FORMAT,
    SCHEMA,
    TOO_LONG,
    ChatRequest,
    Parameters,
    read_request,
)
from raypd.tasks.prompting import decode_answer, encode, end_of_turn, end_tokens
from raypd.tasks.stop_strings import StopStrings

# The number of methods and grammars that are kept, one per set of parameters. Every request of a
# batch file may have its own parameters.
_CACHE_SIZE = 64
# The number of tokens at the end of a prompt in which a template may open the reasoning.
_OPENING_TOKENS = 64


@dataclass
class _Chat:
    """A conversation that is being continued.

    Attributes:
        document: The document that asks for it.
        sample: The number of the sample, if several are drawn.
        request: The turns so far and the turns to answer.
        turn: The number of the turn that is answered next.
    """

    document: Document
    sample: int
    request: ChatRequest
    turn: int = 0

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that distinguish the record of this turn from others of the document."""
        return {"sample": self.sample, "turn": self.turn}

    def failure(self, reason: str) -> Record:
        """Return the error record of this turn."""
        return Record(self.document.index, self.columns, reason)

    def after(self, turns: Turns) -> "_Chat":
        """Return the chat after its next turn was answered.

        Args:
            turns: All turns so far, including the answer.
        """
        unanswered = self.request.unanswered[1:]
        request = ChatRequest(turns, unanswered, self.request.parameters)
        return _Chat(self.document, self.sample, request, self.turn + 1)


@dataclass
class _TurnPrompt:
    """The prompt of an answer.

    Attributes:
        turns: The conversation, with the turn to answer.
        tokens: Its ids.
        opens_reasoning: Whether it opens the model's reasoning.
    """

    turns: Turns
    tokens: list[int]
    opens_reasoning: bool


class GenerationTask:
    """The task `generation`."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: PreTrainedModel | None,
        drafter: TextDrafter | None = None,
    ) -> None:
        """Prepare the decoding method.

        Args:
            config: The run's configuration.
            tokenizer: The tokenizer of the model.
            context_length: The number of positions of the model.
            model: The model whose device Medusa heads follow; None leaves them as they were saved.
            drafter: The draft model, if the decoding method uses one.

        Raises:
            ModelError: If the tokenizer lacks control tokens of the method, or the heads do not
                fit the model.
            ConfigError: If the method cannot be used with these options.
        """
        assert isinstance(config.task, GenerationConfig)
        self.config = config
        self.task = config.task
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._chat_tokens = ChatTokens(tokenizer, config.task)
        # Other engines take only a prompt, so no token can be forced before the first.
        self._forces_tokens = config.engine.kind == "raypd" and config.model.endpoint is None
        self._token_bytes = token_bytes(tokenizer)
        self._end_tokens = end_tokens(tokenizer)
        self._text_model = self._make_text_model(model, drafter)
        spec = REGISTRY[config.decoding.method]
        self._method_class: type[TextMethod] = resolve_name(spec.text_method)
        self._method = lru_cache(_CACHE_SIZE)(self._method_for)
        self._grammar = lru_cache(_CACHE_SIZE)(self._grammar_for)
        # A method that cannot be used is reported before any document is read.
        self._method(config.decoding.max_new_tokens, self._text_model.sampling)

    def _make_text_model(
        self, model: PreTrainedModel | None, drafter: TextDrafter | None
    ) -> TextModel:
        options = self.config.decoding
        sampling = options.sampling
        tokenizer = self.tokenizer
        spec = REGISTRY[options.method]
        control_tokens = []
        for token in spec.required_tokens(options.method_options):
            control_tokens.append(control_token(tokenizer, token, self.config.model.name))
        heads = None
        if spec.heads:
            heads = load_heads(str(options.heads), model)
        return TextModel(
            options=options,
            context_length=self.context_length,
            ends=self._end_tokens,
            sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p),
            control_tokens=tuple(control_tokens),
            heads=heads,
            encode=partial(encode, tokenizer, special=True),
            token_bytes=partial(markup_bytes, tokenizer),
            decode=partial(_decoded, tokenizer, self._end_tokens, _reasoning_tokens(tokenizer)),
            next_turn=self._chat_tokens.next_turn,
            drafter=drafter,
        )

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield a request for the first turn of each sample; further turns follow from it."""
        for document in documents:
            try:
                if document.error is not None:
                    raise ValueError(document.error)
                request = read_request(document, self.task, self.config.decoding)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            for sample in range(request.parameters.samples):
                yield self._next(_Chat(document, sample, request))

    @cached_property
    def end(self) -> int:
        """The id that an answer is trained to end with; raises ModelError if there is none."""
        return end_of_turn(self.tokenizer)

    def tokens_of(self, turns: Turns) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins."""
        return self._chat_tokens.conversation(turns)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer)

    def _method_for(self, max_new_tokens: int, sampling: Sampling) -> TextMethod:
        options = self._text_model.options.model_copy(update={"max_new_tokens": max_new_tokens})
        model = dataclasses.replace(self._text_model, options=options, sampling=sampling)
        return self._method_class(model)

    def _grammar_for(self, pattern: str | None, limit: int) -> Bounded:
        """Return what restricts answers of `limit` tokens to JSON.

        Args:
            pattern: The regular expression of a schema; None permits any JSON object.
            limit: The maximum number of tokens of an answer.

        Raises:
            ValueError: The pattern cannot be decoded, or not within the limit.
        """
        try:
            grammar = Grammar(json_object(pattern), self._vocabulary)
        except ValueError:
            raise ValueError(
                f"{SCHEMA}: too large, or with a pattern that cannot be decoded"
            ) from None
        if pattern is None:
            # The open parts of an arbitrary object have no bound, so an answer that is too long is
            # cut.
            return Bounded(grammar, None)
        if grammar.distance() > limit:
            raise ValueError(
                f"{SCHEMA}: its shortest answer has {grammar.distance()} tokens, but only {limit} "
                "may be written"
            )
        return Bounded(grammar, limit)

    def _next(self, chat: _Chat) -> Request | Record:
        """Return the request of a chat's next turn, or its error record."""
        parameters = chat.request.parameters
        top_k = self.config.decoding.sampling.top_k
        sampling = Sampling(parameters.temperature, top_k, parameters.top_p)
        method = self._method(parameters.max_new_tokens, sampling)
        prompt = self._prompt(chat, method)
        if isinstance(prompt, Record):
            return prompt
        seed = self._seed(chat)
        try:
            program = self._program(method, parameters, prompt.tokens, seed)
        except ValueError as error:
            return chat.failure(str(error))

        def finish(answer: TextAnswer) -> list[Record | Request]:
            return self._finish(chat, prompt, answer)

        def failed(reason: str) -> list[Record]:
            return [chat.failure(reason)]

        return Request([chat.document.index], program, finish, seed, failed, sampling)

    def _prompt(self, chat: _Chat, method: TextMethod) -> _TurnPrompt | Record:
        """Return the prompt of a chat's next turn, or an error record if it is too long."""
        parameters = chat.request.parameters
        content = chat.request.unanswered[0]
        turns = [*chat.request.turns, {"role": "user", "content": content}]
        # The method may add to the user's turn, but later turns see it without the addition.
        user_turn = {"role": "user", "content": method.user_turn(content)}
        tokens = self.tokens_of([*chat.request.turns, user_turn])
        limit = self.context_length - parameters.max_new_tokens - method.extra_positions()
        if limit < 1 or (len(tokens) > limit and self.task.too_long == "refuse"):
            return chat.failure(
                f"{TOO_LONG}: {len(tokens)} tokens, at most {max(0, limit)} leave room for "
                f"{self._limit_key} ({parameters.max_new_tokens}) in the model's context of "
                f"{self.context_length}"
            )
        tokens = tokens[-limit:]
        # An answer that is restricted to a schema has no reasoning.
        opened = False
        if not parameters.format.json:
            opened = opens_reasoning(self.tokenizer.decode(tokens[-_OPENING_TOKENS:]))
        return _TurnPrompt(turns, tokens, opened)

    @property
    def _limit_key(self) -> str:
        """The key with which a user sets how many tokens an answer may have."""
        return "max_tokens" if self.task.openai else "decoding.max_new_tokens"

    def _seed(self, chat: _Chat) -> int:
        seed = chat.request.parameters.seed
        if seed is not None:
            # A request's own seed alone determines its draws.
            return seed_of(seed, [chat.sample, chat.turn])
        run_seed = self.config.decoding.sampling.seed
        return seed_of(run_seed, [chat.document.id, chat.sample, chat.turn])

    def _program(
        self, method: TextMethod, parameters: Parameters, tokens: list[int], seed: int
    ) -> Program[Any]:
        stops = StopStrings(self._token_bytes, self._end_tokens, parameters.stop)
        if not parameters.format.json:
            return method.program(Prompt(tokens), stops, seed)
        grammar = self._grammar(parameters.format.pattern, parameters.max_new_tokens)
        return autoregressive(
            Prompt(tokens),
            parameters.max_new_tokens,
            lambda answer: grammar.stops(answer) or stops(answer),
            grammar.allowed_token_ids,
            parameters.format.pattern or ANY_OBJECT,
            grammar.forced if self._forces_tokens else _nothing_forced,
        )

    def _finish(
        self, chat: _Chat, prompt: _TurnPrompt, answer: TextAnswer
    ) -> list[Record | Request]:
        """Return the record of an answer, and the request of the next turn if there is one."""
        parameters = chat.request.parameters
        generated = answer.generated(self._text_model.decode)
        text, is_complete = _until_stop(generated, parameters.stop)
        raw = generated.raw
        # An endpoint has already removed the reasoning.
        if self.config.model.endpoint is None:
            span = answer_range(text, prompt.opens_reasoning)
            if span is None:
                return [self._without_answer(chat, is_complete)]
            begin, end = span
            if (begin, end) != (0, len(text)) and raw is None:
                raw = text
            text = text[begin:end]
        if parameters.format.json and is_complete:
            reason = mismatch(text, parameters.format.schema)
            if reason is not None:
                return [chat.failure(f"{RESPONSE_FORMAT}: the answer does not match it: {reason}")]
        counters = {"prompt_tokens": len(prompt.tokens), **generated.counters}
        columns = {
            **chat.columns,
            "text": text,
            "finish_reason": "stop" if is_complete else "length",
            "tokens": generated.tokens,
            "confidence": confidence(generated.logprobs),
            "raw": raw,
            "counters": json.dumps(counters),
            "warnings": generated.warnings,
        }
        results: list[Record | Request] = [Record(index=chat.document.index, columns=columns)]
        following = chat.after([*prompt.turns, {"role": "assistant", "content": text}])
        if following.request.unanswered:
            results.append(self._next(following))
        return results

    def _without_answer(self, chat: _Chat, is_complete: bool) -> Record:
        """Return the error record of an answer that consists only of reasoning."""
        reason = "reasoning without an answer"
        if not is_complete:
            limit = chat.request.parameters.max_new_tokens
            reason += (
                f": its {limit:,} tokens ended before the reasoning did; raise {self._limit_key}"
            )
        return chat.failure(reason)


def _nothing_forced(tokens: Sequence[int]) -> Sequence[int]:
    return ()


def _reasoning_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens that mark a model's reasoning; most models have none."""
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return frozenset(token for token, text in special if is_mark(text))


def _decoded(
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    marks: frozenset[int],
    tokens: Sequence[int],
) -> str:
    """Return the text of ids without special tokens and ends, but with the marks of reasoning."""
    if marks.isdisjoint(tokens):
        return decode_answer(tokenizer, ends, tokens)
    hidden = frozenset([*tokenizer.all_special_ids, *ends]) - marks
    shown = [token for token in tokens if token not in hidden]
    return str(tokenizer.decode(shown, skip_special_tokens=False))


def _until_stop(generated: GeneratedText, stops: Sequence[str]) -> tuple[str, bool]:
    """Cut a text before its first stop string.

    Returns:
        The text, and whether it is complete: no thread in it was cut off.
    """
    offsets = [generated.text.find(stop) for stop in stops]
    end = min((offset for offset in offsets if offset >= 0), default=None)
    text = generated.text[:end]
    if generated.cut is None:
        return text, True
    return text, end is not None and end < generated.cut
