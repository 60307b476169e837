"""Runs to look at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from raypd.report import charts, data
from tests.report.browser import browser  # noqa: F401
from tests.report.builder import Plan, build


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., data.RunReport]:
    """Builds a run and reads it: make(units=10, ledger=False)."""
    return lambda **keys: data.load(str(build(tmp_path / "run", Plan(**keys))))


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at something else: charts take most of the time of a page."""
    monkeypatch.setattr(charts, "inline", lambda *_: "<svg></svg>")
