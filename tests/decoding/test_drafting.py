"""SPACE, Medusa and APAR, pass by pass: which drafts they accept, and what they keep in the cache.

test_exactness.py compares their texts with the unmodified model.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import Paragraph, Tree, apar, restore
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree, medusa
from raypd.decoding.methods.space import segments_seen, space
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling, probabilities
from raypd.decoding.sequence import TOKEN
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT, grown, one_segment, visible
from raypd.errors import ModelError
from raypd.models.medusa_heads import load_heads, save_heads
from tests.decoding import cases, reference
from tests.decoding.cases import (
    CHILD,
    ENDS,
    EOS,
    FORK,
    MASK,
    MAX_TREE_TOKENS,
    TREES,
    Knowing,
    drafting,
    few_forks,
    pair,
    plainly,
)
from tests.decoding.drivers import changed, drive, never, prompts_of, steered
from tests.decoding.reference import Replay
from tests.tiny import in_float64, tiny_model


def text_of(stock, prompt: Prompt, max_tokens: int) -> list[int]:
    """Return the tokens that the unmodified model decodes greedily."""
    picked = reference.autoregressive(stock, prompt.tokens, max_tokens, never)
    return [token for token, _, _ in picked]


def paragraph_tokens(root: Paragraph) -> list[list[int]]:
    """Return the tokens of the paragraphs of a tree, in the order of the text."""
    return [paragraph.tokens for paragraph in restore(root)]


def well_drafted(
    method: str,
    stock,
    prompt: Prompt,
    text: list[int],
    right: float,
    max_tokens: int,
    end: int | None = None,
):
    """Return a program that will decode `text` with drafts.

    Args:
        method: "space", "medusa" or "apar_medusa".
        stock: The unmodified model.
        prompt: The prompt.
        text: What the model decodes behind the prompt.
        right: How often a draft is right.
        max_tokens: The limit of the answer.
        end: The token that ends the answer.

    Returns:
        The program, and how many tokens a pass decodes if all its drafts are right.
    """

    def stops(tokens):
        return tokens[-1] == end

    if method == "space":
        program = space(prompt, max_tokens, 4, MASK, stops=stops)
        return drafting(program, prompt, text, 4, right), 5
    known_text = ([*prompt.tokens, *text], len(prompt.tokens))
    heads = Knowing(stock, [known_text], right)
    if method == "medusa":
        return medusa(prompt, max_tokens, heads, TREES[0], stops), 4
    ends = frozenset()
    if end is not None:
        ends = frozenset([end])
    return apar(
        prompt,
        max_tokens,
        250,
        251,
        ends,
        heads=heads,
        tree=TREES[0],
    ), 4


def check_answer(answer, tokens, stopped, steps, accepted):
    assert answer.tokens == tokens
    assert (answer.generated(str).cut is None) == stopped
    assert getattr(answer, "cost", answer).steps == steps
    assert answer.accepted == accepted


@pytest.mark.parametrize("method", ["space", "medusa", "apar_medusa"])
def test_a_limit_or_a_stop_ends_the_text_within_an_accepted_run(method):
    model, stock = pair("llama")
    prompt = prompts_of(8)[0]
    text = text_of(stock, prompt, 12)
    engine = Engine(model)
    for limit in range(1, 12):
        program, tokens_per_pass = well_drafted(method, stock, prompt, text, 1.0, limit)
        (answer,) = engine.run([program])
        # The pass of the prompt decodes one token.
        steps = 1 + math.ceil((limit - 1) / tokens_per_pass)
        check_answer(answer, text[:limit], False, steps, limit - steps)
    for token in text:
        program, tokens_per_pass = well_drafted(method, stock, prompt, text, 1.0, 12, token)
        (answer,) = engine.run([program])
        count = text.index(token) + 1
        steps = 1 + math.ceil((count - 1) / tokens_per_pass)
        # Of each pass after the first, all tokens but the last are drafts. The last of 12 tokens
        # is never drafted.
        accepted = 0
        for number in range(1, count):
            if number % tokens_per_pass > 0 and number < 11:
                accepted += 1
        expected = text[:count]
        if method == "apar_medusa":
            # The end token is no part of APAR's text.
            expected = text[: count - 1]
        check_answer(answer, expected, True, steps, accepted)


@pytest.mark.parametrize("drafts", ["masks", "heads before training", "random heads"])
def test_drafts_of_the_models_own_are_the_same_in_the_engine_and_in_replay(drafts):
    model, stock = pair("llama", vocab_size=8)
    heads = MedusaHeads.for_model(model, count=3, layers=2)
    tree = None
    if drafts == "random heads":
        tree = cartesian_tree(3, 2, 2)
        torch.manual_seed(3)
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    prompts = [Prompt([1, 5, i, 4, 2]) for i in range(4)]

    def program(prompt):
        if drafts == "masks":
            return space(prompt, 20, 3, MASK)
        return medusa(prompt, 20, heads, tree)

    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=40)
    answers = engine.run([program(prompt) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        replayed = Replay(stock).run(program(prompt))
        assert answer.steps == replayed.steps
        assert answer.accepted == replayed.accepted
        assert answer.tokens == text_of(stock, prompt, 20)
    assert sum(answer.accepted for answer in answers) > 3


@pytest.mark.parametrize(("method", "segments"), [("space", 10), ("medusa", 2)])
def test_the_cache_holds_the_text_and_one_draft(method, segments):
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = text_of(stock, prompt, 40)
    known_tokens = [*prompt.tokens, *text]
    engine = Engine(model)
    program, _ = well_drafted(method, stock, prompt, text, 0.6, 40)
    engine.submit(program)
    done = []
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            cached = sequence.region.owner[: sequence.region.high]
            first_fed = sequence.size - len(sequence.feed.tokens)
            rows = sorted(row for row in cached[cached != NO_TOKEN] if row < first_fed)
            count = len(rows)
            assert sequence.table[TOKEN, rows].tolist() == known_tokens[:count]
            assert sequence.table[POSITION, rows].tolist() == list(range(count))
            assert sequence.table[SEGMENT, rows].tolist() == [0] * count
            assert len(sequence.reach) == segments
            assert sequence.region.slots <= 128
    assert done[0].answer.tokens == text


@pytest.mark.parametrize("method", ["space", "medusa", "apar_medusa", "apar"])
def test_decoded_tokens_are_those_of_the_answer_and_no_mask_or_rejected_draft(method):
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = text_of(stock, prompt, 40)
    last = text[-1]
    if method == "apar":
        # Nothing is drafted, so what is fed is what was decoded.
        program = apar(prompt, 40, 250, 251, frozenset([last]))
    else:
        program, _ = well_drafted(method, stock, prompt, text, 0.6, 40, last)
    engine = Engine(model)
    counted = [0]
    done = []
    engine.submit(program)
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            counted.append(sequence.counts.decode_tokens)
    assert counted == sorted(counted)
    decode_tokens = done[0].counts.decode_tokens
    assert decode_tokens == text.index(last) + 1
    assert decode_tokens >= counted[-1] > 3


def chance_of_texts(stock, prompt, length, sampling):
    """Return the probability of each continuation of `length` tokens.

    The unmodified model samples them one token at a time.
    """
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            logits, _ = reference.plain_output(stock, [*prompt, *text])
            token_chances = probabilities(logits[-1], sampling).tolist()
            for token, token_chance in enumerate(token_chances):
                if token_chance > 0:
                    longer[*text, token] = chance * token_chance
        texts = longer
    return texts


def check_distribution(answers, chances, min_freedom):
    """Check that texts occur as often as expected.

    Chi-square must lie within 4 standard deviations (Wilson and Hilferty). Texts that are expected
    fewer than 5 times are counted together.
    """
    counts = Counter(tuple(answer.tokens) for answer in answers)
    assert set(counts) <= set(chances), "a text that one token at a time never yields"
    cells = []  # How often a text occurred, and how often it is expected.
    rare_count = 0
    rare_expected = 0.0
    for text, chance in chances.items():
        expected = len(answers) * chance
        if expected < 5:
            rare_count += counts.get(text, 0)
            rare_expected += expected
        else:
            cells.append((counts.get(text, 0), expected))
    if rare_expected > 0:
        cells.append((rare_count, rare_expected))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    assert freedom > min_freedom
    variance = 2 / (9 * freedom)
    cube_root = (statistic / freedom) ** (1 / 3)
    deviations = (cube_root - (1 - variance)) / math.sqrt(variance)
    assert deviations < 4, (statistic, freedom)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("space", Sampling(1.5, top_k=3)),
        ("space", Sampling(2.0, top_p=0.65)),
        ("medusa", Sampling(1.5, top_k=3)),
    ],
)
def test_sampled_texts_have_the_distribution_of_autoregressive_ones(method, sampling):
    model, stock = pair("llama", seed=4, vocab_size=16)
    prompt = Prompt([1, 9, 5])
    runs = 700
    heads = MedusaHeads.for_model(
        model,
        count=2,
        layers=1,
        tree=cartesian_tree(4, 3),
    )

    def program(seed):
        if method == "space":
            return space(prompt, 4, 2, MASK, sampling, seed)
        return medusa(prompt, 4, heads)

    engine = Engine(model, max_num_seqs=175)
    answers = engine.run((program(seed) for seed in range(runs)), sampling=sampling)
    accepted = sum(answer.accepted for answer in answers)
    assert runs / 10 < accepted < 2.5 * runs
    if method == "space":
        rejected = sum(answer.rejected for answer in answers)
        assert rejected > runs / 10
    chances = chance_of_texts(stock, prompt.tokens, 4, sampling)
    check_distribution(answers, chances, 12)


@pytest.mark.parametrize(
    ("predicted", "last", "accepted", "rejected"),
    [
        ([22, 23, 24], 22, 1, 0),
        ([22, 23, 24], 23, 2, 0),
        ([22, 23, 24], 24, 2, 0),
        ([22, 25, 0], 22, 1, 0),
        ([22, 25, 0], 25, 1, 1),
        ([26, 0, 0], 26, 0, 1),
    ],
)
def test_candidates_behind_the_end_of_the_text_do_not_count(predicted, last, accepted, rejected):
    program = space(Prompt([20]), 20, 2, MASK, stops=lambda tokens: tokens[-1] == last)
    next(program)
    program.send(Predictions([21, 22, 23], [0.0] * 3))
    of_masks = [0] * 6
    with pytest.raises(StopIteration) as end:
        program.send(Predictions([*predicted, *of_masks], [0.0] * 9))
    answer = end.value.value
    assert answer.tokens[-1] == last
    assert answer.accepted == accepted
    assert answer.rejected == rejected


def test_with_k_0_space_feeds_what_autoregressive_feeds():
    def run(program):
        numbers = itertools.count(1)
        answer, feeds = drive(program, lambda feed: [next(numbers)])
        return answer.tokens, [plain_fields(feed) for feed in feeds]

    def plain_fields(feed):
        return {
            "tokens": list(feed.tokens),
            "positions": list(feed.positions),
            "sample_at": list(feed.sample_at),
            "drop": list(feed.drop),
            "shared": feed.shared,
        }

    prompt = Prompt([7, 8, 9], 2)
    assert run(space(prompt, 5, 0, MASK)) == run(autoregressive(prompt, 5, never))
    with pytest.raises(ValueError, match="k is -1"):
        next(space(prompt, 5, -1, MASK))


def test_a_pass_looks_like_figure_7_of_space():
    """Two candidates behind "LLMs are": who sees whom, and at which positions."""
    program = space(Prompt([20]), 20, 2, MASK)
    first = next(program)
    assert list(first.tokens) == [20, MASK, MASK]
    assert list(first.positions) == [0, 1, 2]
    # "are" follows, and the candidates "auto" and "model".
    second = program.send(Predictions([21, 22, 23], [0.0] * 3))
    assert list(second.tokens) == [21, MASK, MASK, 22, MASK, MASK, 23, MASK, MASK]
    assert list(second.drop) == [1, 2]
    positions = np.array([0, *second.positions])
    segments = np.array([0, *second.segments])
    reach = grown(one_segment(), segments_seen(2))
    visibility = visible(reach, segments, positions, segments, positions)
    figure = [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 4],
        [0, 1, 4, 5],
        [0, 1, 4, 5, 6],
        [0, 1, 4, 7],
        [0, 1, 4, 7, 8],
        [0, 1, 4, 7, 8, 9],
    ]
    assert [np.flatnonzero(keys).tolist() for keys in visibility] == figure
    # A token's position is the number of tokens that it sees beside itself.
    visible_tokens = visibility.sum(1)
    assert (visible_tokens - 1 == positions).all()


def test_heads_run_once_a_step_for_all_programs_that_share_them():
    calls: list[int] = []

    class Counting(MedusaHeads):
        def draft(self, hidden, tree):
            calls.append(len(hidden))
            return super().draft(hidden, tree)

    engine = Engine(tiny_model("llama"), max_num_seqs=4)
    heads = Counting(2, 1, 64, 256).eval()
    engine.run([medusa(prompt, 9, heads) for prompt in prompts_of(6)])
    assert max(calls) == 4
    assert len(calls) < engine.steps


def test_a_tree_must_have_the_beginning_of_each_path_and_no_more_levels_than_heads():
    tree = cartesian_tree(2, 2)
    assert tree.paths == [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [tree.size(depth) for depth in range(4)] == [0, 2, 6, 6]
    with pytest.raises(ValueError, match="not a path"):
        Tree([(0,), (1, 0)])
    with pytest.raises(ValueError, match="deep"):
        next(medusa(Prompt([1]), 3, MedusaHeads(1, 1, 4, 9), cartesian_tree(1, 1)))


def head_logits(state, hidden, layers):
    """Compute the third head by hand, from its weights by name."""
    x = hidden
    for layer in range(layers):
        weight = state[f"heads.2.blocks.{layer}.linear.weight"]
        bias = state[f"heads.2.blocks.{layer}.linear.bias"]
        y = x @ weight.T + bias
        x = x + y * torch.sigmoid(y)
    return x @ state["heads.2.out.weight"].T


def test_heads_are_what_the_files_say(tmp_path):
    torch.manual_seed(1)
    model = tiny_model("qwen3")
    heads = MedusaHeads.for_model(
        model,
        3,
        2,
        "tiny",
        Tree(
            [
                (0,),
                (1,),
                (0, 0),
            ]
        ),
    )
    hidden = torch.randn(5, 64)
    # Before training, a head predicts the model's own next token.
    assert torch.equal(heads(hidden)[1], model.get_output_embeddings()(hidden))
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    state = {name: weight.detach() for name, weight in heads.state_dict().items()}
    torch.testing.assert_close(heads(hidden)[2], head_logits(state, hidden, 2))
    save_heads(heads, tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads", model)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert loaded.base_model == "tiny"
    assert loaded.tree.paths == heads.tree.paths
    assert loaded.layers == 2
    assert not any(weight.requires_grad for weight in loaded.parameters())
    in_bfloat16 = load_heads(tmp_path / "heads", tiny_model("qwen3").bfloat16())
    assert in_bfloat16(hidden).dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"made for tiny.*vocabulary 256.*vocabulary 99"):
        load_heads(tmp_path / "heads", tiny_model("qwen3", vocab_size=99))


class ScriptedModel:
    """A model that reads its predictions from a table.

    `table` has the next token of a thread by the thread's tokens behind the prompt.
    """

    def __init__(self, table: dict[tuple[int, ...], int], prompt: list[int]) -> None:
        self.table = table
        self.prompt = tuple(prompt)
        self.rows: list[tuple[int, int, int]] = []  # Token, position and segment.
        self.alive: set[int] = set()
        self.reach = {(0, 0): 2}

    def run(self, program):
        """Return the program's answer and its feeds."""
        return drive(program, self.answer)

    def answer(self, feed) -> list[int]:
        self.alive.difference_update(feed.drop)
        self.reach.update(feed.reach)
        first = len(self.rows)
        segments = feed.segments or [0] * len(feed.tokens)
        self.rows += zip(feed.tokens, feed.positions, segments, strict=True)
        self.alive.update(range(first, len(self.rows)))
        return [self.predict(first + index) for index in feed.sample_at]

    def predict(self, row: int) -> int:
        seen = [key for key in self.alive if self.sees(row, key)]
        seen.sort(key=lambda key: self.rows[key][1])
        positions = [self.rows[key][1] for key in seen]
        assert positions == list(range(len(seen))), "a path has no gaps"
        path = tuple(self.rows[key][0] for key in seen)
        begin = len(self.prompt)
        assert path[:begin] == self.prompt
        return self.table[path[begin:]]

    def sees(self, query: int, key: int) -> bool:
        _, query_position, query_segment = self.rows[query]
        _, key_position, key_segment = self.rows[key]
        kind = self.reach.get((query_segment, key_segment), 0)
        return kind == 1 or (kind == 2 and key_position <= query_position)


