"""What task `generation` and a method that writes text know of each other: the `TextMethod` in the
method's file, which its entry in methods/registry.py names; a new method changes nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypd.decoding.program import Program
from raypd.decoding.sampling import Sampling

Decode = Callable[[Sequence[int]], str]
Stops = Callable[[Sequence[int]], bool]


@dataclass
class Prompt:
    tokens: Sequence[int]
    shared: int = 0  # leading ids: an instruction in common with other prompts


@dataclass
class GeneratedText:
    """What an answer says: its text, where that was cut, and what it took."""

    text: str  # without control and end tokens
    # Characters in front of the first place where a thread was cut; None: all came to their own
    # end.
    cut: int | None
    tokens: int  # decoded
    logprobs: list[float]  # one for each decoded token, in any order
    raw: str | None = None  # the text with the method's markup, where it has one
    # The method's own figures, for the column of that name.
    counters: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # one for each flaw of the markup


class TextAnswer(Protocol):
    """What the program of a `TextMethod` returns."""

    def generated(self, decode: Decode) -> GeneratedText:
        """The answer for the task; `decode` makes text of ids, special tokens left out."""


@dataclass(frozen=True)
class TextModel:
    options: Any  # section `decoding` of the configuration
    # Of the run; the engine uses it for every program, unless the method draws for itself.
    sampling: Sampling
    context_length: int  # positions that the model has
    ends: frozenset[int]  # ids that end a text
    # Ids of those that the method's entry requires under these options, in its order.
    control_tokens: tuple[int, ...]
    heads: Any  # Medusa heads on the model's device, where the entry asks for them
    # Ids of a text, in which control strings become their tokens.
    encode: Callable[[str], list[int]]
    decode: Decode  # text of ids, special tokens left out
    # The bytes that every id adds to a text, PASTA's tags included.
    token_bytes: Callable[[], Sequence[bytes]]


class TextMethod(ABC):
    """A decoding method under task `generation`; each has one in its file."""

    def __init__(self, model: TextModel) -> None:
        self.model, self.options = model, model.options

    @abstractmethod
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        """The program that answers one prompt, chat turns put around it, with a `TextAnswer`.

        `seed`: of draws that the method makes itself. `stops`: whether a text is complete; a method
        of several threads ends them at `model.ends`, and the task looks for stop strings in the
        text that is put together.
        """
