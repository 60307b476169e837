"""Compaction: few table files in place of many units, and readers see the one or the other."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, convert_to_deltalake
from pyiceberg.catalog.memory import InMemoryCatalog
from typer.testing import CliRunner

from raypd import storage
from raypd.cli.main import app
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import (
    CommittedUnits,
    compacted,
    compaction,
    planner,
    rows_of,
    summaries,
    table_folder,
    table_writer,
    unit_rows,
    writer,
)
from raypd.errors import ConfigError, RunError
from raypd.report import data as report_data, review
from raypd.run import Usage, held, layout
from raypd.verify import dead_letters, export
from raypd.verify.verification import verify
from tests.runs import FAKE, TITLES, extraction, run_config, run_here, with_keys, write_rows

DOCUMENTS = 60
UNIT_DOCUMENTS = 5
# A run has 12 units, which become a few table files of several units each.
SMALL_MEBIBYTE = 6 << 10
LAMP = [
    {"name": "Brand"},
    {"name": "Power", "type": "number"},
    {"name": "Count", "type": "integer"},
    {"name": "Lit", "type": "boolean"},
    {"name": "Since", "type": "date"},
]


def make_config(folder: Path, root: str, columns: str = "typed", **keys: Any) -> RunConfig:
    return run_config(
        extraction(lamp=LAMP),
        f"{folder}/in/*.jsonl",
        root,
        input=TITLES,
        output={"columns": columns, "target_file_mb": 1, **keys},
        model=FAKE,
        # As the fixtures of this process reach the storage.
        storage=storage.default.settings.model_dump(),
        cluster={"address": "local", "unit_documents": UNIT_DOCUMENTS, "max_workers": 1},
    )


def write_input(folder: Path, name: str, first_id: int, count: int) -> None:
    rows = []
    for number in range(first_id, first_id + count):
        title = f"Lamp {number} of {number % 7} W"
        # Of every unit, one document fails.
        rows.append({"id": f"{number:04d}", "title": "" if number % 10 == 3 else title})
    write_rows(folder / "in" / name, rows)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table files of some kilobytes: a target of n is n times SMALL_MEBIBYTE."""
    monkeypatch.setattr(compaction, "_MEBIBYTE", SMALL_MEBIBYTE)
    monkeypatch.setattr(table_writer, "_ROW_GROUP_BYTES", 1000)
    monkeypatch.setattr(compacted, "_STREAM_ROWS", 7)


OTHER_CLOUDS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gs", "az")]


# One test tries every kind of storage in each `make test`, and the others only where they are slow.
@pytest.fixture(params=["local", "s3", *OTHER_CLOUDS])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "out")
    fixture = {"s3": "bucket"}.get(request.param, request.param)
    root = request.getfixturevalue(fixture)
    return f"{root}/out"


@pytest.fixture
def run(tmp_path: Path, output: str) -> RunConfig:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    config = make_config(tmp_path, output)
    run_here(config)
    return config


def run_open(config: RunConfig) -> None:
    """Run the units that are not committed yet, as the driver does."""
    done = writer.committed(config.output.path)
    plan = planner.plan(config, config.output.path)
    run_here(config, planned=[unit for unit in plan if unit.id not in done])


def compact(config: RunConfig) -> compaction.Compacted:
    return compaction.compact_run(config, config.output.path)


def forget() -> None:
    """Forget what this process knows of table files, as another process does."""
    compacted._tables.clear()


def ids(output: str) -> list[str]:
    """The ids of all rows, as another process reads them."""
    forget()
    return [row["id"] for row in rows_of(output)]


def listed_ids(output: str) -> list[str]:
    """The ids that other programs see: in the listed table files, or in the units."""
    paths = []
    if storage.exists(storage.join(output, layout.CURRENT)):
        paths = storage.read(storage.join(output, layout.CURRENT)).decode().split()
    else:
        paths = [item.path for item in storage.walk(storage.join(output, layout.UNITS))]
    found = []
    for path in paths:
        with storage.open_file(path) as file:
            found += pq.read_table(file)["id"].to_pylist()
    return found


