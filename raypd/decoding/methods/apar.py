"""APAR: a model that forks its own decoding ("APAR: LLMs Can Do Auto-Parallel Auto-Regressive
Decoding", section 2, algorithm 1).

The model writes [Fork] where the text that follows is detail that can be decoded in parallel with
the next paragraph. In the pass after that, the thread continues with its next paragraph, and a copy
of the thread is given a [Child] and begins the detail. Paragraphs are the nodes of a binary tree
(first_child, next_sibling). A token sees only the paragraphs on its path to the root.

With Medusa heads every thread drafts (section 3.2, Medusa-APAR): a pass holds each thread's last
token and, below it, a tree of guesses, which see the thread's path. The accepted tokens go through
algorithm 1 one by one. The paragraphs are the same, token for token; only when the maximum of
tokens or threads is reached are they cut or begun in a different order.
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
    """A node of the paragraph tree: PNODE of algorithm 1.

    `tokens` begin with [Child], and end with [Fork] or the end token, if these were decoded.
    [Child] has the log-probability 0.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_child: Paragraph | None = field(default=None, repr=False)
    next_sibling: Paragraph | None = field(default=None, repr=False)


@dataclass
class AparCost:
    """What it took to decode a tree, or its text one token at a time (section 3.4).

    Attributes:
        steps: Forward passes.
        max_cached_tokens: The largest number of tokens in the cache at the same time, including the
            prompt.
        attended_tokens: The number of tokens seen by a prediction, averaged over all predictions.
    """

    steps: int = 0
    max_cached_tokens: int = 0
    attended_tokens: float = 0.0


@dataclass
class AparAnswer:
    """A decoded paragraph tree.

    Attributes:
        tokens: The text in the order root, first_child, next_sibling, without control tokens.
        cut: The number of tokens up to the end of the first paragraph whose thread was cut or has a
            child that never began; None if all threads ended.
        threads: The number of threads that ran.
        unstarted_threads: The number of children that were forked when no tokens were left for
            them.
        cost: The cost of this decoding.
        flattened: The cost of decoding the same text autoregressively.
        decoded: The number of tokens that the model wrote, in all threads.
        accepted: How many of them were guessed; None if nothing was drafted.
    """

    root: Paragraph
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut: int | None = None
    threads: int = 1
    unstarted_threads: int = 0
    cost: AparCost = field(default_factory=AparCost)
    flattened: AparCost = field(default_factory=AparCost)
    decoded: int = 0
    accepted: int | None = None

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = {
            "threads": self.threads,
            "unstarted_threads": self.unstarted_threads,
            "apar": asdict(self.cost),
            "flattened": asdict(self.flattened),
        }
        if self.accepted is None:
            # Each pass decodes one token of every thread.
            counters["longest_path"] = self.cost.steps
        else:
            steps = max(1, self.cost.steps)
            counters["average_accepted_tokens"] = self.decoded / steps
        return counters

    def generated(self, decode: Decode) -> GeneratedText:
        return GeneratedText(
            decode(self.tokens),
            cut=None if self.cut is None else len(decode(self.tokens[: self.cut])),
            tokens=len(self.tokens),
            logprobs=self.logprobs,
            counters=self.counters(),
        )


@dataclass(eq=False)
class AparNode:
    """A paragraph while it is being decoded.

    Attributes:
        segment: The segment of its tokens.
        parent: The paragraph above it on the path to the root.
        rows: The row indices of its tokens in the cache.
        users: The number of unfinished threads that have it on their path.
    """

    paragraph: Paragraph
    segment: int
    parent: AparNode | None = None
    rows: list[int] = field(default_factory=list)
    users: int = 1

    def path(self) -> Iterator[AparNode]:
        """Yield the nodes from this one to the root."""
        node: AparNode | None = self
        while node is not None:
            yield node
            node = node.parent


