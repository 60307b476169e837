"""How a dataset of Ray Data goes through actors that hold a model: the units of a run, the batches of a pipeline."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from raypd.cluster import ray_private
from raypd.cluster.ray_session import WorkerResources
from raypd.run.unit import Unit


def map_in_pool(
    dataset: Any,
    stage: type,
    arguments: Sequence[Any],
    resources: WorkerResources,
    workers: tuple[int, int],
    calls: int,
    tasks: int,
    **options: Any,
) -> Any:
    """A dataset through a pool of actors of class `stage`, each of which loads a model.

    workers: the least and the most. calls: batches that an actor works on at the same time; tasks: that it is given."""
    from ray import data

    return dataset.map_batches(
        stage,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(
            min_size=workers[0],
            max_size=workers[1],
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=tasks,
            enable_true_multi_threading=True,
        ),
        fn_constructor_args=arguments,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus or None,
        **options,
    )


def unit_blocks(units: Sequence[Unit]) -> Any:
    """A dataset of units, each in a block of its own, read as they are wanted by one task beside the driver."""
    from ray import data

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
