"""Models made ready for a method from the command line, and decoded with."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from raypd.cli import app
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS, control_token
from raypd.models.load import load_model
from raypd.models.medusa_heads import load_heads
from tests.tiny import save_tiny


def run(*words):
    return CliRunner().invoke(app, ["model", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def base(tmp_path):
    return save_tiny(tmp_path / "base", vocab_size=300)


def test_tokens_are_added_and_the_rest_stays(base, tmp_path):
    out = tmp_path / "new/apar"
    said = run("add-tokens", base, out, "--for", "apar", "--for", "space").output
    loaded = load_model(ModelConfig(name=str(out)))
    for name in (*CONTROL_TOKENS["apar"], *CONTROL_TOKENS["space"]):
        assert f"{name} ({control_token(loaded.tokenizer, name)})" in said
    assert "Train it" in said
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for key, weight in before.items():
        if "embed" not in key and "lm_head" not in key:
            assert torch.equal(weight, after[key])
        assert after[key].dtype == weight.dtype
    assert [path.name for path in out.parent.iterdir()] == ["apar"]


def test_weights_keep_their_dtype(tmp_path):
    from tests.tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    run("add-tokens", tmp_path / "base", tmp_path / "out", "--for", "pasta")
    assert {w.dtype for w in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


def test_heads_fit_the_model(base, tmp_path):
    said = run("add-heads", base, tmp_path / "heads", "--heads", 3).output
    assert "3 Medusa heads" in said
    heads = load_heads(tmp_path / "heads", load_model(ModelConfig(name=str(base))).model)
    assert (heads.count, heads.layers) == (3, 1)


def test_what_cannot_be_done_is_said_and_leaves_nothing(base, tmp_path):
    with pytest.raises(ModelError, match="--for medusa: has no control tokens; choose from apar, space, pasta"):
        run("add-tokens", base, tmp_path / "x", "--for", "medusa")
    with pytest.raises(ModelError, match="exists already"):
        run("add-tokens", base, base, "--for", "apar")
    with pytest.raises(ModelError, match="no folder"):
        run("add-tokens", tmp_path / "nowhere", tmp_path / "x", "--for", "apar")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
