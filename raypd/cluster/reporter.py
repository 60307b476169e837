"""A worker's reports on their way to the ledger."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from raypd.answering.request_queue import Progress
from raypd.billing.meter import Meter

_EVERY_SECONDS = 2.0
_WAIT_SECONDS = 5.0  # for the last report
_MOST_PENDING = 4  # reports on their way: the ledger is away, and the next one will say it all


class Reporter:
    """A thread that reports to the ledger every two seconds and at once when asked; one that is away is no harm."""

    def __init__(self, meter: Meter, ledger: Any, progress: Callable[[], dict[str, Progress]] = dict) -> None:
        """progress: of the units in flight."""
        self._meter, self._ledger, self._progress = meter, ledger, progress
        self._pending: list[Any] = []
        self._sending = threading.Lock()
        threading.Thread(target=self._run, name="ledger", daemon=True).start()

    def now(self) -> None:
        """Sends a report at once and waits until the ledger has it, so that no bill is closed before; 5 s at most."""
        self._send(always=True)
        with self._sending, contextlib.suppress(Exception):  # answers are worth more than their bill
            ray.wait(self._pending, num_returns=len(self._pending), timeout=_WAIT_SECONDS)

    def _run(self) -> None:
        while True:
            self._send(always=False)
            time.sleep(_EVERY_SECONDS)

    def _in_flight(self) -> tuple[int, int]:
        """Documents of units in flight that are answered, and how many of these failed."""
        progress = self._progress().values()
        return sum(unit.answered for unit in progress), sum(unit.failed for unit in progress)

    def _send(self, always: bool) -> None:
        try:
            with self._sending:
                if self._pending:
                    _, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
                if always or len(self._pending) < _MOST_PENDING:
                    self._pending.append(self._ledger.report.remote(self._meter.report(), self._in_flight()))
        except Exception as error:  # answers are worth more than their bill
            print(f"raypd: no report to the ledger: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
