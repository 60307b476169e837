"""One execution of Ray Data that reads units of a plan into blocks, in order.

Importing Ray Data takes a second, so `document_stream` imports this module when it begins to read.
"""

import logging
import math
import secrets
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import ray
from ray import data

import raypd.cluster.ray_private as ray_private
from raypd import storage
from raypd.cluster.unit_block import read_block
from raypd.config import RunConfig
from raypd.run import Unit

_MAX_READ_RETRIES = 2  # of a read task whose process died
_END_SECONDS = 10.0  # to wait for the thread of an execution that has been ended


def _read_task(
    blocks: Sequence[Sequence[Unit]],
    first: int,
    end: ray_private.ClusterNumber,
    config_reference: Any,
) -> Iterator[pa.Table]:
    """Read the blocks of one task, in a reader's process.

    Args:
        blocks: The units of each block.
        first: The index of the first unit among those of the pass.
        end: The index of the first unit that the pass no longer reads.
        config_reference: Refers to the configuration of the run.
    """
    config: RunConfig = ray.get(config_reference)
    storage.configure(config.storage)
    for units in blocks:
        end_unit = end.get()
        wanted_units = len(units)
        if end_unit is not None:
            wanted_units = max(0, min(wanted_units, end_unit - first))
        yield read_block(units, config, wanted_units)
        first += len(units)


class PlannedUnits(data.Datasource):
    """Blocks of units as a Ray Data source, with a read task for each item of `tasks`."""

    def __init__(
        self,
        tasks: Sequence[Sequence[Sequence[Unit]]],
        end: ray_private.ClusterNumber,
        config_reference: Any,
    ) -> None:
        super().__init__()
        self._tasks = tasks
        self._end = end
        self._config_reference = config_reference

    def get_name(self) -> str:
        """Return the name of the operator in Ray's dashboard."""
        return "Documents"

    def estimate_inmemory_data_size(self) -> int:
        """Return 0, because the size is known only when a block has been read."""
        return 0

    def get_read_tasks(self, *arguments: Any, **options: Any) -> list[data.ReadTask]:
        """Return the read tasks in the order of the plan."""
        read_tasks = []
        first = 0
        for blocks in self._tasks:
            read = partial(_read_task, blocks, first, self._end, self._config_reference)
            metadata = data.block.BlockMetadata(None, None, None, None)
            read_tasks.append(data.ReadTask(read, metadata))
            first += sum(len(units) for units in blocks)
        return read_tasks


@dataclass(frozen=True)
class ReadBlock:
    """A block that was read."""

    reference: Any
    units: list[Unit]
    bytes: int
    seconds: float  # that reading took
    node: str  # where it was read; "" if unknown


class ReadPass:
    """One execution of Ray Data over some units, and the thread that collects its blocks.

    Attributes:
        waiting_units: Units in blocks that have not been taken.
        waiting_bytes: Bytes of these blocks.
        read_bytes: Bytes of all blocks that were read.
        reader_seconds: Seconds that readers took for them.
        units: Units that have not been given out yet, in order.
        late_units: How many of the next units that arrive were given out without their block.
        arrived_units: How many units were in the blocks that were taken.
        end_unit: The index of the first unit that this pass no longer reads.
        error: Why the execution failed, if it did.

    Args:
        name: The name of the dataset in Ray's dashboard.
        tasks: The units of each block of each read task. The blocks of a task are read one after
            the other, in one process.
        config: The configuration of the run.
        readers: The most read tasks that run at the same time.
        share: Returns what the readers may take of the cluster now. The same number of bytes,
            again, may wait to be taken.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Sequence[list[Unit]]],
        config: RunConfig,
        readers: int,
        share: Callable[[], ray_private.DatasetShare],
    ) -> None:
        self.waiting_units = 0
        self.waiting_bytes = 0
        self.reader_seconds = 0.0
        self.read_bytes = 0
        blocks = list(chain.from_iterable(tasks))
        self.units = deque(chain.from_iterable(blocks))
        self.end_unit = len(self.units)
        self.arrived_units = 0
        self.late_units = 0
        self.error: Exception | None = None
        self._share = share
        self._closed = False
        self._changed = threading.Condition()
        self._expected_blocks = deque(blocks)  # the units of each block that has not arrived
        self._waiting: deque[ReadBlock] = deque()
        self._end = ray_private.ClusterNumber(f"pass:{secrets.token_hex(8)}")
        # Ray 2.60 warns about `ray_remote_args`, but has no other parameter for the retries.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ray_remote_args")
            dataset = data.read_datasource(
                PlannedUnits(tasks, self._end, ray.put(config)),
                num_cpus=1,
                concurrency=min(readers, len(tasks)),
                override_num_blocks=len(tasks),
                ray_remote_args={"max_retries": _MAX_READ_RETRIES},
            )
        dataset.set_name(name)
        context = dataset.context
        # Every row is a separate block.
        context.target_max_block_size = 1
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # A budget or a slow engine may make all blocks wait.
        context.execution_no_progress_timeout_s = -1
        context.execution_options.preserve_order = True
        # Ray Data has its own logger, which should be as quiet as Ray's.
        logging.getLogger("ray.data").setLevel(logging.getLogger("ray").getEffectiveLevel())
        self._execution = ray_private.DatasetExecution(dataset, share)
        self._thread = threading.Thread(target=self._collect, name="documents", daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        try:
            for reference, metadata in self._execution.blocks():
                units = self._expected_blocks.popleft()
                block = ReadBlock(reference, units, metadata.size_bytes or 0, 0.0, "")
                statistics = metadata.exec_stats
                if statistics is not None:
                    seconds = statistics.wall_time_s or 0.0
                    block = replace(block, seconds=seconds, node=statistics.node_id or "")
                self._add(block)
                if self._closed:
                    return
        except Exception as error:
            self.error = error

    def _add(self, block: ReadBlock) -> None:
        """Add a block, and wait until there is room for another one."""
        limit = self._share().object_store_bytes
        with self._changed:
            self._waiting.append(block)
            self.waiting_units += len(block.units)
            self.waiting_bytes += block.bytes
            self.read_bytes += block.bytes
            self.reader_seconds += block.seconds
            self._changed.wait_for(lambda: self._closed or self.waiting_bytes < limit)

    def give_back(self, unread_units: int) -> list[Unit]:
        """Return the second half of the units that no reader has begun; the pass ends before them.

        Args:
            unread_units: How many units at the beginning of those that have not been given out
                readers have read or may have begun.
        """
        keep = unread_units + math.ceil((len(self.units) - unread_units) / 2)
        given_back: deque[Unit] = deque()
        while len(self.units) > keep:
            given_back.appendleft(self.units.pop())
        self.end_unit -= len(given_back)
        self._end.set(self.end_unit)
        return list(given_back)

    def take(self) -> ReadBlock | None:
        """Return the next block that was read, or None if there is none now."""
        with self._changed:
            if not self._waiting:
                return None
            block = self._waiting.popleft()
            self.waiting_units -= len(block.units)
            self.waiting_bytes -= block.bytes
            self._changed.notify_all()
            return block

    @property
    def is_read(self) -> bool:
        """Whether all blocks have arrived."""
        return not self._expected_blocks

    @property
    def ended(self) -> bool:
        """Whether no more blocks will arrive."""
        return not self._thread.is_alive()

    def statistics(self) -> str:
        """Return Ray Data's statistics of the operators."""
        return self._execution.statistics()

    def close(self) -> None:
        """End the execution."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._execution.end()
        self._end.forget()
        # If the thread called Ray after Ray has ended, it would start another Ray.
        self._thread.join(_END_SECONDS)
