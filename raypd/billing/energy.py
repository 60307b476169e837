"""What a run's GPUs took and did, and they alone: by NVIDIA's NVML."""

import os
from collections.abc import Iterable
from functools import reduce
from typing import Any

from raypd.run.records import CardUse, WorkerTime

_JOULES_PER_KWH = 3.6e6
_GIVEN_UP = (15, 16)  # NVML's numbers for a GPU that is lost, and for one that has to be reset


class CardWatch:
    """What this process's GPUs take and do, since it began. gpus: of this worker, or a fraction of
    one.
    """

    def __init__(self, gpus: float) -> None:
        self._gpus, (self._nvml, self._handles, self._refusal) = gpus, _open(gpus)
        self._use: CardUse | None = None
        self._before = self._total()

    def _total(self) -> float | None:
        """The counters' joules; None: no GPU, no counter (GPUs before Volta)."""
        try:
            counts = [
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles
            ]
        except Exception:
            return None
        return min(1.0, self._gpus / len(counts)) * sum(counts) / 1000 if counts else None

    def joules(self) -> float | None:
        """Since it began; None: not measured."""
        total = self._total()
        return None if total is None or self._before is None else total - self._before

    def __call__(self) -> CardUse | None:
        """Takes a sample; None: NVML has never answered."""
        nvml = self._nvml
        for handle in self._handles:
            try:
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
                clocks = [
                    call(handle, nvml.NVML_CLOCK_SM)
                    for call in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
                ]
            except nvml.NVMLError:
                continue
            self._use = CardUse(1, busy, memory, *clocks).plus(self._use or CardUse())
        return self._use

    def is_lost(self) -> bool:
        """Whether the driver has given one of them up (Xid 79, a reset is due), also before this
        process began.
        """
        said = self._refusal
        try:
            for handle in self._handles:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            said = error
        return getattr(said, "value", None) in _GIVEN_UP


def together(uses: Iterable[CardUse | None]) -> CardUse | None:
    """Of all workers; None where nobody knows."""
    known = [use for use in uses if use is not None]
    return reduce(CardUse.plus, known) if known else None


def _open(gpus: float) -> tuple[Any, list[Any], Exception | None]:
    """NVML, the GPUs that CUDA_VISIBLE_DEVICES shows to this process, and why NVML has none of them
    where it fails.
    """
    try:
        import pynvml

        if not gpus:
            return pynvml, [], None
        pynvml.nvmlInit()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        if shown is None:
            names = map(str, range(pynvml.nvmlDeviceGetCount()))
        else:
            names = map(str.strip, shown.split(","))
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        by_name = pynvml.nvmlDeviceGetHandleByUUID
        return (
            pynvml,
            [by_index(int(n)) if n.isdigit() else by_name(n) for n in names if n not in ("", "-1")],
            None,
        )
    # No package, no driver, no right, a lost GPU: NVML has an exception for each.
    except Exception as error:
        return None, [], error


def kwh(reports: Iterable[WorkerTime]) -> float | None:
    """Of all workers' GPUs; None where there is none, or one was not measured."""
    joules = [report.joules for report in reports if report.gpus or report.joules is not None]
    measured = [counted for counted in joules if counted is not None]
    if measured and len(measured) == len(joules):
        return round(sum(measured) / _JOULES_PER_KWH, 6)
    return None
