"""Worker processes that died: what is to blame, and when a run gives up.

If the node was preempted or lost, nothing is to blame. Any other death is recorded on storage for
the units that were in flight, and the next worker reads it there (`UnitLog`).
"""

import contextlib

import raypd.cluster.ray_session as ray_session
from raypd.cluster.nodes import is_alive
from raypd.cluster.worker import WorkerSpec
from raypd.cluster.worker_handle import WorkerHandle
from raypd.errors import RunError
from raypd.run import Unit, UnitLog, retry_policy
from raypd.text import Say

_DEAD_PROCESS = "died"  # instead of a process id, in the record of a death
# The run gives up if workers die this many times while they load their model.
_MAX_FAILED_STARTS = 4
# This many worker deaths without a commit in between cannot be explained by a single document.
_MAX_DEATHS_WITHOUT_COMMIT = 30


class WorkerDeaths:
    """Counts the deaths of a pool's workers and records them.

    Attributes:
        attempted: Ids of units that a worker may have begun, in this session or in an earlier one.
        while_loading: Deaths while the model was loading, since a worker last loaded it.
        since_commit: Deaths with units in flight, since a unit was last committed.

    Args:
        spec: What each worker needs to start.
        say: Shows a line to the user.
    """

    def __init__(self, spec: WorkerSpec, say: Say) -> None:
        self.attempted: set[str] = set()
        self.while_loading = 0
        self.since_commit = 0
        self._spec = spec
        self._say = say

    def take(self, worker: WorkerHandle, error: Exception, pool_size: int, workers: int) -> None:
        """Record the death of a worker, and show it to the user.

        Args:
            worker: The worker, with the units that it had in flight.
            error: Ray's error.
            pool_size: The number of workers that are wanted.
            workers: The number of workers that are running.

        Raises:
            RunError: If too many workers have died.
        """
        units = [assignment.unit for assignment in worker.assignments.values()]
        self.attempted.update(unit.id for unit in units)
        preempted = worker.draining or getattr(error, "preempted", False)
        node_lost = preempted or (worker.node and not is_alive(worker.node))
        if node_lost:
            name = f"Node {worker.node[:8]}" if worker.node else "A node"
            self._say(f"{name} was lost; its units will be processed elsewhere.")
        elif units:
            self._record(worker, units)
            self.since_commit += 1
            cause = "died"
            if ray_session.killed_for_memory(str(error)):
                cause = f"was {ray_session.KILLED_FOR_MEMORY}"
            self._say(f"A worker process {cause}; its units will be retried.")
        if not worker.ready and not node_lost:
            self.while_loading += 1
        self._check(pool_size, workers, error, self._cause(error, units))

    def _record(self, worker: WorkerHandle, units: list[Unit]) -> None:
        """Record on storage that a worker died with its units in flight."""
        spec = self._spec
        log = UnitLog(spec.output, spec.session, worker.node, _DEAD_PROCESS, is_alive)
        # If storage does not respond, this death is not counted for the units.
        with contextlib.suppress(OSError):
            for unit in units:
                log.died(unit.id)

    def _check(self, pool_size: int, workers: int, error: Exception, cause: str) -> None:
        """Raise RunError if too many workers have died; `cause` is the cause of the last death."""
        if self.while_loading >= _MAX_FAILED_STARTS * max(1, pool_size):
            guess = " (out of memory?)"
            if ray_session.killed_for_memory(str(error)):
                guess = ""
            raise RunError(f"worker processes die while they load the model{guess}: {cause}")
        if self.since_commit >= _MAX_DEATHS_WITHOUT_COMMIT + workers:
            raise RunError(f"worker processes keep dying and no unit is committed: {cause}")

    def _cause(self, error: Exception, units: list[Unit]) -> str:
        """Describe why a worker died: Ray's last line, and what the worker wrote before."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = lines[-1].strip()
        if ray_session.killed_for_memory(str(error)):
            # Ray's own explanation has many lines, and the last of them gives advice about Ray.
            cause = ray_session.KILLED_FOR_MEMORY
        for name in [unit.id for unit in units] or [retry_policy.START]:
            reason = retry_policy.failure_reason(self._spec.output, name)
            if reason:
                return f"{cause}\nthe last error of a worker ({name}): {reason.strip()}"
        return cause
