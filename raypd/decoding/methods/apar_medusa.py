"""APAR and Medusa together: every thread of the paragraph tree drafts with Medusa heads ("APAR: LLMs Can Do
Auto-Parallel Auto-Regressive Decoding", section 3.2, Medusa-APAR).

A pass holds, for each thread, its last token and under it a tree of guesses, which see the thread's path. What the
model says accepts some of them, and the accepted tokens go through algorithm 1 one by one, as if each had been sampled
in a decode of its own: a [Fork] among them opens a child there, an end token ends the thread. So the paragraphs are
those of `apar`, token for token. Only where the most tokens or threads are reached may they differ: threads get there
in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raypd.decoding.methods.apar import AparAnswer, Group, Sequence
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.methods.medusa import MedusaHeads, Tree, check_depth, guessing
from raypd.decoding.program import Feed, Program
from raypd.decoding.visibility import Reach


@dataclass
class AparMedusaAnswer(AparAnswer):
    """As AparAnswer. decoded: tokens that the model said, in all threads; accepted: those of them that were guessed."""

    decoded: int = 0
    accepted: int = 0

    @property
    def average_accepted_tokens(self) -> float:
        """Tokens decoded a forward pass, in all threads together."""
        return self.decoded / self.cost.steps if self.cost.steps else 0.0


@dataclass
class Drafts:
    """A thread's guesses, the segments of the tree's runs that they are fed in, and the path that these reach.

    What a thread leaves behind, the next new thread takes over, so that there are never more segments than needed.
    """

    segments: range
    path: set[int] = field(default_factory=set)
    guesses: list[int] = field(default_factory=list)
    root: int = 0  # where in the feed the thread's last token is; the guesses stand behind it

    def follow(self, s: Sequence) -> dict[tuple[int, int], Reach]:
        """The pairs that make the segments reach the path of `s`, and nothing but it and each other."""
        path = {node.segment for node in s.current_node.path()}
        pairs = {(own, gone): Reach.HIDDEN for own in self.segments for gone in self.path - path}
        pairs |= {(own, new): Reach.ALL for own in self.segments for new in path - self.path}
        self.path = path
        return pairs


def apar_medusa(
    prompt: Prompt,
    max_new_tokens: int,
    fork: int,
    child: int,
    ends: frozenset[int],
    heads: MedusaHeads,
    tree: Tree | None = None,
    max_threads: int = 64,
) -> Program[AparMedusaAnswer]:
    """Algorithm 1 with drafts; arguments as those of `apar` and `medusa`."""
    tree = tree or heads.tree
    check_depth(tree, heads)
    start = len(prompt.tokens)
    group = Group.of(prompt, max_new_tokens, fork, child, ends, max_threads)
    cost = group.answer.cost
    drafts: dict[Sequence, Drafts] = {}
    free: list[Drafts] = []
    rejected: list[int] = []
    move: dict[int, int] = {}
    fed = cached = attended = decoded = accepted = 0

    while group.sequences and group.used < max_new_tokens:
        decoding = group.sequences[: max_new_tokens - group.used]
        spare = max_new_tokens - group.used - len(decoding)  # tokens beyond the one of each thread
        reach, released = group.take_news()
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[int] = []
        asks: list[int] = []
        for s in decoding:
            if s not in drafts:
                if not free:
                    runs = range(group.segments, group.segments + len(tree.above))
                    group.segments += len(runs)
                    reach |= {(runs[a], runs[b]): Reach.CAUSAL for a in range(len(runs)) for b in tree.above[a]}
                    free.append(Drafts(runs))
                drafts[s] = free.pop()
            mine = drafts[s]
            reach |= mine.follow(s)
            mine.guesses = mine.guesses[: tree.size(spare)]
            count = len(mine.guesses)
            last = [s.last_token] if cost.steps else list(prompt.tokens)
            if cost.steps:
                s.current_node.cached.append(fed + len(tokens))
            mine.root = len(tokens) + len(last) - 1
            asks += range(mine.root, mine.root + 1 + count)
            tokens += [*last, *mine.guesses]
            positions += range(s.position + 1 - len(last), s.position + 1)
            positions += [s.position + depth for depth in tree.depths[:count]]
            segments += [s.current_node.segment] * len(last)
            segments += [mine.segments[run] for run in tree.runs[:count]]
        predictions = yield Feed(
            tokens,
            positions,
            segments,
            reach=reach,
            sample_at=asks,
            shared=0 if cost.steps else prompt.shared,
            drop=[*rejected, *released],
            move={index: segment for index, segment in move.items() if index not in set(released)},
            want_hidden=True,
        )
        assert predictions.hidden is not None
        cached += len(tokens) - len(rejected) - len(released)
        cost.steps += 1
        cost.max_cached_tokens = max(cost.max_cached_tokens, cached)
        group.used += len(decoding)
        rejected, move = [], {}
        going_on: list[Drafts] = []
        states: list[torch.Tensor] = []
        ask = 0  # the first of the thread's
        for s in decoding:
            mine = drafts[s]
            count = len(mine.guesses)
            nodes = tree.accepted(mine.guesses, predictions.tokens[ask : ask + 1 + count])
            kept: set[int] = set()
            for i, place in enumerate((ask, *(ask + 1 + n for n in nodes))):
                if i > 0:
                    if group.used == max_new_tokens:
                        break
                    group.used += 1
                accepted += int(i < len(nodes))
                attended += s.position + 1
                decoded += 1
                group.append(s, predictions.tokens[place], predictions.logprobs[place])
                if s.last_token in ends:
                    free.append(drafts.pop(s))
                    break
                if i < len(nodes):  # this token is in the cache already, as a guess
                    kept.add(nodes[i])
                    index = fed + mine.root + 1 + nodes[i]
                    move[index] = s.current_node.segment
                    s.current_node.cached.append(index)
                else:
                    going_on.append(mine)
                    states.append(predictions.hidden[place])
            rejected += [fed + mine.root + 1 + n for n in range(count) if n not in kept]
            mine.guesses = []
            ask += 1 + count
        fed += len(tokens)
        if going_on and group.used + 1 < max_new_tokens:
            drafted = yield guessing(heads, states, tree)
            for mine, guesses in zip(going_on, drafted.guesses, strict=True):
                mine.guesses = guesses

    if decoded:
        cost.attended_tokens = attended / decoded
    return AparMedusaAnswer(**vars(group.finish(start)), decoded=decoded, accepted=accepted)
