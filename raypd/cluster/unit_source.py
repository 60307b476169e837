"""The plan as a source of Ray Data."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray
from ray import data

from raypd.cluster import ray_private
from raypd.run.unit import Unit

_LAST = 1024  # units, at most, that have a block each whatever their number


def unit_blocks(units: Sequence[Unit], blocks: int) -> Any:
    """A dataset of units, some in a row, a row a block, read as they are wanted by one task beside the driver. Each has
    a block of its own where there are as many `blocks`, and at the end, so that workers end together."""
    last = len(units) - min(len(units) // 8, _LAST)
    size = -(-last // max(1, blocks - len(units) + last))
    starts = [*range(0, last, size), *range(last, len(units)), len(units)]
    plan = ray.put([pickle.dumps(units[start:end]) for start, end in itertools.pairwise(starts)])

    class UnitSource(data.Datasource):
        supports_distributed_reads = False

        def estimate_inmemory_data_size(self) -> int:
            return 0

        def get_read_tasks(self, *arguments: Any, **keys: Any) -> list[data.ReadTask]:
            def read() -> Any:
                return (pa.table({"units": [block]}) for block in ray.get(plan))

            return [data.ReadTask(read, data.block.BlockMetadata(None, None, None, None))]

    dataset = data.read_datasource(UnitSource(), num_cpus=0, override_num_blocks=1)
    context = dataset.context
    context.target_max_block_size = 1  # a row
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_consecutive_actor_init_deaths = -1  # the ledger counts them
    context.execution_no_progress_timeout_s = -1  # a budget or a cluster may keep all waiting
    context.custom_execution_callback_classes = [ray_private.DataExecution]
    return dataset
