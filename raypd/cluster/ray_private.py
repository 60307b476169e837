"""All uses of Ray's private API, in one place, to be checked against each new version of Ray."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any


def local_address() -> str | None:
    """Return the address of the cluster that `ray start` has started on this machine, if any."""
    from ray._private.utils import read_ray_address

    return read_ray_address()


@contextlib.contextmanager
def closed_to_others(dashboard: bool) -> Iterator[None]:
    """Make a Ray that is started in the block listen on 127.0.0.1 only, with a token of its own.

    The token is in no file: Ray would write its own token to ~/.ray/auth_token, and a later
    `ray start` would ask for it. Ray replaces a `_node_ip_address` of the loopback interface, but
    it binds to loopback by itself if clusters are turned off, as they are on macOS.

    Args:
        dashboard: Whether Ray starts with a dashboard. Without one it would ask any other Ray's
            dashboard at the usual port. Ray Train would not find its controller there, take it for
            dead and end the training.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray's processes inherit it
        loader.reset_cache()
    variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    if not dashboard:
        # An address at which nothing answers.
        variables[ray_constants.RAY_API_SERVER_ADDRESS_ENVIRONMENT_VARIABLE] = "http://127.0.0.1:1"
    clusters_enabled = ray_constants.ENABLE_RAY_CLUSTER
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters_enabled
        for name, value in earlier_values.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def use_token_of_this_machine() -> None:
    """Show the cluster the token in ~/.ray or the environment, as Ray does with a local cluster."""
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def draining_nodes() -> dict[str, int]:
    """Return the deadline of each draining node in unix milliseconds, or 0 if it has none."""
    from ray._private.state import state

    return state.get_draining_nodes()


def node_infos() -> list[dict[str, Any]]:
    """Return all nodes of the cluster, dead ones included.

    Returns:
        Dictionaries with the keys node (the id), labels, type, head, resources, and in unix seconds
        began and ended (None while the node is alive).
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


def redirect_messages(handle: Callable[[dict[str, Any]], None]) -> None:
    """Pass messages of Ray's node manager and autoscaler to a function.

    Ray prints them whatever the log level.
    """
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):

        def pass_on(data: dict[str, Any], ignore_prefix: bool = False) -> None:
            handle(data)

        worker.print_to_stdstream = pass_on


def autoscales() -> bool:
    """Return whether an autoscaler of version 1 or 2 runs, which may add nodes for a worker."""
    import ray
    from ray._private import ray_constants
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS):  # version 1
        return True
    # A cluster without an autoscaler may not answer.
    with contextlib.suppress(Exception):
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
    """Return all descendant processes."""
    import psutil
    import ray  # noqa: F401 puts its own psutil on the path

    return set(psutil.Process().children(recursive=True))
