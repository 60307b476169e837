"""Feed a prompt in parts if there are not enough recurrent states for all of its samples."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from raypd.decoding.program import Feed


class Parts:
    """A first feed, cut into several feeds that sample a few tokens each.

    A part ends at its last sample, and the last part at the end of the feed. A segment that begins
    in the feed is named in the part where it begins, and any other segment in the part with the row
    from which it continues. A segment is closed in the last part that contains its tokens or names
    it.
    """

    def __init__(self, whole: Feed, samples: int | None = None) -> None:
        """
        Args:
            whole: A first feed, whose samples are in the order of its tokens.
            samples: The largest number of samples of a part; None leaves the feed whole.
        """
        self._whole = whole
        count = len(whole.sample_at)
        self._size = count if samples is None else max(1, samples)
        firsts = range(self._size, count, max(1, self._size))
        # One more than the last row of each part, numbered as in the whole feed.
        self._ends = [whole.sample_at[first - 1] + 1 for first in firsts] + [len(whole.tokens)]
        # What to add to the rows of each fed part, because other tokens were fed in between.
        self._shifts: list[int] = []

    def __len__(self) -> int:
        return len(self._ends)

    def samples(self, number: int) -> range:
        """Return the indices of the samples of part `number`."""
        count = len(self._whole.sample_at)
        return range(number * self._size, min(count, (number + 1) * self._size))

    def next(self, fed: int) -> Feed:
        """Return the next part.

        Args:
            fed: The number of tokens that the program has fed so far.
        """
        whole = self._whole
        number = len(self._shifts)
        begin = self._ends[number - 1] if number else 0
        end = self._ends[number]
        self._shifts.append(fed - begin)
        if len(self) == 1:
            return whole
        own_samples = self.samples(number)
        samples = slice(own_samples.start, own_samples.stop)
        allowed = whole.allowed_token_ids
        is_first = number == 0
        return replace(
            whole,
            tokens=whole.tokens[begin:end],
            positions=whole.positions[begin:end],
            segments=None if whole.segments is None else whole.segments[begin:end],
            sample_at=[index - begin for index in whole.sample_at[samples]],
            allowed_token_ids=None if allowed is None else allowed[samples],
            continues=self._continues(number),
            closed=self._closed(number),
            reach=whole.reach if is_first else {},
            shared=whole.shared if is_first else 0,
        )

    @cached_property
    def _segments(self) -> Sequence[int]:
        """The segment of each token of the whole feed."""
        return self._whole.segments or [0] * len(self._whole.tokens)

    @cached_property
    def _first_parts(self) -> dict[int, int]:
        """The part that names each segment that continues from a row."""
        first_rows: dict[int, int] = {}
        for row, segment in enumerate(self._segments):
            first_rows.setdefault(segment, row)
        return {
            segment: self._part_of(first_rows.get(segment, row))
            for segment, row in self._whole.continues.items()
        }

    def _continues(self, number: int) -> dict[int, int]:
        """Return the segments that part `number` names, with the rows that they continue from."""
        continues: dict[int, int] = {}
        for segment, row in self._whole.continues.items():
            if self._first_parts[segment] == number:
                continues[segment] = row + self._shifts[self._part_of(row)]
        return continues

    def _closed(self, number: int) -> list[int]:
        """Return the segments that part `number` closes."""
        last_parts: dict[int, int] = {}
        for row, segment in enumerate(self._segments):
            last_parts[segment] = self._part_of(row)
        for segment, row in self._whole.continues.items():
            parent = self._segments[row]
            last_parts[parent] = max(last_parts[parent], self._first_parts[segment])
        return [segment for segment in self._whole.closed if last_parts.get(segment, 0) == number]

    def _part_of(self, row: int) -> int:
        return bisect_right(self._ends, row)