def all_ids(count: int = DOCUMENTS) -> list[str]:
    return [f"{number:04d}" for number in range(count)]


def rounded(usage: Usage) -> Usage:
    """Round the seconds of units, whose sum depends a little on the order in which they come."""
    return {
        key: {kind: round(value, 6) for kind, value in counts.items()}
        for key, counts in usage.items()
    }


def everything_read(config: RunConfig, tmp_path: Path) -> dict[str, Any]:
    """What the commands say about a run."""
    output = config.output.path
    forget()
    endpoint = config.storage.requests.endpoint_url
    overrides = [f"storage.options.endpoint_url={endpoint or 'null'}"]
    totals = summaries.totals(summaries.read(CommittedUnits(output)))
    export.export(output, str(tmp_path / "answers.csv"), overrides)
    verification = verify(output, config)
    letters = pa.concat_tables(dead_letters.letters(output)).to_pylist()
    found, documents = unit_rows.with_ids(output, ["0004", "0017", "none"])
    report = report_data.load(output, overrides)
    reviewed, _, _ = review._chosen_rows(output, 20)
    return {
        "totals": {**vars(totals.all()), "usage": rounded(totals.all().usage)},
        "csv": (tmp_path / "answers.csv").read_text(),
        "verified": (verification.passed, verification.units, verification.found),
        "letters": sorted(letters, key=lambda row: row["id"]),
        "reasons": dead_letters.summarize(output).reasons,
        "with_ids": sorted(row["id"] for row in found),
        "documents": documents,
        "units": set(writer.committed(output)),
        "report": (report.units.committed, report.units.total("failed"), report.sample.documents),
        "review": sorted(reviewed),
    }


@pytest.mark.parametrize(
    "output", ["local", "s3", pytest.param("gs", marks=pytest.mark.slow), "az"], indirect=True
)
def test_every_reader_sees_the_same_before_and_after(run, output, tmp_path) -> None:
    before = everything_read(run, tmp_path)
    assert before["verified"] == (True, 12, DOCUMENTS)
    result = compact(run)
    files = result.compaction.files
    assert result.units == 12
    assert sum(file.units for file in files) == 12
    assert sum(file.rows for file in files) == DOCUMENTS
    assert 1 < len(files) < result.units
    after = everything_read(run, tmp_path)
    assert after == before
    # Each unit is read alone, too.
    for unit in planner.plan(run, output):
        summary, rows = writer.read_table(output, unit.id)
        assert summary.unit == unit.id
        assert len(rows) == summary.documents == UNIT_DOCUMENTS
    # In the order of the input, and nothing else is left.
    assert ids(output) == listed_ids(output) == all_ids()
    assert list(storage.walk(writer.units_folder(output))) == []
    assert storage.names(storage.join(output, layout.SUMMARIES)) == []
    assert table_folder(output) == storage.join(output, layout.TABLE, result.compaction.id)


@pytest.mark.parametrize("output", ["local"], indirect=True)
def test_the_units_of_a_run_of_an_earlier_version_lack_columns(run, output) -> None:
    compact(run)
    for path in Path(output, layout.TABLE_UNITS).rglob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["retriable"]), path)
    forget()
    units = CommittedUnits(output)
    assert summaries.totals(summaries.read(units)).total("documents") == DOCUMENTS
    assert units.table is not None
    assert {summary.retriable for summary in summaries.some(output, 3)} == {0}


def test_a_second_compaction_and_a_resume_do_nothing(run, output) -> None:
    compact(run)
    before = {item.path: item.stamp for item in storage.walk(output)}
    result = compact(run)
    assert result.units == 0
    assert result.describe().startswith("already compacted: 12 units in ")
    driver.run_extract(run)
    after = {item.path: item.stamp for item in storage.walk(output)}
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    names = {path.rpartition("/")[2] for path in changed}
    assert names <= {"lease.json", ".lease.json.lock", "manifest.json"}
    assert not [path for path in changed if "/table" in path or "/units/" in path]


