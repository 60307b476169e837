"""Finds LoRA adapters of peft, checks them against their base model, and attaches them to it.

The check needs no weights, so an adapter that does not fit is refused before they are loaded.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from raypd.models.source import HUB_ID, ModelSource, explained, looks_local

_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


def import_peft() -> None:
    """Import peft without torch's compiler.

    peft imports bitsandbytes, which would load the compiler for its own weights (1.5 s).
    """
    before = os.environ.get(_NO_COMPILER)
    # torch reads the variable in each call of `compile`, so it is set during the import only.
    os.environ[_NO_COMPILER] = "1"
    try:
        import peft  # noqa: F401
    finally:
        if before is None:
            del os.environ[_NO_COMPILER]
        else:
            os.environ[_NO_COMPILER] = before


@contextmanager
def experts_are_parameters() -> Iterator[None]:
    """Make an adapter without a false warning of peft.

    peft looks for the targets of `rank_pattern` only among modules, and warns that it ignores the
    rank of experts, which are parameters. In fact it does not ignore it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys did not match .*\['experts\."
        )
        yield


@dataclass(frozen=True)
class Adapter:
    """An adapter's name in the configuration, and its files."""

    name: str
    settings: Path
    weights: Path


def find_adapter(config: ModelConfig) -> Adapter | None:
    """Return the files of `model.adapter`, fetched if it is a Hub id; None if it is not set.

    Raises:
        ModelError: If there is no adapter of that name.
    """
    name = config.adapter
    if name is None:
        return None
    if looks_local(name):
        return _local_adapter(name)
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model.adapter {name!r} is neither a local folder nor a Hub id (owner/name)"
        )
    source = ModelSource(name, name, local=False, revision=None, trust_remote_code=False)
    with explained(source, "the adapter cannot be fetched"):
        try:
            settings = Path(hf_hub_download(name, _SETTINGS))
            weights = Path(hf_hub_download(name, _WEIGHTS))
        except LocalEntryNotFoundError:
            # The Hub cannot be reached, which `explained` describes.
            raise
        except EntryNotFoundError as error:
            raise ModelError(
                f"model.adapter {name!r} has no {_SETTINGS} or no {_WEIGHTS}"
            ) from error
    return Adapter(name, settings, weights)


def _local_adapter(name: str) -> Adapter:
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


def check_adapter(adapter: Adapter, source: ModelSource, base: PretrainedConfig) -> None:
    """Check that an adapter is a LoRA of a model, by the names and shapes of all tensors.

    Args:
        adapter: The adapter.
        source: Where the base model is.
        base: The base model's config.json.

    Raises:
        ModelError: If it is not a LoRA, or does not fit the base model.
    """
    try:
        settings = json.loads(adapter.settings.read_text(encoding="utf-8"))
        kind = settings["peft_type"]
        trained_for = settings.get("base_model_name_or_path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model.adapter {adapter.name!r}: {adapter.settings} cannot be read: {error!r}"
        ) from error
    if kind != "LORA":
        raise ModelError(
            f"model.adapter {adapter.name!r} is of type {kind}; raypd takes LoRA adapters"
        )
    if trained_for and _contradicts(str(trained_for), source.name):
        raise ModelError(
            f"model.adapter {adapter.name!r} was trained for {trained_for!r}, not for model.name "
            f"{source.name!r}: set model.name to {trained_for!r}, or choose another adapter"
        )
    reason = _misfit(adapter, source, base)
    if reason is not None:
        origin = ""
        if trained_for:
            origin = f" (it was trained for {trained_for!r})"
        raise ModelError(
            f"model.adapter {adapter.name!r} does not fit model.name {source.name!r}{origin}: "
            f"{reason}"
        )


def _contradicts(trained_for: str, base: str) -> bool:
    """Return whether two names are Hub ids of different weights.

    A copy under another owner counts as the same.
    """
    for name in (trained_for, base):
        if looks_local(name) or not HUB_ID.fullmatch(name):
            return False
    return trained_for.rsplit("/", 1)[-1].lower() != base.rsplit("/", 1)[-1].lower()


def _misfit(adapter: Adapter, source: ModelSource, base: PretrainedConfig) -> str | None:
    """Return why an adapter does not fit its base model; None if it does.

    The adapter is put on a model without storage (device meta), and the names and shapes of all
    its tensors are compared.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    try:
        settings = PeftConfig.from_pretrained(str(adapter.settings.parent))
    except Exception as error:
        # peft raises many kinds of errors for settings that contradict each other.
        return f"{adapter.settings}: {error}"
    # An initialisation from the weights (pissa, olora) has none to read here.
    settings.init_lora_weights = False
    with torch.device("meta"):
        with explained(source, "its model cannot be built"):
            empty = AutoModelForCausalLM.from_config(
                base, trust_remote_code=source.trust_remote_code
            )
        try:
            with experts_are_parameters():
                wrapped = PeftModel(empty, settings, low_cpu_mem_usage=True)
        except Exception as error:
            # The model has none of the target modules, or lacks what the settings need.
            return str(error)
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    expected = {key: tuple(value.shape) for key, value in state.items()}
    # Embeddings may be saved along with the adapter; they are parameters of the model.
    model_shapes = {key: tuple(value.shape) for key, value in wrapped.named_parameters()}
    model_shapes.update(expected)
    try:
        with safe_open(adapter.weights, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        return f"{adapter.weights} cannot be read: {error}"
    for key, shape in shapes.items():
        if key not in model_shapes:
            return f"the model has nothing that corresponds to the adapter's tensor {key!r}"
        needed = model_shapes[key]
        if shape != needed:
            return f"its tensor {key!r} is {list(shape)}, and the model needs {list(needed)}"
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        return (
            f"{len(missing)} of the {len(expected)} tensors that its settings require are "
            f"missing ({missing[0]!r})"
        )
    return None


def attach_adapter(model: PreTrainedModel, adapter: Adapter, merge: bool) -> PreTrainedModel:
    """Return a model with an adapter.

    Args:
        model: The base model.
        adapter: An adapter that fits it.
        merge: Whether to merge the adapter into the weights. Quantized weights would have to be
            rounded again, so their adapter stays separate.

    Raises:
        ModelError: If a merged weight is not finite.
    """
    from peft import PeftModel

    with experts_are_parameters():
        wrapped: Any = PeftModel.from_pretrained(
            model, str(adapter.settings.parent), is_trainable=False
        )
    if not merge:
        return wrapped.base_model.model
    with raised_as(ModelError, f"model.adapter {adapter.name!r} cannot be merged", ValueError):
        return wrapped.merge_and_unload(safe_merge=True)
