"""Python reads this first where PYTHONPATH names this folder.

RAYPD_TEST_CUT="before PATTERN" or "after PATTERN": the first process of all is killed, and the one
that writes, at the first write of a file whose path matches.
"""

import os
import re
import signal
from collections.abc import Callable

_when, _, _pattern = os.environ["RAYPD_TEST_CUT"].partition(" ")
# Its children inherit it.
_driver = int(os.environ.setdefault("RAYPD_TEST_DRIVER", str(os.getpid())))


def _cut(write: Callable[..., None]) -> Callable[..., None]:
    def cut(*args: str, **keys: int) -> None:
        if _when == "after":
            write(*args, **keys)
        if re.search(_pattern, str(args[1])):
            for pid in (_driver, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        if _when == "before":
            write(*args, **keys)

    return cut


os.link, os.replace, os.rename = map(_cut, (os.link, os.replace, os.rename))
