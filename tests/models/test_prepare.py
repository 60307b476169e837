"""Models made ready for a method from the command line, and decoded with."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS, control_token
from raypd.models.load import load_model, load_tokenizer
from raypd.models.medusa_heads import load_heads, read_sizes
from tests.tiny import save_tiny, tiny_model


def run(*words):
    return CliRunner().invoke(app, ["model", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def base(tmp_path):
    return save_tiny(tmp_path / "base", vocab_size=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_added_and_the_rest_stays(base, tmp_path, dtype):
    tiny_model("llama", vocab_size=300).to(dtype).save_pretrained(base)
    out = tmp_path / "new/apar"
    output = run("add-tokens", base, out, "--for", "apar", "--for", "space").output
    tokenizer = load_tokenizer(ModelConfig(name=str(out)))
    for name in (*CONTROL_TOKENS["apar"], *CONTROL_TOKENS["space"]):
        assert f"{name} ({control_token(tokenizer, name)})" in output
    assert "Train it" in output
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert torch.equal(weight[:256], after[key][:256])  # all but the rows of the new tokens
        assert after[key].dtype == weight.dtype == dtype
    assert [path.name for path in out.parent.iterdir()] == ["apar"]


@pytest.mark.parametrize(("options", "count", "layers"), [([], 2, 2), (["--heads", 3, "--layers", 1], 3, 1)])
def test_heads_are_those_of_apars_table_6_or_what_is_asked_for(base, tmp_path, options, count, layers):
    output = run("add-heads", base, tmp_path / "heads", *options).output
    assert f"{count} Medusa heads x {layers} layers" in output
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert (config["heads"], config["layers"], config["hidden_size"], config["vocabulary"]) == (count, layers, 64, 300)
    weights = load_file(tmp_path / "heads/model.safetensors")
    assert (len(weights), list(weights["heads.0.out.weight"].shape)) == (count * (2 * layers + 1), [300, 64])
    heads = load_heads(tmp_path / "heads", load_model(ModelConfig(name=str(base))).model)
    assert (heads.count, heads.layers) == (count, layers)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("layers", 1, r"2 heads of 1 layers, for which heads\.0\.blocks\.1\.linear\.bias is None, .* has \[64\]"),
    ("heads", 3, r"3 heads of 2 layers, for which heads\.2\.blocks\.0\.linear\.bias is \[64\], .* has None"),
    ("hidden_size", 32, r"heads\.0\.blocks\.0\.linear\.bias is \[32\], .* has \[64\]"),
    ("layers", None, r"config\.json does not tell the heads' shape: KeyError: 'layers'"),
    ("layers", "two", r"config\.json does not tell the heads' shape: TypeError"),
    ("tree", [[0], [0, 0], [0, 0, 0]], "the tree is 3 deep and there are 2 Medusa heads")])  # fmt: skip
def test_heads_that_are_not_what_their_config_says_are_refused(base, tmp_path, key, value, words):
    run("add-heads", base, tmp_path / "heads")
    file = tmp_path / "heads/config.json"
    original = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in {**original, key: value}.items() if v is not None}))
    for look in (read_sizes, load_heads):  # before a run starts, and where the weights are loaded
        with pytest.raises(ModelError, match=f"decoding.heads {tmp_path}/heads: .*{words}"):
            look(tmp_path / "heads")
    (tmp_path / "heads/model.safetensors").write_bytes(b"no weights")
    file.write_text(json.dumps(json.loads(file.read_text()) | original))
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_sizes(tmp_path / "heads")


def test_what_cannot_be_done_is_said_and_leaves_nothing(base, tmp_path):
    for words, model, out, method in (
        ("--for medusa: has no control tokens; choose from apar, pasta, space, ", base, tmp_path / "x", "medusa"),
        ("exists already", base, base, "apar"),
        ("no folder", tmp_path / "nowhere", tmp_path / "x", "apar"),
    ):
        with pytest.raises(ModelError, match=words):
            run("add-tokens", model, out, "--for", method)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
