"""A function in namespaces of its own: a file system, a network, a host name and processes that
nobody else of this machine sees.

`python -m tests.faults.apart MODULE FUNCTION FOLDER` runs in them, and prints what the function
returns.
"""

import fcntl
import importlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from unittest import SkipTest

from tests.processes import ROOT

_NAMESPACE = [
    "unshare",
    "--mount",
    "--net",
    "--uts",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]
_SET_FLAGS = 0x8914
_UP = 0x1


def apart(function: Callable[[Path], str], folder: Path) -> str:
    """Runs a function of the tests, which must end well; what it printed and returned.

    Skips without namespaces.
    """
    if (
        not shutil.which("unshare")
        or subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode
    ):
        raise SkipTest(
            "needs namespaces of its own: root, or a container with --privileged (unshare)"
        )
    done = subprocess.run(
        [
            *_NAMESPACE,
            sys.executable,
            "-m",
            __name__,
            function.__module__,
            function.__qualname__,
            str(folder),
        ],
        cwd=ROOT,
        # Ray's cluster utilities call `ray` by its name.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def mount(folder: str, options: str = "defaults") -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)


if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # a loopback device
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    os.makedirs("/tmp/ray", exist_ok=True)
    mount("/tmp/ray")  # no other Ray of this machine is seen, none is touched
    os.environ.pop("RAY_ADDRESS", None)
    print(
        attrgetter(sys.argv[2])(importlib.import_module(sys.argv[1]))(Path(sys.argv[3])), flush=True
    )
    os._exit(0)  # the namespace ends, and every process in it
