"""The whole way of an estimate: a twentieth of a corpus is decoded, then all of it by a run, whose bill is compared."""

import json

import pytest

from raypd.cluster import driver
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from tests.estimation.test_estimate import COSTS as FAST
from tests.estimation.test_estimate import corpus

# Slow enough that the seconds around decoding do not count, and that a busy machine still sleeps as it should.
COSTS = FAST | {"step_seconds": 0.01, "prefill_tokens_per_second": 10_000, "decode_tokens_per_second": 1000}
CLUSTER = {"address": "local", "unit_documents": 50, "cpus_per_worker": 1}


@pytest.mark.slow
@pytest.mark.idle
def test_from_a_twentieth_of_a_run_its_bill_within_5_percent(tmp_path) -> None:
    config = corpus(tmp_path, 1600, model={"name": "fake", "fake": COSTS}, cluster=CLUSTER)
    (bill,) = estimate(config, EstimateOptions(sample=80, baseline=False)).machines[0].bills
    made = driver.run_extract(config)
    assert made.ok == 1600
    usd = sum(json.loads(path.read_text())["usd"] for path in (tmp_path / "out" / "ledger").glob("*.json"))
    print(f"estimated ${bill.usd.value:.4f}, billed ${usd:.4f}")
    assert bill.usd.value == pytest.approx(usd, rel=0.05)
    # The run itself, taken as a sample, says what it cost.
    again = estimate(config, EstimateOptions(run=str(tmp_path / "out")))
    print(f"from the run itself ${again.machines[0].bills[0].usd.value:.4f}")
    assert again.machines[0].bills[0].usd.value == pytest.approx(usd, rel=0.05)
    assert again.speeds[0].tokens_per_document["decode_tokens"].value == pytest.approx(made.decode_tokens / 1600)
