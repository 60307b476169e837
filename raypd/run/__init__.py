"""A run's folder: its units and records, the lease on it, and the retry policy.

Other rooms import the names below from here, and the modules `console`, `layout`, `manifest`,
`read`, `records` and `retry_policy`.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.run import (
        console as console,
        failure_reasons as failure_reasons,
        layout as layout,
        lease as lease,
        left_out as left_out,
        load as load,
        manifest as manifest,
        read as read,
        records as records,
        retry_policy as retry_policy,
    )
    from raypd.run.console import Interrupted as Interrupted, say as say, signals as signals
    from raypd.run.failure_reasons import OTHER as OTHER, FailureReason as FailureReason
    from raypd.run.layout import is_nightly as is_nightly, output_folder as output_folder
    from raypd.run.lease import RunLease as RunLease, held as held
    from raypd.run.left_out import LeftOut as LeftOut, LeftOutFiles as LeftOutFiles
    from raypd.run.load import (
        NoRun as NoRun,
        load_record as load_record,
        load_run as load_run,
        read_record as read_record,
        similar_folder as similar_folder,
    )
    from raypd.run.manifest import Manifest as Manifest, RunRecord as RunRecord
    from raypd.run.read import by_document as by_document, spread as spread
    from raypd.run.reading import ReadingRecord as ReadingRecord
    from raypd.run.records import (
        RecordError as RecordError,
        encoded as encoded,
        from_json as from_json,
        tree as tree,
    )
    from raypd.run.retry_policy import Attempt as Attempt, UnitLog as UnitLog
    from raypd.run.temporary import (
        TemporaryFolder as TemporaryFolder,
        temporary_space as temporary_space,
    )
    from raypd.run.training import (
        Curve as Curve,
        TrainingAttempt as TrainingAttempt,
        TrainingData as TrainingData,
        TrainingProgress as TrainingProgress,
        TrainingRecord as TrainingRecord,
    )
    from raypd.run.unit import (
        Commit as Commit,
        Part as Part,
        Unit as Unit,
        UnitResult as UnitResult,
        UnitSummary as UnitSummary,
        make_unit as make_unit,
    )
    from raypd.run.unit_totals import (
        SUMMED as SUMMED,
        SessionUnits as SessionUnits,
        UnitTotals as UnitTotals,
    )
    from raypd.run.unreadable import Unreadable as Unreadable
    from raypd.run.usage import (
        FIRST as FIRST,
        SECOND as SECOND,
        Counts as Counts,
        GpuUse as GpuUse,
        OptionalGpuUse as OptionalGpuUse,
        RunCost as RunCost,
        Usage as Usage,
        UsageKey as UsageKey,
    )

__getattr__ = LazyExports(
    __name__,
    {
        "console": ("Interrupted", "say", "signals"),
        "failure_reasons": ("FailureReason", "OTHER"),
        "layout": ("is_nightly", "output_folder"),
        "lease": ("RunLease", "held"),
        "left_out": ("LeftOut", "LeftOutFiles"),
        "load": ("NoRun", "load_record", "load_run", "read_record", "similar_folder"),
        "manifest": ("Manifest", "RunRecord"),
        "read": ("by_document", "spread"),
        "reading": ("ReadingRecord",),
        "records": ("RecordError", "encoded", "from_json", "tree"),
        "retry_policy": ("Attempt", "UnitLog"),
        "temporary": ("TemporaryFolder", "temporary_space"),
        "training": (
            "Curve",
            "TrainingAttempt",
            "TrainingData",
            "TrainingProgress",
            "TrainingRecord",
        ),
        "unit": ("Commit", "Part", "Unit", "UnitResult", "UnitSummary", "make_unit"),
        "unit_totals": ("SUMMED", "SessionUnits", "UnitTotals"),
        "unreadable": ("Unreadable",),
        "usage": (
            "Counts",
            "FIRST",
            "GpuUse",
            "OptionalGpuUse",
            "RunCost",
            "SECOND",
            "Usage",
            "UsageKey",
        ),
    },
    modules=(
        "console",
        "failure_reasons",
        "layout",
        "lease",
        "left_out",
        "load",
        "manifest",
        "read",
        "records",
        "retry_policy",
    ),
)
