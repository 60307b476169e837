"""A GPU that fails kills its worker's process: no document is to blame, and after two such deaths
it is left out.
"""

import os
import re
from collections.abc import Callable

from raypd import storage
from raypd.run import layout

_MOST_DEATHS = 2
_CUDA = re.compile(
    r"CUDA(-capable| error| driver)|CUBLAS_STATUS_(?!ALLOC)|cuDNN error|CUDNN_STATUS|NVML"
)
_UNSEEN = re.compile(r"was given a GPU, and torch .* sees none|torch sees no CUDA device")
_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC")
# Of CUDA's errors those that no kernel and no document can cause. An illegal address or a failed
# assertion may be either's: such a document is looked for, unless the driver has given the card up.
_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|busy or unavailable|hardware (stack )?error|no "
    r"CUDA-capable device|"
    r"system not yet initialized|fallen off the bus|GPU is lost|CUDA error: unknown error|Xid"
)


def workers_left(left_out: int, gpus: float, most: int) -> int:
    """For how many workers, `most` at most, of so many GPUs there are cards beside those that are
    left out.
    """
    import ray

    return max(
        most - left_out, min(int(ray.cluster_resources().get("GPU", 0.0) / gpus) - left_out, most)
    )


def is_cuda_error(text: str) -> bool:
    """Whether a traceback is of CUDA, and not of too little memory, which every card of its kind
    has.
    """
    return bool(_CUDA.search(text)) and not _MEMORY.search(text)


def is_fault(text: str) -> bool:
    return bool(_FAULT.search(text)) and is_cuda_error(text)


class CardLog:
    """failures/cards/<node>-<card>/<process>.txt: the deaths that a worker's GPU has caused in a
    run, on storage.
    """

    def __init__(self, output: str, node: str, process: str, is_lost: Callable[[], bool]) -> None:
        """is_lost: whether NVIDIA's driver has given the card up."""
        self._node, self._card = node, os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        self._folder = storage.join(
            output, layout.FAILURES, "cards", f"{node}-{self._card.replace(',', '-')}"
        )
        self._process = process
        self._is_lost = is_lost
        self._deaths: list[str] = []  # before this process

    def blames(self, text: str, loading: bool = False) -> bool:
        """Whether the card is to blame for an error; while a model loads, for each of CUDA, and
        where torch sees no GPU if the card has failed before: that alone may as well be the
        driver's.
        """
        if loading and _UNSEEN.search(text):
            return bool(self._deaths) or self._is_lost()
        return is_fault(text) or (is_cuda_error(text) and (loading or self._is_lost()))

    def died(self, text: str) -> None:
        """This process dies of it. Raises OSError."""
        storage.put(storage.join(self._folder, f"{self._process}.txt"), text.encode())

    def left_out(self) -> str | None:
        """Why nothing runs on the card any more; None: it may. Raises OSError."""
        self._deaths = deaths = storage.names(self._folder)
        if len(deaths) < _MOST_DEATHS:
            return None
        why = (
            storage.read(storage.join(self._folder, deaths[-1]))
            .decode(errors="replace")
            .strip()
            .rpartition("\n")[2]
        )
        return (
            f"GPU {self._card} of node {self._node} is left out, {len(deaths)} worker "
            f"processes died of it: {why}"
        )
