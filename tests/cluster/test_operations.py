"""The commands as a user gives them, with `model: fake`; a job on a real local Ray."""

from pathlib import Path

import pyarrow.dataset as ds
import pytest

from raypd.config.load import load_config
from raypd.verify.verification import verify
from tests.cli.conftest import raypd  # noqa: F401
from tests.faults.trial import Trial
from tests.processes import ended, start


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    titles = ["" if i == 3 else f"title {i}" for i in range(40)]
    return Trial(tmp_path, titles, model={"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0.001}}).file


def test_extract_verify_errors_retry(configuration, tmp_path, raypd, in_process) -> None:  # noqa: F811
    out = str(tmp_path / "out")
    for words, printed in (
        (("extract", str(configuration)), "1 of 40 documents failed"),
        (("verify", out), "\nok: "),
        (("errors", out), "1  no text in title  [as it stands in the input]"),
        (("extract", str(configuration), "--retry-errors"), "1 left as they are"),
        (("extract", str(configuration), "--all-errors"), "retried 1 failed document: 0 ok now, 1 failed again"),
        (("errors", out), "attempts 2"),
    ):
        ended = raypd(*words)
        assert (ended.code, printed in ended.out + ended.err) == (0, True), (words, ended)
    assert verify(out, load_config(configuration)).passed


@pytest.mark.slow
def test_two_nights_as_a_job(configuration, tmp_path) -> None:
    root = f"output.path={tmp_path / 'nightly'}"
    job = ("jobs/nightly.py", str(configuration), root)
    assert "40 new, 0 changed, 0 removed, 0 as they were; 40 extracted" in ended(start(*job))
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"id": 7, "title": "changed"}\n')
    job += ("cluster.unit_documents=7",)
    assert "0 new, 1 changed, 0 removed, 39 as they were; 1 extracted" in ended(start(*job))
    assert "nothing new since" in ended(start(*job))
    files = (tmp_path / "nightly/current/files.txt").read_text().split()
    ids = ds.dataset(files, format="parquet").to_table()["id"].to_pylist()
    assert sorted(ids) == sorted(str(i) for i in range(40))
