"""What the input is cut into, ids, what is refused before anything starts; and the stored plan,
used again.
"""

import gzip
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from raypd import storage
from raypd.dataset import planner, split
from raypd.dataset.plan import Plan, stored, take_apart
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError, RunError
from raypd.run import records
from tests.runs import write_jsonl

ROWS = [{"id": f"d{i}", "title": f"title {i} ü"} for i in range(25)]


def lines(end: str = "\n", last: bool = True) -> bytes:
    return (
        end.join(json.dumps(row, ensure_ascii=False) for row in ROWS) + (end if last else "")
    ).encode()


def write(path, data: bytes):
    if path.suffix == ".zst":  # of two frames
        data = zstandard.compress(data[: len(data) // 2]) + zstandard.compress(
            data[len(data) // 2 :]
        )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_jsonl_is_cut_and_read_back(tmp_path, config, name, end, last) -> None:
    run = config(str(write(tmp_path / name, lines(end, last))))
    units, text = list(plan(run)), lines(end, last)
    read = [read_unit(unit, run) for unit in units]
    flat = [d for documents in read for d in documents]
    expected = [(row["id"], row["title"], name, None) for row in ROWS]
    assert [(d.id, d.fields["title"], d.source, d.error) for d in flat] == expected
    assert [len(documents) for documents in read] == [u.rows for u in units] == [10, 10, 5]
    assert [d.index for d in flat] == [*range(10), *range(10), *range(5)]
    assert all(text[d.place :].startswith(f'{{"id": "{d.id}"'.encode()) for d in flat)


def test_ids_are_the_same_wherever_the_folder_lies_and_change_with_the_content(
    tmp_path, config
) -> None:
    write_jsonl(tmp_path / "one/x/a.jsonl", ["a"] * 15)
    shutil.copytree(tmp_path / "one", tmp_path / "two")

    def ids(name: str, **keys) -> list[str]:
        return [unit.id for unit in plan(config(str(tmp_path / name), **keys))]

    first = ids("one")
    assert first == ids("two")
    assert first[0].startswith("x-a.jsonl-000000000000-")
    write_jsonl(tmp_path / "two/x/a.jsonl", ["b"] * 15)
    assert not {*first} & {*ids("two"), *ids("one", text_columns=["id"])}


def test_a_list_of_files_folders_and_globs_reads_each_file_once(tmp_path, config) -> None:
    for name in ("f/a.jsonl", "f/a.jsonl#3.jsonl", "f/b.jsonl", "g/a.jsonl"):
        write_jsonl(tmp_path / name, ["a", "b"])
    (tmp_path / "f/_SUCCESS").touch()
    (tmp_path / "f/notes.txt").touch()
    run = config([str(tmp_path / "f"), str(tmp_path / "f/*.jsonl"), str(tmp_path / "g/a.jsonl")])
    (unit,) = plan(run)
    assert [part.name for part in unit.parts] == [
        "a.jsonl",
        "a.jsonl#3.jsonl",
        "b.jsonl",
        "a.jsonl#3",
    ]
    assert [d.source for d in read_unit(unit, run)] == [
        part.name for part in unit.parts for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("make", "pattern", "message"),
    [
        (None, "*.jsonl", "no file matches"),
        (None, "a.jsonl", "no such file"),
        (("b.jsonl", b'{"id":1,"title":"x"}'), "a.jsonl", "did you mean .*b.jsonl"),
        (("a.log", b"id,title"), "a.log", "reads .jsonl"),
        (("a.txt", b"id,title"), "", "nothing to read in this folder"),
        (("a.jsonl", b"\n\n"), "", "no documents"),
        (("a.csv", b""), "", "no documents"),
        (("a.jsonl", b"\n\n"), "a.jsonl", "no documents in it"),
        (("a.csv", b"id,title\n"), "a.csv", "no documents in it"),
        (("a.jsonl", b"{\n  'a': 1\n}"), "a.jsonl", "none of its first rows is a JSON object"),
        (
            ("a.jsonl", b'{"id": 1, "titel": "x"}'),
            "a.jsonl",
            "a.jsonl: no column 'title' .* did you mean 'titel'",
        ),
        (
            ("a.jsonl", b'{"key": 1, "title": "x"}'),
            "a.jsonl",
            "no column 'id' .*input.id_column=null",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, config, make, pattern, message) -> None:
    (tmp_path / "in").mkdir()
    if make is not None:
        (tmp_path / "in" / make[0]).write_bytes(make[1])
    with pytest.raises(InputError, match=message):
        plan(config(str(tmp_path / "in" / pattern)))


def kept(run) -> Plan:
    """Plans as a session does."""
    planned = plan(run, run.output.path)
    planned.keep(run.output.path)
    return planned


def test_a_plan_is_kept_without_the_right_to_delete_the_one_before(
    config, tmp_path, monkeypatch
) -> None:
    run = config(str(tmp_path / "*.jsonl"))
    write(tmp_path / "a.jsonl", b'{"id": "a", "title": "A"}')
    kept(run)
    write(tmp_path / "b.jsonl", b'{"id": "b", "title": "B"}')
    monkeypatch.setattr(storage, "delete_folder", Mock(side_effect=PermissionError("forbidden")))
    assert ids(kept(run), run) == ["a", "b"]
    assert storage.delete_folder.called


def test_a_plan_that_a_killed_session_did_not_complete_is_removed(
    config, tmp_path, monkeypatch
) -> None:
    run = config(str(tmp_path / "*.jsonl"))
    plans = tmp_path / "out/plan"
    write(tmp_path / "a.jsonl", b'{"id": "a", "title": "A"}')
    killed = plan(run, run.output.path)
    with monkeypatch.context() as killer:
        killer.setattr(records, "write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.keep(run.output.path)
    assert [path.name for path in plans.iterdir()] == [killed.totals.id]
    first = kept(run)
    assert [path.name for path in plans.iterdir() if path.is_dir()] == [first.totals.id]
    (plans / "0123456789ab").mkdir()
    (plans / "0123456789ab/000000.parquet").touch()
    assert kept(run).totals.id == first.totals.id
    assert [path.name for path in plans.iterdir() if path.is_dir()] == [first.totals.id]
    assert ids(kept(run), run) == ["a"]


def ids(planned: Plan, run) -> list[str]:
    return [document.id for unit in planned for document in read_unit(unit, run)]


def write_many(path, count: int):
    """Documents of different lengths, in row groups of 30, or in lines with blank ones between
    some.
    """
    rows = [{"id": str(i), "title": "ü" * (1 + i * 7 % 40)} for i in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
        return path
    text = "".join(
        json.dumps(row, ensure_ascii=False) + "\n" * (1 + i % 50 // 49)
        for i, row in enumerate(rows)
    )
    return write(path, text.encode())


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz", "a.parquet", "estimated.jsonl"])
def large(request, tmp_path, config, monkeypatch):
    """1,610 documents in units of 100."""
    if request.param == "estimated.jsonl":
        monkeypatch.setattr(split, "HEAD_BYTES", 4000)
    return config(str(write_many(tmp_path / request.param, 1610)), unit_documents=100)


def test_the_last_units_are_smaller_and_hold_every_document_once(large) -> None:
    run, full_units, planned = large, plan(large), plan(large, large.output.path)
    assert ids(planned, run) == [str(i) for i in range(1610)]
    before, after = list(full_units), list(planned)
    cut = len(before) // 8
    assert after[: len(before) - cut] == before[: len(before) - cut]
    pieces = after[len(before) - cut :]
    assert len(pieces) == sum(4 if unit.expected >= 64 else 1 for unit in before[-cut:]) > cut
    assert max(unit.expected for unit in pieces) <= 25
    first, second = ((one.documents, one.bytes, one.exact) for one in (planned, full_units))
    assert (first, planned.exact) == (second, "estimated" not in str(run.input.path))
    assert all(unit.rows in (None, len(read_unit(unit, run))) for unit in planned)
    assert (len({unit.id for unit in planned}), list(plan(run, run.output.path))) == (
        planned.units,
        after,
    )


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([20] * 5, [2, 1, 1, 1]),
        ([97, 1, 1, 1], [1, 3]),
        ([15] * 4, [4]),  # too few documents
    ],
)
def test_a_unit_of_several_files_is_cut_between_them(
    tmp_path, config, sizes: list[int], pieces: list[int]
) -> None:
    for i in range(7):
        write_jsonl(tmp_path / f"in/a{i}.jsonl", ["a"] * 100)
    for i, size in enumerate(sizes):
        write_jsonl(tmp_path / f"in/b{i}.jsonl", ["b"] * size)
    run = config(str(tmp_path / "in"), unit_documents=100)
    planned = plan(run, run.output.path)
    assert [len(unit.parts) for unit in planned] == [1] * 7 + pieces
    assert sorted(ids(planned, run)) == sorted(ids(plan(run), run))


def test_units_of_an_earlier_session_stay_as_they_are(tmp_path, config, monkeypatch) -> None:
    run = config(str(tmp_path / "in"), unit_documents=100)
    (tmp_path / "in").mkdir()
    write_many(tmp_path / "in/a.jsonl", 1600)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "_TAIL_UNITS", 0)
        first = list(kept(run))
    assert list(plan(run, run.output.path)) == first
    write_many(tmp_path / "in/b.jsonl", 800)
    second = kept(run)
    assert ([unit.expected for unit in second], list(second)[:16]) == (
        [100] * 16 + [100] * 7 + [25] * 4,
        first,
    )
    write_many(tmp_path / "in/c.jsonl", 100)  # one unit: no eighth of it
    assert list(plan(run, run.output.path))[:27] == list(second)


def test_objects_that_were_taken_apart_are_not_cut(tmp_path, config) -> None:
    run = config(str(tmp_path / "in"), unit_documents=180)
    for i in range(20):
        write_jsonl(tmp_path / f"in/{i:02d}.jsonl", ["a"] * 90)
    planned = kept(run)
    assert {len(unit.parts) for unit in planned} == {1, 2}
    singles = take_apart(
        run.output.path,
        planned,
        [unit for unit in planned if len(unit.parts) > 1],
        run.fingerprint(),
    )
    assert {unit.id for unit in singles} <= {unit.id for unit in plan(run, run.output.path)}


@pytest.mark.parametrize(
    "change", [lambda file: file.write_text("{}\n"), lambda file: file.unlink()]
)
def test_a_file_that_changes_before_it_is_cut_is_left_whole(
    tmp_path, config, monkeypatch, change
) -> None:
    for i in range(8):
        write_jsonl(tmp_path / f"in/{i}.jsonl", ["a"] * 100)
    run, cut = config(str(tmp_path / "in"), unit_documents=100), planner._cut

    def change_and_cut(*arguments):
        change(tmp_path / "in/7.jsonl")
        return cut(*arguments)

    monkeypatch.setattr(planner, "_cut", change_and_cut)
    assert plan(run, run.output.path).units == 8


def test_no_more_than_the_tail_is_held_in_memory(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr(planner, "_TAIL_UNITS", 3)
    write_many(tmp_path / "a.parquet", 8000)
    run = config(str(tmp_path / "a.parquet"), unit_documents=100)
    assert [unit.expected for unit in plan(run, run.output.path)] == [100] * 77 + [25] * 12
    monkeypatch.setattr(planner, "_TAIL_PARTS", 2)
    assert [unit.expected for unit in plan(run, run.output.path)] == [100] * 78 + [25] * 8


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
    monkeypatch.setattr(
        planner,
        "inspect",
        lambda item, *rest: names.append(item.name) or split.inspect(item, *rest),
    )
    return names


def test_small_files_share_units_and_large_ones_are_split(run) -> None:
    planned = plan(run)
    assert shape(planned) == [["d.jsonl"]] * 3 + [["a.jsonl", "b.jsonl", "c.jsonl"], ["e.jsonl"]]
    assert (planned.units, planned.documents, planned.exact) == (5, 36, True)
    assert planned.bytes == sum(p.stat().st_size for p in Path(run.input.path).iterdir())  # type: ignore[arg-type]
    assert (
        len({(d.source, d.fields["title"]) for unit in planned for d in read_unit(unit, run)}) == 36
    )


def test_the_same_input_is_not_read_again_but_for_other_sizes_of_units(
    run, tmp_path, config, inspected
) -> None:
    first = kept(run)
    assert len(inspected) == 5
    again = plan(run, run.output.path)
    assert (len(inspected), [u.id for u in again]) == (5, [u.id for u in first])
    assert (again.units, again.documents, again.bytes, again.exact) == (5, 36, first.bytes, True)
    assert list(plan(run)) == list(again)  # and it is what a fresh one would be
    inspected.clear()
    assert (
        plan(config(str(tmp_path / "in"), unit_documents=5), run.output.path).units,
        len(inspected),
    ) == (8, 5)


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
    assert {u.id for u in planned} & set(first) == {
        i for i, u in first.items() if u.name == "d.jsonl"
    }
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
    first = kept(run)
    (shared,) = [u for u in first if len(u.parts) > 1]
    before, singles = first.units, take_apart(run.output.path, first, [shared], run.fingerprint())
    assert stored(run.output.path).units == first.units == before + len(singles) - 1 > before
    planned = kept(run)
    assert {u.id for u in singles} < {u.id for u in planned}
    assert all(len(parts) == 1 for parts in shape(planned))
    assert (planned.documents, list(plan(run, run.output.path))) == (36, list(planned))


def test_a_plan_that_is_torn_is_made_again_and_a_chunk_that_is_gone_is_named(run, tmp_path) -> None:
    chunk = tmp_path / "out/plan" / kept(run).totals.id / "000000.parquet"
    chunk.write_bytes(chunk.read_bytes()[:50])
    with pytest.raises(
        RunError, match=r"000000.parquet: a part of the plan cannot be read.*delete"
    ):
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


def test_a_name_that_is_no_text_is_refused(tmp_path, config) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["a"])
    with open(os.fsencode(tmp_path / "in") + b"/\xff.jsonl", "wb") as file:
        file.write(b'{"id": 1, "title": "x"}')
    with pytest.raises(InputError, match="name is not UTF-8; rename"):
        plan(config(str(tmp_path / "in")))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_objects(tmp_path, config, monkeypatch) -> None:
    line, opened = b'{"id": "1", "title": "t"}\n', storage.open_read
    monkeypatch.setattr("raypd.dataset.plan._CHUNK_PARTS", 200)
    monkeypatch.setattr(planner, "_TAIL_PARTS", 200)
    monkeypatch.setattr(
        storage,
        "open_read",
        lambda p, *a, **k: io.BytesIO(line) if "://" in p else opened(p, *a, **k),
    )

    def peaks(count: int) -> list[int]:
        """Bytes at most while so many objects are planned, and while they are compared with the
        stored plan.
        """
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
