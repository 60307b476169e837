"""Medusa: heads on the last hidden state draft the tokens after the next one, as a tree that one
pass verifies (Cai et al. 2023). Section 3.2 of the APAR paper combines it with APAR; the heads are
those of its appendix A.2.

Head d reads the hidden state from which the model predicts token t, and guesses token t + d. A pass
holds the text's last token, which is certain, and below it the tree of guesses: each sees the text,
its ancestors and itself. The model's prediction after the last token picks the child that guessed
it, if there is one, and so on down the tree. So every token is the one that the model predicts
after exactly the text before it, whatever the heads guess. This holds for sampled texts too,
because drafts are fixed before the draw. Typical acceptance, which changes the distribution, is not
implemented.
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
    """Return the tree of all combinations of the best `widths[d]` guesses of head d + 1.

    With all widths 1 it is a chain.
    """
    paths: list[tuple[int, ...]] = []
    for depth in range(1, len(widths) + 1):
        paths += itertools.product(*map(range, widths[:depth]))
    return Tree(paths)


class ResidualBlock(torch.nn.Module):
    """x + SiLU(W x + b). W and b start as zero, which makes it the identity."""

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
    """Several heads of residual blocks and a linear layer each.

    Args:
        count: The number of heads.
        layers: The number of residual blocks per head.
        hidden_size: The hidden size of the model.
        vocabulary: The vocabulary size of the model.
        base_model: The name of the model that the heads are for.
        tree: The guesses that suit the heads; None for a small tree.
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
        self.count = count
        self.layers = layers
        self.hidden_size = hidden_size
        self.vocabulary = vocabulary
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
        """Return untrained heads, each of which starts as the model's own output embeddings."""
        weight = model.get_output_embeddings().weight
        vocabulary, hidden_size = weight.shape
        heads = cls(count, layers, hidden_size, vocabulary, base_model, tree)
        heads.to(weight.device, weight.dtype)
        with torch.no_grad():
            for head in heads.heads:
                assert isinstance(head, MedusaHead)
                head.out.weight.copy_(weight)
        return heads

    def suited(self, tree: Tree | None) -> Tree:
        """Return `tree`, or the heads' own tree if it is None.

        Raises:
            ValueError: If it is deeper than there are heads.
        """
        tree = tree or self.tree
        depth = max(tree.depths, default=0)
        if depth > self.count:
            raise ValueError(f"the tree is {depth} deep and there are {self.count} Medusa heads")
        return tree

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [heads, ..., vocabulary] of last hidden states [..., hidden size]."""
        return torch.stack([head(hidden) for head in self.heads])

    @torch.no_grad()
    def draft(self, contexts: Sequence[torch.Tensor], plan: Tree) -> list[list[int]]:
        """Guess after each hidden state [hidden size], one token for each node of the tree."""
        hidden = list(contexts)
        tree = plan
        if not tree.paths or not hidden:
            return [[] for _ in hidden]
        logits = self(torch.stack(hidden))  # [heads, hidden states, vocabulary]
        best = logits.topk(1 + max(tree.ranks), dim=-1).indices
        heads = torch.tensor(tree.depths) - 1
        return best[heads, :, torch.tensor(tree.ranks)].T.tolist()


def medusa(
    prompt: Prompt,
    max_new_tokens: int,
    heads: MedusaHeads,
    tree: Tree | None = None,
    stops: Stops = lambda tokens: False,
) -> Program[DraftedContinuation]:
    """Decode the same text as `autoregressive`, in fewer passes.

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The number of tokens after which the text is cut.
        heads: The heads that draft the guesses.
        tree: Which guesses are tried together; None for the heads' own tree.
        stops: Whether the tokens decoded so far are a complete text.

    Raises:
        ValueError: If the tree is deeper than there are heads.
    """
    # This is APAR with a single thread that never forks, because no token is [Fork].
    no_token = -1
    group = AparGroup(
        prompt,
        max_new_tokens,
        fork=no_token,
        child=no_token,
        stops=stops,
        max_threads=1,
        tree=heads.suited(tree),
    )
    yield from group.run(heads)
    text = group.answer.root
    return DraftedContinuation(
        text.tokens,
        text.logprobs,
        stopped=not group.sequences,
        steps=group.answer.cost.steps,
        accepted=group.accepted,
    )


class MedusaText(TextMethod):
    """Medusa for text."""

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return medusa(prompt, self.options.max_new_tokens, self.model.heads, stops=stops)
