"""Planning: what the input is cut into, the ids, and what is refused before anything starts."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from tests.runs import write_jsonl

ROWS = [{"id": f"d{i}", "title": f"title {i} ü"} for i in range(25)]


def lines(end: str = "\n", last: bool = True) -> bytes:
    text = end.join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    return (text + (end if last else "")).encode()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(
        gzip.compress(data) if path.suffix == ".gz" else zstandard.compress(data) if path.suffix == ".zst" else data
    )
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_jsonl_is_cut_and_read_back(tmp_path, config, name, end, last) -> None:
    run = config(str(write(tmp_path / name, lines(end, last))))
    units = list(plan(run))
    read = [read_unit(unit, run) for unit in units]
    found = [d for documents in read for d in documents]
    assert [(d.id, d.fields["title"]) for d in found] == [(r["id"], r["title"]) for r in ROWS]
    assert [len(documents) for documents in read] == [u.rows for u in units] == [10, 10, 5]
    assert all([d.index for d in documents] == [*range(len(documents))] for documents in read)
    text = lines(end, last)
    assert all(text[d.place :].startswith(f'{{"id": "{d.id}"'.encode()) for d in found)
    assert {d.source for d in found} == {name}
    assert not any(d.error for d in found)


def test_zstd_of_several_frames(tmp_path, config) -> None:
    half = len(lines()) // 2
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(lines()[:half]) + zstandard.compress(lines()[half:]))
    run = config(str(path))
    assert [d.id for u in plan(run) for d in read_unit(u, run)] == [r["id"] for r in ROWS]


@pytest.mark.parametrize("groups", [3, 10, 100])
def test_parquet_is_cut_by_rows_across_row_groups(tmp_path, config, groups) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=groups)
    run = config(str(path))
    units = list(plan(run))
    assert [(u.start, u.rows) for u in units] == [(0, 10), (10, 10), (20, 5)]
    assert [d.id for u in units for d in read_unit(u, run)] == [r["id"] for r in ROWS]


def test_ids_are_the_same_wherever_the_folder_lies_and_change_with_the_content(tmp_path, config) -> None:
    write_jsonl(tmp_path / "one/x/a.jsonl", ["a"] * 15)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first, second = list(plan(config(str(tmp_path / "one")))), list(plan(config(str(tmp_path / "two"))))
    assert [u.id for u in first] == [u.id for u in second]
    assert first[0].id.startswith("x-a.jsonl-000000000000-")
    write_jsonl(tmp_path / "two/x/a.jsonl", ["b"] * 15)
    assert not {u.id for u in first} & {u.id for u in plan(config(str(tmp_path / "two")))}
    assert not {u.id for u in first} & {u.id for u in plan(config(str(tmp_path / "one"), text_columns=["id"]))}


def test_a_list_of_files_folders_and_globs_reads_each_file_once(tmp_path, config) -> None:
    for name in ("f/a.jsonl", "f/b.jsonl", "g/a.jsonl"):
        write_jsonl(tmp_path / name, ["a", "b"])
    (tmp_path / "f/_SUCCESS").touch()
    (tmp_path / "f/notes.txt").touch()
    run = config([str(tmp_path / "f"), str(tmp_path / "f/*.jsonl"), str(tmp_path / "g/a.jsonl")])
    (unit,) = plan(run)
    assert [part.name for part in unit.parts] == ["a.jsonl", "b.jsonl", "a.jsonl#3"]
    assert [d.source for d in read_unit(unit, run)] == [part.name for part in unit.parts for _ in range(2)]


def test_empty_files_hold_no_units(tmp_path, config) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="no documents"):
        plan(config(str(tmp_path / "in")))
    write_jsonl(tmp_path / "in/b.jsonl", ["a"])
    assert [u.name for u in plan(config(str(tmp_path / "in")))] == ["b.jsonl"]


def test_columns_may_be_missing_in_some_lines(tmp_path, config) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "title": "a"}\n{"id": 2}\nnot json\n')
    assert sum(u.rows for u in plan(config(str(path)))) == 3


@pytest.mark.parametrize(
    ("make", "pattern", "message"),
    [
        (None, "*.jsonl", "no file matches"),
        (None, "a.jsonl", "no such file"),
        (("b.jsonl", b'{"id":1,"title":"x"}'), "a.jsonl", "did you mean .*b.jsonl"),
        (("a.csv", b"id,title"), "a.csv", "reads .jsonl"),
        (("a.csv", b"id,title"), "", "nothing to read in this folder"),
        (("a.jsonl", b"{\n  'a': 1\n}"), "a.jsonl", "none of the first lines is a JSON object"),
        (("a.jsonl", b'{"id": 1, "titel": "x"}'), "a.jsonl", "a.jsonl: no column 'title' .* did you mean 'titel'"),
        (("a.jsonl", b'{"key": 1, "title": "x"}'), "a.jsonl", "no column 'id' .*input.id_column=null"),
        (("a.parquet", b"PAR1 no footer"), "a.parquet", "a.parquet: cannot be read as Parquet"),
        (("a.jsonl.gz", gzip.compress(lines() * 9)[:-20]), "a.jsonl.gz", "damaged or cut short"),
        (("a.jsonl.gz", b"plain text"), "a.jsonl.gz", "cannot be read as gz"),
        (("a.jsonl.zst", zstandard.compress(lines() * 9)[:-3]), "a.jsonl.zst", "damaged or cut short"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, config, make, pattern, message) -> None:
    (tmp_path / "in").mkdir()
    if make is not None:
        (tmp_path / "in" / make[0]).write_bytes(make[1])
    with pytest.raises(InputError, match=message):
        plan(config(str(tmp_path / "in" / pattern)))


def test_parquet_without_a_column_is_refused(tmp_path, config) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "titles": ["x"]}), path)
    with pytest.raises(InputError, match=r"a.parquet: no column 'title' .*did you mean 'titles'\?"):
        plan(config(str(path)))


def test_other_storage_is_refused(config) -> None:
    with pytest.raises(InputError, match="gs:// is not a storage"):
        plan(config("gs://bucket/a.jsonl"))
