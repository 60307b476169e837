"""How a dataset of Ray Data goes through actors that hold a model: the units of a run, the batches
of a pipeline.
"""

from collections.abc import Sequence
from typing import Any

from raypd.cluster.ray_session import WorkerResources


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
    """A dataset through a pool of actors of class `stage`, each of which loads a model. workers:
    the least and the most. calls: batches that an actor works on at the same time; tasks: that it
    is given.
    """
    from ray import data

    pool = data.ActorPoolStrategy(
        min_size=workers[0],
        max_size=workers[1],
        max_concurrent_calls_per_actor=calls,
        max_tasks_in_flight_per_actor=tasks,
        enable_true_multi_threading=True,
    )
    return dataset.map_batches(
        stage,
        batch_format="pyarrow",
        compute=pool,
        fn_constructor_args=arguments,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus or None,
        **options,
    )
