"""What each token of a vocabulary adds to a text, for constraints and for methods that stop at a
character.
"""

import json
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from raypd.models.end_tokens import model_end_tokens, vocabulary_size

_cache: WeakKeyDictionary[PreTrainedTokenizerBase, list[str]] = WeakKeyDictionary()


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """For every id, added tokens included, the text that it adds inside a text.

    Computed once; do not change the list. A leading blank is kept ("Ġthe" and "▁the" are " the"). A
    special token, a token that ends an answer and an id without a token are "", and a part of a
    character is U+FFFD. The list has at least len(tokenizer) entries, and one for every id that the
    tokenizer's model can predict.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    size = max(len(tokenizer), 1 + largest, vocabulary_size(tokenizer))
    cached = _cache.get(tokenizer)
    if cached is not None and len(cached) == size:
        return cached
    # A token alone may lose its leading blank (sentencepiece strips the first of a text), so each
    # is decoded behind an "a", whose own text is then cut off.
    before = tokenizer.encode("a", add_special_tokens=False)
    start = len(_decode(tokenizer, [before])[0])
    texts = [text[start:] for text in _decode(tokenizer, [[*before, id] for id in range(size)])]
    for end in model_end_tokens(tokenizer):
        if end < size:
            texts[end] = ""
    _cache[tokenizer] = texts
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # all at once, in Rust
        return list(backend.decode_batch(rows, skip_special_tokens=True))
    return [
        str(tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for row in rows
    ]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """For every id the bytes that it adds inside a text (special tokens: none); they tell parts of
    characters apart.
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
