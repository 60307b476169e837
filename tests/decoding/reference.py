"""An independent reference: each prompt alone, through the unmodified model, without a cache.

It uses a dense mask, and runs the model over all tokens again in every step.
"""

import sys
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from raypd.decoding.models.hybrid import has_recurrent_layers
from raypd.decoding.program import Feed, Predictions
from raypd.decoding.sampling import AllowedTokens

Picked = tuple[int, float, float]  # Token, log-probability, gap to the runner-up.
Limits = Callable[..., AllowedTokens | None]
# The name of eager attention to rounded keys, among transformers' attention functions.
_ROUNDED = "eager_rounded"


def round_keys_and_values(model: PreTrainedModel) -> None:
    """Let an unmodified model attend to keys and values that are rounded to 8 bits."""
    AttentionInterface.register(_ROUNDED, _attend_to_rounded)
    AttentionMaskInterface.register(_ROUNDED, eager_mask)
    model.set_attn_implementation(_ROUNDED)


def _attend_to_rounded(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: object,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    attend = sys.modules[type(module).__module__].eager_attention_forward
    key = key.to(torch.float8_e4m3fn).to(key.dtype)
    value = value.to(torch.float8_e4m3fn).to(value.dtype)
    attended: tuple[torch.Tensor, torch.Tensor] = attend(
        module, query, key, value, *args, **options
    )
    return attended


@torch.no_grad()
def dense_output(
    model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model under a boolean mask [n, n] that is True where a token may attend.

    Returns:
        Logits [n, vocabulary] and last hidden states [n, hidden size].
    """
    if has_recurrent_layers(model.config):
        # A recurrence reads a text in order. Its mask says which tokens are padding: none.
        assert torch.equal(mask, torch.ones_like(mask).tril())
        return _run(model, tokens, positions, torch.ones(1, len(tokens), dtype=torch.long))
    masks: object = _additive(model, mask)
    window = getattr(model.config, "sliding_window", None)
    if window and getattr(model.config, "use_sliding_window", True):
        near = _in_window(mask, torch.tensor(list(positions)), window)
        local = _additive(model, mask & near)
        if getattr(model.config, "layer_types", None):
            masks = {"full_attention": masks, "sliding_attention": local}
        else:
            masks = local
    return _run(model, tokens, positions, masks)


def _run(
    model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], mask: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and what the output embeddings read: Gemma 3n reports streams instead."""
    read: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0])
    )
    try:
        output = model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.tensor([list(positions)]),
            attention_mask=mask,
            use_cache=False,
        )
    finally:
        hook.remove()
    return output.logits[0], read[0][0]


