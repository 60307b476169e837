"""Map a Ray Data dataset through a pool of actors, each with a model."""

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
    """Map a dataset through a pool of actors.

    Args:
        dataset: The dataset.
        stage: The class of the actors.
        arguments: The arguments of the class.
        resources: What an actor takes of the cluster.
        workers: (minimum, maximum) number of actors.
        calls: Batches that an actor processes concurrently.
        tasks: The most batches that are assigned to an actor.
        options: Further options of `map_batches`.

    Returns:
        The mapped dataset, which is lazy.
    """
    from ray import data

    min_workers, max_workers = workers
    pool = data.ActorPoolStrategy(
        min_size=min_workers,
        max_size=max_workers,
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
