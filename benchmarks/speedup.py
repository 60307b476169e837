"""Theoretical speedup of a run with threads over an autoregressive one (PASTA, section 5.1).

    raypd generate prompts.jsonl -o runs/ar
    raypd generate prompts.jsonl -o runs/pasta --method pasta --model ./my-model
    python -m benchmarks.speedup runs/pasta --baseline runs/ar

The speedup of an answer is the number of tokens of the baseline's answer, divided by the longest
path of the run's answer: the largest number of tokens that had to be decoded one after the other.
End tokens count in both. The length of the run's own answer does not count, because redundant text
that is decoded in parallel is no speedup. The geometric mean over the answers is the paper's
figure, the arithmetic mean that of its appendix D. Answers are joined by document id, sample and
turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Annotated, Any

import typer

from raypd import storage
from raypd.dataset import writer
from raypd.errors import ConfigError, UserError
from raypd.run.load import load_record
from raypd.text import counted

_COLUMNS = [
    "id",
    "source",
    "row",
    "status",
    "sample",
    "turn",
    "tokens",
    "counters",
    "finish_reason",
]
_MAX_NAMED = 10  # missing answers that are named

Key = tuple[str, int, int]  # document id, sample, turn


@dataclass
class Answers:
    """The answers of a run."""

    path: str
    method: str
    model: str
    # The longest path of each answer; of a baseline its number of tokens.
    length: dict[Key, int] = field(default_factory=dict)
    cut: set[Key] = field(default_factory=set)  # answers whose finish_reason is length
    failed: set[tuple[str, int]] = field(default_factory=set)  # (source, row) of documents


def read_answers(path: str, baseline: bool, overrides: Sequence[str] = ()) -> Answers:
    """Read the answers of a run.

    Args:
        path: The folder of the run, or its prefix below s3://.
        baseline: Whether it is the baseline.
        overrides: `storage.KEY=VALUE`, which say how S3 is reached.

    Raises:
        ConfigError: If there is no run, or it cannot be compared.
        RunError: If an object of it cannot be read.
    """
    path = storage.absolute(path)
    config = load_record(path, overrides).config
    kind = config["task"]["kind"]
    if kind != "generation":
        raise ConfigError(f"{path}: its task.kind is {kind}; give a run of `raypd generate`")
    method = config["decoding"]["method"]
    if baseline and method != "autoregressive":
        raise ConfigError(
            f"{path}: its decoding.method is {method}; the baseline is a run of the same "
            "inputs with autoregressive"
        )
    answers = Answers(path, method, config["model"]["name"])
    for unit, version in sorted(writer.objects(path)):
        _, rows = writer.read_table(path, unit, _COLUMNS, version)
        for row in rows.to_pylist():
            key = (row["id"], row["sample"], row["turn"])
            if row["status"] != "ok":
                answers.failed.add((row["source"], row["row"]))
                continue
            if key in answers.length:
                raise ConfigError(
                    f"{path}: {_named(key)} stands there twice; answers are joined by id: "
                    "make ids unique"
                )
            answers.length[key] = row["tokens"] if baseline else _longest_path(answers, row)
            if row["finish_reason"] == "length":
                answers.cut.add(key)
    if not answers.length:
        raise ConfigError(
            f"{path}: no answers here ({counted(len(answers.failed), 'document')} failed); "
            f"see `raypd status {path}`"
        )
    return answers


def _longest_path(answers: Answers, row: dict[str, Any]) -> int:
    counters = json.loads(row["counters"] or "{}")
    if "longest_path" not in counters:
        raise ConfigError(
            f"{answers.path}: its decoding.method is {answers.method}, whose counters have "
            "no longest_path; give a run of apar or pasta"
        )
    return int(counters["longest_path"])


def _named(key: Key) -> str:
    return f"{key[0]!r} (sample {key[1]}, turn {key[2]})"


def speedups(run: Answers, baseline: Answers) -> list[float]:
    """Return the theoretical speedup of every answer that both runs have.

    Args:
        run: The answers of the run.
        baseline: The answers of the baseline.

    Raises:
        ConfigError: If they have no answer in common.
    """
    ratios = []
    for key, length in run.length.items():
        if key in baseline.length:
            ratios.append(baseline.length[key] / length)
    if not ratios:
        raise ConfigError(
            f"{run.path} and {baseline.path} have no document id in common: are they of the "
            "same inputs?"
        )
    return ratios


def table(run: Answers, baseline: Answers) -> str:
    """Return the means, and what is left out of them, as text."""
    ratios = speedups(run, baseline)
    lines = [
        f"{run.path}: {run.method}, {run.model}",
        f"baseline {baseline.path}: {baseline.method}, {baseline.model}",
        (
            f"theoretical speedup: {geometric_mean(ratios):.3f} geometric mean, "
            f"{fmean(ratios):.3f} arithmetic mean"
        ),
        f"answers: {len(ratios):,} in both",
    ]
    sides = ((run, baseline, "the run"), (baseline, run, "the baseline"))
    for here, there, side in sides:
        alone = sorted(here.length.keys() - there.length.keys())
        if alone:
            names = ", ".join(_named(key) for key in alone[:_MAX_NAMED])
            if len(alone) > _MAX_NAMED:
                names += f" and {len(alone) - _MAX_NAMED:,} more"
            lines.append(f"  {len(alone):,} in {side} alone, left out: {names}")
    for here, there, side in sides:
        cut = len(here.cut & there.length.keys())
        if cut:
            lines.append(f"  {cut:,} of those in both were cut in {side} (finish_reason length)")
        if here.failed:
            lines.append(f"  {counted(len(here.failed), 'document')} failed in {side}")
    return "\n".join(lines)


def main(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (its output.path)")],
    baseline: Annotated[
        str, typer.Option(metavar="RUN", help="Folder of an autoregressive run of the same inputs")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, dotted")
    ] = None,
) -> None:
    """Print a run's theoretical speedup over an autoregressive run of the same inputs."""
    try:
        answers = read_answers(run, False, overrides or [])
        baseline_answers = read_answers(baseline, True, overrides or [])
        print(table(answers, baseline_answers))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    typer.run(main)
