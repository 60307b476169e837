"""Every fault of the table: no document lost, none doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.all import FAULTS, Fault
from tests.faults.apart import has_namespaces


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.scenario.__name__)
def test_every_document_exactly_once(fault: Fault, tmp_path: Path) -> None:
    if fault.apart and not has_namespaces():
        pytest.skip("needs namespaces of its own: root, or a container with --privileged (unshare)")
    found = fault.scenario(tmp_path)
    assert (found.lost, found.doubled) == (0, 0)
    assert found.rows == found.documents > 0
