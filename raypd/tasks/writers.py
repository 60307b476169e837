"""The methods that write text, seen alike by the generation task: a program, and what its answer says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raypd.config import DecodingConfig, GenerationConfig, RunConfig
from raypd.decoding.assisted import AssistedAnswer
from raypd.decoding.methods.apar import AparAnswer, apar, restore
from raypd.decoding.methods.apar_medusa import AparMedusaAnswer, apar_medusa
from raypd.decoding.methods.autoregressive import Continuation, Prompt, autoregressive
from raypd.decoding.methods.medusa import MedusaAnswer, medusa
from raypd.decoding.methods.pasta import PastaAnswer, pasta
from raypd.decoding.methods.registry import CHILD, FORK, MASK
from raypd.decoding.methods.skeleton_of_thought import (
    OUTLINE_REQUEST,
    POINT_REQUEST,
    Point,
    SkeletonAnswer,
    skeleton_of_thought,
)
from raypd.decoding.methods.space import SpaceAnswer, space
from raypd.decoding.program import Program
from raypd.decoding.sampling import Sampling
from raypd.models.control_tokens import control_token, markup_bytes
from raypd.models.medusa_heads import load_heads
from raypd.tasks.prompting import encode, end_tokens, rendered

Stops = Callable[[Sequence[int]], bool]


@dataclass
class Text:
    """What an answer says: its text, where that was cut, and what it took.

    cut: characters of the text in front of the first place where a thread was cut; None: all came to their own end.
    """

    text: str
    cut: int | None
    tokens: int
    logprobs: list[float]
    raw: str | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Writer(Protocol):
    """A decoding method that writes text."""

    def request(self, content: str) -> str:
        """What the user's turn says when its text is `content`."""

    def most_positions(self, decoding: DecodingConfig) -> int:
        """Positions behind the prompt that an answer may take."""

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        """A program for one prompt. `stops` says when a text is complete, `ends` are the tokens that end one."""

    def read(self, answer: Any) -> Text:
        """The answer that the program returned."""


class Autoregressive:
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decoding, self.tokenizer = config.decoding, tokenizer

    def request(self, content: str) -> str:
        return content

    def most_positions(self, decoding: DecodingConfig) -> int:
        return decoding.max_new_tokens

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return autoregressive(prompt, self.decoding.max_new_tokens, stops)

    def read(self, answer: Continuation) -> Text:
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return Text(text, None if answer.stopped else len(text), len(answer.tokens), answer.logprobs)


class Space(Autoregressive):
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.mask = control_token(tokenizer, MASK, config.model.name) if config.decoding.mask_tokens else 0
        sampling = config.decoding.sampling
        self.sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p)

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        decoding = self.decoding
        return space(
            prompt, decoding.max_new_tokens, decoding.mask_tokens, self.mask, self.sampling, seed=seed, stops=stops
        )

    def read(self, answer: Continuation) -> Text:
        assert isinstance(answer, SpaceAnswer)
        said = super().read(answer)
        said.counters = {
            "steps": answer.steps,
            "accepted": answer.accepted,
            "rejected": answer.rejected,
            "average_accepted_tokens": answer.average_accepted_tokens,
        }
        return said


class Speculative(Autoregressive):
    """An autoregressive program, which AssistedEngine answers."""

    def read(self, answer: Continuation) -> Text:
        assert isinstance(answer, AssistedAnswer)
        said = super().read(answer)
        said.counters = {
            "steps": answer.steps,
            "drafted": answer.drafted,
            "accepted": answer.accepted,
            "average_accepted_tokens": answer.average_accepted_tokens,
        }
        return said


class Apar(Autoregressive):
    """Stop strings are looked for in the text that is put together, not in a single thread."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.fork, self.child = (control_token(tokenizer, name, config.model.name) for name in (FORK, CHILD))
        self.ends = end_tokens(tokenizer)

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        limits = self.decoding
        return apar(prompt, limits.max_new_tokens, self.fork, self.child, ends, limits.max_threads)

    def read(self, answer: Any) -> Text:
        assert isinstance(answer, AparAnswer)
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        counters = {
            "threads": answer.threads,
            "unstarted_threads": answer.unstarted_threads,
            "apar": asdict(answer.cost),
            "flattened": asdict(answer.flattened),
        }
        if isinstance(answer, AparMedusaAnswer):
            counters["average_accepted_tokens"] = answer.average_accepted_tokens
        else:
            counters["longest_path"] = answer.cost.steps  # a pass decodes a token of every thread
        return Text(text, self._cut(answer), len(answer.tokens), answer.logprobs, counters=counters)

    def _cut(self, answer: AparAnswer) -> int | None:
        """Characters of the text up to the end of the first paragraph in which a thread was cut."""
        if answer.stopped:
            return None
        before: list[int] = []
        for paragraph in restore(answer.root):
            before += [token for token in paragraph.tokens if token not in {self.fork, self.child, *self.ends}]
            forked = paragraph.first_child is not None
            if not forked and not self.ends.intersection(paragraph.tokens[-1:]):
                break
        return len(self.tokenizer.decode(before, skip_special_tokens=True))


class Pasta(Autoregressive):
    """Stop strings are looked for in the text that is put together, not in a single thread."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        super().__init__(config, tokenizer)
        self.texts, self.context_length = markup_bytes(tokenizer), context_length

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return pasta(
            prompt,
            self.decoding.max_new_tokens,
            self.texts,
            lambda text: list(self.tokenizer(text, add_special_tokens=False)["input_ids"]),
            ends,
            promised=self.decoding.promised_length,
            fixed_length=self.decoding.fixed_length,
            max_async_tokens=self.decoding.max_async_tokens,
            max_threads=self.decoding.max_threads,
            max_position=self.context_length,
        )

    def read(self, answer: Any) -> Text:
        assert isinstance(answer, PastaAnswer)
        counters = {
            "threads": len(answer.threads),
            "steps": answer.steps,
            "longest_path": answer.longest_path,
            "parallelism": answer.parallelism,
        }
        logprobs = [logprob for thread in answer.threads for logprob in thread.logprobs]
        return Text(answer.text, answer.cut, answer.tokens, logprobs, answer.raw, counters, list(answer.warnings))


