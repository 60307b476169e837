"""One thread a process: tests run beside the processes of Ray, where threads that spin cost more
than they help.
"""

import itertools
import os
import secrets
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray writes a token of its own to ~/.ray/auth_token otherwise, which every later `ray start` of
# this user asks for.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# On a busy machine Ray's own processes may take longer to come up than it waits for them.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "240")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "240")
os.environ.setdefault("RAY_agent_register_timeout_ms", "240000")

# What a shell starts in the background ignores Ctrl-C, and so would every process that a test
# interrupts.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

torch.set_num_threads(1)

from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from raypd import storage  # noqa: E402
from raypd.config import StorageConfig  # noqa: E402
from tests import clouds, fault_proxy, processes, s3  # noqa: E402
from tests.runs import between, in_process, make_config  # noqa: E402, F401

# The same examples in every run, however slow the machine; HYPOTHESIS_PROFILE=random looks for
# others.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=SLOW
)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
_numbers = itertools.count()  # of buckets


# A test may kill processes but not the machine, so that it need not wait for the disk.
os.fsync = lambda handle: None


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    processes.end_all()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """One real S3 server for all tests of a session; each makes buckets of its own (fixture
    `bucket`).
    """
    with s3.server(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def ray_ends() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()


@pytest.fixture
def ray_here(ray_ends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One Ray for all tests whose runs need no process of their own.

    Its workers may use `s3_server`.
    """
    import ray

    if ray.is_initialized():
        return
    with monkeypatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
        )


@pytest.fixture
def connected(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """raypd's storage in this process set to the server, and to nothing afterwards."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    options = {"endpoint_url": s3_server.url, "max_attempts": 3}
    storage.configure(StorageConfig(options=options))
    yield s3_server
    storage.configure(StorageConfig())


@pytest.fixture
def bucket(connected: s3.Server) -> str:
    """The URI of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    connected.client().create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture
def gs(google: clouds.Google) -> str:
    return "gs://bucket"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[clouds.Google]:
    with clouds.google(monkeypatch) as store:
        storage.configure(StorageConfig(options={"max_attempts": 3}))
        yield store
    storage.configure(StorageConfig())


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with clouds.azurite(tmp_path_factory.mktemp("azurite")) as url:
        yield url


@pytest.fixture
def az(azurite: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a new container."""
    settings = {"ACCOUNT_NAME": clouds.ACCOUNT, "ACCOUNT_KEY": clouds.KEY, "ENDPOINT": azurite}
    for name, value in settings.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    storage.configure(StorageConfig(options={"max_attempts": 3}))
    name = f"container-{next(_numbers)}"
    clouds.make_container(azurite, name)
    yield f"az://{name}"
    storage.configure(StorageConfig())


@pytest.fixture
def proxy(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_proxy.Proxy]:
    """A proxy that does nothing yet; waits between tries are short in this process."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01
    )
    monkeypatch.setattr("raypd.storage.s3._LONGEST_WAIT", 0.05)
    with fault_proxy.proxy(s3_server.url) as made:
        yield made


# Files whose long tests each start a Ray of their own.
ALONE = ("tests/faults/test_faults.py", "tests/cluster/test_ledger_actor.py")
# Files that take long come first, so that at the end no process waits for another that has just
# begun one of them.
LONG_FILES = (
    "storage/test_runs.py",
    "decoding/test_triton.py",
    "test_examples.py",
    "cluster/test_driver.py",
    "faults/",
    "cluster/test_worker_pool.py",
    "cluster/test_ledger_actor.py",
    "billing/test_budget.py",
    "cluster/",
    "nights/",
    "verify/",
    "dataset/",
    "estimation/",
    "storage/",
    "models/",
    "report/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        starts = (
            n for n, start in enumerate(LONG_FILES) if item.nodeid.startswith(f"tests/{start}")
        )
        return next(starts, len(LONG_FILES))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Beside each other: files, and single tests that share nothing; the files of `ray_here` are
    one scope.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in ALONE:
                return nodeid
            return "ray_here" if "ray_here" in (config.rootpath / file).read_text() else file

    if config.getoption("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # by the number of tests
    return ByFile(config, log)
