"""Programs that are driven without an engine, or whose predictions are replaced."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.registry import find_family
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.text import Prompt

INSTRUCTION = [random.Random(1).randrange(3, 256) for _ in range(23)]


def never(tokens) -> bool:
    return False


def tokens_of(rng: random.Random, minimum: int, maximum: int) -> list[int]:
    """Return a random number of random tokens."""
    return [rng.randrange(3, 256) for _ in range(rng.randint(minimum, maximum))]


def prompts_of(seed: int, count: int = 4, max_tokens: int = 12, plain: int = 2) -> list[Prompt]:
    """Return prompts behind one instruction, which all but every `plain`-th share."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for number in range(count):
        shared = len(INSTRUCTION) if number % plain else 0
        prompts.append(Prompt(INSTRUCTION + tokens_of(rng, 1, max_tokens), shared=shared))
    return prompts


def changed(program: Program[Any], change: Callable[[Feed, Predictions], None]) -> Program[Any]:
    """Run a program, and let `change` edit its predictions before it receives them."""
    try:
        feed = next(program)
        while True:
            predictions = yield feed
            change(feed, predictions)
            feed = program.send(predictions)
    except StopIteration as end:
        return end.value


def steered(program: Program[Any], rule: Callable[[int, int, int], int]) -> Program[Any]:
    """Run a program under a model that predicts rule(token, its position, the prediction)."""

    def change(feed: Feed, predictions: Predictions) -> None:
        for number, index in enumerate(feed.sample_at):
            predictions.tokens[number] = rule(
                feed.tokens[index], feed.positions[index], predictions.tokens[number]
            )

    return changed(program, change)


def drive(
    program: Program[Any], answer: Callable[[Feed], list[int] | Predictions]
) -> tuple[Any, list[Feed]]:
    """Answer each feed by hand; return the program's answer and its feeds."""
    feeds: list[Feed] = []
    try:
        feed = next(program)
        while True:
            feeds.append(feed)
            predictions = answer(feed)
            if not isinstance(predictions, Predictions):
                predictions = Predictions(predictions, [-1.0] * len(predictions))
            feed = program.send(predictions)
    except StopIteration as end:
        return end.value, feeds


def built(model: PreTrainedModel, builder: Builder) -> DecoderModel:
    """Return a model whose layers a builder has built."""
    family = find_family(model)
    assert family is not None
    return family.build(model, builder)


def logits_of(
    model: PreTrainedModel | DecoderModel,
    ids: Sequence[int] | torch.Tensor,
    attention: str = "auto",
) -> torch.Tensor:
    """Return an engine's logits of a text, [tokens, vocabulary]."""

    def program() -> Program[list[torch.Tensor] | None]:
        tokens = [int(token) for token in ids]
        rows = range(len(tokens))
        predictions = yield Feed(tokens, rows, sample_at=rows, want_logits=True)
        return predictions.logits

    return torch.stack(Engine(model, attention=attention).run([program()])[0])


def small_device(engine: Engine, fails: Callable[[int], bool], plain: bool = False) -> list[int]:
    """Let passes run out of memory after all layers have written to the cache.

    Args:
        engine: The engine.
        fails: Tells whether a pass of so many tokens fails.
        plain: Whether the error is a plain RuntimeError, as of some backends.

    Returns:
        The numbers of tokens of the passes that failed, which grow with every failure.
    """
    failed: list[int] = []
    passes: list[int] = []
    kind = RuntimeError if plain else torch.OutOfMemoryError

    def begin(module, inputs) -> None:
        passes.append(len(inputs[0]))

    def end(module, inputs) -> None:
        if fails(passes[-1]):
            failed.append(passes[-1])
            raise kind("CUDA error: out of memory. Tried to allocate 2.00 GiB")

    engine.model.register_forward_pre_hook(begin)
    engine.model.head.register_forward_pre_hook(end)
    return failed


def finished(engine: Engine) -> dict[Any, Finished]:
    """Run an engine until it is empty; return what ended, by tag."""
    by_tag: dict[Any, Finished] = {}
    while engine.pending:
        for program in engine.step():
            by_tag[program.tag] = program
    return by_tag


def preempt_at_random(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let sequences lose their cache between passes.

    Returns:
        The cached tokens of each sequence that lost them, to which further passes add.
    """
    rng = random.Random(1)
    lost: list[int] = []
    step = engine.step

    def step_and_preempt() -> Any:
        finished = step()
        for sequence in engine.sequences:
            if rng.random() < 0.25:
                lost.append(sequence.cached)
                sequence.release(engine.cache)
        return finished

    monkeypatch.setattr(engine, "step", step_and_preempt)
    return lost
