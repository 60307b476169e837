"""The files of the input as a stream, each with its format and name."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

import raypd.dataset.formats as formats
import raypd.dataset.tables as tables
from raypd import storage
from raypd.config import TABLES, InputConfig
from raypd.dataset.formats import CustomReader, Detector, Format, what_is_read
from raypd.errors import InputError
from raypd.run import LeftOut, Part, left_out as run_left_out
from raypd.storage import literal
from raypd.text import counted

_NULL = "__HIVE_DEFAULT_PARTITION__"
# Hugging Face writes such files next to a saved dataset.
_CACHE = re.compile(r"(?:.*/)?cache-[0-9a-f]{16}[^/]*\.arrow")
# The end of a name that is made unique by the number of its root.
_ROOT_NUMBER = re.compile(r"#\d+$")


class InputObject(NamedTuple):
    """A file of the input."""

    path: str
    name: str  # unique, and the same wherever the input is
    size: int  # bytes
    stamp: str  # see storage.Object; a later session recognizes the file by it
    format: str  # see `formats.FORMATS`
    compression: str | None  # "gz", "zst" or None

    def as_part(self, version: str) -> Part:
        """Return the whole file as a part without a range."""
        return Part(**self._asdict(), version=version)


def objects(source: InputConfig, left_out: LeftOut | None = None) -> Iterator[InputObject]:
    """Yield the files of the input, each once, in order of root and name.

    Args:
        source: Section `input` of a configuration; a table has its version.
        left_out: Collects the files that are not yielded. The files of other versions of a table
            are not among them.

    Raises:
        InputError: A root contains nothing that can be read.
    """
    if left_out is None:
        left_out = LeftOut()
    if source.format in TABLES:
        yield from _table_objects(source)
        return
    roots = [source.path] if isinstance(source.path, str) else source.path
    # Kept only if roots may overlap.
    path_hashes: set[int] = set()
    for number, root in enumerate(roots):
        is_repeated = _overlaps(root, roots[:number])
        is_repeated_later = _overlaps(root, roots[number + 1 :])
        for item in _root_objects(root, number, source, left_out):
            if is_repeated and hash(item.path) in path_hashes:
                continue
            if is_repeated_later:
                path_hashes.add(hash(item.path))
            yield item


def _root_objects(
    root: str, number: int, source: InputConfig, left_out: LeftOut
) -> Iterator[InputObject]:
    """Yield the files of one root that can be read.

    Args:
        root: A file, a folder or a glob.
        number: The root's number in `input.path`, from 0.
        source: Section `input`.
        left_out: Collects the other files.

    Raises:
        InputError: None of the root's files can be read, or one that a glob matches cannot.
    """
    detector = Detector(source.format, source.ocr != "none")

    def note_hidden(item: storage.Object) -> bool:
        format, _ = detector.detect(item.name)
        left_out.add(run_left_out.HIDDEN, item.name, notable=format is not None)
        return False

    format_of = Detector(CustomReader.setting) if source.reader else detector
    has_readable = False
    first_skipped: storage.Object | None = None
    for item in storage.find(root, note_hidden):
        if _CACHE.fullmatch(item.name) and not item.path.endswith(root):
            left_out.add(run_left_out.CACHE, item.name)
            continue
        format, compression = format_of.detect(item.name)
        if format is not None:
            has_readable = True
            yield _input_object(item, number, format, compression)
            continue
        if literal(root) != root:
            raise InputError(_unsupported(item.path, source.format))
        if first_skipped is None:
            first_skipped = item
        if not storage.is_remote(item.path) and os.path.isdir(item.path):
            left_out.add(run_left_out.LINK, item.name)
        else:
            left_out.add(_reason(item.name, source.format), item.name)
    if not has_readable and first_skipped is not None:
        reason = _unsupported(first_skipped.path, source.format)
        if not first_skipped.path.endswith(root):
            reason = f"{root}: nothing to read in this folder; {reason}"
        raise InputError(reason)


def _table_objects(source: InputConfig) -> Iterator[InputObject]:
    """Yield the files of a table's version.

    Raises:
        InputError: Some of them cannot be found.
    """
    names = tables.file_names(source)
    root = tables.folder(source)
    detector = Detector(source.format)
    for item in storage.find(root, lambda hidden: hidden.name in names):
        if item.name not in names:
            continue
        names.remove(item.name)
        format, compression = detector.detect(item.name)
        assert format is not None
        yield _input_object(item, 0, format, compression)
    if names:
        files = f"{counted(len(names), 'file')} of version {source.version} of the table"
        raise InputError(
            f"{root}: {files} cannot be found, the first: {min(names)}; were they vacuumed?"
        )


def _input_object(
    item: storage.Object, root_number: int, format: Format, compression: str | None
) -> InputObject:
    """Return a file of the input.

    Raises:
        InputError: Its name is not UTF-8.
    """
    try:
        item.name.encode()
    except UnicodeEncodeError:
        raise InputError(f"{item.path!a}: the name is not UTF-8; rename the file") from None
    name = item.name
    # The root's number distinguishes files with the same name in several roots.
    if root_number or _ROOT_NUMBER.search(name):
        name = f"{name}#{root_number + 1}"
    return InputObject(item.path, name, item.size, item.stamp, format.name, compression)


def _overlaps(root: str, other_roots: list[str]) -> bool:
    """Return whether one of the other roots may contain files of this one."""
    start = literal(storage.absolute(root))
    for other_root in other_roots:
        other_start = literal(storage.absolute(other_root))
        if start.startswith(other_start) or other_start.startswith(start):
            return True
    return False


def _reason(name: str, setting: str) -> str:
    """Return why a file is left out, as the end of the sentence "3 files ...".

    Args:
        name: The file's name.
        setting: `input.format`.
    """
    for other_setting in ["auto", *formats.settings_by_ending()]:
        format, _ = Detector(other_setting).detect(name)
        if format is not None and other_setting == setting:
            return "that input.ocr=auto reads"
        if format is not None:
            return f"that input.format={other_setting} reads"
    return f"of another type ({what_is_read(setting)})"


def _unsupported(path: str, setting: str) -> str:
    """Return the message about a file whose name does not show its format.

    Args:
        path: The file.
        setting: `input.format`.
    """
    settings = formats.settings_by_ending()
    if Detector(setting).detect(path)[0] is not None:
        return f"{path}: a picture, which input.ocr=auto reads (pip install 'raypd[ocr]')"
    if setting in settings:
        return f"{path}: {what_is_read(setting)}"
    for other_setting in settings:
        format, _ = Detector(other_setting).detect(path)
        if format is not None:
            return f"{path}: {what_is_read(other_setting)}"
    endings = [ending for name in settings for ending in formats.endings_of(name)]
    return (
        f"{path}: {what_is_read('auto')}, and {', '.join(endings)} as whole files; if it is one of "
        "these under another name, set input.format; input.reader names a function for others"
    )


def partition_keys(name: str) -> dict[str, str | None]:
    """Return the columns that a file's folders give in Hive's naming.

    Args:
        name: The file's name, such as "country=DE/part-0.parquet".

    Returns:
        The values by column, such as {"country": "DE"}.
    """
    columns: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if key and equals:
            columns[unquote(key)] = None if value == _NULL else unquote(value)
    return columns
