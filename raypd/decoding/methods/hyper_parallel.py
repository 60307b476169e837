"""HPD, hyper-parallel decoding: all values of all stacked documents at once ("Breaking the
Autoregressive Chain", sections 4.2-4.3, algorithms 1 and 2). The prompt ends in a skeleton that
names every attribute and leaves its value out. A gap of K_max positions after each keeps the place
of the value, whose tokens are appended to the cache in the order they are decoded but stand, by
position, behind their attribute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd.decoding.grammar import Grammar
from raypd.decoding.program import Feed, Program
from raypd.decoding.visibility import Reach


@dataclass
class Slot:
    end: int  # index in the prompt of the token before it
    grammar: Grammar  # how it is written


@dataclass
class SlottedPrompt:
    tokens: Sequence[int]
    slots: list[Slot]  # in the order of their ends
    shared: int = 0  # ids of the instruction


@dataclass
class Value:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Its text where that was clear before its end (null, an enum's only choice left)
    completion: str | None = None
    closed: bool = False  # False: cut at K_max tokens


def _slot_positions(prompt: SlottedPrompt, max_value_tokens: int) -> list[int]:
    """Algorithm 2: position ids with a gap of K_max behind every slot's end; [tokens of the
    prompt].
    """
    positions: list[int] = []
    offset, start = 0, 0
    for slot in prompt.slots:
        positions += range(start + offset, slot.end + 1 + offset)
        start, offset = slot.end + 1, offset + max_value_tokens
    return [*positions, *range(start + offset, len(prompt.tokens) + offset)]


def hyper_parallel(
    prompt: SlottedPrompt, max_value_tokens: int, isolate_values: bool = False
) -> Program[list[Value]]:
    """Algorithm 1: one value a slot, in their order, all decoded together, each pruned when it is
    complete. `max_value_tokens` is K_max, a value's most tokens and the positions kept free for it.
    `isolate_values`: each has a segment of its own; else (the paper's mask) it sees the value
    tokens of earlier attributes that exist by then.
    """
    slots, k_max = prompt.slots, max_value_tokens
    positions = _slot_positions(prompt, k_max)
    values, grammars = [Value() for _ in slots], [slot.grammar for slot in slots]
    ends = [positions[slot.end] for slot in slots]
    states = [0] * len(slots)
    live = list(range(len(slots)))
    reach: dict[tuple[int, int], Reach] = {}
    if isolate_values:
        for n in live:
            reach[n + 1, 0] = reach[n + 1, n + 1] = Reach.CAUSAL
    predictions = yield Feed(
        prompt.tokens,
        positions,
        sample_at=[slot.end for slot in slots],
        allowed_token_ids=[slot.grammar.allowed(0, k_max) for slot in slots],
        shared=prompt.shared,
        reach=reach,
    )
    for k in range(1, k_max + 1):
        for n, token, logprob in zip(live, predictions.tokens, predictions.logprobs, strict=True):
            value, grammar = values[n], grammars[n]
            value.tokens.append(token)
            value.logprobs.append(logprob)
            states[n] = state = grammar.advance(states[n], token)
            if grammar.done(state):
                value.closed, value.completion = True, grammar.completion(state)
        live = [n for n in live if not values[n].closed]
        if not live or k == k_max:
            break
        predictions = yield Feed(
            [values[n].tokens[-1] for n in live],
            [ends[n] + k for n in live],
            segments=[n + 1 for n in live] if isolate_values else None,
            sample_at=range(len(live)),
            allowed_token_ids=[grammars[n].allowed(states[n], k_max - k) for n in live],
        )
    return values
