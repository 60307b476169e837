"""IPPD, intra-prompt parallel decoding: all questions on all contexts of a prompt at once
("Intraprompt Parallel Decoding for Common-Context Question Answering", section 4, equations 1 to
10, appendix A.1).

A prompt is a tree: an instruction, contexts under it, questions under each context. Every
(instruction, context, question) has the positions that it would have alone and sees nothing else,
and the positions of an answer's tokens follow those of its question. So every answer is the one
that its question would get in a separate prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.methods.parts import Parts
from raypd.decoding.program import Feed, Program, StatesFull
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import Reach


@dataclass
class Question:
    """A question and the rules for its answer, which are functions of the tokens decoded so far.

    Attributes:
        stops: Whether the answer is complete; if so, its last token is not fed.
        allowed_token_ids: The tokens that may come next; None for all.
    """

    tokens: Sequence[int]
    stops: Callable[[Sequence[int]], bool]
    allowed_token_ids: Callable[[Sequence[int]], AllowedTokens | None] | None = None


@dataclass
class Context:
    """The tokens of a context and any number of questions on it."""

    tokens: Sequence[int]
    questions: list[Question] = field(default_factory=list)


@dataclass
class PromptTree:
    """An instruction, which other prompts may share, and the contexts under it."""

    instruction: Sequence[int]
    contexts: list[Context] = field(default_factory=list)


def header(prompt: PromptTree) -> Feed:
    """Lay the prompt out as one sequence (equation 1), sampled at the end of every question.

    Positions are virtual (equations 3 to 5). Segment 0 is the instruction; after it, there is one
    segment per context, each followed by one per question on it. The mask is equation 9, with ALL
    for everything above a token in the tree: every position there is lower than the token's own, so
    equation 6 always holds. Contexts without questions are left out, because nothing reads them.

    Raises:
        ValueError: If a question has no tokens; nothing could be sampled at its end.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    ends: list[int] = []
    reach: dict[tuple[int, int], Reach] = {}
    continues: dict[int, int] = {}
    contexts: list[int] = []

    def append(piece: Sequence[int], position: int, segment: int) -> int:
        """Append a piece of the tree; return the position after it."""
        tokens.extend(piece)
        positions.extend(range(position, position + len(piece)))
        segments.extend([segment] * len(piece))
        return position + len(piece)

    def begin(segment: int, row: int) -> None:
        """Let a segment continue from a row, unless the segment is at the beginning."""
        if row >= 0:
            continues[segment] = row

    after_instruction = append(prompt.instruction, 0, 0)
    instruction_end = len(tokens) - 1
    segment = 0
    for context in prompt.contexts:
        if not context.questions:
            continue
        segment += 1
        context_segment = segment
        contexts.append(segment)
        begin(segment, instruction_end)
        reach[context_segment, 0] = Reach.ALL
        reach[context_segment, context_segment] = Reach.CAUSAL
        after_context = append(context.tokens, after_instruction, context_segment)
        context_end = len(tokens) - 1 if context.tokens else instruction_end
        for question in context.questions:
            if not question.tokens:
                raise ValueError("a question holds no token")
            segment += 1
            begin(segment, context_end)
            reach[segment, 0] = Reach.ALL
            reach[segment, context_segment] = Reach.ALL
            reach[segment, segment] = Reach.CAUSAL
            append(question.tokens, after_context, segment)
            ends.append(len(tokens) - 1)
    return Feed(
        tokens,
        positions,
        segments,
        reach,
        sample_at=ends,
        shared=len(prompt.instruction),
        continues=continues,
        closed=[0, *contexts],
    )


def intra_prompt(prompt: PromptTree, max_answer_tokens: int) -> Program[list[Continuation]]:
    """Answer all questions at once (section 4.2).

    Args:
        prompt: The tree of instruction, contexts and questions.
        max_answer_tokens: The number of tokens after which an answer is cut.

    Returns:
        The answers, context by context.

    Raises:
        ValueError: If a question has no tokens.
    """
    questions = [question for context in prompt.contexts for question in context.questions]
    answers = [Continuation() for _ in questions]
    if not questions:
        return answers
    head = header(prompt)
    assert head.segments is not None
    ends = [head.positions[index] for index in head.sample_at]
    segments = [head.segments[index] for index in head.sample_at]

    def allowed(n: int) -> AllowedTokens | None:
        rule = questions[n].allowed_token_ids
        return None if rule is None else rule(answers[n].tokens)

    whole = replace(head, allowed_token_ids=[allowed(n) for n in range(len(questions))])
    parts = Parts(whole)
    feed = parts.next(0)
    try:
        predictions = yield feed
    except StatesFull as full:
        # The questions are answered in groups, one after the other. No answer sees another. Each
        # question may have its own context, which needs a state, too.
        has_one_context = len(head.closed) == 2
        parts = Parts(whole, full.segments - 1 if has_one_context else full.segments // 2)
        feed = parts.next(0)
        predictions = yield feed
    fed = len(feed.tokens)
    closed: list[int] = []  # Segments of answers that were completed since the last feed.
    for number in range(len(parts)):
        if number:
            feed = parts.next(fed)
            feed = replace(feed, closed=[*feed.closed, *closed], decoded=_decoded(answers))
            predictions = yield feed
            fed += len(feed.tokens)
        live = list(parts.samples(number))
        for t in range(1, max_answer_tokens + 1):
            sampled = zip(live, predictions.tokens, predictions.logprobs, strict=True)
            for n, token, logprob in sampled:
                answers[n].tokens.append(token)
                answers[n].logprobs.append(logprob)
                answers[n].stopped = questions[n].stops(answers[n].tokens)
            is_last = t == max_answer_tokens
            closed = [segments[n] for n in live if answers[n].stopped or is_last]
            live = [n for n in live if not answers[n].stopped]
            if not live or is_last:
                break
            predictions = yield Feed(
                [answers[n].tokens[-1] for n in live],
                [ends[n] + t for n in live],  # equation 2
                [segments[n] for n in live],
                closed=closed,
                sample_at=range(len(live)),
                allowed_token_ids=[allowed(n) for n in live],
                decoded=_decoded(answers) if len(parts) > 1 else None,
            )
            fed += len(live)
    return answers


def _decoded(answers: list[Continuation]) -> int:
    """Count the tokens of all answers."""
    return sum(len(answer.tokens) for answer in answers)
