"""Which document kills its process is found in few deaths, whatever the unit's size, and nothing else is blamed."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize(("rows", "most"), [(1, 3), (10, 3), (256, 3), (4096, 4)])
@pytest.mark.parametrize("where", [0.0, 0.37, 1.0])
def test_one_culprit(rows: int, most: int, where: float) -> None:
    culprit = math.floor(where * (rows - 1))
    attempt, deaths, answered = live(rows, {culprit})
    assert attempt.quarantined == {culprit: deaths}
    assert deaths <= most
    assert sorted([*answered, culprit]) == list(range(rows))


def test_several_culprits() -> None:
    attempt, deaths, answered = live(256, {3, 4, 200})
    assert set(attempt.quarantined) == {3, 4, 200}
    assert sum(attempt.quarantined.values()) == deaths <= 9
    assert sorted([*answered, 3, 4, 200]) == list(range(256))


def test_a_process_that_is_killed_from_outside_blames_no_document() -> None:
    attempt = Attempt(UNIT)
    for _ in range(2):  # twice, whatever was decoded
        following = attempt.after_death(attempt.groups(range(100))[-1])
        assert following is not None
        attempt = following
    assert attempt.quarantined == {}


def test_a_unit_that_dies_before_the_first_checkpoint_is_given_up() -> None:
    attempt: Attempt | None = Attempt(UNIT)
    deaths = 0
    while attempt is not None:
        attempt = attempt.after_death([])
        deaths += 1
    assert deaths == 6


def test_storage_that_fails_is_tried_a_few_times() -> None:
    attempt: Attempt | None = Attempt(UNIT)
    numbers = []
    while attempt is not None:
        numbers.append(attempt.number)
        attempt = attempt.after_error()
    assert numbers == [1, 2, 3]
