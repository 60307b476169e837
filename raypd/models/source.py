"""Finds a model's files (the embedded model, a folder, the Hub) and explains errors of loading."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, errors, try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig

import raypd.models.embedded as embedded
from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.staging import disk, staged

# The id of a model on the Hub: a name, or an owner and a name.
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
# Characters of another library's error that a message shows.
_MAX_ERROR = 400


@dataclass(frozen=True)
class Source:
    """Where the files of a model are.

    Attributes:
        name: `model.name` of the configuration.
        location: What transformers' from_pretrained takes: a folder or a Hub id.
        local: Whether it is a folder.
        revision: The revision on the Hub; None for the default one.
        trust_remote_code: Whether code that comes with the weights may run.
    """

    name: str
    location: str
    local: bool
    revision: str | None
    trust_remote_code: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every from_pretrained.

        trust_remote_code is always among them, because without it transformers may ask a person.
        """
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


def looks_local(name: str) -> bool:
    """Return whether a name means a path, because it is written as one or the path exists."""
    if name.startswith((".", "/", "~")) or name.endswith("/"):
        return True
    return Path(name).expanduser().exists()


def find_source(config: ModelConfig, weights: bool = False) -> Source:
    """Return where the files of `model.name` are, without a request to the Hub.

    The embedded model is converted when it is first used.

    Args:
        config: The section `model`.
        weights: Whether the weights will be read. They are then copied to this machine's disk if
            they are remote or RAYPD_STAGING is set.

    Raises:
        ModelError: If the name means neither a model's folder nor a Hub id.
    """
    name = config.name
    is_remote = storage.is_remote(name)
    if name == embedded.NAME or is_remote or looks_local(name):
        if config.revision is not None:
            raise ModelError(
                f"model.revision {config.revision!r}: revisions belong to Hub ids, but {name!r} "
                "is local; set model.revision to null"
            )
        if is_remote:
            folder = staged(name, weights)
        elif name == embedded.NAME:
            folder = embedded.embedded_model()
        else:
            folder = _checked_folder(name)
            if weights and disk():
                folder = staged(str(folder))
        return Source(name, str(folder), True, None, config.trust_remote_code)
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model.name {name!r} is neither a folder (local or s3://) nor a Hub id (owner/name); "
            f"the embedded model is {embedded.NAME}"
        )
    if weights and disk():
        snapshot = _cached(name, config.revision)
        if snapshot is not None:
            return Source(name, str(staged(str(snapshot))), True, None, config.trust_remote_code)
    return Source(name, name, False, config.revision, config.trust_remote_code)


def _cached(name: str, revision: str | None) -> Path | None:
    """Return the folder of a Hub model in the Hub's cache; None if it or its weights are not
    complete there.
    """
    file = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(file, str):
        return None
    with suppress(ModelError):
        _check_weights(name, Path(file).parent)
        return Path(file).parent
    return None


def _checked_folder(name: str) -> Path:
    """Return the folder of a local model; raise ModelError if it is none."""
    folder = Path(name).expanduser().absolute()
    if not folder.exists():
        raise ModelError(f"model.name {name!r}: there is no folder {folder}")
    if not folder.is_dir():
        raise ModelError(
            f"model.name {name!r} is a file; set model.name to the folder with config.json and "
            "the weights"
        )
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model.name {name!r} holds a peft adapter, not a model: set model.adapter to it, "
                "and model.name to its base model"
            )
        raise ModelError(
            f"model.name {name!r}: {folder} has no config.json, so it is not a transformers model"
        )
    _check_weights(name, folder)
    return folder


def _check_weights(name: str, folder: Path) -> None:
    """Raise ModelError if a file of weights, or a part that an index names, is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"model.name {name!r}: {index} cannot be read: {error!r}") from error
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            raise ModelError(
                f"model.name {name!r}: {len(missing)} of {len(parts)} files of weights that "
                f"{index.name} names are missing ({missing[0]}): copy them again"
            )
    elif not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"model.name {name!r}: {folder} has no model.safetensors; pickles (.bin) are not read"
        )


def read_config(source: Source) -> PretrainedConfig:
    """Return the model's config.json, fetched from the Hub if necessary.

    Raises:
        ModelError: If it cannot be read.
    """
    with explained(source, "its config.json cannot be read"):
        return AutoConfig.from_pretrained(source.location, **source.arguments)


@contextmanager
def explained(source: Source, failure: str) -> Iterator[None]:
    """Turn errors of transformers, the Hub's client and torch into a ModelError with advice.

    Args:
        source: The model that is being read.
        failure: What failed, for an error without advice, such as "its weights cannot be loaded".
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        explanation = _explanation(error, source)
        if explanation is None:
            explanation = f"{failure}: {type(error).__name__}: {_shortened(str(error))}"
        raise ModelError(f"model {source.name!r}: {explanation}") from error


def _shortened(text: str) -> str:
    """Return the beginning of an error's text on one line; transformers writes whole pages."""
    line = " ".join(text.split())
    if len(line) <= _MAX_ERROR:
        return line
    return f"{line[:_MAX_ERROR]}..."


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, the cause of that, and so on."""
    causes = [error]
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _explanation(error: BaseException, source: Source) -> str | None:
    """Return what went wrong and what to do, for errors that are known; otherwise None."""
    causes = _causes(error)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(torch.OutOfMemoryError):
        return (
            "does not fit into the GPU's memory: use a smaller model, model.quantization: nf4, "
            "or a larger GPU"
        )
    if caused_by(errors.GatedRepoError):
        return (
            "is gated on the Hub: accept its terms on its page, then set HF_TOKEN or run `hf "
            "auth login`"
        )
    if caused_by(errors.RevisionNotFoundError):
        return (
            f"has no revision {source.revision!r} on the Hub: model.revision takes a branch, a "
            "tag or a commit"
        )
    if caused_by(errors.RepositoryNotFoundError):
        return (
            "is not a model on the Hub, or is a private one (set HF_TOKEN or run `hf auth "
            "login`), nor is it a folder here"
        )
    is_unavailable = caused_by(
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError
    )
    if is_unavailable and not source.local:
        return _missing_from_cache(source)
    if any("trust_remote_code" in str(cause) for cause in causes):
        return "comes with code of its own: read it, then set model.trust_remote_code: true"
    return None


def _missing_from_cache(source: Source) -> str:
    reason = "the Hub cannot be reached"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    revision = ""
    if source.revision:
        revision = f" at revision {source.revision!r}"
    return (
        f"is not in the Hub's cache{revision} ({constants.HF_HUB_CACHE}), and {reason}: run "
        f"`hf download {source.location}` where there is a network, or set model.name to a local "
        "folder"
    )
