"""What raypd takes of Ray beside its public API, in one place: a new version of Ray is tried here
first.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any


def local_address() -> str | None:
    """The address of the cluster that `ray start` has written down on this machine."""
    from ray._private.utils import read_ray_address

    return read_ray_address()


@contextlib.contextmanager
def closed_to_others(dashboard: bool) -> Iterator[None]:
    """A Ray that is started within listens on 127.0.0.1 alone, and to a token that no file holds.

    Without a dashboard of its own, Ray asks whichever other Ray has one at the usual port: Ray
    Train then finds its controller unknown there, so dead, and ends the training.

    Ray takes a loopback _node_ip_address for a mistake and replaces it; it binds to loopback by
    itself where clusters are turned off, as on macOS. A token of its own it writes to
    ~/.ray/auth_token, and later `ray start` ask for it.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray's processes inherit it
        loader.reset_cache()
    variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    if not dashboard:
        # Nothing answers.
        variables[ray_constants.RAY_API_SERVER_ADDRESS_ENVIRONMENT_VARIABLE] = "http://127.0.0.1:1"
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def use_token_of_this_machine() -> None:
    """As Ray does with a cluster that it finds itself: a token in ~/.ray or the environment is
    shown to it.
    """
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def draining_nodes() -> dict[str, int]:
    """Nodes that were given notice: id -> when they go away in unix milliseconds, 0 where that is
    not known.
    """
    from ray._private.state import state

    return state.get_draining_nodes()


def node_infos() -> list[dict[str, Any]]:
    """Every node, the dead ones too: node, labels, type, head, resources, and in unix seconds began
    and ended.
    """
    from ray._private.worker import global_worker

    return [
        {
            "node": info.node_id.hex(),
            "labels": dict(info.labels),
            "type": info.instance_type_name or None,
            "head": info.is_head_node,
            "resources": dict(info.resources_total),
            "began": info.start_time_ms / 1000,
            "ended": info.end_time_ms / 1000 if info.end_time_ms else None,
        }
        for info in global_worker.gcs_client.get_all_node_info().values()
    ]


def redirect_messages(to: Callable[[dict[str, Any]], None]) -> None:
    """Messages of Ray's node manager and autoscaler, printed past every log level, go to a function
    instead.
    """
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix=False: to(data)


def autoscales() -> bool:
    """Whether an autoscaler runs, of either version: then a worker that fits no node of today may
    fit one to come.
    """
    import ray
    from ray._private import ray_constants
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS):  # version 1
        return True
    with contextlib.suppress(Exception):  # a cluster without one may not answer
        version = get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version
        return version not in (None, "", "0")
    return False


class DataExecution:
    """As Ray Data's ExecutionCallback: it has no public way to end what streams before its dataset
    is through.
    """

    _latest: Any = None

    def before_execution_starts(self, executor: Any) -> None:
        DataExecution._latest = executor

    def on_execution_step(self, *_: Any) -> None: ...

    after_execution_succeeds = after_execution_fails = on_execution_step

    @classmethod
    def end(cls) -> None:
        """Ends the latest execution and its actors; nothing where it has ended."""
        if cls._latest is not None:
            cls._latest.shutdown(force=True)


def children() -> set[Any]:
    """All processes below this one; psutil comes with Ray."""
    import psutil
    import ray  # noqa: F401 puts its psutil on the path

    return set(psutil.Process().children(recursive=True))
