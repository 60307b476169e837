"""What the units of a run contain, added up."""

from dataclasses import fields
from typing import Any

import pytest

from raypd.run import unit_totals
from raypd.run.unit import UnitSummary

COUNTS = [
    field.name
    for field in fields(unit_totals.SessionUnits)
    if isinstance(field.default, int) and field.name not in ("units", "last_commit")
]


def summary(**counts: Any) -> UnitSummary:
    fixed = {"documents": 0, "ok": 0, "failed": 0, **counts}
    return UnitSummary(
        unit="u", fingerprint="f", session="s", source="a.jsonl", start=0, seconds=1.0, **fixed
    )


@pytest.mark.parametrize("name", COUNTS)
def test_every_count_of_a_session_is_the_sum_of_those_of_its_units(name: str) -> None:
    totals = unit_totals.UnitTotals([summary(**{name: 3}), summary(**{name: 4})])
    assert totals.total(name) == 7
    assert totals.total("units") == 2
    assert getattr(totals.all(), name) == 7
