"""What each token adds to a text, for byte-level and for sentencepiece vocabularies."""

import time

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

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


def test_texts_and_bytes() -> None:
    words = [" ", "a", " a", " the", "the", "  ", "é"]
    for tokenizer, first, behind in ((tiny_tokenizer(), 3, []), (sentencepiece(), 0, words)):
        ascii, halves = [chr(byte) for byte in range(first, 128)], ["\ufffd"] * 128
        assert token_texts(tokenizer) == ["", "", "", *ascii, *halves, *behind]
        pieces = [bytes([byte]) for byte in range(first, 256)]
        assert token_bytes(tokenizer)[3:] == [*pieces, *(text.encode() for text in behind)]


def test_added_tokens_and_the_cache() -> None:
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
