"""The character encoding of a file, detected from its bytes (`input.encoding: auto`)."""

import codecs
from typing import BinaryIO

from charset_normalizer import CharsetMatch, CharsetMatches, from_bytes

from raypd.errors import InputError

AUTO = "auto"
_CHUNK = 1 << 20
# Bytes of lines with characters beyond ASCII, from which an encoding is guessed.
_SAMPLE_BYTES = 1 << 16
# Encodings that spreadsheets, shops and old databases write, by Python's names.
_CANDIDATES = [
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257"),
    *("koi8_r", "cp866", "mac_roman", "cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# A text with at least this many valid characters per invalid one is damaged UTF-8 rather than text
# in another encoding.
_DAMAGED = 4
# How much worse a Western European encoding may fit than the best guess. Most texts in it also make
# sense in a Central European one.
_TOLERANCE = 0.02


def detect(file: BinaryIO) -> str:
    """Return the name of a file's encoding; the whole file is read, in bounded memory.

    UTF-8, even with some damaged characters, and byte order marks are recognized reliably; any
    other encoding is the best guess of charset-normalizer.

    Raises:
        InputError: No known encoding fits.
        OSError: The file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    head = b""
    sample = bytearray()
    valid = 0
    invalid = 0
    while chunk := file.read(_CHUNK):
        if not head:
            head = chunk
            encoding = _unicode_of(head)
            if encoding is not None:
                return encoding
        text = decoder.decode(chunk)
        if text.isascii():
            continue
        replaced = text.count("\ufffd") - chunk.count("\ufffd".encode())
        invalid += replaced
        valid += len(text) - len(text.encode("ascii", "ignore")) - replaced
        if len(sample) < _SAMPLE_BYTES:
            sample += _foreign_lines(chunk)
    if decoder.decode(b"", final=True):
        invalid += 1
    if valid >= _DAMAGED * invalid:
        return "utf-8"
    return _guessed(bytes(sample[:_SAMPLE_BYTES]))


def _unicode_of(head: bytes) -> str | None:
    """Return the encoding that a byte order mark or the zero bytes of UTF-16 indicate."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    pairs = len(head) // 2
    if head[1::2].count(0) > pairs / 2:
        return "utf-16-le"
    if head[0::2].count(0) > pairs / 2:
        return "utf-16-be"
    return None


def _foreign_lines(chunk: bytes) -> bytes:
    """Return the lines with characters beyond ASCII; the others fit any encoding."""
    lines = chunk.replace(b"\r", b"\n").split(b"\n")
    return b"".join(line + b"\n" for line in lines if not line.isascii())


def _guessed(sample: bytes) -> str:
    matches = from_bytes(sample, cp_isolation=_CANDIDATES)
    best = matches.best()
    if best is None:
        raise InputError(
            "its encoding cannot be detected; name it in input.encoding, such as cp1252"
        )
    western = _match(matches, "cp1252")
    if western is None:
        return best.encoding
    if western.chaos > best.chaos + _TOLERANCE or western.coherence < best.coherence - _TOLERANCE:
        return best.encoding
    # The Turkish and the Western European code page differ in six letters, so only the language
    # can decide between them.
    turkish = _match(matches, "cp1254")
    if turkish is not None and turkish.coherence > western.coherence:
        return "cp1254"
    return "cp1252"


def _match(matches: CharsetMatches, encoding: str) -> CharsetMatch | None:
    """Return the guess with this encoding, or one whose text is the same in it."""
    for match in matches:
        if encoding in match.could_be_from_charset:
            return match
    return None
