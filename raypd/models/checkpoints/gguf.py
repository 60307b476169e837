"""GGUF, the format of llama.cpp: one file with weights, sizes and tokenizer."""

from typing import Any

from raypd.models.checkpoints.format import CheckpointFormat


class Gguf(CheckpointFormat):
    """A GGUF file, such as unsloth/Qwen3-4B-GGUF:Q4_K_M."""

    name = "GGUF"
    description = "a file of llama.cpp in any of its types, of 12 architectures; dequantized"
    read_by_transformers = True

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "gguf"

    @property
    def label(self) -> str:
        return "GGUF"
