"""Units of work: what the input is cut into, each with an id that is the same on every run.

A unit is a range of rows of one object. Its id is a pure function of the object's name and version, the range, and the
configuration's fingerprint; a unit whose id is committed is never done again.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd.cluster import storage
from raypd.cluster.jsonl import BROKEN_STREAM, lines, open_lines
from raypd.config import InputConfig, RunConfig
from raypd.errors import InputError

COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_SAMPLED_LINES = 100  # of every JSONL file, for the columns


@dataclass(frozen=True)
class Unit:
    """Rows [start, start + rows) of one object; the object is `path`, known to the user as `name`.

    offset, line: byte and line (from 1) at which the range begins, for uncompressed JSONL; 0 and 1 elsewhere.
    """

    id: str
    path: str
    name: str
    version: str
    size: int
    format: str
    compression: str | None
    start: int
    rows: int
    offset: int = 0
    line: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Unit:
        return Unit(**json.loads(text))


def line_limit(max_document_bytes: int) -> int:
    """Bytes of a JSONL line beyond which it is not parsed: room for escapes and for columns that are not text."""
    return 4 * max_document_bytes + 65536


def plan(config: RunConfig) -> list[Unit]:
    """All units of a run, in the order of the input.

    Raises InputError for what can be known before a model is loaded: no such file, nothing in it, a format that
    is not known, a missing column, a damaged file.
    """
    source = config.input
    units: list[Unit] = []
    columns = _Columns(config)
    for item, format, compression in _objects(source):
        if format == "parquet":
            units += _plan_parquet(item, config, columns)
        else:
            units += _plan_jsonl(item, compression, config, columns)
    columns.check_all()
    if not units:
        raise InputError(f"{_shown(source.path)}: no documents in it")
    return units


def _shown(path: str | list[str]) -> str:
    return path if isinstance(path, str) else ", ".join(path)


def _objects(source: InputConfig) -> list[tuple[storage.Object, str, str | None]]:
    """The input's objects with format and compression, each once, under names that differ."""
    found: list[tuple[storage.Object, str, str | None]] = []
    paths: set[str] = set()
    names: dict[str, int] = {}
    for path in [source.path] if isinstance(source.path, str) else source.path:
        skipped = []
        before = len(found)
        folder = storage.is_folder(path)
        for item in storage.find(path):
            format, compression = _format(item.name, source.format)
            if format is None:
                if not folder:
                    raise InputError(_unsupported(item))
                skipped.append(item)
            elif item.path not in paths:
                paths.add(item.path)
                names[item.name] = names.get(item.name, 0) + 1
                if names[item.name] > 1:  # two roots of the list hold a file of this name
                    item = replace(item, name=f"{item.name}#{names[item.name]}")
                found.append((item, format, compression))
        if len(found) == before and skipped:
            raise InputError(f"{path}: nothing to read in this folder; " + _unsupported(skipped[0]))
    return found


def _format(name: str, wanted: str) -> tuple[str | None, str | None]:
    path = PurePosixPath(name)
    compression = COMPRESSIONS.get(path.suffix.lower())
    if wanted != "auto":
        return wanted, compression if wanted == "jsonl" else None
    format = FORMATS.get(PurePosixPath(path.stem if compression else path.name).suffix.lower())
    return (None, None) if format == "parquet" and compression else (format, compression)


def _unsupported(item: storage.Object) -> str:
    return (
        f"{item.path}: raypd reads .jsonl, .jsonl.gz, .jsonl.zst and .parquet; if it is one of these under another "
        "name, set input.format"
    )


# ----------------------------------------------------------------------------------------------------------- one object


def _unit(item: storage.Object, version: str, config: RunConfig, start: int, rows: int, **more: Any) -> Unit:
    key = "\0".join([item.name, version, str(start), str(rows), config.fingerprint()])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", item.name)[-48:].strip("-.")
    return Unit(
        id=f"{prefix}-{start:09d}-{digest}",
        path=item.path,
        name=item.name,
        version=version,
        size=item.size,
        start=start,
        rows=rows,
        **more,
    )


