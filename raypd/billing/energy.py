"""The energy consumption and utilization of a worker's own GPUs, from NVIDIA's NVML."""

import os
from collections.abc import Iterable
from functools import reduce
from typing import Any

from raypd.billing.meter import WorkerTime
from raypd.run import GpuUse

_JOULES_PER_KWH = 3.6e6
# NVML's error codes for a GPU that is lost, and for one that has to be reset.
_LOST_CODES = (15, 16)


class GpuWatch:
    """Watches the GPUs that this process sees. Calling it takes a sample.

    Args:
        gpus: The GPUs of this worker, which may be a fraction of one.
    """

    def __init__(self, gpus: float) -> None:
        self._gpus = gpus
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._refusal: Exception | None = None
        try:
            import pynvml

            self._nvml = pynvml
            if gpus:
                self._handles = _handles(pynvml)
        # The package, the driver, the permission or the GPU may be missing, and NVML has its own
        # exception for each.
        except Exception as error:
            self._nvml = None
            self._refusal = error
        self._use: GpuUse | None = None
        self._joules_before = self._counter()

    def _counter(self) -> float | None:
        """Return the joules that the GPUs count, or None if they have no counter (before Volta)."""
        try:
            millijoules = [
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles
            ]
        except Exception:
            return None
        if not millijoules:
            return None
        return min(1.0, self._gpus / len(millijoules)) * sum(millijoules) / 1000

    def joules(self) -> float | None:
        """Return the energy since this process began, or None if it is not measured."""
        joules = self._counter()
        if joules is None or self._joules_before is None:
            return None
        return joules - self._joules_before

    def __call__(self) -> GpuUse | None:
        """Take a sample and return all samples so far, or None if NVML never responded."""
        nvml = self._nvml
        for handle in self._handles:
            try:
                sample = GpuUse(
                    samples=1,
                    busy=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                    memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
                    mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    max_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                )
            except nvml.NVMLError:
                continue
            self._use = sample if self._use is None else sample.plus(self._use)
        return self._use

    def is_lost(self) -> bool:
        """Return whether the driver has given up one of the GPUs (Xid 79, or a reset is due)."""
        for handle in self._handles:
            try:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                if _is_loss(error):
                    return True
        return _is_loss(self._refusal)


def _is_loss(error: Exception | None) -> bool:
    return getattr(error, "value", None) in _LOST_CODES


def _handles(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs in CUDA_VISIBLE_DEVICES."""
    nvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in map(str.strip, visible.split(",")):
        if name in ("", "-1"):
            continue
        if name.isdigit():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        else:
            handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
    return handles


def together(uses: Iterable[GpuUse | None]) -> GpuUse | None:
    """Combine the use of several workers' GPUs, or return None if none is known."""
    measured_uses = [use for use in uses if use is not None]
    return reduce(GpuUse.plus, measured_uses) if measured_uses else None


def kwh(reports: Iterable[WorkerTime]) -> float | None:
    """Return the energy of all workers' GPUs, or None if one of them was not measured."""
    joules = [report.joules for report in reports if report.gpus or report.joules is not None]
    measured = [value for value in joules if value is not None]
    if measured and len(measured) == len(joules):
        return round(sum(measured) / _JOULES_PER_KWH, 6)
    return None
