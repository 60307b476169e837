"""The works that are measured, in tokens: random ones of the sizes that docs/benchmark.md names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.program import Program

Prompts = list[list[int]]


def never(tokens: Sequence[int]) -> bool:
    """Let an answer take all the tokens that it may have."""
    return False


class Counted:
    """The automaton of a slot whose value is any tokens of a fixed number."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def allowed(self, state: int, left: int) -> None:
        return None

    def done(self, state: int) -> bool:
        return state >= self.tokens

    def completion(self, state: int) -> None:
        return None


@dataclass(frozen=True)
class Work:
    """Documents with attributes, decoded by `hyper_parallel`; the sizes of W1 by default.

    All sizes are in tokens except for the numbers of attributes and documents.
    """

    shared: int = 400
    own: int = 300
    attributes: int = 16
    key: int = 5
    value: int = 5
    documents: int = 256  # Documents of a measurement.
    unit: str = "documents"

    @property
    def branches(self) -> int:
        """Values of a document."""
        return self.attributes

    @property
    def key_tokens(self) -> int:
        """Tokens of a document's keys."""
        return self.attributes * self.key

    @property
    def fed(self) -> int:
        """Tokens of a document that go through the layers; the last of a value does not."""
        return self.own + self.key_tokens + self.branches * (self.value - 1)

    @property
    def sampled(self) -> int:
        """Tokens of a document behind which a next one is wanted."""
        return self.branches * self.value

    def draw(self, count: int, vocabulary: int, seed: int) -> Prompts:
        """Return prompts without keys or questions: an instruction in common, and a document."""
        rng = random.Random(seed)
        instruction = [rng.randrange(vocabulary) for _ in range(self.shared)]
        prompts = []
        for _ in range(count):
            prompts.append(instruction + [rng.randrange(vocabulary) for _ in range(self.own)])
        return prompts

    def slotted(self, tokens: list[int], vocabulary: int) -> SlottedPrompt:
        """Return the prompt of `hyper_parallel` for a document."""
        keys = [number % vocabulary for number in range(self.key_tokens)]
        slots = []
        for number in range(self.attributes):
            end = len(tokens) + (number + 1) * self.key - 1
            rule: Any = Counted(self.value)
            slots.append(Slot(end, rule))
        return SlottedPrompt(tokens + keys, slots, shared=self.shared)

    def program(self, tokens: list[int], vocabulary: int, isolate: bool) -> Program[Any]:
        """Return the program of a document.

        Args:
            tokens: The document behind its instruction.
            vocabulary: The number of token ids.
            isolate: Whether values do not see each other, as recurrent layers need it.
        """
        return hyper_parallel(self.slotted(tokens, vocabulary), self.value, isolate)

    def whole_requests(self, prompts: Prompts, vocabulary: int) -> tuple[Prompts, int]:
        """Return a request per document, which writes keys and values, and its new tokens."""
        return prompts, self.attributes * (self.key + self.value)

    def single_requests(self, prompts: Prompts, vocabulary: int) -> tuple[Prompts, int]:
        """Return a request per value, with its key given, and its new tokens."""
        requests = []
        for tokens in prompts:
            for number in range(self.attributes):
                first = number * self.key
                key = [(first + k) % vocabulary for k in range(self.key)]
                requests.append(tokens + key)
        return requests, self.value


@dataclass(frozen=True)
class Questions(Work):
    """Contexts with questions, decoded by `intra_prompt`; the sizes of W6 by default."""

    shared: int = 2750
    own: int = 740
    attributes: int = 30  # Questions of a context.
    key: int = 20  # Tokens of a question.
    value: int = 20
    documents: int = 16
    unit: str = "contexts"

    def tree(self, tokens: list[int], vocabulary: int) -> PromptTree:
        """Return the prompt of `intra_prompt` for a context."""
        questions = []
        for number in range(self.attributes):
            first = number * self.key
            question = [(first + k) % vocabulary for k in range(self.key)]
            questions.append(Question(question, never))
        return PromptTree(tokens[: self.shared], [Context(tokens[self.shared :], questions)])

    def program(self, tokens: list[int], vocabulary: int, isolate: bool) -> Program[Any]:
        return intra_prompt(self.tree(tokens, vocabulary), self.value)

    def whole_requests(self, prompts: Prompts, vocabulary: int) -> tuple[Prompts, int]:
        """Return a request per question, too: no engine writes answers to several at once."""
        return self.single_requests(prompts, vocabulary)


WORKS: dict[str, Work] = {
    "W1 keys": Work(),
    "W1 slots": Work(key=1),
    # The mean sizes of SQuAD 2's contexts and questions.
    "W4": Questions(shared=60, own=160, attributes=6, key=14, value=20, documents=64),
    "W6": Questions(),
}
_LITTLE = {"shared": 20, "own": 15, "attributes": 3, "key": 2, "value": 2, "documents": 3}


def works(rehearse: bool) -> dict[str, Work]:
    """Return the works, or little ones of the same kinds."""
    if not rehearse:
        return WORKS
    little = {}
    for name, work in WORKS.items():
        sizes: dict[str, Any] = _LITTLE | {"key": min(work.key, _LITTLE["key"])}
        little[name] = replace(work, **sizes)
    return little
