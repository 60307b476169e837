"""Small inputs, configurations for runs over them, and such a run as a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes import start

if TYPE_CHECKING:
    from raypd.config import RunConfig


@pytest.fixture(name="config")
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a configuration: config("in/*.jsonl", unit_documents=10, text_columns=["title"], ...)."""
    from raypd.config import RunConfig

    def make(path: Any, output: str = "out", **keys: Any) -> RunConfig:
        clusters = {"address": "local", "unit_documents": 10, "max_workers": 1}
        source: dict[str, Any] = {"path": path, "text_columns": ["title"], "category_column": None}
        engine: dict[str, Any] = {"max_num_seqs": 4}
        for key, value in keys.items():
            for part, names in (
                (clusters, ("unit_documents", "units_in_flight", "min_workers", "max_workers")),
                (engine, ("max_num_seqs",)),
            ):
                if key in names:
                    part[key] = value
                    break
            else:
                source[key] = value
        return RunConfig.model_validate(
            {
                "input": source,
                "output": {"path": str(tmp_path / output)},
                "task": {"categories": {"c": {"attributes": [{"name": "a"}]}}},
                "engine": engine,
                "cluster": clusters,
            }
        )

    return make


def write_jsonl(path: Path, titles: Sequence[str]) -> Path:
    """One document a title, with ids 0, 1, 2, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, "title": t}) + "\n" for i, t in enumerate(titles)))
    return path


def run_process(config: RunConfig, tmp_path: Path) -> subprocess.Popen[str]:
    """Starts a run with the fake engine as a process of its own."""
    file = tmp_path / "run.yaml"
    file.write_text(config.model_dump_json())  # JSON is YAML
    return start("-m", "tests.faults.run", str(file))
