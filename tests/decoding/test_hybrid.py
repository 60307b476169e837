"""Models with recurrent and convolution layers: each branch of a prompt answers as it would alone.

The reference is the unmodified model on the whole text of each branch, without a cache.
"""

import random
from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import engine as engines
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.layers import recurrent
from raypd.decoding.layers.in_c import CBuilder
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.hybrid import Hybrid
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Feed, Program, ProgramError, StatesFull
from raypd.decoding.quantized import quantize
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.sequence import Sequence
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import Reach
from tests.decoding import reference
from tests.decoding.cases import (
    Case,
    EverySeventh,
    case_of,
    compared,
    every,
    pair,
    run_all,
    seventh,
    slotted,
)
from tests.decoding.drivers import INSTRUCTION, finished, never, prompts_of, small_device, tokens_of
from tests.decoding.reference import Picked
from tests.tiny import HYBRIDS, tiny_model

METHODS = ["autoregressive", "guided", "intra_prompt", "hyper_parallel"]
# One of each kind of recurrence.
KINDS = ["qwen3_5_text", "granitemoehybrid", "lfm2"]
K_MAX = 6
needs_native = pytest.mark.skipif(
    not avx512.is_best(torch.device("cpu"), torch.bfloat16), reason="needs AVX-512 BF16, no AMX"
)


def value_alone(stock: PreTrainedModel, prompt: SlottedPrompt, slot: Slot) -> list[Picked]:
    """Decode one value behind the prompt up to its slot, with the gaps of all earlier slots."""
    positions = []
    for token in range(slot.end + 1):
        gaps = sum(other.end < token for other in prompt.slots)
        positions.append(token + K_MAX * gaps)
    tokens = list(prompt.tokens[: slot.end + 1])
    value: list[Picked] = []
    while len(value) < K_MAX and not (value and seventh([value[-1][0]])):
        mask = torch.ones(len(tokens), len(tokens)).tril().bool()
        logits, _ = reference.dense_output(stock, tokens, positions, mask)
        state = value[-1][0] if value else 0
        allowed = reference.ids_of(slot.grammar.allowed(state, K_MAX))
        value.append(reference.greedy(logits[-1], allowed))
        tokens.append(value[-1][0])
        positions.append(positions[-1] + 1)
    return value


def _values(stock: PreTrainedModel) -> Case:
    """Decode isolated values, with and without a shared instruction, and of two documents."""
    rng = random.Random(3)
    prompts = [slotted(rng, documents, shared=bool(i % 2)) for i, documents in enumerate((1, 1, 2))]
    expected = [[value_alone(stock, prompt, slot) for slot in prompt.slots] for prompt in prompts]

    def programs() -> list[Program]:
        return [hyper_parallel(prompt, K_MAX, isolate_values=True) for prompt in prompts]

    return Case(programs, compared(expected, seventh))


@cache
def hybrid_case(method: str, kind: str) -> Case:
    if method == "hyper_parallel":
        _, stock = pair(kind)
        return _values(stock)
    return case_of(method, kind)


def methods_and_kinds() -> list:
    """Pair every method with every hybrid; the unmodified model takes long to answer some."""
    parameters = []
    for method in METHODS:
        for kind in HYBRIDS:
            is_slow = kind not in KINDS and method in ("autoregressive", "intra_prompt")
            marks = [pytest.mark.slow] if is_slow else []
            parameters.append(pytest.param(method, kind, marks=marks))
    return parameters


