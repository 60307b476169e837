"""Stands in for vLLM: it takes the arguments that vLLM takes, and writes tokens in no time.

Options that the search shall find make it faster; one of them makes it fail.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool


@dataclass
class Completion:
    token_ids: list


@dataclass
class RequestOutput:
    outputs: list


class LLM:
    def __init__(
        self,
        model,
        *,
        load_format,
        skip_tokenizer_init,
        dtype,
        max_model_len,
        max_num_batched_tokens=16_384,
        max_num_seqs=1024,
        enable_prefix_caching=True,
        async_scheduling=False,
        compilation_config=None,
        speculative_config=None,
        quantization=None,
    ) -> None:
        assert load_format == "dummy"
        assert skip_tokenizer_init
        config = json.loads((Path(model) / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        self.max_model_len = max_model_len
        if speculative_config:
            raise ValueError("no n-gram speculation here")
        print("a line that is no result")
        self.seconds = 0.2
        if max_num_batched_tokens == 32_768:
            self.seconds = 0.1
        if max_num_batched_tokens == 8192:
            self.seconds = 0.15
        if not enable_prefix_caching:
            self.seconds *= 2
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            self.seconds /= 2
        if quantization == "fp8":
            self.seconds /= 2

    def generate(self, prompts, options, use_tqdm):
        assert options.ignore_eos
        longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
        assert longest + options.max_tokens <= self.max_model_len
        time.sleep(self.seconds)
        return [RequestOutput([Completion([7] * options.max_tokens)]) for _ in prompts]
