"""Reads and writes folders of Medusa heads.

A folder has config.json (the sizes of the heads, their tree and base model) and model.safetensors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from raypd.decoding import MedusaHeads, Tree
from raypd.errors import ModelError, raised_as

_KEY = "decoding.options.heads"
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"


def save_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Write heads into a folder, which is made if necessary."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "heads": heads.count,
        "layers": heads.layers,
        "hidden_size": heads.hidden_size,
        "vocabulary": heads.vocabulary,
        "base_model": heads.base_model,
        "tree": heads.tree.paths,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: weight.contiguous() for name, weight in heads.state_dict().items()}
    save_file(weights, folder / _WEIGHTS)


def read_sizes(folder: str | Path) -> dict[str, Any]:
    """Return what `save_heads` wrote to config.json, without reading the weights.

    Raises:
        ModelError: If the folder holds no heads, or heads of another shape than its config.json
            says.
    """
    folder = Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"{_KEY} {folder}: no Medusa heads there: {name} is missing")
    with raised_as(ModelError, f"{_KEY} {folder}: {_CONFIG} cannot be read", ValueError):
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "heads" not in config:
        raise ModelError(
            f"{_KEY} {folder}: no Medusa heads there: {_CONFIG} describes something else"
        )
    _check_shapes(folder, config)
    return config


def _check_shapes(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError if the weights are not those of the heads that config.json describes."""
    try:
        with torch.device("meta"):
            heads = _new_heads(config)
        heads.suited(None)
        expected = {name: list(weight.shape) for name, weight in heads.state_dict().items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{_KEY} {folder}: {_CONFIG} does not describe the shape of the heads: "
            f"{type(error).__name__}: {error}"
        ) from None
    unreadable = raised_as(
        ModelError, f"{_KEY} {folder}: {_WEIGHTS} cannot be read", SafetensorError
    )
    with unreadable, safe_open(folder / _WEIGHTS, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    names = shapes.keys() | expected.keys()
    differing = [name for name in names if shapes.get(name) != expected.get(name)]
    if differing:
        name = min(differing)
        raise ModelError(
            f"{_KEY} {folder}: {_CONFIG} and {_WEIGHTS} do not belong together: for "
            f"{config['heads']} heads of {config['layers']} layers {name} has the shape "
            f"{expected.get(name)}, but the file has {shapes.get(name)}"
        )


def _new_heads(config: dict[str, Any]) -> MedusaHeads:
    """Return untrained heads of the sizes in a config.json."""
    return MedusaHeads(
        config["heads"],
        layers=config["layers"],
        hidden_size=config["hidden_size"],
        vocabulary=config["vocabulary"],
        base_model=config["base_model"],
        tree=Tree(config["tree"]),
    )


def load_heads(folder: str | Path, model: PreTrainedModel | None = None) -> MedusaHeads:
    """Load heads for decoding.

    Args:
        folder: Their folder.
        model: The model that they belong to; the heads get its device and dtype. None leaves them
            on the CPU as they were saved.

    Raises:
        ModelError: If there are no heads, or they do not fit the model.
    """
    config = read_sizes(folder)
    heads = _new_heads(config)
    heads.load_state_dict(load_file(Path(folder) / _WEIGHTS), assign=True)
    if model is not None:
        vocabulary, hidden_size = model.get_output_embeddings().weight.shape
        check_fit(folder, config, model.name_or_path or "the model", hidden_size, vocabulary)
        heads = heads.to(model.device, model.dtype)
    return heads.eval().requires_grad_(False)


def check_fit(
    folder: str | Path, config: dict[str, Any], model: str, hidden_size: int, vocabulary: int
) -> None:
    """Check that heads fit a model.

    Args:
        folder: The folder of the heads, for the message.
        config: What `read_sizes` returned for it.
        model: The name of the model, for the message.
        hidden_size: The hidden size of the model.
        vocabulary: The number of its output embeddings.

    Raises:
        ModelError: If they do not fit.
    """
    if config["hidden_size"] == hidden_size and config["vocabulary"] == vocabulary:
        return
    raise ModelError(
        f"{_KEY} {folder}: made for {config['base_model'] or 'another model'}, with hidden size "
        f"{config['hidden_size']} and vocabulary {config['vocabulary']}, but {model!r} has hidden "
        f"size {hidden_size} and vocabulary {vocabulary}: `raypd model add-heads {model} FOLDER` "
        "writes heads that fit"
    )
