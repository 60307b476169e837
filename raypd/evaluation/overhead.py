"""How much of the wall time is the engine's own Python, and not the model's forward pass.

    python -m raypd.evaluation.overhead --batch 16

Every method runs on the embedded model with prompts of `--prompt` tokens of real text. Building masks counts as the
engine's time though attention asks for them inside the forward pass, and so does picking tokens; Medusa's heads count
as a part of the model. One program of each method runs before the timing, so that what is made once a run (the tables
of a grammar) is there. Control tokens are played by common tokens, so that APAR forks at every full stop; the heads of
Medusa and the mask of SPACE are untrained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from raypd.config import ModelConfig
from raypd.decoding.attention.step import Step
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Grammar, JsonString, Vocabulary
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.apar_medusa import apar_medusa
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.methods.medusa import MedusaHeads, medusa
from raypd.decoding.methods.pasta import pasta
from raypd.decoding.methods.skeleton_of_thought import skeleton_of_thought
from raypd.decoding.methods.space import space
from raypd.decoding.program import Program
from raypd.models.control_tokens import markup_bytes
from raypd.models.load import load_model
from raypd.models.vocabulary import token_bytes

_TEXT = (
    "The shoe is made of leather. It comes in black and brown, and weighs 310 grams. The sole is rubber. "
    "It is sewn in Portugal by a family firm. Buyers praise the fit. Some find the laces short. "
)


@dataclass
class PassTimes:
    """Seconds in steps, in the forward pass of the model and of Medusa's heads, and in building masks within it."""

    total: float = 0.0
    forward: float = 0.0
    masks: float = 0.0

    @property
    def share(self) -> float:
        """Share of the wall time outside the model's own work."""
        return 1 - (self.forward - self.masks) / self.total


@contextmanager
def watched(engine: Engine) -> Iterator[PassTimes]:
    """Times an engine's passes and masks."""
    times = PassTimes()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                setattr(times, name, getattr(times, name) + time.perf_counter() - begun)

        return call

    calls: list[tuple[str, Any, str]] = [("forward", engine.model, "forward"), ("forward", MedusaHeads, "forward")]
    calls += [("masks", Step, "own_mask"), ("masks", Step, "prefix_mask")]
    with ExitStack() as stack:
        for name, owner, method in calls:
            stack.enter_context(patch.object(owner, method, timed(name, getattr(owner, method))))
        yield times


def main(
    batch: Annotated[int, typer.Option(help="Programs at the same time, and programs in all")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt")] = 200,
    new: Annotated[int, typer.Option(help="Most new tokens of a program")] = 32,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    method: Annotated[list[str] | None, typer.Option(help="This method alone; may be given several times")] = None,
) -> None:
    """Print the share of wall time outside the model's forward pass for each method."""
    torch.set_num_threads(threads)
    loaded = load_model(ModelConfig())
    model, tokenizer = loaded.model, loaded.tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    text = (encode(_TEXT) * (1 + prompt // len(encode(_TEXT))))[:prompt]
    ends = frozenset([tokenizer.eos_token_id])
    never = lambda tokens: False  # noqa: E731
    grammar = Grammar(JsonString(), Vocabulary([token.decode("latin-1") for token in token_bytes(tokenizer)]))
    stop, other = encode(".")[0], encode("It")[0]
    heads, markup = MedusaHeads.for_model(model), markup_bytes(tokenizer)
    outline = encode("1. Leather and sole\n2. Colors\n3. What buyers say")

    def slotted() -> SlottedPrompt:
        tokens, slots = list(text), []
        for name in ("Brand", "Color", "Weight", "Material", "Sole", "Origin", "Fit", "Laces"):
            tokens += encode(f',\n"{name}":')
            slots.append(Slot(len(tokens) - 1, grammar))
        return SlottedPrompt(tokens, slots)

    def asked() -> PromptTree:
        questions = [Question(encode(f"Question {n}: what is it made of? Answer:"), never) for n in range(8)]
        return PromptTree([], [Context(list(text), questions)])

    plain = Prompt(text)
    methods: dict[str, Callable[[], Program[Any]]] = {
        "autoregressive": lambda: autoregressive(plain, new, never),
        "hyper_parallel": lambda: hyper_parallel(slotted(), new),
        "intra_prompt": lambda: intra_prompt(asked(), new // 2),
        "apar": lambda: apar(plain, 4 * new, stop, other, ends),
        "pasta": lambda: pasta(plain, new, markup, encode, ends),
        "space": lambda: space(plain, new, 3, other),
        "medusa": lambda: medusa(plain, new, heads),
        "apar_medusa": lambda: apar_medusa(plain, 4 * new, stop, other, ends, heads),
        "skeleton_of_thought": lambda: skeleton_of_thought(
            Prompt([*text, *outline]), 4 * new, lambda point: encode("Write it out:"), tokenizer.decode, ends,
            begun=tokenizer.decode(outline) + "\n", max_outline_tokens=new,
        ),
    }  # fmt: skip
    engine = Engine(model, max_num_seqs=batch)
    if unknown := sorted(set(method or ()) - set(methods)):
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(methods)}", param_hint="--method")
    print(f"{loaded.dtype}, {threads} threads")
    print(f"{'method':20} {'seconds':>8} {'outside the forward':>20}")
    for name in method or methods:
        make = methods[name]
        engine.run([make()])
        with watched(engine) as times:
            begun = time.perf_counter()
            engine.run([make() for _ in range(batch)])
            times.total = time.perf_counter() - begun
        print(f"{name:20} {times.total:8.2f} {times.share:20.1%}", flush=True)


if __name__ == "__main__":
    typer.run(main)