class Tree:
    """Which guesses are tried together.

    Each path gives the rank of the guess for every head, starting with the first: (0,) is head 1's
    best guess, (0, 2) is head 2's third-best guess after that. All lists are in the order of the
    nodes, by depth.

    Attributes:
        ranks: [nodes], the rank of each node's guess.
        depths: [nodes], starting at 1.
        parents: [nodes], the node above; -1 for the text's last token.
        runs: [nodes], the index of the run that the node is in. A sequence of nodes without
            branches is one run and shares a segment.
        visible_runs: [runs], the runs that a run's nodes see, including itself.

    Raises:
        ValueError: If a path is empty, has a negative rank, or lacks the path above it.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        node_of_path = {path: node for node, path in enumerate(self.paths)}
        for path in self.paths:
            has_parent = len(path) == 1 or path[:-1] in node_of_path
            if not path or min(path) < 0 or not has_parent:
                raise ValueError(
                    f"{path} is not a path of a tree: ranks from 0, and the path above it must be "
                    "there"
                )
        self.ranks = [path[-1] for path in self.paths]
        self.depths = [len(path) for path in self.paths]
        self.parents = [node_of_path.get(path[:-1], -1) for path in self.paths]
        self.runs: list[int] = []
        self.visible_runs: list[list[int]] = []
        for parent in self.parents:
            if parent >= 0 and self.parents.count(parent) == 1:
                self.runs.append(self.runs[parent])
                continue
            new_run = len(self.visible_runs)
            runs_above = self.visible_runs[self.runs[parent]] if parent >= 0 else []
            self.runs.append(new_run)
            self.visible_runs.append([*runs_above, new_run])

    def size(self, max_depth: int) -> int:
        """Count the nodes that are not deeper than `max_depth`. They come first."""
        return sum(depth <= max_depth for depth in self.depths)

    def accepted(self, guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """Return the nodes, from the top down, whose guess matches what was sampled above them.

        Args:
            guesses: [n], the token ids of the first n nodes.
            sampled: [1 + n], the token ids sampled after the text's last token and after each
                guess.
        """
        accepted: list[int] = []
        node: int | None = self._child(-1, sampled[0], guesses)
        while node is not None:
            accepted.append(node)
            node = self._child(node, sampled[1 + node], guesses)
        return accepted

    def _child(self, parent: int, token: int, guesses: Sequence[int]) -> int | None:
        """Return the first node under `parent` that guesses `token`."""
        for node, guess in enumerate(guesses):
            if self.parents[node] == parent and guess == token:
                return node
        return None


@dataclass
class _Drafts:
    """A thread's guesses.

    A new thread takes over the guesses of a thread that has ended, so that no segments are added
    unnecessarily.

    Attributes:
        segments: The segment of each run of the tree.
        path: The segments that these segments reach.
        guesses: [n], the token ids of the tree's first n nodes.
        root: The row index of the thread's last token; the guesses are in the rows after it.
    """

    segments: range
    path: set[int] = field(default_factory=set)
    guesses: list[int] = field(default_factory=list)
    root: int = 0

    def row(self, node: int) -> int:
        return self.root + 1 + node

    def follow(self, thread: AparSequence) -> dict[tuple[int, int], Reach]:
        """Return the pairs that let the guesses see the path of `thread` and nothing else."""
        path = {node.segment for node in thread.current_node.path()}
        pairs: dict[tuple[int, int], Reach] = {}
        for segment in self.segments:
            for unseen_segment in self.path - path:
                pairs[segment, unseen_segment] = Reach.HIDDEN
            for joined in path - self.path:
                pairs[segment, joined] = Reach.ALL
        self.path = path
        return pairs


@dataclass(eq=False)
class AparSequence:
    """A thread: s of algorithm 1.

    Attributes:
        last_token: Its last token, which is not fed yet.
        position: The position of `last_token`.
        current_node: Its leaf of the paragraph tree.
        drafts: Its guesses; None if nothing is guessed or the thread has not been fed yet.
    """

    last_token: int
    position: int
    current_node: AparNode
    drafts: _Drafts | None = None


@dataclass
class _Rows:
    """The tokens of a feed that is being assembled."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    sample_at: list[int] = field(default_factory=list)

    def append(self, token: int, position: int, segment: int) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.segments.append(segment)


