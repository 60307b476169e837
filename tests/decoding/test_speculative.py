"""Speculative decoding: what drafters propose, what is verified, and the draft model's cache.

test_exactness.py holds its texts to the unmodified model; test_drafting.py has their distribution.
"""

import copy
from collections.abc import Sequence
from itertools import takewhile

import pytest

from raypd.decoding.draft_model import DraftModel
from raypd.decoding.engine import Engine
from raypd.decoding.methods.speculative import PromptLookup, SpeculativeAnswer, speculative
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sequence import TOKEN
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import POSITION
from tests.decoding.cases import draft_model, pair
from tests.decoding.drivers import drive, never, prompts_of
from tests.decoding.reference import autoregressive as reference_text


def lookup(text: list[int], max_drafts: int, max_ngram: int = 3) -> list[int]:
    drafter = PromptLookup(max_ngram)
    context = drafter.open(Prompt(text))
    context.extend(text, max_drafts)
    (drafts,) = drafter.draft([context], None)
    return drafts


@pytest.mark.parametrize(
    ("text", "max_ngram", "drafts"),
    [
        ([1, 2, 3, 4, 9, 2, 3], 3, [4, 9, 2]),
        # The longest match counts, not the last one: 1 2 3 was followed by 4, 2 3 last by 7.
        ([1, 2, 3, 4, 2, 3, 7, 1, 2, 3], 3, [4, 2, 3]),
        ([1, 2, 3, 4, 2, 3, 7, 1, 2, 3], 2, [7, 1, 2]),
        # Of equal matches the last one counts.
        ([1, 5, 1, 6, 1], 3, [6, 1, 6]),
        # Behind the end of the text the copy repeats itself.
        ([8, 8], 3, [8, 8, 8]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_prompt_lookup_copies_what_followed_the_longest_match(text, max_ngram, drafts):
    assert lookup(text, 3, max_ngram) == drafts


def test_prompt_lookup_sees_tokens_that_come_later():
    drafter = PromptLookup(2)
    text = drafter.open(Prompt([1, 2]))
    text.extend([1, 2, 3], 2)
    assert drafter.draft([text], None) == [[]]
    text.extend([1], 2)
    assert drafter.draft([text], None) == [[2, 3]]
    text.extend([2, 9, 2], 2)
    assert drafter.draft([text], None) == [[9, 2]]


class ScriptedDrafter:
    """Drafts what a list says, and notes what it was told."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = iter(drafts)
        self.told: list[tuple[list[int], int]] = []
        self.closed = 0

    def open(self, prompt: Prompt) -> "ScriptedDrafter":
        return self

    def extend(self, tokens: Sequence[int], max_drafts: int) -> None:
        self.told.append((list(tokens), max_drafts))

    def draft(self, contexts: Sequence["ScriptedDrafter"], plan: None) -> list[list[int]]:
        return [next(self.drafts)]

    def close(self, text: "ScriptedDrafter") -> None:
        self.closed += 1


def run_by_hand(
    program: Program[SpeculativeAnswer], *predicted: list[int]
) -> tuple[SpeculativeAnswer, list[Feed]]:
    """The answer and the passes of a program whose predictions are given, one list per pass."""
    unused = list(predicted)

    def answer(feed: Feed) -> list[int] | Predictions:
        if feed.draft is None:
            return unused.pop(0)
        drafts = feed.draft.drafter.draft(feed.draft.contexts, feed.draft.plan)
        return Predictions([], [], drafts=drafts)

    text, feeds = drive(program, answer)
    assert not unused
    return text, [feed for feed in feeds if feed.draft is None]


def test_a_pass_verifies_the_drafts_behind_the_last_token():
    drafter = ScriptedDrafter([21, 22], [31])
    program = speculative(Prompt([7, 8], shared=1), 6, never, drafter, 2)
    answer, passes = run_by_hand(program, [20], [21, 30, 99], [31, 32], [33])
    assert answer.tokens == [20, 21, 30, 31, 32, 33]
    assert [list(feed.tokens) for feed in passes] == [
        [7, 8],
        [20, 21, 22],
        [30, 31],
        [32],
    ]
    assert [list(feed.positions) for feed in passes] == [
        [0, 1],
        [2, 3, 4],
        [4, 5],
        [6],
    ]
    assert [list(feed.sample_at) for feed in passes] == [
        [1],
        [0, 1, 2],
        [0, 1],
        [0],
    ]
    # 22 was rejected: it is the fifth row.
    assert [list(feed.drop) for feed in passes] == [
        [],
        [],
        [4],
        [],
    ]
    assert [feed.shared for feed in passes] == [1, 0, 0, 0]
    assert answer.steps == 4
    assert answer.drafted == 3
    assert answer.accepted == 2
    # The drafter hears of every token once. Before the last token nothing is drafted.
    assert drafter.told == [([7, 8, 20], 2), ([21, 30], 2)]
    assert drafter.closed == 1


def test_a_text_ends_within_accepted_drafts():
    drafter = ScriptedDrafter([21, 22, 23])
    program = speculative(Prompt([7]), 9, lambda tokens: tokens[-1] == 22, drafter, 3)
    answer, _ = run_by_hand(program, [20], [21, 22, 23, 24])
    assert answer.tokens == [20, 21, 22]
    assert answer.stopped
    assert answer.accepted == 2


def test_a_drafter_forgets_a_program_that_is_cancelled():
    drafter = ScriptedDrafter()
    program = speculative(Prompt([7]), 9, never, drafter, 3)
    next(program)
    program.close()
    assert drafter.closed == 1


def fed_tokens(drafter: DraftModel) -> list[int]:
    """Will hold how many tokens each pass of the draft model takes."""
    sizes: list[int] = []
    drafter.engine.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    return sizes


def test_the_draft_model_reads_every_token_of_a_text_once():
    model, stock = pair("llama")
    drafter = draft_model(stock, noise=0.0)
    sizes = fed_tokens(drafter)
    prompt = prompts_of(9)[0]
    (answer,) = Engine(model).run([speculative(prompt, 25, never, drafter, 4)])
    # It predicts what the model predicts, so every draft is accepted.
    assert answer.drafted == answer.accepted == 19
    # It reads the text up to the last draft but one: that and the last token are never needed.
    assert sum(sizes) == len(prompt.tokens) + 25 - 2
    assert not drafter.engine.scheduler.paused
    assert drafter.engine.pending == 0


def test_the_draft_model_drops_rejected_drafts_from_its_cache():
    model, stock = pair("llama")
    drafter = draft_model(stock, noise=0.2)
    engine = Engine(model)
    prompt = prompts_of(9)[0]
    engine.submit(speculative(prompt, 25, never, drafter, 4))
    text = [token for token, _, _ in reference_text(stock, prompt.tokens, 25, never)]
    rejected = 0
    finished = []
    while engine.pending:
        finished += engine.step()
        for sequence in drafter.engine.scheduler.paused.values():
            live = ~sequence.dropped[: sequence.size]
            columns = sequence.table[:, : sequence.size][:, live]
            tokens = columns[TOKEN]
            positions = columns[POSITION]
            rejected = sequence.size - int(live.sum())
            # All but the last three of them were verified.
            known = len(positions) - 3
            assert positions.tolist() == list(range(len(positions)))
            assert tokens[:known].tolist() == [*prompt.tokens, *text][:known]
    assert finished[0].answer.tokens == text
    assert rejected > 3


@pytest.mark.parametrize("cache_tokens", [256, None])
def test_texts_draft_side_by_side_and_share_the_draft_models_cache(cache_tokens):
    """With a small cache, a paused text loses its part of it and is read again."""
    model, stock = pair("llama")
    engine = Engine(
        copy.deepcopy(stock), max_num_seqs=2, max_num_batched_tokens=24, cache_tokens=cache_tokens
    )
    drafter = DraftModel(engine, 256)
    sizes = fed_tokens(drafter)
    prompts = prompts_of(3, 8, max_tokens=20)
    answers = Engine(model, max_num_seqs=8).run(
        [speculative(prompt, 40, never, drafter, 4) for prompt in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = [token for token, _, _ in reference_text(stock, prompt.tokens, 40, never)]
        assert answer.tokens == expected
        assert answer.drafted == answer.accepted
    read_once = sum(len(prompt.tokens) + 40 - 2 for prompt in prompts) - 3 * 23
    assert (sum(sizes) > read_once + 40) == (cache_tokens is not None)


def test_drafting_ends_behind_a_token_that_the_draft_model_is_unsure_of():
    _, stock = pair("llama")
    engine = Engine(copy.deepcopy(stock))
    sure = DraftModel(engine, 256, min_confidence=0.0)
    unsure = DraftModel(engine, 256, min_confidence=1.0)
    prompt = prompts_of(9)[0]
    for drafter, count in ((sure, 4), (unsure, 1)):
        text = drafter.open(prompt)
        text.extend(prompt.tokens, 4)
        (drafts,) = drafter.draft([text], None)
        assert len(drafts) == count
        drafter.close(text)


def test_nothing_is_drafted_beyond_the_draft_models_context_or_vocabulary():
    _, stock = pair("llama")
    prompt = prompts_of(9)[0]
    length = len(prompt.tokens)
    for context_length, expected in ((length + 4, 4), (length + 3, 0)):
        drafter = DraftModel(Engine(copy.deepcopy(stock)), 256, context_length)
        text = drafter.open(prompt)
        text.extend(prompt.tokens, 4)
        (drafts,) = drafter.draft([text], None)
        assert len(drafts) == expected
    # A draft model may have ids that the model lacks: they end the drafts.
    whole = DraftModel(Engine(copy.deepcopy(stock)), 256)
    text = whole.open(prompt)
    text.extend(prompt.tokens, 4)
    (drafts,) = whole.draft([text], None)
    vocabulary = max(drafts)
    narrow = DraftModel(Engine(copy.deepcopy(stock)), vocabulary)
    text = narrow.open(prompt)
    text.extend(prompt.tokens, 4)
    known = list(takewhile(lambda token: token < vocabulary, drafts))
    assert narrow.draft([text], None) == [known]


def test_a_text_that_the_draft_model_cannot_take_is_decoded_without_drafts():
    model, stock = pair("llama")
    engine = Engine(copy.deepcopy(stock), cache_tokens=256)
    drafter = DraftModel(engine, 256)
    prompt = Prompt([3 + n % 200 for n in range(300)])
    (answer,) = Engine(model).run([speculative(prompt, 5, never, drafter, 4)])
    expected = [token for token, _, _ in reference_text(stock, prompt.tokens, 5, never)]
    assert answer.tokens == expected
    assert answer.drafted == 0
