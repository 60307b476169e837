"""Medusa: heads on the last hidden state draft the tokens behind the next one, as a tree that one pass verifies (Cai et
al. 2023; the speculative method that APAR's section 3.2 is combined with, heads as in its appendix A.2). Head d reads
the hidden state behind which the model says token t, and guesses token t + d. A pass holds the text's last token, which
is certain, and under it the tree of guesses: each sees the text, its ancestors and itself. What the model says behind
the last token picks a child of it, if one guessed that; and so on down. So every token is one that the model says
behind exactly the text before it, for any heads; sampled too, since drafts are fixed before the draw. Typical
acceptance, which changes the distribution, is not built."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from raypd.decoding.methods.autoregressive import DraftedContinuation
from raypd.decoding.program import DraftRequest, Feed, Program
from raypd.decoding.text import Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


class Tree:
    """Which guesses are tried together: each path names the rank of the guess at every head from the first on: (0,) is
    head 1's best guess, (0, 2) head 2's third best behind it. Lists are in the order of the nodes (by depth). Raises
    ValueError where a path is empty, has a negative rank, or the path above it is missing."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        place = {path: i for i, path in enumerate(self.paths)}
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in place):
                raise ValueError(f"{path} is no path of a tree: ranks from 0, and the path above it must be there")
        self.ranks = [path[-1] for path in self.paths]  # [n]
        self.depths = [len(path) for path in self.paths]  # [n] from 1
        self.parents = [place.get(path[:-1], -1) for path in self.paths]  # [n], -1: under the text
        self.runs: list[int] = []  # [n]: nodes in a row without branches are one run, which shares a segment
        self.above: list[list[int]] = []  # [runs] the runs that a run's nodes see, itself included
        for parent in self.parents:
            if parent >= 0 and self.parents.count(parent) == 1:
                self.runs.append(self.runs[parent])
            else:
                self.runs.append(len(self.above))
                self.above.append([*(self.above[self.runs[parent]] if parent >= 0 else []), self.runs[-1]])

    def size(self, depth: int) -> int:
        """How many nodes, the first ones, are not deeper than `depth`."""
        return sum(d <= depth for d in self.depths)

    def accepted(self, guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """The nodes, from the top down, whose guess (of `guesses`: the first nodes') is what was `sampled` above them:
        ids [1 + nodes] behind the text's last token and behind each guess."""
        nodes: list[int] = []
        while True:
            node = nodes[-1] if nodes else -1
            hit = [n for n in range(len(guesses)) if self.parents[n] == node and guesses[n] == sampled[node + 1]]
            if not hit:
                return nodes
            nodes.append(hit[0])


def cartesian_tree(*widths: int) -> Tree:
    """Every combination of the best `widths[d]` guesses of head d + 1; all ones: a chain."""
    return Tree([path for d in range(len(widths)) for path in itertools.product(*map(range, widths[: d + 1]))])


class ResidualBlock(torch.nn.Module):
    """x + SiLU(W x + b), W and b zero at first: the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, hidden_size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


class MedusaHead(torch.nn.Module):
    """Residual blocks and a linear layer: [..., hidden size] -> [..., vocabulary]."""

    def __init__(self, layers: int, hidden_size: int, vocabulary: int) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(layers)))
        self.out = torch.nn.Linear(hidden_size, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(hidden.to(self.out.weight.dtype)))


class MedusaHeads(torch.nn.Module):
    """`count` heads of `layers` residual blocks and a linear layer each; `tree`: the paths that suit them."""

    def __init__(
        self, count: int, layers: int, hidden_size: int, vocabulary: int, base_model: str = "", tree: Tree | None = None
    ) -> None:
        super().__init__()
        self.count, self.layers, self.hidden_size, self.vocabulary = count, layers, hidden_size, vocabulary
        self.base_model = base_model
        self.tree = tree or cartesian_tree(*[3, 2, 1, 1][:count])
        self.heads = torch.nn.ModuleList(MedusaHead(layers, hidden_size, vocabulary) for _ in range(count))

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, count: int = 2, layers: int = 2, base_model: str = "", tree: Tree | None = None
    ) -> MedusaHeads:
        """Heads to be trained, like the model: each says at first what the model's own output embeddings say."""
        weight = model.get_output_embeddings().weight
        heads = cls(count, layers, weight.shape[1], weight.shape[0], base_model, tree).to(weight.device, weight.dtype)
        with torch.no_grad():
            for head in heads.heads:
                assert isinstance(head, MedusaHead)
                head.out.weight.copy_(weight)
        return heads

    def suited(self, tree: Tree | None) -> Tree:
        """`tree`, or that of the heads. Raises ValueError where it is deeper than there are heads."""
        tree = tree or self.tree
        if max(tree.depths, default=0) > self.count:
            raise ValueError(f"the tree is {max(tree.depths)} deep and there are {self.count} Medusa heads")
        return tree

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [heads, ..., vocabulary] of last hidden states [..., hidden size]."""
        return torch.stack([head(hidden) for head in self.heads])

    @torch.no_grad()
    def draft(self, hidden: Sequence[torch.Tensor], tree: Tree) -> list[list[int]]:
        """The guesses of a tree's nodes."""
        if not tree.paths or not hidden:
            return [[] for _ in hidden]
        best = self(torch.stack(list(hidden))).topk(1 + max(tree.ranks), dim=-1).indices.tolist()
        nodes = list(zip(tree.depths, tree.ranks, strict=True))
        return [[best[depth - 1][i][rank] for depth, rank in nodes] for i in range(len(hidden))]  # [heads][i][ranks]


def medusa(
    prompt: Prompt,
    max_new_tokens: int,
    heads: MedusaHeads,
    tree: Tree | None = None,  # None: the heads' own
    stops: Stops = lambda tokens: False,
) -> Program[DraftedContinuation]:
    """Decodes what `autoregressive` decodes, in fewer passes. Raises ValueError for a tree deeper than the heads."""
    tree = heads.suited(tree)
    answer = DraftedContinuation()
    reach = {(1 + run, 1 + run_above): Reach.CAUSAL for run, above in enumerate(tree.above) for run_above in above}
    reach |= {(1 + run, 0): Reach.CAUSAL for run in range(len(tree.above))}
    text, position = list(prompt.tokens), 0  # what is fed of the text in this step, and its first position
    guesses: list[int] = []
    drop: list[int] = []
    move: dict[int, int] = {}
    first = 0  # the row index of the feed's first token
    while True:
        end, count = position + len(text), len(guesses)
        predictions = yield Feed(
            [*text, *guesses],
            [*range(position, end), *(end - 1 + depth for depth in tree.depths[:count])],
            segments=[*(0 for _ in text), *(1 + run for run in tree.runs[:count])],
            reach=reach if answer.steps == 0 else {},
            sample_at=range(len(text) - 1, len(text) + count),
            shared=prompt.shared if answer.steps == 0 else 0,
            drop=drop,
            move=move,
            want_hidden=True,
        )
        assert predictions.hidden is not None
        answer.steps += 1
        nodes = tree.accepted(guesses, predictions.tokens)
        asks = [0, *(n + 1 for n in nodes)]
        for place, ask in enumerate(asks):
            answer.accepted += int(place < len(nodes))
            answer.tokens.append(predictions.tokens[ask])
            answer.logprobs.append(predictions.logprobs[ask])
            answer.stopped = stops(answer.tokens)
            if answer.stopped or len(answer.tokens) == max_new_tokens:
                return answer
        under = first + len(text)
        move = {under + n: 0 for n in nodes}
        drop = [under + n for n in range(count) if n not in nodes]
        first = under + count
        text, position = answer.tokens[-1:], end + len(nodes)
        size = tree.size(max_new_tokens - len(answer.tokens) - 1)  # deeper guesses could not be taken any more
        guesses = []
        if size:
            drafted = yield Feed((), (), draft=DraftRequest(heads, [predictions.hidden[asks[-1]]], tree))
            guesses = drafted.drafts[0][:size]


class MedusaText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return medusa(prompt, self.options.max_new_tokens, self.model.heads, stops=stops)
