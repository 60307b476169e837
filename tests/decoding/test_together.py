"""All methods in one engine at once, each answering as it does alone."""

from __future__ import annotations

import random

import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.apar_medusa import apar_medusa
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.methods.medusa import MedusaHeads, medusa
from raypd.decoding.methods.pasta import pasta
from raypd.decoding.methods.skeleton_of_thought import skeleton_of_thought
from raypd.decoding.methods.space import space
from tests.decoding.drivers import INSTRUCTION, never, steered, tokens_of
from tests.decoding.test_exactness import slotted
from tests.tiny import in_float64, tiny_model

FORK, CHILD, MASK, EOS = 250, 251, 252, 2
ENDS = frozenset([EOS])
# Every token is a letter, but for some that a random model says often enough, which are markup.
MARKUP = {17: b'<promise topic="a" tokens="5"/>', 13: b"</async>", 19: b"<sync/>"}
TEXTS = [next((tag for n, tag in MARKUP.items() if i % n == 0), bytes([97 + i % 26])) for i in range(256)]


def forks(token: int, position: int, predicted: int) -> int:
    """Forks and ends more often than a random model would say them."""
    return {0: FORK, 1: EOS}.get(predicted % 9, predicted)


def programs(heads: MedusaHeads) -> dict:
    rng = random.Random(4)
    prompt = Prompt(INSTRUCTION + tokens_of(rng, 3, 12), shared=len(INSTRUCTION))
    questions = [Question(tokens_of(rng, 2, 5), lambda tokens: tokens[-1] % 7 == 0) for _ in range(5)]
    tree = PromptTree(INSTRUCTION, [Context(tokens_of(rng, 4, 9), questions[:2]), Context([9, 8], questions[2:])])
    return {
        "autoregressive": autoregressive(prompt, 12, never),
        "hyper_parallel": hyper_parallel(slotted(rng, 3, True), 6),
        "hyper_parallel, values": hyper_parallel(slotted(rng, 1, True), 6, isolate_values=True),
        "intra_prompt": intra_prompt(tree, 8),
        "apar": steered(apar(prompt, 40, FORK, CHILD, ENDS), forks),
        "pasta": pasta(prompt, 60, TEXTS, lambda text: [101, 103, 105], ENDS),
        "space": space(prompt, 12, 3, MASK),
        "medusa": medusa(prompt, 12, heads),
        "apar_medusa": steered(apar_medusa(prompt, 40, FORK, CHILD, ENDS, heads), forks),
        "skeleton_of_thought": skeleton_of_thought(
            prompt, 40, lambda point: [70, point.number], lambda tokens: "1. a\n2. b\n", ENDS, max_outline_tokens=3
        ),
    }


@pytest.mark.parametrize(("batch", "budget", "cache"), [(16, 4096, None), (16, 19, None), (5, 33, 1024)])
def test_each_answers_as_alone(batch, budget, cache):
    model = in_float64(tiny_model("qwen3"))
    heads = MedusaHeads.for_model(model, count=2)
    torch.manual_seed(0)
    for head in heads.parameters():
        torch.nn.init.normal_(head, std=0.3)
    alone = {}
    for name, program in programs(heads).items():
        (alone[name],) = Engine(model, max_num_seqs=1).run([program])
    engine = Engine(model, max_num_seqs=batch, max_num_batched_tokens=budget, cache_tokens=cache)
    together = engine.run(programs(heads).values())
    for (name, expected), answer in zip(alone.items(), together, strict=True):
        assert said(answer) == said(expected), name
    assert alone["apar"].threads > 1
    assert len(alone["pasta"].threads) > 1
    assert len(alone["skeleton_of_thought"].points) >= 1
    assert len({str(said(answer)) for answer in alone.values()}) >= 7


def said(answer) -> list:
    """All token ids of an answer, in order, and its text where it has one."""
    if isinstance(answer, list):
        return [said(part) for part in answer]
    found = [getattr(answer, "tokens", None), getattr(answer, "text", None)]
    return found + [said(part) for name in ("threads", "points") for part in _list(getattr(answer, name, None))]


def _list(parts) -> list:
    return parts if isinstance(parts, list) else []
