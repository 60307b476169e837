"""What a run's GPUs took, and they alone: by NVIDIA's own counter where there is one, else by watts that you give."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from raypd.run.records import Energy, WorkerTime

_JOULES_PER_KWH = 3.6e6


def meter(gpus: float) -> Callable[[], float | None]:
    """A counter of this process's GPUs: joules since now, None: not measured. gpus: of this worker, or a fraction."""
    if not gpus:
        return lambda: None

    def total() -> float:
        millijoules = sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
        return min(1.0, gpus / len(handles)) * millijoules / 1000

    try:
        import pynvml

        pynvml.nvmlInit()
        handles = _handles(pynvml)
        before = total()
    except Exception:  # no driver, no GPU, no right, no counter (GPUs before Volta): NVML has an exception for each
        return lambda: None

    def joules() -> float | None:
        try:
            return total() - before
        except pynvml.NVMLError:
            return None

    return joules


def _handles(pynvml: Any) -> list[Any]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES says."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in shown.split(",") if name.strip() and name.strip() != "-1"]
    by_index, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    return [by_index(int(name)) if name.isdigit() else by_name(name) for name in names]


def of(reports: Iterable[WorkerTime], watts_per_gpu: float | None, co2e_grams_per_kwh: float | None) -> Energy:
    """The energy of workers; unknown where a GPU was neither measured nor given watts."""
    joules, sources = 0.0, set()
    for report in reports:
        if report.joules is not None:
            joules += report.joules
            sources.add("NVML")
        elif report.gpus and watts_per_gpu is not None:
            joules += report.gpus * watts_per_gpu * report.seconds.total()
            sources.add("cost.watts_per_gpu")
        elif report.gpus:
            sources.add("unknown")
    if not sources or "unknown" in sources:
        return Energy()
    kwh = joules / _JOULES_PER_KWH
    co2e = None if co2e_grams_per_kwh is None else round(kwh * co2e_grams_per_kwh / 1000, 6)
    return Energy(round(kwh, 6), co2e, " and ".join(sorted(sources)))
