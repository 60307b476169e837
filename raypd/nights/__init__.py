"""Nightly runs: the same command every night extracts what is new or changed, into one table."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.nights import table_check as table_check
    from raypd.nights.nightly import Night as Night, run_night as run_night
    from raypd.nights.state import NightState as NightState

__getattr__ = LazyExports(
    __name__,
    {
        "nightly": ("Night", "run_night"),
        "state": ("NightState",),
    },
    modules=("table_check",),
)
