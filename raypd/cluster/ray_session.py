"""Connecting to Ray, quietly, and what one worker takes of the cluster."""

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

from raypd.cluster import ray_private
from raypd.config import ClusterConfig, RunConfig
from raypd.errors import ConfigError, RunError

_START_SECONDS = 300.0  # that Ray may take to start, or to connect
_SLOW = "timed out during startup"  # in Ray's words for a raylet that did not come up in its 30 s


@dataclass(frozen=True)
class WorkerResources:
    """What one worker takes; `threads` is for its CPU work."""

    cpus: float
    gpus: float
    threads: int


def runs_here(config: ClusterConfig) -> bool:
    """Whether a run starts Ray on this machine; else its workers may have a GPU that this process
    lacks.
    """
    address = config.address or os.environ.get("RAY_ADDRESS") or None
    local = ray_private.local_address()
    return address == "local" or (address is None and not (local and _answers(local)))


def connect(config: ClusterConfig, verbose: bool = False) -> bool:
    """Attaches to the configured cluster or starts Ray; False: was connected.

    Raises RunError: it does not answer.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    if ray.is_initialized():
        return False
    address = config.address or os.environ.get("RAY_ADDRESS") or None
    local = None
    if address is None or address == "auto":
        local = ray_private.local_address()
        local = local if local and _answers(local) else None
        if address == "auto" and local is None:
            raise RunError("cluster.address auto: no Ray cluster runs on this machine")
        address = local or "local"
    elif address != "local" and not _answers(address):
        key = "cluster.address" if config.address else "RAY_ADDRESS"
        raise RunError(f"{key} {address}: no Ray cluster answers there")
    keys: dict[str, Any] = {"include_dashboard": verbose}
    if address != "local":
        # This package for workers on other machines; the working folder of `ray job submit` brings
        # it already.
        submitted = (
            "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or "RAY_JOB_SUBMISSION_ID" in os.environ
        )
        keys = {
            "runtime_env": None
            if submitted
            else {"py_modules": [str(Path(__file__).resolve().parents[1])]}
        }
    print(
        "starting Ray" if address == "local" else "connecting to Ray", file=sys.stderr, flush=True
    )
    level = logging.INFO if verbose else logging.CRITICAL
    nothing = contextlib.nullcontext()
    closed = ray_private.closed_to_others(dashboard=verbose) if address == "local" else nothing
    try:
        with nothing if verbose else _stderr_muted(), closed:
            if local is not None:
                ray_private.use_token_of_this_machine()
            _init(address=address, log_to_driver=verbose, logging_level=level, **keys)
    except SystemExit:  # Ray's own handler of SIGTERM while it starts
        raise KeyboardInterrupt from None
    except TimeoutError:
        raise RunError(_why_not(address, f"it is not there after {_START_SECONDS:g} s")) from None
    except Exception as error:  # of any kind: on a busy machine Ray raises bare ones, too
        raise RunError(_why_not(address, str(error))) from None
    if threading.current_thread() is threading.main_thread():
        # Ray's handler in C++ prints a trace before it calls ours, and where that takes long it
        # aborts the process.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return True


@contextlib.contextmanager
def connected(config: ClusterConfig, verbose: bool = False) -> Iterator[bool]:
    """Connects as `connect`, and disconnects at the end unless somebody else had connected."""
    mine = connect(config, verbose)
    try:
        yield mine
    finally:
        if mine:
            import ray

            with contextlib.suppress(Exception):
                ray.shutdown()


def _init(again: bool = True, **keys: Any) -> None:
    """ray.init, which has no limit and does not hear of Ctrl-C where it waits for a process that
    has died; in a thread it leaves our handler of SIGTERM alone, too. Raises what it raises, or
    TimeoutError after _START_SECONDS; then, as at Ctrl-C, nothing that it started is left. A Ray
    that a busy machine did not start in 30 s is started once more.
    """
    import psutil
    import ray

    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def start() -> None:
        try:
            ray.init(**keys)
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)
            threading.Event().wait()  # Linux ends what Ray has started with the thread that did

    before = ray_private.children()
    try:  # Ctrl-C may come while the thread starts
        threading.Thread(target=start, name="ray.init", daemon=True).start()
        error = outcome.get(timeout=_START_SECONDS)
    except (queue.Empty, KeyboardInterrupt) as reason:
        for process in ray_private.children() - before:
            with contextlib.suppress(psutil.Error):  # its parent took it along
                process.kill()
        raise (TimeoutError if isinstance(reason, queue.Empty) else KeyboardInterrupt) from None
    if error is not None and _SLOW in str(error) and again:
        _init(again=False, **keys)
    elif error is not None:
        raise error


def _why_not(address: str, error: str) -> str:
    if address == "local":
        return f"Ray does not start on this machine: {error}"
    return (
        f"no connection to Ray at {address}: {error.partition('. ')[0]}. If that cluster "
        "asks for a token (`ray start` "
        "does where there is a file ~/.ray/auth_token), set RAY_AUTH_MODE=token here, with "
        "the same file or with "
        "RAY_AUTH_TOKEN (`ray get-auth-token` prints it there)"
    )


def _answers(address: str) -> bool:
    """Whether something listens: Ray itself would try for a minute and more."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True  # a name that Ray resolves itself
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=10),
    ):
        return True
    return False


