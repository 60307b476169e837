"""Medusa and APAR with Medusa: what AR and APAR say, token for token, in fewer passes, for any heads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import apar, restore
from raypd.decoding.methods.apar_medusa import apar_medusa
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.methods.medusa import MedusaHeads, Tree, cartesian_tree, medusa, sparse_tree
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling
from raypd.decoding.visibility import visible
from raypd.errors import ModelError
from raypd.models.medusa_heads import load_heads, save_heads
from tests.decoding import reference
from tests.decoding.drivers import never, prompts_of, rarely, steered
from tests.decoding.reference import Replay
from tests.decoding.test_apar import CHILD, ENDS, EOS, FORK
from tests.decoding.test_exactness import FEW_FAMILIES, agree, beside_others, pair
from tests.decoding.test_space import answers_beside_others, chance_of_texts, check_cached_text, check_distribution
from tests.tiny import in_float64, tiny_model

TREES = [cartesian_tree(1, 1, 1), cartesian_tree(3, 2), Tree([(0,), (1,), (2,), (1, 0), (1, 1), (1, 0, 0)])]


class Knowing(MedusaHeads):
    """Heads that know the texts: they find where they are by the hidden state, which must be one of the stock model's,
    and guess right, at a random rank of each depth, with the probability `right`.

    texts: (tokens, from which place on) of which each token is what is said behind the one before it.
    """

    def __init__(self, stock, texts, right, seed=0):
        width = stock.get_output_embeddings().weight.shape
        super().__init__(3, 1, width[1], width[0])
        self.right, self.rng = right, random.Random(seed)
        states, self.behind = [], []  # what is said behind each state, from there on
        for tokens, begin in texts:
            mask = torch.ones(len(tokens), len(tokens)).tril().bool()
            states.append(reference.dense_output(stock, tokens, range(len(tokens)), mask)[1][begin - 1 :])
            self.behind += [tokens[place:] for place in range(begin, len(tokens) + 1)]
        self.states = torch.cat(states)

    def draft(self, hidden, tree):
        return [self.guess_one(state, tree) for state in hidden]

    def guess_one(self, hidden, tree):
        gaps = (self.states - hidden).abs().amax(-1)
        place = int(gaps.argmin())
        assert gaps[place] < 1e-3
        text = self.behind[place]
        guesses, lucky = [], {}
        for n in range(len(tree.paths)):
            d, rank = tree.depths[n], tree.ranks[n]
            if d not in lucky:
                ranks = sorted({tree.ranks[m] for m in range(len(tree.ranks)) if tree.depths[m] == d})
                lucky[d] = self.rng.choice(ranks) if self.rng.random() < self.right else None
            known = text[d] if d < len(text) else 5
            guesses.append(known if rank == lucky[d] else (known + 1 + rank) % 200)
        return guesses


def knowing(stock, prompt, text, right, seed=0):
    return Knowing(stock, [([*prompt, *text], len(prompt))], right, seed)


MOST = 400  # more than any tree of these tests has: where it cuts, threads are cut in another order


def bounded(token, position, predicted):
    """Some forks at first, then ends: trees of a few threads, as a function of what the model sees last."""
    draw = (predicted * 31 + position * 17 + token * 7) % 23
    if draw < 4 and token != CHILD and position < 46:
        return FORK
    if draw > 20 or (draw > 15 and position > 55):
        return EOS
    return predicted if predicted not in (FORK, CHILD, EOS) else 40 + draw


def scripted(program):
    return steered(program, bounded)


@pytest.mark.parametrize("kind", FEW_FAMILIES)
def test_greedy_equals_autoregressive_beside_other_programs(kind):
    model, stock = pair(kind)
    prompts = prompts_of(2)
    stops = [rarely, never, never, never]
    expected = [reference.autoregressive(stock, p.tokens, 14, s) for p, s in zip(prompts, stops, strict=True)]
    programs = []
    for i, (prompt, want, stop) in enumerate(zip(prompts, expected, stops, strict=True)):
        heads = knowing(stock, prompt.tokens, [t for t, _, _ in want], 0.75, i)
        programs.append(medusa(prompt, 14, heads, TREES[i % 3], stop))
    ours = answers_beside_others(model, stock, programs, expected, prompts[1], stops)
    assert sum(a.accepted for a in ours) > 5
    assert max(a.average_accepted_tokens for a in ours) > 1.3


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_float64_tokens_are_those_of_the_reference_and_of_replay(kind):
    model, stock = pair(kind)
    model, stock = in_float64(model), in_float64(stock)
    for number, prompt in enumerate(prompts_of(5, 3)):
        want = reference.autoregressive(stock, prompt.tokens, 12, never)
        text = [t for t, _, _ in want]
        programs = [medusa(prompt, 12, knowing(stock, prompt.tokens, text, 0.8, 1), TREES[number]) for _ in range(2)]
        answer = Engine(model, max_num_batched_tokens=24).run(programs[:1])[0]
        assert answer.tokens == text
        np.testing.assert_allclose(answer.logprobs, [p for _, p, _ in want], atol=1e-9)
        replayed = reference.Replay(stock).run(programs[1])
        assert (replayed.tokens, replayed.steps, replayed.accepted) == (answer.tokens, answer.steps, answer.accepted)


def test_heads_of_their_own():
    """Heads as they are before training, and random ones: the text is the same, and Replay counts the same passes."""
    model, stock = pair("olmo2", vocab_size=8)
    alike = MedusaHeads.for_model(model, count=2, layers=2)
    wild = MedusaHeads.for_model(model, count=3, layers=1)
    torch.manual_seed(3)
    for weight in wild.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    prompts = [Prompt([1, 5, i, 4]) for i in range(4)]
    accepted = 0
    for heads, tree in ((alike, None), (wild, cartesian_tree(3, 2, 2))):
        answers = Engine(model, max_num_seqs=5, max_num_batched_tokens=40).run(
            medusa(p, 20, heads, tree) for p in prompts
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            agree(reference.autoregressive(stock, prompt.tokens, 20, never), answer.tokens, answer.logprobs)
            replayed = reference.Replay(stock).run(medusa(prompt, 20, heads, tree))
            assert (replayed.tokens, replayed.steps) == (answer.tokens, answer.steps)
            accepted += answer.accepted
    assert accepted > 20


def test_most_tokens_and_stops_cut_inside_an_accepted_run():
    model, stock = pair("llama")
    prompt = prompts_of(8)[0]
    full = [t for t, _, _ in reference.autoregressive(stock, prompt.tokens, 12, never)]
    heads = knowing(stock, prompt.tokens, full, 1.0)
    engine = Engine(model)
    for most in range(1, 12):
        answer = engine.run([medusa(prompt, most, heads, TREES[0])])[0]
        assert (answer.tokens, answer.stopped) == (full[:most], False)
        assert answer.steps == 1 + -(-(most - 1) // 4)  # three guesses and the token behind them a pass
        assert answer.accepted == most - answer.steps
    for token in full:
        answer = engine.run([medusa(prompt, 12, heads, TREES[0], lambda tokens, end=token: tokens[-1] == end)])[0]
        assert (answer.tokens, answer.stopped) == (full[: full.index(token) + 1], True)
        # of each pass after the prompt's the first three are guesses; the last pass of 12 tokens has two
        assert answer.accepted == sum(n % 4 > 0 and n < 11 for n in range(1, full.index(token) + 1))


def test_a_pass_by_hand():
    """Tokens, positions, segments and what leaves the cache, with heads that always guess 40 + rank."""

    class Fixed(MedusaHeads):
        def draft(self, hidden, tree):
            return [[10 * (3 + depth) + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]]

    heads = Fixed(3, 1, 4, 99)
    program = medusa(Prompt([7, 8]), 20, heads, TREES[2])
    first = next(program)
    assert (list(first.tokens), list(first.sample_at), first.want_hidden) == ([7, 8], [1], True)
    hidden = [torch.zeros(4)] * 7
    ask = program.send(Predictions([9], [0.0], hidden=hidden[:1]))
    assert (ask.tokens, ask.draft.heads, ask.draft.tree) == ((), heads, TREES[2])
    feed = program.send(Predictions([], [], drafts=heads.draft(ask.draft.hidden, TREES[2])))
    assert list(feed.tokens) == [9, 40, 41, 42, 50, 51, 60]
    assert list(feed.positions) == [2, 3, 3, 3, 4, 4, 5]
    assert list(feed.segments) == [0, 1, 2, 3, 4, 5, 4]  # (1, 0) and (1, 0, 0) are one run
    assert {key for query, key in first.reach if query == 4} == {0, 2, 4}
    assert list(feed.sample_at) == list(range(7))
    # the model says 41 behind 9, 50 behind 41, and 1 behind 50
    ask = program.send(Predictions([41, 0, 50, 0, 1, 0, 0], [0.0] * 7, hidden=hidden))
    feed = program.send(Predictions([], [], drafts=heads.draft(ask.draft.hidden, TREES[2])))
    assert (feed.tokens[0], feed.positions[0]) == (1, 5)
    assert (feed.move, sorted(feed.drop)) == ({4: 0, 6: 0}, [3, 5, 7, 8])


def test_heads_run_once_a_step_for_all_programs_that_share_them():
    calls: list[int] = []

    class Counting(MedusaHeads):
        def draft(self, hidden, tree):
            calls.append(len(hidden))
            return super().draft(hidden, tree)

    model, stock = pair("llama")
    torch.manual_seed(1)
    width = model.get_output_embeddings().weight.shape
    heads = Counting(2, 1, width[1], width[0]).eval()
    prompts = prompts_of(6)
    engine = Engine(model, max_num_seqs=4)
    answers = engine.run([medusa(prompt, 9, heads) for prompt in prompts])
    assert max(calls) == len(prompts)
    assert len(calls) < engine.steps
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == [t for t, _, _ in reference.autoregressive(stock, prompt.tokens, 9, never)]
        replayed = reference.Replay(stock).run(medusa(prompt, 9, heads))
        assert (replayed.tokens, replayed.accepted) == (answer.tokens, answer.accepted)


def test_the_cache_holds_the_text_and_one_tree():
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = [t for t, _, _ in reference.autoregressive(stock, prompt.tokens, 40, never)]
    engine = Engine(model)
    engine.submit(medusa(prompt, 40, knowing(stock, prompt.tokens, text, 0.6), TREES[1]))
    check_cached_text(engine, prompt, text, 10)


def test_small_cache_feeds_rows_again():
    model, stock = pair("llama")
    prompts = prompts_of(10, 6)
    expected = [reference.autoregressive(stock, p.tokens, 16, never) for p in prompts]
    programs = [
        medusa(p, 16, knowing(stock, p.tokens, [t for t, _, _ in e], 0.7, i), TREES[i % 3])
        for i, (p, e) in enumerate(zip(prompts, expected, strict=True))
    ]
    for answer, want in zip(
        Engine(model, max_num_seqs=6, max_num_batched_tokens=64, cache_tokens=320).run(programs), expected, strict=True
    ):
        agree(want, answer.tokens, answer.logprobs)


def test_sampled_texts_have_the_distribution_of_autoregressive_ones():
    model, stock = pair("llama", seed=4, vocab_size=16)
    sampling, prompt, runs = Sampling(1.5, top_k=3), Prompt([1, 9, 5]), 500
    heads = MedusaHeads.for_model(model, count=2, layers=1, tree=cartesian_tree(4, 3))
    chances = chance_of_texts(stock, prompt.tokens, 4, sampling)
    answers = Engine(model, max_num_seqs=175).run((medusa(prompt, 4, heads) for _ in range(runs)), sampling=sampling)
    assert runs / 10 < sum(a.accepted for a in answers) < 2.5 * runs
    check_distribution(answers, chances, 12)


# ---------------------------------------------------------------------------------------------------- APAR and Medusa


def threads_of(prompt, root):
    """(tokens on its path, where its own begin) of every thread of a paragraph tree."""
    found, stack = [], [(list(prompt), len(prompt), root)]
    while stack:
        path, begin, node = stack.pop()
        while node is not None:
            path = [*path, *node.tokens]
            if node.first_child is not None:
                # what the child says begins behind its [Child]
                stack.append((path, len(path) + 1, node.first_child))
            node = node.next_sibling
        found.append((path, begin))
    return found


def same(tree, other):
    """Two paragraph trees: equal tokens, log-probabilities within 1e-3."""
    for a, b in zip(restore(tree), restore(other), strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
        assert (a.first_child is None, a.next_sibling is None) == (b.first_child is None, b.next_sibling is None)


@pytest.mark.parametrize("kind", FEW_FAMILIES)
def test_apar_medusa_equals_apar(kind):
    model, stock = pair(kind)
    prompts = prompts_of(21, 3)
    plain = [Replay(stock).run(scripted(apar(p, MOST, FORK, CHILD, ENDS))) for p in prompts]
    assert all(answer.stopped for answer in plain)
    assert sum(answer.threads for answer in plain) > 4

    def programs():
        for i, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
            heads = Knowing(stock, threads_of(prompt.tokens, answer.root), 0.75, i)
            yield scripted(apar_medusa(prompt, MOST, FORK, CHILD, ENDS, heads, TREES[i % 3]))

    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=40)
    answers = beside_others(engine, stock, [*programs(), apar(prompts[0], 20, FORK, CHILD, ENDS)], prompts[1])
    for answer, want in zip(answers, plain, strict=False):
        same(answer.root, want.root)
        assert (answer.tokens, answer.threads, answer.stopped) == (want.tokens, want.threads, True)
        assert answer.cost.attended_tokens == pytest.approx(want.cost.attended_tokens)
        assert answer.flattened == want.flattened
        assert answer.cost.steps <= want.cost.steps
    assert sum(answer.cost.steps for answer in answers[:3]) < 0.8 * sum(want.cost.steps for want in plain)
    assert sum(answer.accepted for answer in answers[:3]) > 10


def test_apar_medusa_without_forks_counts_as_medusa_does():
    """Wherever in an accepted run the thread ends, or the most tokens are reached."""
    model, stock = pair("llama")
    prompt = prompts_of(24, 1)[0]
    for count in range(1, 10):
        end = len(prompt.tokens) + count - 2

        def rule(token, position, predicted, end=end):
            return EOS if position > end else predicted if predicted not in (FORK, CHILD, EOS) else 50

        for most in (MOST, count):
            plain = Replay(stock).run(steered(apar(prompt, MOST, FORK, CHILD, ENDS), rule))
            heads = Knowing(stock, threads_of(prompt.tokens, plain.root), 1.0)
            programs = [
                steered(apar_medusa(prompt, most, FORK, CHILD, ENDS, heads, TREES[0]), rule),
                steered(medusa(prompt, most, heads, TREES[0], lambda tokens: tokens[-1] == EOS), rule),
            ]
            both, alone = Engine(model).run(programs)
            assert both.tokens == [token for token in alone.tokens if token != EOS]
            assert both.stopped == alone.stopped
            assert (both.accepted, both.decoded, both.cost.steps) == (alone.accepted, len(alone.tokens), alone.steps)


def test_apar_medusa_in_replay_keeps_to_its_most_tokens():
    """Every budget: never more tokens, all of them those of apar's threads; the same in the engine and in Replay."""
    model, stock = pair("llama")
    model, stock = in_float64(model), in_float64(stock)
    prompt = prompts_of(23, 1)[0]
    plain = Replay(stock).run(scripted(apar(prompt, MOST, FORK, CHILD, ENDS)))
    texts = threads_of(prompt.tokens, plain.root)
    whole = [path for path, _ in texts]
    assert len(texts) > 2
    for most in (1, 2, 3, 7, 12, 20):
        programs = [
            scripted(apar_medusa(prompt, most, FORK, CHILD, ENDS, Knowing(stock, texts, 0.9, most), TREES[most % 3]))
            for _ in range(2)
        ]
        answer = Engine(model, max_num_batched_tokens=30).run(programs[:1])[0]
        assert sum(len(paragraph.tokens) for paragraph in restore(answer.root)) == most
        for path, _ in threads_of(prompt.tokens, answer.root):
            assert any(path == other[: len(path)] for other in whole)
        replayed = Replay(stock).run(programs[1])
        same(answer.root, replayed.root)
        assert (answer.cost, answer.accepted) == (replayed.cost, replayed.accepted)


