"""Loads a model as the configuration says: weights, dtype, device, adapter, quantization.

All errors are ModelError.
"""

import importlib.util
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from raypd.config import ModelConfig
from raypd.decoding import native
from raypd.decoding.quantized import quantize
from raypd.errors import ModelError, raised_as
from raypd.models import embedded
from raypd.models.adapter import attach_adapter, check_adapter, find_adapter, import_peft
from raypd.models.guard import check_architecture, check_decodable
from raypd.models.source import Source, explained, find_source, read_config

_QUANTIZED_LAYER = {
    "nf4": "Linear4bit",
    "int8": "Linear8bitLt",
    "w8a8": "Int8Linear",
    "fp8": "Fp8Linear",
}


@dataclass
class LoadedModel:
    """A model that can be decoded: in eval mode, without gradients, on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    dtype: torch.dtype  # of its activations: under quantization the weights are held in fewer bits
    device: torch.device
    context_length: int  # most tokens of one sequence
    # What an engine computes, once there was one: `pack` takes the weights.
    packed: torch.nn.Module | None = None


def check_model_config(config: ModelConfig, machine: bool = True) -> None:
    """Checks config.json (of the Hub, too), adapter and, if `machine`, GPUs and bitsandbytes.

    Raises ModelError.
    """
    if config.quantization != "none" and config.dtype == "float64":
        advice = "quantized layers compute in float32 at most; use dtype auto, or quantization none"
        raise ModelError(
            f"model.quantization {config.quantization} and model.dtype float64: {advice}"
        )
    kind = (
        resolve_device("auto").type
        if machine and config.device == "auto"
        else config.device.partition(":")[0]
    )
    if config.quantization != "none" and kind not in ("auto", "cpu", "cuda"):
        raise ModelError(
            f"model.quantization {config.quantization}: works on model.device cpu and cuda, "
            f"not on {kind}"
        )
    if machine:
        _check_machine(config)
    if config.name == embedded.NAME and config.adapter is None and config.revision is None:
        # Not converted yet: that takes seconds, and nothing else can be wrong with it.
        embedded.find_gguf()
        return
    source = find_source(config)
    base = read_config(source)
    _check_base(config, base)
    adapter = find_adapter(config)
    if adapter is not None:
        if config.quantization not in ("nf4", "int8"):
            import_peft()
        check_adapter(adapter, source, base)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. An adapter's own is not used: the base model's fits both."""
    source = find_source(config)
    with explained(source, "its tokenizer cannot be read"), embedded.quiet():
        return AutoTokenizer.from_pretrained(source.location, **source.arguments)


def load_model(config: ModelConfig) -> LoadedModel:
    """Loads a model, adapter merged unless quantized.

    Raises ModelError, also where decoding is not exact (`guard`).
    """
    check_model_config(config)
    source = find_source(config, weights=True)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    tokenizer = load_tokenizer(config)
    model = _load_weights(config, source, device, dtype)
    adapter = find_adapter(config)
    if adapter is not None:
        with (
            explained(source, f"the adapter {adapter.name!r} cannot be attached"),
            embedded.quiet(),
        ):
            model = attach_adapter(model, adapter, merge=config.quantization not in ("nf4", "int8"))
    model.eval()
    model.requires_grad_(False)
    rows, largest = (
        model.get_input_embeddings().weight.shape[0],
        max(tokenizer.get_vocab().values(), default=-1),
    )
    if largest >= rows:
        advice = f"ids up to {largest}, {rows} embeddings"
        raise ModelError(f"model {config.name!r}: the tokenizer of another model: {advice}")
    check_decodable(model, config.name)
    if config.quantization in ("w8a8", "fp8"):
        quantize(model, config.quantization, device)
        _check_quantized(config, model)
    context = context_length(config.name, model.config, tokenizer)
    return LoadedModel(model, tokenizer, config.name, dtype, device, context)


def check_gpu() -> None:
    """Raises ModelError where torch sees no GPU: a worker that was given one must not decode on the
    CPU instead.
    """
    if not torch.cuda.is_available():
        built = (
            f"is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "is built without CUDA"
        )
        raise ModelError(
            f"this worker was given a GPU, and torch {torch.__version__}, which {built}, "
            "sees none on its node: the "
            "driver is older than that (CUDA 13 needs 580), or the container lacks "
            "NVIDIA_VISIBLE_DEVICES=all "
            "(`nvidia-smi` there shows both); model.device=cpu with "
            "cluster.gpus_per_worker=0 decodes on CPUs"
        )


