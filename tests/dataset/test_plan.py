"""The stored plan: used again without reading the input, kept for what is the same, and honest about what is not."""

import os
import shutil
from pathlib import Path

import pytest

from raypd import storage
from raypd.dataset import planner, split
from raypd.dataset.plan import Plan, stored, take_apart
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError, RunError
from tests.runs import write_jsonl


def kept(run) -> Plan:
    """Plans as a session does."""
    planned = plan(run, run.output.path)
    planned.keep(run.output.path)
    return planned


def shape(planned: Plan) -> list[list[str]]:
    return [[part.name for part in unit.parts] for unit in planned]


@pytest.fixture
def run(tmp_path: Path, config):
    """Five files: small ones of 3, 4, 2 documents, one of 25, another small one; units of 10."""
    for name, count in (("a", 3), ("b", 4), ("c", 2), ("d", 25), ("e", 2)):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [f"{name}{i}" for i in range(count)])
    return config(str(tmp_path / "in"))


@pytest.fixture
def inspected(monkeypatch) -> list[str]:
    """The names of the objects that planning reads."""
    names: list[str] = []
    monkeypatch.setattr(planner, "inspect", lambda item, *rest: names.append(item.name) or split.inspect(item, *rest))
    return names


def test_small_files_share_units_and_large_ones_are_split(run) -> None:
    planned = plan(run)
    assert shape(planned) == [["d.jsonl"]] * 3 + [["a.jsonl", "b.jsonl", "c.jsonl"], ["e.jsonl"]]
    assert (planned.units, planned.documents, planned.exact) == (5, 36, True)
    assert planned.bytes == sum(p.stat().st_size for p in Path(run.input.path).iterdir())  # type: ignore[arg-type]
    assert len({(d.source, d.fields["title"]) for unit in planned for d in read_unit(unit, run)}) == 36


def test_the_same_input_is_not_read_again_but_for_other_sizes_of_units(run, tmp_path, config, inspected) -> None:
    first = kept(run)
    assert len(inspected) == 5
    again = plan(run, run.output.path)
    assert (len(inspected), [u.id for u in again]) == (5, [u.id for u in first])
    assert (again.units, again.documents, again.bytes, again.exact) == (5, 36, first.bytes, True)
    assert list(plan(run)) == list(again)  # and it is what a fresh one would be
    inspected.clear()
    assert (plan(config(str(tmp_path / "in"), unit_documents=5), run.output.path).units, len(inspected)) == (8, 5)


def test_what_is_new_becomes_units_of_its_own(run, tmp_path, inspected) -> None:
    first = {u.id for u in kept(run)}
    write_jsonl(tmp_path / "in/aa.jsonl", ["new"] * 2)
    write_jsonl(tmp_path / "in/f.jsonl", ["new"])
    inspected.clear()
    planned = kept(run)
    assert inspected == ["aa.jsonl", "f.jsonl"]
    assert first < {u.id for u in planned}
    assert [parts for parts in shape(planned) if "aa.jsonl" in parts] == [["aa.jsonl", "f.jsonl"]]
    assert (planned.documents, planned.changes) == (39, "")
    folders = [p for p in (tmp_path / "out/plan").iterdir() if p.is_dir() and any(p.iterdir())]
    assert [p.name for p in folders] == [planned.totals.id]


def test_what_was_replaced_or_is_gone_is_named_and_the_rest_kept(run, tmp_path, inspected) -> None:
    first = {u.id: u for u in kept(run)}
    write_jsonl(tmp_path / "in/b.jsonl", ["other"] * 4)
    (tmp_path / "in/e.jsonl").unlink()
    inspected.clear()
    planned = plan(run, run.output.path)
    assert planned.changes == "b.jsonl was replaced, e.jsonl is gone"
    assert inspected == ["a.jsonl", "b.jsonl", "c.jsonl"]  # they shared a unit
    assert {u.id for u in planned} & set(first) == {i for i, u in first.items() if u.name == "d.jsonl"}
    assert planned.documents == 34


