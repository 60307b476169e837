"""Skeleton of thought, PASTA's baseline by prompting alone (Ning et al., "Skeleton-of-Thought"; PASTA section 5). The
model is asked for an outline, a numbered list of short points, decoded one token after the other. Then all points are
written out in parallel: each is a segment that sees the question and the outline, which stay in the cache, and is given
a request of its own. The model needs no training, only to follow instructions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod, TextModel
from raypd.decoding.visibility import Reach

# Requests for a task to put into its chat turns.
OUTLINE_REQUEST = (
    "{question}\n\nDo not answer yet. Give the outline of your answer as a numbered list of 3 to 10 points, "
    "3 to 5 words a point, and nothing else."
)
POINT_REQUEST = "Now write out point {index} of the outline, in one or two sentences, and no other point."

_POINT = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]*(\S.*?)[ \t]*$", re.MULTILINE | re.ASCII)


@dataclass
class OutlinePoint:
    """A point of the outline."""

    number: int
    heading: str
    tokens: list[int] = field(default_factory=list)  # that write it out
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # False: cut at the most tokens


@dataclass
class SkeletonAnswer:
    """Outline and points."""

    text: str  # a line a point: "number. heading" and what was written; the outline alone where it has no points
    outline: list[int]
    outline_logprobs: list[float]
    points: list[OutlinePoint]
    cut: int | None  # characters of `text` to the first cut point, all where points are missing; None: all ended
    steps: int  # forward passes
    longest_path: int  # most tokens decoded one after the other
    content_tokens: int  # decoded tokens but end tokens

    def generated(self, decode: Decode) -> GeneratedText:
        logprobs = [*self.outline_logprobs, *(p for point in self.points for p in point.logprobs)]
        counters = {"points": len(self.points), "steps": self.steps, "longest_path": self.longest_path}
        return GeneratedText(self.text, self.cut, self.content_tokens, logprobs, counters=counters)


def points_of(outline: str) -> list[OutlinePoint]:
    """The numbered lines of an outline."""
    return [OutlinePoint(int(match[1]), match[2]) for match in _POINT.finditer(outline)]


def skeleton_of_thought(
    prompt: Prompt,
    max_new_tokens: int,  # of outline and points together
    expand: Callable[[OutlinePoint], Sequence[int]],
    decode: Decode,
    ends: frozenset[int],  # ids that end the outline, and each point
    *,
    max_outline_tokens: int = 200,
    max_point_tokens: int = 128,
    max_points: int = 16,
) -> Program[SkeletonAnswer]:
    """Decodes an outline behind `prompt`, which asks for it, then all its points. Where fewer tokens are left than
    points run, the earlier have them. The last line of an outline that was cut is no point. `expand`: the ids between
    the outline and a point's text: the end of the model's turn, the request, and the beginning of the answer. Raises
    ValueError where it gives none."""
    limit = min(max_new_tokens, max_outline_tokens)
    outline = yield from autoregressive(prompt, limit, lambda tokens: tokens[-1] in ends)
    written = outline.tokens[:-1] if outline.stopped else outline.tokens
    text = decode(written)
    remaining = max_new_tokens - len(outline.tokens)
    listed = points_of(text if outline.stopped else text.rpartition("\n")[0]) if outline.stopped or remaining else []
    points = listed[:max_points]
    requests = [list(expand(point)) for point in points]
    if not all(requests):
        raise ValueError("expand gives no tokens to begin a point with")
    # The outline's last token is in the cache where an end token came from it.
    unfed = [] if outline.stopped else written[-1:]
    position = len(prompt.tokens) + len(written)
    steps = yield from _expand(points, requests, unfed, position, remaining, max_point_tokens, ends)
    lines = [
        f"{p.number}. {p.heading} {decode([t for t in p.tokens if t not in ends]).strip()}".strip() for p in points
    ]
    text = "\n".join(lines) if points else text
    cut = None if outline.stopped and len(points) == len(listed) else len(text)
    unfinished = [n for n, point in enumerate(points) if not point.stopped]
    if unfinished:
        cut = len("\n".join(lines[: unfinished[0] + 1]))
    return SkeletonAnswer(
        text=text,
        outline=outline.tokens,
        outline_logprobs=outline.logprobs,
        points=points,
        cut=cut,
        steps=len(outline.tokens) + steps,
        longest_path=len(outline.tokens) + max((len(point.tokens) for point in points), default=0),
        content_tokens=len(written) + sum(t not in ends for point in points for t in point.tokens),
    )


def _expand(
    points: Sequence[OutlinePoint],
    requests: Sequence[list[int]],
    unfed: list[int],
    start: int,
    remaining: int,
    max_point_tokens: int,
    ends: frozenset[int],
) -> Program[int]:
    """Decodes all points side by side behind the outline, which ends before position `start`; the number of passes.
    Point n is segment n + 1 and sees segment 0, prompt and outline, of which `unfed` is not in the cache yet."""
    tokens = list(unfed)
    fed = start - len(tokens)  # row index of the next token: all before stand at their index
    positions = list(range(fed, start))
    segments = [0] * len(tokens)
    sample_at: list[int] = []
    reach: dict[tuple[int, int], Reach] = {}
    for n, request in enumerate(requests):
        tokens += request
        positions += range(start, start + len(request))
        segments += [n + 1] * len(request)
        sample_at.append(len(tokens) - 1)
        reach[n + 1, 0] = Reach.ALL
        reach[n + 1, n + 1] = Reach.CAUSAL
    held: list[list[int]] = [[fed + i for i, s in enumerate(segments) if s == n + 1] for n in range(len(points))]
    live = list(range(len(points)))[: max(remaining, 0)]  # the last points may have no token to begin with
    sample_at = sample_at[: len(live)]
    drop: list[int] = []
    steps = 0
    while live:
        fed += len(tokens)
        predictions = yield Feed(tokens, positions, segments, sample_at=sample_at, reach=reach, drop=drop)
        steps, remaining, reach, drop = steps + 1, remaining - len(live), {}, []
        for n, token, logprob in zip(live, predictions.tokens, predictions.logprobs, strict=True):
            point = points[n]
            point.tokens.append(token)
            point.logprobs.append(logprob)
            point.stopped = token in ends
            if point.stopped or len(point.tokens) == max_point_tokens:
                drop += held[n]  # nobody else sees it
        live = [n for n in live if not points[n].stopped and len(points[n].tokens) < max_point_tokens][:remaining]
        tokens = [points[n].tokens[-1] for n in live]
        positions = [start + len(requests[n]) + len(points[n].tokens) - 1 for n in live]
        segments = [n + 1 for n in live]
        sample_at = list(range(len(live)))
        for i, n in enumerate(live):
            held[n].append(fed + i)
    return steps


class SkeletonText(TextMethod):
    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self._request_tokens = len(self._expand(OutlinePoint(999, "")))

    def user_turn(self, content: str) -> str:
        return OUTLINE_REQUEST.format(question=content)

    def most_positions(self) -> int:
        return super().most_positions() + self._request_tokens

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        model = self.model
        return skeleton_of_thought(prompt, self.options.max_new_tokens, self._expand, model.decode, model.ends)

    def _expand(self, point: OutlinePoint) -> list[int]:
        return self.model.next_turn(POINT_REQUEST.format(index=point.number))
