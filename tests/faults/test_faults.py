"""Every fault of the table: no document lost, none doubled; also where a run is killed just before
or after a write.
"""

import signal
from pathlib import Path

import pytest

from raypd import storage
from raypd.billing import book
from raypd.run import layout, records
from raypd.run.manifest import Manifest
from raypd.verify.verification import verify
from tests.faults.__main__ import FAULTS
from tests.faults.trial import Trial
from tests.processes import LONG, ROOT, ended

WRITES = (
    "run.json",
    "lease.json",
    "sessions/",
    "plan.json",
    "summaries/",
    "units/",
    "ledger/",
    "manifest.json",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_document_exactly_once(fault, tmp_path: Path) -> None:
    found = fault(tmp_path)
    assert found.lost == 0
    assert found.doubled == 0
    assert found.rows == found.documents > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WRITES)
def test_a_run_that_is_killed_inside_a_write_goes_on(tmp_path: Path, name: str, when: str) -> None:
    trial = Trial(tmp_path, ["a"] * 30)
    path = f"{ROOT / 'tests/faults/cut'}:{ROOT}"
    killed = trial.start(PYTHONPATH=path, RAYPD_TEST_CUT=f"{when} {trial.output}/.*{name}")
    said = killed.communicate(timeout=LONG)
    assert killed.returncode == -signal.SIGKILL, said
    trial.finish()
    found = trial.outcome("")
    verified = verify(trial.output, trial.config)
    assert found.lost == 0
    assert found.doubled == 0
    assert verified.passed is True
    assert records.read(Manifest, storage.join(trial.output, layout.MANIFEST)).documents == 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["units/", "ledger/"])
def test_a_worker_or_a_ledger_that_is_killed_inside_a_write_is_replaced(
    tmp_path: Path, name: str, when: str
) -> None:
    trial = Trial(tmp_path, ["a"] * 300)
    path = f"{ROOT / 'tests/faults/cut'}:{ROOT}"
    mark = tmp_path / "killed"
    environment = {"PYTHONPATH": path, "RAYPD_TEST_CUT_ONCE": str(mark)}
    cut = f"{when} {trial.output}/.*{name}"
    said = ended(trial.start(RAYPD_TEST_CUT=cut, **environment))
    assert mark.exists()
    assert ("A worker process died" in said) is (name == "units/")
    found = trial.outcome("")
    assert (found.lost, found.doubled, found.rows) == (0, 0, 300)
    assert verify(trial.output, trial.config).passed
    (bill,) = book.bills(trial.output)
    assert bill.final
    # What the ledger lost with its process is made good from the committed units.
    cost = records.read(Manifest, storage.join(trial.output, layout.MANIFEST)).cost
    assert cost is not None
    assert cost.documents == 300
