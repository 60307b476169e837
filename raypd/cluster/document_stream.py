"""The stream of documents: Ray Data reads and parses the units of a plan ahead of the workers.

Its read tasks run on CPUs that the workers leave free. They turn units into blocks of documents,
which wait in the object store until a worker takes them. Blocks come in the order of the plan, and
the total size of the blocks that are being read, wait or are in flight is limited.

The stream cannot lose a document. A worker that gets a unit without a usable block reads the unit
itself, and reports what is wrong with it. If the readers are slower than the engines, the workers
help: they read later units of the plan, which the readers then skip.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import ray

from raypd.cluster.ray_private import DatasetShare
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.unit_block import (
    BLOCK_LOST,
    READERS_BEHIND,
    STREAM_FAILED,
    STREAM_STALLED,
    UnitBlock,
)
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset import stretch_of
from raypd.run import ReadingRecord, Unit
from raypd.text import counted, number

if TYPE_CHECKING:  # importing Ray Data takes a second, which a run without readers does not need
    from raypd.cluster.read_pass import ReadBlock, ReadPass

# Units of one execution of Ray Data. Its driver keeps some kB for every block until the execution
# ends, so a run is read in several executions. The first is small, because it has to start quickly.
_FIRST_PASS_UNITS = 64
_MAX_PASS_UNITS = 4096
# A pass may be longer, up to the end of a file that has to be read from its beginning.
_MAX_STRETCH_UNITS = 16 * _MAX_PASS_UNITS
# Units that are read quickly share a block, and thus the overhead of Ray Data for each block.
_BLOCK_SECONDS = 1.0
_MAX_BLOCK_UNITS = 16
_MAX_BLOCK_BYTES = 4 << 20  # of stored input
# More readers than this would wait for the engine of the worker, even if they parse PDF files.
_MAX_READERS_PER_WORKER = 16
# The readers are behind if a worker has had nothing to do for this long. For some time afterwards,
# workers themselves read units that no reader has begun.
_BEHIND_SECONDS = 1.0
_HELP_SECONDS = 60.0
# If the stream has delivered nothing for this long, idle workers themselves read units, even those
# that a reader has begun.
_STALL_SECONDS = 30.0
# After this long, the execution is ended, and another one begins after the unit it is waiting for.
_HANG_SECONDS = 300.0
# The stream gives up after this many consecutive executions that fail before they deliver a block.
_MAX_FAILED_PASSES = 5
_SHARE_SECONDS = 2.0  # between two looks at the nodes


@dataclass(frozen=True)
class StreamedUnit:
    """The next unit of the plan.

    Attributes:
        unit: The unit.
        block: Its documents; None if the worker reads them itself.
        why_not: Why there is no block; "" if there is one, or if no reader has tried.
    """

    unit: Unit
    block: UnitBlock | None = None
    why_not: str = ""


@dataclass
class StreamProgress:
    """How far the stream is."""

    read: int = 0  # units that were read ahead so far
    waiting: int = 0  # units that were read and that no worker has taken
    waiting_bytes: int = 0  # of their documents

    def __str__(self) -> str:
        megabytes = number(self.waiting_bytes / 1e6)
        return (
            f"{counted(self.read, 'unit')} read and parsed, {self.waiting} waiting ({megabytes} MB)"
        )


class DocumentStream:
    """The units of a plan in order, with the blocks of their documents.

    Args:
        name: The name of the run in Ray's dashboard.
        units: The units to read.
        config: The configuration of the run.
        resources: What a worker takes of the cluster.
        record: Gets what the stream has read, when it is closed.
    """

    def __init__(
        self,
        name: str,
        units: Iterable[Unit],
        config: RunConfig,
        resources: WorkerResources,
        record: ReadingRecord | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self._record = record or ReadingRecord()
        self._source = iter(units)
        self._resources = resources
        cluster = config.cluster
        self._max_readers = _MAX_READERS_PER_WORKER * cluster.max_workers
        if cluster.readers != "auto":
            self._max_readers = cluster.readers
        self._limit_bytes = float(cluster.read_ahead_mb << 20) * cluster.max_workers
        self._pass: ReadPass | None = None
        self._pass_units = _FIRST_PASS_UNITS
        self._block_units = 1
        self._failed_passes = 0
        # Units that come before those of `_source` in the plan, because a pass has not read them.
        self._unread: deque[Unit] = deque()
        self._ready: deque[StreamedUnit] = deque()  # units that can be taken
        self._taken_units = 0  # units in blocks that were taken from a pass
        self._share = DatasetShare(0.0, 0.0)
        self._nodes: set[str] = set()  # that are alive
        self._share_taken = -math.inf
        # Passes whose blocks have all arrived; their executions are about to end by themselves.
        self._ending: list[ReadPass] = []
        # When the last block arrived, or since when a worker has been waiting for one.
        self._moved = time.monotonic()
        self._help_until = -math.inf  # until when workers help the readers
        # Recognizing scanned pages would take the CPUs that feed a GPU.
        self._workers_may_help = config.input.ocr == "none"

    def prepare(self) -> None:
        """Begin to read if nothing is being read. The driver calls this often."""
        for ended in [each for each in self._ending if each.ended]:
            self._ending.remove(ended)
            self._close_pass(ended)
        if self._pass is None and not self._ready:
            self._begin_pass()

    def next(self, starved: float | None) -> StreamedUnit | None:
        """Return the next unit of the plan, or None if it is not read yet.

        Args:
            starved: How many seconds the worker that asks has had nothing to do; None if it has
                another unit.

        Raises:
            StopIteration: If there are no more units.
        """
        now = time.monotonic()
        if starved is None:
            self._moved = now
        elif starved > _BEHIND_SECONDS:
            self._help_until = now + _HELP_SECONDS
        while not self._ready:
            if self._pass is None and not self._begin_pass():
                return StreamedUnit(self._next_unread())
            if self._pass is not None and not self._advance(self._pass):
                if now < self._help_until and self._workers_may_help:
                    unit = self._unbegun_unit(self._pass)
                    if unit is not None:
                        return StreamedUnit(unit, None, READERS_BEHIND)
                if starved is not None and self._is_stalled(self._pass):
                    return self._late_unit(self._pass)
                return None
        return self.checked(self._ready.popleft())

    def checked(self, streamed: StreamedUnit) -> StreamedUnit:
        """Return a unit without its block if the block was lost with its node.

        A worker would wait for such a block until Ray has given up making it again.
        """
        self._current_share()
        block = streamed.block
        if block is None or not block.node or block.node in self._nodes:
            return streamed
        return StreamedUnit(streamed.unit, None, BLOCK_LOST)

    def progress(self) -> StreamProgress:
        """Return how far the stream is."""
        progress = StreamProgress(self._taken_units, len(self._ready))
        if self._pass is not None:
            progress.read += self._pass.waiting_units
            progress.waiting += self._pass.waiting_units
            progress.waiting_bytes += self._pass.waiting_bytes
        return progress

    def _is_stalled(self, current: ReadPass) -> bool:
        """Return whether a worker should read the next unit itself."""
        seconds = _STALL_SECONDS
        if current.units and stretch_of(current.units[0]) is not None:
            # Each worker would read the stretch from its beginning, which is no faster.
            seconds = _HANG_SECONDS
        if time.monotonic() - self._moved > seconds:
            return True
        # The node of the readers may be gone.
        return self._current_share().cpus < 1

    def _next_unread(self) -> Unit:
        if self._unread:
            return self._unread.popleft()
        return next(self._source)

    def _begin_pass(self) -> bool:
        """Begin to read the next units; return False if there are none or no CPU is free."""
        if self._failed_passes >= _MAX_FAILED_PASSES or self._current_share().cpus < 1:
            return False
        units: list[Unit] = []
        while self._unread and len(units) < self._pass_units:
            units.append(self._unread.popleft())
        units += islice(self._source, self._pass_units - len(units))
        if not units:
            return False
        self._add_rest_of_stretch(units)
        from raypd.cluster.read_pass import ReadPass

        self._pass = ReadPass(
            self.name,
            _in_tasks(self._in_blocks(units)),
            self.config,
            self._max_readers,
            self._current_share,
        )
        self._pass_units = min(4 * self._pass_units, _MAX_PASS_UNITS)
        self._moved = time.monotonic()
        return True

    def _add_rest_of_stretch(self, units: list[Unit]) -> None:
        """Add units until the last one ends its stretch, which would otherwise be read twice."""
        stretch = stretch_of(units[-1])
        while stretch is not None and len(units) < _MAX_STRETCH_UNITS:
            try:
                following = self._next_unread()
            except StopIteration:
                return
            if stretch_of(following) != stretch:
                self._unread.appendleft(following)
                return
            units.append(following)

    def _in_blocks(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Divide units into blocks, several to a block if units are read quickly."""
        blocks: list[list[Unit]] = []
        block_bytes = 0
        for unit in units:
            fits = block_bytes + unit.bytes <= _MAX_BLOCK_BYTES
            if blocks and fits and len(blocks[-1]) < self._block_units:
                blocks[-1].append(unit)
                block_bytes += unit.bytes
            else:
                blocks.append([unit])
                block_bytes = unit.bytes
        return blocks

    def _advance(self, current: ReadPass) -> bool:
        """Take a block that was read; return whether there was one, or whether the pass ended."""
        ended = current.ended
        # A block may have arrived just before the end.
        block = current.take()
        if block is not None:
            self._take(current, block)
        elif ended:
            self._end_pass(current)
        return block is not None or ended

    def _take(self, current: ReadPass, block: ReadBlock) -> None:
        """Make the units of a block available, except those that were given out without it."""
        self._moved = time.monotonic()
        self._failed_passes = 0
        wanted_units = min(len(block.units), current.end_unit - current.arrived_units)
        current.arrived_units += wanted_units
        self._taken_units += wanted_units
        if wanted_units == len(block.units):
            unit_seconds = max(block.seconds / wanted_units, 1e-3)
            self._block_units = max(1, min(_MAX_BLOCK_UNITS, int(_BLOCK_SECONDS / unit_seconds)))
        for index, unit in enumerate(block.units[:wanted_units]):
            if current.late_units:
                current.late_units -= 1
                continue
            current.units.popleft()
            unit_block = UnitBlock(block.reference, index, block.node)
            self._ready.append(StreamedUnit(unit, unit_block))
        if current.arrived_units < current.end_unit:
            return
        self._pass = None
        if current.is_read:
            self._ending.append(current)
        else:
            # The rest of the pass was given back.
            self._close_pass(current)

    def _end_pass(self, current: ReadPass) -> None:
        """End a pass; the units that it has not read come before all others."""
        self._close_pass(current)
        self._pass = None
        if current.error is not None:
            self._failed_passes += 1
            _log(f"reading ahead failed: {current.error}")
            # One of the units that were being read may have killed its reader.
            for _ in range(min(len(current.units), int(self._current_share().cpus) or 1)):
                self._ready.append(StreamedUnit(current.units.popleft(), None, STREAM_FAILED))
        self._unread.extendleft(reversed(current.units))

    def _unbegun_unit(self, current: ReadPass) -> Unit | None:
        """Return the first unit that neither a reader nor a worker has begun; None if none is left.

        These are the units after the current pass. At the end of the plan the pass gives units
        back. A unit of a stretch is left to the readers, because a worker would have to read the
        stretch from its beginning.
        """
        if not self._unread:
            unit = next(self._source, None)
            if unit is not None:
                self._unread.append(unit)
            elif current.units and stretch_of(current.units[-1]) is None:
                readers = min(self._max_readers, int(self._current_share().cpus))
                # Each reader works on a block, and may be about to begin the next one.
                self._unread.extend(current.give_back(2 * readers * self._block_units))
        if not self._unread or stretch_of(self._unread[0]) is not None:
            return None
        return self._unread.popleft()

    def _late_unit(self, current: ReadPass) -> StreamedUnit:
        """Return the next unit for a worker that no longer waits for its block."""
        unit = current.units.popleft()
        current.late_units += 1
        hangs = time.monotonic() - self._moved > _HANG_SECONDS
        if hangs:
            _log(f"readers delivered nothing for {_HANG_SECONDS:g} s; restarting them")
        if hangs or not current.units:
            self._end_pass(current)
        return StreamedUnit(unit, None, STREAM_STALLED)

    def _current_share(self) -> DatasetShare:
        """Return what the readers may take of the cluster now."""
        if time.monotonic() - self._share_taken > _SHARE_SECONDS:
            self._share_taken = time.monotonic()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            self._nodes = {node["NodeID"] for node in nodes}
            free = free_share(nodes, self._resources, self.config.cluster)
            self._share = DatasetShare(
                min(free.cpus, float(self._max_readers)),
                # Half of the bytes are for blocks that Ray Data still has.
                min(free.object_store_bytes, self._limit_bytes) / 2,
            )
        return self._share

    def close(self) -> None:
        """End all reading."""
        self._record.units += self.progress().read
        if self._pass is not None:
            self._ending.append(self._pass)
            self._pass = None
        while self._ending:
            self._close_pass(self._ending.pop(0))

    def _close_pass(self, ended: ReadPass) -> None:
        """End a pass and record what it has read."""
        self._record.bytes += ended.read_bytes
        self._record.reader_seconds += ended.reader_seconds
        self._record.operators = ended.statistics()
        ended.close()


