"""Medusa: heads on the last hidden state draft the tokens behind the next one, as a tree that one
pass verifies (Cai et al. 2023; the speculative method that APAR's section 3.2 is combined with,
heads as in its appendix A.2). Head d reads the hidden state behind which the model says token t,
and guesses token t + d. A pass holds the text's last token, which is certain, and under it the tree
of guesses: each sees the text, its ancestors and itself. What the model says behind the last token
picks a child of it, if one guessed that; and so on down. So every token is one that the model says
behind exactly the text before it, for any heads; sampled too, since drafts are fixed before the
draw. Typical acceptance, which changes the distribution, is not built.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from raypd.decoding.methods.apar import AparGroup, Tree
from raypd.decoding.methods.autoregressive import DraftedContinuation
from raypd.decoding.program import Program
from raypd.decoding.text import Prompt, Stops, TextMethod


def cartesian_tree(*widths: int) -> Tree:
    """Every combination of the best `widths[d]` guesses of head d + 1; all ones: a chain."""
    return Tree(
        [
            path
            for d in range(len(widths))
            for path in itertools.product(*map(range, widths[: d + 1]))
        ]
    )


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
    """`count` heads of `layers` residual blocks and a linear layer each; `tree`: the paths that
    suit them.
    """

    def __init__(
        self,
        count: int,
        layers: int,
        hidden_size: int,
        vocabulary: int,
        base_model: str = "",
        tree: Tree | None = None,
    ) -> None:
        super().__init__()
        self.count, self.layers, self.hidden_size, self.vocabulary = (
            count,
            layers,
            hidden_size,
            vocabulary,
        )
        self.base_model = base_model
        self.tree = tree or cartesian_tree(*[3, 2, 1, 1][:count])
        self.heads = torch.nn.ModuleList(
            MedusaHead(layers, hidden_size, vocabulary) for _ in range(count)
        )

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        count: int = 2,
        layers: int = 2,
        base_model: str = "",
        tree: Tree | None = None,
    ) -> Self:
        """Heads to be trained, like the model: each says at first what the model's own output
        embeddings say.
        """
        weight = model.get_output_embeddings().weight
        heads = cls(count, layers, weight.shape[1], weight.shape[0], base_model, tree).to(
            weight.device, weight.dtype
        )
        with torch.no_grad():
            for head in heads.heads:
                assert isinstance(head, MedusaHead)
                head.out.weight.copy_(weight)
        return heads

    def suited(self, tree: Tree | None) -> Tree:
        """`tree`, or that of the heads.

        Raises ValueError where it is deeper than there are heads.
        """
        tree = tree or self.tree
        if max(tree.depths, default=0) > self.count:
            raise ValueError(
                f"the tree is {max(tree.depths)} deep and there are {self.count} Medusa heads"
            )
        return tree

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [heads, ..., vocabulary] of last hidden states [..., hidden size]."""
        return torch.stack([head(hidden) for head in self.heads])

    @torch.no_grad()
    def draft(self, hidden: Sequence[torch.Tensor], tree: Tree) -> list[list[int]]:
        if not tree.paths or not hidden:
            return [[] for _ in hidden]
        best = self(torch.stack(list(hidden))).topk(1 + max(tree.ranks), dim=-1).indices.tolist()
        nodes = list(zip(tree.depths, tree.ranks, strict=True))
        # [heads][i][ranks].
        return [[best[depth - 1][i][rank] for depth, rank in nodes] for i in range(len(hidden))]


def medusa(
    prompt: Prompt,
    max_new_tokens: int,
    heads: MedusaHeads,
    tree: Tree | None = None,  # None: the heads' own
    stops: Stops = lambda tokens: False,
) -> Program[DraftedContinuation]:
    """Decodes what `autoregressive` decodes, in fewer passes.

    Raises ValueError for a tree deeper than the heads.
    """
    # One thread, which never forks.
    group = AparGroup(prompt, max_new_tokens, -1, -1, stops, 1, heads.suited(tree))
    yield from group.run(heads)
    text = group.answer.root
    return DraftedContinuation(
        text.tokens,
        text.logprobs,
        not group.sequences,
        steps=group.answer.cost.steps,
        accepted=group.accepted,
    )


class MedusaText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return medusa(prompt, self.options.max_new_tokens, self.model.heads, stops=stops)
