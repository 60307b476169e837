"""Connect to Ray without its output, and find out what a worker takes of the cluster."""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raypd.cluster.ray_private as ray_private
from raypd.config import ClusterConfig, RunConfig
from raypd.errors import ConfigError, RunError

_START_SECONDS = 300.0  # for Ray to start, or to connect
_CONNECT_SECONDS = 10
# Part of Ray's message about a raylet that did not start within its 30 s.
_SLOW_RAYLET = "timed out during startup"
# What became of a process whose death Ray explains by memory; it need not have used much itself.
KILLED_FOR_MEMORY = (
    "killed by Ray because its machine ran low on memory (other programs may use it)"
)


@dataclass(frozen=True)
class WorkerResources:
    """What a worker takes of the cluster."""

    cpus: float
    gpus: float
    threads: int  # for its work on the CPU


def _configured_address(config: ClusterConfig) -> str | None:
    return config.address or os.environ.get("RAY_ADDRESS") or None


def runs_here(config: ClusterConfig) -> bool:
    """Return whether a run starts Ray on this machine.

    Otherwise its workers may have a GPU that this process lacks.
    """
    address = _configured_address(config)
    if address is not None:
        return address == "local"
    local = ray_private.local_address()
    return not local or not _answers(local)


def connect(config: ClusterConfig, verbose: bool = False) -> bool:
    """Connect to the configured cluster, or start Ray on this machine.

    Args:
        config: The section `cluster` of the configuration.
        verbose: Show what Ray prints.

    Returns:
        False if this process was connected already.

    Raises:
        RunError: If the cluster does not answer, or if Ray does not start.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    if ray.is_initialized():
        return False
    ray_private.forget_own_token()  # of a Ray that ended without `disconnect`
    address, is_found = _find(config)
    starts_ray = address == "local"
    print("starting Ray" if starts_ray else "connecting to Ray", file=sys.stderr, flush=True)
    try:
        with contextlib.ExitStack() as stack:
            if not verbose:
                stack.enter_context(_stderr_muted())
            if starts_ray:
                stack.enter_context(ray_private.closed_to_others(dashboard=verbose))
            if is_found:
                ray_private.use_token_of_this_machine()
            _init(
                address=address,
                log_to_driver=verbose,
                logging_level=logging.INFO if verbose else logging.CRITICAL,
                **_init_options(starts_ray, verbose),
            )
    except SystemExit:  # raised by Ray's own handler of SIGTERM while it starts
        raise KeyboardInterrupt from None
    except TimeoutError:
        raise RunError(
            _connection_error(address, f"it did not answer within {_START_SECONDS:g} s")
        ) from None
    except Exception as error:  # on a busy machine Ray also raises bare exceptions
        raise RunError(_connection_error(address, str(error))) from None
    if threading.current_thread() is threading.main_thread():
        # Ray's C++ handler prints a trace before it calls the Python handler, and aborts the
        # process if that takes long. Setting the Python handler again replaces it.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return True


def _find(config: ClusterConfig) -> tuple[str, bool]:
    """Return the address to connect to, and whether it is a cluster found on this machine.

    Raises:
        RunError: If no cluster answers at the configured address.
    """
    address = _configured_address(config)
    if address == "local":
        return address, False
    if address is not None and address != "auto":
        if not _answers(address):
            key = "cluster.address" if config.address else "RAY_ADDRESS"
            raise RunError(f"{key} {address}: no Ray cluster answers there")
        return address, False
    local = ray_private.local_address()
    if local and _answers(local):
        return local, True
    if address == "auto":
        raise RunError("cluster.address auto: no Ray cluster runs on this machine")
    return "local", False


def _init_options(starts_ray: bool, verbose: bool) -> dict[str, Any]:
    if starts_ray:
        return {"include_dashboard": verbose}
    # Workers on other machines need this package, unless the working folder of `ray job submit`
    # contains it already.
    submitted = {"RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_SUBMISSION_ID"} & os.environ.keys()
    if submitted:
        return {"runtime_env": None}
    return {"runtime_env": {"py_modules": [str(Path(__file__).resolve().parents[1])]}}


@contextlib.contextmanager
def connected(config: ClusterConfig, verbose: bool = False) -> Iterator[bool]:
    """Connect as `connect` does, and disconnect after the block if this call connected."""
    owns_ray = connect(config, verbose)
    try:
        yield owns_ray
    finally:
        if owns_ray:
            with contextlib.suppress(Exception):
                disconnect()


def disconnect() -> None:
    """Disconnect from Ray, and end it if `connect` started it."""
    import ray

    try:
        ray.shutdown()
    finally:
        ray_private.forget_own_token()


def _init(retry: bool = True, **options: Any) -> None:
    """Call ray.init in a thread, with a time limit.

    ray.init has no limit of its own and ignores Ctrl-C while it waits for a process that has died.
    In a thread it also leaves our handler of SIGTERM alone. After a time-out and after Ctrl-C, no
    process that it started is left.

    Args:
        retry: Start Ray once more if a busy machine did not start it within Ray's own 30 s.
        options: The arguments of ray.init.

    Raises:
        TimeoutError: After _START_SECONDS.
        Exception: Whatever ray.init raises.
    """
    import psutil
    import ray

    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def start() -> None:
        try:
            ray.init(**options)
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)
            # Linux ends Ray's processes together with the thread that started them.
            threading.Event().wait()

    earlier_children = ray_private.children()
    # Ctrl-C may arrive while the thread starts, so the start is part of the block.
    try:
        threading.Thread(target=start, name="ray.init", daemon=True).start()
        error = outcome.get(timeout=_START_SECONDS)
    except (queue.Empty, KeyboardInterrupt) as reason:
        for process in ray_private.children() - earlier_children:
            # The process may have ended with its parent.
            with contextlib.suppress(psutil.Error):
                process.kill()
        if isinstance(reason, queue.Empty):
            raise TimeoutError from None
        raise KeyboardInterrupt from None
    if error is None:
        return
    if retry and _SLOW_RAYLET in str(error):
        _init(retry=False, **options)
    else:
        raise error


def _connection_error(address: str, error: str) -> str:
    if address == "local":
        return f"Ray does not start on this machine: {error}"
    return (
        f"no connection to Ray at {address}: {error.partition('. ')[0]}. If that cluster requires "
        "a token (`ray start` does if ~/.ray/auth_token exists), set RAY_AUTH_MODE=token here, and "
        "provide the same file or RAY_AUTH_TOKEN (`ray get-auth-token` prints it there)"
    )


def _answers(address: str) -> bool:
    """Return whether something listens at an address. Ray would try for a minute or more."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True  # a name that Ray resolves itself
    with contextlib.suppress(OSError):
        endpoint = (host.strip("[]"), int(port))
        socket.create_connection(endpoint, timeout=_CONNECT_SECONDS).close()
        return True
    return False


