"""The safetensors files of a checkpoint."""

from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from raypd.errors import ModelError
from raypd.models.checkpoints.tensors import Tensor, Tensors
from raypd.models.source import ModelSource, explained

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_tensors(source: ModelSource) -> Tensors:
    """Open the safetensors files of a model, and fetch them from the Hub if necessary.

    Raises:
        ModelError: If a file is missing or cannot be read.
    """
    tensors: Tensors = {}
    for path in _files(source):
        with explained(source, f"{path} cannot be read"):
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118
                tensors[name] = _in_file(file, name)
    return tensors


def _files(source: ModelSource) -> list[str]:
    options: dict[str, Any] = {
        "revision": source.arguments["revision"],
        "_raise_exceptions_for_missing_entries": False,
    }
    with explained(source, "its weights cannot be found"):
        # If a folder has both, transformers also reads the single file.
        single = cached_file(source.location, _SINGLE_FILE, **options)
        if single is not None:
            return [single]
        index = cached_file(source.location, _INDEX, **options)
        if index is not None:
            revision = source.arguments["revision"]
            files, _ = get_checkpoint_shard_files(source.location, index, revision=revision)
            return list(files)
    raise ModelError(
        f"model {source.name!r}: it has no {_SINGLE_FILE}; pickles (.bin) are not read"
    )


def _in_file(file: Any, name: str) -> Tensor:
    header = file.get_slice(name)
    dtype = _DTYPES.get(header.get_dtype(), torch.float32)

    def read() -> torch.Tensor:
        return file.get_tensor(name)

    return Tensor(name, tuple(header.get_shape()), dtype, read)
