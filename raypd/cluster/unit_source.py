"""The plan as a source of Ray Data."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from ray import data

from raypd.cluster import ray_private
from raypd.run.unit import Unit


def unit_blocks(units: Sequence[Unit]) -> Any:
    """A dataset of units, each in a block of its own, read as they are wanted by one task beside the driver."""

    class UnitSource(data.Datasource):
        supports_distributed_reads = False

        def estimate_inmemory_data_size(self) -> int:
            return 0

        def get_read_tasks(self, *arguments: Any, **keys: Any) -> list[data.ReadTask]:
            def read() -> Iterator[pa.Table]:
                for unit in units:
                    yield pa.table({"unit": [pickle.dumps(unit)]})

            return [data.ReadTask(read, data.block.BlockMetadata(None, None, None, None))]

    dataset = data.read_datasource(UnitSource(), num_cpus=0, override_num_blocks=1)
    context = dataset.context
    context.target_max_block_size = 1  # a row
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_consecutive_actor_init_deaths = -1  # the ledger counts them
    context.execution_no_progress_timeout_s = -1  # a budget or a cluster may keep all waiting
    context.custom_execution_callback_classes = [ray_private.DataExecution]
    return dataset
