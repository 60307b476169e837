"""The ledger of a run with very many workers, and the driver of one with very many units."""

from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from raypd.cluster.driver import DriverSession
from raypd.dataset import CommittedUnits
from raypd.run import Commit, UnitResult, UnitSummary, UsageKey
from tests.cluster import simulated_cluster
from tests.cluster.many_reports import UNIT_DOCUMENTS, simulate
from tests.runs import run_config


def test_no_usage_is_lost_between_workers_and_the_bill(tmp_path):
    found = simulate(tmp_path, workers=24, categories=30, seconds=23)
    assert found["documents"] == found["category_documents"]
    assert found["documents"] >= 24 * 2 * UNIT_DOCUMENTS


@pytest.mark.slow
@pytest.mark.idle
def test_1024_workers_with_300_categories_take_less_than_a_quarter_of_a_core(tmp_path):
    found = simulate(tmp_path, workers=1024, categories=300, seconds=30)
    assert found["share_of_a_core"] < 0.25
    assert found["documents"] == found["category_documents"]
    assert found["bill_bytes"] < 4 << 20


@pytest.mark.slow
def test_the_driver_takes_200_000_units_in_flat_memory(tmp_path):
    config = run_config(folder=tmp_path)
    planned = SimpleNamespace(units=200_000, documents=200_000 * UNIT_DOCUMENTS, exact=True)
    session = DriverSession(
        config, str(tmp_path), planned, CommittedUnits(str(tmp_path)), 0, Mock(), False, Mock()
    )
    sizes = []
    for number in range(planned.units):
        name = f"part-{number:09d}-000000000000-4b6c17f53d29bac4"
        usage = {"prefill_tokens": 25_600, "shared_tokens": 0, "decode_tokens": 10_240}
        counts = {**usage, "documents": UNIT_DOCUMENTS, "seconds": 9.5}
        summary = UnitSummary(
            name,
            "f" * 12,
            f"s-{number // 100_000}",
            "a.parquet",
            number,
            UNIT_DOCUMENTS,
            UNIT_DOCUMENTS,
            0,
            9.5,
            counts=usage,
            categories={UsageKey(f"category-{number % 300}"): counts},
        )
        commit = Commit(summary, f"{name}.parquet", f"stamp-{number}")
        session._take(Mock(), UnitResult(ok=UNIT_DOCUMENTS, commit=commit))
        if number % 50_000 == 49_999:
            sizes.append(psutil.Process().memory_info().rss >> 20)
    session.summaries.flush()
    assert session.done_units == planned.units
    assert len(list((tmp_path / "summaries").iterdir())) == 20
    # After the first fifty thousand, megabytes.
    assert sizes[-1] - sizes[0] < 40, sizes


def test_a_run_on_simulated_workers_bills_every_unit_once(tmp_path, monkeypatch):
    """The same as below, small, so that a change that breaks the simulation is seen at once."""
    found = simulated_cluster.simulate(tmp_path, 100, 8, monkeypatch)
    assert found["units"] == found["ok"] == found["billed_documents"] == 100
    assert found["workers"] == 8
    assert found["most_in_flight"] == 16


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_a_whole_run_of_200_000_units_on_1024_workers_takes_flat_memory(tmp_path, monkeypatch):
    """Driver and ledger together; see `simulated_cluster` for what is simulated."""
    found = simulated_cluster.simulate(tmp_path, 200_000, 1024, monkeypatch)
    assert found["units"] == found["ok"] == found["billed_documents"] == 200_000
    assert found["workers"] == 1024
    assert found["most_in_flight"] == 2048
    samples = found["samples"]
    # From the first eighth on, when all workers have had units.
    assert samples[-1]["mb"] - samples[0]["mb"] < 40, samples
    assert samples[-1]["ledger_bytes"] < 1.1 * samples[1]["ledger_bytes"], samples
