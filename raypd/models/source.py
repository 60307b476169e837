"""Finds a model's files and explains errors of loading.

A model is the embedded one, a folder, an id on the Hub, or a GGUF file.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_session,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

import raypd.models.embedded as embedded
import raypd.models.gguf_file as gguf_file
from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.device import resolve_device, resolve_dtype
from raypd.models.staging import disk, staged, staged_file
from raypd.models.text_part import text_config

# The id of a model on the Hub: a name, or an owner and a name.
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
# Characters of another library's error that a message shows.
_MAX_ERROR = 400
# Seconds to wait for the Hub's first answer: before a model is loaded, and while a person waits for
# a hint.
_HUB_SECONDS = 10.0
_HINT_SECONDS = 3.0
# The type of the weights in a GGUF file, such as Q4_K_M, IQ3_XXS, BF16 or UD-Q4_K_XL.
_GGUF_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: `model.name`.
        location: What transformers' from_pretrained takes: a folder or a Hub id.
        local: Whether it is a folder.
        revision: The revision of the Hub id.
        trust_remote_code: `model.trust_remote_code`.
        gguf: The GGUF file from which the folder was converted, if it was.
    """

    name: str
    location: str
    local: bool
    revision: str | None
    trust_remote_code: bool
    gguf: Path | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that every from_pretrained gets.

        Without trust_remote_code it may ask a person.
        """
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


def looks_local(name: str) -> bool:
    """Return whether a name means a path, because it is written as one or the path exists."""
    if name.startswith((".", "/", "~")) or name.endswith("/"):
        return True
    return Path(name).expanduser().exists()


def find_source(config: ModelConfig, weights: bool = False) -> ModelSource:
    """Find the files of a model. May convert the embedded model or a GGUF file.

    Args:
        config: The section `model` of a configuration.
        weights: Whether weights will be read. They are then copied to this machine's disk
            (`staging`), or converted from GGUF.

    Raises:
        ModelError: If there is no such model.
    """
    name = config.name
    remote = storage.is_remote(name)
    path, kind = _path_and_kind(name)
    local = name == embedded.NAME or remote or looks_local(path)
    if local and config.revision is not None:
        raise ModelError(
            f"model.revision {config.revision!r}: revisions belong to Hub ids; {name!r} is local"
        )
    gguf = _find_gguf(config, path, kind, local)
    if gguf is not None:
        if weights:
            dtype = resolve_dtype(config.dtype, resolve_device(config.device))
            folder = gguf_file.converted(gguf, dtype)
        else:
            folder = gguf_file.described(gguf)
        return ModelSource(name, str(folder), True, None, config.trust_remote_code, gguf)
    if local:
        folder = _local_folder(name, remote, weights)
        return ModelSource(name, str(folder), True, None, config.trust_remote_code)
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r} is neither a folder (local or s3://) nor a Hub id (a/b) nor a "
            f"GGUF file; the embedded model is {embedded.NAME}"
        )
    if weights and disk():
        snapshot = _cached(name, config.revision)
        if snapshot is not None:
            folder = staged(str(snapshot))
            return ModelSource(name, str(folder), True, None, config.trust_remote_code)
    source = ModelSource(name, name, False, config.revision, config.trust_remote_code)
    if not constants.is_offline_mode() and not _in_cache(source, weights):
        _check_hub(source)
    return source


def _in_cache(source: ModelSource, weights: bool) -> bool:
    """Return whether the Hub's cache holds what will be read of a model."""
    if weights:
        return _cached(source.location, source.revision) is not None
    file = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    return isinstance(file, str)


def why_unavailable(name: str) -> str:
    """Return, in a clause, why the weights of a Hub model are unavailable; "" if they may be
    available.

    It asks the Hub once, and waits for a few seconds at most.

    Args:
        name: The id of the model on the Hub.
    """
    if _cached(name, None) is not None:
        return ""
    reason = "HF_HUB_OFFLINE is set"
    if not constants.is_offline_mode():
        try:
            _reach_hub(constants.ENDPOINT, _HINT_SECONDS)
        except Exception:  # Whatever the network, or its absence, raises.
            reason = f"the Hub ({constants.ENDPOINT}) cannot be reached"
        else:
            return ""
    return f"{name} is not in the Hub's cache ({constants.HF_HUB_CACHE}), and {reason}"


def _check_hub(source: ModelSource) -> None:
    """Raise ModelError immediately if the Hub cannot be reached.

    The Hub's client would retry each file five times, for half a minute in all.
    """
    try:
        _reach_hub(constants.ENDPOINT, _HUB_SECONDS)
    except Exception as error:  # Whatever the network, or its absence, raises.
        message = f"model {source.name!r}: {_missing_from_cache(source)}"
        raise ModelError(message) from error


@cache
def _reach_hub(endpoint: str, seconds: float) -> None:
    """Ask the Hub for anything; only a success is remembered.

    Args:
        endpoint: The Hub's address.
        seconds: How long to wait for its answer.
    """
    get_session().head(endpoint, timeout=seconds)


def _local_folder(name: str, remote: bool, weights: bool) -> Path:
    if remote:
        return staged(name, weights)
    if name == embedded.NAME:
        return embedded.embedded_model()
    folder = _checked_folder(name)
    if weights and disk():
        return staged(str(folder))
    return folder


def _path_and_kind(name: str) -> tuple[str, str | None]:
    """Split FOLDER:Q4_K_M or owner/name:Q4_K_M into the path and the type of the weights."""
    path, colon, kind = name.rpartition(":")
    if colon and _GGUF_KIND.fullmatch(kind) and not Path(name).expanduser().exists():
        return path, kind
    return name, None


