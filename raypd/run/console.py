"""What a command says on its terminal, and how it is stopped."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from raypd.errors import RunError
from raypd.run.text import said


class Interrupted(RunError):
    """The user or the system asked the run to stop."""

    exit_code, how = 130, "interrupted"


def say(line: str) -> None:
    """A line for the user, beside the progress on stderr."""
    print(said(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGTERM ends what runs within as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = signal.default_int_handler  # raises KeyboardInterrupt
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        for number in before:  # a second Ctrl-C must not tear the way out
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            for number, handler in before.items():
                signal.signal(number, handler)
