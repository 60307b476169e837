"""How far rounding moves the logits of each layout: the explanation beside `exact_match`'s table.

    python -m raypd.evaluation.rounding race.dev.jsonl --contexts 24

The same prompts are put through the model in a number of layouts, all of which are right: batch 1 with instruction and
context from the cache (the reference of `exact_match`), the same at batch N, every prompt from its first token, and
IPPD. Each gives the logits of every answer's first token. Printed are their error against the model in float64 (its
weights those of the model under test), how often the choice is float64's, and the distance of every two layouts.

An answer turns over where the distance of two layouts passes the gap between its two best tokens. So the noise that an
exact-match rate is held against must be the distance of two layouts that round apart: batch 1 and batch N alone attend
in the same order, and stand nearer to each other than either to the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer

from raypd.config import ModelConfig
from raypd.decoding.program import Program
from raypd.evaluation import exact_match
from raypd.evaluation.exact_match import ExactMatch, choices
from raypd.models.load import LoadedModel, load_model
from raypd.tasks.base import Document, Task

Logits = list[torch.Tensor]  # of each question [choices], in float64: the tokens that its answer may begin with


def first_logits(program: Program[Any], shared: bool = True) -> Program[Logits]:
    """Runs a program's first feed alone."""
    feed = next(program)
    feed.want_logits = True
    if not shared:
        feed.shared = 0
    predictions = yield feed
    return [logits.cpu() for logits in choices(feed, predictions)]


def layouts(loaded: LoadedModel, batch: int) -> dict[str, Callable[[Sequence[Document]], Logits]]:
    """Each layout as a function of documents."""
    tasks = ExactMatch(loaded)

    def layout(task: Task, batch: int, shared: bool = True) -> Callable[[Sequence[Document]], Logits]:
        def run(documents: Sequence[Document]) -> Logits:
            requests = exact_match.requests_of(task, documents)
            answers = tasks.run((first_logits(request.program, shared) for request in requests), batch)
            return [logits for found in answers for logits in found]

        return run

    return {
        "batch 1": layout(tasks.alone, 1),
        f"batch {batch}": layout(tasks.alone, batch),
        "unshared": layout(tasks.alone, 1, shared=False),
        "IPPD": layout(tasks.ippd, batch),
    }


def distance(some: Logits, others: Logits) -> float:
    """Root mean square over all choices of all questions."""
    return float(torch.cat([a - b for a, b in zip(some, others, strict=True)]).square().mean().sqrt())


def agreement(some: Logits, others: Logits) -> float:
    """Share of the questions with the same choice."""
    return sum(bool(a.argmax() == b.argmax()) for a, b in zip(some, others, strict=True)) / len(some)


def table(truth: Logits, found: dict[str, Logits]) -> str:
    """Errors against `truth`, and the distance of every two layouts."""
    lines = [f"{'':10} {'error':>7} {'as float64':>10}  distance from " + " ".join(f"{name:>10}" for name in found)]
    for name, logits in found.items():
        apart = " ".join(f"{distance(logits, other):10.4f}" for other in found.values())
        lines.append(f"{name:10} {distance(logits, truth):7.4f} {agreement(logits, truth):10.1%} {'':14} {apart}")
    return "\n".join(lines)


def main(
    data: exact_match.Data,
    contexts: exact_match.Contexts = 24,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32")] = "bfloat16",
    model: exact_match.Model = "smollm2-135m-instruct",
    batch: exact_match.Batch = 16,
) -> None:
    """Print each layout's rounding error against float64, and how far the layouts are apart."""
    documents = list(exact_match.read_documents(data, contexts))
    loaded = load_model(ModelConfig.model_validate({"name": model, "dtype": dtype}))
    found = {name: layout(documents) for name, layout in layouts(loaded, batch).items()}
    loaded.model.double()  # the rounded weights, in arithmetic that does not round
    truth = layouts(loaded, batch)["unshared"](documents)
    print(f"{data.stem} {dtype}: {contexts} contexts, {len(truth)} questions, first token of each answer")
    print(table(truth, found))


if __name__ == "__main__":
    typer.run(main)
