"""The figures of the documentation are what the engine does today."""

from pathlib import Path

import pytest

from benchmarks.figures.pictures import FIGURES

FOLDER = Path(__file__).resolve().parents[2] / "docs/figures"


@pytest.mark.parametrize("name", FIGURES)
def test_the_committed_figure_is_what_the_engine_does(name: str) -> None:
    committed = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert FIGURES[name]() == committed, f"run `make figures`, and look at docs/figures/{name}.svg"


def test_no_other_figure_is_committed() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(FIGURES)
