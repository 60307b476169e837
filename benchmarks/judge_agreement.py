"""How often a judge says what people say: MT-bench's published human judgements (lmsys/mt_bench_human_judgments on the
Hub, human-*.parquet), which are not among the data here.

    python -m benchmarks.judge_agreement human.parquet model.name=gpt-5 model.endpoint.url=https://api.openai.com/v1

Each vote is asked in both orders, as `benchmarks.judge` does; an answer wins where both say so. As in Zheng et al.
(2023): the agreement over all votes, where a tie is a third answer, and over those that neither calls a tie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import typer

from benchmarks.judge import AnsweredDocument, ask, pair_questions, pair_verdicts
from raypd.errors import UserError

_POINTS = {"model_a": 1, "model_b": -1}  # all else is a tie


def documents_of(row: dict[str, Any], id: str) -> tuple[AnsweredDocument, AnsweredDocument]:
    """The two conversations of a vote, up to the turn that it is about."""
    made = []
    for side in ("conversation_a", "conversation_b"):
        asked, first, *later = [message["content"] for message in row[side][: 2 * row["turn"]]]
        answer = "\n\n".join([first, *(f"({('user', 'answer')[i % 2]}) {text}" for i, text in enumerate(later))])
        made.append(AnsweredDocument(id, "", asked, answer, []))
    return made[0], made[1]


def agreement(people: dict[str, int], judge: dict[str, int]) -> str:
    """The shares, as text."""
    both = [(points, judge[id]) for id, points in people.items() if id in judge]
    clear = [pair for pair in both if all(pair)]
    lines = [f"{len(both)} of {len(people)} votes have a verdict in both orders"]
    for name, pairs in (("all", both), ("without ties", clear)):
        if pairs:
            lines.append(f"agreement, {name}: {sum(a == b for a, b in pairs) / len(pairs):.1%} of {len(pairs)}")
    return "\n".join(lines)


def main(
    votes: Annotated[Path, typer.Argument(help="human-*.parquet")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the judge's run")] = None,
    judge: Annotated[str | None, typer.Option(help="YAML with the judge's model, decoding, ...")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Folder of the judge's run")] = "runs/judge-agreement",
    limit: Annotated[int, typer.Option(min=1, help="Votes, from the first")] = 1000,
) -> None:
    """Print how often a judge agrees with people's votes."""
    rows = pq.read_table(votes).slice(0, limit).to_pylist()
    people = {str(number): _POINTS.get(row["winner"], 0) for number, row in enumerate(rows)}
    questions = pair_questions([documents_of(row, str(number)) for number, row in enumerate(rows)])
    try:
        verdicts, _ = ask(*questions, output, judge, keys or [])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(agreement(people, {id: better for id, (better, _) in pair_verdicts(verdicts).items()}))


if __name__ == "__main__":
    typer.run(main)
