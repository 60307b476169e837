"""The engines that raypd is compared with, each in a process of its own.

python peers.py JOB.json

This file is run by its path, by the interpreter of an environment that may hold vLLM or OpenVINO
and nothing of raypd. Besides the standard library it imports nothing but numpy, torch,
transformers, vllm, openvino, openvino_genai and optimum. JOB names an engine, its setting, the
folder of a model and the file of a work. The process loads the model, warms up, writes a line of
JSON, and then does the work once for each line on standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP = 256  # at most so many requests are run before the measurement

PAGE = 128  # tokens per page of transformers' continuous batching
MAX_BATCHED_TOKENS = 2048

Request = dict[str, Any]  # of a work, see works.Work
# A function that runs requests and returns what came out (`answers`: token ids per request), and
# one that empties the engine's caches.
Loaded = tuple[Callable[[list[Request]], dict[str, Any]], Callable[[], object]]


def generate(job: dict[str, Any]) -> Loaded:
    """Load transformers' `generate`.

    Batches have `setting` prompts of similar length, padded on the left.
    """
    model = _model(job)

    def run(requests: list[Request]) -> dict[str, Any]:
        def length(number: int) -> tuple[int, int]:
            return requests[number]["max_tokens"], len(requests[number]["tokens"])

        order = sorted(range(len(requests)), key=length)
        answers: list[list[int]] = [[] for _ in requests]
        fed = 0
        for start in range(0, len(order), job["setting"]):
            numbers = order[start : start + job["setting"]]
            batch = [requests[number] for number in numbers]
            out, width = _generate(model, batch)
            fed += len(batch) * (out.shape[1] - 1)
            for number, tokens in zip(numbers, out[:, width:].tolist(), strict=True):
                answers[number] = _cut(tokens, requests[number])
        return {"fed": fed, "answers": answers}

    return run, _nothing


def _generate(model: Any, batch: list[Request]) -> tuple[Any, int]:
    """Return what `generate` returns for a batch, [requests, tokens], and the prompts' width."""
    import torch

    width = max(len(request["tokens"]) for request in batch)
    ids = []
    mask = []
    for request in batch:
        padding = [0] * (width - len(request["tokens"]))
        ids.append(padding + request["tokens"])
        mask.append(padding + [1] * len(request["tokens"]))
    out = model.generate(
        input_ids=torch.tensor(ids).to(model.device),
        attention_mask=torch.tensor(mask).to(model.device),
        generation_config=_greedy(batch[0], max(request["max_tokens"] for request in batch)),
    )
    return out, width


def _cut(tokens: list[int], request: Request) -> list[int]:
    """Return an answer up to its first stop token, which is part of it."""
    for index, token in enumerate(tokens[: request["max_tokens"]]):
        if token in request["stop_ids"]:
            return tokens[: index + 1]
    return tokens[: request["max_tokens"]]


def generate_batch(job: dict[str, Any]) -> Loaded:
    """Load transformers' continuous batching, with at most `setting` requests at a time.

    It does what `generate_batch` does, without its start and end.
    """
    from transformers import ContinuousBatchingConfig

    model = _model(job)

    def run(requests: list[Request]) -> dict[str, Any]:
        longest = max(len(request["tokens"]) + request["max_tokens"] for request in requests)
        pages = -(-longest // PAGE) + 1
        setting = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages * min(job["setting"], len(requests)),
            max_batch_tokens=MAX_BATCHED_TOKENS,
            max_requests_per_batch=job["setting"],
        )
        greedy = _greedy(requests[0], max(request["max_tokens"] for request in requests))
        order = sorted(
            range(len(requests)), key=lambda number: requests[number]["tokens"], reverse=True
        )
        with model.continuous_batching_context_manager(greedy, True, 5, setting) as manager:
            began = time.perf_counter()
            for number in order:
                request = requests[number]
                manager.add_request(
                    request["tokens"],
                    str(number),
                    max_new_tokens=request["max_tokens"],
                    eos_token_id=-1 if request["ignore_eos"] else request["stop_ids"],
                )
            answers = _collected(manager, len(requests))
            seconds = time.perf_counter() - began
        return {"seconds": seconds, "answers": answers}

    return run, _nothing


def _collected(manager: Any, count: int) -> list[list[int]]:
    """Wait for all answers of transformers' continuous batching; return them in order."""
    answers: dict[int, list[int]] = {}
    while len(answers) < count:
        done = manager.get_result(timeout=1)
        if done is None and not manager.is_running():
            raise RuntimeError("its thread ended before the requests did")
        if done is not None and done.is_finished():
            if done.error:
                raise RuntimeError(done.error)
            answers[int(done.request_id)] = list(done.generated_tokens)
    return [answers[number] for number in range(count)]


