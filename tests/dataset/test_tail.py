"""Smaller units at the end of a plan: every document in one of them, the same totals, and plans of before kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd.config import RunConfig
from raypd.dataset import planner, split
from raypd.dataset.plan import Plan, take_apart
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.verify.verification import verify
from tests.cluster import fakes
from tests.runs import write_jsonl


def ids(planned: Plan, run: RunConfig) -> list[str]:
    return [document.id for unit in planned for document in read_unit(unit, run)]


def write(path: Path, count: int) -> Path:
    """Documents of different lengths, with blank lines between some where a format has lines."""
    rows = [{"id": str(i), "title": "ü" * (1 + i * 7 % 40)} for i in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
        return path
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" * (1 + i % 50 // 49) for i, row in enumerate(rows))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz", "a.parquet", "estimated.jsonl"])
def run(request, tmp_path, config, monkeypatch) -> RunConfig:
    """1,610 documents in units of 100."""
    if request.param == "estimated.jsonl":
        monkeypatch.setattr(split, "HEAD_BYTES", 4000)
    return config(str(write(tmp_path / request.param, 1610)), unit_documents=100)


def test_the_last_units_are_smaller_and_hold_every_document_once(run: RunConfig) -> None:
    whole, made = plan(run), plan(run, run.output.path)
    assert ids(made, run) == [str(i) for i in range(1610)]
    before, after = list(whole), list(made)
    cut = len(before) // 8
    assert after[: len(before) - cut] == before[: len(before) - cut]
    pieces = after[len(before) - cut :]
    wanted = sum(4 if unit.expected >= 64 else 1 for unit in before[-cut:])
    assert len(pieces) == wanted > cut
    assert max(unit.expected for unit in pieces) <= 25
    assert (made.documents, made.bytes, made.exact) == (whole.documents, whole.bytes, whole.exact)
    assert made.exact == ("estimated" not in str(run.input.path))
    assert all(unit.rows in (None, len(read_unit(unit, run))) for unit in made)
    assert len({unit.id for unit in made}) == made.units
    assert list(plan(run, run.output.path)) == after


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([20] * 5, [2, 1, 1, 1]),
        ([97, 1, 1, 1], [1, 3]),
        ([15] * 4, [4]),  # too few documents
    ],
)
def test_a_unit_of_several_files_is_cut_between_them(tmp_path, config, sizes: list[int], pieces: list[int]) -> None:
    for i in range(7):
        write_jsonl(tmp_path / f"in/a{i}.jsonl", ["a"] * 100)
    for i, size in enumerate(sizes):
        write_jsonl(tmp_path / f"in/b{i}.jsonl", ["b"] * size)
    run = config(str(tmp_path / "in"), unit_documents=100)
    made = plan(run, run.output.path)
    assert [len(unit.parts) for unit in made] == [1] * 7 + pieces
    assert sorted(ids(made, run)) == sorted(ids(plan(run), run))


def test_units_of_an_earlier_session_stay_as_they_are(tmp_path, config, monkeypatch) -> None:
    """Also those of a plan from before units at the end were smaller."""
    run = config(str(tmp_path / "in"), unit_documents=100)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", 1600)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "_TAIL_UNITS", 0)
        before = plan(run, run.output.path)
        before.keep(run.output.path)
    first = list(before)
    assert list(plan(run, run.output.path)) == first
    write(tmp_path / "in/b.jsonl", 800)
    second = plan(run, run.output.path)
    second.keep(run.output.path)
    assert [unit.expected for unit in second] == [100] * 16 + [100] * 7 + [25] * 4
    assert list(second)[:16] == first
    write(tmp_path / "in/c.jsonl", 100)  # one unit: no eighth of it
    assert list(plan(run, run.output.path))[:27] == list(second)


def test_objects_that_were_taken_apart_are_not_cut(tmp_path, config) -> None:
    """The run may have committed them already."""
    run = config(str(tmp_path / "in"), unit_documents=180)
    for i in range(20):
        write_jsonl(tmp_path / f"in/{i:02d}.jsonl", ["a"] * 90)
    made = plan(run, run.output.path)
    made.keep(run.output.path)
    assert {len(unit.parts) for unit in made} == {1, 2}
    singles = take_apart(run.output.path, [unit for unit in made if len(unit.parts) > 1], run.fingerprint())
    assert {unit.id for unit in singles} <= {unit.id for unit in plan(run, run.output.path)}


def test_a_file_that_changes_before_it_is_cut_is_left_whole(tmp_path, config, monkeypatch) -> None:
    for i in range(8):
        write_jsonl(tmp_path / f"in/{i}.jsonl", ["a"] * 100)
    run = config(str(tmp_path / "in"), unit_documents=100)

    def changing(function: Callable, change: Callable) -> Callable:
        def call(*arguments):
            change()
            return function(*arguments)

        return call

    last = tmp_path / "in/7.jsonl"
    for change in (lambda: last.write_text("{}\n"), lambda: last.unlink(missing_ok=True)):
        write_jsonl(last, ["a"] * 100)
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_cut", changing(planner._cut, change))
            assert plan(run, run.output.path).units == 8


def test_no_more_than_the_tail_is_held_in_memory(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr(planner, "_TAIL_UNITS", 3)
    write(tmp_path / "a.parquet", 8000)
    run = config(str(tmp_path / "a.parquet"), unit_documents=100)
    assert [unit.expected for unit in plan(run, run.output.path)] == [100] * 77 + [25] * 12
    monkeypatch.setattr(planner, "_TAIL_PARTS", 2)
    assert [unit.expected for unit in plan(run, run.output.path)] == [100] * 78 + [25] * 8


def test_a_run_with_smaller_units_is_verified(tmp_path, config, ray_here) -> None:
    from raypd.cluster import driver

    run = config(str(write(tmp_path / "a.jsonl", 800)), unit_documents=100)
    made = driver.run_extract(run, build=fakes.build)
    assert (made.documents, made.units) == (800, 11)
    assert verify(run.output.path, run).well
    (tmp_path / "out/plan/plan.json").unlink()
    assert verify(run.output.path, run).well
    assert driver.run_extract(run, build=fakes.build).units == 11