def _plan_parquet(item: storage.Object, config: RunConfig, columns: _Columns) -> list[Unit]:
    try:
        version = item.version or storage.version(item.path)
        with storage.open_file(item.path, version, item.size) as file:
            parquet = pq.ParquetFile(file)
            rows, found = parquet.metadata.num_rows, parquet.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{item.path}: cannot be read as Parquet: {error}") from None
    columns.check_schema(item, found)
    step = config.cluster.unit_documents
    return [
        _unit(item, version, config, start, min(step, rows - start), format="parquet", compression=None)
        for start in range(0, rows, step)
    ]


def _plan_jsonl(item: storage.Object, compression: str | None, config: RunConfig, columns: _Columns) -> list[Unit]:
    step = config.cluster.unit_documents
    starts: list[tuple[int, int]] = []  # (offset, line) of every unit's first row
    rows = 0
    sampled: list[bytes] = []
    number = 0
    try:
        version = item.version or storage.version(item.path)
        with open_lines(item.path, compression, version=version) as file:
            for number, offset, _, data in lines(file, line_limit(config.input.max_document_bytes)):
                if rows % step == 0:
                    starts.append((offset, number) if compression is None else (0, 1))
                if len(sampled) < _SAMPLED_LINES and data is not None:
                    sampled.append(data)
                rows += 1
    except BROKEN_STREAM as error:
        raise InputError(
            f"{item.path}: cannot be read as {compression} after line {number}: {error}; the file is damaged or "
            "cut short"
        ) from None
    except OSError as error:
        raise InputError(f"{item.path}: cannot be read: {error}") from None
    columns.sample(item, sampled)
    return [
        _unit(
            item,
            version,
            config,
            i * step,
            min(step, rows - i * step),
            format="jsonl",
            compression=compression,
            offset=offset,
            line=line,
        )
        for i, (offset, line) in enumerate(starts)
    ]


# -------------------------------------------------------------------------------------------------------------- columns


class _Columns:
    """Checks that the columns of the configuration exist: strictly in Parquet, by the first lines in JSONL."""

    def __init__(self, config: RunConfig) -> None:
        self.wanted = config.wanted_columns()
        # A file without any of these has nothing to read.
        self.content = {k: n for k, n in self.wanted.items() if k not in ("input.id_column", "input.category_column")}
        self.seen: set[str] = set()
        self.sampled: list[storage.Object] = []
        self.objects = 0

    def check_schema(self, item: storage.Object, found: Sequence[str]) -> None:
        for key, name in self.wanted.items():
            if name not in found:
                raise InputError(f"{item.path}: {self._missing(key, name, found)}")

    def sample(self, item: storage.Object, raw: Iterable[bytes]) -> None:
        keys: set[str] = set()
        objects = lines_seen = 0
        for data in raw:
            lines_seen += 1
            try:
                row = json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                objects += 1
                keys.update(row)
        if objects and not keys.intersection(self.content.values()):
            key, name = next(iter(self.content.items()))
            raise InputError(f"{item.path}: {self._missing(key, name, sorted(keys))}")
        self.seen |= keys
        self.objects += objects
        if lines_seen:
            self.sampled.append(item)

    def check_all(self) -> None:
        """After the last file: every column stood in some line, and some line was an object."""
        if not self.sampled:
            return
        first = self.sampled[0]
        if self.objects == 0:
            raise InputError(f"{first.path}: none of the first lines is a JSON object; is it JSON Lines?")
        for key, name in self.wanted.items():
            if name not in self.seen:
                raise InputError(f"{first.path}: {self._missing(key, name, sorted(self.seen))}")

    def _missing(self, key: str, name: str, found: Sequence[str]) -> str:
        near = difflib.get_close_matches(name, found, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        shown = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "")
        extra = {
            "input.id_column": "; input.id_column=null numbers the documents",
            "input.category_column": "; input.category_column=null with input.category gives all the same",
        }.get(key, "")
        return f"no column {name!r} ({key}): {hint}it has {shown}{extra}"
