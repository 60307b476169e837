"""`model: fake`: the columns, tokens and seconds of a real run, no weights, and nobody takes its
answers for real.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.cluster.worker import build
from raypd.config import RunConfig
from raypd.config.load import load_config, make_config
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.decoding.counts import TokenCounts
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.testing import fake
from tests import runs
from tests.processes import ROOT, ended, start
from tests.runs import Clock, config_tree, says

QUICKSTART = ROOT / "configs/quickstart/extract.yaml"
FAST = ["model=fake", "model.fake.load_seconds=0", "model.fake.step_seconds=0"]


def answer(config: RunConfig, documents: list[Document]) -> tuple[list[Record], list[TokenCounts]]:
    """Runs a fake engine and task until every request has ended."""
    parts = build(config, None)
    records, ended = runs.answer(parts.task, documents, parts.engine)
    return records, [done.counts for done in ended]


def test_the_quickstart_costs_the_tokens_of_the_real_run_and_autoregressive_as_many_steps() -> None:
    """Of the shape of the real run; what the lengths of texts give is within a third of it."""
    config = load_config(QUICKSTART, FAST)
    records, counts = answer(config, [d for unit in plan(config) for d in read_unit(unit, config)])
    assert len(records) == 130
    assert {r.error for r in records} == {None}
    assert set(records[0].columns) == set(columns.EXTRACTION.names)
    assert records[0].columns["record"]["Brand"] == "fake"
    assert 2500 < sum(c.decode_tokens for c in counts) < 4500
    # The first of each of 5 categories brings its instruction.
    assert sum(c.shared_tokens > 0 for c in counts) == 125
    totals = {}
    for method in ("hyper_parallel", "autoregressive"):
        config = load_config(
            QUICKSTART, [*FAST, f"decoding.method={method}", "engine.max_num_seqs=1"]
        )
        _, (counts,) = answer(
            config, [Document(0, "x", {"category": "coffee", "title": "a" * 400})]
        )
        totals[method] = counts
    assert totals["autoregressive"].steps == totals["autoregressive"].decode_tokens
    assert totals["hyper_parallel"].steps <= 2 * 4 + 1
    # The skeleton of keys.
    assert totals["hyper_parallel"].prefill_tokens > totals["autoregressive"].prefill_tokens


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_step_takes_its_time_whatever_is_in_it(batch: int, monkeypatch) -> None:
    clock = Clock(oversleeps=0.001)
    monkeypatch.setattr(fake, "time", clock)
    costs = fake.FakeConfig(
        step_seconds=0.005, prefill_tokens_per_second=1e9, decode_tokens_per_second=1000
    )
    engine = fake.FakeEngine(costs, batch, 2048)
    for number in range(16):
        engine.submit(fake.Program("p", 10, 10, [5]), tag=number)
    ended = []
    steps = 0
    while engine.pending:
        ended += [done.tag for done in engine.step()]
        steps += 1
    assert sorted(ended) == list(range(16))
    assert steps == 6 * 16 / batch  # a prefill and 5 tokens each
    assert clock.now == pytest.approx(
        (0.005 * steps + 80 / 1000),
        rel=0.1,
        abs=0.01,
    )


def test_a_long_prompt_goes_in_chunks_and_the_budget_holds() -> None:
    engine = fake.FakeEngine(fake.FakeConfig(step_seconds=0), 4, 100)
    engine.submit(fake.Program("p", 50, 200, [2, 3]), tag="a")
    steps = 0
    while engine.pending:
        ended = engine.step()
        steps += 1
    assert steps == 3 + 3
    assert ended[0].counts.prefill_tokens == 250
    assert ended[0].counts.decode_tokens == 5 + 2


def test_questions_and_conversations() -> None:
    row = {
        "context": "c" * 400,
        "questions": [
            "Who?",
            {
                "id": "k",
                "question": "Why?",
                "choices": ["a", "b"],
            },
        ],
    }
    config = make_config(config_tree("question_answering"), FAST)
    records, _ = answer(
        config, [Document(0, "1", row), Document(1, "2", {"context": "c", "questions": 3})]
    )
    assert sorted(r.columns.get("question_id", "-") for r in records) == ["-", "0", "k"]
    assert all(set(r.columns) <= set(columns.QUESTION_ANSWERING.names) for r in records)
    assert [r.error for r in records if r.index == 1] == [
        "column 'questions' holds neither a list of questions nor the text of one"
    ]
    tree = config_tree({"kind": "generation", "samples": 2})
    config = make_config(tree, [*FAST, "decoding.sampling.temperature=1"])
    records, _ = answer(config, [Document(0, "1", {"prompt": ["Hello", "And then?"]})])
    assert sorted((r.columns["sample"], r.columns["turn"]) for r in records) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(set(r.columns) <= set(columns.GENERATION.names) for r in records)


def test_a_worker_without_weights_does_without_torch_and_what_reads_other_files() -> None:
    """64 of them must fit one machine."""
    code = f"""
import sys
from raypd.config.load import load_config
from raypd.cluster import driver
from raypd.cluster.worker import DecodeWorker, build
build(load_config({str(QUICKSTART)!r}, {FAST!r}), None)
assert not {{"torch", "transformers", "pypdf"}} & set(sys.modules)
"""
    ended(start("-c", code))


def test_a_run_as_a_user_types_it_says_that_its_answers_are_not_real(
    tmp_path: Path, in_process
) -> None:
    words = [
        "extract",
        str(QUICKSTART),
        *FAST,
        f"output.path={tmp_path}/out",
        "cluster.address=local",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    says(done.stdout, "130 documents: 130 answered", "THESE ANSWERS ARE MADE UP")
    assert json.loads((tmp_path / "out/manifest.json").read_text())["fake"] is True
