"""The decode worker in this process, with a fake engine: overlap of units, and whom an error costs what."""

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from raypd.answering.request_queue import EngineBroken, UnitState
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.decoding.counts import Finished, TokenCounts
from raypd.run import manifest, records, retry_policy
from raypd.run.retry_policy import Attempt, AttemptRecord, UnitLog, attempts_path
from raypd.run.unit import Unit
from raypd.tasks.base import Record
from tests.cluster import fakes
from tests.processes import LONG, wait_for
from tests.runs import with_keys, write_jsonl


def worker(run, **keys) -> DecodeWorker:
    manifest.claim(run, run.output.path)
    return DecodeWorker(WorkerSpec(run, run.output.path, "s", **{"build": fakes.build, **keys}))


@pytest.fixture
def begin(tmp_path: Path, config):
    """(configuration over documents with these titles, a worker of it, its units)"""

    def make(titles: Sequence[str], unit_documents: int = 100, **keys) -> tuple[RunConfig, DecodeWorker, list[Unit]]:
        run = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=unit_documents, **keys)
        return run, worker(run), list(plan(run))

    return make


def rows(run, unit) -> list[dict]:
    return writer.read_rows(run.output.path, unit.id, 1000)


def test_units_overlap_so_that_the_engine_does_not_drain(begin) -> None:
    run, made, units = begin(["a"] * 400, unit_documents=50, max_num_seqs=4)
    request_queue, step = made.request_queue, made.parts.engine.step

    def planned() -> bool:
        """Whether the units have planned what they may: a batch, or all that there is."""
        states = list(request_queue._units.values())
        all_begun = request_queue._numbers == len(units) and not any(own.more or own.begun is None for own in states)
        return len(request_queue._queue) >= request_queue.batch or all_begun

    def patient() -> list[Finished]:
        wait_for(planned)  # however slow the machine is, the engine is slower
        return step()

    made.parts.engine.step = patient  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as in_flight:
        list(in_flight.map(made.run_unit, units))
    assert writer.committed(run.output.path) == {u.id for u in units}
    fill = made.parts.engine.fill
    # 200 works in batches of 4: every step but the first and the last two is full, across the borders of units too.
    assert sum(fill) == 200
    assert sum(n < 4 for n in fill) <= 3, fill
    counts = writer.read_summary(run.output.path, units[0].id).counts
    assert counts == {"prefill_tokens": 250, "shared_tokens": 100, "decode_tokens": 75, "steps": 50}


def test_work_is_planned_as_the_engine_has_room(begin) -> None:
    _, made, (unit,) = begin(["a"] * 200, unit_documents=200, max_num_seqs=4)
    ahead = []

    class Task(fakes.FakeTask):
        def plan(self, documents):
            for item in super().plan(documents):
                ahead.append(len(made.request_queue._queue) + made.request_queue._in_engine)
                yield item

    made.parts.task = Task()
    made.run_unit(unit)
    assert (len(ahead), max(ahead) <= 2 * 4) == (100, True)


def test_an_error_costs_the_documents_of_its_work_alone(begin) -> None:
    titles = ["a", "b", "program", "c", "finish", "d", "submit", "e", "f", "plan", "g", "twice", "", "h"]
    run, made, (unit,) = begin(titles)
    submit = made.parts.engine.submit

    def refuse(program, **keys) -> None:
        submit(["submit"] if "submit" in program else program, **keys)

    made.parts.engine.submit = refuse  # type: ignore[method-assign]
    summary = made.run_unit(unit)
    found = rows(run, unit)
    places = {place: row for row, place in enumerate(sorted({r["row"] for r in found}))}
    status = {places[r["row"]]: (r["error"] or r["category"]) for r in found}
    assert (len(status), status[0]) == (len(titles), "A")
    assert status[2] == status[3] == "ValueError: the program failed"
    assert status[4] == status[5] == "ValueError: the answer cannot be read"
    assert status[6] == status[7] == "ValueError: the engine does not take it"
    assert status[9] == "ValueError: the plan failed"
    assert (status[8], status[10]) == ("F", "G")  # planned again one by one
    assert [r["category"] for r in found if places[r["row"]] == 11] == ["TWICE", "AGAIN"]
    assert re.fullmatch(r"a.jsonl, byte \d+: no text in title", status[12])
    assert (summary.documents, summary.ok, summary.failed) == (14, 6, 8)


def test_documents_that_were_cut_are_counted(begin, monkeypatch) -> None:
    cut = lambda row, values: Record(row, {**values, "truncated": "LONG" in str(values)})  # noqa: E731
    monkeypatch.setattr(fakes, "Record", cut)
    run, made, (unit,) = begin(["a", "long", "a", "twice long", "long"])
    assert made.run_unit(unit).truncated == 3
    units = writer.summaries(run.output.path)
    assert manifest.make(run, run.output.path, 1, units, manifest.Unreadable(), None).truncated == 3


def test_a_committed_unit_is_not_decoded_again(begin) -> None:
    run, made, (unit,) = begin(["a", "b"])
    first, again = made.run_unit(unit), worker(run)
    assert (again.run_unit(unit), again.parts.engine.fill) == (first, [])


def test_a_broken_engine_breaks_the_units_that_it_holds(begin) -> None:
    _, made, (unit,) = begin(["engine"])
    for _ in range(2):  # and the next one at once
        with pytest.raises(EngineBroken, match="the device is gone"):
            made.run_unit(unit)


