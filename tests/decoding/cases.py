"""Every method on prompts of its own, and what the unmodified model says to each alone."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import AparAnswer, Paragraph, Tree, apar, restore
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, Value, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree, medusa
from raypd.decoding.methods.pasta import Interpreter
from raypd.decoding.methods.space import space
from raypd.decoding.program import Program
from raypd.decoding.sampling import AllowedTokens
from tests.decoding import pasta_script, reference
from tests.decoding.drivers import INSTRUCTION, changed, prompts_of, steered, tokens_of
from tests.tiny import tiny_model

FAMILIES = ["llama", "qwen3", "phi3", "mistral", "gemma2", "gemma3_text", "olmo2"]
WINDOWED = {"mistral", "gemma2", "gemma3_text"}
EOS, FORK, CHILD = 2, 3, 4
MASK = 3
ENDS = frozenset([EOS])
TREES = [
    cartesian_tree(1, 1, 1),
    cartesian_tree(3, 2),
    Tree([(0,), (1,), (2,), (1, 0), (1, 1), (1, 0, 0)]),
]
MOST = 400  # more than any tree of `few_forks` has: where it cuts, threads are cut in another order


@dataclass
class Case:
    """Programs, made anew at each call, and the check of their answers: tokens, log-probabilities
    nearly.
    """

    programs: Callable[[], list[Program[Any]]]
    check: Callable[[list[Any], float], None]


def pair(kind: str, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model twice: for the engine, and unmodified for the reference."""
    if kind in WINDOWED:
        overrides.setdefault("sliding_window", 9)
    model = tiny_model(kind, **overrides)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    return model, stock


def agree(expected, tokens, logprobs, atol=1e-3) -> None:
    """Equal tokens and log-probabilities; a first divergence is excused only at a gap below
    `atol`.
    """
    for i, (token, logprob, gap) in enumerate(expected):
        if i >= len(tokens) or tokens[i] != token:
            assert gap < atol, f"token {i}: {tokens[i : i + 1]} for {token}, gap {gap}"
            return
        assert abs(logprobs[i] - logprob) < atol
    assert len(tokens) == len(expected)


def _divergence(expected: list, part: Any) -> int:
    """The first step at which a part's token is another one than expected; past the last one: none
    is.
    """
    tokens = [token for token, _, _ in expected]
    most = max(len(tokens), len(part.tokens))
    return next((i for i in range(most) if tokens[i : i + 1] != part.tokens[i : i + 1]), 1 << 30)


def compared(
    expected: list[list], ended: Callable[[list[int]], bool]
) -> Callable[[list[Any], float], None]:
    """The check that every answer has the expected parts, each complete where its tokens say so."""

    def check(answers: list[Any], atol: float) -> None:
        for wanted, answer in zip(expected, answers, strict=True):
            found = answer if isinstance(answer, list) else getattr(answer, "points", [answer])
            # Values are decoded side by side and see each other: behind a step where one diverges,
            # all read other text.
            upto = (
                min(
                    (_divergence(want, part) for want, part in zip(wanted, found, strict=True)),
                    default=0,
                )
                + 1
            )
            for want, part in zip(wanted, found, strict=True):
                end = upto if isinstance(part, Value) else None
                agree(want[:end], part.tokens[:end], part.logprobs[:end], atol)
                assert (part.closed if isinstance(part, Value) else part.stopped) == ended(
                    part.tokens
                )
        lengths = {len(want) for wanted in expected for want in wanted}
        assert len(lengths) > 1 or max(map(len, expected)) == 1, (
            "parts of an answer should end at different steps"
        )

    return check


def run_all(engine: Engine, cases: dict[str, Case], atol: float) -> None:
    """Decodes and checks the programs of all cases in one engine."""
    programs = {name: case.programs() for name, case in cases.items()}
    answers = iter(engine.run(program for members in programs.values() for program in members))
    for name, members in programs.items():
        cases[name].check(list(islice(answers, len(members))), atol)


def every(n: int) -> Callable[[Sequence[int]], bool]:
    return lambda tokens: tokens[-1] % n == 0


seventh, eleventh, twenty_third = every(7), every(11), every(23)


