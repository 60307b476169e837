"""Errors that a user can act on.

The command line prints their text alone; all else is a bug and keeps its trace.
"""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator


def closest(wanted: str, known: Iterable[str]) -> str | None:
    """Return the other known name that is most like a name; None if none is like it."""
    others = [name for name in known if name != wanted]
    near = difflib.get_close_matches(wanted, others, 1, cutoff=0.5)
    return near[0] if near else None


def did_you_mean(wanted: str, known: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """Return `did you mean 'x'?`, with x as `shown` writes it; "" if no known name is like it."""
    near = closest(wanted, known)
    return "" if near is None else f"did you mean {shown(near)}?"


def in_words(error: Exception) -> str:
    """An error of Python's own for a user, who has no function to call where a number is too long
    to be read.
    """
    text = str(error)
    return "a number has more digits than can be read" if "set_int_max_str_digits" in text else text


@contextlib.contextmanager
def raised_as(
    kind: type[BaseException], words: str, *caught: type[Exception], advice: str = ""
) -> Iterator[None]:
    """Raises what is `caught` within (None named: OSError) as a `kind`: the words, the error's own,
    the advice.
    """
    kinds = caught or (OSError,)
    try:
        yield
    except kinds as error:
        raise kind(f"{words}: {error}{advice}") from None


class UserError(Exception):
    """Something that the user can put right.

    The message names the file, line or key, and says what to do.
    """


class ConfigError(UserError):
    """A configuration that cannot be run as it stands."""


class ModelError(UserError):
    """A model, adapter or quantization that cannot be loaded or cannot be decoded exactly."""


class InputError(UserError):
    """Input that cannot be planned or read at all (single bad documents become error rows
    instead).
    """


class RunError(UserError):
    """A run that cannot go on; committed units are whole, and the message says how to resume."""


class Damaged(RunError):
    """An object of the output that is not whole, as opposed to one that cannot be reached."""
