"""`cluster.executor: ray_data`: Ray Data streams blocks of units through a pool of actors that
commit them. Ray Data assigns them, and starts dead workers and tasks again without end: so workers
count on storage (`UnitLog`), and ask the ledger, which has the driver's answer (budget, deadline,
notices, end), before a unit begins.
"""

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from functools import partial
from itertools import islice

import pyarrow as pa
import ray

import raypd.cluster.ray_private as ray_private
from raypd.cluster.actor_pool import map_in_pool
from raypd.cluster.faulty_gpus import workers_left
from raypd.cluster.in_flight import Deaths, Ended, Tick
from raypd.cluster.ledger_actor import Ask, PoolState
from raypd.cluster.nodes import NodeWatch, draining_message
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.unit_source import unit_blocks
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run import Unit, UnitResult
from raypd.text import Say

_WAIT_SECONDS = 0.1
_GONE_SECONDS = 30.0
_EMPTY_PASSES = 3  # in a row, in which no unit ended


class UnitStage:
    def __init__(self, spec: WorkerSpec) -> None:
        self.worker = DecodeWorker(spec)
        self._ledger = spec.ledger
        if (left_out := self.worker.hello()[1]) is not None:
            ray.get(self._ledger.leave_out.remote(self.worker.meter.id, left_out))
            # It holds the card, so that no other worker gets it, as long as the pass takes.
            threading.Event().wait()

    def __call__(self, batch: pa.Table) -> pa.Table:
        for unit in pickle.loads(batch["units"][0].as_py()):
            result = self.worker.run(unit, partial(self._admit, unit))
            with contextlib.suppress(ray.exceptions.RayError):  # the session has ended
                ray.get(self._ledger.ended.remote(unit, result))
        return pa.table({"ended": [True]})

    def _admit(self, unit: Unit, died: bool) -> bool:
        """Whether a unit may begin, as the driver says. died: so did the process that had it
        before.
        """
        ask = Ask(unit, self.worker.meter.id, self.worker.node, len(self.worker.progress()))
        try:
            if died:
                ray.get(self._ledger.died.remote())
            while (answer := ray.get(self._ledger.begin.remote(ask))) is None:
                time.sleep(_WAIT_SECONDS)
        except ray.exceptions.RayError:  # the session has ended
            return False
        return bool(answer)


