"""Energy and clock of a GPU during a run, from NVIDIA's NVML. It needs only pynvml."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_SAMPLE_SECONDS = 0.05


class Power(NamedTuple):
    """What a GPU drew during a run."""

    joules: float | None = None
    megahertz: float | None = None  # The mean clock of its multiprocessors.
    refusal: str = ""  # Why the figures are missing.


class PowerMeter:
    """Measures the GPU that a process uses.

    Attributes:
        refusal: Why nothing can be measured; empty if it can.
    """

    def __init__(self, uuid: str | None) -> None:
        """
        Args:
            uuid: The GPU's UUID as CUDA reports it, with or without "GPU-"; None without a GPU.
        """
        self.refusal = ""
        self._nvml: Any = None
        self._gpu: Any = None
        if uuid is None:
            self.refusal = "no GPU"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(name)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
            self._nvml = pynvml
        except ImportError:
            self.refusal = "pynvml is not installed (pip install nvidia-ml-py)"
        # NVML has an exception for each thing that may be missing: driver, permission, counter.
        except Exception as error:
            self.refusal = f"NVML: {error}"

    def measure(self, run: Callable[[], Any]) -> Power:
        """Run a function, which waits for the GPU at its end, and return what the GPU drew."""
        if self._nvml is None:
            run()
            return Power(refusal=self.refusal)
        clocks: list[float] = []
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(_SAMPLE_SECONDS):
                clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
                clocks.append(clock)

        sampler = threading.Thread(target=sample, daemon=True)
        before = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
        sampler.start()
        try:
            run()
        finally:
            after = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
            ended.set()
            sampler.join()
        megahertz = sum(clocks) / len(clocks) if clocks else None
        return Power((after - before) / 1000, megahertz)