def _autoregressive(stock: PreTrainedModel) -> Case:
    prompts = prompts_of(2, 5, 20)
    expected = [
        [reference.autoregressive(stock, prompt.tokens, 12, eleventh)] for prompt in prompts
    ]
    return Case(
        lambda: [autoregressive(prompt, 12, eleventh) for prompt in prompts],
        compared(expected, eleventh),
    )


class EverySeventh:
    """A slot's rules for random models: done at a multiple of 7; optionally even tokens alone at
    first.
    """

    def __init__(self, limited: bool = False) -> None:
        self.limited = limited

    def advance(self, state: int, token: int) -> int:
        return token

    def allowed(self, state: int, left: int) -> AllowedTokens | None:
        return AllowedTokens(np.arange(4, 256, 2)) if self.limited and state == 0 else None

    def forced(self, state: int, left: int) -> list[int]:
        return []

    def done(self, state: int) -> bool:
        return state % 7 == 0

    def completion(self, state: int) -> str | None:
        return None

    def closing(self, tokens: list[int]) -> list[int]:
        return [*tokens[-1:], 3 + len(tokens)]

    def behind(self, tokens: list[int]) -> int:
        return 0


def slotted(rng: random.Random, documents: int, shared: bool) -> SlottedPrompt:
    """A prompt of `documents` stacked documents with ragged skeletons."""
    tokens = [*INSTRUCTION, *(token for _ in range(documents) for token in tokens_of(rng, 2, 14))]
    slots = []
    for _ in range(documents):
        for _ in range(rng.randint(1, 4)):
            tokens += tokens_of(rng, 1, 4)
            slots.append(Slot(len(tokens) - 1, EverySeventh(limited=rng.random() < 0.5)))
    tokens += tokens_of(rng, 0, 2)  # a closing brace behind the last slot
    return SlottedPrompt(tokens, slots, shared=len(INSTRUCTION) if shared else 0)


def _stacked(stacks: tuple[int, ...], isolate_values: bool) -> Callable[[PreTrainedModel], Case]:
    """Stacks of documents, of which every other one shares its instruction."""
    rng = random.Random(3)
    prompts = [slotted(rng, documents, shared=bool(i % 2)) for i, documents in enumerate(stacks)]

    def case(stock: PreTrainedModel) -> Case:
        def values(prompt: SlottedPrompt) -> list:
            def allowed(n: int, tokens: list[int]) -> AllowedTokens | None:
                return prompt.slots[n].grammar.allowed(tokens[-1] if tokens else 0, 9)

            ends, closed = [slot.end for slot in prompt.slots], lambda n, tokens: seventh(tokens)
            return reference.hyper_parallel(
                stock, prompt.tokens, ends, 6, isolate_values, allowed, closed
            )

        expected = [values(prompt) for prompt in prompts]
        return Case(
            lambda: [hyper_parallel(p, 6, isolate_values) for p in prompts],
            compared(expected, seventh),
        )

    return case


def _guided(stock: PreTrainedModel) -> Case:
    """Every value behind all of the answer before it; what `closing` puts behind a value is seen by
    the next.
    """
    rng = random.Random(5)
    prompts = [slotted(rng, 1, shared=bool(i % 2)) for i in range(5)]

    def values(prompt: SlottedPrompt) -> Iterator[list]:
        text, begin = [], 0
        for slot in prompt.slots:
            text += prompt.tokens[begin : slot.end + 1]
            begin = slot.end + 1
            allowed = lambda tokens, slot=slot: slot.grammar.allowed(tokens[-1] if tokens else 0, 9)  # noqa: E731
            value = reference.autoregressive(stock, text, 6, seventh, allowed)
            tokens = [token for token, _, _ in value]
            text += [*tokens[:-1], *slot.grammar.closing(tokens)]
            yield value

    expected = [list(values(prompt)) for prompt in prompts]
    return Case(lambda: [guided(prompt, 6) for prompt in prompts], compared(expected, seventh))