class RayDataExecutor:
    """As `PoolExecutor`; who works on what is left to Ray Data."""

    def __init__(
        self, spec: WorkerSpec, resources: WorkerResources, cluster: ClusterConfig, say: Say
    ) -> None:
        self.spec = spec
        self.resources = resources
        self.cluster = cluster
        self.say = say
        self.wanted = cluster.max_workers
        self.closing = False
        self.admit: Callable[[Unit, int], bool] = lambda unit, beside: True
        self.nodes, self._deaths, self._deaths_noted = NodeWatch(), Deaths(), 0
        self._left_out: set[str] = set()  # why cards are
        self._leaving: set[str] = set()  # nodes that the user was told of
        self._done: set[str] = set()  # units that have ended
        self._left = 0  # of the run, that have not
        self._begun: dict[str, str] = {}  # unit -> the worker that may work on it
        self._former: set[str] = set()  # workers of passes before
        self._thread: threading.Thread | None = None
        # It would say of each worker that it died.
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)

    def run(self, units: Iterable[Unit], done: Set[str], count: int) -> Generator[Ended | Tick]:
        """As `PoolExecutor.run`, in a pass over the units, and one over those that a pass has
        left.
        """
        self._left, empty_passes, rest = count, 0, iter(list[Unit]())
        self._done |= done
        while self._left > 0 and not self.closing:
            left = self._left
            source = (units, frozenset(self._done), self._left)
            if self.wanted < self.cluster.max_workers:
                # A deadline changes how many workers are wanted, and a pool keeps its size: so
                # passes are short.
                size = 8 * self.wanted
                undone = (unit for unit in units if unit.id not in self._done)
                batch = list(islice(rest, size)) or list(islice(rest := undone, size))
                source = batch, frozenset[str](), len(batch)
            try:
                yield from self._pass(*source)
            finally:
                self.close()
            empty_passes = empty_passes + 1 if self._left == left else 0
            if empty_passes == _EMPTY_PASSES:
                raise RunError(
                    f"{_EMPTY_PASSES} passes of Ray Data in a row have ended without anything done"
                )

    def close(self) -> None:
        ends = time.monotonic() + _GONE_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < ends:
            ray_private.DataExecution.end()
            # What it asks of a Ray that has ended would start another.
            self._thread.join(_WAIT_SECONDS)
        self._thread = None

    def _pass(self, units: Iterable[Unit], done: Set[str], count: int) -> Iterator[Ended | Tick]:
        """Streams units until they have ended or no worker is left that could do the rest."""
        self._former |= ray.get(self.spec.ledger.look.remote({})).working
        failures: list[Exception] = []
        self._thread = threading.Thread(
            target=self._stream, args=(units, done, count, failures), daemon=True
        )
        self._thread.start()
        self._begun, answers, moved, started = {}, dict[Ask, bool](), time.monotonic(), False
        while True:
            self._thread.join(_WAIT_SECONDS)
            # Before a look, which then has all that has ended.
            is_over = not self._thread.is_alive()
            state = ray.get(self.spec.ledger.look.remote(answers))
            for unit, result in state.ended:
                yield from self._ended(unit, result)
            if failures:
                reason = str(failures[0]).partition("\n")[0]
                raise RunError(f"Ray Data: {type(failures[0]).__name__}: {reason}") from failures[0]
            if is_over:
                return
            answers = self._answers(state)
            yield Tick(state.answered, state.failed, len(state.ready))
            workers = state.working - self._former
            started = started or bool(workers)
            working = any(worker in workers for worker in self._begun.values())
            if self.closing and not working:
                return
            if state.asks or state.ended or working or workers - state.ready:
                moved = time.monotonic()
            if started and time.monotonic() - moved > _GONE_SECONDS:
                return  # what is left lies with workers whose node is gone

    def _stream(
        self, units: Iterable[Unit], done: Set[str], count: int, failures: list[Exception]
    ) -> None:
        at_once = self.cluster.units_in_flight
        size = max(1, min(self.wanted, -(-count // at_once)))
        if self._left_out:  # each takes a worker, which holds it
            cards = workers_left(len(self._left_out), self.resources.gpus, self.cluster.max_workers)
            size = min(size, cards) + len(self._left_out)
        try:
            # Of one size: one that may shrink does before the cluster has grown. A task that waits
            # dies with a worker.
            pool = UnitStage, (self.spec,), self.resources, (size, size), at_once, at_once
            blocks = unit_blocks(units, done, count, self.spec.config.storage)
            dataset = map_in_pool(blocks, *pool, batch_size=1)
            for _ in dataset.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                pass
        except Exception as error:
            # Of what a task raised, Ray's has the traceback.
            failures.append(getattr(error, "cause", None) or error)

    def _answers(self, state: PoolState) -> dict[Ask, bool]:
        """Which of the units that workers ask for they may begin; those that have to wait are left
        out.
        """
        # None of a ledger that died itself: it begins anew.
        for _ in range(state.deaths - self._deaths_noted):
            self._deaths.with_units += 1
            self.say("A worker process died; its units will be retried.")
        self._deaths_noted = state.deaths
        for why in state.left_out - self._left_out:
            self._left_out.add(why)
            self.say(why)
            if workers_left(len(self._left_out), self.resources.gpus, self.cluster.max_workers) < 1:
                raise RunError(f"no GPU is left: {why}")
        self._deaths.loading = max(0, state.starts - self.wanted)  # these may be loading yet
        self._deaths.check(self.wanted, len(state.working))
        self.nodes.look()
        answers = {}
        for ask in state.asks:
            if ask.unit.id in self._done or self.closing or self._is_leaving(ask.node):
                answers[ask] = False
            elif self.admit(ask.unit, ask.beside):
                answers[ask] = True
                self._begun[ask.unit.id] = ask.worker
        return answers

    def _is_leaving(self, node: str) -> bool:
        """Whether a node was given notice; what it has in flight is done again if it goes
        before.
        """
        seconds = self.nodes.seconds_left(node)
        if seconds is not None and node not in self._leaving:
            self._leaving.add(node)
            self.say(draining_message(node, seconds))
        return seconds is not None

    def _ended(self, unit: Unit, result: UnitResult) -> Iterator[Ended]:
        self._begun.pop(unit.id, None)
        if result.fatal:
            raise RunError(result.error or "")
        if result.handed_back or unit.id in self._done:
            return
        if result.error is None:
            self._deaths.with_units = 0
        self._done.add(unit.id)
        self._left -= 1
        yield Ended(unit, result)
