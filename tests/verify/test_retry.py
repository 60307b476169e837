"""--retry-errors: failed documents are tried again, and their new rows stand in place of the old
ones.
"""

import contextlib
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from raypd import storage
from raypd.answering.components import WorkerComponents
from raypd.billing import book
from raypd.billing.bill import Bill
from raypd.billing.budget import BudgetReached
from raypd.cli.main import app
from raypd.cluster import driver
from raypd.config import RunConfig, StorageConfig
from raypd.dataset import compacted, compaction, planner, table_writer, writer as commit
from raypd.dataset.plan import Plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, RunError
from raypd.run.lease import RunLease
from raypd.run.load import load_run
from raypd.run.records import from_json
from raypd.run.unit import Unit, UnitResult
from raypd.verify import dead_letters, retry
from raypd.verify.retry import merged, retry_errors
from raypd.verify.verification import verify
from tests.cli.conftest import raypd  # noqa: F401
from tests.cluster import fakes
from tests.runs import run_here, with_keys, with_values, write_jsonl


class Task(fakes.FakeTask):
    """Documents of title `program` fail until `Task.mended`; `Task.asked` has those that were asked
    about.
    """

    mended = False
    asked: ClassVar[list[str]] = []

    def plan(self, documents: Any) -> Any:
        for document in documents:
            Task.asked.append(document.id)
            if document.error is None and document.fields["title"] == "program" and not Task.mended:
                yield fakes.Record(document.index, error="ValueError: the program failed")
            else:
                yield from super().plan([document])


def build(config: RunConfig, threads: int | None) -> WorkerComponents:
    engine = fakes.FakeEngine(config.engine.most_seqs)
    if Task.mended:
        submit = engine.submit

        def submit_mended(program: Any, **keywords: Any) -> Any:
            mended = ["mended" if token == "program" else token for token in program]
            return submit(mended, **keywords)

        engine.submit = submit_mended  # type: ignore[method-assign]
    return WorkerComponents(engine, Task(), None, config.engine.max_num_seqs)


@pytest.fixture(autouse=True)
def broken(in_process) -> None:
    Task.mended = False
    Task.asked = []


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """30 documents in 3 units: three programs fail, in two units, and one document has no text."""
    titles = [f"t{i}" for i in range(30)]
    titles[3] = ""
    for i in (4, 12, 13):
        titles[i] = "program"
    made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=10)
    driver.run_extract(made, build=build)
    Task.asked.clear()
    return made


def again(run: RunConfig, **keys: Any) -> retry.Retried:
    return retry_errors(run, build=build, **keys)


def rows(run: RunConfig) -> dict[str, dict[str, Any]]:
    """id -> row; every id once."""
    found = [
        row
        for unit in commit.committed(run.output.path)
        for row in commit.read_rows(run.output.path, unit, 999)
    ]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


@pytest.fixture(params=["units", "table files"])
def either(run: RunConfig, request: pytest.FixtureRequest, monkeypatch) -> RunConfig:
    """The run as it is, or compacted into table files of a unit or two."""
    if request.param == "table files":
        monkeypatch.setattr(compaction, "_MEBIBYTE", 1)
        monkeypatch.setattr(table_writer, "_ROW_GROUP_BYTES", 1)
        run = with_keys(run, output={"target_file_mb": 100})
        result = compaction.compact_run(run, run.output.path)
        assert len(result.compaction.files) == 3
    return run


def test_failed_documents_alone_are_asked_again_and_their_rows_replaced(either) -> None:
    run = either
    before = rows(run)
    Task.mended = True
    units = sorted(commit.committed(run.output.path))
    first = [commit.read_summary(run.output.path, unit) for unit in units]
    made = again(run)
    assert made.tried == 3
    assert made.ok == 3
    assert made.failed == 0
    assert made.left_out == 1
    assert made.waiting == 0
    assert sorted(Task.asked) == ["12", "13", "4"]
    after = rows(run)
    assert {id for id in after if after[id] != before[id]} == {"4", "12", "13"}
    assert [after["12"][name] for name in ("category", "status", "attempts")] == ["MENDED", "ok", 2]
    assert after["3"]["error"] == before["3"]["error"]
    assert "1 not retried" in made.describe()
    assert verify(run.output.path, run).passed
    summaries = [commit.read_summary(run.output.path, unit) for unit in units]
    assert [s.retries for s in summaries] == [1, 1, 0]
    tokens = [
        [sum(c["prefill_tokens"] for c in s.categories.values()) for s in of]
        for of in (first, summaries)
    ]
    # The retry's, too.
    assert [after > before for before, after in zip(*tokens, strict=True)] == [True, True, False]
    assert [s.busy_seconds >= b.busy_seconds for s, b in zip(summaries, first, strict=True)] == [
        True
    ] * 3
    tree = json.loads(Path(run.output.path, "manifest.json").read_text())
    assert tree["ok"] == 29
    assert tree["failed"] == 1
    # The retry's time is the run's.
    assert [s["how"] for s in tree["sessions"]] == ["complete", "complete"]
    assert again(run).tried == 0


