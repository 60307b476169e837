"""A run's folder: its units and records, the lease on it, and the policy of retries.

Other rooms import the names below from here, and the modules `console`, `layout`, `manifest`,
`read`, `records` and `retry_policy`.
"""

from raypd.run import console, layout, manifest, read, records, retry_policy
from raypd.run.console import Interrupted, say, signals
from raypd.run.layout import is_nightly, output_folder
from raypd.run.lease import RunLease, held, killed
from raypd.run.load import NoRun, load_record, load_run
from raypd.run.manifest import Manifest, RunRecord
from raypd.run.read import by_document, spread
from raypd.run.records import RecordError
from raypd.run.training import TrainingAttempt, TrainingData, TrainingProgress, TrainingRecord
from raypd.run.unit import Part, Unit, UnitResult, UnitSummary, make_unit
from raypd.run.unreadable import Unreadable
from raypd.run.usage import FIRST, SECOND, GpuUse, RunCost, Usage, UsageKey

__all__ = [
    "FIRST",
    "SECOND",
    "GpuUse",
    "Interrupted",
    "Manifest",
    "NoRun",
    "Part",
    "RecordError",
    "RunCost",
    "RunLease",
    "RunRecord",
    "TrainingAttempt",
    "TrainingData",
    "TrainingProgress",
    "TrainingRecord",
    "Unit",
    "UnitResult",
    "UnitSummary",
    "Unreadable",
    "Usage",
    "UsageKey",
    "by_document",
    "console",
    "held",
    "is_nightly",
    "killed",
    "layout",
    "load_record",
    "load_run",
    "make_unit",
    "manifest",
    "output_folder",
    "read",
    "records",
    "retry_policy",
    "say",
    "signals",
    "spread",
]
