"""Which document kills its process is found in few deaths, whatever the unit's size, and nothing
else is blamed.
"""

import math
from pathlib import Path

import pytest

from raypd.run.retry_policy import Attempt, UnitLog


def live(rows: int, killers: set[int]) -> tuple[Attempt, int, list[int]]:
    """Plays a unit to its end: the last attempt, the deaths, and the rows that were answered."""
    attempt = Attempt()
    deaths = 0
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


def test_a_kill_from_outside_blames_no_document_and_a_unit_without_checkpoints_is_given_up():
    attempt: Attempt | None = Attempt()
    for _ in range(2):  # twice, whatever was decoded
        following = attempt.after_death(attempt.groups(range(100))[-1])
        assert following is not None
        attempt = following
    assert attempt.quarantined == {}
    attempt = Attempt()
    deaths = 0
    while attempt is not None:
        attempt = attempt.after_death([])
        deaths = deaths + 1
    assert deaths == 6


def log(output: Path, session: str, node: str, process: str) -> UnitLog:
    """Of a process on one of the nodes n1, n2, which are there, and n3, which is gone."""
    return UnitLog(str(output), session, node, process, lambda node: node != "n3")


def test_deaths_outlive_worker_and_driver(tmp_path: Path) -> None:
    first = log(tmp_path, "s1", "n1", "p1")
    assert first.next("u") == (Attempt(), False)
    first.begin("u", Attempt())
    assert first.next("u") == (Attempt(), False)  # it is alive itself
    second = log(tmp_path, "s1", "n2", "p2")
    once, died = second.next("u")
    assert (once, died) == (Attempt(2, deaths=1), True)
    assert second.next("u") == (once, False)  # a death counts once
    second.begin("u", once, [3, 4])
    assert log(tmp_path, "s2", "n1", "p3").next("u") == (once, False)  # it ended with its session
    twice, died = log(tmp_path, "s1", "n1", "p4").next("u")
    assert twice == Attempt(3, deaths=2, suspects=(3, 4))
    second.end("u")
    assert second.next("u") == (Attempt(), False)


@pytest.mark.parametrize(
    ("node", "here", "died"), [("n1", "n1", 1), ("n1", "n2", 1), ("n3", "n2", 0), ("n3", "n3", 1)]
)
def test_a_process_that_went_with_its_node_blames_nobody(
    tmp_path: Path, node: str, here: str, died: int
) -> None:
    log(tmp_path, "s", node, "p1").begin("u", Attempt())
    assert log(tmp_path, "s", here, "p2").next("u") == (Attempt(1 + died, deaths=died), bool(died))


@pytest.mark.parametrize("attempt", [Attempt(), Attempt(3, deaths=2, quarantined={7: 2})])
def test_what_was_handed_back_blames_nobody(tmp_path: Path, attempt: Attempt) -> None:
    first = log(tmp_path, "s", "n1", "p1")
    first.begin("u", attempt)
    first.end("u", attempt)
    assert log(tmp_path, "s", "n1", "p2").next("u") == (attempt, False)
