"""Theoretical speedup: runs written by hand, and runs of a model whose figure is known; `make
gpu`'s summary.
"""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import gpu, speedup
from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record
from tests.decoding.drivers import steered
from tests.runs import committed, run_config, says
from tests.tiny import tiny_model, tiny_tokenizer

Row = tuple[str, int, int, int, int | None]  # document id, sample, turn, tokens, longest path
CASES = """<testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>
<testcase name="c"><skipped/></testcase></testsuite>"""


def configured(method: str, **task) -> RunConfig:
    return run_config(
        {"kind": "generation", **task}, decoding={"method": method, "max_new_tokens": 90}
    )


def run_of(folder: Path, method: str, rows: list[Row]) -> str:
    """A run with these answers."""
    ids = list(dict.fromkeys(row[0] for row in rows))
    documents, records = (
        [Document(n, id, source="x.jsonl", place=n) for n, id in enumerate(ids)],
        [],
    )
    for id, sample, turn, tokens, longest in rows:
        counters = (
            None if longest is None else json.dumps({"longest_path": longest, "parallelism": 9.0})
        )
        answer = {
            "sample": sample,
            "turn": turn,
            "text": "t",
            "tokens": tokens,
            "counters": counters,
        }
        records.append(Record(ids.index(id), {**answer, "finish_reason": "stop"}))
    return committed(folder, configured(method), documents, records)


def test_speedup_by_hand(tmp_path):
    """Joined by id, sample and turn, whatever the order; the run's own tokens do not matter."""
    ar = [
        ("a", 0, 0, 100, None),
        ("a", 0, 1, 40, None),
        ("a", 1, 0, 90, None),
        ("b", 0, 0, 25, None),
    ]
    pasta = [("b", 0, 0, 999, 50), ("a", 1, 0, 1, 30), ("a", 0, 1, 400, 40), ("a", 0, 0, 5, 25)]
    baseline, run = (
        run_of(tmp_path / "ar", "autoregressive", ar),
        run_of(tmp_path / "pasta", "pasta", pasta),
    )
    found = speedup.speedups(speedup.read_answers(run, False), speedup.read_answers(baseline, True))
    assert sorted(found) == [0.5, 1, 3, 4]
    (app := typer.Typer()).command()(speedup.main)
    text = (printed := CliRunner().invoke(app, [run, "--baseline", baseline])).output
    assert printed.exit_code == 0
    says(
        text,
        f"theoretical speedup: {6 ** (1 / 4):.3f} geometric mean, 2.125 arithmetic mean",
        "answers: 4 in both\n",
    )
    assert not any(word in text for word in ("alone", "cut", "failed"))


def decoded(folder: Path, method: str, script: bytes | None = None) -> str:
    """A run of a random tiny model over two prompts; `script`: what it says instead, at its place
    behind the prompt.
    """
    config = configured(method, chat_template=False)
    documents = [
        Document(n, f"id{n}", {"prompt": "Hi"}, source="x.jsonl", place=n) for n in range(2)
    ]

    def rule(token: int, position: int, predicted: int) -> int:
        at = position - len("Hi")
        return (
            predicted
            if script is None
            else script[at]
            if at < len(script)
            else tiny_tokenizer().eos_token_id
        )

    requests = list(build_task(config, tiny_tokenizer(), 4096).plan(documents))
    answers = Engine(tiny_model("llama")).run(
        [steered(request.program, rule) for request in requests]
    )
    records = [
        item
        for request, answer in zip(requests, answers, strict=True)
        for item in request.finish(answer)
    ]
    return committed(folder, config, documents, records)


def test_runs_of_a_model(tmp_path):
    promise = b'<promise topic="t" tokens="18"/>'
    scripts = {"ar": b"12345end", "pasta": promise + b"<async>12345</async>end"}
    baseline = speedup.read_answers(decoded(tmp_path / "ar", "autoregressive", scripts["ar"]), True)
    # the child's 5 and its </async> behind the promise, beside which the main thread writes "end"
    # and ends
    run = speedup.read_answers(decoded(tmp_path / "pasta", "pasta", scripts["pasta"]), False)
    assert speedup.speedups(run, baseline) == [(8 + 1) / (len(promise) + 5 + 8)] * 2
    # a model that knows no tags writes what autoregressive decoding writes, one token after the
    # other
    baseline = speedup.read_answers(decoded(tmp_path / "ar plain", "autoregressive"), True)
    run = speedup.read_answers(decoded(tmp_path / "pasta plain", "pasta"), False)
    assert speedup.speedups(run, baseline) == [1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"<testsuites>{CASES}</testsuites>", "1 tests held, 1 failed ['b'], 1 were skipped"),
        ("<testsuites>", "did not end in their time"),
        (None, "did not end in their time"),
    ],
)
def test_it_says_which_estimates_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text, words: str
) -> None:
    monkeypatch.setattr(gpu, "predicted", lambda name: 30.0)
    lines = [
        ["Qwen3-8B", "hyper_parallel", "triton", 256, "9", "28.0"],
        ["Qwen3-8B", "generate", "sdpa", 64, "32", "2.0"],
        ["Qwen3-8B", gpu.INTRA, "triton", 16, "2", "8.0"],
        ["Qwen3-8B", "vllm", "-", "failed: ..."],
        ["Qwen3-8B", gpu.VLLM_CACHED, "-", 16, "1", "16"],
    ]
    packed = {"prefill": 0.5, "decode": 0.6, "kernels": 13.0, "host": 9.0}
    shares = {("Qwen3-8B", "triton"): packed, ("tiny", "sdpa"): {"prefill": 0.1}}
    if text is not None:
        (tmp_path / "t.xml").write_text(text)
    _, *said, exact = gpu.summary(lines, shares, None, str(tmp_path / "t.xml"))
    assert [line.split()[0][0] for line in said] == [*"MhhnnMhhMn"]  # missed, held, not measured
    assert (said[0][-18:], said[2][-17:]) == ("0.82, measured 0.5", "13.8, measured 14")
    assert words in exact