def test_apar_medusa_reuses_segments_and_frees_the_cache():
    model, stock = pair("llama")
    prompt = prompts_of(23, 1)[0]
    plain = Replay(stock).run(scripted(apar(prompt, MOST, FORK, CHILD, ENDS)))
    assert plain.stopped
    heads = Knowing(stock, threads_of(prompt.tokens, plain.root), 0.6)
    engine = Engine(model)
    engine.submit(scripted(apar_medusa(prompt, MOST, FORK, CHILD, ENDS, heads, TREES[1])))
    said, most, size = [], 0, 0
    while engine.pending:
        said += engine.step()
        for row in engine.scheduler.sequences:
            live = np.flatnonzero(~row.dropped[: row.size])
            _, positions, segments, _ = row.table[:, live]
            fed = live >= row.size - len(row.feed.tokens)
            seen = visible(row.reach, segments[fed], positions[fed], segments, positions)
            assert seen.any(0).all(), "a token that no thread has on its path"
            most, size = max(most, len(live)), max(size, len(row.reach))
    answer = said[0].answer
    same(answer.root, plain.root)
    assert most == answer.cost.max_cached_tokens
    paragraphs = sum(1 for _ in restore(answer.root))
    assert size < paragraphs + 9 * answer.threads, "a thread takes over the segments of one that ended"


