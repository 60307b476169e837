"""APAR: a model that forks its own decoding ("APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", section 2,
algorithm 1). It writes [Fork] where what follows is detail that can be decoded beside the next paragraph. In the decode
behind it the thread goes on with its next paragraph, and a copy of it gets a [Child] and begins the detail. Paragraphs
are a binary tree's nodes (first_child, next_sibling); a token sees the paragraphs on its path to the root alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


@dataclass(eq=False)
class Paragraph:
    """A node of the paragraph tree: PNODE of algorithm 1."""

    tokens: list[int] = field(default_factory=list)  # [Child] first, [Fork] or the end token last, too
    logprobs: list[float] = field(default_factory=list)  # 0.0 of [Child]
    first_child: Paragraph | None = field(default=None, repr=False)
    next_sibling: Paragraph | None = field(default=None, repr=False)


@dataclass
class AparCost:
    """What a tree, or its text decoded one token after the other, takes (section 3.4)."""

    steps: int = 0  # forward passes
    max_cached_tokens: int = 0  # most tokens, prompt included, that are in the cache together
    attended_tokens: float = 0.0  # tokens seen when a token was predicted, the mean over the predictions


@dataclass
class AparAnswer:
    """A paragraph tree and its text."""

    root: Paragraph
    tokens: list[int] = field(default_factory=list)  # root, first_child, next_sibling, without control tokens
    logprobs: list[float] = field(default_factory=list)
    cut: int | None = None  # tokens to the end of the first paragraph with a thread cut, or not begun; None: all ended
    threads: int = 1  # all that ever ran
    unstarted_threads: int = 0  # children that were forked and had no tokens left to begin with
    cost: AparCost = field(default_factory=AparCost)  # of this decoding
    flattened: AparCost = field(default_factory=AparCost)  # of the same text decoded autoregressively

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = {"threads": self.threads, "unstarted_threads": self.unstarted_threads}
        counters |= {"apar": asdict(self.cost), "flattened": asdict(self.flattened)}
        return {**counters, "longest_path": self.cost.steps}  # a pass decodes a token of every thread

    def generated(self, decode: Decode) -> GeneratedText:
        cut = None if self.cut is None else len(decode(self.tokens[: self.cut]))
        return GeneratedText(decode(self.tokens), cut, len(self.tokens), self.logprobs, counters=self.counters())


@dataclass(eq=False)
class AparNode:
    """A paragraph in decoding."""

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


@dataclass(eq=False)
class AparSequence:
    """A thread."""

    last_token: int  # not fed yet
    position: int  # of `last_token`
    current_node: AparNode  # its leaf of the tree


@dataclass
class AparGroup:
    """The paragraph tree and the sequences that have not finished (G of algorithm 1), as they grow token by token."""

    prompt: Prompt
    max_new_tokens: int
    fork: int
    child: int
    ends: frozenset[int]
    max_threads: int  # most that run (`sequences`)
    waiting: deque[AparSequence] = field(default_factory=deque)  # forked beyond them; what they see stays in the cache
    used: int = 0  # tokens in all threads, each [Child] included
    attended: int = 0  # tokens seen when a token was predicted, over all predictions
    predicted: int = 0
    segments: int = 1
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)  # for the next feed, as `drop`
    drop: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        root = AparNode(Paragraph(), segment=0)
        self.answer = AparAnswer(root.paragraph)
        self.sequences = [AparSequence(self.prompt.tokens[-1], len(self.prompt.tokens) - 1, root)]

    def append(self, s: AparSequence, x: int, logprob: float) -> None:
        """Lines 19 to 33 for one sequence that has sampled x (counted in `used` already)."""
        self.attended += s.position + 1  # a path has no gaps
        self.predicted += 1
        if s.last_token == self.fork:
            self._fork(s)
        s.current_node.paragraph.tokens.append(x)
        s.current_node.paragraph.logprobs.append(logprob)
        s.last_token, s.position = x, s.position + 1
        if x in self.ends:
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
        """Gives waiting children their [Child] while there is a place, and a token left that they sample next."""
        while self.waiting and len(self.sequences) < self.max_threads and self.used + 2 <= self.max_new_tokens:
            s = self.waiting.popleft()
            s.current_node.paragraph.tokens.append(self.child)
            s.current_node.paragraph.logprobs.append(0.0)
            self.sequences.append(s)
            self.used += 1
            self.answer.threads += 1

    def take_changes(self) -> tuple[dict[tuple[int, int], Reach], list[int]]:
        """(reach, drop) for the next feed."""
        changes = self.reach, self.drop
        self.reach, self.drop = {}, []
        return changes

    def finish(self) -> AparAnswer:
        answer = self.answer
        stopped = not self.sequences and not self.waiting
        answer.unstarted_threads = len(self.waiting)
        for paragraph in restore(answer.root):
            for token, logprob in zip(paragraph.tokens, paragraph.logprobs, strict=True):
                if token not in (self.fork, self.child) and token not in self.ends:
                    answer.tokens.append(token)
                    answer.logprobs.append(logprob)
            ended = paragraph.first_child is not None or self.ends.intersection(paragraph.tokens[-1:])
            if not stopped and not ended and answer.cut is None:
                answer.cut = len(answer.tokens)
        if self.predicted:
            answer.cost.attended_tokens = self.attended / self.predicted
        if predictions := len(answer.tokens) + stopped:  # the text, and one end token if it came to that
            start = len(self.prompt.tokens)
            answer.flattened = AparCost(predictions, start + predictions - 1, start + (predictions - 1) / 2)
        return answer


def apar(
    prompt: Prompt,
    max_new_tokens: int,  # in all threads together, each [Child] counted
    fork: int,  # id of [Fork]
    child: int,  # id of [Child]
    ends: frozenset[int],  # ids that end a thread
    max_threads: int = 64,  # at the same time: a child beyond them waits until a thread has ended
) -> Program[AparAnswer]:
    """Algorithm 1: decodes until every thread has come to its end. No position passes len(prompt.tokens) +
    max_new_tokens; where fewer tokens are left than threads run, the older threads have them."""
    fed = cached = start = len(prompt.tokens)
    group = AparGroup(prompt, max_new_tokens, fork, child, ends, max_threads)
    cost = group.answer.cost
    while group.sequences and group.used < max_new_tokens:
        decoding = group.sequences[: max_new_tokens - group.used]
        if cost.steps == 0:
            feed = Feed(prompt.tokens, range(start), sample_at=[start - 1], shared=prompt.shared)
        else:
            for s in decoding:
                s.current_node.cached.append(fed)
                fed += 1
            reach, drop = group.take_changes()
            feed = Feed(
                [s.last_token for s in decoding],
                [s.position for s in decoding],
                segments=[s.current_node.segment for s in decoding],
                sample_at=range(len(decoding)),
                reach=reach,
                drop=drop,
            )
            cached += len(decoding) - len(drop)
        cost.steps += 1
        cost.max_cached_tokens = max(cost.max_cached_tokens, cached)
        predictions = yield feed
        group.used += len(decoding)
        for s, x, logprob in zip(decoding, predictions.tokens, predictions.logprobs, strict=True):
            group.append(s, x, logprob)
    return group.finish()


def restore(root: Paragraph) -> Iterator[Paragraph]:
    """RESTORE of algorithm 1: the paragraphs in the order of the text: root, first_child, next_sibling."""
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
        options, (fork, child) = self.options, self.model.control_tokens
        return apar(prompt, options.max_new_tokens, fork, child, self.model.ends, options.max_threads)