@dataclass
class AparGroup:
    """The paragraph tree and the threads that have not finished: G of algorithm 1.

    Attributes:
        stops: Whether a paragraph's tokens end its thread.
        max_threads: The largest number of threads that run at the same time.
        tree: The tree of each thread's guesses.
        waiting: Threads that were forked beyond `max_threads`; what they see stays in the cache.
        free: The drafts of threads that have ended.
        used: The number of tokens in all threads, including each [Child].
        attended: The number of tokens seen by a prediction, summed over all predictions.
        predicted: The number of predicted tokens; `accepted` of them were guesses.
        segments: The number of segments so far.
        fed: The number of tokens fed so far; `cached` of them are in the cache.
        reach, drop, move: The values for the next feed. Accepted guesses move to the segment of
            their thread.
    """

    prompt: Prompt
    max_new_tokens: int
    fork: int
    child: int
    stops: Stops
    max_threads: int
    tree: Tree
    waiting: deque[AparSequence] = field(default_factory=deque)
    free: list[_Drafts] = field(default_factory=list)
    used: int = 0
    attended: int = 0
    predicted: int = 0
    accepted: int = 0
    segments: int = 1
    fed: int = 0
    cached: int = 0
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)
    drop: list[int] = field(default_factory=list)
    move: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Lines 4 to 6.
        root = AparNode(Paragraph(), segment=0)
        self.answer = AparAnswer(root.paragraph)
        last_position = len(self.prompt.tokens) - 1
        self.sequences = [AparSequence(self.prompt.tokens[-1], last_position, root)]

    def run(self, heads: Any) -> Program[None]:
        """Decode until every thread has ended or no token is left (lines 8 and 9).

        Args:
            heads: The heads that guess, if the tree has nodes.
        """
        while self.sequences and self.used < self.max_new_tokens:
            # If fewer tokens are left than threads, the older threads get them.
            decoding = self.sequences[: self.max_new_tokens - self.used]
            predictions = yield self.feed(decoding)
            self.used += len(decoding)
            self.move = {}
            if not self.tree.paths:
                self.take(decoding, predictions)
                continue
            drafting = self.take_accepted(decoding, predictions)
            # A guess is useful only if two more tokens may come.
            if drafting and self.used + 1 < self.max_new_tokens:
                assert predictions.hidden is not None
                hidden = [predictions.hidden[index] for _, index in drafting]
                drafted = yield Feed((), (), draft=DraftRequest(heads, hidden, self.tree))
                for (drafts, _), guesses in zip(drafting, drafted.drafts, strict=True):
                    drafts.guesses = guesses

    def feed(self, decoding: list[AparSequence]) -> Feed:
        """Return each thread's last token and its guesses; in the first pass, the prompt."""
        is_first = self.fed == 0
        rows = _Rows()
        if is_first:
            count = len(self.prompt.tokens)
            rows = _Rows(list(self.prompt.tokens), list(range(count)), [0] * count)
        for thread in decoding:
            if not is_first:
                thread.current_node.rows.append(self.fed + len(rows.tokens))
                rows.append(thread.last_token, thread.position, thread.current_node.segment)
            rows.sample_at.append(len(rows.tokens) - 1)
            if self.tree.paths:
                # Guesses may use the tokens that are left beyond one token per thread.
                spare = self.max_new_tokens - self.used - len(decoding)
                self._feed_guesses(thread, rows, self.tree.size(spare))
        self.fed += len(rows.tokens)
        self.cached += len(rows.tokens) - len(self.drop)
        cost = self.answer.cost
        cost.steps += 1
        cost.max_cached_tokens = max(cost.max_cached_tokens, self.cached)
        dropped = set(self.drop)
        feed = Feed(
            rows.tokens,
            rows.positions,
            rows.segments,
            reach=self.reach,
            sample_at=rows.sample_at,
            drop=self.drop,
            shared=self.prompt.shared if is_first else 0,
            move={row: segment for row, segment in self.move.items() if row not in dropped},
            want_hidden=bool(self.tree.paths),
            decoded=self.predicted if self.tree.paths else None,
        )
        self.reach = {}
        self.drop = []
        return feed

    def _feed_guesses(self, thread: AparSequence, rows: _Rows, limit: int) -> None:
        """Append at most `limit` guesses after the thread's last token."""
        if thread.drafts is None:
            thread.drafts = self._new_drafts()
        drafts = thread.drafts
        drafts.guesses = drafts.guesses[:limit]
        drafts.root = self.fed + len(rows.tokens) - 1
        self.reach |= drafts.follow(thread)
        for node, guess in enumerate(drafts.guesses):
            rows.sample_at.append(len(rows.tokens))
            segment = drafts.segments[self.tree.runs[node]]
            rows.append(guess, thread.position + self.tree.depths[node], segment)

    def _new_drafts(self) -> _Drafts:
        if self.free:
            return self.free.pop()
        segments = range(self.segments, self.segments + len(self.tree.visible_runs))
        self.segments += len(segments)
        for run, visible_runs in enumerate(self.tree.visible_runs):
            for visible_run in visible_runs:
                self.reach[segments[run], segments[visible_run]] = Reach.CAUSAL
        return _Drafts(segments)

    def take(self, decoding: list[AparSequence], predictions: Predictions) -> None:
        """Give each thread the token that was sampled for it."""
        for s, x, logprob in zip(decoding, predictions.tokens, predictions.logprobs, strict=True):
            self.append(s, x, logprob)

    def take_accepted(
        self, decoding: list[AparSequence], predictions: Predictions
    ) -> list[tuple[_Drafts, int]]:
        """Give each thread the longest correct path of its guesses and the token after it.

        Returns:
            For each thread that continues, its drafts and the index of its last token in the
            predictions.
        """
        drafting: list[tuple[_Drafts, int]] = []
        first = 0  # index of the thread's first prediction
        for thread in decoding:
            drafts = thread.drafts
            assert drafts is not None
            count = len(drafts.guesses)
            sampled = predictions.tokens[first : first + 1 + count]
            nodes = self.tree.accepted(drafts.guesses, sampled)
            last = self._take_path(thread, drafts, nodes, predictions, first)
            if last is not None:
                drafting.append((drafts, last))
            drafts.guesses = []
            first += 1 + count
        return drafting

    def _take_path(
        self,
        thread: AparSequence,
        drafts: _Drafts,
        nodes: list[int],
        predictions: Predictions,
        first: int,
    ) -> int | None:
        """Give one thread the tokens sampled above and after the correct guesses.

        Args:
            thread: The thread that decoded.
            drafts: Its guesses.
            nodes: The nodes of the correct guesses, from the top down.
            predictions: The predictions of the whole pass.
            first: The index of the prediction after the thread's last token.

        Returns:
            The index of the prediction that became its last token; None if the thread does not
            continue.
        """
        kept: set[int] = set()
        last: int | None = None
        for i, index in enumerate([first, *(first + 1 + node for node in nodes)]):
            if i > 0:
                if self.used == self.max_new_tokens:
                    break
                self.used += 1
            is_guess = i < len(nodes)
            if is_guess:
                self.accepted += 1
            self.append(thread, predictions.tokens[index], predictions.logprobs[index])
            if thread not in self.sequences:
                self.free.append(drafts)
                break
            if is_guess:
                # This token is already in the cache, as a guess.
                kept.add(nodes[i])
                row = drafts.row(nodes[i])
                self.move[row] = thread.current_node.segment
                thread.current_node.rows.append(row)
            else:
                last = index
        self.drop += [drafts.row(node) for node in range(len(drafts.guesses)) if node not in kept]
        return last

    def append(self, s: AparSequence, x: int, logprob: float) -> None:
        """Append the sampled x to a thread (lines 19 to 33). `used` already counts it."""
        # A path has no gaps, so the position of a token gives the number of tokens that it sees.
        self.attended += s.position + 1
        self.predicted += 1
        if s.last_token == self.fork:
            self._fork(s)
        s.current_node.paragraph.tokens.append(x)
        s.current_node.paragraph.logprobs.append(logprob)
        s.last_token = x
        s.position += 1
        if self.stops(s.current_node.paragraph.tokens):
            self.sequences.remove(s)
            self.drop += _release_cache(s)
        self._start_waiting()

    def _fork(self, s: AparSequence) -> None:
        """Open the next paragraph, and the detail that is decoded in parallel (lines 20 to 29)."""
        above = s.current_node
        sibling = self._new_node(above)
        detail = self._new_node(above)
        for node in above.path():
            node.users += 1
        above.paragraph.next_sibling = sibling.paragraph
        above.paragraph.first_child = detail.paragraph
        s.current_node = sibling
        self.waiting.append(AparSequence(self.child, s.position + 1, detail))

    def _new_node(self, above: AparNode) -> AparNode:
        """Open a paragraph that sees the path of the one above it."""
        segment = self.segments
        self.segments += 1
        for node in above.path():
            self.reach[segment, node.segment] = Reach.ALL
        self.reach[segment, segment] = Reach.CAUSAL
        return AparNode(Paragraph(), segment, above)

    def _start_waiting(self) -> None:
        """Give waiting children their [Child] while threads may start.

        Besides [Child], there must be a token left for the child to sample next.
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

    def finish(self, ends: frozenset[int]) -> AparAnswer:
        """Put the text together (line 11) and count its cost.

        Args:
            ends: The ids that end a thread.
        """
        answer = self.answer
        all_ended = not self.sequences and not self.waiting
        answer.unstarted_threads = len(self.waiting)
        control_tokens = {self.fork, self.child, *ends}
        for paragraph in restore(answer.root):
            for token, logprob in zip(paragraph.tokens, paragraph.logprobs, strict=True):
                if token not in control_tokens:
                    answer.tokens.append(token)
                    answer.logprobs.append(logprob)
            ended = paragraph.first_child is not None or ends.intersection(paragraph.tokens[-1:])
            if not all_ended and not ended and answer.cut is None:
                answer.cut = len(answer.tokens)
        if self.predicted:
            answer.cost.attended_tokens = self.attended / self.predicted
        # Decoded autoregressively, the text and, if all threads ended, one end token would be
        # predicted.
        predictions = len(answer.tokens) + all_ended
        if predictions:
            begin = len(self.prompt.tokens)
            answer.flattened = AparCost(
                steps=predictions,
                max_cached_tokens=begin + predictions - 1,
                attended_tokens=begin + (predictions - 1) / 2,
            )
        return answer


def apar(
    prompt: Prompt,
    max_new_tokens: int,
    fork: int,
    child: int,
    ends: frozenset[int],
    max_threads: int = 64,
    heads: Any = None,
    tree: Tree | None = None,
) -> Program[AparAnswer]:
    """Decode until every thread has ended (algorithm 1).

    No position exceeds len(prompt.tokens) + max_new_tokens.

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The largest number of tokens in all threads together, including each
            [Child].
        fork: The id of [Fork].
        child: The id of [Child].
        ends: The ids that end a thread.
        max_threads: The largest number of threads that run at the same time. Further children wait
            until a thread has ended.
        heads: The `MedusaHeads` that draft; None for passes that decode one token of each thread.
        tree: Which guesses are tried together; None for the heads' own tree.

    Raises:
        ValueError: If the tree is deeper than there are heads.
    """
    group = AparGroup(
        prompt,
        max_new_tokens,
        fork,
        child,
        stops=lambda tokens: tokens[-1] in ends,
        max_threads=max_threads,
        tree=Tree([]) if heads is None else heads.suited(tree),
    )
    yield from group.run(heads)
    answer = group.finish(ends)
    answer.decoded = group.predicted
    if heads is not None:
        answer.accepted = group.accepted
    return answer


def restore(root: Paragraph) -> Iterator[Paragraph]:
    """Yield the paragraphs in the order of the text: root, first_child, next_sibling (RESTORE)."""
    stack = [root]
    while stack:
        paragraph = stack.pop()
        yield paragraph
        if paragraph.next_sibling is not None:
            stack.append(paragraph.next_sibling)
        if paragraph.first_child is not None:
            stack.append(paragraph.first_child)


def _release_cache(finished: AparSequence) -> list[int]:
    """Return the rows that no other thread has on its path (RELEASECACHE)."""
    rows: list[int] = []
    for node in finished.current_node.path():
        node.users -= 1
        if node.users == 0:
            rows += node.rows
    return rows


class AparText(TextMethod):
    """APAR for text, with Medusa heads if the model has them."""

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        fork, child = self.model.control_tokens
        return apar(
            prompt,
            self.options.max_new_tokens,
            fork,
            child,
            self.model.ends,
            self.method_options.max_threads,
            self.model.heads,
        )
