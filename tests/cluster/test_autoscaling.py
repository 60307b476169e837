"""Zero workers when idle: a run asks Ray's real autoscaler for nodes, and gives them back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.faults.apart import apart, has_namespaces


@pytest.mark.slow
def test_from_no_node_to_two_and_back(tmp_path: Path) -> None:
    if not has_namespaces():
        pytest.skip("needs namespaces of its own: root, or a container with --privileged (unshare)")
    from tests.cluster import autoscaling

    said = apart(autoscaling.run, tmp_path)
    end = json.loads(said.splitlines()[-1])
    assert end["returncode"] == 0, said
    assert end["nodes"][0] == end["nodes"][-1] == 0, said
    assert max(end["nodes"]) == 2, said
    ids = Counter(
        i for path in (tmp_path / "out/units").glob("*.parquet") for i in pq.read_table(path)["id"].to_pylist()
    )
    assert ids == Counter({str(i): 1 for i in range(2000)})
