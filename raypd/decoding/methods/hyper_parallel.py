"""HPD, hyper-parallel decoding: all values of all stacked documents at once ("Breaking the
Autoregressive Chain", sections 4.2 and 4.3, algorithms 1 and 2).

The prompt ends in a skeleton that names every attribute and omits its value. A gap of K_max
positions after each attribute leaves room for the value. The tokens of the values enter the cache
in the order in which they are decoded, but their positions are those after their attribute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raypd.decoding.grammar import Grammar
from raypd.decoding.methods.parts import Parts
from raypd.decoding.program import Feed, Program, StatesFull
from raypd.decoding.visibility import Reach


@dataclass
class Slot:
    """A place where a value is to be decoded.

    Attributes:
        end: The index in the prompt of the token before the value.
        grammar: What may be decoded.
    """

    end: int
    grammar: Grammar


@dataclass
class SlottedPrompt:
    """A prompt with slots, in the order of their ends; its first `shared` tokens are the
    instruction.
    """

    tokens: Sequence[int]
    slots: list[Slot]
    shared: int = 0


@dataclass
class Value:
    """The tokens decoded in a slot.

    Attributes:
        completion: The value's text if it was determined before its end (null, or the only
            remaining choice of an enum).
        closed: False if the value was cut at K_max tokens.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: str | None = None
    closed: bool = False


def _slot_positions(prompt: SlottedPrompt, max_value_tokens: int) -> list[int]:
    """Return the prompt's positions with a gap of K_max after every slot (algorithm 2)."""
    positions: list[int] = []
    begin = 0
    gaps = 0
    for slot in prompt.slots:
        positions += range(begin + gaps, slot.end + 1 + gaps)
        begin = slot.end + 1
        gaps += max_value_tokens
    positions += range(begin + gaps, len(prompt.tokens) + gaps)
    return positions


def hyper_parallel(
    prompt: SlottedPrompt, max_value_tokens: int, isolate_values: bool = False
) -> Program[list[Value]]:
    """Decode all values in parallel, each until it is complete (algorithm 1).

    Args:
        prompt: The documents and the skeletons of their answers.
        max_value_tokens: K_max, the number of tokens after which a value is cut, and the length of
            its gap.
        isolate_values: Give each value its own segment. Otherwise, as in the paper, a value sees
            the tokens of earlier attributes' values that have been decoded by then. Recurrent
            layers need isolation, because tokens that arrive in parallel have no order.

    Returns:
        The values in the order of the slots.
    """
    slots = prompt.slots
    k_max = max_value_tokens
    positions = _slot_positions(prompt, k_max)
    ends = [positions[slot.end] for slot in slots]
    grammars = [slot.grammar for slot in slots]
    values = [Value() for _ in slots]
    states = [0] * len(slots)
    reach: dict[tuple[int, int], Reach] = {}
    continues: dict[int, int] = {}
    if isolate_values:
        for n, slot in enumerate(slots):
            reach[n + 1, 0] = Reach.CAUSAL
            reach[n + 1, n + 1] = Reach.CAUSAL
            continues[n + 1] = slot.end
    whole = Feed(
        prompt.tokens,
        positions,
        sample_at=[slot.end for slot in slots],
        allowed_token_ids=[grammar.allowed(0, k_max) for grammar in grammars],
        shared=prompt.shared,
        reach=reach,
        continues=continues,
        closed=[0] if isolate_values else (),
    )
    parts = Parts(whole)
    feed = parts.next(0)
    try:
        predictions = yield feed
    except StatesFull as full:
        # The values are decoded in groups, one after the other. No value sees another.
        parts = Parts(whole, full.segments)
        feed = parts.next(0)
        predictions = yield feed
    fed = len(feed.tokens)
    closed: list[int] = []  # Segments of values that were completed since the last feed.
    for number in range(len(parts)):
        if number:
            feed = parts.next(fed)
            feed = replace(feed, closed=[*feed.closed, *closed], decoded=_decoded(values))
            predictions = yield feed
            fed += len(feed.tokens)
        live = list(parts.samples(number))
        for k in range(1, k_max + 1):
            sampled = zip(live, predictions.tokens, predictions.logprobs, strict=True)
            for n, token, logprob in sampled:
                values[n].tokens.append(token)
                values[n].logprobs.append(logprob)
                states[n] = grammars[n].advance(states[n], token)
                if grammars[n].done(states[n]):
                    values[n].closed = True
                    values[n].completion = grammars[n].completion(states[n])
            closed = [n + 1 for n in live if values[n].closed or k == k_max]
            live = [n for n in live if not values[n].closed]
            if not live or k == k_max:
                break
            predictions = yield Feed(
                [values[n].tokens[-1] for n in live],
                [ends[n] + k for n in live],
                segments=[n + 1 for n in live] if isolate_values else None,
                closed=closed if isolate_values else (),
                sample_at=range(len(live)),
                allowed_token_ids=[grammars[n].allowed(states[n], k_max - k) for n in live],
                decoded=_decoded(values) if len(parts) > 1 else None,
            )
            fed += len(live)
    return values


def _decoded(values: list[Value]) -> int:
    """Count the tokens of all values."""
    return sum(len(value.tokens) for value in values)
