"""The contract between task `generation` and the methods that write text.

A method implements `TextMethod` in its own file, and its entry in methods/registry.py names the
class. A new method needs nothing else.
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
    """The token ids of a prompt."""

    tokens: Sequence[int]
    # The number of leading tokens in common with other prompts, such as those of an instruction.
    shared: int = 0


@dataclass
class GeneratedText:
    """A decoded text and what it cost."""

    # The text without control tokens and end tokens.
    text: str
    # Characters before the first point where a thread was cut off; None if none was.
    cut: int | None
    # Number of decoded tokens.
    tokens: int
    # One log-probability per decoded token, in any order.
    logprobs: list[float]
    # The text with the method's markup, if the method has any.
    raw: str | None = None
    # The method's own figures, for the column `counters`.
    counters: dict[str, Any] = field(default_factory=dict)
    # One message per flaw in the markup.
    warnings: list[str] = field(default_factory=list)


class TextAnswer(Protocol):
    """What the program of a `TextMethod` returns."""

    def generated(self, decode: Decode) -> GeneratedText:
        """Return the answer as text.

        Args:
            decode: Turns token ids into text and leaves out special tokens.
        """


@dataclass(frozen=True)
class TextModel:
    """What a text method may know about the model and the run."""

    # Section `decoding` of the configuration.
    options: Any
    # The run's sampling. The engine applies it to every program, unless a method draws by itself.
    sampling: Sampling
    # Number of positions that the model supports.
    context_length: int
    # Ids of the tokens that end a text.
    ends: frozenset[int]
    # Ids of the control tokens that the method's registry entry requires under these options, in
    # the order of that entry.
    control_tokens: tuple[int, ...]
    # Medusa heads on the model's device, if the method's registry entry asks for them.
    heads: Any
    # Turns text into ids; control strings become their control tokens.
    encode: Callable[[str], list[int]]
    # Turns ids into text without special tokens.
    decode: Decode
    # Returns the bytes that each id adds to a text, including PASTA's tags.
    token_bytes: Callable[[], Sequence[bytes]]
    # Returns the ids that end the model's turn, ask the first text, and begin the answer with the
    # second.
    next_turn: Callable[[str, str], list[int]]
    # The draft model, if the method's options name one.
    drafter: Any = None


class TextMethod(ABC):
    """A decoding method for task `generation`."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.options = model.options
        # The options of this method alone, `decoding.options`.
        self.method_options = model.options.method_options

    def user_turn(self, content: str) -> str:
        """Return the text of the user's turn for a document that says `content`."""
        return content

    def extra_positions(self) -> int:
        """Return the positions after the prompt that an answer takes beyond `max_new_tokens`."""
        return 0

    @abstractmethod
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        """Return the program that answers one prompt with a `TextAnswer`.

        Args:
            prompt: The prompt, inside the turns of the chat template.
            stops: Returns whether a text is complete. A method with several threads ends each at
                `model.ends` instead, and the task then searches the joined text for stop strings.
            seed: The seed for random draws that the method makes itself.
        """