def test_other_programs_read_and_prune_typed_columns(tmp_path) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    config = make_config(tmp_path, output)
    run_here(config)
    units = ds.dataset(writer.units_folder(output)).to_table().sort_by("id")
    compact(config)
    paths = (tmp_path / "out" / layout.CURRENT).read_text().splitlines()
    folder = table_folder(output)
    assert paths == sorted(str(path) for path in Path(folder).glob("*.parquet"))
    table = ds.dataset(folder).to_table()
    assert table.equals(units.cast(table.schema))
    # DuckDB, over the list and over the folder.
    connection = duckdb.connect()
    for files in (paths, f"{folder}/*.parquet"):
        query = "SELECT count(*), count(DISTINCT id), max(Brand) FROM read_parquet($files)"
        count, distinct, brand = connection.execute(query, {"files": files}).fetchone()
        assert (count, distinct) == (DOCUMENTS, DOCUMENTS)
        assert brand == max(units["Brand"].drop_null().to_pylist())
    # Every column that is not nested has the smallest and the largest value in each row group.
    groups = 0
    for path in paths:
        footer = pq.ParquetFile(path).metadata
        for group in range(footer.num_row_groups):
            groups += 1
            for column in range(footer.num_columns):
                chunk = footer.row_group(group).column(column)
                name = chunk.path_in_schema
                assert chunk.statistics is not None, name
                assert chunk.statistics.has_null_count, name
                is_empty = chunk.statistics.null_count == chunk.num_values
                assert chunk.statistics.has_min_max or is_empty, name
                assert chunk.has_column_index, name
    assert groups > 4
    # A filter reads few of them.
    fragments = ds.dataset(folder).get_fragments(filter=ds.field("id") == "0031")
    wanted = [
        group for one in fragments for group in one.split_by_row_group(ds.field("id") == "0031")
    ]
    assert len(wanted) == 1
    read = ds.dataset(folder).to_table(filter=ds.field("id") == "0031")
    assert read["id"].to_pylist() == ["0031"]


