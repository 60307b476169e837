"""Cutting JSONL by bytes: whatever the file holds and wherever it is cut, every line is read exactly once."""

import io
import itertools
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raypd.dataset import split
from raypd.dataset.jsonl import BOM, lines, lines_of_range
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.dataset.split import cut_rows

LINE = st.one_of(st.sampled_from([b"", b" ", b"\t ", b'{"id": 1}', b"\xff\xfe", b"\x00", b"\r", b"{" * 30, b"x" * 70,
                                  BOM]), st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"n")))  # fmt: skip
END = st.sampled_from([b"\n", b"\r\n", b"\n\n"])


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A file of odd lines, with or without a byte order mark and a last line break."""
    parts = draw(st.lists(st.tuples(LINE, END), max_size=12))
    text = b"".join(line + end for line, end in parts) + draw(st.one_of(st.just(b""), LINE))
    return draw(st.sampled_from([b"", BOM])) + text


def naive(text: bytes) -> list[tuple[int, bytes]]:
    """(offset, line without its end) of every line that is not blank, by splitting the whole."""
    expected, offset = [], 0
    for line in text.split(b"\n"):
        if (line.removeprefix(BOM) if offset == 0 else line).strip():
            expected.append((offset, line.rstrip(b"\r")))
        offset += len(line) + 1
    return expected


@given(texts(), st.lists(st.integers(0, 400), max_size=8), st.integers(1, 100))
@example(b"a\nb", [2], 10)  # a line begins right at the border
@example(b"a\r\nb\r\n", [2], 10)  # the border lies between CR and LF
@example(b"x" * 300 + b"\ny", [10, 20, 300, 301], 5)  # ranges within one line
@settings(max_examples=400, deadline=None)
def test_every_line_is_in_exactly_one_range(text: bytes, cuts: list[int], limit: int) -> None:
    bounds, found_lines = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))}), []
    for start, end in itertools.pairwise(bounds):
        file = io.BytesIO(text)
        file.seek(max(0, start - 1))
        ranged = list(lines_of_range(file, limit, start, end))
        assert all(start <= line.offset < end for line in ranged)
        found_lines += ranged
    expected = naive(text)
    assert [line.offset for line in found_lines] == [offset for offset, _ in expected]
    for line, (_, bare) in zip(found_lines, expected, strict=True):
        assert line.data is None or line.data.rstrip(b"\r\n") == bare.rstrip(b"\r\n")
        assert (line.data is None) == (len(bare.rstrip(b"\r\n")) > limit)
    all_lines = list(lines(io.BytesIO(text), limit))
    assert [line._replace(number=0) for line in found_lines] == [line._replace(number=0) for line in all_lines]


@given(texts(), st.integers(1, 9), st.integers(1, 200), st.sampled_from([4, 64, 1 << 20]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_plan_and_read_together_lose_and_double_nothing(tmp_path, config, text, documents, size, head) -> None:
    text, path = b'{"id": "first"}\n' + text, tmp_path / "a.jsonl"
    path.write_bytes(text)
    run = config(str(path), text_columns=["id"], id_column=None, unit_documents=documents, unit_bytes=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "HEAD_BYTES", head)
        planned = plan(run)
        pairs = [(unit, read_unit(unit, run)) for unit in planned]
    assert [d.place for _, part in pairs for d in part] == [offset for offset, _ in naive(text)]
    assert all(unit.rows in (None, len(part)) for unit, part in pairs)
    assert planned.exact == (len(text) <= head)
    if planned.exact:
        assert planned.documents == len(naive(text))
        assert all(len(part) <= documents for _, part in pairs)


@pytest.mark.slow
def test_a_line_of_30_mb_among_ranges_is_read_once_in_bounded_memory(tmp_path, config) -> None:
    path, short = tmp_path / "a.jsonl", [b'{"id": "%d"}\n' % i for i in range(400)]
    path.write_bytes(b"".join([*short[:200], b'{"id": "' + b"x" * (30 << 20) + b'"}\n', *short[200:]]))
    run = config(str(path), text_columns=["id"], id_column=None, unit_documents=256, unit_bytes=8 << 20)
    read_unit(next(iter(plan(run))), run)  # what is imported at the first use does not count
    tracemalloc.start()
    planned = plan(run)
    documents = [d for unit in planned for d in read_unit(unit, run)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [d.fields.get("id") for d in documents if d.error is None] == [str(i) for i in range(400)]
    (bad,) = [d for d in documents if d.error is not None]
    assert "the line has 31457" in (bad.error or "")
    assert peak < 24 << 20, peak
    assert (planned.exact, planned.units >= 6) == (False, True)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4000)), max_size=6), st.integers(1, 30), st.integers(1, 900)
)
@example([(1, 2), (1, 0)], 2, 1)
def test_rows_are_cut_without_gap_and_within_the_limits(groups: list, rows: int, size: int) -> None:
    cut, total = list(cut_rows(groups, rows, size)), sum(count for count, _ in groups)
    assert ([start for start, _ in cut], cut[-1][1] if cut else 0) == ([0, *(end for _, end in cut)][: len(cut)], total)
    each = [length / count for count, length in groups for _ in range(count)]
    for start, end in cut:
        assert 1 <= end - start <= rows
        assert end - start == 1 or sum(each[start:end]) <= size + 1e-6