def test_what_a_dying_worker_leaves_holds_no_secret(begin, monkeypatch, capsys) -> None:
    run, made, (unit,) = begin(["a"])
    broken = EngineBroken("GET https://me:Pa55word@hub.example/m?token=t0ken failed")
    monkeypatch.setattr(made, "run_unit", mock.Mock(side_effect=broken))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        made.run(unit)
    left = Path(retry_policy.failure_path(run.output.path, unit.id)).read_text()
    assert left == "GET https://(hidden)@hub.example/m?token=(hidden) failed"
    assert left in capsys.readouterr().err


def test_a_bisecting_attempt_leaves_a_checkpoint_before_each_group(begin) -> None:
    run, made, (unit,) = begin(["a"] * 40)
    marks = []
    step = made.parts.engine.step

    def look():
        marks.append(records.read(AttemptRecord, attempts_path(run.output.path, unit.id)).group)
        return step()

    made.parts.engine.step = look  # type: ignore[method-assign]
    made.run_unit(unit, Attempt(number=4, deaths=3, suspects=(7, 8), quarantined={5: 3}))
    assert list(dict.fromkeys(marks)) == [(7,), (8,), tuple(r for r in range(40) if r not in (5, 7, 8))]
    found = rows(run, unit)
    assert [r["id"] for r in found if r["error"]] == ["5"]
    assert found[5]["error"] == "killed its worker process 3 times"
    assert {r["attempts"] for r in found} == {4}


def test_a_unit_whose_worker_died_is_alone_in_a_worker(tmp_path: Path, begin) -> None:
    run, made, (first, bad, later) = begin(["until go", *["a"] * 29], unit_documents=10)
    UnitLog(run.output.path, "s", made.node, "it died", lambda node: True).begin(bad.id, Attempt())
    with ThreadPoolExecutor(3) as pool:
        begun = pool.submit(made.run, first)
        wait_for((tmp_path / "out/waiting-go").exists)
        alone = pool.submit(made.run, bad)
        wait_for(made._entry.locked)
        behind = pool.submit(made.run, later)
        assert made.progress().keys() == {first.id}
        (tmp_path / "out/go").touch()
        assert [own.result(LONG).ok for own in (begun, alone, behind)] == [10, 10, 10]
    attempts = {unit.id: {row["attempts"] for row in rows(run, unit)} for unit in (first, bad, later)}
    assert attempts == {first.id: {1}, bad.id: {2}, later.id: {1}}
    summaries = [writer.read_summary(run.output.path, unit.id) for unit in (first, bad, later)]
    assert [summary.unit for summary in sorted(summaries, key=lambda own: own.committed_at)][:2] == [first.id, bad.id]
    assert list((tmp_path / "out/failures").iterdir()) == []


def test_a_unit_that_costs_process_after_process_is_given_up_and_may_be_tried_anew(begin) -> None:
    run, made, (unit,) = begin(["a"] * 10)
    UnitLog(run.output.path, "s", made.node, "it died", lambda node: True).begin(unit.id, Attempt(30, deaths=29))
    assert made.run(unit).error == "its worker processes died each time: none of them left a reason"
    assert made.run(unit).ok == 10


def test_a_unit_is_handed_back_when_it_is_wanted_back(tmp_path: Path, begin) -> None:
    titles = [*["a"] * 8, "until go", *["a"] * 191]  # the engine stands still after its first step
    run, made, (first, second) = begin(titles)
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(made.run, first)
        wait_for(lambda: made.progress().get(first.id, (0, 0))[0])
        behind = pool.submit(made.run, second)
        wait_for(lambda: second.id in made.progress())
        made.cancel(first.id, True)  # it was begun: it stays
        made.cancel(second.id, True)
        assert behind.result(LONG).handed_back
        assert not begun.done()
        made.cancel(first.id, False)
        assert begun.result(LONG).handed_back
    assert writer.committed(run.output.path) == set()
    assert made.meter.report().open == made.meter.report().categories == {}
    (tmp_path / "out/go").touch()
    assert made.run(second).ok == 100  # and what is left of them in the engine spoils nothing


def test_a_document_is_answered_when_no_request_of_it_is_left() -> None:
    state = UnitState(1, "u", documents=2, begun=0.0, records=[Record(0), Record(1)], open=Counter({1: 1}))
    assert (state.answered, state.progress().answered) == ({0}, 1)


@pytest.mark.parametrize(("decoded", "batch"), [(8, 64), (100, 200), (300, 256)])
def test_an_engine_that_decodes_many_is_given_more(begin, decoded: int, batch: int) -> None:
    _, made, (unit,) = begin(["a"] * 1200, unit_documents=1200, max_num_seqs="auto")
    engine, given = made.parts.engine, []
    engine.batch, engine.sequences = 7, [Finished("", None, None, TokenCounts())] * decoded
    step = engine.step

    def noted() -> list[Finished]:
        given.append(engine.pending)
        return step()

    engine.step = noted  # type: ignore[method-assign]
    made.run_unit(unit)
    assert max(given) <= made.request_queue.batch == batch


def test_a_worker_that_was_given_a_gpu_and_sees_none_decodes_nothing(tmp_path, begin, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run, _, (unit,) = begin(["a"])
    made = worker(run, gpus=1.0)
    result = made.run(unit)
    assert (result.fatal, made.loaded) == (True, False)
    assert "was given a GPU, and torch" in (result.error or "")
    asked_for_it = with_keys(run, model={"device": "cpu"}, output={"path": str(tmp_path / "cpu")})
    for said, read in (("max_split_size_mb:64", "max_split_size_mb:64"), (None, "expandable_segments:True")):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", said or "")
        if said is None:
            monkeypatch.delenv("PYTORCH_ALLOC_CONF")
        assert worker(asked_for_it, gpus=1.0).loaded
        assert os.environ["PYTORCH_ALLOC_CONF"] == read
