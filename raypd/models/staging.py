"""Copies a model's files to a machine's own disk, once for all of its processes.

The files come from S3 or another remote storage, or from a folder that many machines share.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from raypd import storage
from raypd.errors import ModelError
from raypd.models.cache import cache_folder

_WEIGHTS = ".safetensors"
# Bytes that are copied at a time; large reads are fast from object storage.
_CHUNK_BYTES = 16 << 20
# Weights in formats that raypd does not read from a folder.
_UNSUPPORTED_WEIGHTS = (".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")


def disk() -> str | None:
    """Return the folder on this machine's disk that RAYPD_STAGING names; None if it is not set.

    If it is set, local models and those of the Hub are copied there, too.
    """
    return os.environ.get("RAYPD_STAGING") or None


def staged(name: str, weights: bool = True) -> Path:
    """Copy a model's files to this machine's disk; one process copies and others wait.

    Args:
        name: The folder, on this machine or in an object store.
        weights: Whether weights are copied, too.

    Returns:
        The folder of the copies, which differs if a file has changed.

    Raises:
        ModelError: If the model is not there, or cannot be copied.
    """
    with _explained(name):
        files = [
            file
            for file in storage.walk(name)
            if "/" not in file.name and not file.name.endswith(_UNSUPPORTED_WEIGHTS)
        ]
        if not any(file.name == "config.json" for file in files):
            raise ModelError(
                f"model.name {name!r}: there is no config.json there, so it is not a "
                "transformers model"
            )
        folder = _folder_for(name, files)
        if not weights:
            files = [file for file in files if not file.name.endswith(_WEIGHTS)]
        _copy(name, files, folder)
    return folder


def staged_file(name: str, file_name: str) -> Path:
    """Copy one file of a folder to this machine's disk.

    Args:
        name: The folder, in an object store.
        file_name: The name of the file in it.

    Returns:
        The copy, whose folder differs if the file has changed.

    Raises:
        ModelError: If the file is not there, or cannot be copied.
    """
    with _explained(name):
        files = [file for file in storage.walk(name) if file.name == file_name]
        if not files:
            raise ModelError(f"model.name {name}/{file_name}: there is no such file")
        folder = _folder_for(name, files)
        _copy(name, files, folder)
    return folder / file_name


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise errors of storage and disk as a ModelError with advice."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"model.name {name!r}: cannot be copied to {_root()} ({error}): make room there, or "
            "let RAYPD_STAGING name another folder"
        ) from error


def _root() -> Path:
    return Path(disk() or cache_folder()) / "models"


def _folder_for(name: str, files: list[storage.Object]) -> Path:
    """Return the folder for copies of files as they are now."""
    stamps = repr(sorted((file.name, file.size, file.stamp) for file in files))
    digest = hashlib.sha256((storage.absolute(name) + stamps).encode()).hexdigest()[:16]
    return _root() / f"{name.rstrip('/').rpartition('/')[2]}-{digest}"


def _copy(name: str, files: list[storage.Object], folder: Path) -> None:
    """Copy files that are not there yet; each appears whole, by a rename."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        for file in files:
            target = folder / file.name
            if target.exists():
                continue
            # An object that was replaced since it was listed belongs to another folder.
            version = file.stamp if storage.is_remote(name) else None
            part = folder / f".{file.name}.part"
            with storage.open_read(file.path, version=version) as source, part.open("wb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK_BYTES)
            part.rename(target)
