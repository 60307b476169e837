"""The few documents that a run shows at its end stand there as they do in the table."""

import json

from raypd.cli.summary import _values
from raypd.tasks.columns import value_row


def test_a_boolean_is_that_of_the_record() -> None:
    record = {"Waterproof": True, "Decaf": False, "Brand": "Acme", "Weight in g": 7, "Color": None}
    values = [value_row(name, value, "ok", None) for name, value in record.items()]
    row = {"id": "1", "status": "ok", "record": json.dumps(record), "values": values, "truncated": False}
    assert str(_values(row)) == "Waterproof: true  Decaf: false  Brand: Acme  Weight in g: 7"
