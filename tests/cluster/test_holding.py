"""One session at a time on a run: whoever is alive keeps it, whoever is dead loses it, whatever the clocks say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raypd.cluster import holding
from raypd.errors import RunError

STALE = 3.0  # seconds; a busy machine may hold a thread up for one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(holding, "STALE_SECONDS", STALE)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions know nothing of each other's machine."""
    monkeypatch.setattr(holding, "_machine", lambda: None)


def wait(condition) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def silent(session: holding.Session) -> None:
    """As if its process were gone."""
    session._ended.set()
    session._thread.join()


def test_a_live_session_on_this_machine_is_named_at_once(tmp_path: Path) -> None:
    first = holding.Session(str(tmp_path))
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        holding.Session(str(tmp_path))
    assert time.monotonic() - began < 0.9 * STALE
    since = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(first.began))
    for part in (first.id, f"since {since}", f"process {os.getpid()}"):
        assert part in str(caught.value)
    first.end("complete")
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == [f"{first.id}.json"]


def test_a_session_that_ended_or_was_killed_here_gives_the_run_free_at_once(tmp_path: Path) -> None:
    holding.Session(str(tmp_path)).end("interrupted")
    second = holding.Session(str(tmp_path))
    assert not second.took_over
    second.end("complete")
    code = f"import os; from raypd.cluster import holding; holding.Session({str(tmp_path)!r}); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    lines: list[str] = []
    began = time.monotonic()
    third = holding.Session(str(tmp_path), lines.append)
    assert time.monotonic() - began < 0.9 * STALE
    assert third.took_over
    assert "was killed: taking its place" in lines[0]
    third.end("complete")


@pytest.mark.parametrize("shift", [-86400.0, 0.0, 86400.0])
def test_a_heartbeat_from_another_machine_is_watched_not_compared(tmp_path: Path, monkeypatch, shift: float) -> None:
    """The second machine's clock is a day behind or ahead."""
    elsewhere(monkeypatch)
    first = holding.Session(str(tmp_path))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    with pytest.raises(RunError, match=first.id):
        holding.Session(str(tmp_path))
    silent(first)
    lines: list[str] = []
    began = time.monotonic()
    second = holding.Session(str(tmp_path), lines.append)
    assert time.monotonic() - began > 0.9 * STALE
    assert second.took_over
    assert "no sign of life" in lines[-1]
    second.end("complete")


def test_a_clock_that_is_set_back_during_a_session_does_not_move_its_heartbeat(tmp_path: Path, monkeypatch) -> None:
    session = holding.Session(str(tmp_path))
    began = session.began
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    time.sleep(0.3)
    session.end("complete")
    tree = json.loads((tmp_path / "sessions" / f"{session.id}.json").read_text())
    assert tree["began"] == began
    assert began + 0.25 < tree["heartbeat"] == tree["ended"] < began + 60
    assert 0.25 < tree["seconds"] < 60


def test_a_session_that_was_silent_for_too_long_learns_that_it_lost_the_run(tmp_path: Path, monkeypatch) -> None:
    elsewhere(monkeypatch)
    first = holding.Session(str(tmp_path))
    silent(first)
    second = holding.Session(str(tmp_path))
    first._beat()  # it wakes up
    assert first.lost is not None
    assert second.id in first.lost
    first.end("failed")
    assert second.lost is None
    time.sleep(0.3)
    assert second.lost is None
    second.end("complete")


def test_of_many_that_start_at_once_one_wins(tmp_path: Path, monkeypatch) -> None:
    elsewhere(monkeypatch)
    dead = holding.Session(str(tmp_path))
    silent(dead)
    won: list[holding.Session] = []
    refused: list[str] = []

    def go() -> None:
        try:
            won.append(holding.Session(str(tmp_path)))
        except RunError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert len(refused) == 5
    assert all(won[0].id in line for line in refused)
    won[0].end("complete")


def test_storage_that_is_away_for_a_moment_ends_nothing(tmp_path: Path, monkeypatch) -> None:
    session = holding.Session(str(tmp_path))
    put_if = holding.storage.put_if
    calls: list[int] = []

    def fails(*arguments):
        calls.append(1)
        if len(calls) < 4:
            raise OSError("503 SlowDown")
        return put_if(*arguments)

    monkeypatch.setattr(holding.storage, "put_if", fails)
    wait(lambda: len(calls) > 5)
    assert session.lost is None
    session.end("complete")
    assert json.loads((tmp_path / "holder.json").read_text())["ended"] is True