def test_a_tree_of_figure_3_of_apar_by_hand():
    """Three paragraphs, two of them with a detail, and what leaves the cache when."""
    table = {
        (): 10,
        (10,): FORK,
        (10, FORK): 20,
        (10, FORK, 20): FORK,
        (10, FORK, 20, FORK): 30,
        (10, FORK, 20, FORK, 30): EOS,
        (10, FORK, CHILD): 11,
        (10, FORK, CHILD, 11): EOS,
        (10, FORK, 20, FORK, CHILD): 21,
        (10, FORK, 20, FORK, CHILD, 21): 22,
        (10, FORK, 20, FORK, CHILD, 21, 22): EOS,
    }
    prompt = [7, 8, 9]
    answer, feeds = ScriptedModel(table, prompt).run(apar(Prompt(prompt), 50, FORK, CHILD, ENDS))
    assert paragraph_tokens(answer.root) == [
        [10, FORK],
        [CHILD, 11, EOS],
        [20, FORK],
        [CHILD, 21, 22, EOS],
        [30, EOS],
    ]
    assert answer.tokens == [10, 11, 20, 21, 22, 30]
    assert answer.cut is None
    assert answer.threads == 3
    assert answer.unstarted_threads == 0
    # Row indices: prompt 0-2, 10: 3, fork: 4, 20: 5, child: 6, fork: 7, 11: 8, 30: 9, child: 10,
    # 21: 11.
    passes = [
        ([7, 8, 9], [0, 1, 2], []),
        ([10], [3], []),
        ([FORK], [4], []),
        ([20, CHILD], [5, 5], []),
        ([FORK, 11], [6, 6], []),
        ([30, CHILD], [7, 7], [6, 8]),
        ([21], [8], [9]),
        ([22], [9], []),
    ]
    for feed, (tokens, positions, dropped) in zip(feeds, passes, strict=True):
        assert list(feed.tokens) == tokens
        assert list(feed.positions) == positions
        assert sorted(feed.drop) == dropped
    # The cache grows to 9 tokens, gives up the first child (2), takes 2, gives up the paragraph
    # 30, and takes 1 twice.
    attended = [3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 10]
    assert answer.cost.steps == 8
    assert answer.cost.max_cached_tokens == 10
    assert answer.cost.attended_tokens == pytest.approx(sum(attended) / 11)
    # One after the other, these are 6 tokens and an end behind 3 tokens of prompt.
    assert answer.flattened.steps == 7
    assert answer.flattened.max_cached_tokens == 9
    assert answer.flattened.attended_tokens == pytest.approx(sum(range(3, 10)) / 7)