def _additive(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
    """Return the mask [1, 1, n, n] that is added to scores."""
    lowest = torch.finfo(model.dtype).min
    zeros = torch.zeros(mask.shape, dtype=model.dtype)
    return zeros.masked_fill(~mask, lowest)[None, None]


def _in_window(mask: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Return the keys behind which a query sees fewer than `window` tokens, up to itself."""
    is_behind_key = positions[:, None] < positions
    is_at_or_before_query = positions <= positions[:, None]
    # Sums of ones, which are exact in float32 up to 2^24.
    seen = (mask & is_at_or_before_query).float()
    count = seen @ is_behind_key.float().T
    return count < window


def mask_of(seen: Sequence[Collection[int]]) -> torch.Tensor:
    """Return the boolean mask of what each token sees."""
    mask = torch.zeros(len(seen), len(seen), dtype=torch.bool)
    for query, keys in enumerate(seen):
        mask[query, list(keys)] = True
    return mask


def plain_output(
    model: PreTrainedModel, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `dense_output` of a causal text from position 0 on."""
    n = len(tokens)
    return dense_output(model, tokens, range(n), torch.ones(n, n).tril().bool())


def greedy(logits: torch.Tensor, allowed_token_ids: Sequence[int] | None) -> Picked:
    """Pick the best token among allowed ones; None allows all."""
    scores = logits.double()
    if allowed_token_ids is None:
        ids = torch.arange(len(scores))
    else:
        ids = torch.tensor(list(allowed_token_ids))
    best = scores[ids].topk(min(2, len(ids)))
    token = int(ids[best.indices[0]])
    logprob = float(scores[token] - scores[ids].logsumexp(-1))
    if len(ids) == 1:
        return token, logprob, float("inf")
    return token, logprob, float(best.values[0] - best.values[1])


def ids_of(allowed: AllowedTokens | None) -> list[int] | None:
    """Return the ids that are allowed, each an outcome of its own; None allows all."""
    if allowed is None:
        return None
    assert allowed.outcomes is None
    return allowed.ids.tolist()


def autoregressive(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    stop: Callable,
    allowed_token_ids: Limits | None = None,
) -> list[Picked]:
    """Decode up to `count` tokens, one at a time.

    `allowed_token_ids(tokens so far)` limits the next one.
    """
    answer: list[Picked] = []
    tokens: list[int] = []
    while len(answer) < count and not (tokens and stop(tokens)):
        logits, _ = plain_output(model, [*prompt, *tokens])
        allowed = None if allowed_token_ids is None else ids_of(allowed_token_ids(tokens))
        picked = greedy(logits[-1], allowed)
        answer.append(picked)
        tokens = [*tokens, picked[0]]
    return answer


def hyper_parallel(
    model: PreTrainedModel,
    prompt: list[int],
    ends: list[int],
    max_tokens: int,
    isolate_values: bool,
    allowed: Limits,
    closed,
) -> list[list[Picked]]:
    """Decode by the definition of HPD: values grow together, one token per step.

    `allowed(slot, tokens)` and `closed(slot, tokens)` are the rules of the slots, which end at the
    tokens `ends` of the prompt.
    """
    # A gap of `max_tokens` positions follows each slot.
    positions = [
        index + max_tokens * sum(end < index for end in ends) for index in range(len(prompt))
    ]
    values: list[list[Picked]] = [[] for _ in ends]
    # Each token with its position, its slot or -1, and the step since which it is there.
    text = [(token, position, -1, 0) for token, position in zip(prompt, positions, strict=True)]

    def sees(query: tuple[int, int, int, int], key: tuple[int, int, int, int]) -> bool:
        _, query_position, query_slot, query_step = query
        _, key_position, key_slot, key_step = key
        if key_position > query_position or key_step > query_step:
            return False
        return key_slot in (-1, query_slot) or not isolate_values

    def tokens_of_value(slot: int) -> list[int]:
        return [token for token, _, _ in values[slot]]

    last_tokens = dict(enumerate(ends))  # The index in `text` of each open slot's last token.
    for step in range(1, max_tokens + 1):
        mask = torch.tensor([[sees(query, key) for key in text] for query in text])
        tokens, text_positions, _, _ = zip(*text, strict=True)
        logits, _ = dense_output(model, tokens, text_positions, mask)
        for slot, index in last_tokens.items():
            limit = ids_of(allowed(slot, tokens_of_value(slot)))
            values[slot].append(greedy(logits[index], limit))
        live = [slot for slot in last_tokens if not closed(slot, tokens_of_value(slot))]
        if not live:
            break
        last_tokens = {}
        for slot in live:
            last_tokens[slot] = len(text)
            text.append((values[slot][-1][0], positions[ends[slot]] + step, slot, step))
    return values


class Replay:
    """Drives a program without the engine.

    The stock model answers each feed, over all tokens of the program.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[int] = []
        self.alive: list[bool] = []
        # What each token saw when it was fed.
        self.seen: list[set[int]] = []
        self.reach: dict[tuple[int, int], int] = {(0, 0): 2}

    def run(self, program):  # type: ignore[no-untyped-def]
        """Return the program's answer."""
        feed = next(program)
        try:
            while True:
                if feed.draft is not None:
                    drafts = feed.draft.drafter.draft(feed.draft.contexts, feed.draft.plan)
                    feed = program.send(Predictions([], [], drafts=drafts))
                else:
                    first = self._append(feed)
                    feed = program.send(self._predict(feed, first))
        except StopIteration as end:
            return end.value

    def _append(self, feed: Feed) -> int:
        """Add the tokens of a feed; return the number of the first one."""
        for row in feed.drop:
            self.alive[row] = False
        for row, segment in feed.move.items():
            self.segments[row] = segment
        self.reach.update({pair: int(reach) for pair, reach in feed.reach.items()})
        first = len(self.tokens)
        self.tokens += list(feed.tokens)
        self.positions += list(feed.positions)
        self.segments += [0] * len(feed.tokens) if feed.segments is None else list(feed.segments)
        self.alive += [True] * len(feed.tokens)
        rows = range(len(self.tokens))
        for query in range(first, len(self.tokens)):
            self.seen.append({key for key in rows if self._sees(query, key)})
        return first

    def _predict(self, feed: Feed, first: int) -> Predictions:
        """Answer a feed whose first token has the number `first`."""
        logits, hidden = dense_output(self.model, self.tokens, self.positions, mask_of(self.seen))
        rows = [first + index for index in feed.sample_at]
        limits = feed.allowed_token_ids or [None] * len(rows)
        predictions = Predictions([], [])
        for row, limit in zip(rows, limits, strict=True):
            token, logprob, _ = greedy(logits[row], ids_of(limit))
            predictions.tokens.append(token)
            predictions.logprobs.append(logprob)
        if feed.want_logits:
            predictions.logits = [logits[row] for row in rows]
        predictions.hidden = [hidden[row] for row in rows]
        return predictions

    def _sees(self, query: int, key: int) -> bool:
        if not self.alive[key]:
            return False
        kind = self.reach.get((self.segments[query], self.segments[key]), 0)
        return kind == 1 or (kind == 2 and self.positions[key] <= self.positions[query])


def check_logprobs(stock, prompt, answer):
    """Check that sampled tokens have the log-probabilities of the stock model."""
    logits, _ = plain_output(stock, [*prompt, *answer.tokens])
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs[range(len(answer.tokens)), answer.tokens]
    torch.testing.assert_close(
        torch.tensor(answer.logprobs),
        expected,
        atol=1e-3,
        rtol=0,
    )
