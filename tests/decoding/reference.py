"""An independent reference: every prompt alone, through the unmodified model, with a dense mask and
no cache. A `Text` holds tokens in any order with position, group and step; each step runs the model
over all of them again.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from transformers import PreTrainedModel

from raypd.decoding.program import Predictions
from raypd.decoding.sampling import AllowedTokens

Picked = tuple[int, float, float]  # token, log-probability, gap to the runner-up
Limits = Callable[..., AllowedTokens | None]


@torch.no_grad()
def dense_output(
    model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, vocabulary] and last hidden states [n, hidden size] under a boolean mask [n, n]
    (True: may attend).
    """
    low = torch.finfo(model.dtype).min
    additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, low)
    window = getattr(model.config, "sliding_window", None)
    masks: object = additive[None, None]
    if window and getattr(model.config, "use_sliding_window", True):
        # Fewer than `window` visible tokens stand behind the key, up to the query.
        near = torch.zeros_like(mask)
        at = torch.tensor(list(positions))
        for q in range(len(at)):
            near[q] = (mask[q] & (at[:, None] < at) & (at <= at[q])).sum(-1) < window
        local = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~(mask & near), low)[
            None, None
        ]
        kinds = getattr(model.config, "layer_types", None)
        masks = {"full_attention": masks, "sliding_attention": local} if kinds else local
    ids, at = torch.tensor([list(tokens)]), torch.tensor([list(positions)])
    how = {"attention_mask": masks, "use_cache": False, "output_hidden_states": True}
    output = model(input_ids=ids, position_ids=at, **how)
    return output.logits[0], output.hidden_states[-1][0]


def mask_of(seen: Sequence[Collection[int]]) -> torch.Tensor:
    """The boolean mask of what each token sees."""
    mask = torch.zeros(len(seen), len(seen), dtype=torch.bool)
    for q, keys in enumerate(seen):
        mask[q, list(keys)] = True
    return mask


def plain_output(
    model: PreTrainedModel, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_output` of a text, causal, from position 0 on."""
    n = len(tokens)
    return dense_output(model, tokens, range(n), torch.ones(n, n).tril().bool())


def greedy(
    logits: torch.Tensor, allowed_token_ids: Sequence[int] | None
) -> tuple[int, float, float]:
    """(token, log-probability among the allowed ones, gap to the runner-up) of the best allowed
    token.
    """
    scores = logits.double()
    ids = (
        torch.arange(len(scores))
        if allowed_token_ids is None
        else torch.tensor(list(allowed_token_ids))
    )
    best = scores[ids].topk(min(2, len(ids)))
    token = int(ids[best.indices[0]])
    gap = float(best.values[0] - best.values[-1]) if len(ids) > 1 else float("inf")
    return token, float(scores[token] - scores[ids].logsumexp(-1)), gap


def ids_of(allowed: AllowedTokens | None) -> list[int] | None:
    """The ids of what is allowed, each of which is an outcome of its own; None: all."""
    assert allowed is None or allowed.outcomes is None
    return None if allowed is None else allowed.ids.tolist()


def autoregressive(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    stop: Callable,
    allowed_token_ids: Limits | None = None,
) -> list[Picked]:
    """(token, log-probability, gap) of each decoded token; `allowed_token_ids(tokens so far)` limit
    the next one.
    """
    answer: list[Picked] = []
    while len(answer) < count and not (answer and stop([t for t, _, _ in answer])):
        tokens = [t for t, _, _ in answer]
        logits = plain_output(model, [*prompt, *tokens])[0]
        answer.append(
            greedy(
                logits[-1], None if allowed_token_ids is None else ids_of(allowed_token_ids(tokens))
            )
        )
    return answer


def hyper_parallel(
    model: PreTrainedModel,
    prompt: list[int],
    ends: list[int],
    most: int,
    isolate_values: bool,
    allowed: Limits,
    closed,
) -> list[list[Picked]]:
    """HPD by its definition: values grow together, a token a step; `allowed` and `closed` are the
    slots' rules.
    """
    positions = [index + most * sum(end < index for end in ends) for index in range(len(prompt))]
    values: list[list[Picked]] = [[] for _ in ends]
    # (token, position, slot or -1, step at which it was there)
    text = [(token, position, -1, 0) for token, position in zip(prompt, positions, strict=True)]
    asked = [(n, end) for n, end in enumerate(ends)]
    for step in range(1, most + 1):
        rows = [
            [
                kp <= qp and kt <= qt and (ks == -1 or not isolate_values or ks == qs)
                for _, kp, ks, kt in text
            ]
            for _, qp, qs, qt in text
        ]
        logits = dense_output(
            model, [t[0] for t in text], [t[1] for t in text], torch.tensor(rows)
        )[0]
        for n, index in asked:
            values[n].append(
                greedy(logits[index], ids_of(allowed(n, [t for t, _, _ in values[n]])))
            )
        live = [n for n, _ in asked if not closed(n, [t for t, _, _ in values[n]])]
        if not live:
            break
        asked = [(n, len(text) + place) for place, n in enumerate(live)]
        text += [(values[n][-1][0], positions[ends[n]] + step, n, step) for n in live]
    return values


class Replay:
    """Drives a program without the engine: every feed is answered by the stock model over all
    tokens of the row.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tokens, self.positions, self.segments, self.seen, self.alive = [], [], [], [], []
        self.reach: dict[tuple[int, int], int] = {(0, 0): 2}

    def run(self, program):  # type: ignore[no-untyped-def]
        """The program's answer."""
        feed = next(program)
        try:
            while True:
                if feed.draft is not None:
                    found = feed.draft.heads.draft(feed.draft.hidden, feed.draft.tree)
                    feed = program.send(Predictions([], [], drafts=found))
                    continue
                for index in feed.drop:
                    self.alive[index] = False
                for index, segment in feed.move.items():
                    self.segments[index] = segment
                self.reach.update({pair: int(reach) for pair, reach in feed.reach.items()})
                first = len(self.tokens)
                self.tokens += list(feed.tokens)
                self.positions += list(feed.positions)
                self.segments += list(
                    feed.segments if feed.segments is not None else [0] * len(feed.tokens)
                )
                self.alive += [True] * len(feed.tokens)
                for q in range(first, len(self.tokens)):
                    self.seen.append({k for k in range(len(self.tokens)) if self._sees(q, k)})
                logits, hidden = dense_output(
                    self.model, self.tokens, self.positions, mask_of(self.seen)
                )
                places = [first + index for index in feed.sample_at]
                limits = feed.allowed_token_ids or [None] * len(places)
                picked = [
                    greedy(logits[place], ids_of(limit))
                    for place, limit in zip(places, limits, strict=True)
                ]
                tokens, logprobs, _ = (list(values) for values in zip(*picked, strict=True))
                rows = [logits[place] for place in places] if feed.want_logits else None
                feed = program.send(
                    Predictions(tokens, logprobs, rows, [hidden[place] for place in places])
                )
        except StopIteration as end:
            return end.value

    def _sees(self, q: int, k: int) -> bool:
        kind = self.reach.get((self.segments[q], self.segments[k]), 0) if self.alive[k] else 0
        return kind == 1 or (kind == 2 and self.positions[k] <= self.positions[q])


def check_logprobs(stock, prompt, answer):
    """Sampled tokens have the log-probabilities of the stock model."""
    logprobs = plain_output(stock, [*prompt, *answer.tokens])[0].log_softmax(-1)[
        len(prompt) - 1 : -1
    ]
    chosen = logprobs[range(len(answer.tokens)), answer.tokens]
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-3, rtol=0)
