"""How often IPPD gives exactly the answer of one prompt per question (IPPD, table 2).

    python -m benchmarks.exact_match squad2.dev.jsonl --contexts 200 --dtype bfloat16 [--stable]

The reference is `autoregressive` at batch 1. Beside IPPD stands the noise floor: `autoregressive`
at batch N against the same reference, which differs by rounding alone. For each answer that
differs, the first token that does is printed, and the gap between the two highest logits of the
reference there: rounding can only change a token if the gap is small.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from raypd.config import ModelConfig, RunConfig
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Program
from raypd.models.load import LoadedModel, load_model
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record, Request, Task


@dataclass
class Difference:
    """Where an answer first differs from the reference."""

    token: int  # index in the answer
    gap: float  # between the two highest logits of the reference


@dataclass
class Outcome:
    """The answers to one question."""

    context: str
    question: str
    tokens: int  # of the reference
    differences: dict[str, Difference | None]  # by form; None if it is equal


@dataclass
class Reference:
    """The answer of a prompt of its own at batch 1."""

    tokens: list[int]
    gaps: list[float]  # per token, between the two highest logits


def with_gaps(program: Program[Continuation]) -> Program[Reference]:
    """Run a program, and record for each token the gap to the second-best allowed one.

    Args:
        program: The program of `autoregressive`.

    Returns:
        The program with the gaps as part of its answer.
    """
    gaps: list[float] = []
    try:
        feed = next(program)
        while True:
            feed.want_logits = True
            predictions = yield feed
            assert predictions.logits is not None
            limits = feed.allowed_token_ids
            if limits is None:
                limits = [None] * len(feed.sample_at)
            for logits, allowed in zip(predictions.logits, limits, strict=True):
                if allowed is not None:
                    logits = logits[torch.from_numpy(allowed.ids).to(logits.device)]
                gaps.append(_gap(logits))
            feed = program.send(predictions)
    except StopIteration as end:
        return Reference(end.value.tokens, gaps)


def _gap(logits: torch.Tensor) -> float:
    """Return the gap between the two highest logits; infinity if there is only one."""
    if len(logits) < 2:
        return float("inf")
    best, second = logits.double().topk(2).values.tolist()
    return best - second


def difference(reference: Reference, tokens: Sequence[int]) -> Difference | None:
    """Return where an answer first differs from the reference; None if it is equal.

    Args:
        reference: The answer at batch 1.
        tokens: The token ids of the other answer.
    """
    pairs = itertools.zip_longest(reference.tokens, tokens)
    for index, (token, other_token) in enumerate(pairs):
        if token != other_token:
            has_gap = index < len(reference.gaps)
            return Difference(index, reference.gaps[index] if has_gap else float("nan"))
    return None


class ExactMatch:
    """A model and the task in two forms: `ippd`, and `alone` with one prompt per question."""

    def __init__(
        self,
        loaded: LoadedModel,
        contexts_per_prompt: int = 1,
        max_answer_tokens: int = 32,
        stable: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = pack_model(loaded.model, stable)  # as in a run
        self.stable = stable
        options = {"contexts_per_prompt": contexts_per_prompt}
        self.ippd = self._task("intra_prompt", options, max_answer_tokens)
        self.alone = self._task("autoregressive", {}, max_answer_tokens)

    def _task(self, method: str, options: dict[str, int], max_answer_tokens: int) -> Task:
        config = {
            "input": {"path": "-"},
            "output": {"path": "-"},
            "task": {"kind": "question_answering", "max_answer_tokens": max_answer_tokens},
            "decoding": {"method": method, "options": options},
        }
        run = RunConfig.model_validate(config)
        return build_task(run, self.loaded.tokenizer, self.loaded.context_length)

    def run(self, programs: Iterable[Program[Any]], batch: int) -> list[Any]:
        """Return what programs return; `batch` of them are decoded at the same time."""
        return Engine(self.model, max_num_seqs=batch, stable=self.stable).run(list(programs))

    def compare(self, documents: Sequence[Document], batch: int) -> list[Outcome]:
        """Answer all questions of some contexts in every form.

        Args:
            documents: The contexts with their questions.
            batch: The number of prompts that are decoded at the same time.
        """
        stacked = _requests(self.ippd, documents)
        programs = [request.program for request in stacked]
        answers: list[list[Continuation]] = self.run(programs, batch)
        records = []
        for request, answer in zip(stacked, answers, strict=True):
            for item in request.finish(answer):
                if isinstance(item, Record) and item.error is None:
                    records.append(item)
        forms: dict[str, list[Continuation]] = {
            "IPPD": [continuation for answer in answers for continuation in answer],
            f"batch {batch}": self.run(self._alone(documents), batch),
        }
        references: list[Reference] = self.run(map(with_gaps, self._alone(documents)), 1)
        ids = {document.index: document.id for document in documents}
        outcomes = []
        for number, (record, reference) in enumerate(zip(records, references, strict=True)):
            differences = {
                form: difference(reference, continuations[number].tokens)
                for form, continuations in forms.items()
            }
            outcomes.append(
                Outcome(
                    context=ids[record.index],
                    question=record.columns["question_id"],
                    tokens=len(reference.tokens),
                    differences=differences,
                )
            )
        return outcomes

    def _alone(self, documents: Sequence[Document]) -> Iterator[Program[Continuation]]:
        """Yield a program per question, each with a prompt of its own."""
        for request in _requests(self.alone, documents):
            yield request.program


def _requests(task: Task, documents: Sequence[Document]) -> list[Request]:
    """Return the requests of documents, without those that are errors already."""
    return [item for item in task.plan(documents) if isinstance(item, Request)]


def table(name: str, dtype: str, outcomes: Sequence[Outcome]) -> str:
    """Return the exact match of each form, with every answer that differs, as text.

    Args:
        name: The name of the data.
        dtype: The dtype of the weights.
        outcomes: The outcomes of all questions.
    """
    total = len(outcomes)
    contexts = len({outcome.context for outcome in outcomes})
    tokens = sum(outcome.tokens for outcome in outcomes)
    lines = [f"{name} {dtype}: {contexts} contexts, {total} questions, {tokens} tokens"]
    for form in outcomes[0].differences if outcomes else ():
        gaps = []
        details = []
        for outcome in outcomes:
            first = outcome.differences[form]
            if first is not None:
                gaps.append(first.gap)
                details.append(
                    f"    {outcome.context} {outcome.question}: token {first.token + 1} of "
                    f"{outcome.tokens}, gap {first.gap:.4g}"
                )
        equal = total - len(gaps)
        line = f"  {form}: {equal} of {total} equal ({100 * equal / total:.1f}%)"
        if gaps:
            gaps.sort()
            line += f"; gaps median {gaps[len(gaps) // 2]:.4g}, largest {gaps[-1]:.4g}"
        lines += [line, *details]
    return "\n".join(lines)


def _read_documents(path: Path, contexts: int) -> Iterator[Document]:
    """Yield the first rows of a JSONL file of contexts and questions."""
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(itertools.islice(file, contexts)):
            fields = json.loads(line)
            yield Document(row, str(fields.get("id", row)), fields)


def main(
    data: Annotated[Path, typer.Argument(help="JSONL with context and questions")],
    contexts: Annotated[int, typer.Option(help="How many of its first contexts")] = 200,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float64")] = "bfloat16",
    model: Annotated[str, typer.Option(help="Hub id or folder")] = "smollm2-135m-instruct",
    batch: Annotated[int, typer.Option(help="N: prompts in decoding at the same time")] = 16,
    contexts_per_prompt: int = 1,
    max_answer_tokens: int = 32,
    stable: Annotated[bool, typer.Option(help="As engine.stable: true")] = False,
    group: Annotated[int, typer.Option(help="Contexts between two lines of progress")] = 4,
) -> None:
    """Print the exact match of IPPD with one prompt per question, beside its noise floor."""
    outcomes: list[Outcome] = []
    documents = list(_read_documents(data, contexts))
    loaded = load_model(ModelConfig.model_validate({"name": model, "dtype": dtype}))
    exact_match = ExactMatch(loaded, contexts_per_prompt, max_answer_tokens, stable)
    for start in range(0, len(documents), group):
        began = time.monotonic()
        outcomes += exact_match.compare(documents[start : start + group], batch)
        equal = sum(outcome.differences["IPPD"] is None for outcome in outcomes)
        seconds = time.monotonic() - began
        done = min(start + group, len(documents))
        print(
            f"{done} of {len(documents)} contexts: {equal} of {len(outcomes)}, {seconds:.1f} s",
            flush=True,
        )
    print(table(data.stem, dtype, outcomes))


if __name__ == "__main__":
    typer.run(main)