@pytest.mark.parametrize("either", ["table files"], indirect=True)
def test_a_retry_replaces_the_table_files_of_a_compacted_run_together(either, monkeypatch) -> None:
    run = either
    output = run.output.path
    table = compacted.table_of(output)
    assert table is not None
    before = rows(run)
    copied: list[str] = []
    copy = table_writer.TableWriter.copy

    def counted_copy(self: Any, partition: str, source: str, unit_rows: pa.Table) -> None:
        copied.append(source)
        copy(self, partition, source, unit_rows)

    monkeypatch.setattr(table_writer.TableWriter, "copy", counted_copy)
    Task.mended = True

    # Cut off before the new table files are the commit, and after it.
    for name in ("put_if", "delete_all"):
        with monkeypatch.context() as patch:
            real = getattr(storage, name)

            def cut_at(path: Any, *given: Any, name: str = name, real: Any = real) -> Any:
                if name == "delete_all" or str(path).endswith("compaction.json"):
                    raise storage.Unavailable("cut off")
                return real(path, *given)

            patch.setattr(storage, name, cut_at)
            with pytest.raises(OSError, match="cut off"):
                again(run)
        assert len(rows(run)) == 30
        assert verify(output, run).passed
    assert (rows(run) == before) is False
    made = again(run)
    assert (made.tried, made.ok, made.failed) == (3, 3, 0)
    after = rows(run)
    assert {id for id in after if after[id] != before[id]} == {"4", "12", "13"}
    assert [after[id]["attempts"] for id in ("4", "12", "13")] == [2, 2, 2]
    # The unit without failures that may change was not read again, at both attempts.
    assert len(copied) == 2
    assert copied[0] == copied[1] == table.path(2)
    new_table = compacted.table_of(output)
    assert new_table.compaction.id != table.compaction.id
    assert storage.folders(storage.join(output, "table")) == [new_table.compaction.id]
    listed = storage.read(storage.join(output, "current/files.txt")).decode().split()
    assert listed == new_table.paths()
    assert again(run).tried == 0


def test_fresh_rows_of_a_typed_run_are_typed(run, monkeypatch) -> None:
    def plan(self: Task, documents: Any) -> Any:
        for document in documents:
            values = [{"name": "a", "status": "ok"}]
            answer = {
                "category": "c",
                "record": {"a": "x"},
                "values": values,
                "truncated": False,
            }
            fails = document.id == "12" and not Task.mended
            yield fakes.Record(
                document.index, {} if fails else answer, "it failed" if fails else None
            )

    monkeypatch.setattr(Task, "plan", plan)
    typed = with_keys(run, output={"path": f"{run.output.path} typed", "columns": "typed"})
    driver.run_extract(typed, build=build)
    Task.mended = True
    assert again(typed).ok == 1
    assert rows(typed)["12"]["record"] == '{"a": "x"}'


def test_of_two_at_once_one_says_so_and_what_fails_again_counts_its_attempts(run) -> None:
    first = RunLease(storage.join(run.output.path, "retries"))
    with pytest.raises(RunError, match=f"session {first.id} has been working on it"):
        again(run)
    first.end("complete")
    assert again(run).failed == 3
    made = again(run)
    assert made.number == 2
    assert made.failed == 3
    assert [rows(run)[id]["attempts"] for id in ("4", "12", "3", "5")] == [3, 3, 1, 1]
    assert verify(run.output.path, run).passed


def test_units_that_are_not_done_are_left_to_a_plain_run(run) -> None:
    Path(
        run.output.path, "units", f"{sorted(commit.committed(run.output.path))[0]}.parquet"
    ).unlink()
    Task.mended = True
    made = again(run)
    assert made.tried == 2
    assert made.waiting == 1
    assert len(rows(run)) == 20
    assert "1 unit is not done yet" in made.describe()


def test_what_the_input_itself_makes_fail_is_tried_on_request(run, tmp_path, config) -> None:
    Task.mended = True
    made = again(run, everything=True)
    assert made.tried == 4
    assert made.left_out == 0
    assert rows(run)["3"]["attempts"] == 2
    assert "the input itself cannot be read" in again(run).describe()
    with pytest.raises(ConfigError, match="no run here"):
        again(config(str(tmp_path / "a.jsonl"), "nowhere"))


