"""What a run shows where there is no terminal, by a clock that is set by hand."""

from types import SimpleNamespace

import pytest

from raypd.answering import progress
from raypd.answering.check import check_model
from raypd.cli import summary
from raypd.cluster import driver, ray_session
from raypd.config import ClusterConfig
from raypd.errors import ModelError
from raypd.estimation.checks import with_changes
from raypd.run.records import RunCost
from tests.runs import Clock, write_jsonl


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_a_line_comes_at_once_then_every_ten_seconds_and_only_when_it_says_something_new(clock, capsys) -> None:
    display = progress.RunDisplay(130, 0)
    with display:
        for second in range(35):  # the model is loaded
            clock.now = second
            display.update(0, 0)
        assert capsys.readouterr().err == "0/130 documents, loading the model\n"
        display.begin()
        for second in range(35, 80):
            clock.now = second
            display.update(20 if second < 60 else 90, 1)
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert lines[0] == "20/130 documents, 20/s, 5.5 s left, 1 failed"
    assert last == "90/130 documents, 2.2/s, 18 s left, 1 failed"


def test_a_run_that_stands_still_says_so_once(clock, capsys) -> None:
    display = progress.RunDisplay(130, 0)
    with display:
        display.begin()
        for second in range(100):
            clock.now = second
            display.update(0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["0/130 documents, loading the model", "0/130 documents, 0/s, 0 failed"]


def test_no_rate_is_shown_before_there_is_one(clock, capsys) -> None:
    display = progress.RunDisplay(1536, 0)
    with display:
        clock.now = 20
        display.begin()
        display.update(2, 0)
    assert capsys.readouterr().err.splitlines()[-1] == "2/1536 documents, 0 failed"


def test_a_machine_without_a_price_costs_no_dollars() -> None:
    cost = RunCost(0.0, notes=["a machine of your own; cost.prices.local gives it a price"], seconds={"decode": 3.0})
    wanted = ["cost:   no price (a machine of your own; cost.prices.local gives it a price)", "time:   decode 3.0 s"]
    assert summary._cost_lines(cost) == wanted


def test_one_unit_is_one() -> None:
    own = SimpleNamespace(done_units=0, units=1)
    assert driver.DriverSession.state(own) == "0 of 1 unit committed"  # type: ignore[arg-type]


def test_what_takes_seconds_is_said_before_it_begins(monkeypatch, capsys, config, tmp_path) -> None:
    """The first words come before torch and transformers are imported, and before Ray is there."""
    import ray

    said: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: said.append(capsys.readouterr().err))
    monkeypatch.setattr(ray_session, "_answers", lambda address: True)
    assert ray_session.connect(ClusterConfig(address="local"))
    assert ray_session.connect(ClusterConfig(address="10.0.0.1:6379"))
    assert said == ["starting Ray\n", "connecting to Ray\n"]

    write_jsonl(tmp_path / "in/a.jsonl", ["a"])
    run = with_changes(config(str(tmp_path / "in")), {"model.name": str(tmp_path / "nowhere")})
    for begin in (driver.run_extract, check_model):
        with pytest.raises(ModelError):
            begin(run)
        assert capsys.readouterr().err.startswith("checking the model\n")
