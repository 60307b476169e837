"""APAR: a model that forks its own decoding ("APAR: LLMs Can Do Auto-Parallel Auto-Regressive
Decoding", section 2, algorithm 1). It writes [Fork] where what follows is detail that can be
decoded beside the next paragraph. In the decode behind it the thread goes on with its next
paragraph, and a copy of it gets a [Child] and begins the detail. Paragraphs are a binary tree's
nodes (first_child, next_sibling); a token sees the paragraphs on its path to the root alone.

With Medusa heads every thread drafts (section 3.2, Medusa-APAR): a pass holds each thread's last
token and under it a tree of guesses, which see the thread's path. The accepted tokens go through
algorithm 1 one by one: the paragraphs are the same, token for token, but where the most tokens or
threads are reached, in another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raypd.decoding.program import DraftRequest, Feed, Predictions, Program
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


@dataclass(eq=False)
class Paragraph:
    """A node of the paragraph tree: PNODE of algorithm 1."""

    # [Child] first, [Fork] or the end token last, too.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0.0 of [Child]
    first_child: Paragraph | None = field(default=None, repr=False)
    next_sibling: Paragraph | None = field(default=None, repr=False)


@dataclass
class AparCost:
    """What a tree, or its text decoded one token after the other, takes (section 3.4)."""

    steps: int = 0  # forward passes
    max_cached_tokens: int = 0  # most tokens, prompt included, that are in the cache together
    # Tokens seen when a token was predicted, the mean over the predictions.
    attended_tokens: float = 0.0


@dataclass
class AparAnswer:
    root: Paragraph
    # Root, first_child, next_sibling, without control tokens.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Tokens to the end of the first paragraph with a thread cut, or not begun; None: all ended.
    cut: int | None = None
    threads: int = 1  # all that ever ran
    unstarted_threads: int = 0  # children that were forked and had no tokens left to begin with
    cost: AparCost = field(default_factory=AparCost)  # of this decoding
    # Of the same text decoded autoregressively.
    flattened: AparCost = field(default_factory=AparCost)
    decoded: int = 0  # tokens of the model, in all threads
    accepted: int | None = None  # those of them that were guessed; None: nothing was drafted

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = {
            "threads": self.threads,
            "unstarted_threads": self.unstarted_threads,
        }
        counters |= {"apar": asdict(self.cost), "flattened": asdict(self.flattened)}
        if self.accepted is None:
            # A pass decodes a token of every thread.
            return {**counters, "longest_path": self.cost.steps}
        return {
            **counters,
            "average_accepted_tokens": self.decoded / self.cost.steps if self.cost.steps else 0.0,
        }

    def generated(self, decode: Decode) -> GeneratedText:
        cut = None if self.cut is None else len(decode(self.tokens[: self.cut]))
        return GeneratedText(
            decode(self.tokens), cut, len(self.tokens), self.logprobs, counters=self.counters()
        )


@dataclass(eq=False)
class AparNode:
    paragraph: Paragraph
    segment: int
    parent: AparNode | None = None
    cached: list[int] = field(default_factory=list)  # row indices of its tokens in the cache
    users: int = 1  # unfinished sequences that have it on their path

    def path(self) -> Iterator[AparNode]:
        node: AparNode | None = self
        while node is not None:
            yield node
            node = node.parent


class Tree:
    """Which guesses are tried together: each path names the rank of the guess at every head from
    the first on: (0,) is head 1's best guess, (0, 2) head 2's third best behind it. Lists are in
    the order of the nodes (by depth). Raises ValueError where a path is empty, has a negative rank,
    or the path above it is missing.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        place = {path: i for i, path in enumerate(self.paths)}
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in place):
                raise ValueError(
                    f"{path} is no path of a tree: ranks from 0, and the path above it must be "
                    "there"
                )
        self.ranks = [path[-1] for path in self.paths]  # [n]
        self.depths = [len(path) for path in self.paths]  # [n] from 1
        self.parents = [place.get(path[:-1], -1) for path in self.paths]  # [n], -1: under the text
        # [n]: nodes in a row without branches are one run, which shares a segment.
        self.runs: list[int] = []
        self.above: list[list[int]] = []  # [runs] the runs that a run's nodes see, itself included
        for parent in self.parents:
            if parent >= 0 and self.parents.count(parent) == 1:
                self.runs.append(self.runs[parent])
            else:
                self.runs.append(len(self.above))
                self.above.append(
                    [*(self.above[self.runs[parent]] if parent >= 0 else []), self.runs[-1]]
                )

    def size(self, depth: int) -> int:
        """How many nodes, the first ones, are not deeper than `depth`."""
        return sum(d <= depth for d in self.depths)

    def accepted(self, guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """The nodes, from the top down, whose guess (of `guesses`: the first nodes') is what was
        `sampled` above them: ids [1 + nodes] behind the text's last token and behind each guess.
        """
        nodes: list[int] = []
        while True:
            node = nodes[-1] if nodes else -1
            hit = [
                n
                for n in range(len(guesses))
                if self.parents[n] == node and guesses[n] == sampled[node + 1]
            ]
            if not hit:
                return nodes
            nodes.append(hit[0])


@dataclass
class _Drafts:
    """A thread's guesses; a new thread takes over an ended one's, so that no segment is added
    without need.
    """

    segments: range  # of the tree's runs, in which they are fed
    path: set[int] = field(default_factory=set)  # what these reach
    guesses: list[int] = field(default_factory=list)
    root: int = 0  # row index of the thread's last token; the guesses stand behind it

    def follow(self, s: AparSequence) -> dict[tuple[int, int], Reach]:
        """The pairs that make the segments reach the path of `s`, and nothing but it and each
        other.
        """
        path = {node.segment for node in s.current_node.path()}
        pairs = {
            (segment, gone): Reach.HIDDEN for segment in self.segments for gone in self.path - path
        }
        pairs |= {
            (segment, new): Reach.ALL for segment in self.segments for new in path - self.path
        }
        self.path = path
        return pairs


@dataclass(eq=False)
class AparSequence:
    """A thread."""

    last_token: int  # not fed yet
    position: int  # of `last_token`
    current_node: AparNode  # its leaf of the tree
    drafts: _Drafts | None = None  # None: nothing is guessed, or it was not fed yet


@dataclass
class AparGroup:
    """The paragraph tree and the sequences that have not finished (G of algorithm 1), as they grow
    token by token.
    """

    prompt: Prompt
    max_new_tokens: int
    fork: int
    child: int
    stops: Stops  # whether a paragraph's tokens are all of its thread
    max_threads: int  # most that run (`sequences`)
    tree: Tree  # of each thread's guesses
    # Forked beyond them; what they see stays in the cache.
    waiting: deque[AparSequence] = field(default_factory=deque)
    free: list[_Drafts] = field(default_factory=list)  # of threads that have ended
    used: int = 0  # tokens in all threads, each [Child] included
    attended: int = 0  # tokens seen when a token was predicted, over all predictions
    predicted: int = 0
    accepted: int = 0  # of these: guesses
    segments: int = 1
    fed: int = 0
    cached: int = 0  # of the tokens fed
    # For the next feed, as `drop`, `move`.
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)
    drop: list[int] = field(default_factory=list)
    # Right guesses -> the segment of the thread whose text they are.
    move: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        root = AparNode(Paragraph(), segment=0)
        self.answer = AparAnswer(root.paragraph)
        self.sequences = [AparSequence(self.prompt.tokens[-1], len(self.prompt.tokens) - 1, root)]

    def feed(self, decoding: list[AparSequence]) -> Feed:
        """Each thread's last token (the prompt in the first pass), and its guesses."""
        tree, first = self.tree, self.fed == 0
        # Guesses may use what is left beyond the one token of each thread.
        size = tree.size(self.max_new_tokens - self.used - len(decoding))
        tokens = list(self.prompt.tokens) if first else []
        positions, segments = [*range(len(tokens))], [0] * len(tokens)
        asks: list[int] = []
        for s in decoding:
            if not first:
                s.current_node.cached.append(self.fed + len(tokens))
                tokens.append(s.last_token)
                positions.append(s.position)
                segments.append(s.current_node.segment)
            asks.append(len(tokens) - 1)
            if tree.paths:
                drafts = s.drafts = s.drafts or self._new_drafts()
                self.reach |= drafts.follow(s)
                drafts.guesses, drafts.root = drafts.guesses[:size], self.fed + asks[-1]
                count = len(drafts.guesses)
                asks += range(len(tokens), len(tokens) + count)
                tokens += drafts.guesses
                positions += [s.position + depth for depth in tree.depths[:count]]
                segments += [drafts.segments[run] for run in tree.runs[:count]]
        self.fed, self.cached = self.fed + len(tokens), self.cached + len(tokens) - len(self.drop)
        cost = self.answer.cost
        cost.steps, cost.max_cached_tokens = (
            cost.steps + 1,
            max(cost.max_cached_tokens, self.cached),
        )
        reach, drop, self.reach, self.drop = self.reach, self.drop, {}, []
        return Feed(
            tokens,
            positions,
            segments,
            reach=reach,
            sample_at=asks,
            drop=drop,
            shared=self.prompt.shared if first else 0,
            move={index: segment for index, segment in self.move.items() if index not in set(drop)},
            want_hidden=bool(tree.paths),
            decoded=self.predicted if tree.paths else None,
        )

    def _new_drafts(self) -> _Drafts:
        if self.free:
            return self.free.pop()
        runs = range(self.segments, self.segments + len(self.tree.above))
        self.segments += len(runs)
        self.reach |= {
            (runs[a], runs[b]): Reach.CAUSAL
            for a, above in enumerate(self.tree.above)
            for b in above
        }
        return _Drafts(runs)

    def take(
        self, decoding: list[AparSequence], predictions: Predictions
    ) -> list[tuple[_Drafts, int]]:
        """Takes the longest right path of each thread's guesses and the token behind it through
        algorithm 1; of the threads that go on, the drafts and the place in the predictions of the
        last token.
        """
        self.used += len(decoding)
        self.move = {}
        if not self.tree.paths:
            for s, x, logprob in zip(
                decoding, predictions.tokens, predictions.logprobs, strict=True
            ):
                self.append(s, x, logprob)
            return []
        going_on: list[tuple[_Drafts, int]] = []
        first = 0  # the thread's first ask
        for s in decoding:
            drafts = s.drafts
            assert drafts is not None
            count = len(drafts.guesses)
            nodes = self.tree.accepted(
                drafts.guesses, predictions.tokens[first : first + 1 + count]
            )
            kept: set[int] = set()
            for i, place in enumerate((first, *(first + 1 + n for n in nodes))):
                if i > 0 and self.used == self.max_new_tokens:
                    break
                self.used += int(i > 0)
                self.accepted += int(i < len(nodes))
                self.append(s, predictions.tokens[place], predictions.logprobs[place])
                if s not in self.sequences:
                    self.free.append(drafts)
                    break
                if i < len(nodes):  # this token is in the cache already, as a guess
                    kept.add(nodes[i])
                    self.move[drafts.root + 1 + nodes[i]] = s.current_node.segment
                    s.current_node.cached.append(drafts.root + 1 + nodes[i])
                else:
                    going_on.append((drafts, place))
            self.drop += [drafts.root + 1 + n for n in range(count) if n not in kept]
            drafts.guesses = []
            first += 1 + count
        return going_on

    def append(self, s: AparSequence, x: int, logprob: float) -> None:
        """Lines 19 to 33 for one sequence that has sampled x (counted in `used` already)."""
        self.attended += s.position + 1  # a path has no gaps
        self.predicted += 1
        if s.last_token == self.fork:
            self._fork(s)
        s.current_node.paragraph.tokens.append(x)
        s.current_node.paragraph.logprobs.append(logprob)
        s.last_token, s.position = x, s.position + 1
        if self.stops(s.current_node.paragraph.tokens):
            self.sequences.remove(s)
            self.drop += _released(s)
        self._start_waiting()

    def _fork(self, s: AparSequence) -> None:
        above = s.current_node
        n, n2 = (AparNode(Paragraph(), self.segments + i, above) for i in range(2))
        self.segments += 2
        for node in above.path():
            node.users += 1
            self.reach[n.segment, node.segment] = self.reach[n2.segment, node.segment] = Reach.ALL
        self.reach[n.segment, n.segment] = self.reach[n2.segment, n2.segment] = Reach.CAUSAL
        above.paragraph.next_sibling, above.paragraph.first_child = n.paragraph, n2.paragraph
        s.current_node = n
        self.waiting.append(AparSequence(self.child, s.position + 1, n2))

    def _start_waiting(self) -> None:
        """Gives waiting children their [Child] while there is a place, and a token left that they
        sample next.
        """
        while (
            self.waiting
            and len(self.sequences) < self.max_threads
            and self.used + 2 <= self.max_new_tokens
        ):
            s = self.waiting.popleft()
            s.current_node.paragraph.tokens.append(self.child)
            s.current_node.paragraph.logprobs.append(0.0)
            self.sequences.append(s)
            self.used += 1
            self.answer.threads += 1

    def run(self, heads: Any) -> Program[None]:
        """Decodes until every thread has ended, or no token is left; `heads` guess, where the tree
        has places.
        """
        while self.sequences and self.used < self.max_new_tokens:
            decoding = self.sequences[: self.max_new_tokens - self.used]
            predictions = yield self.feed(decoding)
            going_on = self.take(decoding, predictions)
            if going_on and self.used + 1 < self.max_new_tokens:
                assert predictions.hidden is not None
                hidden = [predictions.hidden[place] for _, place in going_on]
                drafted = yield Feed((), (), draft=DraftRequest(heads, hidden, self.tree))
                for (drafts, _), guesses in zip(going_on, drafted.drafts, strict=True):
                    drafts.guesses = guesses

    def finish(self, ends: frozenset[int]) -> AparAnswer:
        answer = self.answer
        stopped = not self.sequences and not self.waiting
        answer.unstarted_threads = len(self.waiting)
        for paragraph in restore(answer.root):
            for token, logprob in zip(paragraph.tokens, paragraph.logprobs, strict=True):
                if token not in (self.fork, self.child) and token not in ends:
                    answer.tokens.append(token)
                    answer.logprobs.append(logprob)
            ended = paragraph.first_child is not None or ends.intersection(paragraph.tokens[-1:])
            if not stopped and not ended and answer.cut is None:
                answer.cut = len(answer.tokens)
        if self.predicted:
            answer.cost.attended_tokens = self.attended / self.predicted
        # The text, and one end token if it came to that.
        if predictions := len(answer.tokens) + stopped:
            start = len(self.prompt.tokens)
            answer.flattened = AparCost(
                predictions, start + predictions - 1, start + (predictions - 1) / 2
            )
        return answer


