"""Python reads this first where PYTHONPATH names this folder.

RAYPD_TEST_CUT="before PATTERN" or "after PATTERN": the first process of all is killed, and the one
that writes, at the first write of a file whose path matches. With RAYPD_TEST_CUT_ONCE=FILE only the
one that writes is killed, and only if FILE is not there yet.
"""

import os
import re
import signal
from collections.abc import Callable

_when, _, _pattern = os.environ["RAYPD_TEST_CUT"].partition(" ")
_once = os.environ.get("RAYPD_TEST_CUT_ONCE")
# Its children inherit it.
_driver = int(os.environ.setdefault("RAYPD_TEST_DRIVER", str(os.getpid())))


def _kill() -> None:
    if _once is None:
        os.kill(_driver, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        os.close(os.open(_once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _cut(write: Callable[..., None]) -> Callable[..., None]:
    def cut(*args: str, **keys: int) -> None:
        if _when == "after":
            write(*args, **keys)
        if re.search(_pattern, str(args[1])):
            _kill()
        if _when == "before":
            write(*args, **keys)

    return cut


os.link, os.replace, os.rename = map(_cut, (os.link, os.replace, os.rename))
