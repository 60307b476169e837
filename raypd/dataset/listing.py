"""The input's objects as a stream: which there are, what format each has, and under which name it
is known.
"""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

from raypd import storage
from raypd.config import TABLES, InputConfig
from raypd.config.data import ENDINGS
from raypd.dataset import tables
from raypd.errors import InputError
from raypd.run.left_out import CACHE, HIDDEN, LINK, LeftOut
from raypd.storage import literal
from raypd.text import counted

_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_FORMATS = {".ndjson": "jsonl"} | {
    f".{name}": name for name in ("jsonl", "csv", "tsv", "parquet", "arrow")
}
_ENDINGS = "raypd reads .jsonl, .csv and .tsv (also with .gz or .zst), .parquet and .arrow"
_NULL = "__HIVE_DEFAULT_PARTITION__"
# Of Hugging Face, beside a saved dataset.
_CACHE = re.compile(r"(?:.*/)?cache-[0-9a-f]{16}[^/]*\.arrow")


class InputObject(NamedTuple):
    """An object of the input.

    `name` differs from all others' and is the same wherever the input lies.
    """

    path: str
    name: str
    size: int
    stamp: str  # see storage.Object: by it a later session knows the object again
    format: str
    compression: str | None


def objects(source: InputConfig, left_out: LeftOut | None = None) -> Iterator[InputObject]:
    """Yield the input's objects, each once, by root and name.

    Args:
        source: Section `input` of a configuration; a table has its version.
        left_out: Collects the files that are not yielded. Of a table only its version's files
            count, so files of other versions are not among them.

    Raises:
        InputError: A root holds nothing that can be read.
    """
    left_out = left_out or LeftOut()
    names = tables.file_names(source) if source.format in TABLES else None

    def take_hidden(item: storage.Object) -> bool:
        if names is not None:
            return item.name in names
        left_out.add(HIDDEN, item.name, notable=_format(item.name, source.format)[0] is not None)
        return False

    paths = [source.path] if isinstance(source.path, str) else source.path
    roots = paths if names is None else [tables.folder(source)]
    path_hashes: set[int] = set()  # kept only where one root can hold what another does
    for number, root in enumerate(roots):
        before, after = _overlaps(root, roots[:number]), _overlaps(root, roots[number + 1 :])
        readable = 0
        skipped: storage.Object | None = None
        for item in storage.find(root, take_hidden):
            if names is not None:
                if item.name not in names:
                    continue
                names.remove(item.name)
            if _CACHE.fullmatch(item.name) and not item.path.endswith(root):
                left_out.add(CACHE, item.name)
                continue
            format, compression = (
                ("reader", None) if source.reader else _format(item.name, source.format)
            )
            if format is None:
                if literal(root) != root:
                    raise InputError(_unsupported(item.path, source.format))
                skipped = skipped or item
                if not storage.is_remote(item.path) and os.path.isdir(item.path):
                    left_out.add(LINK, item.name)
                else:
                    left_out.add(_of_another_type(source.format), item.name)
                continue
            readable += 1
            try:
                item.name.encode()
            except UnicodeEncodeError:
                raise InputError(f"{item.path!a}: the name is not UTF-8; rename the file") from None
            if before and hash(item.path) in path_hashes:
                continue
            if after:
                path_hashes.add(hash(item.path))
            # With the root's number where another root may hold the same name.
            name = (
                f"{item.name}#{number + 1}"
                if number or re.search(r"#\d+$", item.name)
                else item.name
            )
            yield InputObject(item.path, name, item.size, item.stamp, format, compression)
        if names:
            lost = f"{counted(len(names), 'file')} of version {source.version} of the table"
            raise InputError(
                f"{root}: {lost} cannot be found, the first: {min(names)}; were they vacuumed?"
            )
        if not readable and skipped is not None:
            where = (
                "" if skipped.path.endswith(root) else f"{root}: nothing to read in this folder; "
            )
            raise InputError(where + _unsupported(skipped.path, source.format))


def _overlaps(root: str, roots: list[str]) -> bool:
    start, *starts = (literal(storage.absolute(path)) for path in (root, *roots))
    return any(start.startswith(prefix) or prefix.startswith(start) for prefix in starts)


def _format(name: str, setting: str) -> tuple[str | None, str | None]:
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(suffix)
    ending = os.path.splitext(stem)[1] if compression else suffix
    if setting in ENDINGS:
        return ENDINGS[setting].get(ending), compression
    if setting in TABLES:
        return "parquet", None
    if setting != "auto":
        return setting, compression if setting not in ("parquet", "arrow") else None
    format = _FORMATS.get(ending)
    return (None, None) if format in ("parquet", "arrow") and compression else (format, compression)


def _of_another_type(setting: str) -> str:
    """Return why a file whose name says no format is left out, to follow the number of files."""
    reads = _reads(setting) if setting in ENDINGS else _ENDINGS
    return f"of another type ({reads})"


def _reads(setting: str) -> str:
    kind = {"files": "a document", "excel": "a table, its first sheet"}.get(
        setting, "an object or an array of them"
    )
    return f"input.format={setting} takes each file ({', '.join(ENDINGS[setting])}) as {kind}"


def _unsupported(path: str, setting: str) -> str:
    if setting in ENDINGS:
        return f"{path}: {_reads(setting)}"
    for form in ENDINGS:
        if _format(path, form)[0] is not None:
            return f"{path}: {_reads(form)}"
    others = (
        "if it is one of these under another name, set input.format; input.reader names a "
        "function for others"
    )
    return (
        f"{path}: {_ENDINGS}, whole "
        f"{', '.join(end for ends in ENDINGS.values() for end in ends)}; {others}"
    )


def partition_keys(name: str) -> dict[str, str | None]:
    """Columns in an object's folders, as Hive has them: {"country": "DE"} of
    "country=DE/part-0.parquet".
    """
    pairs = [folder.partition("=") for folder in name.split("/")[:-1]]
    return {
        unquote(key): None if value == _NULL else unquote(value)
        for key, equals, value in pairs
        if key and equals
    }