def tree_of(rng: random.Random, contexts: int, instruction: list[int]) -> PromptTree:
    """A ragged tree: 0 to 5 questions a context, but some in the first; of some the first token is
    limited.
    """

    def question() -> Question:
        letters = lambda tokens: None if tokens else AllowedTokens(np.arange(65, 69))  # noqa: E731
        return Question(tokens_of(rng, 1, 6), seventh, letters if rng.random() < 0.3 else None)

    counts = [rng.randint(2, 5), *(rng.randint(0, 5) for _ in range(contexts - 1))]
    return PromptTree(
        instruction,
        [Context(tokens_of(rng, 1, 15), [question() for _ in range(n)]) for n in counts],
    )


def _intra_prompt(stock: PreTrainedModel) -> Case:
    """Against one prompt a question.

    Without an instruction nothing is shared, and a context begins at position 0.
    """
    rng = random.Random(4)
    trees = [tree_of(rng, 1 + n % 4, [] if n == 2 else INSTRUCTION) for n in range(4)]

    def alone(tree: PromptTree, context: Context, asked: Question) -> list:
        tokens = [*tree.instruction, *context.tokens, *asked.tokens]
        return reference.autoregressive(stock, tokens, 7, seventh, asked.allowed_token_ids)

    expected = [
        [alone(tree, c, asked) for c in tree.contexts for asked in c.questions] for tree in trees
    ]
    return Case(lambda: [intra_prompt(tree, 7) for tree in trees], compared(expected, seventh))


def drafting(program, prompt, text, k, right, seed=0):
    """SPACE whose drafts are `text`, what will be decoded, each with the probability `right`."""
    rng = random.Random(seed)

    def draft(feed, predictions) -> None:
        for number, index in enumerate(feed.sample_at):
            ahead = feed.positions[index] + 1 - len(prompt.tokens)
            if feed.segments[index] > k and ahead < len(text) and rng.random() < right:
                predictions.tokens[number] = text[ahead]

    return changed(program, draft)


class Knowing(MedusaHeads):
    """Heads that know the texts by the stock model's hidden state, and guess right with the
    probability `right`.
    """

    def __init__(self, stock, texts, right, seed=0):
        width = stock.get_output_embeddings().weight.shape
        super().__init__(3, 1, width[1], width[0])
        self.right, self.rng = right, random.Random(seed)
        self.states = torch.cat(
            [reference.plain_output(stock, tokens)[1][begin - 1 :] for tokens, begin in texts]
        )
        # A state's text.
        self.behind = [
            tokens[at:] for tokens, begin in texts for at in range(begin, len(tokens) + 1)
        ]

    def draft(self, hidden, tree):
        return [self.guess_one(state, tree) for state in hidden]

    def guess_one(self, hidden, tree):
        gaps = (self.states - hidden.cpu()).abs().amax(-1)
        place = int(gaps.argmin())
        assert gaps[place] < 1e-3
        text = self.behind[place]
        guesses, lucky = [], {}
        for d, rank in zip(tree.depths, tree.ranks, strict=True):
            if d not in lucky:
                ranks = {r for depth, r in zip(tree.depths, tree.ranks, strict=True) if depth == d}
                lucky[d] = (
                    self.rng.choice(sorted(ranks)) if self.rng.random() < self.right else None
                )
            known = text[d] if d < len(text) else 5
            guesses.append(known if rank == lucky[d] else (known + 1 + rank) % 200)
        return guesses


def _drafted(program: Callable[..., Program[Any]]) -> Callable[[PreTrainedModel], Case]:
    """`program(stock, prompt, the text that comes, its number)` on prompts, against what the model
    says alone.
    """

    def case(stock: PreTrainedModel) -> Case:
        prompts = prompts_of(2, 5)
        expected = [
            [reference.autoregressive(stock, prompt.tokens, 14, twenty_third)] for prompt in prompts
        ]
        texts = [[token for token, _, _ in want] for (want,) in expected]
        same = compared(expected, twenty_third)

        def check(answers: list[Any], atol: float) -> None:
            same(answers, atol)
            assert sum(answer.accepted for answer in answers) > 5
            assert max(answer.average_accepted_tokens for answer in answers) > 1.3

        pairs = list(enumerate(zip(prompts, texts, strict=True)))
        return Case(
            lambda: [program(stock, prompt, text, number) for number, (prompt, text) in pairs],
            check,
        )

    return case


