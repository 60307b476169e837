"""Energy of the GPUs: NVIDIA's counter, else watts that were given, else nothing."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from raypd.billing import energy
from raypd.run.records import CardUse, Energy
from tests.billing.test_book import report


def driver(monkeypatch, counts: bool = True) -> list[int]:
    """A driver with two GPUs, whose counters (millijoules) the test moves."""
    counters, error = [1000, 5000], type("NVMLError", (Exception,), {})
    fake = SimpleNamespace(NVMLError=error, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
                           nvmlDeviceGetHandleByIndex=lambda index: index,
                           nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
                           nvmlDeviceGetTotalEnergyConsumption=counters.__getitem__, NVML_CLOCK_SM=1,
                           nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=[50, 90][card]),
                           nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=[2 << 30, 40 << 30][card]),
                           nvmlDeviceGetClockInfo=lambda card, kind: [900, 2100][card],
                           nvmlDeviceGetMaxClockInfo=lambda card, kind: 2520,
                           NVML_ERROR_GPU_IS_LOST=15, NVML_ERROR_RESET_REQUIRED=16)  # fmt: skip
    if not counts:
        fake.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=error)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return counters


@pytest.mark.parametrize(("shown", "gpus", "joules"), [
    ("0,1", 2, 11.0), ("1", 1, 8.0), ("GPU-b", 1, 8.0), ("1", 0.5, 4.0)])  # fmt: skip
def test_the_counter_of_the_gpus_that_a_worker_sees(monkeypatch, shown, gpus, joules) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    counters, meter = driver(monkeypatch), energy.CardWatch(gpus).joules
    assert meter() == 0
    counters[:] = [4000, 13_000]
    assert meter() == joules


@pytest.mark.parametrize(("shown", "gpus", "counts"), [("", 0, True), ("", 1, True), ("0", 1, False), ("0", 1, None)])
def test_without_gpu_counter_or_driver_nobody_knows(monkeypatch, shown, gpus, counts) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    driver(monkeypatch, counts is True)
    if counts is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert energy.CardWatch(gpus).joules() is None


def test_how_gpus_are_used(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    driver(monkeypatch)
    watch = energy.CardWatch(2)
    assert [watch(), watch()] == [CardUse(2, 0.7, 40.0, 1500.0, 2520.0), CardUse(4, 0.7, 40.0, 1500.0, 2520.0)]
    assert energy.together([None, watch(), CardUse(6, 0.2, 41.0, 300.0, 2520.0)]) == CardUse(
        12, 0.45, 41.0, 900.0, 2520.0
    )
    assert str(watch()) == "GPUs 70% busy, 40 GiB at most, 1,500 of 2,520 MHz"
    error = sys.modules["pynvml"].NVMLError()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo", mock.Mock(side_effect=error))
    assert (watch().samples, watch.is_lost()) == (8, False)
    error.value = 15
    assert watch.is_lost()


@pytest.mark.parametrize("package", [None, "without a driver"])
def test_without_nvml_nothing_is_known_of_the_use(monkeypatch, package) -> None:
    driver(monkeypatch) if package else monkeypatch.setitem(sys.modules, "pynvml", None)
    if package:
        sys.modules["pynvml"].nvmlInit = mock.Mock(side_effect=sys.modules["pynvml"].NVMLError)
    watch = energy.CardWatch(1)
    assert (watch(), watch.is_lost(), energy.together([None])) == (None, False, None)


def test_kwh_of_a_run() -> None:
    measured, given = report(1, decode=3600.0), report(1, decode=1800.0)
    measured.joules, measured.gpus, given.gpus = 3.6e6, 1.0, 2.0
    assert energy.of([measured], None, 400.0) == Energy(1.0, 0.4, "NVML")
    assert energy.of([measured, given], 350.0, None) == Energy(1.35, None, "NVML and cost.watts_per_gpu")
    assert energy.of([measured, given], None, 400.0) == Energy()
    assert energy.of([report(1)], 350.0, 400.0) == Energy()  # no GPU at all
