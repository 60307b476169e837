"""Before a run: estimate its time and cost, and search for the cheapest settings (tune)."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.estimation import (
        bootstrap as bootstrap,
        estimate as estimate,
        sampling as sampling,
        suggest as suggest,
        tables as tables,
        tune as tune,
        views as views,
    )
    from raypd.estimation.machines import EstimateOptions as EstimateOptions
    from raypd.estimation.profile import (
        DocumentCost as DocumentCost,
        Profile as Profile,
        Profiler as Profiler,
        RemoteProfiler as RemoteProfiler,
        check_sample as check_sample,
    )
    from raypd.estimation.records import (
        BillEstimate as BillEstimate,
        Estimate as Estimate,
        Figure as Figure,
        MachineEstimate as MachineEstimate,
    )
    from raypd.estimation.tune import TuneOptions as TuneOptions, TuneResult as TuneResult
    from raypd.estimation.views import show_tune as show_tune

__getattr__ = LazyExports(
    __name__,
    {
        "machines": ("EstimateOptions",),
        "profile": ("DocumentCost", "Profile", "Profiler", "RemoteProfiler", "check_sample"),
        "records": ("BillEstimate", "Estimate", "Figure", "MachineEstimate"),
        "tune": ("TuneOptions", "TuneResult"),
        "views": ("show_tune",),
    },
    modules=("bootstrap", "estimate", "sampling", "suggest", "tables", "tune", "views"),
)
