"""A process in the place of a decode worker, with its cores and GPU: a head node never has the
speed of a worker.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

import ray

from raypd.cluster import ray_private, ray_session
from raypd.cluster.ray_session import WorkerResources
from raypd.config import RunConfig
from raypd.errors import RunError, UserError
from raypd.tasks.prompting import check_template

_WAIT_SECONDS = 1800.0  # for a worker on a cluster that may have to start a node first


class OneWorker:
    """An object in a process of its own, for a `with`. make: its class, which has `ready()`, and
    its arguments.
    """

    def __init__(
        self, config: RunConfig, verbose: bool, make: Callable[[WorkerResources], tuple[type, Any]]
    ) -> None:
        self.config = config
        self.verbose = verbose
        self._make = make
        # As a bill counts: from when the nodes are paid until the object is ready; before and after
        # that.
        self.startup_seconds = self.unpaid_seconds = self.closing_seconds = 0.0
        self._actor: Any = None

    def __enter__(self) -> Self:
        check_template(self.config)
        began = time.time()
        self._own = ray_session.connect(self.config.cluster, self.verbose)
        try:
            self.share = ray_session.worker_resources(self.config)  # what it takes of the cluster
            self._start()
            nodes = [node["began"] for node in ray_private.node_infos() if node["ended"] is None]
        except BaseException:
            self.__exit__()
            raise
        # Ray on a machine of its own makes its node first; one that came up for the worker is paid
        # from then on.
        self.unpaid_seconds = max(0.0, min(nodes, default=began) - began)
        self.startup_seconds = max(0.0, time.time() - max(began, *nodes))
        return self

    def __exit__(self, *_: object) -> None:
        began = time.monotonic()
        with contextlib.suppress(Exception):
            if self._actor is not None:
                ray.kill(self._actor)
            if self._own:
                ray.shutdown()
        self.closing_seconds = time.monotonic() - began

    def _start(self) -> None:
        kind, arguments = self._make(self.share)
        sizes = {"num_cpus": self.share.cpus, "num_gpus": self.share.gpus}
        self._actor = ray.remote(max_concurrency=2, max_restarts=0, **sizes)(kind).remote(
            *arguments
        )
        try:
            ray.get(self._actor.ready.remote(), timeout=_WAIT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise RunError(
                f"no worker of the cluster has started within {_WAIT_SECONDS / 60:.0f} minutes"
            ) from None
        except ray.exceptions.RayError as error:
            raise RunError(f"the worker to measure on does not start: {error}") from None

    def call(
        self, label: str, method: str, *arguments: Any, progress: Callable[[tuple[int, int]], None]
    ) -> Any:
        """What a method returns. label: for messages. progress: gets the object's `progress()`
        every half second. Raises the method's UserError; RunError: it fails otherwise, or the
        process dies (the next call starts one).
        """
        if self._actor is None:
            self._start()
        answer = getattr(self._actor, method).remote(*arguments)
        while True:
            try:
                if ray.wait([answer], timeout=0.5)[0]:
                    return ray.get(answer)
                progress(ray.get(self._actor.progress.remote(), timeout=30))
            except ray.exceptions.GetTimeoutError:
                continue  # it is busy
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise RunError(f"{label}: it failed: {error.cause}") from None
            except ray.exceptions.RayError as error:
                self._actor = None
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise RunError(f"{label}: the worker died (out of memory?): {reason}") from None
