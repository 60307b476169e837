"""A bucket for every test, on the one real S3 server of the session, and a proxy before that server."""

import itertools
from collections.abc import Iterator

import pytest

from raypd import storage
from raypd.config import StorageConfig
from tests import clouds, fault_proxy, s3

_numbers = itertools.count()


@pytest.fixture
def connected(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """raypd's storage in this process set to the server, and to nothing afterwards."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    storage.configure(StorageConfig(endpoint_url=s3_server.url, max_attempts=3))
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
        storage.configure(StorageConfig(max_attempts=3))
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
    storage.configure(StorageConfig(max_attempts=3))
    name = f"container-{next(_numbers)}"
    clouds.make_container(azurite, name)
    yield f"az://{name}"
    storage.configure(StorageConfig())


@pytest.fixture
def proxy(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_proxy.Proxy]:
    """A proxy that does nothing yet; waits between tries are short in this process."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
    monkeypatch.setattr("raypd.storage.s3._LONGEST_WAIT", 0.05)
    with fault_proxy.proxy(s3_server.url) as made:
        yield made
