"""The formats of checkpoints that raypd reads, and how they are recognized.

If a quantized checkpoint is read as a plain one, its answers are wrong without any error, because
codes are numbers, too. So every format has to be known.
"""

import json
from typing import Any

from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from raypd.errors import ModelError
from raypd.models.checkpoints.bitsandbytes import BitsAndBytes
from raypd.models.checkpoints.compressed_tensors import CompressedTensors
from raypd.models.checkpoints.format import CheckpointFormat, method_of
from raypd.models.checkpoints.gguf import Gguf
from raypd.models.checkpoints.mxfp4 import MxFp4
from raypd.models.checkpoints.nvfp4 import NvFp4
from raypd.models.checkpoints.packed import Awq, Gptq
from raypd.models.checkpoints.scaled import BlockFp8, ModelOptFp8, RowFp8, is_modelopt
from raypd.models.elsewhere import who_reads
from raypd.models.source import ModelSource, explained

FORMATS: tuple[type[CheckpointFormat], ...] = (
    ModelOptFp8,
    NvFp4,
    BlockFp8,
    RowFp8,
    Awq,
    Gptq,
    CompressedTensors,
    MxFp4,
    BitsAndBytes,
    Gguf,
)

_MODELOPT_FILE = "hf_quant_config.json"


def find_format(source: ModelSource, config: PretrainedConfig) -> CheckpointFormat | None:
    """Return the format in which the weights of a model are quantized.

    Args:
        source: Where the model's files are.
        config: Its config.json.

    Returns:
        None for weights that are not quantized.

    Raises:
        ModelError: The format, or a variant of it, is not read.
    """
    if source.gguf is not None:
        return Gguf({"quant_method": "gguf"}, source.gguf.name)
    file = "config.json"
    settings = _settings(config)
    if not settings:
        file = _MODELOPT_FILE
        settings = _settings_of_modelopt(source)
    if not settings:
        return None
    for kind in FORMATS:
        if kind.matches(settings):
            checkpoint_format = kind(settings, file)
            reason = checkpoint_format.refusal()
            if reason is None:
                return checkpoint_format
            raise ModelError(
                f"model {source.name!r}: its weights are quantized by {checkpoint_format.label} "
                f"({file}), and {reason}; {who_reads(_method(settings))}"
            )
    format_names = ", ".join(kind.name for kind in FORMATS)
    raise ModelError(
        f"model {source.name!r}: its weights are quantized by {_label(settings)} ({file}), which "
        f"raypd does not read ({format_names} are read); {who_reads(_method(settings))}"
    )


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the section `quantization_config` of a configuration; empty if it has none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(), "quantization_config", None)
    if settings is None:
        return {}
    if isinstance(settings, dict):
        return settings
    return settings.to_dict()


def _method(settings: dict[str, Any]) -> str:
    return "modelopt" if is_modelopt(settings) else method_of(settings)


def _label(settings: dict[str, Any]) -> str:
    if is_modelopt(settings):
        return f"modelopt {settings['quant_algo']}"
    return method_of(settings)


def _settings_of_modelopt(source: ModelSource) -> dict[str, Any]:
    """Read the file in which ModelOpt describes the weights that it exports.

    Returns:
        Settings as in config.json; empty if there is no file, or only the cache is quantized.

    Raises:
        ModelError: The file is not one of ModelOpt's.
    """
    with explained(source, f"its {_MODELOPT_FILE} cannot be read"):
        path = cached_file(
            source.location,
            _MODELOPT_FILE,
            revision=source.arguments["revision"],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            return {}
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    quantization = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(quantization, dict) or "quant_algo" not in quantization:
        raise ModelError(
            f"model {source.name!r}: {_MODELOPT_FILE} does not say how the weights are quantized "
            f"(quantization.quant_algo); {who_reads('modelopt')}"
        )
    if quantization["quant_algo"] is None:
        return {}
    return {"quant_method": "modelopt", "quant_algo": str(quantization["quant_algo"])}
