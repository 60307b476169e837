"""What workers that Ray Data streams units to may begin, as the driver answers; whole runs are in test_driver.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from raypd.cluster.ledger_actor import Ask, PoolState
from raypd.cluster.ray_data_executor import RayDataExecutor
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run.records import UnitResult
from raypd.run.unit import Unit

ASKS = [Ask("a", "w1", "stays", 0), Ask("b", "w2", "goes", 0), Ask("c", "w1", "stays", 1),
        Ask("gone", "w1", "stays", 0)]  # fmt: skip


def executor(said: list[str], **attributes: Any) -> RayDataExecutor:
    """One whose pass has the units a, b and c, and that admits one unit a worker; the node `goes` was given notice."""
    own = RayDataExecutor(None, None, ClusterConfig(max_workers=2), said.append)  # type: ignore[arg-type]
    own._open = {name: Unit(name, ()) for name in "abc"}
    own.admit = lambda unit, beside: beside == 0
    own.nodes = SimpleNamespace(look=lambda: None, seconds_left={"goes": 4.0}.get)  # type: ignore[assignment]
    vars(own).update(attributes)
    return own


def state(asks: list[Ask], starts: int = 0, deaths: int = 0) -> PoolState:
    return PoolState(asks, {"w1", "w2"}, {"w1", "w2"}, 0, 0, starts, deaths, set())


def test_who_waits_who_begins_and_who_hands_back() -> None:
    said: list[str] = []
    own = executor(said)
    a, b, _, gone = ASKS
    assert own._answers(state(ASKS)) == {a: True, b: False, gone: False}  # c waits
    assert own._begun == {"a": "w1"}
    assert own._answers(state(ASKS[1:2])) == {b: False}
    assert said == ["a node is going away in 4 s: no more units for it"]
    own.closing = True
    assert not any(own._answers(state(ASKS)).values())


def test_a_unit_ends_once_and_one_that_was_handed_back_stays_open() -> None:
    own = executor([])
    assert list(own._ended("a", UnitResult(handed_back=True))) == []
    assert [event.unit.id for event in own._ended("a", UnitResult(ok=1))] == ["a"]
    assert list(own._ended("a", UnitResult(ok=1))) == []
    assert own._open.keys() == {"b", "c"}
    with pytest.raises(RunError, match="no weights"):
        list(own._ended("b", UnitResult(error="no weights", fatal=True)))


def test_deaths_without_end_end_the_run() -> None:
    said: list[str] = []
    own = executor(said)
    own._answers(state([], deaths=2))
    own._answers(state([], deaths=2))
    assert said == ["a worker process died; its units are tried again"] * 2
    own._answers(state([], deaths=1))  # by a ledger that died itself
    assert len(said) == 2
    with pytest.raises(RunError, match="nothing gets done"):
        own._answers(state([], deaths=31))
    own = executor(said)
    own._answers(state([], starts=9))  # two of them may be loading yet
    with pytest.raises(RunError, match="die while they load the model"):
        own._answers(state([], starts=10))
