"""How often IPPD gives the very answer of one prompt a question, and where it does not, why (IPPD,
table 2).

    python -m benchmarks.exact_match squad2.dev.jsonl --contexts 200 --dtype bfloat16 [--stable]

The reference is `autoregressive` at batch 1. Beside IPPD stands the noise floor: `autoregressive`
at batch N against the same reference, which differs by rounding alone. Of each answer that differs
are printed the first token that does and the gap between the two highest logits of the reference
there: rounding can only turn a token over where the gap is small.
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
from raypd.decoding.pack import pack
from raypd.decoding.program import Program
from raypd.models.load import LoadedModel, load_model
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record, Request, Task


@dataclass
class Difference:
    """Where an answer leaves the reference: the token's number, and the reference's top-two logit
    gap there.
    """

    token: int
    gap: float


@dataclass
class Outcome:
    """One question: how many tokens its reference answer has, and where each other form differs
    (None: nowhere).
    """

    context: str
    question: str
    tokens: int
    differences: dict[str, Difference | None]


@dataclass
class Reference:
    """The answer of a prompt of its own at batch 1; `gaps` [tokens]: between the two highest logits
    of the choice.
    """

    tokens: list[int]
    gaps: list[float]


def with_gaps(program: Program[Continuation]) -> Program[Reference]:
    """Runs a program and keeps, for each token it is given, the gap to the runner-up among the
    allowed ones.
    """
    gaps: list[float] = []
    try:
        feed = next(program)
        while True:
            feed.want_logits = True
            predictions = yield feed
            assert predictions.logits is not None
            limits = (
                feed.allowed_token_ids
                if feed.allowed_token_ids is not None
                else [None] * len(feed.sample_at)
            )
            for logits, tokens in zip(predictions.logits, limits, strict=True):
                own = (
                    logits
                    if tokens is None
                    else logits[torch.from_numpy(tokens.ids).to(logits.device)]
                )
                best = own.double().topk(min(2, len(own))).values
                gaps.append(float(best[0] - best[-1]) if len(best) > 1 else float("inf"))
            feed = program.send(predictions)
    except StopIteration as end:
        return Reference(end.value.tokens, gaps)


def difference(reference: Reference, tokens: Sequence[int]) -> Difference | None:
    """The first token at which an answer leaves the reference."""
    if list(tokens) == reference.tokens:
        return None
    pairs = itertools.zip_longest(reference.tokens, tokens)
    at = next(n for n, (a, b) in enumerate(pairs) if a != b)
    return Difference(at, reference.gaps[at] if at < len(reference.gaps) else float("nan"))


class ExactMatch:
    """A model and the two forms of the task: `ippd`, and `alone`, which has a prompt of its own for
    each question.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        contexts_per_prompt: int = 1,
        max_answer_tokens: int = 32,
        stable: bool = False,
    ) -> None:
        self.loaded, self.model = loaded, pack(loaded.model, stable)  # packed, as in a run
        self.stable = stable
        self.ippd = self._task("intra_prompt", contexts_per_prompt, max_answer_tokens)
        self.alone = self._task("autoregressive", 1, max_answer_tokens)

    def _task(self, method: str, contexts_per_prompt: int, max_answer_tokens: int) -> Task:
        config = {
            "input": {"path": "-"},
            "output": {"path": "-"},
            "task": {"kind": "question_answering", "max_answer_tokens": max_answer_tokens},
            "decoding": {"method": method, "contexts_per_prompt": contexts_per_prompt},
        }
        return build_task(
            RunConfig.model_validate(config), self.loaded.tokenizer, self.loaded.context_length
        )

    def run(self, programs: Iterable[Program[Any]], batch: int) -> list[Any]:
        """What programs return."""
        return Engine(self.model, max_num_seqs=batch, stable=self.stable).run(list(programs))

    def compare(self, documents: Sequence[Document], batch: int) -> list[Outcome]:
        """The outcomes of all questions of some contexts. batch: prompts decoded at the same
        time.
        """
        stacked = _requests(self.ippd, documents)
        answers: list[list[Continuation]] = self.run(
            (request.program for request in stacked), batch
        )
        items = [
            item
            for request, found in zip(stacked, answers, strict=True)
            for item in request.finish(found)
        ]
        records = [item for item in items if isinstance(item, Record) and item.error is None]

        def alone() -> Iterator[Program[Continuation]]:
            return (request.program for request in _requests(self.alone, documents))

        forms = {
            "IPPD": [answer for found in answers for answer in found],
            f"batch {batch}": self.run(alone(), batch),
        }
        references: list[Reference] = self.run(map(with_gaps, alone()), 1)
        ids = {document.index: document.id for document in documents}
        outcomes = []
        for record, of, *found in zip(records, references, *forms.values(), strict=True):
            differences = {
                form: difference(of, answer.tokens)
                for form, answer in zip(forms, found, strict=True)
            }
            outcomes.append(
                Outcome(
                    ids[record.index], record.columns["question_id"], len(of.tokens), differences
                )
            )
        return outcomes


def _requests(task: Task, documents: Sequence[Document]) -> list[Request]:
    """The requests of documents, without those that are errors already."""
    return [item for item in task.plan(documents) if isinstance(item, Request)]


def table(name: str, dtype: str, outcomes: Sequence[Outcome]) -> str:
    """Exact match of each form, with every differing answer, as text."""
    total, contexts = len(outcomes), len({o.context for o in outcomes})
    lines = [
        (
            f"{name} {dtype}: {contexts} contexts, {total} questions, "
            f"{sum(o.tokens for o in outcomes)} tokens"
        )
    ]
    for form in outcomes[0].differences if outcomes else ():
        differ = [(o, d) for o in outcomes if (d := o.differences[form]) is not None]
        equal, gaps = total - len(differ), sorted(d.gap for _, d in differ)
        spread = f"; gaps median {gaps[len(gaps) // 2]:.4g}, largest {gaps[-1]:.4g}" if gaps else ""
        lines.append(f"  {form}: {equal} of {total} equal ({100 * equal / total:.1f}%){spread}")
        lines += [
            f"    {o.context} {o.question}: token {d.token + 1} of {o.tokens}, gap {d.gap:.4g}"
            for o, d in differ
        ]
    return "\n".join(lines)


def _read_documents(path: Path, contexts: int) -> Iterator[Document]:
    """The first rows of a JSONL file of contexts and questions."""
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
    """Exact match of IPPD against one prompt a question, beside its noise floor."""
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
