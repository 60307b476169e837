"""The lease on a run: only one session at a time may work on it.

The holder rewrites lease.json every few seconds with a conditional write. Another session watches
the file with its own monotonic clock and takes over if it stops changing, so that the clocks of two
machines are never compared.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import raypd.run.layout as layout
import raypd.run.records as records
from raypd import storage
from raypd.errors import RunError
from raypd.run.records import RecordError
from raypd.text import Say, iso

BEAT_SECONDS = 10.0
STALE_SECONDS = 45.0  # a holder without a heartbeat for this long is dead
_active_sessions: set[str] = set()  # sessions of this process that hold or are taking a lease


@dataclass
class Lease:
    """lease.json: the session that holds a run or held it last, and its process."""

    session: str = ""
    since: str = ""  # ISO 8601
    beat: int = 0  # grows while the session is alive
    ended: bool = False
    host: str = ""
    pid: int = 0
    started: str | None = None  # when the process started, in clock ticks since boot
    machine: str | None = None  # boot id and PID namespace of the machine


@dataclass
class Session:
    """sessions/<id>.json: when a session began, was last alive and ended, and how it ended."""

    began: float
    id: str = ""
    heartbeat: float | None = None
    ended: float | None = None
    seconds: float | None = None  # by the monotonic clock
    how: str | None = None  # complete, interrupted, failed, ...


class RunLease:
    """The lease on an output folder, held from construction until `end`.

    Args:
        output: The folder.
        say: Is called with lines for the user.
        records_session: Whether the holder is a session of the run, which is recorded below
            sessions/. Maintenance, such as a compaction, is not a session.

    Raises:
        RunError: If another session that is alive holds the folder.
        OSError: If the folder cannot be written.
    """

    def __init__(
        self, output: str, say: Say = lambda line: None, records_session: bool = True
    ) -> None:
        self._records_session = records_session
        self.began = time.time()
        stamp = datetime.fromtimestamp(self.began, UTC).strftime("%Y%m%dT%H%M%S")
        self.id = f"{stamp}-{uuid.uuid4().hex[:6]}"
        self.lost: str | None = None  # why this session no longer holds the run
        self.output = output
        self._say = say
        self._lease_path = storage.join(output, layout.LEASE)
        self._session_path = storage.join(output, layout.SESSIONS, f"{self.id}.json")
        self._clock = time.monotonic()
        self._beats = 0
        self._ended = threading.Event()
        _active_sessions.add(self.id)
        try:
            self._version = self._take()
        except BaseException:
            _active_sessions.discard(self.id)
            raise
        # If this write fails, the next heartbeat repeats it.
        with contextlib.suppress(OSError):
            self._write_session(None)
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self, how: str) -> None:
        """Release the run.

        Args:
            how: How the session ended: complete, interrupted, failed, ...

        Raises:
            OSError: If the files cannot be written.
        """
        self._ended.set()
        self._thread.join()
        # Before the writes, which may fail on a full disk.
        _active_sessions.discard(self.id)
        if self.lost is None:
            self._beat(ended=True)
        self._write_session(how)

    def _take(self) -> str:
        """Become the holder, and return the version of lease.json."""
        while True:
            lease = self._encoded_lease()
            if storage.put_new(self._lease_path, lease):
                self._check_conditional_writes()
                return storage.version(self._lease_path)
            version, holder = self._current()
            if holder is None:
                continue  # the file was just deleted
            if not holder.ended:
                self._check_dead(version, holder)
            if storage.put_if(self._lease_path, lease, version):
                return storage.version(self._lease_path)
            # Another session took the lease first, so look again.

    def _check_conditional_writes(self) -> None:
        if storage.put_new(self._lease_path, self._encoded_lease()):
            raise RunError(
                f"output.path {self.output}: this store ignores conditional writes "
                "(If-None-Match), so two runs could not detect each other. Choose another store"
            )

    def _current(self) -> tuple[str, Lease | None]:
        """Return the version and the content of lease.json, or None if it does not exist."""
        try:
            version = storage.version(self._lease_path)
            return version, records.read(Lease, self._lease_path)
        except FileNotFoundError:
            return "", None
        except RecordError:
            # The file was edited by hand, so nobody holds the run.
            return version, Lease(ended=True)

    def _check_dead(self, version: str, holder: Lease) -> None:
        """Wait until it is known whether the holder is dead.

        Raises:
            RunError: If the holder is alive.
        """
        alive = _runs_here(holder)
        if alive is False:
            self._say(f"session {holder.session} was killed; taking over its lease")
            return
        if alive is None:
            self._say(
                f"session {holder.session} on {holder.host} holds this run; waiting up to "
                f"{STALE_SECONDS:.0f} s for its heartbeat"
            )
            ends = time.monotonic() + STALE_SECONDS
            while time.monotonic() < ends and storage.version(self._lease_path) == version:
                time.sleep(min(1.0, STALE_SECONDS / 10))
            latest_version, latest = self._current()
            if latest_version == version:
                self._say(
                    f"session {holder.session} no longer has a heartbeat; taking over its lease"
                )
                return
            holder = latest or holder
            if holder.ended:
                return
        raise RunError(
            f"output.path {self.output}: session {holder.session} has been working on it since "
            f"{holder.since}, as process {holder.pid} on {holder.host}. Stop that session or wait "
            "for it. If it dies, the same command takes over"
        )

    def _encoded_lease(self, ended: bool = False) -> bytes:
        self._beats += 1
        lease = Lease(
            session=self.id,
            since=iso(self.began),
            beat=self._beats,
            ended=ended,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            machine=_machine(),
        )
        return records.encoded(lease)

    def _keep_alive(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self.lost is None:
            # A short outage of the storage must not end the run.
            with contextlib.suppress(OSError):
                self._beat()
                self._write_session(None)

    def _beat(self, ended: bool = False) -> None:
        # A write may have succeeded although its answer was lost. The second try finds it.
        for _ in range(2):
            if storage.put_if(self._lease_path, self._encoded_lease(ended), self._version):
                self._version = storage.version(self._lease_path)
                return
            self._version, holder = self._current()
            if holder is None or holder.session != self.id:
                reason = "its lease.json was deleted"
                if holder is not None:
                    reason = f"session {holder.session} took over its lease"
                self.lost = f"this session could not reach the storage for too long, and {reason}"
                return

    def _write_session(self, how: str | None) -> None:
        if not self._records_session:
            return
        seconds = round(time.monotonic() - self._clock, 3)
        # Times are counted from the beginning, so that they do not move if the clock is set.
        session = Session(began=self.began, id=self.id, heartbeat=self.began + seconds)
        if how is not None:
            session.ended = session.heartbeat
            session.seconds = seconds
            session.how = how
        records.write(self._session_path, session)


@contextlib.contextmanager
def held(output: str, say: Say, records_session: bool = True) -> Iterator[RunLease]:
    """Hold the lease on a folder during a block, and record how the block ended.

    Args:
        output: The folder.
        say: Is called with lines for the user.
        records_session: As in `RunLease`.

    Raises:
        RunError: If another session that is alive holds the folder.
    """
    storage.make_folder(output)
    lease = RunLease(output, say, records_session)
    how = "failed"
    try:
        yield lease
        how = "complete"
    except KeyboardInterrupt:
        how = "interrupted"
        raise
    except BaseException as error:
        how = getattr(error, "how", how)
        raise
    finally:
        # A full disk must not hide the error that ended the block.
        with contextlib.suppress(OSError):
            lease.end(how)


def killed(output: str) -> str | None:
    """Return the session that holds a run if its process on this machine is gone.

    Returns:
        None if the holder is alive or ran on another machine, or if there is none.
    """
    try:
        holder = records.read(Lease, storage.join(output, layout.LEASE))
    except (OSError, RecordError):
        return None
    if not holder.ended and _runs_here(holder) is False:
        return holder.session
    return None


def _machine() -> str | None:
    """Return the boot id and PID namespace of this machine, or None if they are unknown."""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    return None


def _started(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot, or None if there is none."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_zombie = fields[0] == "Z"
        return None if is_zombie else fields[19]
    return None


def _runs_here(holder: Lease) -> bool | None:
    """Return whether the holder's process is alive, or None if it cannot be seen from here."""
    if holder.machine is None or holder.machine != _machine():
        return None
    if holder.pid == os.getpid() and holder.session not in _active_sessions:
        return False
    return holder.started is not None and _started(holder.pid) == holder.started
