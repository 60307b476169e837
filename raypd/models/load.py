"""Loads a model according to the configuration: weights, dtype, device, adapter, quantization.

All errors are ModelError.
"""

import contextlib
import copy
import importlib.util
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import raypd.models.embedded as embedded
from raypd.config import ModelConfig
from raypd.decoding import QuantizedExperts, native, quantize
from raypd.errors import ModelError, raised_as
from raypd.models.adapter import attach_adapter, check_adapter, find_adapter, import_peft
from raypd.models.cache import quiet
from raypd.models.checkpoints.files import open_tensors
from raypd.models.checkpoints.format import CheckpointFormat, FormatError
from raypd.models.checkpoints.registry import find_format
from raypd.models.checkpoints.tensors import Tensors
from raypd.models.device import cpu_has, has_fp8, resolve_device, resolve_dtype
from raypd.models.elsewhere import who_reads, who_runs
from raypd.models.end_tokens import remember_model
from raypd.models.guard import check_architecture, check_decodable
from raypd.models.source import ModelSource, explained, find_source, read_config
from raypd.models.text_part import KEY_MAPPING, has_text_part, text_tensors
from raypd.models.unexpected_keys import important_keys, is_scale

# What a model is loaded for: to be decoded by raypd's engine, to be trained, or to be written to a
# folder from which vLLM reads it.
Purpose = Literal["decode", "train", "vllm"]

_log = logging.getLogger(__name__)
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
    # The dtype of its activations; under quantization the weights have fewer bits.
    dtype: torch.dtype
    device: torch.device
    context_length: int  # most tokens of one sequence
    # The model that an engine computes, once there is one; `pack` takes the weights.
    packed: torch.nn.Module | None = None


