"""One thread a process: tests run beside the processes of Ray, where threads that spin cost more than they help.

At the end every reason for which tests were skipped is said once.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch

torch.set_num_threads(1)

from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from tests import processes, s3  # noqa: E402


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    processes.end_all()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """One real S3 server for all tests of a session; each makes buckets of its own (fixture `bucket`)."""
    with s3.server(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """One Ray for all tests of a session whose runs need no process of their own. Its workers may use `s3_server`."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each thing that is missing here, and the tests that it kept from running."""
    files: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple):  # (file, line, reason); an expected failure has none
            files[report.longrepr[2].removeprefix("Skipped: ")][report.nodeid.partition("::")[0]] += 1
    if files:
        terminalreporter.section("not run on this machine")
    for reason, counts in sorted(files.items()):
        where = ", ".join(f"{count} of {file}" for file, count in sorted(counts.items()))
        terminalreporter.line(f"{where}: {reason}")