@pytest.mark.parametrize("max_threads", [1, 2, 3])
def test_a_child_beyond_the_threads_waits_and_nothing_of_it_is_lost(max_threads):
    table = {}
    text = []
    main_thread: tuple[int, ...] = ()
    for number in range(5):
        paragraph = 10 + number
        detail = 20 + number
        end_of_detail = 30 + number
        text += [paragraph, detail, end_of_detail]
        table[main_thread] = paragraph
        table[*main_thread, paragraph] = FORK
        main_thread = (*main_thread, paragraph, FORK)
        table[*main_thread, CHILD] = detail
        table[*main_thread, CHILD, detail] = end_of_detail
        table[*main_thread, CHILD, detail, end_of_detail] = EOS
    table[main_thread] = EOS
    prompt = [7, 8]
    wide, _ = ScriptedModel(table, prompt).run(apar(Prompt(prompt), 100, FORK, CHILD, ENDS))
    program = apar(Prompt(prompt), 100, FORK, CHILD, ENDS, max_threads=max_threads)
    narrow, feeds = ScriptedModel(table, prompt).run(program)
    assert wide.tokens == text
    assert narrow.tokens == text
    assert paragraph_tokens(narrow.root) == paragraph_tokens(wide.root)
    assert narrow.cut is None
    assert narrow.threads == 6
    assert narrow.unstarted_threads == 0
    assert max(len(feed.sample_at) for feed in feeds) == max_threads