class Medusa(Autoregressive):
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> None:
        super().__init__(config, tokenizer)
        self.heads = load_heads(str(config.decoding.heads), model)

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return medusa(prompt, self.decoding.max_new_tokens, self.heads, stops=stops)

    def read(self, answer: Continuation) -> Text:
        assert isinstance(answer, MedusaAnswer)
        said = super().read(answer)
        said.counters = {
            "steps": answer.steps,
            "accepted": answer.accepted,
            "average_accepted_tokens": answer.average_accepted_tokens,
        }
        return said


class AparMedusa(Apar):
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> None:
        super().__init__(config, tokenizer)
        self.heads = load_heads(str(config.decoding.heads), model)

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        limits = self.decoding
        return apar_medusa(
            prompt, limits.max_new_tokens, self.fork, self.child, ends, self.heads, max_threads=limits.max_threads
        )


class SkeletonOfThought(Autoregressive):
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        first, second = "\u241efirst\u241e", "\u241esecond\u241e"
        text = f"{first}\n\n{second}\n\n"
        assert isinstance(config.task, GenerationConfig)
        if config.task.chat_template and tokenizer.chat_template:
            roles = (("user", "?"), ("assistant", first), ("user", second))
            turns = [{"role": role, "content": content} for role, content in roles]
            text = rendered(tokenizer, turns, thinking=config.task.thinking)
        between, _, behind = text.partition(first)[2].partition(second)
        self.between, self.behind = (encode(tokenizer, part, special=True) for part in (between, behind))

    def request(self, content: str) -> str:
        return OUTLINE_REQUEST.format(question=content)

    def most_positions(self, decoding: DecodingConfig) -> int:
        return decoding.max_new_tokens + len(self._expand(Point(999, "")))

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return skeleton_of_thought(
            prompt,
            self.decoding.max_new_tokens,
            self._expand,
            lambda tokens: str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)),
            ends,
        )

    def _expand(self, point: Point) -> list[int]:
        request = encode(self.tokenizer, POINT_REQUEST.format(index=point.number), special=False)
        return [*self.between, *request, *self.behind]

    def read(self, answer: Any) -> Text:
        assert isinstance(answer, SkeletonAnswer)
        logprobs = [*answer.outline_logprobs, *(p for point in answer.points for p in point.logprobs)]
        counters = {"points": len(answer.points), "steps": answer.steps, "longest_path": answer.longest_path}
        return Text(answer.text, answer.cut, answer.content_tokens, logprobs, counters=counters)


def writer(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int, model: PreTrainedModel | None = None
) -> Writer:
    """The writer of `decoding.method`. Raises ModelError where the model lacks what the method needs."""
    return _WRITERS[config.decoding.method](config, tokenizer, context_length, model)


_WRITERS: dict[str, Callable[[RunConfig, PreTrainedTokenizerBase, int, PreTrainedModel | None], Writer]] = {
    "autoregressive": lambda config, tokenizer, *_: Autoregressive(config, tokenizer),
    "apar": lambda config, tokenizer, *_: Apar(config, tokenizer),
    "pasta": lambda config, tokenizer, context_length, _: Pasta(config, tokenizer, context_length),
    "space": lambda config, tokenizer, *_: Space(config, tokenizer),
    "medusa": lambda config, tokenizer, _, model: Medusa(config, tokenizer, model),
    "apar_medusa": lambda config, tokenizer, _, model: AparMedusa(config, tokenizer, model),
    "skeleton_of_thought": lambda config, tokenizer, *_: SkeletonOfThought(config, tokenizer),
    "speculative": lambda config, tokenizer, *_: Speculative(config, tokenizer),
}
