"""The methods that write text, seen alike by the generation task: a program, and what its answer says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from raypd.config import DecodingConfig, RunConfig
from raypd.decoding.methods.apar import AparAnswer, apar
from raypd.decoding.methods.autoregressive import Continuation, Prompt, autoregressive
from raypd.decoding.methods.pasta import PastaAnswer, pasta
from raypd.decoding.methods.space import SpaceAnswer, space
from raypd.decoding.program import Program
from raypd.decoding.sampling import Sampling
from raypd.models.control_tokens import CHILD, FORK, MASK, control_token, markup_bytes

Stops = Callable[[Sequence[int]], bool]


@dataclass
class Text:
    """What an answer says: its text, whether it came to its end, and what it took."""

    text: str
    stopped: bool
    tokens: int
    logprobs: list[float]
    raw: str | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Writer(Protocol):
    """A decoding method that writes text."""

    def most_positions(self, decoding: DecodingConfig) -> int:
        """Positions behind the prompt that an answer may take."""

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        """A program for one prompt. `stops` says when a text is complete, `ends` are the tokens that end one."""

    def read(self, answer: Any) -> Text:
        """The answer that the program returned."""


class Autoregressive:
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decoding, self.tokenizer = config.decoding, tokenizer

    def most_positions(self, decoding: DecodingConfig) -> int:
        return decoding.max_new_tokens

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return autoregressive(prompt, self.decoding.max_new_tokens, stops)

    def read(self, answer: Continuation) -> Text:
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return Text(text, answer.stopped, len(answer.tokens), answer.logprobs)


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


class Apar(Autoregressive):
    """Stop strings are looked for in the text that is put together, not in a single thread."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.fork, self.child = (control_token(tokenizer, name, config.model.name) for name in (FORK, CHILD))

    def program(self, prompt: Prompt, stops: Stops, ends: frozenset[int], seed: int) -> Program[Any]:
        return apar(prompt, self.decoding.max_new_tokens, self.fork, self.child, ends)

    def read(self, answer: Any) -> Text:
        assert isinstance(answer, AparAnswer)
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        counters = {
            "threads": answer.threads,
            "refused_forks": answer.refused_forks,
            "apar": asdict(answer.cost),
            "flattened": asdict(answer.flattened),
        }
        return Text(text, answer.stopped, len(answer.tokens), answer.logprobs, counters=counters)


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
            max_position=self.context_length,
        )

    def read(self, answer: Any) -> Text:
        assert isinstance(answer, PastaAnswer)
        counters = {
            "threads": len(answer.threads),
            "steps": answer.steps,
            "longest_path": answer.longest_path,
            "parallelism": answer.parallelism,
            "theoretical_speedup": answer.speedup(),
        }
        logprobs = [logprob for thread in answer.threads for logprob in thread.logprobs]
        return Text(answer.text, answer.stopped, answer.tokens, logprobs, answer.raw, counters, list(answer.warnings))


def writer(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> Writer:
    """The writer of `decoding.method`. Raises ModelError where the model lacks what the method needs."""
    method = config.decoding.method
    if method == "space":
        return Space(config, tokenizer)
    if method == "apar":
        return Apar(config, tokenizer)
    if method == "pasta":
        return Pasta(config, tokenizer, context_length)
    return Autoregressive(config, tokenizer)