# --------------------------------------------------------------------------------------------------- trees and heads


def test_trees():
    assert cartesian_tree(2, 2).paths == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert cartesian_tree(2, 2).parents == [-1, -1, 0, 0, 1, 1]
    chain = cartesian_tree(1, 1, 1)
    assert (chain.runs, chain.above, chain.depths) == ([0, 0, 0], [[0]], [1, 2, 3])
    assert [cartesian_tree(2, 2).size(d) for d in range(4)] == [0, 2, 6, 6]
    # 0.6, 0.6 * 0.5, 0.2, 0.2 * 0.5, then 0.6 * 0.1: what is most often right, whatever the depth
    assert sparse_tree([[0.6, 0.2], [0.5, 0.1]], 4).paths == [(0,), (1,), (0, 0), (1, 0)]
    tree = TREES[2]
    assert tree.accepted([40, 41, 42, 50, 51, 60], [41, 0, 51, 0, 9, 9, 9]) == [1, 4]
    assert tree.accepted([40, 41, 42, 50, 51, 60], [41, 0, 50, 0, 60, 9, 9]) == [1, 3, 5]
    assert tree.accepted([40, 41], [43, 0, 0]) == []
    with pytest.raises(ValueError, match="no path"):
        Tree([(0,), (1, 0)])
    with pytest.raises(ValueError, match="deep"):
        next(medusa(Prompt([1]), 3, MedusaHeads(1, 1, 4, 9), cartesian_tree(1, 1)))


