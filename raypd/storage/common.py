"""What both kinds of storage share: how a file is described, and what goes wrong with it."""

import errno
import fnmatch
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raypd.errors import InputError, RunError, did_you_mean

SINCE_PLANNED = "since it was planned"  # in every reason why a file is not the one that was planned
# `**` as a whole part, a set of characters within a part, any other character.
_TOKEN = re.compile(r"(?<![^/])\*\*(?:/|$)|\[!?\]?[^]/]*\]|.", re.DOTALL)
# Errors about one file; all others (EIO, ESTALE, EMFILE, ENOSPC, ...) are about disk, mount or
# machine.
_OF_THE_FILE = frozenset(
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
    path: str
    name: str  # the path below the folder that was asked for: the same wherever that folder lies
    size: int  # bytes
    stamp: str  # changes with the content: on S3 the version, locally size and time of change


class StorageError(OSError, RunError):
    """A store refused, did not answer or is not what it should be; the text says where and what to
    do.
    """


class Unavailable(StorageError):
    """A store that is out of reach, overloaded, or lets this caller in nowhere: never to be taken
    for damage.
    """


class Changed(StorageError):
    """The object at a path is not, or no longer, the version that was asked for."""

    def __str__(self) -> str:
        return f"{self.args[0]}: has changed {SINCE_PLANNED}: it was replaced or deleted"


def outage(error: BaseException, path: str) -> Unavailable | None:
    """Unavailable for an error about storage as a whole; None: about the file (refused, missing,
    damaged).
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, StorageError) or not isinstance(error, OSError):
        return None
    passing = isinstance(error, (TimeoutError, ConnectionError))
    # Arrow and gzip raise an OSError without errno for damaged data.
    if not passing and (error.errno is None or error.errno in _OF_THE_FILE):
        return None
    return Unavailable(f"{path}: {error.strerror or error}")


def literal(glob: str) -> str:
    """The part of a glob before its first special character; all of a path that has none."""
    return re.split(r"[*?[]", glob, maxsplit=1)[0]


def choose(items: Iterable[Object], glob: str | None) -> Generator[Object, None, bool | None]:
    """The listed files that a glob matches, without hidden ones; returns whether any was listed if
    none is chosen.
    """
    matcher = pattern(glob) if glob is not None else None
    listed = matched = False
    for item in items:
        listed = True
        hidden = any(part.startswith((".", "_")) for part in item.name.split("/"))
        if not hidden and (matcher is None or matcher.fullmatch(item.path)):
            matched = True
            yield item
    return None if matched else listed


def find_objects(client: Any, path: str) -> Iterator[Object]:
    """`Storage.find` on an object store: `single` this path, `objects` of a prefix, `beside` names
    in a folder.
    """
    try:
        if not path.endswith("/") and (item := client.single(path)) is not None:
            yield item
            return
        prefix = literal(path)
        glob = path if prefix != path else None
        prefix = prefix if glob else path.rstrip("/") + "/"

        listed = yield from choose(client.objects(prefix), glob)
        if listed is None:
            return
        if glob is not None:
            empty = any(prefix.split("/", 3)[3:]) and not listed
            raise InputError(
                f"{path}: no object matches" + (f"; none is under {prefix} at all" if empty else "")
            )
        if listed:
            raise InputError(
                f"{path}: it holds only hidden objects (a part of their names begins with . or _)"
            )
        raise InputError(
            f"{path}: no such object, and none under it{_near(client, path.rstrip('/'))}"
        )
    except Unavailable:
        raise
    except (StorageError, FileNotFoundError) as error:
        raise InputError(str(error)) from None


def _near(client: Any, path: str) -> str:
    """The sibling that a misspelt key most likely means."""
    parent, _, name = path.rpartition("/")
    if parent.endswith("/"):  # a bucket
        return ""
    try:
        hint = did_you_mean(name, client.beside(parent), lambda key: f"{parent}/{key}")
    except OSError:
        return ""
    return f"; {hint}" if hint else ""


def pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression over whole paths: `*` and `?` stop at /, `**` as a whole part
    does not.
    """
    return re.compile(_TOKEN.sub(_token, glob), re.DOTALL)


def _token(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("["):
        return fnmatch.translate(text).removeprefix("(?s:").removesuffix(")\\Z")
    return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(text) or re.escape(text)
