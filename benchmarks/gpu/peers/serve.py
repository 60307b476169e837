"""vLLM or SGLang on works of token ids, in an environment that holds nothing of raypd.

python serve.py JOB.json

The job names an engine, its arguments, the folder of a configuration whose weights are dummies, and
works. Each work is done on other prompts first, then timed, and is one line on standard output
behind `MARK`; the libraries write other lines there. No work asks for structured output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from power import PowerMeter  # This folder is the first where Python looks for modules.

MARK = "RAYPD "
Prompts = list[list[int]]
# Writes so many tokens behind each prompt, and returns the number of tokens that it wrote.
Generate = Callable[[Prompts, int], int]


def vllm(job: dict[str, Any]) -> Generate:
    """Load vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["max_model_len"],
        **job["arguments"],
    )

    def generate(prompts: Prompts, new_tokens: int) -> int:
        options = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        outputs = llm.generate(requests, options, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def sglang(job: dict[str, Any]) -> Generate:
    """Load SGLang."""
    from sglang import Engine

    engine = Engine(
        model_path=job["folder"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=job["max_model_len"],
        **job["arguments"],
    )

    def generate(prompts: Prompts, new_tokens: int) -> int:
        options = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=options)
        return sum(int(output["meta_info"]["completion_tokens"]) for output in outputs)

    return generate


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": vllm, "sglang": sglang}


def main() -> None:
    """Do the job that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    os.environ.update(job["environment"])
    generate = ENGINES[job["engine"]](job)
    meter = PowerMeter(job["uuid"])
    for work in job["works"]:
        new_tokens = work["new_tokens"]
        for prompts in work["warm_ups"]:
            generate(prompts, new_tokens)
        result = {"name": work["name"]}

        def timed(work: dict[str, Any] = work, result: dict[str, Any] = result) -> None:
            began = time.perf_counter()
            result["written"] = generate(work["prompts"], work["new_tokens"])
            result["seconds"] = time.perf_counter() - began

        power = meter.measure(timed)
        result |= {
            "joules": power.joules,
            "megahertz": power.megahertz,
            "no_power": power.refusal,
        }
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