def always_forks(token, position, predicted):
    if token == FORK:
        return 50
    return FORK


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 8, 13, 30])
def test_budget_is_kept_and_positions_stay_within_it(limit):
    model, _ = pair("llama")
    positions = []

    def note_positions(feed, predictions):
        positions.extend(feed.positions)

    program = steered(apar(Prompt([5, 6, 7]), limit, FORK, CHILD, ENDS), always_forks)
    (answer,) = Engine(model).run([changed(program, note_positions)])
    assert sum(map(len, paragraph_tokens(answer.root))) == limit
    assert max(positions, default=0) < 3 + limit
    assert answer.cut is not None
    assert (answer.cost.steps > 0) == (limit > 0)


def test_a_fork_that_ends_a_prompt_is_acted_on():
    table = {
        (): 10,
        (10,): EOS,
        (CHILD,): 11,
        (CHILD, 11): EOS,
    }
    prompt = [7, FORK]
    answer, _ = ScriptedModel(table, prompt).run(apar(Prompt(prompt), 50, FORK, CHILD, ENDS))
    assert paragraph_tokens(answer.root) == [
        [],
        [CHILD, 11, EOS],
        [10, EOS],
    ]


def test_a_long_chain_of_paragraphs_is_restored():
    root = Paragraph([0])
    last = root
    for number in range(1, 5000):
        last.next_sibling = Paragraph([number])
        last = last.next_sibling
    assert paragraph_tokens(root) == [[number] for number in range(5000)]
    assert len(repr(root)) < 100


