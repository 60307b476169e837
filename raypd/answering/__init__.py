"""Turns documents into records with an engine, for the workers, data.py, api.LLM and estimates.

It does not need Ray.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.answering import (
        components as components,
        progress as progress,
        request_queue as request_queue,
    )
    from raypd.answering.check import check_model as check_model
    from raypd.answering.components import (
        Build as Build,
        WorkerComponents as WorkerComponents,
        build as build,
    )
    from raypd.answering.progress import ProgressLines as ProgressLines, TimeLeft as TimeLeft
    from raypd.answering.request_queue import (
        Cancelled as Cancelled,
        EngineBroken as EngineBroken,
        RequestQueue as RequestQueue,
        UnitProgress as UnitProgress,
        UnitState as UnitState,
        end_process as end_process,
    )

__getattr__ = LazyExports(
    __name__,
    {
        "check": ("check_model",),
        "components": ("Build", "WorkerComponents", "build"),
        "progress": ("ProgressLines", "TimeLeft"),
        "request_queue": (
            "Cancelled",
            "EngineBroken",
            "RequestQueue",
            "UnitProgress",
            "UnitState",
            "end_process",
        ),
    },
    modules=("components", "progress", "request_queue"),
)
