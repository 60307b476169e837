"""What is said of a folder that holds no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypd.run import NoRun, load_record


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
