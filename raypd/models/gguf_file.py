"""GGUF files of llama.cpp, converted once into folders that transformers reads.

A machine's workers share a folder in the cache. First it gets config.json and the tokenizer, which
take seconds and are all that a check needs. The weights follow when a worker loads them, in the
dtype in which it computes:

    <cache>/gguf/<name>-<digest>            config.json, generation_config.json, tokenizer.json
    <cache>/gguf/<name>-<digest>-bfloat16   the same, and model.safetensors
"""

import contextlib
import hashlib
import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from raypd.errors import ModelError
from raypd.models.cache import cache_folder, made_once, quiet
from raypd.models.gguf_metadata import (
    ARCHITECTURES,
    architecture_of,
    complete,
    full_rope,
    keys_of_model,
    reason_in_keys,
)
from raypd.models.gguf_types import add_types, reason_in_types

SUFFIX = ".gguf"
# Raise it when the conversion changes: old folders are then left alone and new ones made.
_FORMAT = 2
# A part of a file that was split.
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# An image encoder, which llama.cpp keeps in a separate file.
_ENCODER = re.compile(r"(^|/)mmproj", re.IGNORECASE)
# Names for ways to split text into words. transformers takes each one that it does not know for
# GPT-2's, which is right for these, ...
_AS_GPT2 = {"gpt-2", "default", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "gigachat"}
# ... and these split off each digit before.
_DIGITS_FIRST = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# Keys of tokens that end an answer.
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Keys that scale the rotary embedding, and what transformers calls them.
_ROPE_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_SERVER = "a server of llama.cpp may answer in its place (model.endpoint)"

_log = logging.getLogger(__name__)


def choose_file(files: list[str], kind: str | None, name: str) -> str:
    """Choose a GGUF file out of those of a folder or a repository.

    Args:
        files: Names of files; those that are not GGUF are ignored.
        kind: The type of the weights, such as Q4_K_M; None if there is only one file.
        name: `model.name`, for messages.

    Raises:
        ModelError: If none or several fit, or if the file was split.
    """
    choices = [
        file for file in sorted(files) if file.endswith(SUFFIX) and not _ENCODER.search(file)
    ]
    if kind is not None:
        kind_in_name = re.compile(rf"(^|[-_./]){re.escape(kind)}([-_.]|$)", re.IGNORECASE)
        choices = [file for file in choices if kind_in_name.search(file)]
    if not choices:
        of_kind = f" of type {kind}" if kind is not None else ""
        raise ModelError(f"model.name {name!r}: there is no GGUF file{of_kind} there")
    part = _PART.search(choices[0])
    if part is not None:
        raise ModelError(
            f"model.name {name!r}: {choices[0]} is one of {int(part[1])} parts; join them with "
            "`llama-gguf-split --merge` of llama.cpp, and give the whole file"
        )
    if len(choices) > 1:
        raise ModelError(
            f"model.name {name!r}: there are {len(choices)} GGUF files ({', '.join(choices[:4])}"
            f"{', ...' if len(choices) > 4 else ''}); name one of them, or its type as in "
            "FOLDER:Q4_K_M"
        )
    return choices[0]


def described(file: Path) -> Path:
    """Return a folder with the configuration and the tokenizer of a GGUF file.

    Raises:
        ModelError: If the file cannot be read, or the cache cannot be written.
    """
    return _in_cache(file, "", lambda folder: describe(file, folder))


def converted(file: Path, dtype: torch.dtype) -> Path:
    """Return a folder with the model of a GGUF file, its weights in a dtype.

    Raises:
        ModelError: If the file cannot be read, or the cache cannot be written.
    """
    description = described(file)

    def convert(folder: Path) -> None:
        _log.info("converting %s into the cache, once on this machine", file)
        convert_weights(file, folder, dtype, AutoConfig.from_pretrained(description))
        # save_pretrained has written its own configuration.
        shutil.copytree(description, folder, dirs_exist_ok=True)

    return _in_cache(file, f"-{str(dtype).removeprefix('torch.')}", convert)


def _in_cache(file: Path, suffix: str, make: Callable[[Path], object]) -> Path:
    status = file.stat()
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {_FORMAT}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    cache = cache_folder() / "gguf"
    try:
        return made_once(cache / f"{file.stem}-{digest}{suffix}", make)
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be converted into {cache} ({error}): make room there, or set "
            "RAYPD_CACHE to a folder that can be written"
        ) from error


