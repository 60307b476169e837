"""IPPD, intra-prompt parallel decoding: all questions on all contexts of a prompt at once ("Intraprompt Parallel
Decoding for Common-Context Question Answering", section 4, equations 1 to 10, appendix A.1). A prompt is a tree: an
instruction, contexts under it, questions under each. Every (instruction, context, question) has the positions that it
would have alone, and sees nothing else; answer tokens stand, by position, behind their question. So every answer is the
one that its question would get in a prompt of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.program import Feed, Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import Reach


@dataclass
class Question:
    """A question and the rules of its answer, which are given the tokens decoded so far."""

    tokens: Sequence[int]
    stops: Callable[[Sequence[int]], bool]  # whether it is complete; its last token is then not fed
    allowed_token_ids: Callable[[Sequence[int]], AllowedTokens | None] | None = None  # what may come next; None: all


@dataclass
class Context:
    """A context's own tokens and the questions on it: any number of them."""

    tokens: Sequence[int]
    questions: list[Question] = field(default_factory=list)


@dataclass
class PromptTree:
    """The instruction and the contexts under it."""

    instruction: Sequence[int]  # other prompts may share it
    contexts: list[Context] = field(default_factory=list)


@dataclass
class Header:
    """Equation 1: the tree as one sequence."""

    tokens: list[int]  # [tokens], as the next two
    positions: list[int]  # virtual (equations 3 to 5)
    segments: list[int]  # 0 the instruction, then one a context, each followed by one a question
    reach: dict[tuple[int, int], Reach]
    ends: list[int]  # of every question, the index of its last token
    owns: list[int]  # and its segment


def header(prompt: PromptTree) -> Header:
    """The header of a prompt. The mask is equation 9, with ALL for what lies above a token in the tree: there every
    position is lower than the token's own, so equation 6 always holds. Contexts without questions are left out: nobody
    would read them. Raises ValueError where a question has no tokens: nothing could be sampled at its end."""
    head = Header([], [], [], {}, [], [])

    def append(tokens: Sequence[int], position: int, segment: int) -> int:
        """Adds a piece of the tree; returns the position behind it."""
        head.tokens += tokens
        head.positions += range(position, position + len(tokens))
        head.segments += [segment] * len(tokens)
        return position + len(tokens)

    after_p = append(prompt.instruction, 0, 0)
    segment = 0
    for context in prompt.contexts:
        if not context.questions:
            continue
        c = segment = segment + 1
        after_c = append(context.tokens, after_p, c)
        head.reach |= {(c, 0): Reach.ALL, (c, c): Reach.CAUSAL}
        for question in context.questions:
            if not question.tokens:
                raise ValueError("a question holds no token")
            x = segment = segment + 1
            append(question.tokens, after_c, x)
            head.reach |= {(x, 0): Reach.ALL, (x, c): Reach.ALL, (x, x): Reach.CAUSAL}
            head.ends.append(len(head.tokens) - 1)
            head.owns.append(x)
    return head


def intra_prompt(prompt: PromptTree, max_answer_tokens: int) -> Program[list[Continuation]]:
    """Answers of all questions, context by context, all at once. Raises ValueError where a question has no tokens."""
    questions = [question for context in prompt.contexts for question in context.questions]
    answers = [Continuation() for _ in questions]
    if not questions:
        return answers
    head = header(prompt)

    def allowed(of: Sequence[int]) -> list[AllowedTokens | None]:
        rules = [(questions[n].allowed_token_ids, answers[n].tokens) for n in of]
        return [None if rule is None else rule(tokens) for rule, tokens in rules]

    live = list(range(len(questions)))
    predictions = yield Feed(
        head.tokens,
        head.positions,
        head.segments,
        head.reach,
        sample_at=head.ends,
        allowed_token_ids=allowed(live),
        shared=len(prompt.instruction),
    )
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
            [head.positions[head.ends[n]] + t for n in live],  # equation 2
            [head.owns[n] for n in live],
            sample_at=range(len(live)),
            allowed_token_ids=allowed(live),
        )
    return answers
