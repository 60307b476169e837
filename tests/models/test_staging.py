"""A model on S3 or in a shared folder is copied once for all processes of a machine, and again when it changes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from raypd import storage
from raypd.answering.components import warm_up
from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.errors import ModelError
from raypd.models.load import check_model_config, load_model, load_tokenizer
from raypd.models.source import find_source, staged
from tests.tiny import save_tiny, tiny_model


@pytest.fixture(params=["s3", "folder", "hub"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """(name, folder) of a model that is staged."""
    cache = tmp_path / "cache/models--me--tiny"
    folder = save_tiny(cache / "snapshots/0123456789abcdef0123456789abcdef01234567")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPD_CACHE" if request.param == "s3" else "RAYPD_STAGING", str(tmp_path / "disk"))
    if request.param != "s3":
        return "me/tiny" if request.param == "hub" else str(folder), str(folder)
    name = f"{request.getfixturevalue('bucket')}/models/tiny"
    for file in folder.iterdir():
        storage.put(f"{name}/{file.name}", file.read_bytes())
    return name, name


def test_eight_workers_read_one_copy(model: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, source = model
    reads, open_read = Counter[str](), storage.open_read
    monkeypatch.setattr(
        storage, "open_read", lambda path, **keys: reads.update([path.rpartition("/")[2]]) or open_read(path, **keys)
    )
    config = ModelConfig(name=name, dtype="float32")
    if "://" in name or Path(name).exists():  # else config.json is the Hub client's to find
        check_model_config(config)
        load_tokenizer(config)
    assert "model.safetensors" not in reads  # a head needs no weights
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: staged(source), range(8)))
    (folder,) = folders
    assert find_source(config, weights=True).location == str(folder)
    assert folder.parent == tmp_path / "disk/models"
    assert (reads["model.safetensors"], max(reads.values())) == (1, 1)
    if "://" in name:
        loaded = load_model(config).model
        for weight, expected in zip(loaded.parameters(), tiny_model("llama").parameters(), strict=True):
            assert torch.equal(weight, expected)
    storage.put(f"{source}/config.json", storage.read(f"{source}/config.json") + b"\n")
    assert staged(source) not in folders


def test_what_cannot_be_staged_is_said(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"there is no config\.json there"):
        check_model_config(ModelConfig(name=f"{bucket}/nothing"))
    storage.put(f"{bucket}/tiny/config.json", b"{}")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPD_STAGING", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="let RAYPD_STAGING name another folder"):
        check_model_config(ModelConfig(name=f"{bucket}/tiny"))


def test_a_warm_engine_is_empty() -> None:
    engine = Engine(tiny_model("llama"), max_num_batched_tokens=64)
    warm_up(engine, 64)
    assert (engine.pending, list(engine.sequences)) == (0, [])
    assert engine.steps >= 3
