"""zstd files with a window above 128 MiB (`zstd --long=28` and more) are read."""

import struct

import pytest
import zstandard

from raypd.dataset.planner import plan
from raypd.errors import InputError
from tests.runs import read_all

LINES = b"".join(b'{"id": "%d", "title": "word %d"}\n' % (n, n) for n in range(3000))


def frame(data: bytes, window_log: int) -> bytes:
    """A zstd frame of uncompressed blocks, as RFC 8878 has it, with a window of 2^window_log."""
    blocks = b""
    pieces = [data[begin : begin + 100_000] for begin in range(0, len(data), 100_000)]
    for number, piece in enumerate(pieces, 1):
        is_last = number == len(pieces)
        blocks += struct.pack("<I", len(piece) << 3 | is_last)[:3] + piece
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + blocks


def by_zstd(data: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(
        window_log=28, hash_log=10, chain_log=10, strategy=zstandard.STRATEGY_FAST
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


FILES = {
    "zstd": by_zstd(LINES),
    "30": frame(LINES, 30),
    "31": frame(LINES, 31),
    "frames": frame(LINES[:50_000], 28) + frame(LINES[50_000:], 28),
    "then a small one": frame(LINES[:50_000], 28) + zstandard.compress(LINES[50_000:]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_large_window_is_read(tmp_path, config, name) -> None:
    assert zstandard.get_frame_parameters(FILES[name]).window_size > 1 << 27
    (tmp_path / "a.jsonl.zst").write_bytes(FILES[name])
    documents = read_all(config(str(tmp_path / "a.jsonl.zst"), unit_documents=700))
    assert [d.id for d in documents] == [str(number) for number in range(3000)]


def test_many_such_files_are_planned(tmp_path, config) -> None:
    for number in range(12):
        (tmp_path / f"{number}.csv.zst").write_bytes(frame(b"id,title\n1,x\n", 30))
    assert plan(config(str(tmp_path))).documents == 12


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (FILES["zstd"][:-20], "damaged or cut short"),
        (FILES["31"][:-1], "damaged or cut short"),
        (frame(LINES, 30)[:7] + b"\xff" * 5000, "damaged or cut short"),
        # The first frame is small, so the file is begun without room for the second one.
        (zstandard.compress(LINES) + frame(LINES, 28), r"zstd -dc --long=31 \S+ \| zstd -o "),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, config, data, message) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    with pytest.raises(InputError, match=message):
        plan(config(str(tmp_path / "a.jsonl.zst")))
