"""Faulty GPUs: a fault of the GPU ends the worker's process, but no document is blamed for it.

After two such deaths the GPU is taken out of use for the rest of the run.
"""

import os
import re
from collections.abc import Callable

from raypd import storage
from raypd.run import layout

_MAX_DEATHS = 2
_CUDA = re.compile(
    r"CUDA(-capable| error| driver)|CUBLAS_STATUS_(?!ALLOC)|cuDNN error|CUDNN_STATUS|NVML"
)
_UNSEEN = re.compile(r"was given a GPU, and torch .* sees none|torch sees no CUDA device")
_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC")
# CUDA errors that no kernel and no document can cause. An illegal address or a failed assertion may
# be the fault of either, so the run looks for a fatal document unless the driver has given up the
# GPU.
_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|busy or unavailable|hardware (stack )?error|no "
    r"CUDA-capable device|"
    r"system not yet initialized|fallen off the bus|GPU is lost|CUDA error: unknown error|Xid"
)


def workers_left(faulty_gpus: int, gpus: float, max_workers: int) -> int:
    """Return the number of workers that the remaining GPUs allow.

    Args:
        faulty_gpus: Workers that reserve a faulty GPU.
        gpus: GPUs of a worker.
        max_workers: The maximum number of workers in the configuration.
    """
    import ray

    slots = int(ray.cluster_resources().get("GPU", 0.0) / gpus)
    # An autoscaler may still add nodes for workers that the configuration allows.
    return max(max_workers - faulty_gpus, min(slots - faulty_gpus, max_workers))


def is_cuda_error(text: str) -> bool:
    """Return whether a traceback comes from CUDA, except if the GPU is out of memory.

    Every GPU of the same kind has the same amount of memory, so that is not a fault of one GPU.
    """
    return bool(_CUDA.search(text)) and not _MEMORY.search(text)


def is_fault(text: str) -> bool:
    """Return whether a traceback shows an error that only a faulty GPU can cause."""
    return bool(_FAULT.search(text)) and is_cuda_error(text)


class FaultLog:
    """The worker deaths that a worker's GPU has caused in a run.

    They are stored in failures/cards/<node>-<gpu>/<process>.txt.

    Args:
        output: The folder of the run.
        node: The id of the node.
        process: The id of the worker process.
        is_lost: Returns whether NVIDIA's driver has given up the GPU.
    """

    def __init__(self, output: str, node: str, process: str, is_lost: Callable[[], bool]) -> None:
        self._node = node
        self._gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        self._folder = storage.join(
            output, layout.FAILURES, "cards", f"{node}-{self._gpu.replace(',', '-')}"
        )
        self._process = process
        self._is_lost = is_lost
        self._deaths: list[str] = []  # deaths before this process began

    def blames(self, text: str, loading: bool = False) -> bool:
        """Return whether the GPU is to blame for an error.

        While a model loads, the GPU is blamed for every CUDA error. If torch sees no GPU, it is
        blamed only if it failed before, because the driver may as well be at fault.

        Args:
            text: The traceback.
            loading: Whether the model was being loaded.
        """
        if loading and _UNSEEN.search(text):
            return bool(self._deaths) or self._is_lost()
        if is_fault(text):
            return True
        return is_cuda_error(text) and (loading or self._is_lost())

    def died(self, text: str) -> None:
        """Record that this process is about to die because of a fault of the GPU.

        Raises:
            OSError: If it cannot be written.
        """
        storage.put(storage.join(self._folder, f"{self._process}.txt"), text.encode())

    def why_faulty(self) -> str | None:
        """Return why nothing may run on the GPU anymore, or None if it may be used.

        Raises:
            OSError: If the deaths cannot be read.
        """
        self._deaths = storage.names(self._folder)
        if len(self._deaths) < _MAX_DEATHS:
            return None
        last_death = storage.read(storage.join(self._folder, self._deaths[-1]))
        reason = last_death.decode(errors="replace").strip().rpartition("\n")[2]
        return (
            f"GPU {self._gpu} of node {self._node} is faulty and no longer used: "
            f"{len(self._deaths)} worker processes died because of it, the last one with: {reason}"
        )
