"""Every method on prompts of its own, and what the unmodified model says to each prompt alone."""

import copy
import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding.draft_model import DraftModel
from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import AparAnswer, Paragraph, Tree, apar, restore
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, Value, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree, medusa
from raypd.decoding.methods.pasta import Interpreter
from raypd.decoding.methods.skeleton_of_thought import SkeletonPoint, skeleton_of_thought
from raypd.decoding.methods.space import space
from raypd.decoding.methods.speculative import LookupText, speculative
from raypd.decoding.program import Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.text import Prompt
from tests.decoding import pasta_script, reference
from tests.decoding.drivers import INSTRUCTION, changed, prompts_of, steered, tokens_of
from tests.decoding.reference import Picked
from tests.tiny import tiny_model

FAMILIES = [
    "llama",
    "qwen3",
    "phi3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "olmo2",
    "gpt_oss",
    "youtu",
]
WINDOWED = {"mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"}
EOS = 2
FORK = 3
CHILD = 4
MASK = 3
ENDS = frozenset([EOS])
TREES = [
    cartesian_tree(1, 1, 1),
    cartesian_tree(3, 2),
    Tree(
        [
            (0,),
            (1,),
            (2,),
            (1, 0),
            (1, 1),
            (1, 0, 0),
        ]
    ),
]
# More tokens than any tree of `few_forks` has. A tree that is cut off is cut in another order when
# its threads are drafted.
MAX_TREE_TOKENS = 400


@dataclass
class Case:
    """Programs of a method, and the check of their answers.

    `programs` makes them anew at each call. `check(answers, atol)` compares tokens, and
    log-probabilities up to `atol`.
    """

    programs: Callable[[], list[Program[Any]]]
    check: Callable[[list[Any], float], None]


