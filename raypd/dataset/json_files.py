"""Files of JSON: an array of objects, an object, or several one behind the other. Each unit reads its file whole."""

import json
import re
from collections.abc import Iterator
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.jsonl import open_lines
from raypd.errors import InputError, in_words
from raypd.run.unit import Part

_VALUE = re.compile(r"\S")  # begins one
_MOST_BYTES = 1 << 27  # as objects of Python that is a GB


def json_values(part: Part, source: InputConfig) -> Iterator[Any]:
    """The items of a file's arrays, and what stands outside of one. Raises InputError, OSError."""
    with open_lines(part.path, part.compression, version=part.version) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        advice = "`jq -c '.[]'` makes JSON Lines of an array, and input.format=jsonl reads lines of this name"
        raise InputError(f"JSON of more than {_MOST_BYTES >> 20} MiB: {advice}")
    try:
        text, place = data.decode("utf-8-sig"), 0
        while begin := _VALUE.search(text, place):
            value, place = json.JSONDecoder().raw_decode(text, begin.start())
            yield from value if isinstance(value, list) else [value]
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {in_words(error)}") from None