@contextlib.contextmanager
def _stderr_muted() -> Iterator[None]:
    """Ray's C++ side writes past Python while it starts; what goes wrong then is an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def silence_ray_logs(say: Callable[[str], None], verbose: bool) -> None:
    """Turns off what Ray prints past every log level; what a user can make something of goes to
    `say`.
    """

    def pass_on(data: dict[str, Any]) -> None:
        text = " ".join(map(str, data.get("lines", [])))
        if (
            "running low on memory" in text
            or "Workers (tasks / actors) killed due to memory pressure" in text
        ):
            say(
                "Ray killed a worker because the machine ran out of memory; its units are "
                "tried again"
            )

    if not verbose:
        ray_private.redirect_messages(pass_on)  # the scheduler sees that a worker died


def worker_resources(config: RunConfig) -> WorkerResources:
    """What a worker takes of the cluster.

    Raises ConfigError when no node has as much and no autoscaler adds any.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cluster = config.cluster
    most_gpus = max((n.get("GPU", 0.0) for n in nodes), default=0.0)
    gpus = cluster.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if most_gpus >= 1 and config.model.device != "cpu" else 0.0
    most_cores = max((n.get("CPU", 0.0) for n in nodes), default=1.0)
    cpus = cluster.cpus_per_worker
    if cpus is None and gpus:
        # A GPU worker also takes CPU: never so much that a GPU stays without a worker.
        cpus = min(
            1.0,
            min((n.get("CPU", 0.0) / n["GPU"] * gpus for n in nodes if n.get("GPU")), default=1.0),
        )
    elif cpus is None:
        cpus = min(sum(n.get("CPU", 0.0) for n in nodes) / cluster.max_workers, most_cores)
        # No CPU yet: those to come have one at least.
        cpus = float(int(cpus)) if cpus >= 1 else cpus or 1.0
    cpus = round(cpus, 3)
    if (
        not any(n.get("CPU", 0.0) >= cpus and n.get("GPU", 0.0) >= gpus for n in nodes)
        and not ray_private.autoscales()
    ):
        raise ConfigError(
            f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs, and no node of the cluster has both "
            f"(most: {most_cores:g} CPUs, {most_gpus:g} GPUs): lower "
            "cluster.cpus_per_worker or cluster.gpus_per_worker"
        )
    threads = config.engine.threads or max(
        1, int(cpus if not gpus else max(cpus, most_cores / max(most_gpus, 1)))
    )
    return WorkerResources(cpus, gpus, threads)
