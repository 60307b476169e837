"""Models of the Hub, against a small server of our own on the loopback interface, and without any."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.load import check_model_config, load_model
from tests.servers import Reply, serving
from tests.tiny import save_tiny, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_of(folder: Path, path: str) -> Reply:
    """A Hub with one repository, owner/tiny, at the revisions main and v1; owner/gated is gated."""
    repository, _, place = path.lstrip("/").partition("/resolve/")
    revision, _, file = place.partition("/")
    if path.startswith("/api/models/owner/tiny"):  # lists a folder of chat templates, which is not there
        return Reply(404, headers={"X-Error-Code": "EntryNotFound"})
    if repository == "owner/gated":
        return Reply(403, headers={"X-Error-Code": "GatedRepo"})
    if repository != "owner/tiny":
        return Reply(404, headers={"X-Error-Code": "RepoNotFound"})
    if revision not in ("main", "v1", COMMIT):
        return Reply(404, headers={"X-Error-Code": "RevisionNotFound"})
    if not (folder / file).is_file():
        return Reply(404, headers={"X-Error-Code": "EntryNotFound"})
    data = (folder / file).read_bytes()
    return Reply(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The Hub's client pointed at our server, with a cache of its own."""
    folder = save_tiny(tmp_path / "served")
    with serving(lambda call: hub_of(folder, call.path)) as address:
        point_client(monkeypatch, address, tmp_path / "cache")
        yield address


def point_client(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    import transformers.utils.hub as hub_utils

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_utils.constants, "HF_HUB_CACHE", str(cache))
    huggingface_hub.close_session()


def refused(**settings: object) -> str:
    with pytest.raises(ModelError) as error:
        check_model_config(ModelConfig(device="cpu", **settings))
    return str(error.value)


@torch.no_grad()
def test_a_model_of_the_hub(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.arange(3, 27)[None]
    expected = tiny_model("llama")(tokens).logits
    loaded = load_model(ModelConfig(name="owner/tiny", revision="v1", dtype="float32", device="cpu"))
    assert torch.equal(loaded.model(tokens).logits, expected)
    assert loaded.name == "owner/tiny"
    assert "no revision 'nope' on the Hub" in refused(name="owner/tiny", revision="nope")
    assert "is no model on the Hub" in refused(name="owner/absent")
    assert "accept its terms" in refused(name="owner/gated")
    assert "no adapter_config.json" in refused(name="owner/tiny", adapter="owner/tiny")
    # Offline, what is in the cache still loads.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load_model(ModelConfig(name="owner/tiny", revision="v1", dtype="float32", device="cpu"))
    message = refused(name="owner/absent")
    assert all(words in message for words in ("HF_HUB_OFFLINE is set", "hf download owner/absent"))
    assert "at revision 'v2'" in refused(name="owner/tiny", revision="v2")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_client(monkeypatch, "http://127.0.0.1:9", tmp_path)  # nobody listens there
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's tries
    message = refused(name="owner/tiny")
    words = ("'owner/tiny': is not in the Hub's cache", "cannot be reached", str(tmp_path))
    assert [part for part in words if part not in message] == []
    message = refused(name=str(save_tiny(tmp_path / "base")), adapter="owner/adapter")
    assert "'owner/adapter': is not in the Hub's cache" in message
