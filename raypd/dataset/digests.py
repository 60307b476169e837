"""Ids of units as 64-bit digests, which are long enough for a run with billions of units."""

import hashlib
from collections.abc import Iterable

import numpy as np

_DIGEST_BYTES = 8


def unit_id_of(name: str) -> str:
    """Return the id of the unit whose object has this name."""
    return name.rpartition("/")[2].removesuffix(".parquet")


def digest(*texts: str) -> int:
    """Return a digest of some texts."""
    data = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), "little")


class DigestSet:
    """A set of digests that takes 8 bytes per digest.

    Args:
        digests: The digests, in any order.
    """

    def __init__(self, digests: Iterable[int]) -> None:
        self.sorted = np.unique(np.fromiter(digests, dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.sorted)

    def positions(self, digests: np.ndarray) -> np.ndarray:
        """Return the positions [n] of digests [n] in the set; -1 for those that are not in it."""
        if not len(self.sorted):
            return np.full(len(digests), -1)
        positions = np.searchsorted(self.sorted, digests)
        positions = np.minimum(positions, len(self.sorted) - 1)
        return np.where(self.sorted[positions] == digests, positions, -1)

    def __contains__(self, value: int) -> bool:
        position = int(np.searchsorted(self.sorted, np.uint64(value)))
        return position < len(self.sorted) and int(self.sorted[position]) == value
