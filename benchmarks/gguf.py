"""Convert a GGUF file of llama.cpp into a folder that raypd loads.

python -m benchmarks.gguf FILE.gguf FOLDER

The blocks of 4 or 8 bits become bfloat16. Any GGUF file of an architecture that transformers reads
can be converted; it was tried with Qwen2.5-Coder-Instruct of 0.5 and 1.5 billion parameters
(Q4_K_M).
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path) -> None:
    """Write a model and its tokenizer as transformers does.

    Args:
        source: A GGUF file of an architecture that transformers reads.
        folder: The folder that is made, or written over.
    """
    if not source.is_file():
        raise SystemExit(f"{source}: no such file; give a GGUF file")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
