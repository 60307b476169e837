"""Delta and Iceberg tables behind a proxy that fails calls: every row once, or an outage that is
called so.
"""

import pytest

from raypd import storage
from raypd.config import StorageConfig
from raypd.dataset.planner import plan
from raypd.errors import RunError
from tests.dataset.test_tables import Delta, Iceberg, config, rows, titles
from tests.fault_proxy import Faults, Proxy

WANTED = [f"{number:02d}" for number in range(40)]


@pytest.fixture(params=[Delta, Iceberg])
def table(request, proxy: Proxy, bucket: str):
    """A table of 20 files on S3, which from now on is reached through the proxy."""
    made = request.param(f"{bucket}/table")
    for number in range(0, 40, 2):
        made.write(rows(*WANTED[number : number + 2]))
    options = {"endpoint_url": proxy.url, "max_attempts": 6, "read_timeout": 3}
    storage.configure(StorageConfig(options=options))
    made.format = request.param.__name__.lower()
    return made


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_a_tenth_of_all_calls_fails_and_every_row_is_read_once(table, proxy, seed) -> None:
    proxy.faults = Faults(share=0.1, seed=seed)
    assert titles(config(table.format, table.path)) == WANTED
    assert proxy.failed.total() > 5


def test_a_store_that_is_away_is_no_damaged_table(table, proxy) -> None:
    proxy.faults = Faults(share=1.0, kinds=("503", "reset"))
    with pytest.raises(RunError, match="run the same command again to resume"):
        plan(config(table.format, table.path))
    proxy.faults = Faults()
    assert titles(config(table.format, table.path)) == WANTED
