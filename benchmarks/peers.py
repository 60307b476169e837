"""The engines that raypd is compared with, each in a process of its own: python peers.py JOB.json

This file is run by its path, by the interpreter of an environment that may hold vLLM or OpenVINO
and nothing of raypd: beside Python's own it imports numpy, torch, transformers, vllm, openvino,
openvino_genai and optimum alone. JOB names an engine, its setting, a model folder and a work's
file. The process loads, warms up, writes a line of JSON, and then does the work once for each line
that it is sent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP = 256  # most requests that an engine warms up with

PAGE = 128  # tokens of a page of transformers' continuous batching

# What does requests and says what came out (`answers`: ids of each), and what empties the engine's
# caches.
Loaded = tuple[Callable[[list[dict[str, Any]]], dict[str, Any]], Callable[[], object]]


def generate(job: dict[str, Any]) -> Loaded:
    """transformers `generate`: batches of `setting` prompts of like length, padded on the left."""
    import torch

    model = _model(job)

    def run(requests: list[dict[str, Any]]) -> dict[str, Any]:
        order = sorted(
            range(len(requests)),
            key=lambda n: (requests[n]["max_tokens"], len(requests[n]["tokens"])),
        )
        answers: list[list[int]] = [[] for _ in requests]
        fed = 0
        for begin in range(0, len(order), job["setting"]):
            chosen = order[begin : begin + job["setting"]]
            batch = [requests[n] for n in chosen]
            width = max(len(one["tokens"]) for one in batch)
            ids = torch.tensor(
                [[0] * (width - len(one["tokens"])) + one["tokens"] for one in batch]
            )
            mask = torch.tensor(
                [[0] * (width - len(one["tokens"])) + [1] * len(one["tokens"]) for one in batch]
            )
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=_greedy(batch[0], max(one["max_tokens"] for one in batch)),
            )
            fed += len(batch) * (out.shape[1] - 1)
            for n, row in zip(chosen, out[:, width:].tolist(), strict=True):
                ends = [
                    place for place, token in enumerate(row) if token in requests[n]["stop_ids"]
                ]
                answers[n] = row[: min([requests[n]["max_tokens"], *(end + 1 for end in ends)])]
        return {"fed": fed, "answers": answers}

    return run, _nothing


def generate_batch(job: dict[str, Any]) -> Loaded:
    """What transformers' `generate_batch` does, at most `setting` requests at a time, without its
    start and end.
    """
    from transformers import ContinuousBatchingConfig

    model = _model(job)

    def run(requests: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(one["tokens"]) + one["max_tokens"] for one in requests)
        setting = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=(-(-longest // PAGE) + 1) * min(job["setting"], len(requests)),
            max_batch_tokens=2048,
            max_requests_per_batch=job["setting"],
        )
        greedy = _greedy(requests[0], max(one["max_tokens"] for one in requests))
        answers: dict[int, list[int]] = {}
        with model.continuous_batching_context_manager(greedy, True, 5, setting) as manager:
            begin = time.perf_counter()
            for n in sorted(
                range(len(requests)), key=lambda n: requests[n]["tokens"], reverse=True
            ):
                stops = -1 if requests[n]["ignore_eos"] else requests[n]["stop_ids"]
                most = requests[n]["max_tokens"]
                manager.add_request(
                    requests[n]["tokens"], str(n), max_new_tokens=most, eos_token_id=stops
                )
            while len(answers) < len(requests):
                done = manager.get_result(timeout=1)
                if done is None and not manager.is_running():
                    raise RuntimeError("its thread ended before the requests did")
                if done is not None and done.is_finished():
                    if done.error:
                        raise RuntimeError(done.error)
                    answers[int(done.request_id)] = list(done.generated_tokens)
            seconds = time.perf_counter() - begin
        return {"seconds": seconds, "answers": [answers[n] for n in range(len(requests))]}

    return run, _nothing


def vllm(job: dict[str, Any]) -> Loaded:
    """vLLM with prefix caching, at most `setting` requests at a time; structured outputs by
    xgrammar.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    arguments = {
        "dtype": job["dtype"],
        "max_num_seqs": job["setting"],
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **job["arguments"],
    }
    llm = LLM(job["model"], **arguments)

    def parameters(one: dict[str, Any]) -> Any:
        guide = {key: one[key] for key in ("json", "regex") if key in one}
        return SamplingParams(
            temperature=0.0,
            max_tokens=one["max_tokens"],
            ignore_eos=one["ignore_eos"],
            stop_token_ids=[] if guide else one["stop_ids"],
            detokenize=False,
            structured_outputs=StructuredOutputsParams(**guide) if guide else None,
        )

    def run(requests: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [TokensPrompt(prompt_token_ids=one["tokens"]) for one in requests]
        done = llm.generate(prompts, [parameters(one) for one in requests], use_tqdm=False)
        answers = [list(one.outputs[0].token_ids) for one in done]
        cached = sum(one.num_cached_tokens or 0 for one in done)
        return {"cached": cached, "answers": answers}

    return run, llm.reset_prefix_cache


def openvino(job: dict[str, Any]) -> Loaded:
    """OpenVINO GenAI on the CPU, as vLLM: prefix caching, at most `setting` requests at a time,
    xgrammar.
    """
    import numpy as np
    from openvino import Tensor
    from openvino_genai import (
        ContinuousBatchingPipeline,
        GenerationConfig,
        SchedulerConfig,
        StructuredOutputConfig,
    )

    folder = _exported(job["model"])
    precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[job["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if job["threads"] is not None:
        properties["INFERENCE_NUM_THREADS"] = job["threads"]
    scheduler = SchedulerConfig()
    scheduler.max_num_seqs = job["setting"]
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4  # GB, as vLLM has
    pipelines: list[Any] = []

    def parameters(one: dict[str, Any]) -> Any:
        made = GenerationConfig()
        made.do_sample = False
        made.max_new_tokens = one["max_tokens"]
        made.ignore_eos = one["ignore_eos"]
        made.stop_token_ids = set(one["stop_ids"])
        if "json" in one:
            made.structured_output_config = StructuredOutputConfig(
                json_schema=json.dumps(one["json"])
            )
        elif "regex" in one:
            made.structured_output_config = StructuredOutputConfig(regex=one["regex"])
        return made

    def run(requests: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [Tensor(np.array([one["tokens"]], dtype=np.int64)) for one in requests]
        done = pipelines[0].generate(prompts, [parameters(one) for one in requests])
        return {"fed": None, "answers": [one.m_generation_ids[0] for one in done]}

    def forget() -> None:
        pipelines.clear()  # nothing else empties its cache
        pipelines.append(ContinuousBatchingPipeline(folder, scheduler, "CPU", properties))
        run([{"tokens": list(range(64)), "max_tokens": 4, "ignore_eos": True, "stop_ids": []}])

    forget()
    return run, forget


def _exported(model: str) -> str:
    """The model's folder in OpenVINO's format, with its weights as they are; made by the first
    process that asks.
    """
    folder = f"{model}-openvino"
    if not os.path.exists(folder):
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        # Without a configuration large models would be compressed. Structured outputs need the
        # tokenizer.
        main_export(
            model,
            f"{folder}-made",
            "text-generation-with-past",
            ov_config=OVConfig(),
            convert_tokenizer=True,
        )
        os.rename(f"{folder}-made", folder)
    return folder


def _nothing() -> None:
    """No cache outlives a run."""


def _model(job: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model.generation_config.eos_token_id = None  # what is not given is taken from there
    return model.to(
        "cuda" if torch.cuda.is_available() and job["device"] != "cpu" else "cpu"
    ).eval()


def _greedy(one: dict[str, Any], most: int) -> Any:
    from transformers import GenerationConfig

    stops = None if one["ignore_eos"] else one["stop_ids"]
    return GenerationConfig(
        max_new_tokens=most, do_sample=False, pad_token_id=0, eos_token_id=stops
    )


ENGINES = {
    "generate": generate,
    "generate_batch": generate_batch,
    "vllm": vllm,
    "openvino": openvino,
}
PACKAGES = {"vllm": "vllm", "openvino": "openvino_genai"}  # of the others: transformers


def serve(
    job: dict[str, Any], load: Callable[[dict[str, Any]], Loaded], versions: dict[str, str]
) -> None:
    """Loads an engine, warms it up, and does the job's work for each line of standard input.

    Args:
        job: engine, setting, work and where its model is.
        load: makes the engine.
        versions: of what it is made of.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answer, flush=True)

    try:
        with open(job["work"], encoding="utf-8") as file:
            work = json.load(file)
        requests = work[job["shape"]]  # raypd's are `units`, of which it takes the number alone
        run, forget = load(job)
        run(requests[:WARM_UP])
        say({"ready": True, "versions": versions})
        for _ in sys.stdin:
            forget()  # nothing of the last run's prompts is in a cache
            begin = time.perf_counter()
            found = run(requests)
            found.setdefault("seconds", time.perf_counter() - begin)
            say(counted(found, requests, own=work["decoded"] is None))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}".strip()})
        raise


def counted(found: dict[str, Any], requests: list[dict[str, Any]], own: bool) -> dict[str, Any]:
    """Adds the tokens decoded and put through the model, of each answer all but the last, where
    they are not known.
    """
    if "decoded" not in found:
        found["decoded"] = sum(map(len, found["answers"]))
        prompts = sum(len(one["tokens"]) for one in requests) - found.get("cached", 0)
        found.setdefault("fed", prompts + found["decoded"] - len(requests))
    if not own:
        del found["answers"]  # nobody looks at them
    return found


def main() -> None:
    """Runs the job that the command line names."""
    del sys.path[0]  # the folder of this file, whose modules are none of theirs
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    if job["threads"] is not None:
        os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    package = PACKAGES.get(job["engine"], "transformers")
    try:
        from importlib.metadata import version

        versions = {package: __import__(package).__version__, "torch": version("torch")}
    except ImportError as error:
        why = "is not installed" if error.name == package else "cannot be imported"
        print(json.dumps({"error": f"{package} {why} in {sys.executable}: {error}"}), flush=True)
        sys.exit(1)
    serve(job, ENGINES[job["engine"]], versions)


if __name__ == "__main__":
    main()
