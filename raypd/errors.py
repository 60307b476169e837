"""Errors that a user can act on.

The command line prints only their text; any other error is a bug and keeps its traceback.
"""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator

# Likeness (difflib's ratio, from 0 to 1) from which a name may be meant. Names of files need more:
# with 0.5, nowhere.csv would mean answers.csv.
_LIKE = 0.5
_LIKE_OF_FILES = 0.6


def closest(wanted: str, known: Iterable[str]) -> str | None:
    """Return the known name, other than the wanted one, that is most similar; None if none is."""
    return _closest(wanted, known, _LIKE)


def closest_file(wanted: str, known: Iterable[str]) -> str | None:
    """Return the most similar of some names of files without extensions; None if none is.

    The extension alone does not make two names similar.
    """
    return _closest(wanted, known, _LIKE_OF_FILES)


def _closest(wanted: str, known: Iterable[str], cutoff: float) -> str | None:
    others = [name for name in known if name != wanted]
    near = difflib.get_close_matches(wanted, others, 1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(wanted: str, known: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """Return `did you mean 'x'?`, with x in the form of `shown`; "" if no known name is similar."""
    near = closest(wanted, known)
    return "" if near is None else f"did you mean {shown(near)}?"


def in_words(error: Exception) -> str:
    """Return the text of a Python error for a user, without advice to call a Python function, which
    the error of a number that is too long contains.
    """
    text = str(error)
    return "a number has more digits than can be read" if "set_int_max_str_digits" in text else text


@contextlib.contextmanager
def raised_as(
    kind: type[BaseException], words: str, *caught: type[Exception], advice: str = ""
) -> Iterator[None]:
    """Raise an error of the block as a `kind`, with some words, the error's own text and advice.

    Args:
        kind: The class of the new error.
        words: The beginning of its text.
        caught: The classes of errors to replace; without any, OSError.
        advice: The end of its text.
    """
    kinds = caught or (OSError,)
    try:
        yield
    except kinds as error:
        raise kind(f"{words}: {error}{advice}") from None


class UserError(Exception):
    """An error that the user can fix.

    The message names the file, line or key, and says what to do.
    """


class ConfigError(UserError):
    """A configuration that cannot be run in its present form."""


class ModelError(UserError):
    """A model, adapter or quantization that cannot be loaded or cannot be decoded exactly."""


class InputError(UserError):
    """Input that cannot be planned or read at all. A single bad document becomes an error row
    instead.
    """


class RunError(UserError):
    """A run that cannot continue; committed units are complete, and the message says how to
    resume.
    """


class Damaged(RunError):
    """An object of the output that is incomplete, as opposed to one that cannot be reached."""
