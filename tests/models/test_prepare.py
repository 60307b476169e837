"""Models made ready for a method from the command line, and decoded with."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.methods.medusa import medusa
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS, control_token
from raypd.models.load import load_model
from raypd.models.medusa_heads import load_heads, read_sizes
from tests.decoding import reference
from tests.decoding.cases import agree
from tests.decoding.drivers import never, tokens_of
from tests.tiny import save_tiny, tiny_model


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


def test_heads_are_those_of_apars_table_6_and_lossless(base, tmp_path):
    said = run("add-heads", base, tmp_path / "heads").output
    assert "2 Medusa heads x 2 layers" in said
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert (config["heads"], config["layers"], config["hidden_size"], config["vocabulary"]) == (2, 2, 64, 300)
    assert {name: list(w.shape) for name, w in load_file(tmp_path / "heads/model.safetensors").items()} == {
        f"heads.{head}.{name}": shape
        for head in range(2)
        for name, shape in {
            "blocks.0.linear.weight": [64, 64],
            "blocks.0.linear.bias": [64],
            "blocks.1.linear.weight": [64, 64],
            "blocks.1.linear.bias": [64],
            "out.weight": [300, 64],
        }.items()
    }
    model = load_model(ModelConfig(name=str(base), dtype="float32")).model
    heads = load_heads(tmp_path / "heads", model)
    prompts = [Prompt(tokens_of(random.Random(seed), 5, 20)) for seed in range(4)]
    answers = Engine(model, max_num_seqs=3).run(medusa(prompt, 16, heads) for prompt in prompts)
    stock = tiny_model("llama", vocab_size=300)
    stock.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        agree(reference.autoregressive(stock, prompt.tokens, 16, never), answer.tokens, answer.logprobs)


def test_other_numbers_of_heads_and_layers(base, tmp_path):
    said = run("add-heads", base, tmp_path / "heads", "--heads", 3, "--layers", 1).output
    assert "3 Medusa heads x 1 layers" in said
    heads = load_heads(tmp_path / "heads", load_model(ModelConfig(name=str(base))).model)
    assert (heads.count, heads.layers) == (3, 1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "layers",
            1,
            r"2 heads of 1 layers, for which heads\.0\.blocks\.1\.linear\.bias is None, .* has \[64\]",
        ),
        ("heads", 3, r"3 heads of 2 layers, for which heads\.2\.blocks\.0\.linear\.bias is \[64\], .* has None"),
        ("hidden_size", 32, r"heads\.0\.blocks\.0\.linear\.bias is \[32\], .* has \[64\]"),
        ("layers", None, r"config\.json does not tell the heads' shape: KeyError: 'layers'"),
        ("layers", "two", r"config\.json does not tell the heads' shape: TypeError"),
        ("tree", [[0], [0, 0], [0, 0, 0]], "the tree is 3 deep and there are 2 Medusa heads"),
    ],
)
def test_heads_that_are_not_what_their_config_says_are_refused(base, tmp_path, key, value, words):
    run("add-heads", base, tmp_path / "heads")
    file = tmp_path / "heads/config.json"
    config = {**json.loads(file.read_text()), key: value}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    for look in (read_sizes, load_heads):  # before a run starts, and where the weights are loaded
        with pytest.raises(ModelError, match=f"decoding.heads {tmp_path}/heads: .*{words}"):
            look(tmp_path / "heads")


def test_damaged_weights_of_heads_are_refused(base, tmp_path):
    run("add-heads", base, tmp_path / "heads")
    file = tmp_path / "heads/model.safetensors"
    whole = load_file(file)
    save_file({name: weight for name, weight in whole.items() if "heads.1" not in name}, file)
    with pytest.raises(ModelError, match=r"heads\.1\.blocks\.0\.linear\.bias is \[64\], .* has None"):
        read_sizes(tmp_path / "heads")
    file.write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_sizes(tmp_path / "heads")


def test_what_cannot_be_done_is_said_and_leaves_nothing(base, tmp_path):
    with pytest.raises(ModelError, match="--for medusa: has no control tokens; choose from apar, pasta, space, "):
        run("add-tokens", base, tmp_path / "x", "--for", "medusa")
    with pytest.raises(ModelError, match="exists already"):
        run("add-tokens", base, base, "--for", "apar")
    with pytest.raises(ModelError, match="no folder"):
        run("add-tokens", tmp_path / "nowhere", tmp_path / "x", "--for", "apar")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
