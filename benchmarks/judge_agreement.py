"""How often a judge says what people say, of pairs of answers that people have compared and
published.

    python -m benchmarks.judge_agreement testset-v1.json --limit 200 model.name=models/judge python
    -m benchmarks.judge_agreement human.parquet model.name=gpt-5
    model.endpoint.url=https://api.openai.com/v1

The first is PandaLM's test set (WeOpenML/PandaLM on GitHub, data/testset-v1.json: 999 pairs by
models of 7B, three people each), the second MT-bench's (lmsys/mt_bench_human_judgments on the Hub).
Each pair is asked in both orders, as `benchmarks.judge` does; an answer wins where both say so. As
in Zheng et al. (2023): agreement over all pairs, where a tie is a third answer, and over those that
neither calls a tie.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import pyarrow.parquet as pq
import typer

from benchmarks.judge import AnsweredDocument, ask, pair_questions, pair_verdicts
from raypd.errors import UserError

_POINTS = {"model_a": 1, "model_b": -1, 1: 1, 2: -1}  # all else is a tie
Pair = tuple[AnsweredDocument, AnsweredDocument]


def pairs_of(row: dict[str, Any], id: str) -> tuple[Pair, list[int]]:
    """A row's two answers, and what each of its people said: 1: the first is better, -1: the
    second, 0: a tie.
    """
    if "response1" in row:
        given = row["input"] if isinstance(row["input"], str) else ""
        asked = "\n\n".join(filter(None, [row["instruction"], given]))
        first, second = (
            AnsweredDocument(id, "", asked, row[key], []) for key in ("response1", "response2")
        )
        return (first, second), [_POINTS.get(row[f"annotator{i}"], 0) for i in (1, 2, 3)]
    first, second = (
        _conversation(row[side][: 2 * row["turn"]], id)
        for side in ("conversation_a", "conversation_b")
    )
    return (first, second), [_POINTS.get(row["winner"], 0)]


def _conversation(messages: list[dict[str, str]], id: str) -> AnsweredDocument:
    """Up to the turn that a vote is about."""
    asked, first, *later = [message["content"] for message in messages]
    answer = "\n\n".join(
        [first, *(f"({('user', 'answer')[i % 2]}) {text}" for i, text in enumerate(later))]
    )
    return AnsweredDocument(id, "", asked, answer, [])


def agreement(people: dict[str, list[int]], judge: dict[str, int]) -> str:
    """The shares, as text: of the judge with most people of a pair, and of two people of one."""
    both = [
        (Counter(said).most_common(1)[0][0], judge[id])
        for id, said in people.items()
        if id in judge
    ]
    clear = [pair for pair in both if all(pair)]
    lines = [f"{len(both)} of {len(people)} pairs have a verdict in both orders"]
    for name, pairs in (("all", both), ("without ties", clear)):
        if pairs:
            lines.append(
                f"agreement, {name}: {sum(a == b for a, b in pairs) / len(pairs):.1%} of "
                f"{len(pairs)}"
            )
    if two := [a == b for said in people.values() for a, b in combinations(said, 2)]:
        lines.append(f"two people: {fmean(two):.1%}")
    return "\n".join(lines)


def main(
    votes: Annotated[Path, typer.Argument(help="testset-v1.json, or human-*.parquet")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the judge's run")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="YAML with the judge's model, decoding, ...")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Folder of the judge's run")
    ] = "runs/judge-agreement",
    limit: Annotated[int, typer.Option(min=1, help="Pairs, at equal distances")] = 1000,
) -> None:
    """Print how often a judge agrees with people's votes."""
    rows = (
        pq.read_table(votes).to_pylist()
        if votes.suffix == ".parquet"
        else json.loads(votes.read_text("utf-8"))
    )
    rows = rows[:: max(1, len(rows) // limit)][:limit]
    pairs = {str(number): pairs_of(row, str(number)) for number, row in enumerate(rows)}
    try:
        verdicts, _ = ask(
            *pair_questions([pair for pair, _ in pairs.values()]), output, judge, keys or []
        )
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    first = [values.get("better") == "A" for values in verdicts.values()]
    print(f"the answer that stands first is taken in {fmean(first):.1%} of {len(first)} questions")
    people = {id: said for id, (_, said) in pairs.items()}
    print(agreement(people, {id: better for id, (better, _) in pair_verdicts(verdicts).items()}))


if __name__ == "__main__":
    typer.run(main)