def apar(
    prompt: Prompt,
    max_new_tokens: int,  # in all threads together, each [Child] counted
    fork: int,  # id of [Fork]
    child: int,  # id of [Child]
    ends: frozenset[int],  # ids that end a thread
    max_threads: int = 64,  # at the same time: a child beyond them waits until a thread has ended
    heads: Any = None,  # MedusaHeads that draft; None: a token of each thread a pass
    tree: Tree | None = None,  # None: the heads' own
) -> Program[AparAnswer]:
    """Algorithm 1: decodes until every thread has come to its end.

    No position passes len(prompt.tokens) + max_new_tokens; with fewer left than threads run, the
    older have them. ValueError: a tree deeper than the heads.
    """
    tree = Tree([]) if heads is None else heads.suited(tree)
    group = AparGroup(
        prompt, max_new_tokens, fork, child, lambda tokens: tokens[-1] in ends, max_threads, tree
    )
    yield from group.run(heads)
    answer = group.finish(ends)
    answer.decoded, answer.accepted = group.predicted, None if heads is None else group.accepted
    return answer


def restore(root: Paragraph) -> Iterator[Paragraph]:
    """RESTORE of algorithm 1: the paragraphs in the order of the text: root, first_child,
    next_sibling.
    """
    stack = [root]
    while stack:
        paragraph = stack.pop()
        yield paragraph
        stack += [p for p in (paragraph.next_sibling, paragraph.first_child) if p is not None]


def _released(finished: AparSequence) -> list[int]:
    """RELEASECACHE: row indices of the tokens that no other sequence has on its path."""
    drop: list[int] = []
    for node in finished.current_node.path():
        node.users -= 1
        if node.users == 0:
            drop += node.cached
    return drop


class AparText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        options, model, (fork, child) = self.options, self.model, self.model.control_tokens
        return apar(
            prompt,
            options.max_new_tokens,
            fork,
            child,
            model.ends,
            options.max_threads,
            model.heads,
        )
