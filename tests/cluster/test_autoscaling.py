"""Zero workers when idle: a run asks Ray's real autoscaler for nodes, and gives them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.apart import apart


@pytest.mark.slow
def test_from_no_node_to_two_and_back(tmp_path: Path) -> None:
    from tests.cluster import autoscaling

    printed = apart(autoscaling.run, tmp_path)
    nodes = json.loads(printed.splitlines()[-1])
    assert (nodes[0], max(nodes), nodes[-1]) == (0, 2, 0), printed
    found = autoscaling.trial(tmp_path).outcome("")
    assert (found.rows, found.lost, found.doubled) == (2000, 0, 0)
