"""Missing values (null, NaN, NaT) and cells of types that JSON does not have."""

import datetime
import json
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_WRITTEN_OUT = (datetime.date, datetime.time, datetime.timedelta, uuid.UUID)
# Types of pandas, recognized by name so that reading does not import pandas.
_PANDAS_MISSING = ("NAType", "NaTType")


def json_constant(text: str) -> float | None:
    """Return the value of a constant that JSON does not have: None for NaN.

    It serves as `parse_constant` of `json.loads`.
    """
    return None if text == "NaN" else float(text)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with NaN as None.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, parse_constant=json_constant)


def plain_value(value: Any) -> Any:
    """Return a cell of a table or of a reader in types that JSON has.

    A missing value becomes None. Decimals, dates, times and UUIDs become text, which keeps all
    their digits. Lists and dicts are converted item by item.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if type(value).__module__ == "numpy":
        return plain_value(value.tolist())
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Decimal):
        return None if value.is_nan() else format(value, "f")
    # The class of pandas' NaT is a datetime.
    if type(value).__name__ in _PANDAS_MISSING:
        return None
    if isinstance(value, _WRITTEN_OUT):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return value
