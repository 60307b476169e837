"""What each token of a vocabulary adds to a text.

Constraints need it, and so do methods that stop at a character.
"""

import json
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from raypd.models.end_tokens import model_end_tokens, vocabulary_size

# What an incomplete character is decoded to.
_REPLACEMENT = "\ufffd"

_cache: WeakKeyDictionary[PreTrainedTokenizerBase, list[str]] = WeakKeyDictionary()


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds inside a text.

    Args:
        tokenizer: The tokenizer. Its list is computed once, so do not change it.

    Returns:
        For every id, added tokens included, its text. A leading blank is kept: both "Ġthe" and
        "▁the" are " the". Special tokens, tokens that end an answer and ids without a token are "",
        and a part of a character is U+FFFD. There is an entry for each id of the tokenizer, and
        for each id that its model can predict.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    size = max(len(tokenizer), 1 + largest, vocabulary_size(tokenizer))
    cached = _cache.get(tokenizer)
    if cached is not None and len(cached) == size:
        return cached
    # A token alone may lose its leading blank, since sentencepiece strips the first one of a text.
    # So each token is decoded after an "a", whose own text is then cut off.
    before = tokenizer.encode("a", add_special_tokens=False)
    start = len(_decode(tokenizer, [before])[0])
    rows = [[*before, id] for id in range(size)]
    texts = [text[start:] for text in _decode(tokenizer, rows)]
    for end in model_end_tokens(tokenizer):
        if end < size:
            texts[end] = ""
    _cache[tokenizer] = texts
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """Decode rows of tokens, without special ones."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # This decodes all rows in one call, in Rust.
        return list(backend.decode_batch(rows, skip_special_tokens=True))
    texts = []
    for row in rows:
        text = tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        texts.append(str(text))
    return texts


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes that each token adds inside a text, even for parts of characters.

    Args:
        tokenizer: The tokenizer.

    Returns:
        The bytes for every id of `token_texts`; empty for special tokens.
    """
    texts = token_texts(tokenizer)
    pieces = [text.encode() for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    has_parts = any(_REPLACEMENT in text for text in texts)
    if backend is None or not has_parts:
        return pieces
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    is_byte_level = "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
    for token, id in tokenizer.get_vocab().items():
        if _REPLACEMENT not in texts[id]:
            continue
        if is_byte_level and all(letter in byte_of for letter in token):
            pieces[id] = bytes(byte_of[letter] for letter in token)
        elif _is_hexadecimal(token):
            pieces[id] = bytes([int(token[3:5], 16)])
    return pieces


def _is_hexadecimal(token: str) -> bool:
    """Return whether a token is a byte as sentencepiece writes it, such as <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
