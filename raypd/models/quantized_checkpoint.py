"""Finds out whether the weights of a checkpoint are quantized, how, and whether raypd reads them.

A quantized checkpoint that is read as a plain one gives wrong answers and no error, because its
codes are numbers, too. So every method has to be known by name.
"""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.hub import cached_file

import raypd.models.modelopt as modelopt
from raypd.errors import ModelError
from raypd.models.elsewhere import who_reads
from raypd.models.source import Source, explained

_MODELOPT_FILE = "hf_quant_config.json"
_UNNAMED = "without a name"
# Methods that transformers lists with the number of bits.
_BITSANDBYTES = "bitsandbytes"


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantized."""

    method: str  # the name that config.json gives as `quant_method`
    algorithm: str | None  # of ModelOpt, such as FP8 or NVFP4
    file: str  # the file that says so

    @property
    def is_modelopt_fp8(self) -> bool:
        return self.method == modelopt.METHOD and self.algorithm == "FP8"

    def __str__(self) -> str:
        return f"{self.method} {self.algorithm}" if self.algorithm else self.method


def find_quantization(source: Source, config: PretrainedConfig) -> Quantization | None:
    """Reads from config.json, or else from hf_quant_config.json, how the weights are quantized.

    Args:
        source: Where the model's files are.
        config: Its config.json.

    Returns:
        None for weights that are not quantized.

    Raises:
        ModelError: hf_quant_config.json is not one of ModelOpt's.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(), "quantization_config", None)
    if settings is not None and not isinstance(settings, dict):
        settings = settings.to_dict()
    if settings:
        return Quantization(_method(settings), settings.get("quant_algo"), "config.json")
    return _of_modelopt(source)


def _method(settings: dict[str, Any]) -> str:
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return _BITSANDBYTES
    method = settings.get("quant_method")
    if method is None and "quant_algo" in settings:
        return modelopt.METHOD
    # An enumeration of transformers holds the name as its value.
    return str(getattr(method, "value", method) or _UNNAMED)


def _of_modelopt(source: Source) -> Quantization | None:
    """Reads the file in which ModelOpt describes the weights that it exports."""
    with explained(source, f"its {_MODELOPT_FILE} cannot be read"):
        path = cached_file(
            source.location,
            _MODELOPT_FILE,
            revision=source.arguments["revision"],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            return None
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    quantization = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(quantization, dict) or "quant_algo" not in quantization:
        raise ModelError(
            f"model {source.name!r}: {_MODELOPT_FILE} does not say how the weights are quantized "
            f"(quantization.quant_algo); {who_reads(modelopt.METHOD)}"
        )
    if quantization["quant_algo"] is None:
        # Only the cache of keys and values is to be held in 8 bits.
        return None
    return Quantization(modelopt.METHOD, str(quantization["quant_algo"]), _MODELOPT_FILE)


def check_readable(source: Source, quantization: Quantization) -> None:
    """Raises ModelError for weights that neither transformers nor raypd can read."""
    method = quantization.method
    if method == modelopt.METHOD:
        readable = quantization.is_modelopt_fp8
    else:
        readable = method == _BITSANDBYTES or method in AUTO_QUANTIZATION_CONFIG_MAPPING
    if not readable:
        raise ModelError(
            f"model {source.name!r}: its weights are quantized by {quantization} "
            f"({quantization.file}), which raypd does not read; {who_reads(method)}"
        )


def with_quantization(config: PretrainedConfig, quantization: Quantization) -> PretrainedConfig:
    """Puts what hf_quant_config.json says into a configuration, where transformers looks for it."""
    config.quantization_config = {
        "quant_method": quantization.method,
        "quant_algo": quantization.algorithm,
    }
    return config
