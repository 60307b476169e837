"""Models made ready for a method: from the command line, and by the control tokens alone."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.config import ModelConfig
from raypd.decoding.methods.registry import CLOSE, FORK, MASK
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS, add_control_tokens, control_token, markup_bytes
from raypd.models.load import load_model, load_tokenizer
from raypd.models.medusa_heads import load_heads, read_sizes
from tests.tiny import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer


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
        ("exists already", base, base, "apar"), ("no folder", tmp_path / "nowhere", tmp_path / "x", "apar"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            run("add-tokens", model, out, "--for", method)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_refused_without_them():
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "some/model"
    for token, name, named, method in ((FORK, None, "some/model", "apar"), (MASK, "mine", "mine", "space")):
        words = f"'{named}' has no control token {re.escape(token)}.*add-tokens {named} FOLDER --for {method}"
        with pytest.raises(ModelError, match=words):
            control_token(tokenizer, token, name)
    with pytest.raises(ModelError, match="no control tokens; those of apar, pasta, space, apar_medusa"):
        add_control_tokens(tiny_model("llama"), tokenizer, "hyper_parallel")


@pytest.mark.parametrize("method", CONTROL_TOKENS)
@pytest.mark.parametrize("tied", [False, True])
def test_new_rows(method, tied):
    model, tokenizer = tiny_model("llama", tie_word_embeddings=tied), tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, method)
    names = CONTROL_TOKENS[method]
    assert ids == list(range(VOCABULARY, VOCABULARY + len(names)))
    assert [control_token(tokenizer, name) for name in names] == ids
    after, head_after = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert after.shape[0] == head_after.shape[0] == model.config.vocab_size == VOCABULARY + len(names)
    assert torch.equal(torch.stack([after, head_after])[:, :VOCABULARY], torch.stack([before, head]))
    assert (after is head_after) == tied
    if method == "space":  # normal with the model's initializer_range, 0.02
        assert 0.01 < after[ids[0]].std() < 0.03
    matrices = [] if method == "space" else [(after, before)]
    for rows, old in matrices if tied else [*matrices, (head_after, head)]:
        away = (rows[ids] - old.mean(0)) / old.std(0)  # as far from the mean as an old row, and each its own way
        assert 0.7 < away.square().mean().sqrt() < 1.3
        assert len(torch.unique(rows[ids], dim=0)) == len(ids)
    # text that was there reads the same, and a control token is one token
    assert tokenizer.encode("ab[c", add_special_tokens=False) == list(b"ab[c")
    assert tokenizer.encode("a" + names[-1] + "b", add_special_tokens=False) == [ord("a"), ids[-1], ord("b")]
    assert tokenizer.decode([ids[0], 97], skip_special_tokens=True) == (names[0] if method == "pasta" else "") + "a"


def test_adding_twice_and_two_methods_and_rows_beyond_the_vocabulary():
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    fork, child = add_control_tokens(model, tokenizer, "apar")
    with torch.no_grad():
        model.get_input_embeddings().weight[fork] = 7  # trained since
    assert add_control_tokens(model, tokenizer, "apar") == [fork, child]
    mask = add_control_tokens(model, tokenizer, "space", seed=1)[0]
    assert mask == VOCABULARY + 2
    assert (model.get_input_embeddings().weight[fork] == 7).all()
    fresh = tiny_model("qwen3")
    drawn = fresh.get_input_embeddings().weight[add_control_tokens(fresh, tiny_tokenizer(), "space", seed=1)[0]]
    assert torch.equal(drawn, model.get_input_embeddings().weight[mask]), "the seed alone decides"
    # Many models have more rows than their tokenizer has ids.
    model, tokenizer = tiny_model("llama", vocab_size=320), tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, "apar")
    after = model.get_input_embeddings().weight
    assert after.shape == before.shape
    assert torch.equal(after[VOCABULARY + 2 :], before[VOCABULARY + 2 :])
    assert not torch.equal(after[ids[0]], before[ids[0]]), "a new token's row is drawn"


def test_markup_is_text_whether_special_or_not():
    tokenizer = tiny_tokenizer()
    ids = add_control_tokens(tiny_model("llama"), tokenizer, "pasta")
    assert [markup_bytes(tokenizer)[id] for id in ids] == [name.encode() for name in CONTROL_TOKENS["pasta"]]
    special = tiny_tokenizer()
    special.add_special_tokens({"additional_special_tokens": [CLOSE]})
    assert markup_bytes(special)[control_token(special, CLOSE)] == CLOSE.encode()
    assert markup_bytes(special)[ord("a")] == b"a"
