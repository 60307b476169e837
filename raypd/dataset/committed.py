"""The committed units of a run, as one listing of their objects shows them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import numpy as np

from raypd import storage
from raypd.run import layout

_DIGEST_BYTES = 8


def unit_objects(output: str) -> Iterator[storage.Object]:
    """Yield the objects of all committed units; their names are below the folder of the units."""
    for item in storage.walk(storage.join(output, layout.UNITS)):
        name = item.name.rpartition("/")[2]
        if name.endswith(".parquet") and not name.startswith((".", "_")):
            yield item


def unit_id_of(name: str) -> str:
    """Return the id of the unit whose object has this name."""
    return name.rpartition("/")[2].removesuffix(".parquet")


def digest(*texts: str) -> int:
    """Return a digest of 64 bits, as few as a run with billions of units needs."""
    data = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), "little")


class DigestSet:
    """A set of digests that takes 8 bytes for each.

    Args:
        digests: The digests, in any order.
    """

    def __init__(self, digests: Iterable[int]) -> None:
        self.sorted = np.unique(np.fromiter(digests, dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.sorted)

    def positions(self, digests: np.ndarray) -> np.ndarray:
        """Return where digests [n] stand in the set [n]; -1 for those that are not in it."""
        if not len(self.sorted):
            return np.full(len(digests), -1)
        positions = np.searchsorted(self.sorted, digests)
        positions = np.minimum(positions, len(self.sorted) - 1)
        return np.where(self.sorted[positions] == digests, positions, -1)

    def __contains__(self, value: int) -> bool:
        position = int(np.searchsorted(self.sorted, np.uint64(value)))
        return position < len(self.sorted) and int(self.sorted[position]) == value


class CommittedUnits(Set[str]):
    """The ids of the units that are committed in any partition: 16 bytes of memory for each unit.

    Iterating lists the objects again.

    Args:
        output: The run's folder.
        on_object: Is called with every object of the listing.
    """

    def __init__(
        self, output: str, on_object: Callable[[storage.Object], None] = lambda item: None
    ) -> None:
        self.output = output
        self.objects = 0

        def digests() -> Iterator[int]:
            for item in unit_objects(output):
                self.objects += 1
                on_object(item)
                yield digest(item.name, item.stamp)
                yield digest(unit_id_of(item.name))

        both = np.fromiter(digests(), dtype=np.uint64).reshape(-1, 2)
        # Which objects the listing shows, and in which versions.
        self.versions = DigestSet(both[:, 0])
        self._ids = DigestSet(both[:, 1])

    def __contains__(self, unit_id: object) -> bool:
        return isinstance(unit_id, str) and digest(unit_id) in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        for item in unit_objects(self.output):
            yield unit_id_of(item.name)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)
