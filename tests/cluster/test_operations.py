"""The commands as a user gives them, on a real local Ray with `model: fake`."""

from pathlib import Path

import pyarrow.dataset as ds
import pytest

from raypd.config.load import load_config
from raypd.verify.verification import verify
from tests.faults.trial import Trial
from tests.processes import ended, start


def command(*words: str) -> str:
    printed = ended(start(*words))
    assert "Traceback" not in printed
    return printed


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    titles = ["" if i == 3 else f"title {i}" for i in range(40)]
    return Trial(tmp_path, titles, model={"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0.001}}).file


@pytest.mark.slow
def test_extract_verify_errors_retry(configuration, tmp_path) -> None:
    out = str(tmp_path / "out")
    command("-m", "raypd", "extract", str(configuration))
    assert "\nok: " in command("-m", "raypd", "verify", out)
    assert "1  no text in title  [as it stands in the input]" in command("-m", "raypd", "errors", out)
    printed = command("-m", "raypd", "extract", str(configuration), "--retry-errors")
    assert "1 left as they are" in printed
    printed = command("-m", "raypd", "extract", str(configuration), "--all-errors")
    assert "retried 1 failed document: 0 ok now, 1 failed again" in printed
    assert "attempts 2" in command("-m", "raypd", "errors", out)
    assert verify(out, load_config(configuration)).passed


@pytest.mark.slow
def test_two_nights_as_a_job(configuration, tmp_path) -> None:
    root = f"output.path={tmp_path / 'nightly'}"
    printed = command("jobs/nightly.py", str(configuration), root)
    assert "40 new, 0 changed, 0 removed, 0 as they were; 40 extracted" in printed
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"id": 7, "title": "changed"}\n')
    printed = command("jobs/nightly.py", str(configuration), root, "cluster.unit_documents=7")
    assert "0 new, 1 changed, 0 removed, 39 as they were; 1 extracted" in printed
    assert "nothing new since" in command("jobs/nightly.py", str(configuration), root, "cluster.unit_documents=7")
    files = (tmp_path / "nightly/current/files.txt").read_text().split()
    ids = ds.dataset(files, format="parquet").to_table()["id"].to_pylist()
    assert sorted(ids) == sorted(str(i) for i in range(40))
