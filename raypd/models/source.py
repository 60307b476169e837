"""Where a model's files are (the embedded model, a local folder, the Hub), and errors of loading
it, explained.
"""

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

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """`location` is what transformers' from_pretrained takes: a folder (`local`) or a Hub id with
    its revision.
    """

    name: str
    location: str
    local: bool
    revision: str | None
    trust_remote_code: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that every from_pretrained gets (trust_remote_code always: left out, it may
        ask a person).
        """
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


def looks_local(name: str) -> bool:
    """Whether a name means a path: it is one, or is written as one."""
    return (
        name.startswith((".", "/", "~")) or name.endswith("/") or Path(name).expanduser().exists()
    )


def find_source(config: ModelConfig, weights: bool = False) -> Source:
    """Resolves `model.name`, without asking the Hub; may convert the embedded model.

    Raises ModelError. weights: whether they will be read: then they are copied to this machine's
    disk (`staging`).
    """
    name = config.name
    remote = storage.is_remote(name)
    if name == embedded.NAME or remote or looks_local(name):
        if config.revision is not None:
            raise ModelError(
                f"model.revision {config.revision!r}: revisions belong to Hub ids; {name!r} is "
                "local"
            )
        if remote:
            folder = staged(name, weights)
        elif name == embedded.NAME:
            folder = embedded.embedded_model()
        else:
            folder = _checked_folder(name)
            folder = staged(str(folder)) if weights and disk() else folder
        return Source(name, str(folder), True, None, config.trust_remote_code)
    if not HUB_ID.fullmatch(name):
        advice = f"the embedded model is {embedded.NAME}"
        raise ModelError(
            f"model.name {name!r} is neither a folder (local or s3://) nor a Hub id (a/b); {advice}"
        )
    if weights and disk() and (snapshot := _cached(name, config.revision)) is not None:
        return Source(name, str(staged(str(snapshot))), True, None, config.trust_remote_code)
    return Source(name, name, False, config.revision, config.trust_remote_code)


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a Hub model in the Hub's cache; None where it, or a part of its weights, is not
    there.
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
            f"model.name {name!r}: is a file; give the folder with config.json and the weights"
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
    """Raises ModelError where a file of weights, or a part that an index names, is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"model.name {name!r}: {index} cannot be read: {error!r}") from error
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            lost = f"{len(missing)} of {len(parts)} files of weights that {index.name} names"
            raise ModelError(
                f"model.name {name!r}: {lost} are not there ({missing[0]}): copy them again"
            )
    elif not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"model.name {name!r}: {folder} has no model.safetensors; pickles (.bin) are not read"
        )


def read_config(source: Source) -> PretrainedConfig:
    """The model's config.json, from the Hub if need be."""
    with explained(source, "its config.json cannot be read"):
        return AutoConfig.from_pretrained(source.location, **source.arguments)


@contextmanager
def explained(source: Source, failure: str) -> Iterator[None]:
    """Turns errors of transformers, the Hub's client and torch into a ModelError that says what to
    do.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())  # transformers writes whole pages
        brief = f"{failure}: {type(error).__name__}: {text[:400]}{'...' if len(text) > 400 else ''}"
        raise ModelError(f"model {source.name!r}: {_explain(error, source) or brief}") from error


def _explain(error: BaseException, source: Source) -> str | None:
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) is not None and link not in chain:
        chain.append(link)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

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
            "is no model on the Hub, or a private one (set HF_TOKEN or run `hf auth login`), "
            "nor is it a folder here"
        )
    if not source.local and caused_by(
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError
    ):
        revision = f" at revision {source.revision!r}" if source.revision else ""
        if constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set"
        else:
            why = "the Hub cannot be reached"
        return (
            f"is not in the Hub's cache{revision} ({constants.HF_HUB_CACHE}), and {why}: run "
            f"`hf download {source.location}` where there is a network, or set model.name "
            "to a local folder"
        )
    if any("trust_remote_code" in str(link) for link in chain):
        return "comes with code of its own: read it, then set model.trust_remote_code: true"
    return None
