"""The commands as a user gives them, on a real local Ray with `model: fake`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import yaml

from raypd.config.load import load_config
from raypd.verify.verification import verify
from tests.processes import LONG

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [{"id": f"d{i}", "title": "" if i == 3 else f"title {i}"} for i in range(40)]
    (tmp_path / "in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "input": {"path": "in", "text_columns": ["title"], "category_column": None, "category": "c"},
        "output": {"path": str(tmp_path / "out")},
        "task": {"categories": {"c": {"attributes": [{"name": "a"}]}}},
        "model": {"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0.001}},
        "cluster": {"address": "local", "unit_documents": 10, "cpus_per_worker": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
def test_extract_verify_errors_retry(configuration, tmp_path) -> None:
    out = str(tmp_path / "out")
    command("-m", "raypd", "extract", str(configuration))
    assert command("-m", "raypd", "verify", out).splitlines()[-1].startswith("ok: ")
    assert "1  no text in title  [as it stands in the input]" in command("-m", "raypd", "errors", out)
    said = command("-m", "raypd", "extract", str(configuration), "--retry-errors")
    assert "1 left as they are" in said
    said = command("-m", "raypd", "extract", str(configuration), "--all-errors")
    assert "retried 1 failed document: 0 ok now, 1 failed again" in said
    assert "attempts 2" in command("-m", "raypd", "errors", out)
    assert verify(out, load_config(configuration)).well


@pytest.mark.slow
def test_two_nights_as_a_job(configuration, tmp_path) -> None:
    root = f"output.path={tmp_path / 'nightly'}"
    said = command("jobs/nightly.py", str(configuration), root)
    assert "40 new, 0 changed, 0 removed, 0 as they were; 40 extracted" in said
    with (tmp_path / "in/a.jsonl").open("a") as file:
        file.write('{"id": "d7", "title": "changed"}\n')
    said = command("jobs/nightly.py", str(configuration), root, "cluster.unit_documents=7")
    assert "0 new, 1 changed, 0 removed, 39 as they were; 1 extracted" in said
    assert "nothing new since" in command("jobs/nightly.py", str(configuration), root, "cluster.unit_documents=7")
    files = (tmp_path / "nightly/current/files.txt").read_text().split()
    ids = ds.dataset(files, format="parquet").to_table()["id"].to_pylist()
    assert sorted(ids) == sorted(f"d{i}" for i in range(40))
