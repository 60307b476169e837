"""What a command says on its terminal, and how it is stopped."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from raypd.errors import RunError
from raypd.run.text import said

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(RunError):
    """The user or the system asked the run to stop."""

    exit_code = 130
    how = "interrupted"


def say(line: str) -> None:
    """A line for the user, beside the progress on stderr."""
    print(said(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGTERM ends what runs within as Ctrl-C does, and only the first of them counts until it has
    ended.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is _interrupt
    ):
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    for each in _SIGNALS:  # a second one must not tear the way out
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
