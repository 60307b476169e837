"""Which document kills its process is found in few deaths, whatever the unit's size, and nothing else is blamed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raypd.run.retry_policy import Attempt
from raypd.run.unit import Unit

UNIT = Unit("u", ())


def live(rows: int, killers: set[int]) -> tuple[Attempt, int, list[int]]:
    """Plays a unit to its end: the last attempt, the deaths, and the rows that were answered."""
    attempt, deaths = Attempt(UNIT), 0
    while True:
        answered: list[int] = []
        for group in attempt.groups(range(rows)):
            if killers & set(group):
                deaths += 1
                following = attempt.after_death(group)
                assert following is not None
                attempt = following
                break
            answered += group
        else:
            return attempt, deaths, answered


@pytest.mark.parametrize(("rows", "limit"), [(1, 3), (10, 3), (256, 3), (4096, 4)])
@pytest.mark.parametrize("where", [(0.0,), (0.37,), (1.0,), (0.01, 0.02, 0.8)])
def test_the_culprits_are_found(rows: int, limit: int, where: tuple[float, ...]) -> None:
    culprits = {math.floor(part * (rows - 1)) for part in where}
    attempt, deaths, answered = live(rows, culprits)
    assert set(attempt.quarantined) == culprits
    assert sum(attempt.quarantined.values()) == deaths <= limit * len(culprits)
    assert sorted([*answered, *culprits]) == list(range(rows))


def test_a_process_that_is_killed_from_outside_blames_no_document() -> None:
    attempt = Attempt(UNIT)
    for _ in range(2):  # twice, whatever was decoded
        following = attempt.after_death(attempt.groups(range(100))[-1])
        assert following is not None
        attempt = following
    assert attempt.quarantined == {}


@pytest.mark.parametrize(
    ("go_on", "limit"), [(lambda attempt: attempt.after_death([]), 6), (lambda attempt: attempt.after_error(), 3)]
)
def test_a_unit_that_leaves_no_checkpoint_or_that_storage_fails_is_given_up(go_on: Any, limit: int) -> None:
    attempt, tries = Attempt(UNIT), 0
    while attempt is not None:
        attempt, tries = go_on(attempt), tries + 1
    assert tries == limit