@pytest.mark.parametrize(("method", "kind"), methods_and_kinds())
def test_exact_in_chunks_beside_other_programs(method, kind):
    model, _ = pair(kind)
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=24)
    assert isinstance(engine.model, DecoderModel)
    names = dict.fromkeys(["autoregressive", method, "hyper_parallel"])
    run_all(engine, {name: hybrid_case(name, kind) for name in names}, 1e-3)
    assert engine.states.used == len(engine.scheduler.prefixes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_program_that_loses_its_states_is_fed_again_and_answers_the_same(
    method, kind, monkeypatch
):
    model, _ = pair(kind)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30)
    rng = random.Random(1)
    lost: list[int] = []  # Cached tokens of each sequence that lost them.
    step = engine.step

    def step_and_preempt():
        ended = step()
        for sequence in engine.sequences:
            if rng.random() < 0.25:
                lost.append(sequence.cached)
                sequence.release(engine.cache)
        return ended

    monkeypatch.setattr(engine, "step", step_and_preempt)
    run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)
    assert sum(lost) > 60


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
@pytest.mark.parametrize("method", METHODS)
def test_exact_by_scans_in_chunks(method, kind, monkeypatch):
    refused = "this test is for processors without it"
    monkeypatch.setattr(recurrent.native, "refusal", lambda: refused)
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=90)
    assert not any(recurrence.in_c for recurrence in engine.model.recurrences)
    run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h"])
@pytest.mark.parametrize("method", ["intra_prompt", "hyper_parallel"])
def test_exact_by_the_functions_that_kernels_replace(method, kind, monkeypatch):
    # On a CPU these are transformers' own, which take the same arguments as the kernels.
    monkeypatch.setattr(recurrent.Recurrence, "has_package", lambda part, package: True)
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=90)
    run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_exact_where_no_family_is_registered(method, kind, monkeypatch):
    # As for a model with an adapter beside its weights.
    monkeypatch.setattr(engines, "find_family", lambda model: None)
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=90)
    assert isinstance(engine.model, Hybrid)
    run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_pass_without_memory_is_repeated_from_the_states_before_it(method, kind):
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=64)
    failed = small_device(engine, lambda tokens: tokens > 20)
    run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)
    assert failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_where_states_do_not_fit_values_are_decoded_in_groups(method, kind):
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=30, max_states=9)
    with mock.patch.object(
        engine.scheduler, "_preempt", wraps=engine.scheduler._preempt
    ) as preempt:
        run_all(engine, {method: hybrid_case(method, kind)}, 1e-3)
    assert engine.states.slots <= 9
    # Programs wait for states; they do not take them from each other.
    assert not preempt.called


@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_compete_for_states_wait_for_each_other(kind, monkeypatch):
    model, _ = pair(kind)
    engine = Engine(model, max_num_batched_tokens=24, max_states=9)
    monkeypatch.setattr(engine.scheduler, "_has_states", lambda feed: True)
    evict = mock.Mock(wraps=engine.scheduler.evict_prefix)
    monkeypatch.setattr(engine.scheduler, "evict_prefix", evict)
    run_all(engine, {method: hybrid_case(method, kind) for method in METHODS}, 1e-3)
    # The states ran out.
    assert evict.called


