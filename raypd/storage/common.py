"""What all kinds of storage share: how a file is described, globs, and errors."""

import errno
import fnmatch
import mmap
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from raypd.errors import RunError

# Part of every message about a file that is no longer the version that was planned.
SINCE_PLANNED = "since it was planned"
# `**` as a whole part, a set of characters within a part, any other character.
_TOKEN = re.compile(r"(?<![^/])\*\*(?:/|$)|\[!?\]?[^]/]*\]|.", re.DOTALL)
# These errors concern one file; all others (EIO, ESTALE, EMFILE, ENOSPC, ...) concern the disk, the
# mount or the machine.
_FILE_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        "ENOENT",
        "EACCES",
        "EPERM",
        "EISDIR",
        "ENOTDIR",
        "ENAMETOOLONG",
        "ELOOP",
        "EINVAL",
        "ENXIO",
        "ESPIPE",
    )
)


@dataclass(frozen=True)
class Object:
    """A file or object in a listing.

    Attributes:
        path: The whole path.
        name: The path below the folder that was listed, the same wherever the folder is.
        size: Bytes.
        stamp: Changes with the content: on an object store the ETag, locally size and modification
            time. Two contents of a path never have the same stamp, not even if the file was deleted
            in between.
    """

    path: str
    name: str
    size: int
    stamp: str


# The content of a file.
Data = bytes | mmap.mmap

# Called with each hidden file in a listing; the listing yields the file if the call returns True,
# and skips it otherwise.
OnHidden = Callable[[Object], bool]


class StorageError(OSError, RunError):
    """The storage refused a request or gave an answer that cannot be used."""


class Unavailable(StorageError):
    """The storage is out of reach, overloaded, or refuses these credentials everywhere.

    The files may be intact, so this never counts as damage.
    """


class Changed(StorageError):
    """The file at a path is not the version that was requested."""

    def __str__(self) -> str:
        return f"{self.args[0]}: has changed {SINCE_PLANNED}: it was replaced or deleted"


def outage(error: BaseException, path: str) -> Unavailable | None:
    """Return Unavailable for an error about the storage as a whole.

    Returns:
        None for an error about the file itself: refused, missing or damaged.
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, StorageError) or not isinstance(error, OSError):
        return None
    passing = isinstance(error, (TimeoutError, ConnectionError))
    # Arrow and gzip raise an OSError without errno for damaged data.
    if not passing and (error.errno is None or error.errno in _FILE_ERRORS):
        return None
    return Unavailable(f"{path}: {error.strerror or error}")


def literal(glob: str) -> str:
    """Return the part of a glob before its first special character."""
    return re.split(r"[*?[]", glob, maxsplit=1)[0]


def is_hidden(name: str) -> bool:
    """Return whether a file or one of its folders has a name that begins with . or _.

    As in Spark, a folder `_key=value` is a partition and not hidden.

    Args:
        name: The file's path below the folder that was listed.
    """
    *folders, file = name.split("/")
    if file.startswith((".", "_")):
        return True
    for folder in folders:
        if folder.startswith(".") or (folder.startswith("_") and "=" not in folder):
            return True
    return False


def choose(
    items: Iterable[Object], glob: str | None, on_hidden: OnHidden | None = None
) -> Generator[Object, None, bool | None]:
    """Yield the listed files that a glob matches, without the hidden ones.

    Args:
        items: The files of a listing.
        glob: None matches every file.
        on_hidden: Is called with every hidden file that matches; the file is yielded if the call
            returns True.

    Returns:
        None if a file was yielded, otherwise whether any file was listed.
    """
    matcher = pattern(glob) if glob is not None else None
    listed = False
    matched = False
    for item in items:
        listed = True
        if matcher is not None and not matcher.fullmatch(item.path):
            continue
        if is_hidden(item.name) and (on_hidden is None or not on_hidden(item)):
            continue
        matched = True
        yield item
    return None if matched else listed


def pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob into a regular expression over whole paths.

    `*` and `?` stop at `/`; `**` as a whole part does not.
    """
    return re.compile(_TOKEN.sub(_token, glob), re.DOTALL)


def _token(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("["):
        return fnmatch.translate(text).removeprefix("(?s:").removesuffix(")\\Z")
    return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(text) or re.escape(text)
