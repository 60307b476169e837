"""APAR and Medusa together: every thread of the paragraph tree drafts with Medusa heads ("APAR: LLMs Can Do
Auto-Parallel Auto-Regressive Decoding", section 3.2, Medusa-APAR). A pass holds each thread's last token and under it a
tree of guesses, which see the thread's path. The accepted tokens go through algorithm 1 one by one: the paragraphs are
those of `apar`, token for token, but where the most tokens or threads are reached, in another order."""

from dataclasses import dataclass, field
from typing import Any

import torch

from raypd.decoding.methods.apar import AparAnswer, AparGroup, AparSequence
from raypd.decoding.methods.medusa import MedusaHeads, Tree
from raypd.decoding.program import DraftRequest, Feed, Predictions, Program
from raypd.decoding.text import Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


@dataclass
class AparMedusaAnswer(AparAnswer):
    """As AparAnswer. decoded: tokens of the model, in all threads; accepted: those of them that were guessed."""

    decoded: int = 0
    accepted: int = 0

    def counters(self) -> dict[str, Any]:
        counters = super().counters()
        del counters["longest_path"]
        return {**counters, "average_accepted_tokens": self.decoded / self.cost.steps if self.cost.steps else 0.0}


@dataclass
class _Drafts:
    """A thread's guesses; a new thread takes over an ended one's, so that no segment is added without need."""

    segments: range  # of the tree's runs, in which they are fed
    path: set[int] = field(default_factory=set)  # what these reach
    guesses: list[int] = field(default_factory=list)
    root: int = 0  # where in the feed the thread's last token is; the guesses stand behind it

    def follow(self, s: AparSequence) -> dict[tuple[int, int], Reach]:
        """The pairs that make the segments reach the path of `s`, and nothing but it and each other."""
        path = {node.segment for node in s.current_node.path()}
        pairs = {(segment, gone): Reach.HIDDEN for segment in self.segments for gone in self.path - path}
        pairs |= {(segment, new): Reach.ALL for segment in self.segments for new in path - self.path}
        self.path = path
        return pairs