def resolve_device(name: str) -> torch.device:
    """`model.device` as a device that is there.

    `auto`: cuda where there is one, else mps, else cpu.
    """
    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(
            f"model.device {name!r} is no device: auto, cpu, cuda, cuda:1, ..."
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ModelError(
                f"model.device {name!r}: torch sees no CUDA device here; set model.device: auto"
            )
        if device.index is not None and device.index >= count:
            raise ModelError(
                f"model.device {name!r}: this machine has {count} CUDA devices, counted from cuda:0"
            )
    elif device.type != "cpu":
        with raised_as(
            ModelError, f"model.device {name!r} cannot be used here", RuntimeError, AssertionError
        ):
            torch.empty(1, device=device)
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`model.dtype` on a device. auto: bfloat16 where the processor multiplies in it, else float32:
    7 times as fast.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and _cpu_has("avx512_bf16", "amx_bf16", "bf16")
    return torch.bfloat16 if native else torch.float32


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _check_machine(config: ModelConfig) -> None:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if (
        device.type == "cpu"
        and dtype == torch.float16
        and not _cpu_has("avx512_fp16", "amx_fp16", "fp16_arith")
    ):
        slow = (
            "this processor has no float16 arithmetic and is several times slower than with float32"
        )
        raise ModelError(f"model.dtype float16: {slow}: use float32, or bfloat16 to save memory")
    if config.quantization == "w8a8":
        if device.type != "cpu" or dtype != torch.bfloat16:
            these = f"these are {device.type} and {config.dtype}"
            raise ModelError(
                f"model.quantization w8a8: works on a CPU with model.dtype bfloat16, and {these}"
            )
        if (reason := native.refusal()) is not None:
            raise ModelError(f"model.quantization w8a8: {reason}")
    elif config.quantization == "fp8":
        if not has_fp8(device):
            card = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
            needs = "needs a GPU of compute capability 8.9 or more, such as L40S or H100"
            raise ModelError(f"model.quantization fp8: {needs}; this is {card}")
        old = torch.__version__ < "2.12"  # a TorchVersion: not by letters
        if old and torch.cuda.get_device_capability(device) == (8, 9):
            raise ModelError(
                f"model.quantization fp8: torch {torch.__version__} starts it out of order "
                "on GPUs of compute "
                "capability 8.9, such as L40S, and answers would be wrong: install torch "
                "2.12 or later"
            )
        if dtype != torch.bfloat16:
            raise ModelError(
                f"model.quantization fp8: works with model.dtype bfloat16, not {config.dtype}"
            )
    elif config.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        package = "the package bitsandbytes: pip install 'raypd[quantize]'"
        raise ModelError(f"model.quantization {config.quantization} needs {package}")


def _cpu_has(*capabilities: str) -> bool:
    return any(torch.cpu.get_capabilities().get(name, False) for name in capabilities)


def _check_base(config: ModelConfig, base: PretrainedConfig) -> None:
    if getattr(base, "quantization_config", None) and config.quantization != "none":
        why = f"the weights of {config.name!r} are quantized already"
        raise ModelError(
            f"model.quantization {config.quantization}: {why}; set model.quantization: none"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base), None)
    if kind is not None:
        check_architecture(base, kind, config.name)
    # A model with remote code is checked when it is loaded.
    elif not getattr(base, "auto_map", None):
        raise ModelError(
            f"model {config.name!r}: a {base.model_type} model is not a causal language model"
        )


def context_length(name: str, base: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of one sequence, by a model's config.json, else by its tokenizer.

    Raises ModelError: neither says.
    """
    config = base.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return length
    if tokenizer.model_max_length < 1_000_000_000:  # transformers' "unknown" is 10^30
        return int(tokenizer.model_max_length)
    raise ModelError(
        f"model {name!r}: its config.json says no context length (max_position_embeddings)"
    )


def _load_weights(
    config: ModelConfig, source: Source, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    arguments: dict[str, Any] = {
        **source.arguments,
        "dtype": dtype,
        "output_loading_info": True,
        "use_safetensors": True,
    }
    bitsandbytes = config.quantization in ("nf4", "int8")
    # In FP8 `quantize` moves it there.
    if (device.type != "cpu" and config.quantization != "fp8") or bitsandbytes:
        # Straight to the device, without a copy in main memory.
        arguments["device_map"] = {"": device}
    if bitsandbytes:
        arguments["quantization_config"] = _quantization(config.quantization, dtype, device)
    with explained(source, "its weights cannot be loaded"), embedded.quiet():
        model, report = AutoModelForCausalLM.from_pretrained(source.location, **arguments)
    # transformers fills what is missing with random numbers and warns; answers from such a model
    # would be noise.
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        lost = f"{len(lacking)} of its weights are missing or have another shape ({lacking[0]})"
        raise ModelError(
            f"model {config.name!r}: {lost}: the files are not whole, or config.json is "
            "another model's"
        )
    if bitsandbytes:
        _check_quantized(config, model)
    return model


def _quantization(kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        # It warns in every layer of every pass that it computes in float16.
        logger = logging.getLogger("bitsandbytes.autograd._functions")
        logger.addFilter(lambda record: "inputs will be cast" not in record.getMessage())
        # On a GPU large inputs are quantized as all others: to look for them, every layer would
        # wait for the GPU.
        return BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=0.0 if device.type == "cuda" else 6.0
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _check_quantized(config: ModelConfig, model: PreTrainedModel) -> None:
    """Linear layers alone are quantized: a mixture whose experts are held otherwise would stay as
    large.
    """
    layer = _QUANTIZED_LAYER[config.quantization]
    # Full_weights: in matrices of decoder layers that stay as they are.
    quantized_weights = full_weights = 0
    for module_name, module in model.named_modules():
        quantized = type(module).__name__ == layer
        for weight_name, weight in module.named_parameters(recurse=False):
            if quantized and weight_name == "weight":
                quantized_weights += module.in_features * module.out_features
            elif weight.dim() >= 2 and re.search(r"\.\d+(\.|$)", module_name):
                full_weights += weight.numel()
    if quantized_weights <= full_weights:
        raise ModelError(
            f"model.quantization {config.quantization}: it quantizes only {quantized_weights} of "
            f"{quantized_weights + full_weights} weights in the layers of {config.name!r} "
            f"({model.config.model_type}); set model.quantization: none"
        )