def test_a_touched_or_moved_input_is_the_same(run, tmp_path, config, inspected) -> None:
    first = kept(run)
    for file in (tmp_path / "in").iterdir():
        os.utime(file, (1, 1))
    shutil.move(tmp_path / "in", tmp_path / "moved")
    inspected.clear()
    planned = plan(config(str(tmp_path / "moved")), run.output.path)
    assert (inspected, sorted(u.id for u in planned)) == ([], sorted(u.id for u in first))
    assert sum(len(read_unit(u, run)) for u in planned) == 36


def test_objects_that_were_damaged_are_looked_into_again(run, tmp_path, inspected) -> None:
    (tmp_path / "in/cc.parquet").write_bytes(b"PAR1")
    first = kept(run)
    assert [u.name for u in first.damaged()] == ["cc.parquet"]
    assert (first.units, first.totals.damaged, first.documents) == (5, 1, 36)
    inspected.clear()
    assert (plan(run, run.output.path).totals.damaged, inspected) == (1, ["cc.parquet"])


def test_units_that_were_taken_apart_stay_apart(run) -> None:
    (shared,) = [u for u in kept(run) if len(u.parts) > 1]
    singles, planned = take_apart(run.output.path, [shared], run.fingerprint()), kept(run)
    assert {u.id for u in singles} < {u.id for u in planned}
    assert all(len(parts) == 1 for parts in shape(planned))
    assert (planned.documents, list(plan(run, run.output.path))) == (36, list(planned))


def test_a_plan_that_is_torn_is_made_again_and_a_chunk_that_is_gone_is_named(run, tmp_path) -> None:
    chunk = tmp_path / "out/plan" / kept(run).totals.id / "000000.parquet"
    chunk.write_bytes(chunk.read_bytes()[:50])
    with pytest.raises(RunError, match=r"000000.parquet: a part of the plan cannot be read.*delete"):
        list(plan(run, run.output.path))
    (tmp_path / "out/plan/plan.json").write_text("{")
    assert (stored(run.output.path), plan(run, run.output.path).units) == (None, 5)


def test_a_plan_of_many_chunks_is_read_in_its_order(run, monkeypatch) -> None:
    monkeypatch.setattr("raypd.dataset.plan._CHUNK_PARTS", 2)
    planned = kept(run)
    assert planned.totals.chunks == 3
    loaded = stored(run.output.path)
    assert loaded is not None
    assert list(loaded) == list(planned) == list(plan(run))
    assert [u.id for u in loaded.left({next(iter(loaded)).id})] == [u.id for u in loaded][1:]


def test_a_name_that_is_no_text_is_refused(tmp_path, config) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["a"])
    with open(os.fsencode(tmp_path / "in") + b"/\xff.jsonl", "wb") as file:
        file.write(b'{"id": 1, "title": "x"}')
    with pytest.raises(InputError, match="name is not UTF-8; rename"):
        plan(config(str(tmp_path / "in")))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_objects(tmp_path, config, monkeypatch) -> None:
    import io
    import tracemalloc

    line, opened = b'{"id": "1", "title": "t"}\n', storage.open_read
    monkeypatch.setattr("raypd.dataset.plan._CHUNK_PARTS", 200)
    monkeypatch.setattr(planner, "_TAIL_PARTS", 200)
    monkeypatch.setattr(storage, "open_read", lambda p, *a, **k: io.BytesIO(line) if "://" in p else opened(p, *a, **k))

    def peaks(count: int) -> list[int]:
        """Bytes at most while so many objects are planned, and while they are compared with the stored plan."""
        run, sizes = config("s3://generated/in", f"out{count}"), []
        for first in (0, 1):
            names = (f"{i:09d}.jsonl" for i in range(first, first + count))
            objects = (storage.Object(f"s3://generated/in/{n}", n, len(line), n) for n in names)
            monkeypatch.setattr(storage, "find", lambda path, objects=objects: objects)
            monkeypatch.setattr(storage, "is_folder", lambda path: False)
            tracemalloc.start()
            planned = plan(run, run.output.path)
            sizes.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert sum(len(unit.parts) for unit in planned) == planned.documents == count
            planned.keep(run.output.path)
        return sizes

    peaks(500)  # imports and caches
    for few, many in zip(peaks(1000), peaks(6_000), strict=True):
        assert many < 1.3 * few
