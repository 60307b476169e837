"""LoRA adapters (peft): found, checked against their base model before weights are loaded, and
attached to it.
"""

import json
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from raypd.config import ModelConfig
from raypd.errors import ModelError, raised_as
from raypd.models.source import HUB_ID, Source, explained, looks_local

_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NO_COMPILER = "TORCHDYNAMO_DISABLE"
# Warnings of bitsandbytes and torch that peft's import causes and that a user can do nothing about.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)


def import_peft() -> None:
    """Imports peft without torch's compiler (1.5 s), which bitsandbytes, imported by it, wants for
    its own weights.
    """
    before = os.environ.get(_NO_COMPILER)
    os.environ[_NO_COMPILER] = "1"  # torch reads it in each call of `compile`
    try:
        import peft  # noqa: F401
    finally:
        if before is None:
            del os.environ[_NO_COMPILER]
        else:
            os.environ[_NO_COMPILER] = before


@dataclass(frozen=True)
class Adapter:
    name: str
    settings: Path
    weights: Path


def find_adapter(config: ModelConfig) -> Adapter | None:
    """The files of `model.adapter`, fetched if it is a Hub id; None without one.

    Raises ModelError: not there.
    """
    name = config.adapter
    if name is None:
        return None
    if looks_local(name):
        folder = Path(name).expanduser().absolute()
        if not folder.is_dir():
            raise ModelError(f"model.adapter {name!r}: there is no folder {folder}")
        if not (folder / _SETTINGS).is_file():
            raise ModelError(
                f"model.adapter {name!r}: {folder} has no {_SETTINGS}, so it is not a peft adapter"
            )
        if not (folder / _WEIGHTS).is_file():
            raise ModelError(f"model.adapter {name!r}: {folder} has no {_WEIGHTS}")
        return Adapter(name, folder / _SETTINGS, folder / _WEIGHTS)
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model.adapter {name!r} is neither a local folder nor a Hub id (owner/name)"
        )
    with explained(Source(name, name, False, None, False), "the adapter cannot be fetched"):
        try:
            return Adapter(
                name, *(Path(hf_hub_download(name, file)) for file in (_SETTINGS, _WEIGHTS))
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError as error:
            raise ModelError(
                f"model.adapter {name!r} has no {_SETTINGS} or no {_WEIGHTS}"
            ) from error


def check_adapter(adapter: Adapter, source: Source, base: PretrainedConfig) -> None:
    """Checks names and shapes of all tensors, without weights.

    Raises ModelError for no LoRA of this base model.
    """
    try:
        settings = json.loads(adapter.settings.read_text(encoding="utf-8"))
        kind = settings["peft_type"]
        named = settings.get("base_model_name_or_path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model.adapter {adapter.name!r}: {adapter.settings} cannot be read: {error!r}"
        ) from error
    if kind != "LORA":
        raise ModelError(
            f"model.adapter {adapter.name!r} is of type {kind}; raypd takes LoRA adapters"
        )
    if named and _contradicts(str(named), source.name):
        why = f"was trained for {named!r}, not for model.name {source.name!r}"
        raise ModelError(
            f"model.adapter {adapter.name!r} {why}: set model.name to {named!r}, or take "
            "another adapter"
        )
    reason = _misfit(adapter, source, base)
    if reason is not None:
        trained = f" (it was trained for {named!r})" if named else ""
        raise ModelError(
            f"model.adapter {adapter.name!r} does not fit model.name {source.name!r}{trained}: "
            f"{reason}"
        )


def _contradicts(named: str, base: str) -> bool:
    """Whether two names are Hub ids of different weights.

    A copy under another owner counts as the same.
    """
    if (
        looks_local(named)
        or looks_local(base)
        or not (HUB_ID.fullmatch(named) and HUB_ID.fullmatch(base))
    ):
        return False
    return named.rsplit("/", 1)[-1].lower() != base.rsplit("/", 1)[-1].lower()


def _misfit(adapter: Adapter, source: Source, base: PretrainedConfig) -> str | None:
    """Puts the adapter on a model without storage (device meta), and compares names and shapes of
    all tensors.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    try:
        settings = PeftConfig.from_pretrained(str(adapter.settings.parent))
    except Exception as error:  # peft checks what goes together, each in its own way
        return f"{adapter.settings}: {error}"
    # An initialisation from the weights (pissa, olora) has none to read here.
    settings.init_lora_weights = False
    with torch.device("meta"):
        with explained(source, "its model cannot be built"):
            empty = AutoModelForCausalLM.from_config(
                base, trust_remote_code=source.trust_remote_code
            )
        try:
            wrapped = PeftModel(empty, settings, low_cpu_mem_usage=True)
        # None of its target modules is there, or what is set cannot be made.
        except Exception as error:
            return str(error)
    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    parameters = {key: tuple(value.shape) for key, value in wrapped.named_parameters()}
    try:
        with safe_open(adapter.weights, framework="pt") as file:
            tensors = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        return f"{adapter.weights} cannot be read: {error}"
    for key, shape in tensors.items():
        # Parameters: embeddings that were saved along with the adapter.
        needed = shapes.get(key, parameters.get(key))
        if needed is None:
            return f"it has a tensor {key!r}, for which the model has no place"
        if needed != shape:
            return f"its tensor {key!r} is {list(shape)}, and the model needs {list(needed)}"
    missing = sorted(set(shapes) - set(tensors))
    if missing:
        return (
            f"{len(missing)} of the {len(shapes)} tensors that its settings ask for are not "
            f"there ({missing[0]!r})"
        )
    return None


def attach_adapter(model: PreTrainedModel, adapter: Adapter, merge: bool) -> PreTrainedModel:
    """The model with the adapter, merged or beside it; quantized weights would have to be rounded
    again for a merge.
    """
    from peft import PeftModel

    wrapped: Any = PeftModel.from_pretrained(
        model, str(adapter.settings.parent), is_trainable=False
    )
    if merge:
        with raised_as(ModelError, f"model.adapter {adapter.name!r} cannot be merged", ValueError):
            # ValueError: values that are not finite.
            return wrapped.merge_and_unload(safe_merge=True)
    return wrapped.base_model.model
