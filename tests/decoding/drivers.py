"""Programs driven without an engine, or with what the model says replaced."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.llama import Llama
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.program import Feed, Predictions, Program

INSTRUCTION = [random.Random(1).randrange(3, 256) for _ in range(23)]


def never(tokens) -> bool:
    return False


def tokens_of(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(3, 256) for _ in range(rng.randint(least, most))]


def prompts_of(seed: int, count: int = 4, most: int = 12, plain: int = 2) -> list[Prompt]:
    """Prompts behind one instruction, which all but every `plain`-th share."""
    rng = random.Random(seed)
    return [
        Prompt(INSTRUCTION + tokens_of(rng, 1, most), shared=23 if i % plain else 0)
        for i in range(count)
    ]


def changed(program: Program[Any], change: Callable[[Feed, Predictions], None]) -> Program[Any]:
    """The program, whose predictions `change` edits before it is sent them."""
    try:
        feed = next(program)
        while True:
            predictions = yield feed
            change(feed, predictions)
            feed = program.send(predictions)
    except StopIteration as end:
        return end.value


def steered(program: Program[Any], rule: Callable[[int, int, int], int]) -> Program[Any]:
    """The program under a model that says rule(token, its position, what the model said)."""

    def change(feed: Feed, predictions: Predictions) -> None:
        for number, index in enumerate(feed.sample_at):
            predictions.tokens[number] = rule(
                feed.tokens[index], feed.positions[index], predictions.tokens[number]
            )

    return changed(program, change)


def drive(
    program: Program[Any], answer: Callable[[Feed], list[int] | Predictions]
) -> tuple[Any, list[Feed]]:
    """Answers each feed by hand; (the program's answer, its feeds)."""
    feeds = []
    try:
        feed = next(program)
        while True:
            feeds.append(feed)
            said = answer(feed)
            feed = program.send(
                said if isinstance(said, Predictions) else Predictions(said, [-1.0] * len(said))
            )
    except StopIteration as end:
        return end.value, feeds


def logits_of(
    model: PreTrainedModel | Llama, ids: Sequence[int] | torch.Tensor, attention: str = "auto"
) -> torch.Tensor:
    """[tokens, vocabulary] of a text by an engine."""

    def program() -> Program[list[torch.Tensor] | None]:
        predictions = yield Feed(
            [int(id) for id in ids], range(len(ids)), sample_at=range(len(ids)), want_logits=True
        )
        return predictions.logits

    return torch.stack(Engine(model, attention=attention).run([program()])[0])


def small_device(engine: Engine, fails: Callable[[int], bool], plain: bool = False) -> list[int]:
    """Lets passes fail by their number of tokens, after all layers have written to the cache; the
    sizes that failed.
    """
    failed, tokens, kind = [], [], RuntimeError if plain else torch.OutOfMemoryError

    def ends(module, inputs) -> None:
        if fails(tokens[-1]):
            failed.append(tokens[-1])
            raise kind("CUDA error: out of memory. Tried to allocate 2.00 GiB")

    engine.model.register_forward_pre_hook(lambda _, inputs: tokens.append(len(inputs[0])))
    engine.model.head.register_forward_pre_hook(ends)
    return failed


def finished(engine: Engine) -> dict[Any, Finished]:
    """All that ends in an engine, by tag."""
    done = {}
    while engine.pending:
        done |= {ended.tag: ended for ended in engine.step()}
    return done
