"""What both kinds of storage share: how a file is described, and what goes wrong with it."""

from __future__ import annotations

import errno
import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache

from raypd.errors import RunError

MAGIC = re.compile(r"[*?[]")
# What the operating system says of one file; all else (EIO, ESTALE, EMFILE, ENOSPC, ...) is said of disk, mount or
# machine, whatever file one asks for.
_OF_THE_FILE = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP", "EINVAL", "ENXIO", "ESPIPE")
)


@dataclass(frozen=True)
class Object:
    """A file or object.

    name: its path below the folder that was asked for: the same wherever that folder lies.
    size: bytes. version: where the listing tells it without another request (S3: the ETag), else None.
    """

    path: str
    name: str
    size: int
    version: str | None = None


class StorageError(OSError, RunError):
    """A store refused, did not answer or is not what it should be; the text says where and what to do.

    An OSError for who reads and writes files, and an error that the command line prints without a traceback.
    """


class Unavailable(StorageError):
    """A store that is out of reach, overloaded, or lets this caller in nowhere: nothing is said of the object.

    It passes with time or when somebody acts, and what was asked for may be well: never to be taken for damage.
    """


class Changed(StorageError):
    """An object is not, or no longer, the version that was asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: has changed since it was planned: it was replaced or deleted; start the run again"


def outage(error: BaseException, path: str) -> Unavailable | None:
    """What an error that reading a file raised says of its storage as a whole; None where it is about the file.

    A refusal (AccessDenied, PermissionError), a file that is gone and damaged content are about the file.
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, StorageError) or not isinstance(error, OSError):
        return None
    passing = isinstance(error, (TimeoutError, ConnectionError))
    # What Arrow and gzip say of damaged data is an OSError too, of no errno.
    if not passing and (error.errno is None or error.errno in _OF_THE_FILE):
        return None
    return Unavailable(f"{path}: {error.strerror or error}")


def hidden(name: str) -> bool:
    """Whether a part of a path begins with . or _, as what tools leave beside data does."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


def near(wanted: str, found: list[str]) -> str | None:
    """The name among those found that a misspelt one most likely means."""
    import difflib

    return next(iter(difflib.get_close_matches(wanted, found, 1)), None)


@lru_cache(maxsize=256)
def pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression over whole paths: `*` and `?` stop at /, `**` as a whole part does not."""
    out = ""
    parts = glob.split("/")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:.*/)?"
            continue
        out += _part(part) + ("" if last else "/")
    return re.compile(out, re.DOTALL)


def _part(part: str) -> str:
    out, at = "", 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := part.find("]", at + 2 if part[at : at + 1] in ("!", "]") else at + 1)) > 0:
            out += fnmatch.translate(part[at - 1 : end + 1]).removeprefix("(?s:").removesuffix(")\\Z")
            at = end + 1
        else:
            out += re.escape(char)
    return out