def check_model_config(
    config: ModelConfig, machine: bool = True, purpose: Purpose = "decode"
) -> None:
    """Check config.json (also on the Hub), the adapter and the machine, without any weights.

    Args:
        config: The section `model` of a configuration.
        machine: Whether workers run on machines like this one; then GPUs and packages are checked.
        purpose: For "vllm" nothing is checked that only raypd's own engine requires.

    Raises:
        ModelError: The model cannot be used; the message says why and what to do.
    """
    if config.quantization != "none" and config.dtype == "float64":
        advice = "quantized layers compute in float32 at most; use dtype auto, or quantization none"
        raise ModelError(
            f"model.quantization {config.quantization} and model.dtype float64: {advice}"
        )
    if machine and config.device == "auto":
        kind = resolve_device("auto").type
    else:
        kind = config.device.partition(":")[0]
    if config.quantization != "none" and kind not in ("auto", "cpu", "cuda"):
        raise ModelError(
            f"model.quantization {config.quantization}: works on model.device cpu and cuda, "
            f"not on {kind}"
        )
    if config.kv_cache != "auto" and purpose != "vllm" and kind not in ("auto", "cpu", "cuda"):
        raise ModelError(
            f"model.kv_cache {config.kv_cache}: works on model.device cpu and cuda, not on {kind}"
        )
    if machine and purpose != "vllm":
        _check_machine(config)
    if config.name == embedded.NAME and config.adapter is None and config.revision is None:
        # Not converted yet: that takes seconds, and nothing else can be wrong with it.
        embedded.find_gguf()
        return
    source = find_source(config)
    base = read_config(source)
    adapter = find_adapter(config)
    # vLLM reads the weights itself, unless an adapter has to be merged into them first.
    if purpose != "vllm" or adapter is not None:
        checkpoint = find_format(source, base)
        if checkpoint is not None:
            _check_quantization(config, checkpoint)
    if purpose != "vllm":
        _check_base(config, base)
    if adapter is not None:
        if config.quantization not in ("nf4", "int8"):
            import_peft()
        check_adapter(adapter, source, base)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. An adapter's own is not used; the base model's fits both."""
    source = find_source(config)
    with explained(source, "its tokenizer cannot be read"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
    remember_model(tokenizer, source)
    return tokenizer


def load_model(config: ModelConfig, purpose: Purpose = "decode") -> LoadedModel:
    """Load a model, with its adapter merged unless the weights are quantized.

    Args:
        config: The section `model` of a configuration.
        purpose: For "decode" the codes of a quantized checkpoint may stay as they are. For "vllm"
            the model need not be one that raypd's engine decodes.

    Raises:
        ModelError: The model cannot be loaded, or is not decoded exactly (`guard`).
    """
    check_model_config(config, purpose=purpose)
    source = find_source(config, weights=True)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    tokenizer = load_tokenizer(config)
    base = read_config(source)
    checkpoint = find_format(source, base)
    adapter = find_adapter(config)
    product: str | None = None
    if purpose == "decode" and adapter is None and checkpoint is not None:
        product = _kept_product(config, checkpoint, device, dtype)
    weights = _Weights(source, base, checkpoint, product)
    model = _load_weights(config, weights, device, dtype)
    if product is None and checkpoint is not None and not getattr(model, "is_quantized", False):
        _cast_weights(model, dtype)
        _log.warning("%s", _notice(config.name, checkpoint, dtype, device))
    _fix_frequencies(model)
    if adapter is not None:
        failure = f"the adapter {adapter.name!r} cannot be attached"
        with explained(source, failure), quiet():
            model = attach_adapter(model, adapter, merge=config.quantization not in ("nf4", "int8"))
    model.eval()
    model.requires_grad_(False)
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"model {config.name!r}: the tokenizer of another model: ids up to {largest}, {rows} "
            "embeddings"
        )
    if purpose != "vllm":
        check_decodable(model, config.name, config.kv_cache)
    if product is not None:
        quantize(model, product, device, weights.codes_of(model))
    elif config.quantization in ("w8a8", "fp8"):
        quantize(model, config.quantization, device)
        _check_quantized(config, model)
    context = context_length(config.name, model.config, tokenizer)
    # Checkpoints that bitsandbytes quantized in advance have their own dtype for the other weights.
    dtype = model.get_input_embeddings().weight.dtype
    return LoadedModel(model, tokenizer, config.name, dtype, device, context)


@dataclass
class _Weights:
    """The weights of a checkpoint.

    Attributes:
        source: Where its files are.
        config: Its configuration, as `read_config` returns it.
        format: The format in which they are quantized; None if they are not.
        product: The kind of product that will compute with the codes of the files; None if the
            weights are dequantized.
        tensors: The tensors of the files, once they were opened.
    """

    source: ModelSource
    config: PretrainedConfig
    format: CheckpointFormat | None
    product: str | None
    tensors: Tensors | None = None

    @property
    def read_by_transformers(self) -> bool:
        """Whether transformers reads the files by itself."""
        if self.format is not None:
            return self.format.read_by_transformers
        return not has_text_part(self.config)

    def plain(self) -> Tensors:
        """Return the weights as they are in a checkpoint of a plain language model."""
        tensors = open_tensors(self.source)
        if has_text_part(self.config):
            tensors = text_tensors(tensors, self.config)
        self.tensors = tensors
        if self.format is None:
            return tensors
        label = self.format.label
        with raised_as(ModelError, f"model {self.source.name!r}: not {label}", FormatError):
            return self.format.plain_weights(tensors)

    def codes_of(self, model: PreTrainedModel) -> Any:
        """Return a function that finds the codes and scales of a linear layer."""
        assert self.format is not None
        assert self.tensors is not None
        modules = dict(model.named_modules())
        readers = {}
        for name, read in self.format.codes(self.tensors).items():
            module = modules.get(name.removesuffix(".weight"))
            if module is not None:
                readers[module] = read

        def codes(linear: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor] | None:
            read = readers.get(linear)
            return None if read is None else read()

        return codes


def _kept_product(
    config: ModelConfig, checkpoint: CheckpointFormat, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return the kind of product that computes with the codes of a checkpoint on a device.

    Returns:
        None if there is none here, so that the weights are dequantized.
    """
    product = checkpoint.quantized_product
    if product is None or config.quantization not in ("none", product):
        return None
    if _product_refusal(product, config.dtype, device, dtype) is not None:
        return None
    return product