def _space(stock, prompt, text, number):
    if number == 4:  # drafts of its own, and a mask token that the model also says
        return space(prompt, 14, 4, text[-1], stops=twenty_third)
    k = (1, 2, 3, 5)[number]
    return drafting(space(prompt, 14, k, MASK, stops=twenty_third), prompt, text, k, 0.7, number)


def _medusa(stock, prompt, text, number):
    heads = Knowing(stock, [([*prompt.tokens, *text], len(prompt.tokens))], 0.75, number)
    return medusa(prompt, 14, heads, TREES[number % 3], twenty_third)


def forks(token: int, position: int, predicted: int) -> int:
    """What a trained model would do now and then, as a function of what the model sees last: forks
    and ends.
    """
    draw = (predicted * 31 + position * 17 + token * 7) % 19
    if draw < 3 and token != CHILD:
        return FORK
    return _goes_on(predicted, draw, draw == 3 or (draw < 7 and position > 70))


def _goes_on(predicted: int, draw: int, ends: bool) -> int:
    return EOS if ends else predicted if predicted not in (FORK, CHILD, EOS) else 40 + draw


def few_forks(token: int, position: int, predicted: int) -> int:
    """Some forks at first, then ends: trees of a few threads, all of which come to their end."""
    draw = (predicted * 31 + position * 17 + token * 7) % 23
    if draw < 4 and token != CHILD and position < 46:
        return FORK
    return _goes_on(predicted, draw, draw > 20 or (draw > 15 and position > 55))


def threads_of(prompt, root: Paragraph) -> list[tuple[list[int], list[float], int]]:
    """(tokens on its path, their log-probabilities, where its own begin) of every thread of a
    paragraph tree.
    """
    found, stack = [], [(list(prompt), [0.0] * len(prompt), len(prompt), root)]
    while stack:
        path, logprobs, begin, node = stack.pop()
        while node is not None:
            path, logprobs = [*path, *node.tokens], [*logprobs, *node.logprobs]
            if node.first_child is not None and node.first_child.tokens:  # its [Child] is given
                stack.append((path, logprobs, len(path) + 1, node.first_child))
            node = node.next_sibling
        found.append((path, logprobs, begin))
    return found


def check_threads(stock, prompt: Prompt, answer: AparAnswer, rule, atol: float) -> None:
    """Every thread is what the model, and the rule that steers it, say behind the thread's own path
    alone.
    """
    found, seen = threads_of(prompt.tokens, answer.root), []
    for path, logprobs, begin in found:
        logits = reference.plain_output(stock, path)[0]
        for at in range(begin, len(path)):
            token, logprob, _ = reference.greedy(logits[at - 1], None)
            assert path[at] == rule(path[at - 1], at - 1, token)
            assert abs(logprobs[at] - logprob) < atol
            seen.append(at)
        assert begin == len(prompt.tokens) or path[begin - 1] == CHILD
    paragraphs = list(restore(answer.root))
    for paragraph in paragraphs:
        assert FORK not in paragraph.tokens[:-1]
        assert (paragraph.first_child is None) == (paragraph.next_sibling is None)
        assert paragraph.first_child is None or paragraph.tokens[-1] == FORK
    assert answer.tokens == [t for p in paragraphs for t in p.tokens if t not in (FORK, CHILD, EOS)]
    unstarted = sum(p.first_child is not None and not p.first_child.tokens for p in paragraphs)
    assert (answer.threads, answer.unstarted_threads) == (len(found), unstarted)
    assert (answer.cut is None) == (all(path[-1] == EOS for path, _, _ in found) and not unstarted)
    assert answer.cost.attended_tokens == pytest.approx(sum(seen) / len(seen))


