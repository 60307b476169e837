"""Energy of the GPUs: NVIDIA's counter, else watts that were given, else nothing."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from raypd.billing import energy
from tests.billing.test_book import report
from tests.processes import wait_for


class NVMLError(Exception):
    pass


def driver(monkeypatch, counts: bool = True) -> list[int]:
    """A driver with two GPUs, whose counters (millijoules) the test moves."""
    counters = [1000, 5000]

    def total(handle: int) -> int:
        if not counts:
            raise NVMLError
        return counters[handle]

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
        nvmlDeviceGetTotalEnergyConsumption=total,
        nvmlDeviceGetPowerUsage=lambda handle: 300_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return counters


@pytest.mark.parametrize(
    ("shown", "gpus", "joules"), [("0,1", 2, 11.0), ("1", 1, 8.0), ("GPU-b", 1, 8.0), ("1", 0.5, 4.0)]
)
def test_the_counter_of_the_gpus_that_a_worker_sees(monkeypatch, shown, gpus, joules) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    counters = driver(monkeypatch)
    meter = energy.meter(gpus)
    assert meter() == 0
    counters[0] += 3000
    counters[1] += 8000
    assert meter() == joules


def test_without_gpu_or_driver_nobody_knows(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver(monkeypatch)
    assert energy.meter(0)() is None
    assert energy.meter(1)() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert energy.meter(1)() is None


def test_a_gpu_without_a_counter_is_sampled(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(energy, "_SAMPLE_SECONDS", 0.05)
    driver(monkeypatch, counts=False)
    began = time.monotonic()
    meter = energy.meter(1)
    joules = wait_for(lambda: (found := meter()) is not None and found >= 60 and found)
    assert joules < 300 * (time.monotonic() - began) + 1  # watts x seconds


def test_kwh_of_a_run() -> None:
    measured, given = report(1, decode=3600.0), report(1, decode=1800.0)
    measured.joules, measured.gpus, given.gpus = 3.6e6, 1.0, 2.0
    assert energy.of([measured], None, 400.0) == {"kwh": 1.0, "co2e_kg": 0.4, "source": "NVML"}
    both = {"kwh": 1.35, "co2e_kg": None, "source": "NVML and cost.watts_per_gpu"}
    assert energy.of([measured, given], 350.0, None) == both
    assert energy.of([measured, given], None, 400.0)["kwh"] is None
    assert energy.of([report(1)], 350.0, 400.0)["kwh"] is None  # no GPU at all
