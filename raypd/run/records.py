"""Read and write records: dataclasses that are stored as JSON files in a run's folder.

Each record is defined next to the code that writes it. Its fields are the keys of the JSON. Unknown
keys are ignored and absent ones take their defaults, so that files of other versions can be read.
Points in time are unix seconds and money is in USD, unless a field says otherwise.
"""

import json
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raypd import storage
from raypd.errors import raised_as

_Record = TypeVar("_Record")
_adapter = cache(TypeAdapter)


class RecordError(ValueError):
    """JSON is not the record that it should be; the message names the file and the key."""


def from_json(kind: type[_Record], tree: Any, file: str) -> _Record:
    """Make a record from parsed JSON.

    Args:
        kind: The dataclass of the record.
        tree: The parsed JSON.
        file: The name of the file, for error messages.

    Raises:
        RecordError: If a key is missing or has the wrong type.
    """
    try:
        return _adapter(kind).validate_python(tree)  # type: ignore[arg-type]  # a type is hashable
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        location = f"{key}: " if key else ""
        raise RecordError(f"{file}: cannot be read: {location}{first['msg']}") from None


def read(kind: type[_Record], path: str) -> _Record:
    """Read a record from a file.

    Raises:
        RecordError: If the file does not contain such a record.
        OSError: If the file cannot be read.
    """
    return from_bytes(kind, storage.read(path), path)


def from_bytes(kind: type[_Record], data: bytes, path: str) -> _Record:
    """Make a record from the content of its file.

    Args:
        kind: The dataclass of the record.
        data: The content.
        path: The file, for error messages.

    Raises:
        RecordError: If it is not such a record.
    """
    with raised_as(RecordError, f"{path}: cannot be read", ValueError):
        tree = json.loads(data)
    return from_json(kind, tree, path)


def write(path: str, record: Any, indent: int | None = 2) -> None:
    """Write a record to a file atomically.

    Raises:
        OSError: If the file cannot be written.
    """
    storage.put(path, encoded(record, indent))


def encoded(record: Any, indent: int | None = 2) -> bytes:
    """Encode a record, which is a dataclass, as the content of its file.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON cannot express.
    """
    text = json.dumps(
        tree(record),
        indent=indent,
        ensure_ascii=False,
        allow_nan=False,
        default=str,
    )
    return (text + "\n").encode()


def tree(record: Any) -> dict[str, Any]:
    """Convert a record, which is a dataclass, to the JSON object of its file."""
    return asdict(record, dict_factory=_json_object)


def _json_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the fields of a dataclass to a JSON object.

    A mapping whose keys are named tuples, such as `UsageKey`, becomes a list of rows.
    """
    tree = {}
    for name, value in fields:
        if isinstance(value, dict) and isinstance(next(iter(value), None), tuple):
            tree[name] = [{**key._asdict(), **row} for key, row in value.items()]
        else:
            tree[name] = value
    return tree
