"""Files that a run leaves out are counted and named wherever a user looks; partitions whose key
begins with an underscore are read.
"""

import json
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from rich.console import Console

from raypd import storage
from raypd.cli.summary import print_summary
from raypd.cluster import driver
from raypd.dataset.planner import plan
from raypd.errors import InputError
from raypd.estimation import sampling
from raypd.report import page, status
from raypd.report.data import load
from raypd.run import left_out
from raypd.run.left_out import LeftOutFiles
from raypd.run.manifest import Manifest
from raypd.storage.common import is_hidden
from raypd.verify import findings, verification
from tests.cluster import fakes
from tests.runs import parquet, read_all, run_here, write_jsonl, write_rows


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("_part=1/x.jsonl", False),
        ("a/_part=1/_b=/x.jsonl", False),
        ("_part=1/_x.jsonl", True),
        ("_part=1/.tmp/x.jsonl", True),
        ("_temporary/x.jsonl", True),
        ("_x=1.jsonl", True),
        (".part=1/x.jsonl", True),
        ("a_b/c.d/x.jsonl", False),
    ],
)
def test_a_folder_with_a_key_is_a_partition_and_other_underscores_hide(name, hidden) -> None:
    assert is_hidden(name) is hidden


def test_partitions_whose_key_begins_with_an_underscore_are_read(tmp_path, config) -> None:
    for folder, title in (("_part=1", "Bose"), ("plain", "Sony"), ("a/_part=2", "JBL")):
        write_rows(tmp_path / f"in/{folder}/x.jsonl", [{"id": title, "title": title}])
    keys = {"text_columns": ["title", "_part"]}
    documents = read_all(config(str(tmp_path / "in"), **keys))
    parts = {d.fields["title"]: d.fields.get("_part") for d in documents}
    assert parts == {"Bose": "1", "Sony": None, "JBL": "2"}
    with_glob = read_all(config(str(tmp_path / "in/**/*.jsonl"), **keys))
    assert [d.source for d in with_glob] == [d.source for d in documents]


@pytest.mark.parametrize("name", ["_part=1/x.jsonl", f"{'a' * 9}_{'b' * 41}.jsonl"])
def test_no_object_of_the_output_is_hidden_because_of_an_inputs_name(
    tmp_path, config, name
) -> None:
    write_jsonl(tmp_path / "in" / name, ["x"])
    run = config(str(tmp_path / "in"))
    run_here(run)
    (unit,) = plan(run)
    assert not unit.id.startswith("_")
    assert driver.run_extract(run).documents == 1


def test_partitions_with_an_underscore_are_read_from_object_storage(bucket, config) -> None:
    storage.put(f"{bucket}/_part=1/x.jsonl", b'{"id": "u1", "title": "Bose"}\n')
    storage.put(f"{bucket}/_drafts/x.jsonl", b'{"id": "u2", "title": "Sony"}\n')
    run = config(bucket)
    assert [d.id for d in read_all(run)] == ["u1"]
    (group,) = plan(run).left_out
    assert group == LeftOutFiles(left_out.HIDDEN, 1, ["_drafts/x.jsonl"])


@pytest.mark.parametrize("key", ["_part", ".part"])
def test_a_delta_table_with_such_partitions_is_read(tmp_path, config, key) -> None:
    rows = pa.table(
        {
            "id": ["1", "2"],
            "title": ["x", "y"],
            key: ["a b", None],
        }
    )
    deltalake.write_deltalake(tmp_path / "t", rows, partition_by=[key])
    run = config(
        str(tmp_path / "t"),
        format="delta",
        text_columns=["title", key],
    )
    documents = read_all(run)
    values = {d.id: (d.fields["title"], d.fields[key]) for d in documents}
    assert values == {"1": ("x", "a b"), "2": ("y", None)}
    # Its log is no input that was left out.
    assert plan(run).left_out == []


@pytest.fixture
def mixed(tmp_path, config):
    """Two files that are read, and one for each reason why a file is not."""
    write_jsonl(tmp_path / "in/a.jsonl", ["x", "y"])
    write_jsonl(tmp_path / "in/_part=1/b.jsonl", ["z"])
    (tmp_path / "in/_SUCCESS").touch()
    write_jsonl(tmp_path / "in/_drafts/c.jsonl", ["hidden"])
    (tmp_path / "in/photo.heic").write_bytes(b"x")
    (tmp_path / "in/empty.csv").write_bytes(b"id,title\n")
    write_jsonl(tmp_path / "elsewhere/d.jsonl", ["linked"])
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/cache-0123456789abcdef.arrow").write_bytes(b"x")
    return config(str(tmp_path / "in"))