def test_delta_and_iceberg_take_the_table_files_as_they_are(tmp_path) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    config = make_config(tmp_path, output)
    run_here(config)
    compact(config)
    paths = (tmp_path / "out" / layout.CURRENT).read_text().splitlines()
    catalog = InMemoryCatalog("test", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.products", schema=pq.read_schema(paths[0]).remove_metadata())
    table.add_files(paths)
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == all_ids()
    assert len(list(table.scan().plan_files())) == len(paths)
    # Both skip files by the statistics in their footers.
    assert len(list(table.scan(row_filter="id = '0031'").plan_files())) == 1
    convert_to_deltalake(table_folder(output))
    delta = DeltaTable(table_folder(output))
    assert sorted(delta.to_pyarrow_table()["id"].to_pylist()) == all_ids()
    actions = pa.table(delta.get_add_actions(flatten=True))
    bounds = zip(actions["min.id"].to_pylist(), actions["max.id"].to_pylist(), strict=True)
    assert sum(low <= "0031" <= high for low, high in bounds) == 1


STEPS = ("put_file", "put", "put_new", "put_if", "delete_all", "delete_folder", "delete")


def count_steps(monkeypatch: pytest.MonkeyPatch, on_step: Callable[[int, str], None]) -> None:
    """Call `on_step` before and after every change of the storage, with its number and name."""
    steps = [0]

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(storage, name)

        def step(*given: Any, **keys: Any) -> Any:
            on_step(steps[0], name)
            steps[0] += 1
            result = real(*given, **keys)
            on_step(steps[0], name)
            steps[0] += 1
            return result

        return step

    for name in STEPS:
        monkeypatch.setattr(storage, name, wrapped(name))


def test_at_every_step_readers_see_each_document_once(run, output, monkeypatch) -> None:
    seen: list[str] = []

    def check(number: int, name: str) -> None:
        if name in ("put", "put_if", "put_new") and number % 3:
            return
        seen.append(name)
        known = dict(compacted._tables)
        assert sorted(ids(output)) == all_ids()
        assert len(writer.committed(output)) == 12
        compacted._tables.clear()
        compacted._tables.update(known)

    with monkeypatch.context() as patch:
        count_steps(patch, check)
        compact(run)
    assert {"put_file", "put", "put_new", "delete_all"} <= set(seen)
    assert ids(output) == all_ids()


def test_a_listing_that_a_compaction_overtakes_is_complete(run, output, monkeypatch) -> None:
    """A reader has listed some units when all of them are compacted and deleted."""
    walk = storage.walk

    def walk_and_compact(folder: str) -> Any:
        for number, item in enumerate(walk(folder)):
            if number == 4 and folder.endswith(layout.UNITS):
                monkeypatch.setattr(storage, "walk", walk)
                compact(run)
                yield item
                return
            yield item

    monkeypatch.setattr(storage, "walk", walk_and_compact)
    assert sorted(ids(output)) == all_ids()
    assert list(walk(writer.units_folder(output))) == []


# In a process of its own: compacts the run in a folder, and kills itself at a step.
SCRIPT = f"""
import os, signal, sys
from raypd import storage
from raypd.dataset import compacted, compaction, table_writer
from raypd.run import load_run
compaction._MEBIBYTE = {SMALL_MEBIBYTE}
table_writer._ROW_GROUP_BYTES = 1000
output, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
left = [number]
real = getattr(storage, name)
def step(*given, **keys):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return real(*given, **keys)
setattr(storage, name, step)
compaction.compact_run(load_run(output, []), output)
"""


@pytest.mark.parametrize(
    ("step", "number", "is_committed"),
    [
        ("put_file", 0, False),  # nothing is stored
        ("put_file", 2, False),  # two files are
        ("put", 1, False),  # the second file is, and not what it contains
        ("put_new", 1, False),  # all files are; the first one is lease.json
        ("put", -1, True),  # not the list of files
        ("delete_all", 1, True),  # no unit is deleted
        ("delete_folder", 0, None),
    ],
)
def test_a_killed_compaction_loses_nothing_and_resumes(
    tmp_path, step, number, is_committed, monkeypatch
) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    config = make_config(tmp_path, output)
    run_here(config)
    if number < 0:
        # The last put is that of the list; every table file has one put before it.
        probe = make_config(tmp_path, str(tmp_path / "probe"))
        run_here(probe)
        number = len(compact(probe).compaction.files)
    if step == "delete_folder":
        # A compaction of an earlier session is left.
        orphan = Path(output, layout.TABLE, "20200101T000000-aaaaaa", "000000.parquet")
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(b"x")
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        output,
        step,
        str(number),
    ]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert sorted(ids(output)) == sorted(listed_ids(output)) == all_ids()
    assert verify(output, config).passed
    if is_committed is not None:
        assert Path(output, layout.COMPACTION).exists() == is_committed
    stored = {path: path.stat().st_mtime_ns for path in Path(output, layout.TABLE).rglob("0*")}
    # The same command of the run completes what was begun. Some of these units make a table file,
    # whose size is no part of what is resumed.
    driver.run_extract(with_keys(config, output={"target_file_mb": 10}))
    assert ids(output) == listed_ids(output) == all_ids()
    assert list(Path(output, layout.UNITS).rglob("*.parquet")) == []
    compaction_id = compacted.table_of(output).compaction.id
    for part in (layout.TABLE, layout.TABLE_UNITS):
        assert os.listdir(Path(output, part)) == [compaction_id]
    if step == "put_file" and number == 2:
        # What the killed session has stored was not written again.
        files = sorted(Path(output, layout.TABLE, compaction_id).iterdir())
        assert [stored[path] for path in files[:2]] == [p.stat().st_mtime_ns for p in files[:2]]
    assert verify(output, config).passed