def test_a_file_that_was_repaired_is_not_retried_in_the_same_run(run, tmp_path) -> None:
    (path,) = tmp_path.glob("a.jsonl")
    path.write_text(path.read_text().replace("{", "{ ", 1))
    with pytest.raises(ConfigError, match=r"a\.jsonl.*Choose another output\.path"):
        again(run, everything=True)


def test_a_retry_has_what_its_run_has_left_of_the_budget(run, monkeypatch) -> None:
    book.write(run.output.path, Bill("s", 100.0, 3.0))
    run_extract = Mock(side_effect=BudgetReached("reached"))
    monkeypatch.setattr(driver, "run_extract", run_extract)
    with pytest.raises(BudgetReached, match=r"exclude \$3\.00, which the run has cost"):
        again(with_keys(run, cost={"budget_usd": 5.0}))
    assert run_extract.call_args.args[0].cost.budget_usd == 2.0


def test_the_bill_of_a_retry_is_among_those_of_its_run(run, monkeypatch) -> None:
    Task.mended = True
    run_extract = driver.run_extract

    def billed(config: RunConfig, **keys: Any) -> Any:
        result = run_extract(config, **keys)
        book.write(config.output.path, Bill("s", 100.0, 3.0, final=True))
        return result

    monkeypatch.setattr(driver, "run_extract", billed)
    assert again(run).ok == 3
    assert [(bill.session, bill.usd) for bill in book.bills(run.output.path)] == [("s", 3.0)]
    manifest = json.loads(Path(run.output.path, "manifest.json").read_text())
    assert manifest["cost"]["usd"] == 3.0


@pytest.mark.parametrize("units_done", [0, 1])
def test_a_retry_that_is_cut_off_in_decoding_goes_on(run, in_process, units_done) -> None:
    Task.mended = True
    before = rows(run)
    in_process(units_done)
    with pytest.raises(RunError, match="cut off"):
        again(run)
    assert rows(run) == before
    in_process(None)
    asked = len(Task.asked)
    made = again(run)
    assert made.number == 1
    assert made.ok == 3
    assert asked == units_done  # the first unit has one failed document, and it was not asked twice
    assert len(Task.asked) == 3


@pytest.mark.parametrize("lost", [False, True])
def test_a_retry_that_is_cut_off_between_two_objects_goes_on_also_without_its_record(
    run, lost, monkeypatch
) -> None:
    Task.mended = not lost
    real = storage.put_if
    calls = []

    def crash(path: str, data: bytes, version: str) -> bool:
        if path.endswith(".parquet"):
            calls.append(path)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return real(path, data, version)

    monkeypatch.setattr(retry, "_THREADS", 1)
    monkeypatch.setattr(storage, "put_if", crash)
    with pytest.raises(KeyboardInterrupt):
        again(run)  # one of the two units has its new rows
    assert len(rows(run)) == 30
    if lost:  # all had failed again
        Path(run.output.path, "retries/0001/retry.json").unlink()
        Task.mended = True
    else:
        assert sum(row["status"] != "ok" for row in rows(run).values()) in (2, 3)
    made = again(run)
    assert made.number == (2 if lost else 1)
    assert made.ok == 3
    # Added once.
    assert lost or {
        row["attempts"] for row in rows(run).values() if row["category"] == "MENDED"
    } == {2}
    assert [rows(run)[id]["category"] for id in ("4", "12", "13")] == ["MENDED"] * 3
    assert verify(run.output.path, run).passed


def test_a_damaged_record_of_a_retry_ends_the_command_with_one_line_and_exit_code_2(
    run,
    tmp_path,
    raypd,  # noqa: F811
) -> None:
    torn = Path(run.output.path, "retries/0001/retry.json")
    torn.parent.mkdir(parents=True)
    torn.write_text('{"number": 1, "tri')
    (tmp_path / "run.yaml").write_text(run.model_dump_json())
    code, out, err = raypd("extract", str(tmp_path / "run.yaml"), "--retry-errors")
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"error: {torn}: cannot be read: ")
    assert "delete this file" in err
    torn.write_text('{"number": "one"}')
    with pytest.raises(
        ConfigError, match=r"retry\.json: cannot be read: number: .*; delete this file"
    ):
        again(run)
    torn.unlink()
    Task.mended = True
    assert again(run).ok == 3


