"""Prepares a model for a decoding method: adds control tokens, or writes Medusa heads for it.

Both are untrained; `raypd train` trains them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from raypd.config import ModelConfig
from raypd.decoding import MedusaHeads
from raypd.errors import ModelError
from raypd.models.cache import quiet, written_whole
from raypd.models.control_tokens import CONTROL_TOKENS, add_control_tokens
from raypd.models.load import LoadedModel, load_model
from raypd.models.medusa_heads import save_heads
from raypd.models.source import find_source, read_config


def add_tokens(name: str, output: str, methods: Sequence[str], seed: int = 0) -> dict[str, int]:
    """Write a copy of a model with the control tokens of decoding methods.

    Args:
        name: `model.name` of the model.
        output: The new folder.
        methods: Decoding methods with control tokens.
        seed: Determines the embeddings of the tokens.

    Returns:
        The id of each token.

    Raises:
        ModelError: If a method has no control tokens, the folder exists, or the model cannot be
            loaded.
    """
    for method in methods:
        if method not in CONTROL_TOKENS:
            raise ModelError(
                f"--for {method}: has no control tokens; choose from {', '.join(CONTROL_TOKENS)}"
            )
    with _new_folder(output) as folder:
        loaded = _load(name)
        ids: dict[str, int] = {}
        for method in methods:
            added = add_control_tokens(loaded.model, loaded.tokenizer, method, seed)
            ids.update(zip(CONTROL_TOKENS[method], added, strict=True))
        with quiet():
            loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return ids


def add_heads(name: str, output: str, count: int, layers: int) -> MedusaHeads:
    """Write untrained Medusa heads for a model.

    Args:
        name: `model.name` of the model.
        output: The new folder.
        count: How many heads, each of which predicts one token further ahead.
        layers: Residual blocks per head.

    Raises:
        ModelError: If the folder exists, or the model cannot be loaded.
    """
    with _new_folder(output) as folder:
        heads = MedusaHeads.for_model(_load(name).model, count, layers, base_model=name)
        save_heads(heads, folder)
    return heads


def _load(name: str) -> LoadedModel:
    """Load a model on the CPU in the dtype of its weights, so that a copy is exact."""
    saved = read_config(find_source(ModelConfig(name=name)))
    dtype = getattr(saved, "dtype", None) or torch.float32
    settings = {"name": name, "device": "cpu", "dtype": str(dtype).rsplit(".", 1)[-1]}
    return load_model(ModelConfig.model_validate(settings))


@contextmanager
def _new_folder(output: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes the output if nothing fails."""
    target = Path(output).expanduser().absolute()
    if target.exists():
        raise ModelError(f"{output} already exists; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as folder:
        yield folder