class TakesBack(EverySeventh):
    """A value of which some tokens before the last one are behind it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def behind(self, tokens: list[int]) -> int:
        return min(self.count, len(tokens) - 1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_guided_decoding_takes_tokens_back(count, kind):
    model, stock = pair(kind)
    rng = random.Random(8)
    prompt = slotted(rng, 1, shared=True)
    while len(prompt.slots) < 3:
        prompt = slotted(rng, 1, shared=True)
    for slot in prompt.slots:
        slot.grammar = TakesBack(count)
    text: list[int] = []
    expected = []
    begin = 0
    for slot in prompt.slots:
        text += prompt.tokens[begin : slot.end + 1]
        begin = slot.end + 1
        value = reference.autoregressive(stock, text, K_MAX, seventh)
        tokens = [token for token, _, _ in value]
        kept = tokens[: len(tokens) - 1 - slot.grammar.behind(tokens)]
        text += [*kept, *slot.grammar.closing(tokens)]
        expected.append(value)
    assert any(len(value) > count + 1 for value in expected)
    fed = mock.Mock(wraps=Sequence._feed_again)
    with mock.patch.object(Sequence, "_feed_again", lambda *arguments: fed(*arguments)):
        answers = Engine(model).run([guided(prompt, K_MAX)])
    compared([expected], seventh)(answers, 1e-3)
    again = [call.args[1] for call in fed.call_args_list]
    if count == 1:
        # The state before the last token was kept, so nothing is computed again.
        assert again
        assert 0 not in again
    else:
        assert 0 in again


@pytest.mark.parametrize("kind", KINDS)
def test_branches_are_decoded_by_one_update_per_layer(kind, monkeypatch):
    model, _ = pair(kind)
    engine = Engine(model)
    slots = [Slot(end, EverySeventh()) for end in range(20, 60, 4)]
    prompt = SlottedPrompt(tokens_of(random.Random(2), 60, 60), slots)
    batches: list[int] = []
    compute = RecurrentPass.convolve

    def counted(work, layer, *arguments):
        batches.append(len(work.chunks.steps))
        return compute(work, layer, *arguments)

    monkeypatch.setattr(RecurrentPass, "convolve", counted)
    programs = [hyper_parallel(prompt, K_MAX, isolate_values=True) for _ in range(3)]
    engine.run(programs)
    layers = len(engine.model.recurrences)
    prefill = layers
    # In the prompt, one batch for each level of the chain; behind it, one for all branches.
    assert set(batches[:prefill]) == {len(slots) + 1}
    assert set(batches[prefill:]) == {1}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_bfloat16_is_within_the_models_own_error(kind):
    exact = tiny_model(kind)
    tokens = tokens_of(random.Random(6), 90, 90)
    mask = torch.ones(90, 90).tril().bool()
    want, _ = reference.dense_output(exact, tokens, range(90), mask)
    coarse = tiny_model(kind).to(torch.bfloat16)
    own, _ = reference.dense_output(coarse, tokens, range(90), mask)

    def program():
        rows = range(90)
        predictions = yield Feed(tokens, rows, sample_at=rows, want_logits=True)
        return torch.stack(predictions.logits)

    (got,) = Engine(pack_model(coarse), max_num_batched_tokens=32).run([program()])

    def middle_error(logits: torch.Tensor) -> float:
        # A rounding difference may send a token of a mixture to another expert.
        return float((logits.float() - want).norm(dim=-1).median())

    assert middle_error(got) < 1.2 * middle_error(own)


def _branching(tokens: list[int]) -> Program[torch.Tensor]:
    """Feed a text with two branches in the middle and at its end; return all logits."""
    seen = {(segment, other): Reach.CAUSAL for segment in (1, 2) for other in {0, segment}}
    text = len(tokens) - 12
    predictions = yield Feed(
        tokens[:text],
        range(text),
        reach=seen,
        sample_at=range(text),
        want_logits=True,
        continues={1: text // 2, 2: text - 1},
    )
    logits = list(predictions.logits)
    for first in range(text, len(tokens), 6):
        # The tokens of both branches, in turn.
        step = (first - text) // 2
        positions = []
        for offset in range(step, step + 3):
            positions += [text // 2 + 1 + offset, text + offset]
        predictions = yield Feed(
            tokens[first : first + 6],
            positions,
            [1, 2] * 3,
            sample_at=range(6),
            want_logits=True,
        )
        logits += predictions.logits
    return torch.stack(logits)


@needs_native
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_branches_are_as_near_to_float32_as_those_in_torch(kind, quantization):
    tokens = tokens_of(random.Random(6), 90, 90)
    # Experts are all used, so that no rounding sends a token to another one.
    experts = {"num_experts_per_tok": 4, "num_experts": 4} if "moe" in kind else {}
    sizes = {"head_dim": 32, **experts}
    (want,) = Engine(tiny_model(kind, **sizes)).run([_branching(tokens)])

    def error(is_packed: bool) -> float:
        model = tiny_model(kind, **sizes).bfloat16()
        if quantization != "none":
            quantize(model, quantization)
        if is_packed:
            model = pack_model(model)
            assert isinstance(model.builder, CBuilder)
        (found,) = Engine(model, max_num_batched_tokens=32).run([_branching(tokens)])
        return float((found.float() - want).norm(dim=-1).median())

    # In 8 bits a rounding difference of a layer's inputs goes far.
    assert error(True) < (1.15 if quantization == "none" else 1.3) * error(False)


def _feeds(*feeds: Feed) -> Program:
    answers = []
    for feed in feeds:
        answers.append((yield feed))
    return answers


def test_tokens_without_an_order_are_refused():
    model, _ = pair("lfm2")
    engine = Engine(model)
    seen = {(1, 0): Reach.CAUSAL, (1, 1): Reach.CAUSAL}
    text = Feed([5, 6, 7, 8], range(4), sample_at=[3])
    bad: dict[str, Iterator[Feed]] = {
        "do not follow one another": _feeds(text, Feed([9], [2], sample_at=[0])),
        "segments \\[0, 1\\], but does not name the row": _feeds(
            text, Feed([9], [4], [1], seen, sample_at=[0])
        ),
        "has begun already": _feeds(text, Feed([9], [4], continues={0: 2})),
        "was closed": _feeds(
            Feed(
                [5, 6],
                range(2),
                sample_at=[1],
                closed=[0],
            ),
            Feed([9], [2], sample_at=[0]),
        ),
        "cannot move rows": _feeds(
            text,
            Feed(
                [9],
                [4],
                move={1: 0},
                sample_at=[0],
            ),
        ),
        "before the text": _feeds(
            Feed(
                [9],
                [4],
                [1],
                seen,
                continues={1: -1},
                sample_at=[0],
            )
        ),
    }
    for words, program in bad.items():
        engine.submit(program, tag=words)
    engine.submit(autoregressive(Prompt([4, 5]), 3, never), tag="good")
    ended = finished(engine)
    assert ended.pop("good").error is None
    for words, program in ended.items():
        with pytest.raises(ProgramError, match=words):
            raise program.error
    assert engine.states.used == 0


def test_a_late_branch_whose_state_is_gone_is_computed_again():
    model, stock = pair("qwen3_5_text")
    engine = Engine(model)
    tokens = tokens_of(random.Random(9), 30, 30)

    def program():
        seen = {(1, 0): Reach.CAUSAL, (1, 1): Reach.CAUSAL}
        yield Feed(tokens, range(30), sample_at=[29])
        predictions = yield Feed(
            [77],
            [21],
            [1],
            seen,
            sample_at=[0],
            continues={1: 20},
        )
        return predictions.tokens

    want = reference.autoregressive(stock, [*tokens[:21], 77], 1, every(1))
    assert engine.run([program()]) == [[want[0][0]]]


def test_contexts_whose_states_do_not_fit_are_read_one_after_the_other():
    model, stock = pair("lfm2")
    questions = [Question([5, 19], seventh), Question([30], seventh)]
    tree = PromptTree(INSTRUCTION, [Context([7, n + 9], questions) for n in range(12)])
    engine = Engine(model, max_states=9)
    (answers,) = engine.run([intra_prompt(tree, 4)])
    expected = [
        reference.autoregressive(
            stock, [*INSTRUCTION, *context.tokens, *question.tokens], 4, seventh
        )
        for context in tree.contexts
        for question in context.questions
    ]
    compared([expected], seventh)([answers], 1e-3)


def test_states_that_do_not_fit_are_named():
    model, _ = pair("granitemoehybrid")
    with pytest.raises(ValueError, match=r"holds 3 states of .* 8 are needed at least"):
        Engine(model, max_states=3)
    little = mock.patch("raypd.decoding.recurrence.states.free_memory", return_value=100_000)
    with little, pytest.raises(ValueError, match="memory of cpu holds 2 states"):
        Engine(model)
    engine = Engine(model, max_states=9)
    many = Feed(
        [5, 6],
        range(2),
        sample_at=[1],
        continues={n + 1: 1 for n in range(12)},
    )
    with pytest.raises(StatesFull, match=r"12 recurrent states .* memory for 5 of .* MB each"):
        engine.run([_feeds(many)])
    (prompt,) = prompts_of(1, 1)
    assert engine.run([autoregressive(prompt, 4, never)])
