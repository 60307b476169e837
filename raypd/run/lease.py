"""Who works on a run: one session at a time, which replaces lease.json every few seconds by a
conditional write. Others watch by their own monotonic clock whether it changes, and take over when
it does not: no two clocks are compared.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from raypd import storage
from raypd.errors import RunError
from raypd.run import layout, records
from raypd.run.records import Lease, RecordError, Session
from raypd.run.text import Say, iso

BEAT_SECONDS = 10.0
STALE_SECONDS = 45.0  # without a beat: the holder is dead
_working: set[str] = set()  # sessions of this process that hold a run, or begin to


class RunLease:
    """Holds an output folder once it is made.

    Raises RunError when another session that is alive holds it, OSError.
    """

    def __init__(self, output: str, say: Say = lambda line: None) -> None:
        self.began = time.time()
        stamp = datetime.fromtimestamp(self.began, UTC).strftime("%Y%m%dT%H%M%S")
        self.id = f"{stamp}-{uuid.uuid4().hex[:6]}"
        self.lost: str | None = None  # why this session does not hold the run any more
        self._output = output
        self._say = say
        self._lease_path = storage.join(output, layout.LEASE)
        self._path = storage.join(output, layout.SESSIONS, f"{self.id}.json")
        self._clock = time.monotonic()
        self._beats = 0
        self._ended = threading.Event()
        _working.add(self.id)
        try:
            self._version = self._take()
        except BaseException:
            _working.discard(self.id)
            raise
        with contextlib.suppress(OSError):  # the next beat writes it again
            self._write(None)
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self, how: str) -> None:
        """Releases the run; `how` it ended: complete, interrupted, failed, ... Raises OSError."""
        self._ended.set()
        self._thread.join()
        _working.discard(self.id)  # also where the rest fails, as on a full disk
        if self.lost is None:
            self._beat(ended=True)
        self._write(how)

    def _take(self) -> str:
        """Becomes the holder; the version of the file that says so."""
        while True:
            lease = self._lease()
            if storage.put_new(self._lease_path, lease):
                if storage.put_new(self._lease_path, self._lease()):
                    advice = (
                        "(If-None-Match), so two runs at once would not know of each other: "
                        "choose another store"
                    )
                    raise RunError(
                        f"output.path {self._output}: the store there ignores conditional "
                        f"writes {advice}"
                    )
                return storage.version(self._lease_path)
            version, holder = self._current()
            if holder is None:
                continue  # it was just deleted
            if not holder.ended:
                self._check_dead(version, holder)
            if storage.put_if(self._lease_path, lease, version):
                return storage.version(self._lease_path)
            # Somebody was faster: look again.

    def _current(self) -> tuple[str, Lease | None]:
        """Version and content of lease.json; no content where it is gone."""
        try:
            version = storage.version(self._lease_path)
            return version, records.read(Lease, self._lease_path)
        except FileNotFoundError:
            return "", None
        except RecordError:
            return version, Lease(ended=True)  # edited by hand: nobody holds the run

    def _check_dead(self, version: str, holder: Lease) -> None:
        """Returns when the holder is dead. Raises RunError as soon as it is seen to be alive."""
        alive = _runs_here(holder)
        if alive is False:
            self._say(f"session {holder.session} was killed: taking its place")
            return
        if alive is None:
            self._say(
                f"session {holder.session} on {holder.host} holds this run: looking for its "
                "heartbeat"
            )
            ends = time.monotonic() + STALE_SECONDS
            while time.monotonic() < ends and storage.version(self._lease_path) == version:
                time.sleep(min(1.0, STALE_SECONDS / 10))
            now, latest = self._current()
            if now == version:
                self._say(f"session {holder.session} has no heartbeat any more: taking its place")
                return
            holder = latest or holder
            if holder.ended:
                return
        raise RunError(
            f"output.path {self._output}: session {holder.session} has been at work on it "
            f"since {holder.since}, as "
            f"process {holder.pid} on {holder.host}. Stop that one, or wait for it; once "
            "it is dead, the same command "
            "takes its place"
        )

    def _lease(self, ended: bool = False) -> bytes:
        self._beats += 1
        process = (socket.gethostname(), os.getpid(), _started(os.getpid()), _machine())
        return records.encoded(Lease(self.id, iso(self.began), self._beats, ended, *process))

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self.lost is None:
            # Storage that is away for a moment must not end a run.
            with contextlib.suppress(OSError):
                self._beat()
                self._write(None)

    def _beat(self, ended: bool = False) -> None:
        # The last one may have been written, though the store had not answered so.
        for _ in range(2):
            if storage.put_if(self._lease_path, self._lease(ended), self._version):
                self._version = storage.version(self._lease_path)
                return
            self._version, holder = self._current()
            if holder is None or holder.session != self.id:
                if holder:
                    by = f"session {holder.session} took it over"
                else:
                    by = "its lease.json was deleted"
                self.lost = f"this session was out of reach for too long, and {by}"
                return

    def _write(self, how: str | None) -> None:
        seconds = round(time.monotonic() - self._clock, 3)
        # Ends and heartbeats are counted from the beginning: a clock that is set in between does
        # not move them.
        now = self.began + seconds
        records.write(
            self._path, Session(self.began, self.id, now, *((now, seconds, how) if how else ()))
        )


@contextlib.contextmanager
def held(output: str, say: Say) -> Iterator[RunLease]:
    """Holds a folder for a block, which ends complete or as its error says.

    RunError: a living session holds it.
    """
    storage.make_folder(output)
    lease = RunLease(output, say)
    how = "failed"
    try:
        yield lease
        how = "complete"
    except BaseException as error:
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else getattr(error, "how", how)
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide why the block ended
            lease.end(how)


def killed(output: str) -> str | None:
    """The session that holds a run and whose process, of this machine, is gone; None: none that is
    seen from here.
    """
    try:
        holder = records.read(Lease, storage.join(output, layout.LEASE))
    except (OSError, RecordError):
        return None
    return holder.session if not holder.ended and _runs_here(holder) is False else None


def _machine() -> str | None:
    """The boot of this machine and the space in which its process ids are counted; None where that
    is not known.
    """
    with contextlib.suppress(OSError):
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    return None


def _started(pid: int) -> str | None:
    """Ticks since boot at the process's start; None where there is no such process."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def _runs_here(holder: Lease) -> bool | None:
    """Whether the holder's process lives; None where that cannot be seen from this machine."""
    if holder.machine is None or holder.machine != _machine():
        return None
    if holder.pid == os.getpid() and holder.session not in _working:
        return False
    return holder.started is not None and _started(holder.pid) == holder.started
