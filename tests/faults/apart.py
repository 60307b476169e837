"""What a test does first in namespaces of its own: a loopback device, and Ray's folder of temporary files."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess

_SET_FLAGS, _UP = 0x8914, 0x1


def own_ray() -> None:
    """No other Ray of this machine is seen, none is touched."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    os.makedirs("/tmp/ray", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp/ray"], check=True)
    os.environ.pop("RAY_ADDRESS", None)
