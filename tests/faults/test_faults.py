"""Every fault of the table: no document lost, none doubled."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.trial import EXECUTORS, Outcome


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_document_exactly_once(
    fault: Callable[[Path], Outcome], executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPD_TEST_EXECUTOR", executor)
    found = fault(tmp_path)
    assert (found.lost, found.doubled) == (0, 0)
    assert found.rows == found.documents > 0
