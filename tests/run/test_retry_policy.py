"""Bisecting a unit finds the document that kills its worker in few deaths and blames no other."""

import math
from pathlib import Path

import pytest

from raypd.run.retry_policy import Attempt, UnitLog


def process_unit(rows: int, fatal_rows: set[int]) -> tuple[Attempt, int, list[int]]:
    """Simulate a unit until it ends.

    Returns:
        The last attempt, the number of worker deaths, and the rows that were answered.
    """
    attempt = Attempt()
    deaths = 0
    while True:
        answered: list[int] = []
        died = False
        for group in attempt.groups(range(rows)):
            if fatal_rows & set(group):
                deaths += 1
                following = attempt.after_death(group)
                assert following is not None
                attempt = following
                died = True
                break
            answered += group
        if not died:
            return attempt, deaths, answered


@pytest.mark.parametrize(("rows", "deaths_per_row"), [(1, 3), (10, 3), (256, 3), (4096, 4)])
@pytest.mark.parametrize("positions", [(0.0,), (0.37,), (1.0,), (0.01, 0.02, 0.8)])
def test_exactly_the_fatal_rows_are_quarantined_in_few_deaths(
    rows: int, deaths_per_row: int, positions: tuple[float, ...]
) -> None:
    fatal_rows = {math.floor(position * (rows - 1)) for position in positions}
    attempt, deaths, answered = process_unit(rows, fatal_rows)
    assert set(attempt.quarantined) == fatal_rows
    assert sum(attempt.quarantined.values()) == deaths
    assert deaths <= deaths_per_row * len(fatal_rows)
    assert sorted([*answered, *fatal_rows]) == list(range(rows))


def test_two_kills_from_outside_blame_no_document() -> None:
    attempt = Attempt()
    for _ in range(2):
        last_group = attempt.groups(range(100))[-1]
        following = attempt.after_death(last_group)
        assert following is not None
        attempt = following
    assert attempt.quarantined == {}


def test_a_unit_is_given_up_after_several_deaths_without_a_checkpoint() -> None:
    attempt: Attempt | None = Attempt()
    deaths = 0
    while attempt is not None:
        attempt = attempt.after_death([])
        deaths += 1
    assert deaths == 6


def unit_log(output: Path, session: str, node: str, process: str) -> UnitLog:
    """The log of a process on a cluster whose nodes n1 and n2 are alive and whose n3 is gone."""

    def is_alive(node: str) -> bool:
        return node != "n3"

    return UnitLog(str(output), session, node, process, is_alive)


def test_a_death_is_counted_once_and_outlives_the_worker_and_the_driver(tmp_path: Path) -> None:
    first = unit_log(tmp_path, "s1", "n1", "p1")
    assert first.next("u") == Attempt()
    first.begin("u", Attempt())
    # The process itself is alive.
    assert first.next("u") == Attempt()

    second = unit_log(tmp_path, "s1", "n2", "p2")
    after_first_death = Attempt(2, deaths=1)
    assert second.next("u") == after_first_death
    assert second.next("u") == after_first_death
    second.begin("u", after_first_death, [3, 4])

    # To another session, the process ended with its session.
    assert unit_log(tmp_path, "s2", "n1", "p3").next("u") == after_first_death
    after_second_death = Attempt(3, deaths=2, suspects=(3, 4))
    assert unit_log(tmp_path, "s1", "n1", "p4").next("u") == after_second_death
    second.end("u")
    assert second.next("u") == Attempt()


@pytest.mark.parametrize(
    ("node", "next_node", "deaths"),
    [("n1", "n1", 1), ("n1", "n2", 1), ("n3", "n2", 0), ("n3", "n3", 1)],
)
def test_a_process_that_ended_with_its_node_blames_no_document(
    tmp_path: Path, node: str, next_node: str, deaths: int
) -> None:
    unit_log(tmp_path, "s", node, "p1").begin("u", Attempt())
    attempt = unit_log(tmp_path, "s", next_node, "p2").next("u")
    assert attempt == Attempt(1 + deaths, deaths=deaths)


@pytest.mark.parametrize("attempt", [Attempt(), Attempt(3, deaths=2, quarantined={7: 2})])
def test_a_unit_that_was_handed_back_blames_no_document(tmp_path: Path, attempt: Attempt) -> None:
    first = unit_log(tmp_path, "s", "n1", "p1")
    first.begin("u", attempt)
    first.end("u", attempt)
    assert unit_log(tmp_path, "s", "n1", "p2").next("u") == attempt