def pair(kind: str, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a tiny model twice: for the engine, and unmodified for the reference."""
    if kind in WINDOWED:
        overrides.setdefault("sliding_window", 9)
    model = tiny_model(kind, **overrides)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    return model, stock


def agree(
    expected: Sequence[Picked], tokens: list[int], logprobs: list[float], atol: float = 1e-3
) -> None:
    """Check that tokens and log-probabilities are those expected.

    A first divergence is excused if the two best tokens are closer than `atol`.
    """
    for i, (token, logprob, gap) in enumerate(expected):
        if i >= len(tokens) or tokens[i] != token:
            assert gap < atol, f"token {i}: {tokens[i : i + 1]} for {token}, gap {gap}"
            return
        assert abs(logprobs[i] - logprob) < atol
    assert len(tokens) == len(expected)


def _divergence(expected: list[Picked], tokens: list[int]) -> int:
    """Return the first step with another token than expected; a large number if there is none."""
    expected_tokens = [token for token, _, _ in expected]
    for step in range(max(len(expected_tokens), len(tokens))):
        if expected_tokens[step : step + 1] != tokens[step : step + 1]:
            return step
    return 1 << 30


def _parts(answer: Any) -> list[Any]:
    """Return the parts of an answer that are compared."""
    if isinstance(answer, list):
        return answer
    return getattr(answer, "points", [answer])


def _check_parts(
    expected: list[list[Picked]], parts: list[Any], ended: Callable[[list[int]], bool], atol: float
) -> None:
    """Check the parts of one answer."""
    divergences = [
        _divergence(want, part.tokens) for want, part in zip(expected, parts, strict=True)
    ]
    # Values are decoded side by side and see each other. After a step in which one diverges, all of
    # them read another text.
    comparable_steps = min(divergences, default=0) + 1
    for want, part in zip(expected, parts, strict=True):
        if isinstance(part, Value):
            agree(
                want[:comparable_steps],
                part.tokens[:comparable_steps],
                part.logprobs[:comparable_steps],
                atol,
            )
            is_complete = part.closed
        else:
            agree(want, part.tokens, part.logprobs, atol)
            is_complete = part.stopped
        assert is_complete == ended(part.tokens)


def compared(
    expected: list[list[list[Picked]]], ended: Callable[[list[int]], bool]
) -> Callable[[list[Any], float], None]:
    """Return the check of answers against the expected parts of each.

    `ended(tokens)` tells whether a part is complete.
    """

    def check(answers: list[Any], atol: float) -> None:
        for expected_parts, answer in zip(expected, answers, strict=True):
            _check_parts(expected_parts, _parts(answer), ended, atol)
        if max(map(len, expected)) > 1:
            lengths = {len(part) for parts in expected for part in parts}
            assert len(lengths) > 1, "parts of an answer should end at different steps"

    return check


def run_all(engine: Engine, cases: dict[str, Case], atol: float) -> None:
    """Decode and check the programs of all cases in one engine."""
    programs = {name: case.programs() for name, case in cases.items()}
    answers = iter(engine.run(program for members in programs.values() for program in members))
    for name, members in programs.items():
        cases[name].check(list(islice(answers, len(members))), atol)


def every(n: int) -> Callable[[Sequence[int]], bool]:
    """Return a stop at multiples of n."""
    return lambda tokens: tokens[-1] % n == 0


seventh = every(7)
eleventh = every(11)
twenty_third = every(23)


def _autoregressive(stock: PreTrainedModel) -> Case:
    prompts = prompts_of(2, 5, 20)
    expected = [
        [reference.autoregressive(stock, prompt.tokens, 12, eleventh)] for prompt in prompts
    ]

    def programs() -> list[Program[Any]]:
        return [autoregressive(prompt, 12, eleventh) for prompt in prompts]

    return Case(programs, compared(expected, eleventh))


class EverySeventh:
    """The rules of a slot for random models, in place of a grammar.

    A value is done at a multiple of 7. If `limited`, its first token must be even.
    """

    def __init__(self, limited: bool = False) -> None:
        self.limited = limited

    def advance(self, state: int, token: int) -> int:
        return token

    def allowed(self, state: int, left: int) -> AllowedTokens | None:
        if self.limited and state == 0:
            return AllowedTokens(np.arange(4, 256, 2))
        return None

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
    """Return a prompt of stacked documents with ragged skeletons."""
    tokens = list(INSTRUCTION)
    for _ in range(documents):
        tokens += tokens_of(rng, 2, 14)
    slots = []
    for _ in range(documents):
        for _ in range(rng.randint(1, 4)):
            tokens += tokens_of(rng, 1, 4)
            slots.append(Slot(len(tokens) - 1, EverySeventh(limited=rng.random() < 0.5)))
    tokens += tokens_of(rng, 0, 2)  # A closing brace behind the last slot.
    return SlottedPrompt(tokens, slots, shared=len(INSTRUCTION) if shared else 0)


def _first_allowed(slot: Slot, tokens: list[int]) -> AllowedTokens | None:
    return slot.grammar.allowed(tokens[-1] if tokens else 0, 9)


def slotted_prompts(stacks: Sequence[int]) -> list[SlottedPrompt]:
    """Return prompts of so many documents each, of which every other one shares its instruction."""
    rng = random.Random(3)
    return [slotted(rng, documents, shared=bool(i % 2)) for i, documents in enumerate(stacks)]


def _stacked(stacks: tuple[int, ...], isolate_values: bool) -> Callable[[PreTrainedModel], Case]:
    """Return a case with stacks of documents, of which every other one shares its instruction."""
    prompts = slotted_prompts(stacks)

    def expected_values(stock: PreTrainedModel, prompt: SlottedPrompt) -> list[list[Picked]]:
        def allowed(slot: int, tokens: list[int]) -> AllowedTokens | None:
            return _first_allowed(prompt.slots[slot], tokens)

        def closed(slot: int, tokens: list[int]) -> bool:
            return seventh(tokens)

        ends = [slot.end for slot in prompt.slots]
        return reference.hyper_parallel(
            stock, prompt.tokens, ends, 6, isolate_values, allowed, closed
        )

    def programs() -> list[Program[Any]]:
        return [hyper_parallel(prompt, 6, isolate_values) for prompt in prompts]

    def case(stock: PreTrainedModel) -> Case:
        expected = [expected_values(stock, prompt) for prompt in prompts]
        return Case(programs, compared(expected, seventh))

    return case


def _guided(stock: PreTrainedModel) -> Case:
    """Decode each value behind the answer before it, including what closes earlier values."""
    rng = random.Random(5)
    prompts = [slotted(rng, 1, shared=bool(i % 2)) for i in range(5)]

    def expected_value(text: list[int], slot: Slot) -> list[Picked]:
        def allowed(tokens: list[int]) -> AllowedTokens | None:
            return _first_allowed(slot, tokens)

        return reference.autoregressive(stock, text, 6, seventh, allowed)

    def expected_values(prompt: SlottedPrompt) -> Iterator[list[Picked]]:
        text: list[int] = []
        begin = 0
        for slot in prompt.slots:
            text += prompt.tokens[begin : slot.end + 1]
            begin = slot.end + 1
            value = expected_value(text, slot)
            tokens = [token for token, _, _ in value]
            text += [*tokens[:-1], *slot.grammar.closing(tokens)]
            yield value

    def programs() -> list[Program[Any]]:
        return [guided(prompt, 6) for prompt in prompts]

    expected = [list(expected_values(prompt)) for prompt in prompts]
    return Case(programs, compared(expected, seventh))


def _letters_first(tokens: list[int]) -> AllowedTokens | None:
    """Limit the first token of an answer."""
    return None if tokens else AllowedTokens(np.arange(65, 69))


def tree_of(rng: random.Random, contexts: int, instruction: list[int]) -> PromptTree:
    """Return a ragged tree with 0 to 5 questions per context, and 2 to 5 in the first one.

    The first token of some answers is limited.
    """
    counts = [rng.randint(2, 5)]
    for _ in range(contexts - 1):
        counts.append(rng.randint(0, 5))
    tree = PromptTree(instruction, [])
    for count in counts:
        context = Context(tokens_of(rng, 1, 15), [])
        for _ in range(count):
            tokens = tokens_of(rng, 1, 6)
            limit = _letters_first if rng.random() < 0.3 else None
            context.questions.append(Question(tokens, seventh, limit))
        tree.contexts.append(context)
    return tree


def _intra_prompt(stock: PreTrainedModel) -> Case:
    """Compare with one prompt per question.

    One tree has no instruction, so nothing is shared, and a context begins at position 0.
    """
    rng = random.Random(4)
    trees = [tree_of(rng, 1 + n % 4, [] if n == 2 else INSTRUCTION) for n in range(4)]

    def expected_answers(tree: PromptTree) -> list[list[Picked]]:
        answers = []
        for context in tree.contexts:
            for question in context.questions:
                tokens = [*tree.instruction, *context.tokens, *question.tokens]
                answer = reference.autoregressive(
                    stock, tokens, 7, seventh, question.allowed_token_ids
                )
                answers.append(answer)
        return answers

    def programs() -> list[Program[Any]]:
        return [intra_prompt(tree, 7) for tree in trees]

    expected = [expected_answers(tree) for tree in trees]
    return Case(programs, compared(expected, seventh))


def drafting(program, prompt, text, k, right, seed=0):
    """Run SPACE with drafts that are right with probability `right`; `text` will be decoded."""
    rng = random.Random(seed)

    def draft(feed, predictions) -> None:
        for number, index in enumerate(feed.sample_at):
            ahead = feed.positions[index] + 1 - len(prompt.tokens)
            if feed.segments[index] > k and ahead < len(text) and rng.random() < right:
                predictions.tokens[number] = text[ahead]

    return changed(program, draft)


class Knowing(MedusaHeads):
    """Heads that know the texts by the stock model's hidden states.

    They guess right with probability `right`.
    """

    # How far a hidden state may be from the stock model's. In 16 bits it is farther.
    tolerance = 1e-3

    def __init__(self, stock, texts, right, seed=0):
        """
        Args:
            stock: The unmodified model.
            texts: Each text, and the number of its first token that is drafted.
            right: How often a guess is right.
            seed: Seed of the guesses.
        """
        vocabulary, hidden_size = stock.get_output_embeddings().weight.shape
        super().__init__(3, 1, hidden_size, vocabulary)
        self.right = right
        self.rng = random.Random(seed)
        states = []
        # What follows each state.
        self.behind = []
        for tokens, begin in texts:
            _, hidden = reference.plain_output(stock, tokens)
            states.append(hidden[begin - 1 :])
            self.behind += [tokens[end:] for end in range(begin, len(tokens) + 1)]
        self.states = torch.cat(states)

    def draft(self, hidden, tree):
        return [self.guess_one(state, tree) for state in hidden]

    def guess_one(self, hidden, tree):
        gaps = (self.states - hidden.cpu()).abs().amax(-1)
        nearest = int(gaps.argmin())
        assert gaps[nearest] < self.tolerance
        text = self.behind[nearest]
        guesses = []
        lucky_ranks = {}  # The rank of the right guess at each depth, or None.
        for depth, rank in zip(tree.depths, tree.ranks, strict=True):
            if depth not in lucky_ranks:
                lucky_ranks[depth] = self._lucky_rank(tree, depth)
            known = text[depth] if depth < len(text) else 5
            if rank == lucky_ranks[depth]:
                guesses.append(known)
            else:
                guesses.append((known + 1 + rank) % 200)
        return guesses

    def _lucky_rank(self, tree, depth):
        pairs = zip(tree.depths, tree.ranks, strict=True)
        ranks = {rank for node_depth, rank in pairs if node_depth == depth}
        if self.rng.random() < self.right:
            return self.rng.choice(sorted(ranks))
        return None


def _drafted(program: Callable[..., Program[Any]]) -> Callable[[PreTrainedModel], Case]:
    """Return a case of a method that drafts.

    `program(stock, prompt, text, number)` makes a program, where `text` is what will be decoded.
    """

    def case(stock: PreTrainedModel) -> Case:
        prompts = prompts_of(2, 5)
        expected = []
        texts = []
        for prompt in prompts:
            answer = reference.autoregressive(stock, prompt.tokens, 14, twenty_third)
            expected.append([answer])
            texts.append([token for token, _, _ in answer])
        check_texts = compared(expected, twenty_third)

        def programs() -> list[Program[Any]]:
            pairs = zip(prompts, texts, strict=True)
            return [program(stock, *pair, number) for number, pair in enumerate(pairs)]

        def check(answers: list[Any], atol: float) -> None:
            check_texts(answers, atol)
            assert sum(answer.accepted for answer in answers) > 5
            assert max(answer.average_accepted_tokens for answer in answers) > 1.3

        return Case(programs, check)

    return case


def _space(stock, prompt, text, number):
    if number == 4:
        # This one has the model's own drafts, and a mask token that the model also decodes.
        return space(prompt, 14, 4, text[-1], stops=twenty_third)
    k = (1, 2, 3, 5)[number]
    return drafting(space(prompt, 14, k, MASK, stops=twenty_third), prompt, text, k, 0.7, number)


def draft_model(stock: PreTrainedModel, noise: float = 0.05) -> DraftModel:
    """A draft model that predicts nearly what the model predicts, in an engine with little room."""
    draft = copy.deepcopy(stock)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            change = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.add_(noise * weight.std() * change)
    engine = Engine(draft, max_num_seqs=3, max_num_batched_tokens=24)
    return DraftModel(engine, stock.config.vocab_size)


class KnownText:
    """Looks up what the model will say behind a prompt; some guesses are wrong."""

    def __init__(self, text: list[int], right: float, seed: int) -> None:
        self.text = text
        self.right = right
        self.rng = random.Random(seed)

    def open(self, prompt: Prompt) -> LookupText:
        self.begin = len(prompt.tokens)
        return LookupText()

    def draft(self, contexts: list[LookupText], plan: None) -> list[list[int]]:
        (text,) = contexts
        ahead = self.text[len(text.tokens) - self.begin :][: text.max_drafts]
        return [[token if self.rng.random() < self.right else 5 for token in ahead]]

    def close(self, text: LookupText) -> None:
        pass


def _speculative(stock, prompt, text, number):
    drafter = KnownText(text, 0.8, number)
    return speculative(prompt, 14, twenty_third, drafter, (1, 2, 3, 5, 8)[number])


def _with_draft_model(stock: PreTrainedModel) -> Case:
    """All programs of the case draft with one model."""
    case = _drafted(_speculative)(stock)

    def programs() -> list[Program[Any]]:
        drafter = draft_model(stock)
        return [speculative(prompt, 14, twenty_third, drafter, 3) for prompt in prompts_of(2, 5)]

    return Case(programs, case.check)


def _medusa(stock, prompt, text, number):
    heads = Knowing(stock, [([*prompt.tokens, *text], len(prompt.tokens))], 0.75, number)
    return medusa(prompt, 14, heads, TREES[number % 3], twenty_third)


def forks(token: int, position: int, predicted: int) -> int:
    """Fork and end now and then, as a trained model would.

    The result is a function of what the model sees last.
    """
    draw = (predicted * 31 + position * 17 + token * 7) % 19
    if draw < 3 and token != CHILD:
        return FORK
    if draw == 3 or (draw < 7 and position > 70):
        return EOS
    return _plain_token(predicted, draw)


def few_forks(token: int, position: int, predicted: int) -> int:
    """Fork at first, then end: trees of a few threads, all of which come to their end."""
    draw = (predicted * 31 + position * 17 + token * 7) % 23
    if draw < 4 and token != CHILD and position < 46:
        return FORK
    if draw > 20 or (draw > 15 and position > 55):
        return EOS
    return _plain_token(predicted, draw)


def _plain_token(predicted: int, draw: int) -> int:
    """Replace a control token."""
    if predicted in (FORK, CHILD, EOS):
        return 40 + draw
    return predicted


def threads_of(prompt: Sequence[int], root: Paragraph) -> list[tuple[list[int], list[float], int]]:
    """Return every thread of a paragraph tree.

    A thread has the tokens on its path, their log-probabilities, and the number of its first own
    token.
    """
    threads = []
    stack = [(list(prompt), [0.0] * len(prompt), len(prompt), root)]
    while stack:
        path, logprobs, begin, node = stack.pop()
        while node is not None:
            path = [*path, *node.tokens]
            logprobs = [*logprobs, *node.logprobs]
            if node.first_child is not None and node.first_child.tokens:
                # The child's first token, [Child], is not decoded.
                stack.append((path, logprobs, len(path) + 1, node.first_child))
            node = node.next_sibling
        threads.append((path, logprobs, begin))
    return threads


def check_threads(stock, prompt: Prompt, answer: AparAnswer, rule, atol: float) -> None:
    """Check every thread against the model and the rule that steers it, on its own path."""
    threads = threads_of(prompt.tokens, answer.root)
    attended = []  # How many tokens each decoded token saw.
    for path, logprobs, begin in threads:
        logits, _ = reference.plain_output(stock, path)
        for index in range(begin, len(path)):
            token, logprob, _ = reference.greedy(logits[index - 1], None)
            assert path[index] == rule(path[index - 1], index - 1, token)
            assert abs(logprobs[index] - logprob) < atol
            attended.append(index)
        assert begin == len(prompt.tokens) or path[begin - 1] == CHILD
    paragraphs = list(restore(answer.root))
    _check_paragraphs(paragraphs)
    control_tokens = (FORK, CHILD, EOS)
    tokens = [token for paragraph in paragraphs for token in paragraph.tokens]
    assert answer.tokens == [token for token in tokens if token not in control_tokens]
    unstarted = sum(p.first_child is not None and not p.first_child.tokens for p in paragraphs)
    assert answer.threads == len(threads)
    assert answer.unstarted_threads == unstarted
    all_ended = all(path[-1] == EOS for path, _, _ in threads)
    assert (answer.cut is None) == (all_ended and unstarted == 0)
    assert answer.cost.attended_tokens == pytest.approx(sum(attended) / len(attended))


def _check_paragraphs(paragraphs: list[Paragraph]) -> None:
    """Check that each paragraph forks at its end or not at all."""
    for paragraph in paragraphs:
        assert FORK not in paragraph.tokens[:-1]
        assert (paragraph.first_child is None) == (paragraph.next_sibling is None)
        assert paragraph.first_child is None or paragraph.tokens[-1] == FORK


def _apar(stock: PreTrainedModel) -> Case:
    """Decode many threads at once, or a few; all are cut at 40 tokens or come to an end."""
    prompts = prompts_of(2, 4, 15, 3)
    limits = [64, 64, 2, 1]

    def programs() -> list[Program[Any]]:
        programs = []
        for prompt, limit in zip(prompts, limits, strict=True):
            programs.append(steered(apar(prompt, 40, FORK, CHILD, ENDS, limit), forks))
        return programs

    def check(answers: list[AparAnswer], atol: float) -> None:
        for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
            check_threads(stock, prompt, answer, forks, atol)
            if limit == 64:
                # Each pass decodes a token of every thread.
                paths = [path for path, _, _ in threads_of(prompt.tokens, answer.root)]
                assert answer.cost.steps == max(map(len, paths)) - len(prompt.tokens)
        assert sum(answer.threads for answer in answers) > 6
        paragraphs = [paragraph for answer in answers for paragraph in restore(answer.root)]
        children = [p.first_child for p in paragraphs if p.first_child is not None]
        assert any(child.first_child is not None for child in children), "nested forks"

    return Case(programs, check)


def plainly(
    stock: PreTrainedModel, prompt: Prompt
) -> tuple[AparAnswer, list[tuple[list[int], int]]]:
    """Return what `apar` decodes under `few_forks`, and its threads as texts of `Knowing`."""
    program = steered(apar(prompt, MAX_TREE_TOKENS, FORK, CHILD, ENDS), few_forks)
    answer = reference.Replay(stock).run(program)
    return answer, [(path, begin) for path, _, begin in threads_of(prompt.tokens, answer.root)]


def _paragraph_tokens(answer: AparAnswer) -> list[list[int]]:
    return [paragraph.tokens for paragraph in restore(answer.root)]


def _apar_medusa(stock: PreTrainedModel) -> Case:
    """Decode the threads of `apar` in fewer passes."""
    prompts = prompts_of(21, 3)
    plain = []  # The answers without heads.
    texts = []
    for prompt in prompts:
        answer, threads = plainly(stock, prompt)
        plain.append(answer)
        texts.append(threads)

    def programs() -> list[Program[Any]]:
        programs = []
        for number, prompt in enumerate(prompts):
            heads = Knowing(stock, texts[number], 0.75, number)
            program = apar(
                prompt, MAX_TREE_TOKENS, FORK, CHILD, ENDS, heads=heads, tree=TREES[number]
            )
            programs.append(steered(program, few_forks))
        return programs

    def check(answers: list[Any], atol: float) -> None:
        for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
            check_threads(stock, prompt, answer, few_forks, atol)
            assert _paragraph_tokens(answer) == _paragraph_tokens(expected)
            assert answer.cut is None
            assert answer.flattened == expected.flattened
            assert answer.cost.steps <= expected.cost.steps
        steps = sum(answer.cost.steps for answer in answers)
        assert steps < 0.8 * sum(expected.cost.steps for expected in plain)
        assert sum(answer.accepted for answer in answers) > 10
        assert sum(answer.threads for answer in answers) > 4

    return Case(programs, check)


def _pasta(stock: PreTrainedModel) -> Case:
    prompts = prompts_of(3, 4, 15, 3)
    max_tokens = 56
    max_async_tokens = 12
    expected = [
        pasta_script.from_scratch(stock, prompt.tokens, max_tokens, max_async_tokens)
        for prompt in prompts
    ]

    def programs() -> list[Program[Any]]:
        programs = []
        for prompt in prompts:
            interpreter = Interpreter(
                prompt,
                max_tokens,
                pasta_script.TEXTS,
                pasta_script.encode,
                ENDS,
                max_async_tokens=max_async_tokens,
            )
            programs.append(steered(interpreter.run(), pasta_script.steer))
        return programs

    def check(answers: list[Any], atol: float) -> None:
        for answer, expected_threads in zip(answers, expected, strict=True):
            for thread, want in zip(answer.threads, expected_threads, strict=True):
                assert thread.tokens == [token for token, _ in want.picked]
                logprobs = [logprob for _, logprob in want.picked]
                assert thread.logprobs == pytest.approx(logprobs, abs=atol)
        assert sum(len(answer.threads) for answer in answers) > 8
        behind_children = [answer.raw.partition("</async>")[2] for answer in answers]
        assert "<sync/>" in "".join(behind_children), "a wait for a child"

    return Case(programs, check)


SKELETON = list(b"1. Sleep\n2) Eat well \nno point\n 10. Move")
POINTS = [
    (1, "Sleep"),
    (2, "Eat well"),
    (10, "Move"),
]


def decode(tokens: Sequence[int]) -> str:
    """The text of byte tokens, as a tokenizer would decode them."""
    return bytes(token for token in tokens if 2 < token < 128).decode()


def request(point: SkeletonPoint) -> list[int]:
    """What asks for a point."""
    return list(f"<{point.number}> {point.heading}".encode())


def follows_instructions(
    program: Program[Any], skeleton: Sequence[int], points_end: bool = True
) -> Program[Any]:
    """The program under a model that writes this skeleton.

    A point ends at a multiple of 7, or (not `points_end`) never.
    """
    unwritten = list(skeleton)

    def write(feed, predictions) -> None:
        if unwritten:
            predictions.tokens[0] = unwritten.pop(0)
            return
        for number, token in enumerate(predictions.tokens):
            if not points_end:
                predictions.tokens[number] = ord("A")
            elif token % 7 == 0:
                predictions.tokens[number] = EOS

    return changed(program, write)


def _skeleton_of_thought(stock: PreTrainedModel) -> Case:
    """Points of two skeletons, each against a prompt of its own behind the skeleton.

    The first skeleton comes to its end. The second is cut in its last line, which is no point then.
    """
    first, second = prompts_of(4, 2)
    skeletons = [[*SKELETON, EOS], SKELETON[:-2]]
    points = [POINTS, POINTS[:2]]

    def alone(prompt: Prompt, point: tuple[int, str], skeleton: list[int]) -> list:
        text = [token for token in skeleton if token != EOS]
        picked = reference.autoregressive(
            stock, [*prompt.tokens, *text, *request(SkeletonPoint(*point))], 6, seventh
        )
        return [(EOS if token % 7 == 0 else token, logprob, gap) for token, logprob, gap in picked]

    expected = [
        [alone(first, point, skeletons[0]) for point in points[0]],
        [alone(second, point, skeletons[1]) for point in points[1]],
    ]
    same = compared(expected, lambda tokens: tokens[-1] == EOS)

    def check(answers: list[Any], atol: float) -> None:
        same(answers, atol)
        for answer, skeleton, headings in zip(answers, skeletons, points, strict=True):
            assert answer.skeleton == skeleton
            assert [(point.number, point.heading) for point in answer.points] == headings
            longest = max(len(point.tokens) for point in answer.points)
            assert answer.steps == answer.longest_path == len(skeleton) + longest
        assert (answers[0].cut is None) == all(point.stopped for point in answers[0].points)
        assert answers[1].cut is not None

    def program(prompt: Prompt, skeleton: list[int]) -> Program[Any]:
        made = skeleton_of_thought(
            prompt,
            120,
            request,
            decode,
            ENDS,
            max_skeleton_tokens=len(skeleton),
            max_point_tokens=6,
        )
        return follows_instructions(made, skeleton)

    return Case(lambda: [program(first, skeletons[0]), program(second, skeletons[1])], check)


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
    "speculative": _drafted(_speculative),
    "speculative, draft model": _with_draft_model,
    "skeleton_of_thought": _skeleton_of_thought,
    "apar_medusa": _apar_medusa,
}

# The feeds of these methods differ from those of the others only in their trees, and not in what a
# model family computes.
TREE_METHODS = {
    "apar",
    "pasta",
    "space",
    "medusa",
    "apar_medusa",
    "speculative",
    "speculative, draft model",
    "skeleton_of_thought",
}
SLOW_FAMILIES = frozenset({"qwen3", "phi3", "gemma2", "gemma4_text", "olmo2"})


def methods_and(
    families: list[str],
    methods: Iterable[str] = CASES,
    slow_families: Container[str] = SLOW_FAMILIES,
) -> list:
    """Pair every method with every family; a tree method with a slow family is a slow test."""
    parameters = []
    for method in methods:
        for kind in families:
            is_slow = method in TREE_METHODS and kind in slow_families
            marks = [pytest.mark.slow] if is_slow else []
            parameters.append(pytest.param(method, kind, marks=marks))
    return parameters


@cache
def case_of(method: str, kind: str) -> Case:
    """Return the case of a method with what a tiny model of a family says to it."""
    _, stock = pair(kind)
    return CASES[method](stock)
