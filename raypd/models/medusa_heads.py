"""Medusa heads in a folder: config.json (their sizes, tree and base model) and
model.safetensors.
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


def save_heads(heads: MedusaHeads, folder: str | Path) -> None:
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
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: weight.contiguous() for name, weight in heads.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def read_sizes(folder: str | Path) -> dict[str, Any]:
    """What `save_heads` wrote to config.json.

    Raises ModelError where there are no heads, or of another shape.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ModelError(f"{_KEY} {folder}: no Medusa heads there: {name} is missing")
    with raised_as(ModelError, f"{_KEY} {folder}: config.json cannot be read", ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "heads" not in config:
        raise ModelError(
            f"{_KEY} {folder}: no Medusa heads there: config.json is that of something else"
        )
    _check_shapes(folder, config)
    return config


def _check_shapes(folder: Path, config: dict[str, Any]) -> None:
    """Raises ModelError where model.safetensors does not hold the heads that config.json tells
    of.
    """
    try:
        with torch.device("meta"):
            heads = _untrained(config)
        heads.suited(None)
        expected = {name: list(weight.shape) for name, weight in heads.state_dict().items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{_KEY} {folder}: config.json does not tell the heads' shape: {reason}"
        ) from None
    unreadable = raised_as(
        ModelError,
        f"{_KEY} {folder}: model.safetensors cannot be read",
        SafetensorError,
    )
    with unreadable, safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if shapes != expected:
        name = min(n for n in shapes.keys() | expected.keys() if shapes.get(n) != expected.get(n))
        raise ModelError(
            f"{_KEY} {folder}: config.json tells of {config['heads']} heads of "
            f"{config['layers']} layers, for "
            f"which {name} is {expected.get(name)}, and model.safetensors has "
            f"{shapes.get(name)}: the two do not "
            "belong together"
        )


def _untrained(config: dict[str, Any]) -> MedusaHeads:
    sizes = {key: config[key] for key in ("layers", "hidden_size", "vocabulary", "base_model")}
    return MedusaHeads(config["heads"], **sizes, tree=Tree(config["tree"]))


def load_heads(folder: str | Path, model: PreTrainedModel | None = None) -> MedusaHeads:
    """Heads in eval mode, on `model`'s device in its dtype, else as saved.

    Raises ModelError for none, or a misfit.
    """
    config = read_sizes(folder)
    heads = _untrained(config)
    heads.load_state_dict(load_file(Path(folder) / "model.safetensors"), assign=True)
    if model is not None:
        check_fit(
            folder,
            config,
            model.name_or_path,
            *reversed(model.get_output_embeddings().weight.shape),
        )
        heads = heads.to(model.device, model.dtype)
    return heads.eval().requires_grad_(False)


def check_fit(
    folder: str | Path, config: dict[str, Any], model: str, hidden_size: int, vocabulary: int
) -> None:
    """Raises ModelError where heads of the sizes in `config` (`read_sizes`) do not fit a model of
    the others.
    """
    if (config["hidden_size"], config["vocabulary"]) != (hidden_size, vocabulary):
        raise ModelError(
            f"{_KEY} {folder}: made for {config['base_model'] or 'another model'}, "
            "with hidden size "
            f"{config['hidden_size']} and vocabulary {config['vocabulary']}; {model!r} has "
            f"{hidden_size} and "
            f"{vocabulary}: `raypd model add-heads {model} FOLDER` writes heads that fit"
        )