def describe(file: Path, folder: Path) -> PretrainedConfig:
    """Write config.json, generation_config.json and the tokenizer of a GGUF file.

    Returns:
        The configuration.

    Raises:
        ModelError: If the file cannot be read.
    """
    with _explained(file):
        reader = GGUFReader(file)
        architecture = architecture_of(reader)
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file}: architecture {architecture} is not read from GGUF files "
                f"({', '.join(ARCHITECTURES)} are); {_SERVER}, or take the model's safetensors"
            )
        reason = reason_in_types(reader)
        if reason is not None:
            raise ModelError(f"{file}: {reason}; {_SERVER}")
        with quiet(), quiet_bar():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    keys = keys_of_model(reader)
    complete(config, architecture, keys)
    reason = reason_in_keys(config, keys)
    if reason is not None:
        raise ModelError(f"{file}: its {architecture}.{reason}; {_SERVER}")
    _check_rotation(file, reader, config)
    # Otherwise this would be the name inside the file, which may be that of a training run.
    config._name_or_path = ""
    config.save_pretrained(folder)
    with _explained(file):
        tokenizer = gguf_tokenizer(file, reader)
    tokenizer.model_max_length = config.get_text_config().max_position_embeddings
    tokenizer.save_pretrained(folder)
    end_tokens = [_value(reader, f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    end_ids = sorted({int(token) for token in end_tokens if token is not None})
    if isinstance(config.eos_token_id, list):
        end_ids = sorted({*end_ids, *config.eos_token_id})
    if end_ids:
        GenerationConfig(eos_token_id=end_ids).save_pretrained(folder)
    return config


def gguf_tokenizer(file: Path, reader: GGUFReader) -> Any:
    """Return the tokenizer of a GGUF file, or the one next to it in tokenizer.json."""
    if (file.parent / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(file.parent)
    with quiet(), quiet_bar():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    count = len(_value(reader, "tokenizer.ggml.tokens"))
    if len(tokenizer) > count:
        tokenizer = _without_additions(tokenizer, count)
    tokenizer.clean_up_tokenization_spaces = False
    kind = _value(reader, "tokenizer.ggml.pre")
    if _value(reader, "tokenizer.ggml.model") != "gpt2" or kind is None:
        return tokenizer
    if kind in _DIGITS_FIRST:
        # The blank before a number then becomes a separate token.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif kind not in _AS_GPT2 and not _splits_by_itself(tokenizer):
        _log.warning(
            "%s: it splits text into words as %r does, which is not known here, so it may get "
            "other tokens than in its training; put the tokenizer.json of the model beside it",
            file,
            kind,
        )
    return tokenizer


def _without_additions(tokenizer: Any, count: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer without tokens that transformers added to it.

    The model has no embeddings for them.

    Args:
        tokenizer: The tokenizer.
        count: How many tokens the file has.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: id for token, id in vocabulary.items() if id < count}
    backend = Tokenizer.from_str(json.dumps(content))
    special = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and backend.token_to_id(token) is not None
    }
    smaller = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    smaller.chat_template = tokenizer.chat_template
    return smaller


def _splits_by_itself(tokenizer: Any) -> bool:
    """Return whether transformers knew how the text is to be split."""
    return isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)


def _check_rotation(file: Path, reader: GGUFReader, config: Any) -> None:
    """Add the scaling of the rotary embedding to a configuration; transformers leaves it out.

    Raises:
        ModelError: If it is scaled in a way that is not known.
    """
    architecture = _value(reader, "general.architecture")
    prefix = f"{architecture}.rope.scaling."
    kind = _value(reader, f"{prefix}type") or "none"
    rope = full_rope(config)
    if kind in ("linear", "yarn") and rope.get("rope_type", "default") == "default":
        rope["rope_type"] = kind
        for key, name in _ROPE_SCALING.items():
            value = _value(reader, prefix + key)
            if value is not None:
                rope[name] = value
    elif kind == "none" and _value(reader, f"{prefix}factor") not in (None, 0.0, 1.0):
        raise ModelError(f"{file}: its rotary embedding is scaled in a way that it does not name")
    elif kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{file}: its rotary embedding is scaled by {kind!r}, which is not known")
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FREQUENCIES:
            _set_llama3_rotation(file, torch.from_numpy(tensor.data.copy()).float(), config)


def _set_llama3_rotation(file: Path, divisors: torch.Tensor, config: Any) -> None:
    """Scale the rotary embedding as Llama 3.1 and later do.

    Args:
        file: For messages.
        divisors: The divisors of the frequencies, [head_dim / 2].
        config: The configuration, which is changed.

    Raises:
        ModelError: If the numbers are not those of Llama 3.
    """
    plain, _ = ROPE_INIT_FUNCTIONS["llama3"](_with_llama3(config, 1.0), torch.device("cpu"))
    scaled_config = _with_llama3(config, float(divisors.max()))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled_config, torch.device("cpu"))
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise ModelError(
            f"{file}: its rotary embedding is scaled by numbers ({_ROPE_FREQUENCIES}) that are not "
            "those of Llama 3"
        )
    config.rope_parameters = scaled_config.rope_parameters


def _with_llama3(config: Any, factor: float) -> Any:
    changed = type(config).from_dict(config.to_dict())
    changed.rope_parameters = {
        **(config.rope_parameters or {}),
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return changed


def convert_weights(file: Path, folder: Path, dtype: torch.dtype, config: PretrainedConfig) -> None:
    """Write the weights of a GGUF file.

    Args:
        file: The GGUF file.
        folder: Gets model.safetensors.
        dtype: The dtype of the weights.
        config: The configuration that `describe` has written.

    Raises:
        ModelError: If it lacks some, or has some that transformers does not take.
    """
    add_types()
    with _explained(file), quiet(), quiet_bar():
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            # Weights that stay in quantized blocks could not be saved.
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            output_loading_info=True,
        )
        reader = GGUFReader(file)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{file}: {len(missing)} weights of the model are not in it ({missing[0]})"
        )
    in_file = sum(int(tensor.n_elements) for tensor in reader.tensors)
    in_file -= sum(int(t.n_elements) for t in reader.tensors if t.name == _ROPE_FREQUENCIES)
    in_model = sum(tensor.numel() for tensor in _distinct(model))
    if in_file > in_model:
        raise ModelError(
            f"{file}: it has {in_file:,} numbers, but transformers takes only {in_model:,}; "
            f"{_SERVER}"
        )
    model.config._name_or_path = ""
    with quiet():
        model.save_pretrained(folder)


def _distinct(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and the buffers of a model that are saved, shared ones once."""
    by_storage = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    return list(by_storage.values())


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Turn errors of transformers and of the package gguf into a ModelError."""
    try:
        yield
    except (ModelError, OSError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{file}: transformers cannot read this GGUF file: {type(error).__name__}: {text}; "
            f"{_SERVER}"
        ) from error


def quiet_bar() -> contextlib.AbstractContextManager[Any]:
    """Hide the progress bar of the GGUF reader, which has no switch, except in a terminal."""
    if sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())
