"""Rates of GPUs from public data sheets. This module needs only Python."""

import re
from typing import NamedTuple

_NVIDIA = "https://www.nvidia.com/en-us/data-center"


class DataSheet(NamedTuple):
    """What a data sheet says about a GPU."""

    tflops: float  # Dense products in bfloat16.
    gigabytes_per_second: float
    gigabytes: float  # Memory.
    watts: float  # The most power that it draws.
    source: str
    fp8_tflops: float | None = None  # Dense products in FP8; None if it has none.


# By the GPU of instance types. Rates with sparsity are halved.
GPUS = {
    "A10G": DataSheet(70, 600, 24, 300, "https://aws.amazon.com/ec2/instance-types/g5/"),
    "L4": DataSheet(121, 300, 24, 72, f"{_NVIDIA}/l4/", 242),
    "L40S": DataSheet(362, 864, 48, 350, f"{_NVIDIA}/l40s/", 733),
    "A100 40GB": DataSheet(312, 1555, 40, 400, f"{_NVIDIA}/a100/"),
    "A100 80GB": DataSheet(312, 2039, 80, 400, f"{_NVIDIA}/a100/"),
    "H100": DataSheet(989, 3350, 80, 700, f"{_NVIDIA}/h100/", 1979),
    "H200": DataSheet(989, 4800, 141, 700, f"{_NVIDIA}/h200/", 1979),
    "B200": DataSheet(2250, 7700, 180, 1000, f"{_NVIDIA}/dgx-b200/", 4500),
    "B300": DataSheet(2250, 8000, 288, 1100, f"{_NVIDIA}/dgx-b300/", 4500),
}


def gpu_named(name: str, memory_gib: float) -> str | None:
    """Return the GPU of `GPUS` that has a given name in CUDA; None if there is none.

    Args:
        name: The name, such as "NVIDIA H200".
        memory_gib: Its memory in GiB.
    """
    # PCIe and NVL cards are slower than the cards of these data sheets.
    if "PCIe" in name or "NVL" in name:
        return None
    for gpu, sheet in GPUS.items():
        model_name = gpu.partition(" ")[0]
        is_similar = 0.8 < memory_gib * 2**30 / (sheet.gigabytes * 1e9) < 1.25
        if is_similar and re.search(rf"\b{model_name}\b", name):
            return gpu
    return None
