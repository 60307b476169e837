"""Guided decoding: the keys of an answer are given; its values are decoded one after the other.

Other engines call this structured output with jump-forward decoding: a token that the schema
determines takes no pass, even within a value. Every value sees the whole answer before it, which
makes this method the yardstick for HPD when a model's own JSON breaks off.
"""

from collections.abc import Sequence
from functools import reduce

from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, Value
from raypd.decoding.program import Feed, Predictions, Program


def guided(prompt: SlottedPrompt, max_value_tokens: int) -> Program[list[Value]]:
    """Decode one value per slot, each complete before the next begins.

    The text that the next value sees contains each value complete: its tokens except the last are
    followed by the grammar's `closing`, and the tokens that `behind` counts leave the cache.

    Args:
        prompt: The instruction, the document and the answer's keys, with each slot after its key.
        max_value_tokens: The number of tokens after which a value is cut.
    """
    values: list[Value] = []
    fed = 0  # tokens fed so far
    position = 0  # of the next token; lower than `fed` once tokens were dropped
    begin = 0  # of the part of the prompt that is not fed yet
    closing: list[int] = []  # what ends the last value in the text
    drop: Sequence[int] = ()
    for slot in prompt.slots:
        value = Value()
        values.append(value)
        state = 0
        tokens = [*closing, *prompt.tokens[begin : slot.end + 1]]
        while True:
            remaining = max_value_tokens - len(value.tokens)
            predictions = yield Feed(
                tokens,
                range(position, position + len(tokens)),
                sample_at=[len(tokens) - 1],
                allowed_token_ids=[slot.grammar.allowed(state, remaining)],
                shared=0 if position else prompt.shared,
                drop=drop,
                may_drop=True,
            )
            fed += len(tokens)
            position += len(tokens)
            drop = ()
            state, tokens = _extend(value, slot, state, predictions, remaining)
            if slot.grammar.done(state) or len(value.tokens) == max_value_tokens:
                break
        value.closed = slot.grammar.done(state)
        value.completion = slot.grammar.completion(state)
        begin = slot.end + 1
        closing = [*tokens[:-1], *slot.grammar.closing(value.tokens)]
        drop = range(fed - slot.grammar.behind(value.tokens), fed)
        position -= len(drop)
    return values


def _extend(
    value: Value, slot: Slot, state: int, predictions: Predictions, remaining: int
) -> tuple[int, list[int]]:
    """Append the predicted token to a value, followed by the tokens that it forces.

    Returns:
        The grammar's state after them, and the appended tokens.
    """
    state = slot.grammar.advance(state, predictions.tokens[0])
    forced = slot.grammar.forced(state, remaining - 1)
    tokens = [*predictions.tokens, *forced]
    value.tokens += tokens
    value.logprobs += predictions.logprobs
    value.logprobs += [0.0] * len(forced)
    return reduce(slot.grammar.advance, forced, state), tokens
