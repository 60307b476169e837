"""Planning: units and their ids, input that is refused, and resuming from a stored plan."""

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
from raypd.dataset import inspection, planner
from raypd.dataset.formats import json_lines
from raypd.dataset.plan import Plan, stored, take_apart
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError, RunError
from raypd.run import records
from tests.runs import write_jsonl

ROWS = [{"id": f"d{i}", "title": f"title {i} ü"} for i in range(25)]


def lines(end: str = "\n", last: bool = True) -> bytes:
    """Return ROWS as JSON Lines.

    Args:
        end: What ends a line.
        last: Whether the last line has an end, too.
    """
    text = end.join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    if last:
        text += end
    return text.encode()


def write(path, data: bytes):
    """Write a file, compressed as its name says; a .zst has two frames."""
    if path.suffix == ".zst":
        middle = len(data) // 2
        first_frame = zstandard.compress(data[:middle])
        second_frame = zstandard.compress(data[middle:])
        data = first_frame + second_frame
    elif path.suffix == ".gz":
        data = gzip.compress(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_json_lines_are_cut_into_units_and_every_line_is_read(
    tmp_path, config, name, end, last
) -> None:
    text = lines(end, last)
    run = config(str(write(tmp_path / name, text)))
    units = list(plan(run))
    documents_by_unit = [read_unit(unit, run) for unit in units]
    documents = [document for unit in documents_by_unit for document in unit]
    expected = [(row["id"], row["title"], name, None) for row in ROWS]
    assert [(d.id, d.fields["title"], d.source, d.error) for d in documents] == expected
    assert [unit.rows for unit in units] == [10, 10, 5]
    assert [len(unit) for unit in documents_by_unit] == [10, 10, 5]
    assert [d.index for d in documents] == [*range(10), *range(10), *range(5)]
    for document in documents:
        line_start = f'{{"id": "{document.id}"'.encode()
        assert text[document.row :].startswith(line_start)


def test_unit_ids_depend_on_the_content_and_not_on_the_folder(tmp_path, config) -> None:
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
    run = config(
        [
            str(tmp_path / "f"),
            str(tmp_path / "f/*.jsonl"),
            str(tmp_path / "g/a.jsonl"),
        ]
    )
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
def test_input_that_cannot_be_planned_is_refused(tmp_path, config, make, pattern, message) -> None:
    (tmp_path / "in").mkdir()
    if make is not None:
        (tmp_path / "in" / make[0]).write_bytes(make[1])
    with pytest.raises(InputError, match=message):
        plan(config(str(tmp_path / "in" / pattern)))


def kept(run) -> Plan:
    """Plan and store the plan, as a session does."""
    planned = plan(run, run.output.path)
    planned.keep(run.output.path)
    return planned


def test_a_plan_is_stored_without_the_right_to_delete_the_earlier_one(
    config, tmp_path, monkeypatch
) -> None:
    run = config(str(tmp_path / "*.jsonl"))
    write(tmp_path / "a.jsonl", b'{"id": "a", "title": "A"}')
    kept(run)
    write(tmp_path / "b.jsonl", b'{"id": "b", "title": "B"}')
    monkeypatch.setattr(storage, "delete_folder", Mock(side_effect=PermissionError("forbidden")))
    assert ids(kept(run), run) == ["a", "b"]
    assert storage.delete_folder.called


def test_the_incomplete_plan_of_a_killed_session_is_removed(config, tmp_path, monkeypatch) -> None:
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
    """Write documents of different lengths: Parquet in row groups of 30, or JSON Lines with some
    blank lines.
    """
    rows = [{"id": str(i), "title": "ü" * (1 + i * 7 % 40)} for i in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
        return path
    text = ""
    for i, row in enumerate(rows):
        text += json.dumps(row, ensure_ascii=False) + "\n"
        if i % 50 == 49:
            text += "\n"
    return write(path, text.encode())


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz", "a.parquet", "estimated.jsonl"])
def large(request, tmp_path, config, monkeypatch):
    """1,610 documents in units of 100."""
    if request.param == "estimated.jsonl":
        monkeypatch.setattr(json_lines, "HEAD_BYTES", 4000)
    return config(str(write_many(tmp_path / request.param, 1610)), unit_documents=100)


def test_the_last_units_are_smaller_and_hold_every_document_once(large) -> None:
    run = large
    full_plan = plan(run)
    planned = plan(run, run.output.path)
    assert ids(planned, run) == [str(i) for i in range(1610)]
    full_units = list(full_plan)
    units = list(planned)
    tail = len(full_units) // 8
    body = len(full_units) - tail
    assert units[:body] == full_units[:body]
    expected_pieces = 0
    for unit in full_units[body:]:
        expected_pieces += 4 if unit.expected >= 64 else 1
    pieces = units[body:]
    assert len(pieces) == expected_pieces
    assert len(pieces) > tail
    assert max(unit.expected for unit in pieces) <= 25
    assert planned.documents == full_plan.documents
    assert planned.bytes == full_plan.bytes
    assert planned.exact == full_plan.exact
    assert planned.exact == ("estimated" not in str(run.input.path))
    for unit in units:
        assert unit.rows in (None, len(read_unit(unit, run)))
    assert len({unit.id for unit in units}) == planned.units
    assert list(plan(run, run.output.path)) == units


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
    assert [unit.expected for unit in second] == [100] * 16 + [100] * 7 + [25] * 4
    assert list(second)[:16] == first
    # A single new unit has no eighth that could be cut.
    write_many(tmp_path / "in/c.jsonl", 100)
    assert list(plan(run, run.output.path))[:27] == list(second)


def test_files_that_may_share_no_unit_are_not_cut_at_the_end(tmp_path, config) -> None:
    run = config(str(tmp_path / "in"), unit_documents=180)
    for i in range(20):
        write_jsonl(tmp_path / f"in/{i:02d}.jsonl", ["a"] * 90)
    planned = kept(run)
    assert {len(unit.parts) for unit in planned} == {1, 2}
    shared = [unit for unit in planned if len(unit.parts) > 1]
    singles = take_apart(run.output.path, planned, shared, run.fingerprint())
    assert {unit.id for unit in singles} <= {unit.id for unit in plan(run, run.output.path)}


@pytest.mark.parametrize(
    "change", [lambda file: file.write_text("{}\n"), lambda file: file.unlink()]
)
def test_a_file_that_changes_before_its_unit_is_cut_keeps_the_unit(
    tmp_path, config, monkeypatch, change
) -> None:
    for i in range(8):
        write_jsonl(tmp_path / f"in/{i}.jsonl", ["a"] * 100)
    run = config(str(tmp_path / "in"), unit_documents=100)
    cut = json_lines.JsonLines.cut

    def change_and_cut(*arguments):
        change(tmp_path / "in/7.jsonl")
        return cut(*arguments)

    monkeypatch.setattr(json_lines.JsonLines, "cut", change_and_cut)
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
    """The names of the files that planning looks into."""
    names: list[str] = []

    def inspect(item, *arguments):
        names.append(item.name)
        return inspection.inspect(item, *arguments)

    monkeypatch.setattr(planner, "inspect", inspect)
    return names


def test_small_files_share_units_and_large_ones_are_split(run) -> None:
    planned = plan(run)
    assert shape(planned) == [["d.jsonl"]] * 3 + [["a.jsonl", "b.jsonl", "c.jsonl"], ["e.jsonl"]]
    assert planned.units == 5
    assert planned.documents == 36
    assert planned.exact
    assert planned.bytes == sum(file.stat().st_size for file in Path(run.input.path).iterdir())
    titles = set()
    for unit in planned:
        titles |= {(d.source, d.fields["title"]) for d in read_unit(unit, run)}
    assert len(titles) == 36


def test_unchanged_files_are_looked_into_again_only_if_units_get_another_size(
    run, tmp_path, config, inspected
) -> None:
    first = kept(run)
    assert len(inspected) == 5
    again = plan(run, run.output.path)
    assert len(inspected) == 5
    assert [u.id for u in again] == [u.id for u in first]
    assert again.units == 5
    assert again.documents == 36
    assert again.bytes == first.bytes
    assert again.exact
    assert list(plan(run)) == list(again)
    inspected.clear()
    assert plan(config(str(tmp_path / "in"), unit_documents=5), run.output.path).units == 8
    assert len(inspected) == 5


def test_new_files_become_units_of_their_own(run, tmp_path, inspected) -> None:
    first = {u.id for u in kept(run)}
    write_jsonl(tmp_path / "in/aa.jsonl", ["new"] * 2)
    write_jsonl(tmp_path / "in/f.jsonl", ["new"])
    inspected.clear()
    planned = kept(run)
    assert inspected == ["aa.jsonl", "f.jsonl"]
    assert first < {u.id for u in planned}
    assert [parts for parts in shape(planned) if "aa.jsonl" in parts] == [["aa.jsonl", "f.jsonl"]]
    assert planned.documents == 39
    assert planned.changes == ""
    folders = [p for p in (tmp_path / "out/plan").iterdir() if p.is_dir() and any(p.iterdir())]
    assert [p.name for p in folders] == [planned.totals.id]


def test_replaced_and_deleted_files_are_named_and_the_units_of_others_kept(
    run, tmp_path, inspected
) -> None:
    first = {u.id: u for u in kept(run)}
    write_jsonl(tmp_path / "in/b.jsonl", ["other"] * 4)
    (tmp_path / "in/e.jsonl").unlink()
    inspected.clear()
    planned = plan(run, run.output.path)
    assert planned.changes == "b.jsonl was replaced, e.jsonl is gone"
    # These three shared a unit.
    assert inspected == ["a.jsonl", "b.jsonl", "c.jsonl"]
    units_of_d = {id for id, unit in first.items() if unit.name == "d.jsonl"}
    assert {unit.id for unit in planned} & set(first) == units_of_d
    assert planned.documents == 34


def test_a_touched_or_moved_input_is_not_planned_again(run, tmp_path, config, inspected) -> None:
    first = kept(run)
    for file in (tmp_path / "in").iterdir():
        os.utime(file, (1, 1))
    shutil.move(tmp_path / "in", tmp_path / "moved")
    inspected.clear()
    planned = plan(config(str(tmp_path / "moved")), run.output.path)
    assert inspected == []
    assert sorted(u.id for u in planned) == sorted(u.id for u in first)
    assert sum(len(read_unit(u, run)) for u in planned) == 36


def test_damaged_files_are_looked_into_again(run, tmp_path, inspected) -> None:
    (tmp_path / "in/cc.parquet").write_bytes(b"PAR1")
    first = kept(run)
    assert [u.name for u in first.damaged()] == ["cc.parquet"]
    assert first.units == 5
    assert first.totals.damaged == 1
    assert first.documents == 36
    inspected.clear()
    assert plan(run, run.output.path).totals.damaged == 1
    assert inspected == ["cc.parquet"]


def test_units_that_were_taken_apart_stay_apart(run) -> None:
    first = kept(run)
    (shared,) = [u for u in first if len(u.parts) > 1]
    before = first.units
    singles = take_apart(run.output.path, first, [shared], run.fingerprint())
    assert len(singles) > 1
    assert first.units == before + len(singles) - 1
    assert stored(run.output.path).units == first.units
    planned = kept(run)
    assert {u.id for u in singles} < {u.id for u in planned}
    assert all(len(parts) == 1 for parts in shape(planned))
    assert planned.documents == 36
    assert list(plan(run, run.output.path)) == list(planned)


def test_a_damaged_chunk_is_named_and_an_incomplete_plan_is_made_again(run, tmp_path) -> None:
    chunk = tmp_path / "out/plan" / kept(run).totals.id / "000000.parquet"
    chunk.write_bytes(chunk.read_bytes()[:50])
    with pytest.raises(
        RunError, match=r"000000.parquet: a part of the plan cannot be read.*delete"
    ):
        list(plan(run, run.output.path))
    (tmp_path / "out/plan/plan.json").write_text("{")
    assert stored(run.output.path) is None
    assert plan(run, run.output.path).units == 5


def test_a_plan_of_many_chunks_is_read_in_order(run, monkeypatch) -> None:
    monkeypatch.setattr("raypd.dataset.plan._CHUNK_PARTS", 2)
    planned = kept(run)
    assert planned.totals.chunks == 3
    loaded = stored(run.output.path)
    assert loaded is not None
    assert list(loaded) == list(planned)
    assert list(loaded) == list(plan(run))


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path, config) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["a"])
    with open(os.fsencode(tmp_path / "in") + b"/\xff.jsonl", "wb") as file:
        file.write(b'{"id": 1, "title": "x"}')
    with pytest.raises(InputError, match="name is not UTF-8; rename"):
        plan(config(str(tmp_path / "in")))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_files(tmp_path, config, monkeypatch) -> None:
    line = b'{"id": "1", "title": "t"}\n'
    opened = storage.open_read
    monkeypatch.setattr("raypd.dataset.plan._CHUNK_PARTS", 200)
    monkeypatch.setattr(planner, "_TAIL_PARTS", 200)

    def open_read(path, *arguments, **keywords):
        if "://" in path:
            return io.BytesIO(line)
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(storage, "open_read", open_read)
    monkeypatch.setattr(storage, "is_folder", lambda path: False)

    def generated(first: int, count: int):
        for number in range(first, first + count):
            name = f"{number:09d}.jsonl"
            yield storage.Object(f"s3://generated/in/{name}", name, len(line), name)

    def peaks(count: int) -> list[int]:
        """Return the peak memory in bytes while so many files are planned, and while they are
        compared with the stored plan.
        """
        run = config("s3://generated/in", f"out{count}")
        sizes = []
        for first in (0, 1):
            files = generated(first, count)
            monkeypatch.setattr(storage, "find", lambda path, on_hidden, files=files: files)
            tracemalloc.start()
            planned = plan(run, run.output.path)
            sizes.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert planned.documents == count
            assert sum(len(unit.parts) for unit in planned) == count
            planned.keep(run.output.path)
        return sizes

    # The first plan fills caches and imports modules.
    peaks(500)
    for few, many in zip(peaks(1000), peaks(6_000), strict=True):
        assert many < 1.3 * few
