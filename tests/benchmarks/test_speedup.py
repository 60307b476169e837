"""Theoretical speedup of runs written by hand and of a model."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import speedup
from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record
from tests.decoding.drivers import steered
from tests.runs import committed, run_config, says
from tests.tiny import tiny_model, tiny_tokenizer

Row = tuple[str, int, int, int, int | None]  # document id, sample, turn, tokens, longest path


def configured(method: str, **task) -> RunConfig:
    decoding = {"method": method, "max_new_tokens": 90}
    return run_config({"kind": "generation", **task}, decoding=decoding)


def run_of(folder: Path, method: str, rows: list[Row]) -> str:
    """Write a run with these answers; return its folder."""
    ids = list(dict.fromkeys(row[0] for row in rows))
    documents = [
        Document(
            n,
            id,
            source="x.jsonl",
            row=n,
        )
        for n, id in enumerate(ids)
    ]
    records = []
    for id, sample, turn, tokens, longest_path in rows:
        counters = None
        if longest_path is not None:
            counters = json.dumps({"longest_path": longest_path, "parallelism": 9.0})
        answer = {
            "sample": sample,
            "turn": turn,
            "text": "t",
            "tokens": tokens,
            "counters": counters,
            "finish_reason": "stop",
        }
        records.append(Record(ids.index(id), answer))
    return committed(folder, configured(method), documents, records)


@pytest.fixture
def runs(tmp_path) -> tuple[str, str]:
    """(a run, its baseline): the speedups are 100/25, 40/40, 90/30 and 25/50."""
    baseline = [
        ("a", 0, 0, 100, None),
        ("a", 0, 1, 40, None),
        ("a", 1, 0, 90, None),
        ("b", 0, 0, 25, None),
    ]
    pasta = [
        ("b", 0, 0, 999, 50),
        ("a", 1, 0, 1, 30),
        ("a", 0, 1, 400, 40),
        ("a", 0, 0, 5, 25),
    ]
    run = run_of(tmp_path / "pasta", "pasta", pasta)
    return run, run_of(tmp_path / "ar", "autoregressive", baseline)


def test_answers_are_joined_by_id_sample_and_turn_whatever_their_length(runs):
    run, baseline = runs
    answers = speedup.read_answers(run, False)
    ratios = speedup.speedups(answers, speedup.read_answers(baseline, True))
    assert sorted(ratios) == [0.5, 1, 3, 4]


def test_the_command_prints_both_means(runs):
    run, baseline = runs
    app = typer.Typer()
    app.command()(speedup.main)
    done = CliRunner().invoke(app, [run, "--baseline", baseline])
    assert done.exit_code == 0
    says(
        done.output,
        f"theoretical speedup: {6 ** (1 / 4):.3f} geometric mean, 2.125 arithmetic mean",
        "answers: 4 in both\n",
    )
    for word in ("alone", "cut", "failed"):
        assert word not in done.output


def decoded(folder: Path, method: str, script: bytes | None = None) -> speedup.Answers:
    """Run a random tiny model over two prompts; it writes `script`, or whatever it predicts."""
    config = configured(method, chat_template=False)
    prompt = "Hi"
    documents = [
        Document(
            n,
            f"id{n}",
            {"prompt": prompt},
            source="x.jsonl",
            row=n,
        )
        for n in range(2)
    ]

    def rule(token: int, position: int, predicted: int) -> int:
        if script is None:
            return predicted
        index = position - len(prompt)
        return script[index] if index < len(script) else tiny_tokenizer().eos_token_id

    requests = list(build_task(config, tiny_tokenizer(), 4096).plan(documents))
    programs = [steered(request.program, rule) for request in requests]
    records = []
    for request, answer in zip(requests, Engine(tiny_model("llama")).run(programs), strict=True):
        records += request.finish(answer)
    run = committed(folder, config, documents, records)
    return speedup.read_answers(run, baseline=method == "autoregressive")


def test_a_promised_block_shortens_the_longest_path(tmp_path):
    promise = b'<promise topic="t" tokens="18"/>'
    baseline = decoded(tmp_path / "ar", "autoregressive", b"12345end")
    run = decoded(tmp_path / "pasta", "pasta", promise + b"<async>12345</async>end")
    # Behind the promise, the child's 5 tokens and its </async> take longer than the main thread,
    # which writes "end" and ends.
    longest_path = len(promise) + 5 + 8
    assert speedup.speedups(run, baseline) == [(8 + 1) / longest_path] * 2


def test_a_model_that_knows_no_tags_gains_nothing(tmp_path):
    baseline = decoded(tmp_path / "ar", "autoregressive")
    run = decoded(tmp_path / "pasta", "pasta")
    assert speedup.speedups(run, baseline) == [1, 1]
