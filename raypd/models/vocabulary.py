"""What each token of a vocabulary adds to a text, for constraints and for methods that stop at a character."""

from __future__ import annotations

import json
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_cache: WeakKeyDictionary[PreTrainedTokenizerBase, list[str]] = WeakKeyDictionary()


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """For every id of the vocabulary, added tokens included, the text that the token adds inside a text.

    A leading blank is kept ("Ġthe" and "▁the" are " the"), a special token adds "", and bytes that are only a part of
    a character become U+FFFD. The list has at least len(tokenizer) entries; ids without a token are "".
    Computed once for a tokenizer; do not change the list.
    """
    size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    cached = _cache.get(tokenizer)
    if cached is not None and len(cached) == size:
        return cached
    # A token alone may lose its leading blank (sentencepiece strips the first of a text), so each is decoded behind
    # an "a", whose own text is then cut off.
    before = tokenizer.encode("a", add_special_tokens=False)
    start = len(_decode(tokenizer, [before])[0])
    texts = [text[start:] for text in _decode(tokenizer, [[*before, id] for id in range(size)])]
    _cache[tokenizer] = texts
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # all at once, in Rust
        return list(backend.decode_batch(rows, skip_special_tokens=True))
    return [str(tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for row in rows]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """For every id the bytes that the token adds inside a text; special tokens add none.

    Unlike texts, bytes tell tokens apart that hold only a part of a character. Tokenizers that are neither byte-level
    nor sentencepiece with byte fall-back are read through `token_texts`.
    """
    texts = token_texts(tokenizer)
    pieces = [text.encode() for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or all("\ufffd" not in text for text in texts):
        return pieces
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    byte_level = "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
    for token, id in tokenizer.get_vocab().items():
        if "\ufffd" not in texts[id]:
            continue
        if byte_level and all(char in byte_of for char in token):
            pieces[id] = bytes(byte_of[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            pieces[id] = bytes([int(token[3:5], 16)])
    return pieces