def _fp8_refusal(dtype_key: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FP8 products cannot run on a device; None if they can.

    Args:
        dtype_key: `model.dtype` as the user wrote it.
        device: The device of the model.
        dtype: The dtype of its activations.
    """
    if not has_fp8(device):
        card = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        needs = "needs a GPU of compute capability 8.9 or more, such as L40S or H100"
        return f"{needs}; this is {card}"
    # This is a TorchVersion, so the comparison is not by character.
    old = torch.__version__ < "2.12"
    if old and torch.cuda.get_device_capability(device) == (8, 9):
        return (
            f"torch {torch.__version__} starts it out of order on GPUs of compute "
            "capability 8.9, such as L40S, and answers would be wrong: install torch "
            "2.12 or later"
        )
    if dtype != torch.bfloat16:
        return f"works with model.dtype bfloat16, not {dtype_key}"
    return None


def _product_refusal(
    kind: str, dtype_key: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a kind of quantized product cannot run on a device; None if it can.

    Args:
        kind: "fp8" or "w8a8".
        dtype_key: `model.dtype` as the user wrote it.
        device: The device of the model.
        dtype: The dtype of its activations.
    """
    if kind == "fp8":
        return _fp8_refusal(dtype_key, device, dtype)
    if device.type != "cpu" or dtype != torch.bfloat16:
        return (
            f"works on a CPU with model.dtype bfloat16, and these are {device.type} and {dtype_key}"
        )
    return native.refusal()


def _check_machine(config: ModelConfig) -> None:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.kv_cache == "fp8" and device.type == "cuda" and not has_fp8(device):
        # Older GPUs have no instruction that converts such numbers, and triton none in its place.
        raise ModelError(
            "model.kv_cache fp8: needs a GPU of compute capability 8.9 or more, such as L40S or "
            f"H100; this is {torch.cuda.get_device_name(device)}; set model.kv_cache: auto"
        )
    if (
        device.type == "cpu"
        and dtype == torch.float16
        and not cpu_has("avx512_fp16", "amx_fp16", "fp16_arith")
    ):
        raise ModelError(
            "model.dtype float16: this processor has no float16 arithmetic and is several times "
            "slower than with float32: use float32, or bfloat16 to save memory"
        )
    if config.quantization in ("w8a8", "fp8"):
        reason = _product_refusal(config.quantization, config.dtype, device, dtype)
        if reason is not None:
            raise ModelError(f"model.quantization {config.quantization}: {reason}")
    elif config.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization {config.quantization} needs the package bitsandbytes: pip install "
            "'raypd[quantize]'"
        )


def _check_quantization(config: ModelConfig, checkpoint: CheckpointFormat) -> None:
    """Check that weights that stay quantized are not to be quantized again."""
    if config.quantization == "none" or not checkpoint.stays_quantized:
        return
    raise ModelError(
        f"model.quantization {config.quantization}: the weights of {config.name!r} are already "
        "quantized; set model.quantization: none"
    )


def quantization_notice(config: ModelConfig) -> str | None:
    """Return a notice if this machine dequantizes a quantized checkpoint.

    Returns:
        None if it does not.
    """
    source = find_source(config)
    checkpoint = find_format(source, read_config(source))
    if checkpoint is None or checkpoint.stays_quantized:
        return None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.adapter is None and _kept_product(config, checkpoint, device, dtype) is not None:
        return None
    return _notice(config.name, checkpoint, dtype, device)


def _notice(
    name: str, checkpoint: CheckpointFormat, dtype: torch.dtype, device: torch.device
) -> str:
    dtype_name = str(dtype).removeprefix("torch.")
    return (
        f"model {name!r}: its weights, quantized by {checkpoint.label}, are dequantized to "
        f"{dtype_name} on {device.type}, {dtype.itemsize} bytes each"
    )


def _fix_frequencies(model: PreTrainedModel) -> None:
    """Fix a dynamic RoPE at the frequencies that it has for all texts that fit into the context.

    transformers changes them only beyond `max_position_embeddings`, which is the longest sequence
    here, and looks at the positions on the CPU before each pass, which a CUDA graph cannot do.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and "dynamic" in kind:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            for layer_type, of_layers in kind.items():
                if "dynamic" in str(of_layers):
                    kind[layer_type] = "default"


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give dequantized weights the dtype of the model.

    transformers leaves some in the dtype of the file or of the scales, and products of two dtypes
    fail. What a model holds in float32 on purpose stays so.
    """
    in_float32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not in_float32.intersection(name.split(".")):
            weight.data = weight.data.to(dtype)


def _check_base(config: ModelConfig, base: PretrainedConfig) -> None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base), None)
    if kind is not None:
        check_architecture(base, kind, config.name)
    # A model with remote code is checked when it is loaded.
    elif not getattr(base, "auto_map", None):
        raise ModelError(
            f"model {config.name!r}: raypd's engine does not support {base.model_type}: it is not "
            f"a causal language model; {who_runs(base)}"
        )


def context_length(name: str, base: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest number of tokens of a sequence, by config.json or else the tokenizer.

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
        f"model {name!r}: its config.json has no context length (max_position_embeddings)"
    )


