"""Devices and dtypes: what `model.device` and `model.dtype` mean on this machine."""

import torch

from raypd.errors import ModelError, raised_as


def check_gpu() -> None:
    """Check that a worker that was given a GPU has one, lest it decode on the CPU instead.

    Raises:
        ModelError: If torch sees no GPU.
    """
    if torch.cuda.is_available():
        return
    if torch.version.cuda:
        built = f"is built for CUDA {torch.version.cuda}"
    else:
        built = "is built without CUDA"
    raise ModelError(
        f"this worker was given a GPU, and torch {torch.__version__}, which {built}, sees none on "
        "its node: the driver is older than that (CUDA 13 needs 580), or the container lacks "
        "NVIDIA_VISIBLE_DEVICES=all (`nvidia-smi` there shows both); model.device=cpu with "
        "cluster.gpus_per_worker=0 decodes on CPUs"
    )


def resolve_device(name: str) -> torch.device:
    """Return the device that `model.device` names.

    Args:
        name: "auto" means a CUDA GPU if there is one, otherwise Apple's GPU (mps), otherwise the
            CPU.

    Raises:
        ModelError: If this machine has no such device.
    """
    if name == "auto":
        return _best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(
            f"model.device {name!r} is not a device: auto, cpu, cuda, cuda:1, ..."
        ) from None
    if device.type == "cuda":
        _check_cuda(name, device)
    elif device.type != "cpu":
        failure = f"model.device {name!r} cannot be used here"
        with raised_as(ModelError, failure, RuntimeError, AssertionError):
            torch.empty(1, device=device)
    return device


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _check_cuda(name: str, device: torch.device) -> None:
    count = 0
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    if count == 0:
        raise ModelError(
            f"model.device {name!r}: torch sees no CUDA device here; set model.device: auto"
        )
    if device.index is not None and device.index >= count:
        raise ModelError(
            f"model.device {name!r}: this machine has {count} CUDA devices, counted from cuda:0"
        )


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `model.dtype` names on a device.

    Args:
        name: "auto" means bfloat16 where the processor multiplies in it, which is up to seven times
            as fast, and float32 elsewhere.
        device: The device of the model.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = device.type == "cpu" and cpu_has("avx512_bf16", "amx_bf16", "bf16")
    if has_bfloat16:
        return torch.bfloat16
    return torch.float32


def cpu_has(*capabilities: str) -> bool:
    """Return whether the processor has one of several capabilities, by torch's names for them."""
    of_processor = torch.cpu.get_capabilities()
    return any(of_processor.get(name, False) for name in capabilities)


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies in FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