@dataclass
class _Decode:
    """The drafts of each thread between two passes, and what the next feed corrects in the cache."""

    group: AparGroup
    tree: Tree
    drafts: dict[AparSequence, _Drafts] = field(default_factory=dict)
    free: list[_Drafts] = field(default_factory=list)  # of threads that have ended
    rejected: list[int] = field(default_factory=list)  # row indices of guesses that were wrong
    move: dict[int, int] = field(default_factory=dict)  # of right ones: the segments of the threads whose text they are
    fed: int = 0  # tokens so far
    cached: int = 0  # those of them that are in the cache
    accepted: int = 0

    def feed(self, prompt: Prompt, decoding: list[AparSequence], spare: int) -> Feed:
        """Each thread's last token (the prompt in the first pass), and its guesses, none deeper than `spare`."""
        group, tree, first = self.group, self.tree, self.fed == 0
        reach, released = group.take_changes()
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[int] = []
        asks: list[int] = []
        for s in decoding:
            mine = self._drafts_of(s, reach)
            reach |= mine.follow(s)
            mine.guesses = mine.guesses[: tree.size(spare)]
            count = len(mine.guesses)
            last = list(prompt.tokens) if first else [s.last_token]
            if not first:
                s.current_node.cached.append(self.fed + len(tokens))
            mine.root = len(tokens) + len(last) - 1
            asks += range(mine.root, mine.root + 1 + count)
            tokens += [*last, *mine.guesses]
            positions += range(s.position + 1 - len(last), s.position + 1)
            positions += [s.position + depth for depth in tree.depths[:count]]
            segments += [s.current_node.segment] * len(last)
            segments += [mine.segments[run] for run in tree.runs[:count]]
        self.cached += len(tokens) - len(self.rejected) - len(released)
        return Feed(
            tokens,
            positions,
            segments,
            reach=reach,
            sample_at=asks,
            shared=prompt.shared if first else 0,
            drop=[*self.rejected, *released],
            move={index: segment for index, segment in self.move.items() if index not in set(released)},
            want_hidden=True,
        )

    def _drafts_of(self, s: AparSequence, reach: dict[tuple[int, int], Reach]) -> _Drafts:
        if s not in self.drafts:
            if not self.free:
                runs = range(self.group.segments, self.group.segments + len(self.tree.above))
                self.group.segments += len(runs)
                above = enumerate(self.tree.above)
                reach |= {(runs[a], runs[b]): Reach.CAUSAL for a, runs_above in above for b in runs_above}
                self.free.append(_Drafts(runs))
            self.drafts[s] = self.free.pop()
        return self.drafts[s]

    def accept(self, decoding: list[AparSequence], predictions: Predictions) -> list[tuple[_Drafts, torch.Tensor]]:
        """Takes the longest right path of each thread's guesses and the token behind it through algorithm 1; of the
        threads that go on, the drafts and the hidden state [hidden size] behind the last token."""
        assert predictions.hidden is not None
        self.group.used += len(decoding)
        self.rejected, self.move = [], {}
        going_on: list[tuple[_Drafts, torch.Tensor]] = []
        first = 0  # the thread's first ask
        for s in decoding:
            mine = self.drafts[s]
            count = len(mine.guesses)
            nodes = self.tree.accepted(mine.guesses, predictions.tokens[first : first + 1 + count])
            kept: set[int] = set()
            for i, place in enumerate((first, *(first + 1 + n for n in nodes))):
                if i > 0 and self.group.used == self.group.max_new_tokens:
                    break
                self.group.used += int(i > 0)
                self.accepted += int(i < len(nodes))
                self.group.append(s, predictions.tokens[place], predictions.logprobs[place])
                if s.last_token in self.group.ends:
                    self.free.append(self.drafts.pop(s))
                    break
                if i < len(nodes):  # this token is in the cache already, as a guess
                    kept.add(nodes[i])
                    index = self.fed + mine.root + 1 + nodes[i]
                    self.move[index] = s.current_node.segment
                    s.current_node.cached.append(index)
                else:
                    going_on.append((mine, predictions.hidden[place]))
            self.rejected += [self.fed + mine.root + 1 + n for n in range(count) if n not in kept]
            mine.guesses = []
            first += 1 + count
        return going_on


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
    """Algorithm 1 with drafts; arguments as of `apar`, `medusa`. Raises ValueError for a tree deeper than the heads."""
    tree = heads.suited(tree)
    group = AparGroup(prompt, max_new_tokens, fork, child, ends, max_threads)
    cost = group.answer.cost
    state = _Decode(group, tree)
    while group.sequences and group.used < max_new_tokens:
        decoding = group.sequences[: max_new_tokens - group.used]
        # Guesses may use what is left beyond the one token of each thread.
        feed = state.feed(prompt, decoding, max_new_tokens - group.used - len(decoding))
        predictions = yield feed
        cost.steps += 1
        cost.max_cached_tokens = max(cost.max_cached_tokens, state.cached)
        going_on = state.accept(decoding, predictions)
        state.fed += len(feed.tokens)
        if going_on and group.used + 1 < max_new_tokens:
            drafted = yield Feed((), (), draft=DraftRequest(heads, [hidden for _, hidden in going_on], tree))
            for (drafts, _), guesses in zip(going_on, drafted.drafts, strict=True):
                drafts.guesses = guesses
    answer = group.finish()
    return AparMedusaAnswer(**vars(answer), decoded=group.predicted, accepted=state.accepted)


class AparMedusaText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        options, (fork, child) = self.options, self.model.control_tokens
        ends, heads = self.model.ends, self.model.heads
        return apar_medusa(prompt, options.max_new_tokens, fork, child, ends, heads, max_threads=options.max_threads)