COUNTS = {
    left_out.HIDDEN: ["_drafts/c.jsonl", "_SUCCESS"],
    left_out.CACHE: ["cache-0123456789abcdef.arrow"],
    left_out.LINK: ["linked"],
    left_out.EMPTY: ["empty.csv"],
}


def counts(groups: list[LeftOutFiles]) -> dict[str, list[str]]:
    assert all(group.files == len(group.examples) for group in groups)
    return {group.reason: group.examples for group in groups}


def test_every_reason_is_counted_in_the_plan_of_every_session(mixed) -> None:
    first = plan(mixed, mixed.output.path)
    expected = counts(first.left_out)
    (other_type,) = expected.keys() - COUNTS.keys()
    assert "of another type (raypd reads .jsonl" in other_type
    assert expected == {**COUNTS, other_type: ["photo.heic"]}
    first.keep(mixed.output.path)
    assert counts(plan(mixed, mixed.output.path).left_out) == expected
    write_jsonl(Path(mixed.input.path) / "new.jsonl", ["new"])
    assert counts(plan(mixed, mixed.output.path).left_out) == expected


def test_run_verify_estimate_status_and_report_name_what_was_left_out(mixed, capsys) -> None:
    run_here(mixed)
    manifest = driver.run_extract(mixed)
    assert manifest.documents == 3
    printed = capsys.readouterr().err
    assert printed.count("left out of the input: ") == 1
    assert "_drafts/c.jsonl" in printed
    assert {group.reason for group in manifest.left_out} > COUNTS.keys()
    with open(f"{mixed.output.path}/manifest.json") as file:
        tree = json.load(file)
    assert {
        "reason": left_out.EMPTY,
        "files": 1,
        "examples": ["empty.csv"],
    } in tree["left_out"]
    console = Console(width=80, record=True, markup=False)
    print_summary(Manifest(**vars(manifest)), console)
    assert "photo.heic" in console.export_text()
    result = verification.verify(mixed.output.path, mixed)
    assert result.passed
    words = findings.describe(result)
    assert "linked" in words
    # The empty file has no document that could be missing.
    assert words.endswith("5 files of the input left out, see above")
    assert counts(sampling.scan(mixed).left_out).keys() > COUNTS.keys()
    assert any("photo.heic" in note for note in status.Watch(mixed.output.path).look().notes)
    page.write(load(mixed.output.path))
    with open(f"{mixed.output.path}/report.html") as file:
        assert "photo.heic" in file.read()


def test_verify_says_that_all_of_the_input_is_there_only_where_nothing_was_left_out(
    tmp_path, config
) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["x"])
    run = config(str(tmp_path / "in"))
    run_here(run)
    words = findings.describe(verification.verify(run.output.path, run))
    assert words.endswith("every document of the input is in the output exactly once")
    (tmp_path / "in/_b.parquet").write_bytes(parquet({"id": ["1"], "title": ["lost"]}))
    words = findings.describe(verification.verify(run.output.path, run))
    assert words.endswith("1 file of the input left out, see above")


def test_hidden_files_that_may_hold_documents_are_named_before_others(tmp_path, config) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["x"])
    for number in range(20):
        (tmp_path / f"in/.{number:02d}.crc").touch()
    write_jsonl(tmp_path / "in/_late/z.jsonl", ["lost"])
    (group,) = plan(config(str(tmp_path / "in"))).left_out
    assert group.files == 21
    assert group.examples == ["_late/z.jsonl", ".00.crc", ".01.crc", ".02.crc", ".03.crc"]
    assert left_out.describe([group]).endswith(".03.crc and 16 more")


def test_a_name_that_is_not_utf8_can_be_reported(tmp_path, config, in_process) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", ["x"])
    (tmp_path / "in/b\udcff.heic").touch()
    manifest = driver.run_extract(config(str(tmp_path / "in")), build=fakes.build)
    (group,) = manifest.left_out
    assert group.examples == ["b\\udcff.heic"]


def test_a_folder_of_hidden_files_alone_is_refused(tmp_path, config) -> None:
    write_jsonl(tmp_path / "in/_drafts/a.jsonl", ["x"])
    with pytest.raises(InputError, match="only hidden files"):
        plan(config(str(tmp_path / "in")))