def test_a_compaction_whose_lease_was_taken_over_commits_nothing(run, output, monkeypatch) -> None:
    @contextlib.contextmanager
    def overtaken(*arguments, **options):
        with held(*arguments, **options) as lease:
            lease.lost = "session other took over its lease"
            yield lease

    monkeypatch.setattr(compaction, "held", overtaken)
    with pytest.raises(RunError, match="session other took over its lease"):
        compact(run)
    assert compacted.table_of(output) is None
    assert sorted(listed_ids(output)) == all_ids()


def test_units_that_changed_since_a_killed_compaction_are_written_again(tmp_path) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    config = make_config(tmp_path, output)
    run_here(config)
    command = [sys.executable, "-c", SCRIPT, output, "put_file", "2"]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    # A retry replaces the object of the second unit, which is in the first table file.
    unit_id, path = sorted(writer.objects(output))[1]
    summary, rows = writer.read_table(output, unit_id, path=path)
    changed = rows.set_column(
        rows.schema.get_field_index("attempts"),
        rows.schema.field("attempts"),
        pa.array([7] * 5, pa.int32()),
    ).replace_schema_metadata(None)
    assert writer.replace_rows(output, path, changed, summary, storage.version(path))
    compact(config)
    forget()
    attempts = Counter(row["attempts"] for row in rows_of(output))
    assert attempts == {1: DOCUMENTS - 5, 7: 5}
    assert verify(output, config).passed


def test_a_run_that_grows_is_compacted_again_in_order(tmp_path, output, monkeypatch) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    config = make_config(tmp_path, output)
    run_here(config)
    compact(config)
    first = compacted.table_of(output)
    write_input(tmp_path, "a.jsonl", 100, 10)
    write_input(tmp_path, "c.jsonl", 200, 10)
    run_open(config)
    added = [f"{number:04d}" for number in [*range(100, 110), *range(200, 210)]]
    # Until the next compaction, raypd sees all units and other programs the earlier ones.
    assert sorted(ids(output)) == sorted(all_ids() + added)
    assert listed_ids(output) == all_ids()
    copied: list[str] = []
    copy = table_writer.TableWriter.copy

    def counted_copy(self: Any, partition: str, source: str, rows: pa.Table) -> None:
        copied.append(source)
        copy(self, partition, source, rows)

    monkeypatch.setattr(table_writer.TableWriter, "copy", counted_copy)
    # At the end of a run, and not only by command.
    driver.run_extract(config)
    expected = added[:10] + all_ids() + added[10:]
    assert ids(output) == listed_ids(output) == expected
    # Files that have the same units in the same order are copied.
    assert len(copied) >= len(first.compaction.files) - 1
    assert verify(output, config).passed
    table_files = [item.path for item in storage.walk(storage.join(output, layout.TABLE))]
    assert table_files == compacted.table_of(output).paths()


def test_partitions_stay_apart(tmp_path, output) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    config = make_config(tmp_path, output, partition={"date": "2026-11-20"})
    run_here(config)
    write_input(tmp_path, "a.jsonl", 100, 20)
    config = with_keys(config, output={"partition": {"date": "2026-11-21"}})
    run_open(config)
    assert len(writer.committed(output)) == 16
    compact(config)
    days = {}
    for file in compacted.table_of(output).compaction.files:
        folder, _, _ = file.name.partition("/")
        days[folder] = days.get(folder, 0) + file.rows
    assert days == {"date=2026-11-20": DOCUMENTS, "date=2026-11-21": 20}
    assert sorted(ids(output)) == sorted(all_ids() + [f"{n:04d}" for n in range(100, 120)])
    if "://" not in output:
        table = ds.dataset(table_folder(output), partitioning="hive").to_table()
        counts = Counter(map(str, table["date"].to_pylist()))
        assert counts == {"2026-11-20": DOCUMENTS, "2026-11-21": 20}
    assert verify(output, config).passed


