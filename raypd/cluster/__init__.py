"""Everything that needs Ray: the driver of a run, its workers and its ledger.

Other rooms import the names below from here, and the modules `driver`, `ledger_actor`, `machines`
and `ray_session`. They are imported when they are used, because importing Ray takes a second.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.cluster import (
        driver as driver,
        ledger_actor as ledger_actor,
        machines as machines,
        ray_session as ray_session,
    )
    from raypd.cluster.actor_pool import map_in_pool as map_in_pool
    from raypd.cluster.document_source import DocumentSource as DocumentSource
    from raypd.cluster.driver import run_extract as run_extract
    from raypd.cluster.machines import Nodes as Nodes
    from raypd.cluster.one_worker import OneWorker as OneWorker
    from raypd.cluster.ray_session import (
        WorkerResources as WorkerResources,
        worker_resources as worker_resources,
    )
    from raypd.cluster.worker import EngineActor as EngineActor

__getattr__ = LazyExports(
    __name__,
    {
        "actor_pool": ("map_in_pool",),
        "document_source": ("DocumentSource",),
        "driver": ("run_extract",),
        "machines": ("Nodes",),
        "one_worker": ("OneWorker",),
        "ray_session": ("WorkerResources", "worker_resources"),
        "worker": ("EngineActor",),
    },
    modules=("driver", "ledger_actor", "machines", "ray_session"),
)
