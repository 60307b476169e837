"""Skeleton of thought: PASTA's baseline that needs no training (Ning et al. 2023, "Skeleton-of-
Thought", section 2; PASTA, sections 1 and 5).

The model is first asked for a skeleton, a numbered list of short points, which is decoded one token
at a time. Then all points are expanded in parallel. Each has its own request in the following turn,
and is a segment that sees the question and the skeleton, which stay in the cache, but no other
point. (In the paper, question and skeleton are written into a new prompt for every point.) The
model only has to follow instructions.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod, TextModel
from raypd.decoding.visibility import Reach

# The paper's requests (section 2.1), without the examples in the first one.
SKELETON_REQUEST = (
    "You're an organizer responsible for only giving the skeleton (not the full content) for "
    "answering the question. Provide the skeleton in a list of points (numbered 1., 2., 3., etc.) "
    "to answer the question. Instead of writing a full sentence, each skeleton point should be "
    "very short with only 3 to 5 words. Generally, the skeleton should have 3 to 10 points.\n\n"
    "Question:\n{question}\n\nNow, please provide the skeleton for this question."
)
# The beginning of the answer to it.
SKELETON_BEGINNING = "1."
POINT_REQUEST = (
    "Continue and only continue the writing of point {number}. Write it very shortly in 1 to 2 "
    "sentences and do not continue with other points!"
)

_POINT = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]*(\S.*?)[ \t]*$", re.MULTILINE | re.ASCII)


@dataclass(eq=False)
class SkeletonPoint:
    """A point of the skeleton.

    Attributes:
        number: Its number, as the model wrote it.
        heading: The text of the point in the skeleton.
        tokens: The tokens that expand it, including an end token.
        stopped: Whether it ended by itself; False if it was cut or there were no tokens left for
            it.
        segment: The segment of its request and its tokens.
        position: The position of its first token.
    """

    number: int
    heading: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    segment: int = 0
    position: int = 0


@dataclass
class SkeletonAnswer:
    """A skeleton and its expanded points.

    Attributes:
        text: One line per point, with its heading and its expansion; the skeleton itself if it has
            no points.
        skeleton: The tokens of the skeleton, including an end token.
        cut: The number of characters of `text` up to the end of the first point that was cut, or of
            all points if the skeleton was cut; None if all ended.
        steps: The number of forward passes.
        longest_path: The largest number of tokens that were decoded one after the other.
        content_tokens: The number of decoded tokens without end tokens.
    """

    text: str
    skeleton: list[int]
    skeleton_logprobs: list[float]
    points: list[SkeletonPoint]
    cut: int | None
    steps: int
    longest_path: int
    content_tokens: int

    def generated(self, decode: Decode) -> GeneratedText:
        logprobs = list(self.skeleton_logprobs)
        for point in self.points:
            logprobs += point.logprobs
        return GeneratedText(
            self.text,
            cut=self.cut,
            tokens=self.content_tokens,
            logprobs=logprobs,
            counters={
                "points": len(self.points),
                "steps": self.steps,
                "longest_path": self.longest_path,
            },
        )


def points_of(skeleton: str) -> list[SkeletonPoint]:
    """Find the numbered lines of a skeleton."""
    return [SkeletonPoint(int(match[1]), match[2]) for match in _POINT.finditer(skeleton)]


def skeleton_of_thought(
    prompt: Prompt,
    max_new_tokens: int,
    request: Callable[[SkeletonPoint], Sequence[int]],
    decode: Decode,
    ends: frozenset[int],
    beginning: str = "",
    max_skeleton_tokens: int = 200,
    max_point_tokens: int = 128,
) -> Program[SkeletonAnswer]:
    """Decode a skeleton, then all its points in parallel.

    Args:
        prompt: The prompt that asks for the skeleton.
        max_new_tokens: The largest number of tokens of skeleton and points together. If fewer
            tokens are left than points, the earlier points get them.
        request: Returns the ids between the skeleton and a point's text: the end of the model's
            turn, the request, and the beginning of the answer.
        decode: Turns ids into text.
        ends: The ids that end the skeleton and each point.
        beginning: The end of the prompt that is already part of the skeleton.
        max_skeleton_tokens: The number of tokens after which the skeleton is cut. Its last line
            then does not count as a point.
        max_point_tokens: The number of tokens after which a point is cut.

    Raises:
        ValueError: If `request` returns no tokens.
    """
    # Stage 1 of the paper.
    limit = min(max_new_tokens, max_skeleton_tokens)
    skeleton = yield from autoregressive(prompt, limit, lambda tokens: tokens[-1] in ends)
    written = skeleton.tokens
    unfed: list[int] = []
    if skeleton.stopped:
        written = written[:-1]
    else:
        # The last token was not fed, because decoding ended with it.
        unfed = written[-1:]
    text = beginning + decode(written)
    points = points_of(text if skeleton.stopped else text.rpartition("\n")[0])
    # Stage 2.
    remaining = max_new_tokens - len(skeleton.tokens)
    position = len(prompt.tokens) + len(written)
    steps = yield from _expand(
        points,
        [list(request(p)) for p in points],
        unfed,
        position,
        remaining,
        max_point_tokens,
        ends,
    )
    longest_point = 0
    content_tokens = len(written)
    lines: list[str] = []
    for point in points:
        content = [token for token in point.tokens if token not in ends]
        content_tokens += len(content)
        longest_point = max(longest_point, len(point.tokens))
        lines.append(f"{point.number}. {point.heading} {decode(content).strip()}".strip())
    if points:
        text = "\n".join(lines)
    return SkeletonAnswer(
        text=text,
        skeleton=skeleton.tokens,
        skeleton_logprobs=skeleton.logprobs,
        points=points,
        cut=_first_cut(points, lines, len(text), skeleton.stopped),
        steps=len(skeleton.tokens) + steps,
        longest_path=len(skeleton.tokens) + longest_point,
        content_tokens=content_tokens,
    )


def _expand(
    points: Sequence[SkeletonPoint],
    requests: Sequence[list[int]],
    unfed: list[int],
    start: int,
    remaining: int,
    max_point_tokens: int,
    ends: frozenset[int],
) -> Program[int]:
    """Decode all points in parallel and return the number of passes.

    Args:
        points: Point n gets segment n + 1 and sees segment 0, which contains the prompt and the
            skeleton.
        requests: The ids before the text of each point.
        unfed: The end of the skeleton that is not in the cache yet.
        start: The position after the skeleton.
        remaining: The number of tokens that may be decoded.
        max_point_tokens: The number of tokens after which a point is cut.
        ends: The ids that end a point.
    """
    if not all(requests):
        raise ValueError("request gives no tokens to begin a point with")
    live = list(points[:remaining])
    tokens = list(unfed)
    positions = list(range(start - len(unfed), start))
    segments = [0] * len(unfed)
    reach: dict[tuple[int, int], Reach] = {}
    sample_at: Sequence[int] = []
    for segment, (point, request) in enumerate(zip(live, requests, strict=False), start=1):
        point.segment = segment
        point.position = start + len(request)
        reach[segment, 0] = Reach.ALL
        reach[segment, segment] = Reach.CAUSAL
        tokens += request
        positions += range(start, point.position)
        segments += [segment] * len(request)
        sample_at = [*sample_at, len(tokens) - 1]
    steps = 0
    while live:
        predictions = yield Feed(tokens, positions, segments, reach=reach, sample_at=sample_at)
        steps += 1
        remaining -= len(live)
        for point, token, logprob in zip(
            live, predictions.tokens, predictions.logprobs, strict=True
        ):
            point.tokens.append(token)
            point.logprobs.append(logprob)
            point.stopped = token in ends
        unfinished = [p for p in live if not p.stopped and len(p.tokens) < max_point_tokens]
        live = unfinished[:remaining]
        tokens = [point.tokens[-1] for point in live]
        positions = [point.position + len(point.tokens) - 1 for point in live]
        segments = [point.segment for point in live]
        reach = {}
        sample_at = range(len(live))
    return steps


def _first_cut(
    points: Sequence[SkeletonPoint], lines: Sequence[str], length: int, skeleton_stopped: bool
) -> int | None:
    """Return the number of characters of the text up to the end of the first point that was cut."""
    for n, point in enumerate(points):
        if not point.stopped:
            return len("\n".join(lines[: n + 1]))
    return None if skeleton_stopped else length


class SkeletonText(TextMethod):
    """Skeleton of thought for text."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self._beginning = model.encode(SKELETON_BEGINNING)

    def user_turn(self, content: str) -> str:
        return SKELETON_REQUEST.format(question=content)

    def extra_positions(self) -> int:
        # A point's request repeats its heading, which is at most as long as the skeleton.
        heading = self.method_options.max_skeleton_tokens
        return len(self._beginning) + len(self._request(SkeletonPoint(999, ""))) + heading

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        options = self.method_options
        return skeleton_of_thought(
            Prompt([*prompt.tokens, *self._beginning], prompt.shared),
            self.options.max_new_tokens,
            self._request,
            self.model.decode,
            self.model.ends,
            SKELETON_BEGINNING,
            options.max_skeleton_tokens,
            options.max_point_tokens,
        )

    def _request(self, point: SkeletonPoint) -> list[int]:
        """Return the turn that asks for a point, and the answer's beginning, which names it."""
        request = POINT_REQUEST.format(number=point.number)
        return self.model.next_turn(request, f"{point.number}. {point.heading}")