def vllm(job: dict[str, Any]) -> Loaded:
    """Load vLLM with prefix caching and at most `setting` requests at a time.

    Structured outputs are computed by xgrammar.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    arguments = {
        "dtype": job["dtype"],
        "max_num_seqs": job["setting"],
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "enable_prefix_caching": True,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **job["arguments"],
    }
    llm = LLM(job["model"], **arguments)

    def parameters(request: Request) -> Any:
        guide = {key: request[key] for key in ("json", "regex") if key in request}
        return SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=request["ignore_eos"],
            stop_token_ids=[] if guide else request["stop_ids"],
            detokenize=False,
            structured_outputs=StructuredOutputsParams(**guide) if guide else None,
        )

    def run(requests: list[Request]) -> dict[str, Any]:
        prompts = [TokensPrompt(prompt_token_ids=request["tokens"]) for request in requests]
        settings = [parameters(request) for request in requests]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {"cached": cached, "answers": answers}

    return run, llm.reset_prefix_cache


def openvino(job: dict[str, Any]) -> Loaded:
    """Load OpenVINO GenAI on the CPU, with the settings of `vllm`."""
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
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4  # GB, the same as vLLM's
    pipelines: list[Any] = []

    def parameters(request: Request) -> Any:
        settings = GenerationConfig()
        settings.do_sample = False
        settings.max_new_tokens = request["max_tokens"]
        settings.ignore_eos = request["ignore_eos"]
        settings.stop_token_ids = set(request["stop_ids"])
        if "json" in request:
            settings.structured_output_config = StructuredOutputConfig(
                json_schema=json.dumps(request["json"])
            )
        elif "regex" in request:
            settings.structured_output_config = StructuredOutputConfig(regex=request["regex"])
        return settings

    def run(requests: list[Request]) -> dict[str, Any]:
        prompts = [Tensor(np.array([request["tokens"]], dtype=np.int64)) for request in requests]
        settings = [parameters(request) for request in requests]
        outputs = pipelines[0].generate(prompts, settings)
        return {"fed": None, "answers": [output.m_generation_ids[0] for output in outputs]}

    def forget() -> None:
        # Nothing but a new pipeline empties the cache.
        pipelines.clear()
        pipelines.append(ContinuousBatchingPipeline(folder, scheduler, "CPU", properties))
        run([{"tokens": list(range(64)), "max_tokens": 4, "ignore_eos": True, "stop_ids": []}])

    forget()
    return run, forget


def _exported(model: str) -> str:
    """Return the model's folder in OpenVINO's format, with its weights as they are.

    The first process that needs it makes it.
    """
    folder = f"{model}-openvino"
    if not os.path.exists(folder):
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        main_export(
            model,
            f"{folder}-made",
            "text-generation-with-past",
            # Without a configuration large models would be compressed.
            ov_config=OVConfig(),
            # Structured outputs need the tokenizer.
            convert_tokenizer=True,
        )
        os.rename(f"{folder}-made", folder)
    return folder


def _nothing() -> None:
    """Empty no cache, because none outlives a run."""


def _model(job: dict[str, Any]) -> Any:
    """Load transformers' model of a job."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    # `generate` takes from there what it is not given.
    model.generation_config.eos_token_id = None
    has_gpu = torch.cuda.is_available() and job["device"] != "cpu"
    return model.to("cuda" if has_gpu else "cpu").eval()


def _greedy(request: Request, max_tokens: int) -> Any:
    """Return transformers' settings of greedy decoding."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None if request["ignore_eos"] else request["stop_ids"],
    )


ENGINES = {
    "generate": generate,
    "generate_batch": generate_batch,
    "vllm": vllm,
    "openvino": openvino,
}
PACKAGES = {"vllm": "vllm", "openvino": "openvino_genai"}  # the others need transformers


def serve(
    job: dict[str, Any], load: Callable[[dict[str, Any]], Loaded], versions: dict[str, str]
) -> None:
    """Load an engine, warm it up, and do the job's work for each line of standard input.

    Args:
        job: The engine, its setting, the work and the folder of the model.
        load: Loads the engine.
        versions: The versions of the engine's packages.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def write(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=output, flush=True)

    try:
        with open(job["work"], encoding="utf-8") as file:
            work = json.load(file)
        # raypd's are `units`, of which it takes nothing but the number.
        requests = work[job["shape"]]
        has_own_answers = work["decoded"] is None
        run, forget = load(job)
        run(requests[:WARM_UP])
        write({"ready": True, "versions": versions})
        for _ in sys.stdin:
            forget()  # no prompt of the last run may be in a cache
            began = time.perf_counter()
            result = run(requests)
            result.setdefault("seconds", time.perf_counter() - began)
            write(counted(result, requests, has_own_answers))
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}".strip()})
        raise


def counted(
    result: dict[str, Any], requests: list[Request], has_own_answers: bool
) -> dict[str, Any]:
    """Add the numbers of decoded and fed tokens to a result, if the engine does not tell them.

    Args:
        result: What an engine's `run` returned, which is changed in place.
        requests: The requests.
        has_own_answers: Whether the model itself decides its answers. Others are dropped.

    Returns:
        The result.
    """
    if "decoded" not in result:
        decoded = sum(len(answer) for answer in result["answers"])
        prompts = sum(len(request["tokens"]) for request in requests)
        # The last token of each answer is not fed.
        fed = prompts - result.get("cached", 0) + decoded - len(requests)
        result["decoded"] = decoded
        result.setdefault("fed", fed)
    if not has_own_answers:
        del result["answers"]
    return result


def main() -> None:
    """Run the job that the command line names."""
    del sys.path[0]  # the folder of this file, which would hide packages of the same names
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    if job["threads"] is not None:
        os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    package = PACKAGES.get(job["engine"], "transformers")
    try:
        from importlib.metadata import version

        versions = {package: __import__(package).__version__, "torch": version("torch")}
    except ImportError as error:
        reason = "is not installed" if error.name == package else "cannot be imported"
        message = f"{package} {reason} in {sys.executable}: {error}"
        print(json.dumps({"error": message}), flush=True)
        sys.exit(1)
    serve(job, ENGINES[job["engine"]], versions)


if __name__ == "__main__":
    main()
