"""IPPD, intra-prompt parallel decoding: all questions on all contexts of a prompt at once
("Intraprompt Parallel Decoding for Common-Context Question Answering", section 4, equations 1 to
10, appendix A.1). A prompt is a tree: an instruction, contexts under it, questions under each.
Every (instruction, context, question) has the positions that it would have alone, and sees nothing
else; answer tokens stand, by position, behind their question. So every answer is the one that its
question would get in a prompt of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.program import Feed, Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import Reach


@dataclass
class Question:
    """A question and the rules of its answer, which are given the tokens decoded so far."""

    tokens: Sequence[int]
    stops: Callable[[Sequence[int]], bool]  # whether it is complete; its last token is then not fed
    # What may come next; None: all.
    allowed_token_ids: Callable[[Sequence[int]], AllowedTokens | None] | None = None


@dataclass
class Context:
    """A context's own tokens and the questions on it: any number of them."""

    tokens: Sequence[int]
    questions: list[Question] = field(default_factory=list)


@dataclass
class PromptTree:
    instruction: Sequence[int]  # other prompts may share it
    contexts: list[Context] = field(default_factory=list)


def header(prompt: PromptTree) -> Feed:
    """Equation 1, the prompt as one sequence, sampled at the end of every question.

    Positions are virtual (equations 3 to 5); segments: 0 the instruction, then one a context, each
    followed by one a question. The mask is equation 9, with ALL for what lies above a token in the
    tree: there every position is lower than the token's own, so equation 6 always holds. Contexts
    without questions are left out: nobody would read them. Raises ValueError where a question has
    no tokens: nothing could be sampled at its end.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    ends: list[int] = []
    reach: dict[tuple[int, int], Reach] = {}

    def append(piece: Sequence[int], position: int, segment: int) -> int:
        """Adds a piece of the tree; returns the position behind it."""
        tokens.extend(piece)
        positions.extend(range(position, position + len(piece)))
        segments.extend([segment] * len(piece))
        return position + len(piece)

    after_p = append(prompt.instruction, 0, 0)
    segment = 0
    for context in prompt.contexts:
        if not context.questions:
            continue
        c = segment = segment + 1
        after_c = append(context.tokens, after_p, c)
        reach |= {(c, 0): Reach.ALL, (c, c): Reach.CAUSAL}
        for question in context.questions:
            if not question.tokens:
                raise ValueError("a question holds no token")
            x = segment = segment + 1
            append(question.tokens, after_c, x)
            reach |= {(x, 0): Reach.ALL, (x, c): Reach.ALL, (x, x): Reach.CAUSAL}
            ends.append(len(tokens) - 1)
    return Feed(tokens, positions, segments, reach, sample_at=ends, shared=len(prompt.instruction))


def intra_prompt(prompt: PromptTree, max_answer_tokens: int) -> Program[list[Continuation]]:
    """Answers of all questions, context by context, all at once.

    Raises ValueError where a question has no tokens.
    """
    questions = [question for context in prompt.contexts for question in context.questions]
    answers = [Continuation() for _ in questions]
    if not questions:
        return answers
    head = header(prompt)
    assert head.segments is not None

    def allowed(of: Sequence[int]) -> list[AllowedTokens | None]:
        rules = [(questions[n].allowed_token_ids, answers[n].tokens) for n in of]
        return [None if rule is None else rule(tokens) for rule, tokens in rules]

    live = list(range(len(questions)))
    predictions = yield replace(head, allowed_token_ids=allowed(live))
    for t in range(1, max_answer_tokens + 1):
        for n, token, logprob in zip(live, predictions.tokens, predictions.logprobs, strict=True):
            answers[n].tokens.append(token)
            answers[n].logprobs.append(logprob)
            answers[n].stopped = questions[n].stops(answers[n].tokens)
        live = [n for n in live if not answers[n].stopped]
        if not live or t == max_answer_tokens:
            break
        predictions = yield Feed(
            [answers[n].tokens[-1] for n in live],
            [head.positions[head.sample_at[n]] + t for n in live],  # equation 2
            [head.segments[head.sample_at[n]] for n in live],
            sample_at=range(len(live)),
            allowed_token_ids=allowed(live),
        )
    return answers