def test_a_small_run_stays_as_it_is_unless_it_is_told_otherwise(tmp_path, monkeypatch) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    config = make_config(tmp_path, output)
    run_here(config)
    units = {item.path for item in storage.walk(writer.units_folder(output))}
    size = sum(item.size for item in storage.walk(writer.units_folder(output)))
    for target in (size // SMALL_MEBIBYTE + 1, None):
        driver.run_extract(with_keys(config, output={"target_file_mb": target}))
        assert {item.path for item in storage.walk(writer.units_folder(output))} == units
        assert table_folder(output) == writer.units_folder(output)
        assert not Path(output, layout.TABLE).exists()
    driver.run_extract(with_keys(config, output={"target_file_mb": size // SMALL_MEBIBYTE}))
    assert table_folder(output) != writer.units_folder(output)
    assert ids(output) == all_ids()


def test_without_the_right_to_delete_the_units_are_left_and_not_read(
    run, output, monkeypatch
) -> None:
    def refuse(paths: Any) -> None:
        for path in paths:
            raise storage.StorageError(f"{path}: forbidden: s3:DeleteObject")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete_all", refuse)
        result = compact(run)
    assert "could not be deleted" in result.describe()
    assert len(list(storage.walk(writer.units_folder(output)))) >= 12
    assert ids(output) == all_ids()
    assert verify(output, run).passed
    # With the right, the next start deletes them.
    driver.run_extract(run)
    assert [
        item for item in storage.walk(writer.units_folder(output)) if item.name.endswith("t")
    ] == []


def test_a_table_file_that_is_deleted_is_made_again(run, output) -> None:
    compact(run)
    table = compacted.table_of(output)
    lost = table.compaction.files[1]
    path = table.path(1)
    with storage.open_file(path) as file:
        lost_ids = pq.read_table(file)["id"].to_pylist()
    storage.put(path, b"PAR1 this is no table")
    result = verify(output, run)
    assert result.damaged.units
    assert "delete it" in result.damaged.examples[0]
    storage.delete(path)
    assert len(writer.committed(output)) == 12 - lost.units
    assert set(all_ids()) - set(ids(output)) == set(lost_ids)
    run_open(run)
    assert sorted(ids(output)) == all_ids()
    driver.run_extract(run)
    assert ids(output) == listed_ids(output) == all_ids()
    assert verify(output, run).passed


def test_what_is_no_run_is_not_compacted(tmp_path) -> None:
    write_input(tmp_path, "b.jsonl", 0, 5)
    config = make_config(tmp_path, str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no unit is committed"):
        compact(config)
    run_here(config)
    os.unlink(next(Path(tmp_path, "out", "plan").glob("*/*.parquet"), tmp_path / "in/b.jsonl"))
    write_input(tmp_path, "b.jsonl", 7, 5)
    with pytest.raises(RunError, match="1 committed units are not in the plan"):
        compact(config)
    assert ids(config.output.path) == all_ids(5)


def test_another_configuration_is_refused_in_a_compacted_folder(run, output, tmp_path) -> None:
    from raypd.run import manifest

    compact(run)
    other = make_config(tmp_path, output, columns="record")
    with pytest.raises(ConfigError, match="already holds a run with another configuration"):
        manifest.check(other, output)


def test_the_command(tmp_path) -> None:
    write_input(tmp_path, "b.jsonl", 0, DOCUMENTS)
    output = str(tmp_path / "out")
    run_here(make_config(tmp_path, output))
    result = CliRunner().invoke(app, ["compact", output, "output.target_file_mb=1"])
    assert result.exit_code == 0, result.output
    assert "compacted: 12 units in " in result.output
    assert table_folder(output) in result.output
    assert ids(output) == all_ids()
