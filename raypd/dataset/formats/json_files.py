"""JSON files: an array of objects, an object, or several of these in turn."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.object_rows import ObjectFormat, read_whole
from raypd.errors import InputError, in_words
from raypd.run import Part
from raypd.tasks import json_constant, kind_of

_VALUE_START = re.compile(r"\S")
_DECODER = json.JSONDecoder(parse_constant=json_constant)
_TOO_LARGE = (
    "`jq -c '.[]'` turns an array into JSON Lines, which input.format=jsonl reads whatever the "
    "file's name is"
)


class Json(ObjectFormat):
    """JSON."""

    reads_as = "an object or an array of them"
    has_schema = False

    def rows(self, part: Part, source: InputConfig) -> Iterator[Any]:
        return json_values(read_whole(part, _TOO_LARGE))

    def fields(self, row: Any) -> Fields:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected a JSON object, found {kind_of(row)}")
        return dict(row)


def json_values(data: bytes) -> Iterator[Any]:
    """Yield the items of a file's arrays, and each value that is not an array.

    An object whose only value is an array is treated as that array.

    Raises:
        InputError: The file is not JSON.
    """
    try:
        text = data.decode("utf-8-sig")
        offset = 0
        while start := _VALUE_START.search(text, offset):
            value, offset = _DECODER.raw_decode(text, start.start())
            items = value
            if isinstance(value, dict) and len(value) == 1:
                items = next(iter(value.values()))
            if isinstance(items, list):
                yield from items
            else:
                yield value
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {in_words(error)}") from None
