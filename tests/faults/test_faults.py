"""Every fault of the table: no document lost, none doubled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.all import APART, FAULTS
from tests.faults.apart import has_namespaces
from tests.faults.trial import Outcome


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_document_exactly_once(fault: Callable[[Path], Outcome], tmp_path: Path) -> None:
    if fault in APART and not has_namespaces():
        pytest.skip("needs namespaces of its own: root, or a container with --privileged (unshare)")
    found = fault(tmp_path)
    assert (found.lost, found.doubled) == (0, 0)
    assert found.rows == found.documents > 0