def test_with_medusa_every_budget_is_kept():
    """The tokens are those of the threads, and the same in the engine and in Replay."""
    model, stock = (in_float64(tiny) for tiny in pair("llama"))
    prompt = prompts_of(23, 1)[0]
    _, texts = plainly(stock, prompt)
    assert len(texts) > 2

    def program(limit):
        heads = Knowing(stock, texts, 0.9, limit)
        drafted = apar(
            prompt,
            limit,
            FORK,
            CHILD,
            ENDS,
            heads=heads,
            tree=TREES[limit % 3],
        )
        return steered(drafted, few_forks)

    for limit in (1, 2, 3, 7, 12, 20):
        (answer,) = Engine(model, max_num_batched_tokens=30).run([program(limit)])
        assert sum(map(len, paragraph_tokens(answer.root))) == limit
        cases.check_threads(stock, prompt, answer, few_forks, 1e-9)
        replayed = Replay(stock).run(program(limit))
        assert paragraph_tokens(answer.root) == paragraph_tokens(replayed.root)
        assert answer.cost == replayed.cost
        assert answer.accepted == replayed.accepted


def check_every_token_is_seen(sequence, live):
    """Check that each live row is on the path of a token that was just fed."""
    positions = sequence.table[POSITION, live]
    segments = sequence.table[SEGMENT, live]
    fed = live >= sequence.size - len(sequence.feed.tokens)
    visibility = visible(sequence.reach, segments[fed], positions[fed], segments, positions)
    assert visibility.any(0).all(), "a token that no thread has on its path"