def _apar(stock: PreTrainedModel) -> Case:
    """Threads in any number and few; all of them were cut at 40 tokens, or came to their end."""
    prompts, limits = prompts_of(2, 4, 15, 3), [64, 64, 2, 1]

    def check(answers: list[AparAnswer], atol: float) -> None:
        for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
            check_threads(stock, prompt, answer, forks, atol)
            if limit == 64:  # a pass decodes a token of every thread
                longest = max(len(path) for path, _, _ in threads_of(prompt.tokens, answer.root))
                assert answer.cost.steps == longest - len(prompt.tokens)
        assert sum(answer.threads for answer in answers) > 6
        nested = (
            p.first_child and p.first_child.first_child for a in answers for p in restore(a.root)
        )
        assert any(nested), "nested forks"

    pairs = list(zip(prompts, limits, strict=True))
    return Case(
        lambda: [steered(apar(p, 40, FORK, CHILD, ENDS, limit), forks) for p, limit in pairs], check
    )


def plainly(
    stock: PreTrainedModel, prompt: Prompt
) -> tuple[AparAnswer, list[tuple[list[int], int]]]:
    """What `apar` decodes under `few_forks`, and its threads as texts of `Knowing`."""
    answer = reference.Replay(stock).run(steered(apar(prompt, MOST, FORK, CHILD, ENDS), few_forks))
    return answer, [(path, begin) for path, _, begin in threads_of(prompt.tokens, answer.root)]


def _apar_medusa(stock: PreTrainedModel) -> Case:
    """The threads of `apar`, in fewer passes."""
    prompts = prompts_of(21, 3)
    plain, texts = zip(*(plainly(stock, prompt) for prompt in prompts), strict=True)

    def check(answers: list[Any], atol: float) -> None:
        for prompt, answer, want in zip(prompts, answers, plain, strict=True):
            check_threads(stock, prompt, answer, few_forks, atol)
            assert [p.tokens for p in restore(answer.root)] == [
                p.tokens for p in restore(want.root)
            ]
            assert (answer.cut, answer.flattened) == (None, want.flattened)
            assert answer.cost.steps <= want.cost.steps
        assert sum(answer.cost.steps for answer in answers) < 0.8 * sum(
            want.cost.steps for want in plain
        )
        assert sum(answer.accepted for answer in answers) > 10
        assert sum(answer.threads for answer in answers) > 4

    def program(number: int) -> Program[Any]:
        heads = Knowing(stock, texts[number], 0.75, number)
        return steered(
            apar(prompts[number], MOST, FORK, CHILD, ENDS, heads=heads, tree=TREES[number]),
            few_forks,
        )

    return Case(lambda: [program(number) for number in range(3)], check)


def _pasta(stock: PreTrainedModel) -> Case:
    prompts, most, most_async = prompts_of(3, 4, 15, 3), 56, 12
    expected = [
        pasta_script.from_scratch(stock, prompt.tokens, most, most_async) for prompt in prompts
    ]

    def check(answers: list[Any], atol: float) -> None:
        for answer, threads in zip(answers, expected, strict=True):
            for ours, theirs in zip(answer.threads, threads, strict=True):
                assert ours.tokens == [token for token, _ in theirs.picked]
                assert ours.logprobs == pytest.approx([p for _, p in theirs.picked], abs=atol)
        assert sum(len(answer.threads) for answer in answers) > 8
        assert "<sync/>" in "".join(a.raw.partition("</async>")[2] for a in answers), (
            "a wait for a child"
        )

    def program(prompt: Prompt) -> Program[Any]:
        texts, encode = pasta_script.TEXTS, pasta_script.encode
        made = Interpreter(prompt, most, texts, encode, ENDS, max_async_tokens=most_async).run()
        return steered(made, pasta_script.steer)

    return Case(lambda: [program(prompt) for prompt in prompts], check)


CASES: dict[str, Callable[[PreTrainedModel], Case]] = {
    "hyper_parallel": _stacked((1, 6, 2, 3), isolate_values=False),
    "hyper_parallel, values": _stacked((1, 1, 1, 1, 1), isolate_values=True),
    "guided": _guided,
    "autoregressive": _autoregressive,
    "intra_prompt": _intra_prompt,
    "apar": _apar,
    "pasta": _pasta,
    "space": _drafted(_space),
    "medusa": _drafted(_medusa),
    "apar_medusa": _apar_medusa,
}


@cache
def case_of(method: str, kind: str) -> Case:
    return CASES[method](pair(kind)[1])
