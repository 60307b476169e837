"""The plan as a source of Ray Data."""

import pickle
from collections.abc import Iterable, Set
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
from ray import data

import raypd.cluster.ray_private as ray_private
from raypd import storage
from raypd.config import StorageConfig
from raypd.run import Unit

_BLOCKS = 16_384  # about: Ray Data's driver holds some kB for every block
_LAST = 1024  # units, at most, that have a block each whatever their number


def unit_blocks(units: Iterable[Unit], done: Set[str], count: int, settings: StorageConfig) -> Any:
    """A dataset of `count` units that are not `done`, some in a row, a row a block, which one task
    beside the driver reads as they are wanted. Each has a block of its own at the end, so that
    workers end together, and if all can.
    """
    last = count - min(count // 8, _LAST)
    size = -(-last // max(1, _BLOCKS - count + last))
    source = ray.put((units, done))

    class UnitSource(data.Datasource):
        supports_distributed_reads = False

        def estimate_inmemory_data_size(self) -> int:
            return 0

        def get_read_tasks(self, *arguments: Any, **keys: Any) -> list[data.ReadTask]:
            def read() -> Any:
                storage.configure(settings)
                units, done = ray.get(source)
                rest = (unit for unit in units if unit.id not in done)
                taken = 0
                while block := list(islice(rest, min(count - taken, size if taken < last else 1))):
                    taken += len(block)
                    yield pa.table({"units": [pickle.dumps(block)]})

            return [data.ReadTask(read, data.block.BlockMetadata(None, None, None, None))]

    dataset = data.read_datasource(UnitSource(), num_cpus=0, override_num_blocks=1)
    context = dataset.context
    context.target_max_block_size = 1  # a row
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_consecutive_actor_init_deaths = -1  # the ledger counts them
    context.execution_no_progress_timeout_s = -1  # a budget or a cluster may keep all waiting
    context.custom_execution_callback_classes = [ray_private.DataExecution]
    return dataset
