"""The lease: a live session keeps its run and a dead one loses it, whatever the clocks say."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from raypd.errors import RunError
from raypd.run import lease
from tests import runs
from tests.processes import wait_for

STALE = 45.0  # seconds of `Clock`


class Clock(runs.Clock):
    """A clock that runs only while a session waits for a dead holder.

    While the holder is alive, waiting sleeps for a moment of real time.
    """

    def __init__(self, folder: Path) -> None:
        self.lease_file = folder / "lease.json"
        self.dead_sessions: set[str] = set()
        self.now = 1000.0
        self.shift = 0.0
        self.slept = 0.0

    def time(self) -> float:
        return time.time() + self.shift

    def sleep(self, seconds: float) -> None:
        holder = json.loads(self.lease_file.read_text())["session"]
        if holder in self.dead_sessions:
            self.slept += seconds
            self.now += seconds
        else:
            time.sleep(0.01)

    def silence(self, session: lease.RunLease) -> None:
        """Stop the heartbeat of a session, as if its process were gone."""
        session._ended.set()
        session._thread.join()
        self.dead_sessions.add(session.id)


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock(tmp_path)
    monkeypatch.setattr(lease, "time", fake)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "STALE_SECONDS", STALE)
    return fake


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sessions unable to tell that they run on the same machine."""
    monkeypatch.setattr(lease, "_machine", lambda: None)


def test_the_error_names_a_session_that_is_alive_on_this_machine_without_waiting(
    tmp_path: Path, clock: Clock
) -> None:
    first = lease.RunLease(str(tmp_path))
    with pytest.raises(RunError) as caught:
        lease.RunLease(str(tmp_path))
    assert clock.slept == 0
    since = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(first.began))
    runs.says(caught.value, first.id, f"since {since}", f"process {os.getpid()}")
    first.end("complete")
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == [f"{first.id}.json"]


def test_the_lease_of_a_session_that_ended_or_was_killed_here_is_free_at_once(
    tmp_path: Path, clock: Clock
) -> None:
    lease.RunLease(str(tmp_path)).end("interrupted")
    second = lease.RunLease(str(tmp_path))
    second.end("complete")
    code = (
        f"import os; from raypd.run import lease; lease.RunLease({str(tmp_path)!r}); "
        "os.kill(os.getpid(), 9)"
    )
    assert lease.killed(str(tmp_path)) is None
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    lines: list[str] = []
    # The kill is visible at once, before a heartbeat is missed.
    killed_session = lease.killed(str(tmp_path))
    assert killed_session is not None
    assert killed_session != second.id
    third = lease.RunLease(str(tmp_path), lines.append)
    assert clock.slept == 0
    assert "was killed; taking over its lease" in lines[0]
    third.end("complete")


def test_a_process_with_the_number_of_a_killed_session_does_not_hold_its_lease(
    tmp_path: Path, clock: Clock
) -> None:
    first = lease.RunLease(str(tmp_path))
    clock.silence(first)
    holder = json.loads(clock.lease_file.read_text())
    # The session is gone, and another process has its number by now.
    holder.update(pid=os.getppid(), started="1")
    clock.lease_file.write_text(json.dumps(holder))
    assert lease.killed(str(tmp_path)) == first.id
    lines: list[str] = []
    lease.RunLease(str(tmp_path), lines.append).end("complete")
    assert "was killed; taking over its lease" in lines[0]
    assert clock.slept == 0


def test_a_lease_is_released_even_if_an_answer_was_lost_or_the_disk_is_full(
    tmp_path, monkeypatch
) -> None:
    first = lease.RunLease(str(tmp_path))
    first._ended.set()
    first._thread.join()
    # The heartbeat was written, but its answer was lost.
    assert lease.storage.put_if(first._lease_path, first._encoded_lease(), first._version)
    first.end("complete")
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError("No space left on device"))
        patched.setattr(lease.RunLease, "_write_session", full)
        with lease.held(str(tmp_path), print):
            patched.setattr(lease.storage, "put_if", full)
    # The same process can take the lease again.
    lease.RunLease(str(tmp_path)).end("complete")


@pytest.mark.parametrize("text", ["", "{", '{"session": 1}'])
def test_a_lease_file_that_was_edited_by_hand_holds_no_run(
    text, tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "lease.json").write_text(text)
    session = lease.RunLease(str(tmp_path))
    assert clock.slept == 0
    session.end("complete")


@pytest.mark.parametrize("shift", [-86400.0, 0.0, 86400.0])
def test_the_heartbeat_of_another_machine_is_watched_without_comparing_clocks(
    tmp_path, clock, elsewhere, shift
) -> None:
    first = lease.RunLease(str(tmp_path))
    clock.shift = shift
    with pytest.raises(RunError, match=first.id):
        lease.RunLease(str(tmp_path))
    clock.silence(first)
    lines: list[str] = []
    second = lease.RunLease(str(tmp_path), lines.append)
    assert clock.slept >= STALE
    assert "no longer has a heartbeat" in lines[-1]
    second.end("complete")


def test_a_clock_that_is_set_back_during_a_session_does_not_move_its_heartbeat(
    tmp_path: Path, clock: Clock
) -> None:
    session = lease.RunLease(str(tmp_path))
    clock.shift = -3600
    clock.now += 25
    session.end("complete")
    tree = json.loads((tmp_path / "sessions" / f"{session.id}.json").read_text())
    assert tree["heartbeat"] == tree["ended"] == session.began + 25
    assert tree["began"] == session.began
    assert tree["seconds"] == 25


def test_a_session_that_was_silent_for_too_long_notices_that_it_lost_the_lease(
    tmp_path, clock, elsewhere
) -> None:
    first = lease.RunLease(str(tmp_path))
    clock.silence(first)
    second = lease.RunLease(str(tmp_path))
    # The session wakes up.
    first._beat()
    assert second.id in str(first.lost)
    first.end("failed")
    beats = second._beats
    wait_for(lambda: second._beats > beats + 2)
    assert second.lost is None
    second.end("complete")


def test_one_of_many_sessions_that_start_together_gets_the_lease(
    tmp_path, clock, elsewhere
) -> None:
    clock.silence(lease.RunLease(str(tmp_path)))
    with ThreadPoolExecutor(6) as threads:
        started = [threads.submit(lease.RunLease, str(tmp_path)) for _ in range(6)]
    refusals = [str(future.exception()) for future in started if future.exception()]
    (winner,) = [future.result() for future in started if not future.exception()]
    assert len(refusals) == 5
    assert all(winner.id in line for line in refusals)
    winner.end("complete")


def test_a_short_outage_of_the_storage_does_not_end_the_session(
    tmp_path: Path, monkeypatch
) -> None:
    session = lease.RunLease(str(tmp_path))
    put_if = Mock(
        wraps=lease.storage.put_if, side_effect=[OSError("503 SlowDown")] * 3 + [DEFAULT] * 10_000
    )
    monkeypatch.setattr(lease.storage, "put_if", put_if)
    wait_for(lambda: put_if.call_count > 5)
    assert session.lost is None
    session.end("complete")
    assert json.loads((tmp_path / "lease.json").read_text())["ended"] is True
