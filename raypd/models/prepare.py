"""A model made ready for a decoding method: control tokens added, or Medusa heads put beside it;
then to be trained.
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
    """Saves a copy of a model with control tokens; {token: id}.

    Raises ModelError, also where `output` exists.
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
            ids |= zip(CONTROL_TOKENS[method], added, strict=True)
        with quiet():
            loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return ids


def add_heads(name: str, output: str, count: int, layers: int) -> MedusaHeads:
    """Saves untrained heads of `layers` residual blocks each.

    Raises ModelError, also where `output` exists.
    """
    with _new_folder(output) as folder:
        heads = MedusaHeads.for_model(_load(name).model, count, layers, base_model=name)
        save_heads(heads, folder)
    return heads


def _load(name: str) -> LoadedModel:
    saved = (
        getattr(read_config(find_source(ModelConfig(name=name))), "dtype", None) or torch.float32
    )
    return load_model(
        ModelConfig.model_validate(
            {"name": name, "device": "cpu", "dtype": str(saved).split(".")[-1]}
        )
    )


@contextmanager
def _new_folder(output: str) -> Iterator[Path]:
    target = Path(output).expanduser().absolute()
    if target.exists():
        raise ModelError(f"{output}: exists already; give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as folder:
        yield folder
