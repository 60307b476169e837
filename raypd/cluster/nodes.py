"""What the cluster says of its nodes: which are going away (a spot notice, a scale-down), and which
are gone.
"""

import contextlib
import math
import socket
import time

import ray

from raypd.cluster import ray_private

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0


class NodeWatch:
    """Looks at most once a second. Nodes are known by their hexadecimal id."""

    def __init__(self) -> None:
        self._looked = -math.inf
        # Draining node -> when it goes away, by this process's monotonic clock.
        self._ends: dict[str, float] = {}

    def look(self) -> None:
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        # Reckoned once, at the notice: from then on a clock that is set does not move the end.
        self._ends = {
            node: self._ends.get(
                node, time.monotonic() + (deadline / 1000 - time.time() if deadline else math.inf)
            )
            for node, deadline in ray_private.draining_nodes().items()
        }

    def seconds_left(self, node: str) -> float | None:
        """Until a node that was given notice goes away (infinite without a deadline); None for all
        others.
        """
        end = self._ends.get(node)
        return None if end is None else end - time.monotonic()


def going_away(seconds_left: float) -> str:
    """For the user, of a node that was given notice."""
    when = "" if math.isinf(seconds_left) else f" in {seconds_left:.0f} s"
    return f"a node is going away{when}: no more units for it"


def is_alive(node: str) -> bool:
    """Whether a node is there and stays: Ray itself takes up to half a minute to believe that one
    is gone.
    """
    for info in ray.nodes():
        if info["NodeID"] == node and info["Alive"] and node not in ray_private.draining_nodes():
            with contextlib.suppress(OSError):
                address = info["NodeManagerAddress"], int(info["NodeManagerPort"])
                socket.create_connection(address, timeout=_ANSWER_SECONDS).close()
                return True
    return False


def node_id() -> str:
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
