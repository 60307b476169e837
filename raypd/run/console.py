"""Print lines for the user, and stop a command cleanly when it receives a signal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from raypd.errors import RunError
from raypd.text import said

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(RunError):
    """The user or the system asked the run to stop."""

    exit_code = 130
    how = "interrupted"


def say(line: str) -> None:
    """Print a line for the user on stderr."""
    print(said(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Make SIGTERM interrupt the block as Ctrl-C does, and ignore every signal after the first."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is _interrupt:
        yield
        return
    earlier_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    # A second signal must not interrupt the clean-up.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
