"""Guided decoding: the keys of the answer are given, its values are decoded one after the other.

Other engines call it structured output with its fixed parts skipped: no token takes a pass that the
schema gives, within a value neither. Every value sees the whole answer before it: the yardstick for
HPD where a model's own JSON breaks off.
"""

from collections.abc import Sequence
from functools import reduce

from raypd.decoding.methods.hyper_parallel import SlottedPrompt, Value
from raypd.decoding.program import Feed, Program


def guided(
    prompt: SlottedPrompt,  # instruction, document and the answer's keys, each slot behind its key
    max_value_tokens: int,
) -> Program[list[Value]]:
    """Decodes one value a slot, each complete before the next begins.

    The grammar's `closing` follows on a value's tokens but the last, so that it stands whole in the
    text; what its `behind` counts leaves the cache.
    """
    values: list[Value] = []
    # Tokens that were fed; those that stay; where the prompt goes on behind the last value.
    fed, position, begin = 0, 0, 0
    drop: Sequence[int] = ()
    tail: Sequence[int] = ()  # of the last value
    for slot in prompt.slots:
        value, state = Value(), 0
        tokens = [*tail, *prompt.tokens[begin : slot.end + 1]]
        while True:
            predictions = yield Feed(
                tokens,
                range(position, position + len(tokens)),
                sample_at=[len(tokens) - 1],
                allowed_token_ids=[
                    slot.grammar.allowed(state, max_value_tokens - len(value.tokens))
                ],
                shared=0 if position else prompt.shared,
                drop=drop,
            )
            fed, position, drop = fed + len(tokens), position + len(tokens), ()
            state = slot.grammar.advance(state, predictions.tokens[0])
            forced = slot.grammar.forced(state, max_value_tokens - len(value.tokens) - 1)
            state = reduce(slot.grammar.advance, forced, state)
            tokens = [*predictions.tokens, *forced]
            value.tokens += tokens
            value.logprobs += [*predictions.logprobs, *[0.0] * len(forced)]
            if slot.grammar.done(state) or len(value.tokens) == max_value_tokens:
                break
        value.closed, value.completion = slot.grammar.done(state), slot.grammar.completion(state)
        values.append(value)
        tail, begin = [*tokens[:-1], *slot.grammar.closing(value.tokens)], slot.end + 1
        drop = range(fed - slot.grammar.behind(value.tokens), fed)
        position -= len(drop)
    return values
