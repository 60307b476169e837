"""One thread a process: tests run beside the processes of Ray, where threads that spin cost more than they help."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch

torch.set_num_threads(1)

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402

from tests import s3  # noqa: E402


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """One real S3 server for all tests of a session; each makes buckets of its own (fixture `bucket`)."""
    with s3.server(tmp_path_factory.mktemp("weed")) as server:
        yield server