@contextlib.contextmanager
def _stderr_muted() -> Iterator[None]:
    """Mute stderr below Python, because Ray's C++ code writes to it while it starts.

    What goes wrong then is raised as an exception.
    """
    sys.stderr.flush()
    original = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)


def killed_for_memory(message: str) -> bool:
    """Return whether Ray's message says that it killed a process because memory was low."""
    return (
        "low on memory" in message
        or "Workers (tasks / actors) killed due to memory pressure" in message
    )


def silence_ray_logs(say: Callable[[str], None], verbose: bool) -> None:
    """Suppress what Ray prints whatever the log level.

    Args:
        say: Shows the user a line; it gets the messages that a user can act on.
        verbose: Show everything instead.
    """

    def handle(data: dict[str, Any]) -> None:
        text = " ".join(map(str, data.get("lines", [])))
        if killed_for_memory(text):
            say(f"A worker process was {KILLED_FOR_MEMORY}; its units will be retried.")

    # The scheduler notices by itself that a worker died.
    if not verbose:
        ray_private.redirect_messages(handle)


def worker_resources(config: RunConfig, share_cpus: bool = False) -> WorkerResources:
    """Return what a worker takes of the cluster.

    Args:
        config: The configuration.
        share_cpus: Whether several workers without GPUs may share a CPU, so that all workers find
            a place. A run does without: it begins with the workers that have a CPU each.

    Raises:
        ConfigError: If no node has as much, and if no autoscaler can add one.
    """
    import ray

    cluster = config.cluster
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    max_cpus = max((node.get("CPU", 0.0) for node in nodes), default=1.0)
    max_gpus = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    gpus = cluster.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if max_gpus >= 1 and config.model.device != "cpu" else 0.0
    cpus = cluster.cpus_per_worker
    if cpus is None and gpus:
        cpus = _cpus_beside_gpus(nodes, gpus)
    elif cpus is None:
        cpus = sum(node.get("CPU", 0.0) for node in nodes) / cluster.max_workers
        if not share_cpus:
            cpus = max(cpus, 1.0)
        cpus = min(cpus, max_cpus)
        if cpus >= 1:
            cpus = float(int(cpus))
        elif not cpus:
            # The cluster has no CPU yet. Nodes that are added later have at least one.
            cpus = 1.0
    cpus = round(cpus, 3)
    fits = any(node.get("CPU", 0.0) >= cpus and node.get("GPU", 0.0) >= gpus for node in nodes)
    if not fits and not ray_private.autoscales():
        raise ConfigError(
            f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs, and no node of the cluster has both "
            f"(at most {max_cpus:g} CPUs, {max_gpus:g} GPUs): lower cluster.cpus_per_worker or "
            "cluster.gpus_per_worker"
        )
    threads = config.engine.threads
    if threads is None:
        # A GPU worker may use the CPUs that its node has for each GPU.
        worker_cpus = max(cpus, max_cpus / max(max_gpus, 1)) if gpus else cpus
        threads = max(1, int(worker_cpus))
    return WorkerResources(cpus, gpus, threads)


def _cpus_beside_gpus(nodes: list[dict[str, float]], gpus: float) -> float:
    """Return the CPUs of a GPU worker: few enough that every GPU gets a worker."""
    shares = []
    for node in nodes:
        if node.get("GPU"):
            shares.append(node.get("CPU", 0.0) / node["GPU"] * gpus)
    return min(1.0, min(shares, default=1.0))
