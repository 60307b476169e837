"""Sliding-window layers: a value sees what it would see alone, however many position gaps lie before it."""

import random

import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding.engine import Engine
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from tests.decoding import reference
from tests.decoding.cases import EverySeventh, agree, pair
from tests.decoding.drivers import INSTRUCTION, tokens_of
from tests.decoding.test_properties import check

WINDOW = 24
KINDS = ["gemma2", "gemma3_text", "mistral"]


@torch.no_grad()
def alone(stock: PreTrainedModel, prompt: list[int], count: int) -> list[tuple[int, float, float]]:
    """The model's own greedy answer behind a prompt, under the masks and windows that transformers makes itself."""
    answer: list[tuple[int, float, float]] = []
    while len(answer) < count and not (answer and answer[-1][0] % 7 == 0):
        logits = stock(torch.tensor([[*prompt, *(t for t, _, _ in answer)]]), use_cache=False).logits[0, -1]
        answer.append(reference.greedy(logits, None))
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0, len(INSTRUCTION)])
def test_sixteen_gaps_of_thirty_take_nothing_of_the_window(kind, shared):
    """Sixteen values at once against each alone, in a prompt that ends at its attribute and has no gaps."""
    flat = {"rope_type": "linear", "factor": 1e15, "rope_theta": 10_000.0}  # of a gap only the window is felt
    rope = {"full_attention": flat, "sliding_attention": flat} if kind == "gemma3_text" else flat
    model, stock = pair(kind, sliding_window=WINDOW, rope_parameters=rope, num_hidden_layers=4)
    rng = random.Random(4)
    tokens, slots = INSTRUCTION + tokens_of(rng, 12, 12), []
    for _ in range(16):
        tokens += tokens_of(rng, 1, 2)
        slots.append(Slot(len(tokens) - 1, EverySeventh()))
    assert len(INSTRUCTION) < len(tokens) - WINDOW < slots[-1].end < 30 * len(slots), "the window cuts, a gap is more"
    prompt = SlottedPrompt(tokens, slots, shared=shared)
    programs = (hyper_parallel(prompt, 30, isolate_values=True) for _ in range(2))
    for values in Engine(model, max_num_batched_tokens=31).run(programs):
        for slot, value in zip(slots, values, strict=True):
            agree(alone(stock, tokens[: slot.end + 1], 30), value.tokens, value.logprobs)


@pytest.mark.parametrize("window", [1, 3, 6, 11])
def test_random_programs_under_a_window_equal_the_rule_written_out(window):
    model, stock = (one.double() for one in pair("mistral", sliding_window=window))
    check(range(18), Engine(model, max_num_seqs=2, max_num_batched_tokens=16), edits=True, stock=stock)