def _load_weights(
    config: ModelConfig, weights: _Weights, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    arguments: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    bitsandbytes = config.quantization in ("nf4", "int8")
    # In FP8 `quantize` moves it there.
    in_fp8 = config.quantization == "fp8" or weights.product == "fp8"
    if (device.type != "cpu" and not in_fp8) or bitsandbytes:
        # Straight to the device, without a copy in main memory.
        arguments["device_map"] = {"": device}
    if bitsandbytes:
        arguments["quantization_config"] = _quantization(config.quantization, dtype, device)
    with explained(weights.source, "its weights cannot be loaded"), quiet(), _without_report():
        if weights.read_by_transformers:
            model, report = _read_by_transformers(weights, arguments)
        else:
            model, report = _read_plain(weights, arguments)
    # transformers fills what is missing with random numbers and warns; answers from such a model
    # would be noise.
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        lost = f"{len(lacking)} of its weights are missing or have another shape ({lacking[0]})"
        raise ModelError(
            f"model {config.name!r}: {lost}: the files are incomplete, or config.json is "
            "another model's"
        )
    _check_unexpected(config.name, important_keys(report["unexpected_keys"], model.config))
    if bitsandbytes:
        _check_quantized(config, model)
    return model


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Load without transformers' table of missing and unexpected weights. One line names them."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _read_by_transformers(weights: _Weights, arguments: dict[str, Any]) -> Any:
    """Return a model and the report of its loading."""
    source = weights.source
    if has_text_part(weights.config):
        arguments = {**arguments, "config": _own_config(weights.config), "key_mapping": KEY_MAPPING}
    model, report = AutoModelForCausalLM.from_pretrained(
        source.location, use_safetensors=True, **source.arguments, **arguments
    )
    if has_text_part(weights.config):
        # A copy of the model is saved with the names of a plain one.
        model._weight_conversions = None
    return model, report


def _read_plain(weights: _Weights, arguments: dict[str, Any]) -> Any:
    """Return a model of the weights that raypd reads itself, and the report of its loading."""
    config = _own_config(weights.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelError(
            f"model {weights.source.name!r}: raypd reads quantized weights only of models that "
            f"transformers has code for, and {config.model_type} comes with its own; "
            f"{who_reads('')}"
        )
    model, report = kind.from_pretrained(
        None, config=config, state_dict=weights.plain(), **arguments
    )
    revision = weights.source.arguments["revision"]
    # Without a generation_config.json, config.json says it all.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            weights.source.location, revision=revision
        )
    return model, report


def _own_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration for a separate model, which may be saved as such."""
    config = copy.deepcopy(config)
    if has_text_part(config):
        del config.text_part_of
    return config


def _check_unexpected(name: str, keys: list[str]) -> None:
    """Raise ModelError if a checkpoint has tensors that the model has no place for."""
    if not keys:
        return
    tensors = f"{len(keys)} tensors that its model does not have ({keys[0]})"
    if is_scale(keys[0]):
        raise ModelError(
            f"model {name!r}: its checkpoint has {tensors}: its weights are quantized in a way "
            f"that config.json does not name; {who_reads('')}"
        )
    raise ModelError(
        f"model {name!r}: its checkpoint has {tensors}: config.json is another model's, or the "
        "weights have to be merged first"
    )


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
    """Raises ModelError where most weights stay as they are: bitsandbytes quantizes linear layers
    alone, so a mixture would stay as large.
    """
    layer = _QUANTIZED_LAYER[config.quantization]
    # Full_weights: in matrices of decoder layers that stay as they are.
    quantized_weights = full_weights = 0
    for module_name, module in model.named_modules():
        quantized = type(module).__name__ == layer
        for weight_name, weight in module.named_parameters(recurse=False):
            if isinstance(module, QuantizedExperts):
                quantized_weights += weight.numel()
            elif quantized and weight_name == "weight":
                quantized_weights += module.in_features * module.out_features
            elif weight.dim() >= 2 and re.search(r"\.\d+(\.|$)", module_name):
                full_weights += weight.numel()
    if quantized_weights <= full_weights:
        raise ModelError(
            f"model.quantization {config.quantization}: it quantizes only {quantized_weights} of "
            f"{quantized_weights + full_weights} weights in the layers of {config.name!r} "
            f"({model.config.model_type}); set model.quantization: none"
        )
