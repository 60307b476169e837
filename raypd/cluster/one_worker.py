"""A single process with the resources of a decode worker, to measure on.

A head node never has the speed of a worker, so measurements run where a worker would run.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

import ray

import raypd.cluster.ray_private as ray_private
import raypd.cluster.ray_session as ray_session
from raypd.cluster.ray_session import WorkerResources
from raypd.config import RunConfig
from raypd.errors import RunError, UserError
from raypd.tasks import check_template

_START_SECONDS = 1800.0  # for the worker to start, on a cluster that may have to add a node first


class OneWorker:
    """An object in a separate process, as a context manager.

    Attributes:
        share: What the worker takes of the cluster.
        startup_seconds: The time from when the nodes are paid for until the object is ready.
        unpaid_seconds: The time before the nodes are paid for.
        closing_seconds: The time that closing took.

    Args:
        config: The configuration of the run.
        verbose: Show what Ray prints.
        make: Returns the object's class, which has a method `ready()`, and its arguments.
    """

    share: WorkerResources

    def __init__(
        self, config: RunConfig, verbose: bool, make: Callable[[WorkerResources], tuple[type, Any]]
    ) -> None:
        self.config = config
        self.verbose = verbose
        self._make = make
        self.startup_seconds = 0.0
        self.unpaid_seconds = 0.0
        self.closing_seconds = 0.0
        self._owns_ray = False
        self._actor: Any = None

    def __enter__(self) -> Self:
        check_template(self.config.task, self.config.input, self.config.model)
        began = time.time()
        self._owns_ray = ray_session.connect(self.config.cluster, self.verbose)
        try:
            self.share = ray_session.worker_resources(self.config)
            self._start()
            nodes = [node["began"] for node in ray_private.node_infos() if node["ended"] is None]
        except BaseException:
            self.__exit__()
            raise
        # If Ray is started on this machine, it creates its node first. A node that was added for
        # the worker is paid for from when it came up.
        self.unpaid_seconds = max(0.0, min(nodes, default=began) - began)
        self.startup_seconds = max(0.0, time.time() - max(began, *nodes))
        return self

    def __exit__(self, *_: object) -> None:
        began = time.monotonic()
        with contextlib.suppress(Exception):
            if self._actor is not None:
                ray.kill(self._actor)
            if self._owns_ray:
                ray_session.disconnect()
        self.closing_seconds = time.monotonic() - began

    def _start(self) -> None:
        kind, arguments = self._make(self.share)
        actor_class = ray.remote(
            max_concurrency=2,
            max_restarts=0,
            num_cpus=self.share.cpus,
            num_gpus=self.share.gpus,
        )(kind)
        self._actor = actor_class.remote(*arguments)
        try:
            ray.get(self._actor.ready.remote(), timeout=_START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise RunError(
                f"no worker of the cluster has started within {_START_SECONDS / 60:.0f} minutes"
            ) from None
        except ray.exceptions.RayError as error:
            reason = str(error)
            if ray_session.killed_for_memory(reason):
                reason = f"it was {ray_session.KILLED_FOR_MEMORY}"
            raise RunError(f"the worker for the measurement does not start: {reason}") from None

    def call(
        self, label: str, method: str, *arguments: Any, progress: Callable[[tuple[int, int]], None]
    ) -> Any:
        """Call a method of the object.

        If the process has died, start a new one first.

        Args:
            label: What is being done, for messages.
            method: The name of the method.
            arguments: Its arguments.
            progress: Gets what the object's `progress()` returns, every half second.

        Returns:
            What the method returns.

        Raises:
            UserError: If the method raises it.
            RunError: If the method fails otherwise, or if the process dies.
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
                # The object is busy.
                continue
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise RunError(f"{label}: it failed: {error.cause}") from None
            except ray.exceptions.RayError as error:
                self._actor = None
                if ray_session.killed_for_memory(str(error)):
                    raise RunError(
                        f"{label}: the worker was {ray_session.KILLED_FOR_MEMORY}"
                    ) from None
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise RunError(f"{label}: the worker died (out of memory?): {reason}") from None
