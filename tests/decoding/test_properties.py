"""Random programs against a replay of each alone; and the rule of visibility.

The rule is compared with the equations of IPPD, and with sliding windows.
"""

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from raypd.decoding import scheduler
from raypd.decoding.attention.step import Span
from raypd.decoding.cache_region import MIN_REGION_SLOTS
from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.program import Feed, ProgramError
from raypd.decoding.scheduler import Chunk
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import (
    NO_TOKEN,
    Reach,
    grown,
    in_window,
    one_segment,
    segment_sets,
    visible,
)
from tests.decoding import drivers, reference
from tests.decoding.cases import EverySeventh, agree, pair, seventh, tree_of
from tests.decoding.drivers import finished, never, tokens_of
from tests.decoding.reference import Replay
from tests.tiny import tiny_model

INSTRUCTION = [7, 91, 33, 250, 18, 77, 120, 5, 66]
# In float64 a wrong mask cannot hide in rounding.
MODEL = tiny_model("llama").double()
STOCK = copy.deepcopy(MODEL)
STOCK.set_attn_implementation("eager")
WINDOW = 24
KINDS = ["gemma2", "gemma3_text", "mistral"]


class Segments:
    """The segments that a random program has opened."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 1
        # A segment that others see whole gets no more tokens.
        self.closed: set[int] = set()

    def open(self) -> dict[tuple[int, int], Reach]:
        """Open a segment that sees some closed ones; return what is added to the reach."""
        new = self.count
        reach = {(new, 0): Reach.CAUSAL, (new, new): Reach.CAUSAL}
        for segment in range(1, new):
            reach[new, segment] = Reach.HIDDEN
            if segment in self.closed:
                reach[new, segment] = self.rng.choice([Reach.HIDDEN, Reach.ALL])
            if self.rng.random() < 0.4:
                self.closed.add(segment)
        self.count += 1
        return reach

    def choose(self) -> int:
        """Return an open segment."""
        return self.rng.choice([s for s in range(self.count) if s not in self.closed])


def wandering(seed: int, edits: bool):
    """Do all that a program can do, at random.

    The program opens segments, joins them, feeds what was predicted or something else, and with
    `edits` drops and moves tokens.
    """
    rng = random.Random(seed)
    segments = Segments(rng)
    first = INSTRUCTION + tokens_of(rng, 1, 9)
    sample_at = sorted(rng.sample(range(9, len(first)), rng.randint(1, len(first) - 9)))
    shared = rng.choice([0, 5, 9])
    predictions = yield Feed(
        first,
        range(len(first)),
        sample_at=sample_at,
        shared=shared,
    )
    heard = [(predictions.tokens, predictions.logprobs)]
    total = len(first)  # Tokens fed.
    position = len(first)
    alive = list(range(9, total))  # Rows that are not shared and were not dropped.

    def some_rows() -> list[int]:
        if not edits:
            return []
        return rng.sample(alive, min(len(alive), rng.randint(0, 2)))

    for _ in range(rng.randint(1, 5)):
        reach = segments.open() if rng.random() < 0.6 else {}
        count = rng.randint(1, 5)
        positions = sorted(rng.sample(range(position, position + 12), count))
        tokens = [rng.choice([*predictions.tokens, rng.randrange(3, 256)]) for _ in range(count)]
        token_segments = [segments.choose() for _ in range(count)]
        drop = some_rows()
        alive = [row for row in alive if row not in drop]
        moved = some_rows()
        sample_at = sorted(rng.sample(range(count), rng.randint(1, count)))
        move = {row: rng.randrange(segments.count) for row in moved}
        predictions = yield Feed(
            tokens, positions, token_segments, reach, sample_at, drop=drop, move=move
        )
        heard.append((predictions.tokens, predictions.logprobs))
        alive += range(total, total + count)
        total += count
        position += rng.randint(0, 4)
    return heard


def check(
    seeds: Iterable[int], engine: Engine, edits: bool, stock: PreTrainedModel = STOCK
) -> None:
    """Check the answers of random programs in an engine against a replay of each alone."""
    answers = engine.run(wandering(seed, edits) for seed in seeds)
    for seed, answer in zip(seeds, answers, strict=True):
        check_alike(answer, Replay(stock).run(wandering(seed, edits)))


def check_alike(answer: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (want, want_logprobs) in zip(answer, expected, strict=True):
        assert tokens == want
        np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([16, 23, 400]),
)
def test_no_row_sees_another(seeds, batch, budget):
    check(
        seeds,
        Engine(
            MODEL,
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
        ),
        edits=True,
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=6), st.integers(193, 260))
def test_a_row_that_lost_its_cache_sees_the_same(seeds, slots):
    engine = Engine(MODEL, max_num_seqs=6, max_num_batched_tokens=16, cache_tokens=slots)
    check(seeds, engine, edits=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "no token"),
        ({"positions": [0, 1]}, "2 positions"),
        ({"sample_at": [3]}, "not in it"),
        ({"segments": [0, 1, 1]}, "reach themselves"),
        ({"drop": [0]}, "not fed yet"),
        ({"allowed_token_ids": [None, None]}, "allows 2"),
        ({"positions": [1, 2, 3], "shared": 2}, "shared tokens"),
    ],
)
def test_an_impossible_feed_ends_its_program_alone(changes, words):
    engine = Engine(MODEL, max_num_seqs=4)
    engine.submit(wandering(1, False), tag="good")
    feeds = [
        Feed(
            **{
                "tokens": [5, 6, 7],
                "positions": [0, 1, 2],
                "sample_at": [2],
                **changes,
            }
        )
    ]
    engine.submit((feed for feed in feeds), tag="bad")
    done = finished(engine)
    assert done["good"].error is None
    assert type(done["bad"].error) is ProgramError
    assert words in str(done["bad"].error)


def test_a_program_that_never_fits_is_refused_and_the_others_continue():
    engine = Engine(MODEL, max_num_seqs=4, max_num_batched_tokens=64, cache_tokens=256)
    engine.submit((feed for feed in [Feed([5] * 400, range(400), sample_at=[399])]), tag="long")
    for seed in range(4):
        engine.submit(wandering(seed, False), tag=seed)
    done = finished(engine)
    assert "cache_tokens" in str(done["long"].error)
    assert all(done[seed].error is None for seed in range(4))


def test_the_cache_is_empty_when_all_is_done_except_for_shared_prefixes():
    engine = Engine(MODEL, max_num_seqs=3, max_num_batched_tokens=16)
    engine.run(wandering(seed, True) for seed in range(6))
    prefix_slots = sum(prefix.length for prefix in engine.scheduler.prefixes.values())
    assert engine.cache.allocator.available == engine.cache.allocator.slots - prefix_slots
    assert not engine.scheduler.sequences
    assert torch.isfinite(engine.cache.keys[0]).all()


def test_prefixes_that_no_program_uses_any_more_leave_the_cache(monkeypatch):
    monkeypatch.setattr(scheduler, "_MAX_IDLE_PREFIXES", 3)
    engine = Engine(MODEL)
    for number in range(8):
        prompt = Prompt([*[10 + number] * 20, 5], shared=20)
        engine.run([autoregressive(prompt, 2, never)])
    prefixes = engine.scheduler.prefixes
    assert [prefix.users for prefix in prefixes.values()] == [0] * 4
    # The last ones stay.
    assert [tokens[0] for tokens in prefixes] == [14, 15, 16, 17]
    assert engine.cache.allocator.available == engine.cache.allocator.slots - 4 * 20


def test_tokens_are_counted_once_while_a_shared_prefix_is_computed():
    engine = Engine(MODEL, max_num_seqs=2, max_num_batched_tokens=4)
    for _ in range(2):
        prompt = Prompt([*INSTRUCTION, 5], shared=9)
        engine.submit(autoregressive(prompt, 3, never), tag="program")
    programs: list[Finished] = []
    while engine.pending:
        programs += engine.step()
        # What computes the prefix is none of the programs.
        assert all(seq.tag == "program" for seq in engine.sequences)
    assert sum(program.counts.prefill_tokens for program in programs) == 9 + 2
    for program in programs:
        assert program.counts.decode_tokens == len(program.answer.tokens) == 3


@pytest.mark.parametrize("max_num_seqs", [256, 24])
def test_no_pass_is_small_while_work_is_waiting(max_num_seqs: int) -> None:
    engine = Engine(MODEL, max_num_seqs=max_num_seqs, max_num_batched_tokens=48)
    schedule = engine.scheduler.schedule
    tokens_of_passes: set[int] = set()
    running: list[int] = []

    def noted() -> tuple[list[Chunk], list[Finished]]:
        chunks, finished = schedule()
        if engine.scheduler.waiting:
            tokens_of_passes.add(sum(len(chunk.tokens) for chunk in chunks))
            running.append(len(engine.sequences))
        return chunks, finished

    engine.scheduler.schedule = noted
    prompts = [Prompt(list(range(5, 12 + n % 9))) for n in range(200)]
    answers = engine.run(autoregressive(prompt, 20, never) for prompt in prompts)
    assert [len(answer.tokens) for answer in answers] == [20] * 200
    if max_num_seqs == 24:
        assert max(running) == 24
    else:
        assert tokens_of_passes == {48}
        # Only a part of the prompt of the last program in a pass is fed.
        assert max(running) <= 48 + 1


def shrinking(rng: random.Random):
    """Fill the cache, drop it in pieces, and ask what the rest sees (APAR, section 3.4)."""
    tokens = tokens_of(rng, 260, 300)
    predictions = yield Feed(tokens, range(len(tokens)), sample_at=[len(tokens) - 1])
    heard = []
    alive = list(range(len(tokens)))
    total = len(tokens)
    while len(alive) > 20:
        heard.append((predictions.tokens, predictions.logprobs))
        drop = rng.sample(alive, rng.randint(len(alive) // 8, len(alive) // 3))
        alive = [row for row in alive if row not in drop]
        count = rng.randint(1, 6)
        rows = range(total, total + count)  # They are at the positions of the same numbers.
        tokens = tokens_of(rng, count, count)
        predictions = yield Feed(
            tokens,
            rows,
            sample_at=range(count),
            drop=drop,
        )
        alive += rows
        total += count
    return heard


@pytest.mark.parametrize("seed", range(2))
def test_sequences_that_are_compacted_see_the_same_and_hold_no_more_than_they_need(seed):
    engine = Engine(MODEL, max_num_seqs=3, max_num_batched_tokens=120)
    for number in range(3):
        engine.submit(shrinking(random.Random(10 * seed + number)), tag=number)
    answers = {}
    sizes: list[int] = []  # Slots of regions.
    while engine.pending:
        answers |= {program.tag: program.answer for program in engine.step()}
        sequences = engine.scheduler.sequences
        taken = engine.cache.allocator.slots - engine.cache.allocator.available
        assert taken == sum(seq.region.slots for seq in sequences)
        for seq in sequences:
            region = seq.region
            occupied = np.flatnonzero(region.owner != NO_TOKEN)
            np.testing.assert_array_equal(region.offsets[region.owner[occupied]], occupied)
            limit = 512
            if seq.steps >= 2:
                needed = len(occupied) + seq.size - seq.cached
                limit = MIN_REGION_SLOTS + 4 * needed
            assert region.slots <= limit
            if region.slots:
                sizes.append(region.slots)
    assert min(sizes) == MIN_REGION_SLOTS
    assert max(sizes) == 512
    assert engine.cache.allocator.available == engine.cache.allocator.slots
    for number, answer in answers.items():
        program = shrinking(random.Random(10 * seed + number))
        check_alike(answer, Replay(STOCK).run(program))


@pytest.mark.parametrize(
    ("steps", "first_query", "causal"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], 5, True),
        ([0, 0, 0, 0, 0, 1, 1, 1], 5, True),
        # The queries are not the last keys.
        ([0, 0, 0, 0, 0, 0, 0, 0], 2, False),
        # A slot that was free was filled later.
        ([0, 0, 2, 0, 0, 1, 1, 1], 5, False),
    ],
)
def test_only_text_that_is_read_in_order_is_causal(steps, first_query, causal) -> None:
    keys = np.array(
        [
            range(8),
            [0] * 8,
            steps,
        ]
    )
    span = Span(
        query_start=0,
        query_end=3,
        key_start=0,
        key_count=8,
        reach=one_segment(),
        queries=keys[:, first_query : first_query + 3],
        keys=keys,
    )
    assert span.causal == causal


@pytest.mark.parametrize("segments", [1, 3, 31, 32, 80])
def test_the_sets_of_segments_and_the_windows_of_a_kernel_are_the_rule(segments) -> None:
    rng = np.random.default_rng(segments)
    reach = rng.integers(0, 3, (segments, segments)).astype(np.int8)
    key_segments = rng.integers(-1, segments, 60)
    key_positions = rng.integers(0, 40, 60)
    query_segments = rng.integers(0, segments, 20)
    query_positions = rng.integers(0, 40, 20)
    visibility = visible(reach, query_segments, query_positions, key_segments, key_positions)
    sets, labels = segment_sets(reach, query_segments, key_segments)
    bits = (sets[:, :, labels // 32] >> (labels % 32)) & 1  # [queries, 2, keys]
    in_whole = bits[:, 0] == 1
    in_causal = bits[:, 1] == 1
    is_before = key_positions <= query_positions[:, None]
    np.testing.assert_array_equal(in_whole | (in_causal & is_before), visibility)
    # How many tokens each query sees between a key and itself, [queries, keys].
    is_behind_key = key_positions > key_positions[:, None]
    seen_behind_key = (visibility & is_before).astype(int) @ is_behind_key.T
    for window in (1, 2, 7, 60, 61):
        near = in_window(visibility, query_positions, key_positions, window)
        np.testing.assert_array_equal(near, seen_behind_key < window)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_mask_is_that_of_equations_6_to_9(seed, contexts):
    prompt = tree_of(random.Random(seed), contexts, drivers.INSTRUCTION[: seed % 5])
    feed = header(prompt)
    # The numbers of each token's context and question; 0 for none.
    context_numbers = [0] * len(prompt.instruction)
    question_numbers = [0] * len(prompt.instruction)
    contexts_with_questions = [context for context in prompt.contexts if context.questions]
    for j, context in enumerate(contexts_with_questions, 1):
        context_numbers += [j] * len(context.tokens)
        question_numbers += [0] * len(context.tokens)
        for k, question in enumerate(context.questions, 1):
            context_numbers += [j] * len(question.tokens)
            question_numbers += [k] * len(question.tokens)
    positions = np.array(feed.positions)
    causal = positions[:, None] >= positions[None, :]
    same_context = same_or_none(np.array(context_numbers))
    same_question = same_or_none(np.array(question_numbers))
    segments = np.array(feed.segments)
    reach = grown(one_segment(), feed.reach)
    visibility = visible(reach, segments, positions, segments, positions)
    assert (visibility == (causal & same_context & same_question)).all()


def same_or_none(numbers: np.ndarray) -> np.ndarray:
    """Return whether a key has the query's number or none, bool [queries, keys]."""
    return (numbers[:, None] == numbers[None, :]) | (numbers[None, :] == 0)