@pytest.mark.parametrize("drafted", [False, True])
def test_what_no_thread_has_on_its_path_leaves_the_cache(drafted):
    """The answer reports the most tokens that the cache held.

    A thread that drafts takes over segments of one that ended.
    """
    model, stock = pair("llama")
    prompt = prompts_of(23, 1)[0]
    plain, texts = plainly(stock, prompt)
    assert plain.cut is None
    options = {}
    if drafted:
        options = {"heads": Knowing(stock, texts, 0.6), "tree": TREES[1]}
    program = apar(prompt, MAX_TREE_TOKENS, FORK, CHILD, ENDS, **options)
    engine = Engine(model)
    engine.submit(steered(program, few_forks))
    done = []
    max_tokens = 0
    max_segments = 0
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            live = np.flatnonzero(~sequence.dropped[: sequence.size])
            check_every_token_is_seen(sequence, live)
            max_tokens = max(max_tokens, len(live))
            max_segments = max(max_segments, len(sequence.reach))
    answer = done[0].answer
    paragraphs = paragraph_tokens(answer.root)
    assert paragraphs == paragraph_tokens(plain.root)
    assert max_tokens == answer.cost.max_cached_tokens
    segment_limit = len(paragraphs) + 1
    if drafted:
        segment_limit += 9 * answer.threads
    assert max_segments < segment_limit