def _find_gguf(config: ModelConfig, path: str, kind: str | None, local: bool) -> Path | None:
    """Find the GGUF file that `model.name` means; None if it means another kind of model.

    Raises:
        ModelError: If there is no such file.
    """
    name = config.name
    if name == embedded.NAME:
        return None
    if storage.is_remote(path):
        return _remote_gguf(name, path, kind)
    if not local:
        return _hub_gguf(config, path, kind)
    target = Path(path).expanduser().absolute()
    if target.is_file() and target.suffix == gguf_file.SUFFIX:
        return target
    if not target.is_dir():
        return None
    files = [file.name for file in target.iterdir()]
    has_gguf = any(file.endswith(gguf_file.SUFFIX) for file in files)
    has_others = any(file.endswith(".safetensors") for file in files)
    if kind is None and (has_others or not has_gguf):
        return None
    return target / gguf_file.choose_file(files, kind, name)


def _remote_gguf(name: str, path: str, kind: str | None) -> Path | None:
    """Copy a GGUF file of a bucket to this machine's disk."""
    folder, _, file = path.rpartition("/")
    if file.endswith(gguf_file.SUFFIX):
        return staged_file(folder, file)
    if kind is None and storage.exists(f"{path.rstrip('/')}/config.json"):
        return None
    files = [file.name for file in storage.walk(path)]
    if kind is None and not any(file.endswith(gguf_file.SUFFIX) for file in files):
        return None
    return staged_file(path, gguf_file.choose_file(files, kind, name))


def _hub_gguf(config: ModelConfig, repository: str, kind: str | None) -> Path | None:
    """Fetch a GGUF file of the Hub."""
    name = config.name
    if not HUB_ID.fullmatch(repository):
        return None
    if kind is None:
        if repository.upper().endswith("-GGUF"):
            raise ModelError(
                f"model.name {name!r}: a repository of GGUF files has several; add the type of "
                f"the weights, as in {name}:Q4_K_M"
            )
        return None
    source = ModelSource(name, repository, False, config.revision, False)
    with explained(source, "its GGUF file cannot be fetched"):
        file = gguf_file.choose_file(_hub_files(repository, config.revision), kind, name)
        return Path(hf_hub_download(repository, file, revision=config.revision))


@cache
def _hub_files(repository: str, revision: str | None) -> list[str]:
    """List the files of a repository, or those in the cache where the Hub cannot be reached."""
    try:
        return HfApi().list_repo_files(repository, revision=revision)
    except errors.HfHubHTTPError:
        raise
    except Exception:  # Whatever the network, or its absence, raises.
        snapshot = snapshot_download(repository, revision=revision, local_files_only=True)
        files = Path(snapshot).rglob(f"*{gguf_file.SUFFIX}")
        return [str(file.relative_to(snapshot)) for file in files]


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
    folder = Path(name).expanduser().absolute()
    if not folder.exists():
        raise ModelError(f"model.name {name!r}: there is no folder {folder}")
    if not folder.is_dir():
        raise ModelError(
            f"model.name {name!r} is a file, but not a GGUF file; set model.name to a GGUF file, "
            "or to a folder with config.json and the weights"
        )
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            advice = "set model.adapter to it, and model.name to its base model"
            raise ModelError(f"model.name {name!r}: holds a peft adapter, not a model: {advice}")
        raise ModelError(
            f"model.name {name!r}: {folder} has no config.json, so it is not a transformers model"
        )
    _check_weights(name, folder)
    return folder


def _check_weights(name: str, folder: Path) -> None:
    """Raise ModelError if a file of weights, or a part that an index names, is missing."""
    if (folder / "model.safetensors").is_file():
        # Where there is an index, too, it is not read.
        return
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
    else:
        raise ModelError(
            f"model.name {name!r}: {folder} has no model.safetensors; {_way_out(folder)}"
        )


def _way_out(folder: Path) -> str:
    """Return, in a clause, what to do with weights of another name."""
    if (folder / "consolidated.safetensors").is_file():
        return (
            "consolidated.safetensors has Mistral's own names: also copy the model.safetensors of "
            "the repository, or let vLLM read it (engine.kind=vllm)"
        )
    variants = sorted(file.name for file in folder.glob("model.*.safetensors"))
    if variants:
        return f"rename {variants[0]} to model.safetensors to use it"
    return (
        "pickles (.bin) are not read, because they can run code; if you trust one, convert it to "
        "safetensors with transformers' from_pretrained and save_pretrained"
    )


def read_config(source: ModelSource) -> PretrainedConfig:
    """Read the model's config.json, from the Hub if need be.

    Returns:
        The configuration of the language model, which may be a part of the model (`text_part`).
    """
    with explained(source, "its config.json cannot be read"):
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
        return text_config(config)


@contextmanager
def explained(source: ModelSource, failure: str) -> Iterator[None]:
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


def _explanation(error: BaseException, source: ModelSource) -> str | None:
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
    for cause in causes:
        if isinstance(cause, SafetensorError):
            reason = str(cause).rpartition(": ")[2]
            return f"has a file of weights that is cut short or damaged ({reason}): fetch it again"
    if any("trust_remote_code" in str(cause) for cause in causes):
        return "comes with its own code: review it, then set model.trust_remote_code: true"
    return None


def _missing_from_cache(source: ModelSource) -> str:
    reason = "the Hub cannot be reached"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    revision = ""
    if source.revision:
        revision = f" at revision {source.revision!r}"
    return (
        f"is not in the Hub's cache{revision} ({constants.HF_HUB_CACHE}), and {reason}: run "
        f"`hf download {source.location}` where there is a network, or give a local folder in "
        "place of the id"
    )
