"""A model's files on a machine's own disk, copied once for all of its processes: from S3 or a
shared folder.
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
# Weights that are not read from a folder.
_FOREIGN = (".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")


def disk() -> str | None:
    """The folder that RAYPD_STAGING names, on a disk of this machine: it gets models of folders and
    of the Hub, too.
    """
    return os.environ.get("RAYPD_STAGING") or None


def staged(name: str, weights: bool = True) -> Path:
    """The folder of the copies, which is another where a file is. weights: False leaves these out.
    Raises ModelError. One process copies and others wait; a file appears whole, by a rename.
    """
    root = Path(disk() or embedded.cache_folder()) / "models"
    try:
        files = [
            file
            for file in storage.walk(name)
            if "/" not in file.name and not file.name.endswith(_FOREIGN)
        ]
        if not any(file.name == "config.json" for file in files):
            raise ModelError(
                f"model.name {name!r}: there is no config.json there, so it is not a "
                "transformers model"
            )
        stamps = repr(sorted((file.name, file.size, file.stamp) for file in files))
        digest = hashlib.sha256((storage.absolute(name) + stamps).encode()).hexdigest()[:16]
        folder = root / f"{name.rstrip('/').rpartition('/')[2]}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            for file in files:
                version = file.stamp if storage.is_remote(name) else None
                target = folder / file.name
                part = folder / f".{file.name}.part"
                if not target.exists() and (weights or not file.name.endswith(_WEIGHTS)):
                    with (
                        storage.open_read(file.path, version=version) as source,
                        part.open("wb") as copy,
                    ):
                        shutil.copyfileobj(source, copy, 16 << 20)
                    part.rename(target)
    except OSError as error:
        advice = "make room there, or let RAYPD_STAGING name another folder"
        raise ModelError(
            f"model.name {name!r}: cannot be copied to {root} ({error}): {advice}"
        ) from error
    return folder