def test_what_somebody_else_changes_at_the_same_moment_is_kept(run, monkeypatch) -> None:
    Task.mended = True
    real = commit.read_table
    calls = []

    def interfere(output: str, unit: str, columns: Any = None, path: str | None = None) -> Any:
        found = real(output, unit, columns, path)
        # A whole object, just before it is replaced.
        if columns is None and path is not None and not calls:
            calls.append(path)
            answers = [
                f"{answer} of theirs" if answer else answer
                for answer in found[1]["category"].to_pylist()
            ]
            changed = with_values(found[1], "category", answers)
            assert commit.replace_rows(output, path, changed, found[0], storage.version(path))
        return found

    monkeypatch.setattr(commit, "read_table", interfere)
    assert again(run).ok == 3
    assert len(calls) == 1
    found = rows(run)
    assert sum(str(row["category"]).endswith("of theirs") for row in found.values()) in (8, 9)
    assert [found[id]["category"] for id in ("4", "12", "13")] == ["MENDED"] * 3


def test_readers_see_every_document_exactly_once_at_each_instant(run) -> None:
    Task.mended = True
    seen: list[int] = []
    retrying = threading.Thread(target=again, args=(run,))
    retrying.start()
    while retrying.is_alive():
        seen.append(len(rows(run)))
    retrying.join()
    assert {*seen} == {30}
    assert len(seen) > 2
    assert again(run).tried == 0


def table(*documents: tuple[int, str, int]) -> pa.Table:
    """Rows (row, status, attempts) of one source; the answer tells where a row comes from."""
    rows = [("a", *document, "/".join(map(str, document))) for document in documents]
    types = {
        "source": "string",
        "row": "int64",
        "status": "string",
        "attempts": "int32",
        "answer": "string",
    }
    return pa.table(list(zip(*rows, strict=True)), schema=pa.schema(types))


def test_documents_of_several_rows_are_replaced_whole_unless_more_of_them_failed() -> None:
    old = table(
        (1, "ok", 1), (2, "ok", 1), (2, "error", 1), (3, "error", 1), (3, "ok", 1), (4, "ok", 1)
    )
    found = merged(
        old, table((2, "ok", 2), (2, "ok", 2), (2, "ok", 2), (3, "error", 1), (3, "error", 1))
    )
    assert found["row"].to_pylist() == [1, 2, 2, 2, 3, 3, 4]
    assert found["answer"].to_pylist()[1:6] == ["2/ok/2"] * 3 + ["3/error/1", "3/ok/1"]
    assert found["attempts"].to_pylist() == [1, 3, 3, 3, 2, 2, 1]


def test_what_cannot_be_read_any_more_is_left_out_of_a_retry_and_not_taken_apart(
    run, monkeypatch
) -> None:
    Task.mended = True

    def one_unit(inner: RunConfig, planned: Plan, **_: Any) -> None:
        with contextlib.suppress(RunError):
            run_here(inner, build, planned, 1)

    monkeypatch.setattr(retry.driver, "run_extract", one_unit)
    assert again(run).ok == 1
    assert again(run).ok == 2
    unit = next(iter(planner.plan(run)))
    several = replace(unit, parts=[*unit.parts, *unit.parts])
    session = driver.DriverSession(
        run, run.output.path, planner.plan(run), set(), 0, Mock(), False, build
    )
    for chosen in (several, several.subset([1])):
        session._take(chosen, UnitResult(error="it is gone", unreadable=True))
    assert session._units_to_split == [several]


def test_a_subset_of_a_unit_is_a_unit_with_an_id_of_its_own(run) -> None:
    unit = next(iter(planner.plan(run)))
    some = unit.subset([1, 4])
    assert len({unit.id, some.id, unit.subset([1, 5]).id}) == 3
    assert some.whole == unit.id
    assert unit.whole == unit.id
    assert some.rows == 2
    assert from_json(Unit, asdict(some), "x") == some
    assert [document.id for document in read_unit(some, run)] == ["1", "4"]


def test_on_s3(bucket, config, connected) -> None:
    lines = [f'{{"id": "{i}", "title": "{"program" if i == 7 else "a"}"}}\n' for i in range(25)]
    storage.put(f"{bucket}/in/a.jsonl", "".join(lines).encode())
    made = config(f"{bucket}/in", f"{bucket}/out", {"options": {"endpoint_url": connected.url}})
    driver.run_extract(made, build=build)
    assert dead_letters.summarize(made.output.path).documents == 1
    Task.mended = True
    assert again(made).ok == 1
    assert rows(made)["7"]["category"] == "MENDED"
    storage.configure(StorageConfig())
    given = [f"storage.options.endpoint_url={connected.url}"]
    assert verify(made.output.path, load_run(made.output.path, given)).passed
    storage.delete(f"{bucket}/out/units/{sorted(commit.committed(made.output.path))[0]}.parquet")
    done = CliRunner().invoke(app, ["verify", made.output.path, *given])
    assert done.exit_code == 1
    assert "missing: 10 documents" in done.output
