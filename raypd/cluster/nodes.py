"""The state of nodes: which are draining (spot notice or scale-down), and which are gone."""

import contextlib
import math
import socket
import time

import ray

import raypd.cluster.ray_private as ray_private

_LOOK_SECONDS = 1.0
_CONNECT_SECONDS = 2.0


class NodeWatch:
    """Watches for draining nodes. Nodes are identified by their hexadecimal id."""

    def __init__(self) -> None:
        self._looked = -math.inf
        # When each draining node ends, on the monotonic clock of this process.
        self._ends: dict[str, float] = {}

    def look(self) -> None:
        """Update the draining nodes, at most once per second."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        ends = {}
        for node, deadline_ms in ray_private.draining_nodes().items():
            # The end is computed once, so that it does not move if the clock is set later.
            if node in self._ends:
                ends[node] = self._ends[node]
            elif deadline_ms:
                ends[node] = time.monotonic() + deadline_ms / 1000 - time.time()
            else:
                ends[node] = math.inf
        self._ends = ends

    def seconds_left(self, node: str) -> float | None:
        """Return the seconds until a draining node ends, or None if the node is not draining.

        They are infinite if the node is draining without a deadline.
        """
        end = self._ends.get(node)
        return None if end is None else end - time.monotonic()


def draining_message(node: str, seconds_left: float) -> str:
    """Return the message that a node is draining."""
    when = "" if math.isinf(seconds_left) else f" in {seconds_left:.0f} s"
    return f"Node {node[:8]} is being preempted{when}; draining it."


def is_alive(node: str) -> bool:
    """Return whether a node is alive and not draining.

    Ray may take half a minute to notice that a node is gone, so this function connects to the node.
    """
    for info in ray.nodes():
        if info["NodeID"] != node or not info["Alive"] or node in ray_private.draining_nodes():
            continue
        address = (info["NodeManagerAddress"], int(info["NodeManagerPort"]))
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            return True
    return False


def node_id() -> str:
    """Return the id of this process's node, or "" outside of a cluster."""
    if not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())
