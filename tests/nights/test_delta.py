"""The nightly table as a Delta table: whole nights, earlier ones by version, and nothing copied or committed twice."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.errors import ConfigError, RunError
from raypd.nights import delta, nightly
from raypd.nights.table_check import verify_table
from tests import s3
from tests.nights.test_nightly import DOCUMENTS, files, night, run, titles, write  # noqa: F401
from tests.runs import with_keys

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def nights(run):  # noqa: F811
    """Nights with a Delta table."""
    return with_keys(run(unit_documents=5), nightly={"delta": True})


def shown(config, version: int | None = None, **options) -> dict[str, str | None]:
    """id -> the title that its answer was made of, as DuckDB reads a version of the Delta table; every id once."""
    table = DeltaTable(config.output.path, version=version, **options).to_pyarrow_dataset()
    found = duckdb.from_arrow(table).select("id", "record").fetchall()
    made = {id: record and json.loads(record)["a"].removeprefix("a:") for id, record in found}
    assert len(made) == len(found)
    return made


def versions(config) -> list[tuple[int, str]]:
    """(version, night) of every commit, the first one first."""
    return [(c["version"], c["raypd.night"]) for c in reversed(DeltaTable(config.output.path).history())]


def test_every_night_is_a_version_and_unchanged_objects_stay(tmp_path, nights, write) -> None:  # noqa: F811
    for name in "abc":
        write(f"{name}.jsonl", {f"{name}{i}": "x" for i in range(5)})
    first, one = night(nights), titles(nights)
    assert shown(nights) == one
    before = set(DeltaTable(nights.output.path).file_uris())
    write("b.jsonl", {f"b{i}": "y" if i == 2 else "x" for i in range(4)})
    (tmp_path / "in/c.jsonl").unlink()
    second = night(nights)
    assert shown(nights) == titles(nights) == {**dict.fromkeys([*one][:9], "x"), "b2": "y"}
    after = DeltaTable(nights.output.path)
    assert set(after.file_uris()) == set(files(nights))
    assert len(before & set(after.file_uris())) == 1  # a's, as it was
    assert (shown(nights, version=0), night(nights).nothing_new) == (one, True)
    assert versions(nights) == [(0, first.name), (1, second.name)]
    (tmp_path / "in/a.jsonl").unlink()  # and nothing is new
    night(nights)
    assert shown(nights) == titles(nights) == {"b0": "x", "b1": "x", "b2": "y", "b3": "x"}
    assert DeltaTable(nights.output.path).version() == 2
    assert sum(pa.table(after.get_add_actions())["num_records"].to_pylist()) == 9
    for path in Path(nights.output.path).rglob("*"):
        os.utime(path, (0, 1_700_000_000))  # 2023
    assert after.vacuum(dry_run=True, full=True) == []  # not even what is no object of the table
    assert verify_table(nights.output.path, nights).passed


def test_what_a_cut_off_night_did_not_commit_the_next_command_does(nights, write, monkeypatch) -> None:  # noqa: F811
    write("a.jsonl", DOCUMENTS)
    first = night(nights)
    write("a.jsonl", {**DOCUMENTS, "d7": "other"})

    def crash(*args) -> None:
        if args[1] != first.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nightly.delta, "register", crash)
        with pytest.raises(KeyboardInterrupt):
            night(nights)
    assert titles(nights)["d7"] == "other"
    assert shown(nights) == DOCUMENTS  # the night before, whole
    result = CliRunner().invoke(app, ["verify", nights.output.path])
    words = r"(?s)delta: the Delta table lacks \d objects of current/files.txt and shows \d that it.*same command again"
    assert (result.exit_code, re.search(words, result.output) is not None) == (1, True)
    assert night(nights).nothing_new
    assert (shown(nights), [version for version, _ in versions(nights)]) == (titles(nights), [0, 1])
    assert CliRunner().invoke(app, ["verify", nights.output.path]).exit_code == 0


def test_a_folder_of_nights_gets_a_delta_table_later_and_other_columns_with_full(nights, write, monkeypatch) -> None:  # noqa: F811
    write("a.jsonl", DOCUMENTS)
    night(with_keys(nights, nightly={"delta": False}))
    assert not Path(nights.output.path, "_delta_log").exists()
    assert (night(nights).nothing_new, shown(nights)) == (True, DOCUMENTS)
    # A raypd whose table has another column: beside objects that stay, then in place of all.
    real, scores = nightly.table.write_object, lambda table: pa.array([1.5] * len(table))
    with_column = lambda path, table: real(path, table.append_column("score", scores(table)))  # noqa: E731
    monkeypatch.setattr(nightly.table, "write_object", with_column)
    changed = {id: title for id, title in DOCUMENTS.items() if id != "d3"}
    write("a.jsonl", changed)
    write("b.jsonl", {"b": "fresh"})  # its object is the run's own
    night(nights)
    table = DeltaTable(nights.output.path)
    changed["b"] = "fresh"
    assert (shown(nights), set(table.to_pyarrow_table()["score"].to_pylist())) == (changed, {None, 1.5})
    assert shown(nights, version=0) == DOCUMENTS
    night(nights, full=True)
    assert shown(nights) == changed
    assert "score" not in DeltaTable(nights.output.path).to_pyarrow_table().column_names


def test_a_commit_that_fails_says_so_and_the_table_is_there(nights, write, monkeypatch) -> None:  # noqa: F811
    write("a.jsonl", DOCUMENTS)
    log = Path(nights.output.path, "_delta_log")
    log.parent.mkdir(parents=True)
    log.write_text("no folder")
    with pytest.raises(RunError, match=r"its Delta table could not be brought to it: .*same command tries again"):
        night(nights)
    assert titles(nights) == DOCUMENTS
    log.unlink()
    assert (night(nights).nothing_new, shown(nights)) == (True, DOCUMENTS)
    (log / "00000000000000000000.json").write_text("{")
    assert "the Delta table cannot be read" in verify_table(nights.output.path, nights).delta
    shutil.rmtree(log)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'raypd\[delta\]'"):
        night(nights)


def test_two_commands_with_one_list_commit_it_once(nights, write) -> None:  # noqa: F811
    write("a.jsonl", DOCUMENTS)
    made = night(nights)
    for _ in range(2):
        delta.register(nights.output.path, made.name, files(nights))
    assert versions(nights) == [(0, made.name)]


def test_nights_on_s3_by_the_settings_of_raypd(nights, write, bucket, s3_server) -> None:  # noqa: F811
    write("a.jsonl", DOCUMENTS)
    config = with_keys(nights, output={"path": f"{bucket}/my nights"}, storage={"endpoint_url": s3_server.url})
    night(config)
    write("a.jsonl", {**DOCUMENTS, "d7": "other"})
    night(config)
    options = {"storage_options": {"AWS_ENDPOINT_URL": s3_server.url, "AWS_ALLOW_HTTP": "true", **s3.environment()}}
    assert (shown(config, **options), shown(config, version=0, **options)) == ({**DOCUMENTS, "d7": "other"}, DOCUMENTS)
    assert verify_table(config.output.path, config).passed
