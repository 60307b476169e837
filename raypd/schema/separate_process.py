"""Runs a Python file in a separate process, with JSON as its input and its output."""

import json
import subprocess
import sys
from functools import lru_cache
from typing import Any

# Only a machine that cannot even start the process takes this long.
_WALL_SECONDS = 120.0


class Unfinished(Exception):
    """The process failed; the message is the end of its standard error."""


def run_apart(file: str, value: Any) -> Any:
    """Run a Python file that limits its own time and memory.

    The result is cached, so the same value starts no second process.

    Args:
        file: The file's path.
        value: The value that the process reads as JSON from standard input.

    Returns:
        What the process prints as JSON, or None if one of its limits ended it.

    Raises:
        Unfinished: The process failed or did not end.
    """
    output = _output_of(file, json.dumps(value))
    return None if output is None else json.loads(output)


@lru_cache(128)
def _output_of(file: str, text: str) -> bytes | None:
    """Return what a file prints for a text on its input, or None if one of its limits ended it."""
    # -P keeps the file's folder off the import path, because it contains a module called numbers.
    command = [sys.executable, "-P", file]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=_WALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Unfinished(f"no end within {_WALL_SECONDS:.0f} s") from None
    if done.returncode < 0:
        return None
    if done.returncode:
        raise Unfinished(done.stderr.decode(errors="replace").strip()[-300:])
    return done.stdout