def test_a_prompt_without_questions_has_no_answers():
    model, _ = pair("llama")
    tree = PromptTree([1, 2], [Context([3], [])])
    assert Engine(model).run([intra_prompt(tree, 5)]) == [[]]


def test_a_question_without_tokens_is_an_error():
    model, _ = pair("llama")
    tree = PromptTree([1], [Context([3], [Question([], seventh)])])
    with pytest.raises(ValueError, match="no token"):
        Engine(model).run([intra_prompt(tree, 5)])


@torch.no_grad()
def alone(stock: PreTrainedModel, prompt: list[int], count: int) -> list[tuple[int, float, float]]:
    """Return the model's own greedy answer, under masks and windows that transformers makes."""
    answer: list[tuple[int, float, float]] = []
    tokens = list(prompt)
    while len(answer) < count and not (answer and answer[-1][0] % 7 == 0):
        logits = stock(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        answer.append(reference.greedy(logits, None))
        tokens.append(answer[-1][0])
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0, len(drivers.INSTRUCTION)])
def test_sixteen_gaps_of_thirty_take_nothing_of_the_window(kind, shared):
    """Each of sixteen values is compared with the value alone, behind a prompt without gaps."""
    # Rotary embeddings that hardly turn leave only the window of a gap.
    flat = {"rope_type": "linear", "factor": 1e15, "rope_theta": 10_000.0}
    rope = {"full_attention": flat, "sliding_attention": flat} if kind == "gemma3_text" else flat
    model, stock = pair(
        kind,
        sliding_window=WINDOW,
        rope_parameters=rope,
        num_hidden_layers=4,
    )
    rng = random.Random(4)
    tokens = drivers.INSTRUCTION + tokens_of(rng, 12, 12)
    slots: list[Slot] = []
    for _ in range(16):
        tokens += tokens_of(rng, 1, 2)
        slots.append(Slot(len(tokens) - 1, EverySeventh()))
    # The window cuts the prompt behind its instruction, and a gap is larger than the window.
    window_start = len(tokens) - WINDOW
    assert len(drivers.INSTRUCTION) < window_start < slots[-1].end < 30 * len(slots)
    prompt = SlottedPrompt(tokens, slots, shared=shared)
    programs = (hyper_parallel(prompt, 30, isolate_values=True) for _ in range(2))
    for values in Engine(model, max_num_batched_tokens=31).run(programs):
        for slot, value in zip(slots, values, strict=True):
            agree(alone(stock, tokens[: slot.end + 1], 30), value.tokens, value.logprobs)


@pytest.mark.parametrize("window", [1, 3, 6, 11])
def test_random_programs_under_a_window_equal_the_rule_written_out(window):
    model, stock = pair("mistral", sliding_window=window)
    engine = Engine(model.double(), max_num_seqs=2, max_num_batched_tokens=16)
    check(
        range(18),
        engine,
        edits=True,
        stock=stock.double(),
    )
