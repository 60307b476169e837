"""All uses of Ray's private API, in one place, to be checked against each new version of Ray."""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_MODE = "RAY_AUTH_MODE"  # Ray sets it when it starts
# Their values before a token of raypd's own; empty without such a token.
_earlier_variables: dict[str, str | None] = {}


def local_address() -> str | None:
    """Return the address of the cluster that `ray start` has started on this machine, if any."""
    from ray._private.utils import read_ray_address

    return read_ray_address()


@contextlib.contextmanager
def closed_to_others(dashboard: bool) -> Iterator[None]:
    """Make a Ray that is started in the block listen on 127.0.0.1 only, with a token of its own.

    The token is in the environment until `forget_own_token`. Ray replaces a `_node_ip_address` of
    the loopback interface, but it binds to loopback by itself if clusters are turned off, as they
    are on macOS.

    Args:
        dashboard: Whether Ray starts with a dashboard. Without one it would ask any other Ray's
            dashboard at the usual port. Ray Train would not find its controller there, take it for
            dead and end the training.
    """
    from ray._private import ray_constants

    variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    if not dashboard:
        # An address at which nothing answers.
        variables[ray_constants.RAY_API_SERVER_ADDRESS_ENVIRONMENT_VARIABLE] = "http://127.0.0.1:1"
    clusters_enabled = ray_constants.ENABLE_RAY_CLUSTER
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = False
    _use_own_token()
    try:
        yield
    except BaseException:
        forget_own_token()
        raise
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters_enabled
        for name, value in earlier_values.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _use_own_token() -> None:
    """Put a new token into the environment, which Ray's processes inherit.

    It comes before any file. With the token of a file, each new process of Ray reads the file, and
    none starts after the user has deleted it. Without any token, Ray writes one to
    ~/.ray/auth_token, and a later `ray start` asks for it.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if not os.environ.get(_TOKEN):  # one of the user's environment is in no file either
        _earlier_variables.update({name: os.environ.get(name) for name in (_TOKEN, _TOKEN_MODE)})
        os.environ[_TOKEN] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()


def forget_own_token() -> None:
    """Undo what `closed_to_others` and Ray's start did to the environment; harmless if repeated.

    The next Ray to which this process connects may be a cluster with another token.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if not _earlier_variables:
        return
    for name, value in _earlier_variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _earlier_variables.clear()
    Config.initialize("")  # reads RAY_AUTH_MODE again
    AuthenticationTokenLoader.instance().reset_cache()


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


class ClusterNumber:
    """A number that every process of the cluster can read while the driver changes it.

    It lies in the key-value store of Ray's head, so it costs no actor.

    Args:
        name: The name of the number, unique in the cluster.
    """

    def __init__(self, name: str) -> None:
        self._key = f"raypd:{name}"

    def set(self, number: int) -> None:
        """Replace the number."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key, str(number), overwrite=True)

    def get(self) -> int | None:
        """Return the number, or None if it was never set or is forgotten."""
        from ray.experimental.internal_kv import _internal_kv_get

        value = _internal_kv_get(self._key)
        return None if value is None else int(value)

    def forget(self) -> None:
        """Remove the number from the store."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._key)


class DatasetShare(NamedTuple):
    """What one dataset may take of the cluster."""

    cpus: float
    object_store_bytes: float


_SHARE_KEY = "raypd_share"
# The functions that return the share of a dataset, by the value of _SHARE_KEY in its context.
_shares: dict[str, Callable[[], DatasetShare]] = {}
_share_lock = threading.Lock()


class DatasetExecution:
    """One execution of a dataset that takes a given share of the cluster and can be ended.

    By itself Ray Data asks the cluster's autoscaler for nodes, also for nodes with GPUs, and keeps
    nodes alive for a dataset that has nothing to do. It has no public way to end an execution whose
    next block does not arrive.

    Args:
        dataset: The dataset, which is not executed yet.
        share: Returns what the dataset may take now; called about every second.
    """

    def __init__(self, dataset: Any, share: Callable[[], DatasetShare]) -> None:
        self._dataset = dataset
        self._key = secrets.token_hex(8)
        _shares[self._key] = share
        dataset.context.set_config(_SHARE_KEY, self._key)
        _give_shares()
        self._executor = dataset._create_executor()

    def blocks(self) -> Iterator[tuple[Any, Any]]:
        """Execute the dataset and yield (reference, metadata) of its blocks as they are made."""
        for bundle in self._dataset._build_bundle_iterator(self._executor):
            for entry in bundle.blocks:
                yield entry.ref, entry.metadata

    def statistics(self) -> str:
        """Return Ray Data's statistics of the operators so far; "" before there are any."""
        if self._executor._topology is None:
            return ""
        return str(self._executor.get_stats().to_summary().to_string(include_parent=False))

    def end(self) -> None:
        """End the execution and kill its tasks."""
        self._executor.shutdown(force=True)
        _shares.pop(self._key, None)


def _give_shares() -> None:
    """Let datasets with a share have no autoscaler of their own."""
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler
    from ray.data._internal.execution import streaming_executor
    from ray.data._internal.execution.interfaces import ExecutionResources

    with _share_lock:
        create = streaming_executor.create_cluster_autoscaler
        if getattr(create, "gives_shares", False):
            return

        class FixedShare(ClusterAutoscaler):
            def __init__(self, share: Callable[[], DatasetShare]) -> None:
                self._share = share

            def try_trigger_scaling(self) -> None:
                """Leave the size of the cluster to the pool of workers."""

            def on_executor_shutdown(self) -> None:
                """Do nothing, because nothing was requested."""

            def get_total_resources(self) -> ExecutionResources:
                share = self._share()
                return ExecutionResources(
                    cpu=share.cpus, object_store_memory=share.object_store_bytes
                )

        def create_with_share(
            topology: Any, resource_manager: Any, data_context: Any, **options: Any
        ) -> Any:
            share = _shares.get(data_context.get_config(_SHARE_KEY))
            if share is None:
                return create(topology, resource_manager, data_context, **options)
            return FixedShare(share)

        create_with_share.gives_shares = True  # type: ignore[attr-defined]
        streaming_executor.create_cluster_autoscaler = create_with_share


def children() -> set[Any]:
    """Return all descendant processes."""
    import psutil
    import ray  # noqa: F401 puts its own psutil on the path

    return set(psutil.Process().children(recursive=True))
