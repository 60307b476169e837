"""Everything that needs Ray: the driver of a run, its workers, its ledger.

Other rooms import the names below from here, and the modules `driver`, `ledger_actor`, `machines`
and `ray_session`. They are imported when they are used, because importing Ray takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.cluster.actor_pool import map_in_pool
    from raypd.cluster.driver import run_extract
    from raypd.cluster.machines import Nodes
    from raypd.cluster.one_worker import OneWorker
    from raypd.cluster.ray_session import WorkerResources, worker_resources
    from raypd.cluster.worker import EngineActor

__all__ = [
    "EngineActor",
    "Nodes",
    "OneWorker",
    "WorkerResources",
    "map_in_pool",
    "run_extract",
    "worker_resources",
]
_MODULES = {
    "EngineActor": "worker",
    "Nodes": "machines",
    "OneWorker": "one_worker",
    "WorkerResources": "ray_session",
    "map_in_pool": "actor_pool",
    "run_extract": "driver",
    "worker_resources": "ray_session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'raypd.cluster' has no attribute {name!r}")
    module = importlib.import_module(f"raypd.cluster.{_MODULES[name]}")
    return getattr(module, name)
