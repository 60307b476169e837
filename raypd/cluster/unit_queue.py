"""The units of a run that no worker has begun yet, with the documents that readers have read."""

from collections import deque
from collections.abc import Iterable

from raypd.cluster.document_stream import DocumentStream, StreamedUnit
from raypd.run import Unit


class UnitQueue:
    """Gives out the units of a run in order; units that are put back go first.

    Args:
        units: The units in order.
        stream: Reads their documents ahead; None if the workers read them.
    """

    def __init__(self, units: Iterable[Unit], stream: DocumentStream | None = None) -> None:
        self._units = iter(units)
        self._stream = stream
        # Units that were in flight and are not committed.
        self._returned: deque[StreamedUnit] = deque()
        self._is_exhausted = False

    @property
    def is_empty(self) -> bool:
        """Whether no unit is left, as far as is known; the source shows its end only when asked."""
        return self._is_exhausted and not self._returned

    def put_back(self, streamed: StreamedUnit) -> None:
        """Take back a unit, which will be the next one."""
        self._returned.appendleft(streamed)

    def take(self, starved_seconds: float | None) -> StreamedUnit | None:
        """Return the next unit, or None if there is none now.

        Args:
            starved_seconds: How long the worker that asks has been waiting for the readers; None if
                it has not.
        """
        if self._returned:
            streamed = self._returned.popleft()
            if self._stream is None:
                return streamed
            return self._stream.checked(streamed)
        if self._is_exhausted:
            return None
        try:
            if self._stream is None:
                return StreamedUnit(next(self._units))
            return self._stream.next(starved_seconds)
        except StopIteration:
            self._is_exhausted = True
            return None
