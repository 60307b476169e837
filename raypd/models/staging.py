"""Copies a model's files to a machine's own disk, once for all of its processes.

The files come from S3 or another remote storage, or from a folder that many machines share.
"""

import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

import raypd.models.embedded as embedded
from raypd import storage
from raypd.errors import ModelError

_WEIGHTS = ".safetensors"
# Weights in formats that raypd does not read from a folder.
_UNSUPPORTED_WEIGHTS = (".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")
# Bytes that are copied at a time; large reads are fast from object storage.
_CHUNK_BYTES = 16 << 20


def disk() -> str | None:
    """Return the folder on this machine's disk that RAYPD_STAGING names; None if it is not set.

    If it is set, local models and those of the Hub are copied there, too.
    """
    return os.environ.get("RAYPD_STAGING") or None


def staged(name: str, weights: bool = True) -> Path:
    """Copy a model's files to this machine's disk, and return their folder.

    One process copies while others wait. A file appears by a rename, so it is always whole. If a
    file of the model changes, the copies go to another folder.

    Args:
        name: The folder of the model, local or remote.
        weights: Whether to copy the weights.

    Raises:
        ModelError: If there is no model, or it cannot be copied.
    """
    root = Path(disk() or embedded.cache_folder()) / "models"
    try:
        files = _model_files(name)
        if not any(file.name == "config.json" for file in files):
            raise ModelError(
                f"model.name {name!r}: there is no config.json there, so it is not a "
                "transformers model"
            )
        folder = root / _folder_name(name, files)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            for file in files:
                if weights or not file.name.endswith(_WEIGHTS):
                    _copy(file, folder, storage.is_remote(name))
    except OSError as error:
        raise ModelError(
            f"model.name {name!r} cannot be copied to {root} ({error}): make room there, or let "
            "RAYPD_STAGING name another folder"
        ) from error
    return folder


def _model_files(name: str) -> list[storage.Object]:
    """List the files of a model's folder without those in folders below it."""
    files = []
    for file in storage.walk(name):
        if "/" not in file.name and not file.name.endswith(_UNSUPPORTED_WEIGHTS):
            files.append(file)
    return files


def _folder_name(name: str, files: list[storage.Object]) -> str:
    """Return a name that is different for every content of a model's folder."""
    stamps = repr(sorted((file.name, file.size, file.stamp) for file in files))
    digest = hashlib.sha256((storage.absolute(name) + stamps).encode()).hexdigest()[:16]
    last_part = name.rstrip("/").rpartition("/")[2]
    return f"{last_part}-{digest}"


def _copy(file: storage.Object, folder: Path, is_remote: bool) -> None:
    """Copy a file into a folder unless it is there already."""
    target = folder / file.name
    if target.exists():
        return
    # An object that was replaced since it was listed must not end in the folder of the old one.
    version = file.stamp if is_remote else None
    part = folder / f".{file.name}.part"
    with storage.open_read(file.path, version=version) as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    part.rename(target)