def _in_tasks(blocks: Sequence[list[Unit]]) -> list[list[list[Unit]]]:
    """Divide blocks into tasks: one per block, but a single task for all blocks of a stretch."""
    tasks: list[list[list[Unit]]] = []
    last_stretch = None
    for block in blocks:
        stretch = stretch_of(block[0])
        if tasks and stretch is not None and stretch == last_stretch:
            tasks[-1].append(block)
        else:
            tasks.append([block])
        last_stretch = stretch_of(block[-1])
    return tasks


def free_share(
    nodes: Iterable[dict[str, Any]], resources: WorkerResources, cluster: ClusterConfig
) -> DatasetShare:
    """Return the CPUs that workers leave free on nodes, and the bytes of their object stores."""
    slots = 0
    cpus = 0.0
    store_bytes = 0.0
    for node in nodes:
        node_cpus = node["Resources"].get("CPU", 0.0)
        node_slots = node_cpus / resources.cpus
        if resources.gpus:
            node_slots = min(node_slots, node["Resources"].get("GPU", 0.0) / resources.gpus)
        slots += math.floor(node_slots + 1e-6)
        cpus += node_cpus
        store_bytes += node["Resources"].get("object_store_memory", 0.0)
    worker_cpus = min(slots, cluster.max_workers) * resources.cpus
    return DatasetShare(max(0.0, cpus - worker_cpus), store_bytes)


def _log(line: str) -> None:
    print(f"raypd: {line}", file=sys.stderr, flush=True)