def test_heads_are_what_the_files_say(tmp_path):
    torch.manual_seed(1)
    model = tiny_model("qwen3")
    heads = MedusaHeads.for_model(model, 3, 2, "tiny", sparse_tree([[0.6, 0.2], [0.5, 0.1], [0.4]], 5))
    hidden = torch.randn(5, 64)
    own = model.get_output_embeddings()(hidden)
    assert torch.equal(heads(hidden)[1], own)  # before training: the model's own next token
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    state = {name: weight.detach() for name, weight in heads.state_dict().items()}
    x = hidden
    for layer in range(2):
        w, b = (state[f"heads.2.blocks.{layer}.linear.{name}"] for name in ("weight", "bias"))
        y = x @ w.T + b
        x = x + y * torch.sigmoid(y)
    torch.testing.assert_close(heads(hidden)[2], x @ state["heads.2.out.weight"].T)
    save_heads(heads, tmp_path / "heads")
    again = load_heads(tmp_path / "heads", dtype=torch.float32)
    assert torch.equal(again(hidden), heads(hidden))
    assert (again.base_model, again.tree.paths, again.layers) == ("tiny", heads.tree.paths, 2)
    assert not any(weight.requires_grad for weight in again.parameters())
    assert load_heads(tmp_path / "heads", dtype=torch.bfloat16)(hidden).dtype == torch.bfloat16
    again.check(model)
    with pytest.raises(ValueError, match=r"made for tiny.*vocabulary 256.*has 64 and 99"):
        again.check(tiny_model("qwen3", vocab_size=99))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_heads(tmp_path)
