"""How often a judge agrees with people, on pairs of answers whose votes are published.

    python -m benchmarks.judge_agreement testset-v1.json --limit 200 model.name=models/judge
    python -m benchmarks.judge_agreement human.parquet model.name=gpt-5 \\
        model.endpoint.url=https://api.openai.com/v1

The first is PandaLM's test set (WeOpenML/PandaLM on GitHub, data/testset-v1.json: 999 pairs by
models of 7B, three people each), the second MT-bench's (lmsys/mt_bench_human_judgments on the Hub).
The judge compares each pair in both orders, as `benchmarks.judge` does; an answer wins if both
orders say so. As in Zheng et al. (2023), agreement is counted over all pairs, where a tie is a
third answer, and over those that neither calls a tie.
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

# A vote -> 1: the first answer is better, -1: the second. Every other vote is a tie.
_POINTS = {"model_a": 1, "model_b": -1, 1: 1, 2: -1}
Pair = tuple[AnsweredDocument, AnsweredDocument]


def pairs_of(row: dict[str, Any], id: str) -> tuple[Pair, list[int]]:
    """Return the two answers of a row, and people's votes on them.

    Args:
        row: A row of either data set.
        id: The id of the pair.

    Returns:
        The answers; and per person 1 if the first is better, -1 if the second is, 0 for a tie.
    """
    if "response1" not in row:
        messages = 2 * row["turn"]
        first = _conversation(row["conversation_a"][:messages], id)
        second = _conversation(row["conversation_b"][:messages], id)
        return (first, second), [_POINTS.get(row["winner"], 0)]
    request = row["instruction"]
    if isinstance(row["input"], str) and row["input"]:
        request = f"{request}\n\n{row['input']}" if request else row["input"]
    first = AnsweredDocument(id, "", request, row["response1"], [])
    second = AnsweredDocument(id, "", request, row["response2"], [])
    return (first, second), [_POINTS.get(row[f"annotator{i}"], 0) for i in (1, 2, 3)]


def _conversation(messages: list[dict[str, str]], id: str) -> AnsweredDocument:
    """Return a conversation up to the turn of a vote."""
    request, answer, *later = [message["content"] for message in messages]
    for number, text in enumerate(later):
        role = "answer" if number % 2 else "user"
        answer += f"\n\n({role}) {text}"
    return AnsweredDocument(id, "", request, answer, [])


def agreement(votes: dict[str, list[int]], verdicts: dict[str, int]) -> str:
    """Return the agreement of the judge with the majority, and of two people, in words.

    Args:
        votes: People's votes by pair.
        verdicts: The judge's by pair.
    """
    compared = []
    for id, members in votes.items():
        if id in verdicts:
            majority = Counter(members).most_common(1)[0][0]
            compared.append((majority, verdicts[id]))
    without_ties = [pair for pair in compared if all(pair)]
    lines = [f"{len(compared)} of {len(votes)} pairs have a verdict in both orders"]
    for name, pairs in (("all", compared), ("without ties", without_ties)):
        if pairs:
            share = sum(majority == verdict for majority, verdict in pairs) / len(pairs)
            lines.append(f"agreement, {name}: {share:.1%} of {len(pairs)}")
    equal_votes = []
    for members in votes.values():
        equal_votes += [vote == other_vote for vote, other_vote in combinations(members, 2)]
    if equal_votes:
        lines.append(f"two people: {fmean(equal_votes):.1%}")
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
    if votes.suffix == ".parquet":
        rows = pq.read_table(votes).to_pylist()
    else:
        rows = json.loads(votes.read_text("utf-8"))
    rows = rows[:: max(1, len(rows) // limit)][:limit]
    pairs = []
    votes_by_pair = {}
    for number, row in enumerate(rows):
        pair, votes_by_pair[str(number)] = pairs_of(row, str(number))
        pairs.append(pair)
    questions, task = pair_questions(pairs)
    try:
        verdicts, _ = ask(questions, task, output, judge, keys or [])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    is_first = [values.get("better") == "A" for values in verdicts.values()]
    print(
        f"the answer that stands first is taken in {fmean(is_first):.1%} of {len(is_first)} "
        "questions"
    )
    better = {id: verdict.better for id, verdict in pair_verdicts(verdicts).items()}
    print(agreement(votes_by_pair, better))


if __name__ == "__main__":
    typer.run(main)
