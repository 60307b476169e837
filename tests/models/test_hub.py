"""Models of the Hub, against a small server of our own on the loopback interface, and without any."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.load import check_model_config, load_model
from tests.tiny import save_tiny, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    """A Hub with one repository, owner/tiny, at the revisions main and v1; owner/gated is gated."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            repository, _, path = self.path.lstrip("/").partition("/resolve/")
            revision, _, file = path.partition("/")
            if self.path.startswith("/api/models/owner/tiny"):  # lists a folder of chat templates, which is not there
                return self.refuse(404, "EntryNotFound")
            if repository == "owner/gated":
                return self.refuse(403, "GatedRepo")
            if repository != "owner/tiny":
                return self.refuse(404, "RepoNotFound")
            if revision not in ("main", "v1", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            if not (folder / file).is_file():
                return self.refuse(404, "EntryNotFound")
            data = (folder / file).read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The Hub's client pointed at our server, with a cache of its own."""
    folder = save_tiny(tmp_path / "served")
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub_handler(folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    point_client(monkeypatch, address, tmp_path / "cache")
    yield address
    server.shutdown()
    server.server_close()


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
    assert "HF_HUB_OFFLINE is set" in message
    assert "hf download owner/absent" in message
    assert "at revision 'v2'" in refused(name="owner/tiny", revision="v2")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_client(monkeypatch, "http://127.0.0.1:9", tmp_path)  # nobody listens there
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's tries
    message = refused(name="owner/tiny")
    assert "'owner/tiny': is not in the Hub's cache" in message
    assert "cannot be reached" in message
    assert str(tmp_path) in message
    message = refused(name=str(save_tiny(tmp_path / "base")), adapter="owner/adapter")
    assert "'owner/adapter': is not in the Hub's cache" in message
