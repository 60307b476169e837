"""What is said of a folder that holds no run, or a run whose files are elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypd.config import with_changes
from raypd.config.model_card_file import EARLIER_TEMPLATE
from raypd.errors import ConfigError
from raypd.run import NoRun, load_record, load_run, manifest
from tests.runs import extraction, run_config


def test_a_misspelt_folder_is_answered_with_the_folder_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "products").mkdir()
    with pytest.raises(NoRun, match=f"did you mean {tmp_path / 'products'}"):
        load_record(str(tmp_path / "prodcts"))


def test_a_folder_that_exists_is_not_taken_for_a_misspelt_one(tmp_path: Path) -> None:
    (tmp_path / "products").mkdir()
    (tmp_path / "products-2").mkdir()
    with pytest.raises(NoRun) as error:
        load_record(str(tmp_path / "products"))
    assert "did you mean" not in str(error.value)


def test_trained_weights_are_missed_in_another_folder_than_that_of_the_run(
    tmp_path: Path, monkeypatch
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    card = {"task": "extraction", "method": "guided", "template": EARLIER_TEMPLATE}
    (adapter / "raypd.json").write_text(json.dumps(card))
    monkeypatch.chdir(tmp_path)
    task = extraction(tea=[{"name": "Kind", "description": "green or black"}])
    config = with_changes(run_config(task, "in", tmp_path / "run"), {"model.adapter": "adapter"})
    manifest.claim(config, config.output.path)
    assert load_run(config.output.path, []).model.adapter == "adapter"
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="trained weights adapter of this run are not here"):
        load_run(config.output.path, [])
