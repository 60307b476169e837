"""How a unit is cut into shares, and two workers that do one unit: the same rows as one worker, and one bill."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.cluster import shares
from raypd.cluster.worker import DecodeWorker, WorkerSpec, build
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.run import manifest
from raypd.run.records import UnitResult
from raypd.run.retry_policy import Attempt
from tests.cluster import fakes
from tests.runs import write_jsonl
from tests.tiny import save_tiny

_LIMIT = 120  # seconds for what must happen

# ------------------------------------------------------------------------------------------------------------- cutting


def work(*rows: int) -> Any:
    return SimpleNamespace(rows=list(rows))


def cut(groups: list[list[Any]]) -> list[list[list[int]]]:
    return [[w.rows for w in group] for group in groups]


def test_works_that_share_a_row_stay_together_and_what_is_begun_stays_here() -> None:
    works = [work(0), work(1, 2), work(3), work(3), work(4, 5), work(6), work(5, 6), work(7)]
    assert cut(shares.groups_of(works, {0})) == [[[1, 2]], [[3], [3]], [[4, 5], [6], [5, 6]], [[7]]]
    assert cut(shares.groups_of(works, {2, 6})) == [[[0]], [[3], [3]], [[7]]]


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 60), st.integers(2, 9))
def test_everybody_gets_about_as_much_and_nothing_is_lost(sizes: list[int], begun: int, workers: int) -> None:
    rows = iter(range(10_000))
    groups = [[work(*(next(rows) for _ in range(size)))] for size in sizes]
    parts = shares.divided(groups, begun, workers)
    given_away = [group for part in parts for group in part]
    kept = groups[: len(groups) - len(given_away)]
    assert given_away == groups[len(kept) :]  # the later ones, in their order
    assert len(parts) < workers
    each = (begun + sum(sizes)) / workers
    assert begun >= each or kept == groups or begun + sum(sizes[: len(kept)]) >= each
    for part in parts:
        assert sum(len(g[0].rows) for g in part) <= sum(sizes[len(kept) :]) / (workers - 1) + 5


def test_a_unit_of_one_group_is_not_lent_by_who_has_nothing_else() -> None:
    assert shares.divided([[work(0, 1)]], 0, 2) == []
    assert shares.divided([[work(0, 1)]], 4, 2) == [[[work(0, 1)]]]
    assert [len(part) for part in shares.divided([[work(i)] for i in range(12)], 0, 4)] == [3, 3, 3]


# --------------------------------------------------------------------------------------------------------- two workers


class Bench:
    """Workers in this process with one output; the engines of those that are held wait in their first step."""

    def __init__(self, run: RunConfig, make: Any = fakes.build) -> None:
        manifest.claim(run, run.output.path)
        self.run, self.make = run, make
        (self.unit,) = plan(run)
        self.go, self.stepped = threading.Event(), threading.Event()
        self.result: UnitResult | None = None

    def worker(self, held: bool = False) -> DecodeWorker:
        made = DecodeWorker(WorkerSpec(self.run, self.run.output.path, "s", build=self.make))
        if held:
            step = made.parts.engine.step

            def wait() -> Any:
                self.stepped.set()
                assert self.go.wait(_LIMIT)
                return step()

            made.parts.engine.step = wait  # type: ignore[method-assign]
        return made

    def start(self, worker: DecodeWorker, attempt: Attempt | None = None) -> threading.Thread:
        """Begins the unit in a thread; its engine is in a step when this returns."""

        def work() -> None:
            self.result = worker.run(attempt or Attempt(self.unit))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.stepped.wait(_LIMIT)
        return thread

    def end(self, thread: threading.Thread) -> list[dict[str, Any]]:
        """Lets the engine go on; the rows of the committed unit."""
        self.go.set()
        thread.join(_LIMIT)
        assert not thread.is_alive()
        assert self.result is not None
        assert self.result.error is None, self.result
        return rows(self.run)


def rows(run: RunConfig) -> list[dict[str, Any]]:
    (unit,) = writer.committed(run.output.path)
    return writer.read_rows(run.output.path, unit, 10_000)


def test_shares_of_a_unit_come_back_into_one_object(tmp_path: Path, config) -> None:
    titles = [f"t{i}" for i in range(60)]
    titles[50], titles[55], titles[3] = "program", "", "plan"
    run = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=100)
    bench = Bench(run)
    owner, first, second = bench.worker(held=True), bench.worker(), bench.worker()
    thread = bench.start(owner)
    lent = owner.lend(bench.unit.id, ["x", "y"])
    assert list(lent) == ["x", "y"]
    taken = [row for groups in lent.values() for group in groups for row in group]
    assert len(taken) == len(set(taken)) == pytest.approx(40, abs=6)
    for name, by in (("x", first), ("y", second)):
        said, answer = by.borrow(bench.unit, name, lent[name])
        assert said.error is None
        owner.returned(bench.unit.id, name, answer)
        owner.returned(bench.unit.id, name, answer)  # a second time is no harm
    assert owner.progress()[bench.unit.id].answered >= 40
    found = bench.end(thread)
    assert [row["id"] for row in found] == [str(i) for i in range(60)]
    alone = Bench(config(str(tmp_path / "a.jsonl"), output="alone", unit_documents=100))
    alone.worker().run_unit(alone.unit)
    assert found == rows(alone.run)
    shared, whole = summary(run), summary(alone.run)
    assert shared.counts == whole.counts
    assert (shared.ok, shared.failed) == (whole.ok, whole.failed)
    # The bill: every document once, and every token and second that the unit's summary tells of.
    reports = [one.meter.report() for one in (owner, first, second)]
    assert [report.ok + report.failed for report in reports] == [60, 0, 0]
    assert [sum(own["documents"] for own in report.categories.values()) for report in reports] == [60, 0, 0]
    for name in ("prefill_tokens", "decode_tokens"):
        assert sum(own[name] for r in reports for own in r.categories.values()) == whole.counts[name]
    assert all(report.seconds.lost == 0 and report.open == {} for report in reports)
    seconds = sum(own["seconds"] for r in reports for own in r.categories.values())
    assert sum(own["seconds"] for own in shared.categories.values()) == pytest.approx(seconds)
    assert shared.busy_seconds == pytest.approx(seconds, abs=1e-5)


def summary(run: RunConfig) -> writer.UnitSummary:
    (unit,) = writer.committed(run.output.path)
    return writer.read_summary(run.output.path, unit)


def test_a_share_can_be_lent_on(tmp_path: Path, config) -> None:
    run = config(str(write_jsonl(tmp_path / "a.jsonl", ["a"] * 80)), unit_documents=100, max_num_seqs=2)
    bench = Bench(run)
    owner, middle, last = bench.worker(held=True), bench.worker(held=True), bench.worker()
    thread = bench.start(owner)
    lent = owner.lend(bench.unit.id, ["x"])
    bench.stepped.clear()
    answer: list[Any] = []
    borrower = threading.Thread(target=lambda: answer.append(middle.borrow(bench.unit, "x", lent["x"])))
    borrower.start()
    assert bench.stepped.wait(_LIMIT)
    on = middle.lend("x", ["y"])
    assert {row for group in on["y"] for row in group} < {row for group in lent["x"] for row in group}
    middle.returned("x", "y", last.borrow(bench.unit, "y", on["y"])[1])
    bench.go.set()
    borrower.join(_LIMIT)
    owner.returned(bench.unit.id, "x", answer[0][1])
    assert [row["id"] for row in bench.end(thread)] == [str(i) for i in range(80)]
    assert summary(run).counts["prefill_tokens"] == 400
    assert all(sum(own["prefill_tokens"] for own in w.meter.report().categories.values()) for w in (middle, last))


def test_a_share_that_is_taken_back_is_done_here(tmp_path: Path, config) -> None:
    run = config(str(write_jsonl(tmp_path / "a.jsonl", ["a"] * 60)), unit_documents=100)
    bench = Bench(run)
    owner, other = bench.worker(held=True), bench.worker()
    thread = bench.start(owner)
    lent = owner.lend(bench.unit.id, ["x", "y"])
    _, late = other.borrow(bench.unit, "x", lent["x"])
    owner.take_back(bench.unit.id, "x")
    owner.take_back(bench.unit.id, "y")
    owner.returned(bench.unit.id, "x", late)  # too late: it is done here
    assert owner.lend(bench.unit.id, ["z"]) != {}  # and can be lent again
    owner.take_back(bench.unit.id, "z")
    assert [row["id"] for row in bench.end(thread)] == [str(i) for i in range(60)]
    assert summary(run).counts["prefill_tokens"] == 300


def test_a_share_that_is_wanted_back_is_lost_time_of_who_had_it(tmp_path: Path, config) -> None:
    run = config(str(write_jsonl(tmp_path / "a.jsonl", ["a"] * 60)), unit_documents=100)
    bench = Bench(run)
    owner, other = bench.worker(held=True), bench.worker(held=True)
    thread = bench.start(owner)
    lent = owner.lend(bench.unit.id, ["x"])
    bench.stepped.clear()
    said: list[Any] = []
    borrower = threading.Thread(target=lambda: said.append(other.borrow(bench.unit, "x", lent["x"])))
    borrower.start()
    assert bench.stepped.wait(_LIMIT)
    other.hand_back("x", False)
    borrower.join(_LIMIT)
    assert said[0][0].handed_back
    assert said[0][1] is None
    owner.take_back(bench.unit.id, "x")
    bench.end(thread)
    report = other.meter.report()
    assert report.open == report.categories == {}


def test_a_bisecting_attempt_lends_nothing(tmp_path: Path, config) -> None:
    run = config(str(write_jsonl(tmp_path / "a.jsonl", ["a"] * 60)), unit_documents=100, max_num_seqs=1)
    bench = Bench(run)
    owner = bench.worker(held=True)
    thread = bench.start(owner, Attempt(bench.unit, number=2, deaths=1))
    assert owner.lend(bench.unit.id, ["x"]) == {}
    assert len(bench.end(thread)) == 60
    assert owner.lend(bench.unit.id, ["x"]) == {}  # nor does one that is not there any more


def test_a_document_of_which_a_question_was_begun_is_not_lent(tmp_path: Path) -> None:
    lines = [{"id": str(i), "context": "c", "questions": ["a?", "b?", "c?"]} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        "input": {"path": str(tmp_path / "a.jsonl")},
        "output": {"path": str(tmp_path / "out")},
        "model": {"name": "fake", "fake": {"load_seconds": 0.0, "step_seconds": 0.001}},
        "task": {"kind": "question_answering"},
        "decoding": {"method": "autoregressive"},
        "engine": {"max_num_seqs": 4},
    }
    bench = Bench(RunConfig.model_validate(tree), build)
    owner, other = bench.worker(held=True), bench.worker()
    thread = bench.start(owner)
    names = [str(n) for n in range(60)]  # so many that the owner is to keep nothing but what is begun
    lent = owner.lend(bench.unit.id, names)
    assert sorted(row for groups in lent.values() for (row,) in groups) == list(range(2, 30))
    for name, groups in lent.items():
        owner.returned(bench.unit.id, name, other.borrow(bench.unit, name, groups)[1])
    found = bench.end(thread)
    assert [row["id"] for row in found] == [str(i) for i in range(30) for _ in range(3)]


def test_a_borrower_that_cannot_read_the_unit_says_so(tmp_path: Path, config) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"] * 60)
    bench = Bench(config(str(path), unit_documents=100))
    path.unlink()
    said, answer = bench.worker().borrow(bench.unit, "x", [[1], [2]])
    assert "is gone since the run was planned" in said.error
    assert answer is None


# ----------------------------------------------------------------------------------------------------- the real tasks

_SHOES = {"attributes": [{"name": "Brand"}, {"name": "Size", "type": "number"}]}
_TASKS: dict[str, dict[str, Any]] = {
    "stacked": {
        "task": {"categories": {"shoes": _SHOES, "tea": {"attributes": [{"name": "Kind"}]}}},
        "decoding": {"isolate": "none", "stacked_documents": 3, "max_value_tokens": 6},
    },
    "isolated": {
        "task": {"categories": {"shoes": _SHOES, "tea": {"attributes": [{"name": "Kind"}]}}},
        "decoding": {"isolate": "documents", "max_value_tokens": 6},
    },
    "questions": {
        "task": {"kind": "question_answering", "max_answer_tokens": 6},
        "decoding": {"method": "autoregressive"},
    },
    "turns": {
        "task": {"kind": "generation", "samples": 2},
        "decoding": {"method": "autoregressive", "max_new_tokens": 6, "sampling": {"temperature": 0.7}},
    },
}


@pytest.mark.parametrize("kind", list(_TASKS))
def test_the_answers_are_those_of_one_worker(tmp_path: Path, kind: str) -> None:
    """Real tasks and a real engine: the same prompts, whoever makes them."""
    model = save_tiny(tmp_path / "model")
    lines = [
        {
            "id": str(i),
            "title": f"product {i * i} of a kind",
            "category": ("shoes", "tea", "shoes", "none")[i % 4] if i % 7 else "shoes",
            "context": f"a context {i * 7}",
            "questions": ["who?", "when?", ""] if i % 5 == 0 else ["why so?", f"what is {i}?"],
            "prompt": [f"say {i}", "and now?"] if i % 2 else f"tell {i}",
        }
        for i in range(36)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def configured(output: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "input": {"path": str(tmp_path / "a.jsonl"), "text_columns": ["title"]},
                "output": {"path": str(tmp_path / output)},
                "model": {"name": str(model), "device": "cpu", "dtype": "float32"},
                "engine": {"max_num_seqs": 2},
                "cluster": {"unit_documents": 100},
                **_TASKS[kind],
            }
        )

    alone = Bench(configured("alone"), build)
    alone.worker().run_unit(alone.unit)
    bench = Bench(configured("shared"), build)
    owner, other = bench.worker(held=True), bench.worker()
    thread = bench.start(owner)
    lent = owner.lend(bench.unit.id, ["x"])
    assert sum(map(len, lent["x"])) >= 12
    if kind == "stacked":
        assert Counter(map(len, lent["x"])).most_common(1)[0][0] == 3
    said, answer = other.borrow(bench.unit, "x", lent["x"])
    assert said.error is None, said
    owner.returned(bench.unit.id, "x", answer)
    found, wanted = bench.end(thread), rows(alone.run)
    assert [row["id"] for row in found] == [row["id"] for row in wanted]
    for ours, theirs in zip(ordered(found), ordered(wanted), strict=True):
        assert ours == theirs
    assert summary(bench.run).counts["decode_tokens"] == summary(alone.run).counts["decode_tokens"]


def ordered(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they can be compared: figures of probability with three digits, turns of a document in their order."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(own) for key, own in value.items()}
        if isinstance(value, list):
            return [plain(own) for own in value]
        return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value

    return [plain(row) for row in sorted(found, key=lambda r: (int(r["id"]), r.get("sample", 0), r.get("turn", 0)))]
