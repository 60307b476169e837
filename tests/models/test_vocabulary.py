"""What each token adds to a text, for byte-level and for sentencepiece vocabularies."""

from __future__ import annotations

import time

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raypd.config import ModelConfig
from raypd.models.load import load_tokenizer
from raypd.models.vocabulary import token_bytes, token_texts
from tests.tiny import tiny_tokenizer


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


def test_bytes() -> None:
    texts = token_texts(tiny_tokenizer())
    assert len(texts) == 256
    assert texts[:3] == ["", "", ""]  # special tokens
    assert texts[3:128] == [chr(byte) for byte in range(3, 128)]
    assert set(texts[128:]) == {"\ufffd"}  # half a character each


def test_sentencepiece() -> None:
    tokenizer = sentencepiece()
    texts = token_texts(tokenizer)
    assert texts[:3] == ["", "", ""]
    assert texts[3:131] == [chr(byte) for byte in range(128)]
    assert set(texts[131:259]) == {"\ufffd"}
    assert texts[259:] == [" ", "a", " a", " the", "the", "  ", "é"]


def test_added_tokens_and_the_cache() -> None:
    tokenizer = tiny_tokenizer()
    before = token_texts(tokenizer)
    assert token_texts(tokenizer) is before
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    assert token_texts(tokenizer) == [*before, "<tool>", ""]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


def test_the_embedded_model(tokenizer: PreTrainedTokenizerBase) -> None:
    start = time.process_time()
    texts = token_texts(tokenizer)
    assert time.process_time() - start < 20  # 0.3 s here; a search of every token in every other takes minutes
    assert len(texts) == len(tokenizer)
    assert all(texts[id] == "" for id in tokenizer.all_special_ids)
    for text in ["a", " the", '"', '",', "\n", "  ", "5", "\t", "}"]:
        (id,) = tokenizer.encode(text)
        assert texts[id] == text
    ids = tokenizer.encode('{"name": "some plain text, 12 of it"}\n')
    assert "".join(texts[id] for id in ids) == tokenizer.decode(ids)


def test_bytes_of_parts_of_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    pieces = token_bytes(tokenizer)
    text = "日本 ñ 🎉 plain, 1\n"
    assert b"".join(pieces[id] for id in tokenizer.encode(text)) == text.encode()
    assert token_bytes(tiny_tokenizer())[3:] == [bytes([byte]) for byte in range(3, 256)]
    assert token_bytes(sentencepiece())[3:259] == [bytes([byte]) for byte in range(256)]
