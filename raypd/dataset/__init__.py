"""The input and the output table: files become units of work, and units become committed rows.

Planning (`planner`) asks each file's format (`formats`) for its parts and puts them into units. A
unit is read as documents (`reader`), and its rows are committed as one Parquet file (`writer`).

Other rooms use the names in `__all__`. They are imported when they are used, so that a command that
only looks at input does not load what writes output.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.dataset import (
        batch_files as batch_files,
        compacted as compacted,
        compaction as compaction,
        delimited as delimited,
        look as look,
        plan as plan,
        planner as planner,
        summaries as summaries,
        unit_rows as unit_rows,
        writer as writer,
    )
    from raypd.dataset.committed import (
        CommittedUnits as CommittedUnits,
        unit_objects as unit_objects,
    )
    from raypd.dataset.compacted import TableFile as TableFile
    from raypd.dataset.compaction import table_folder as table_folder
    from raypd.dataset.digests import DigestSet as DigestSet, digest as digest
    from raypd.dataset.formats import row_in_words as row_in_words
    from raypd.dataset.label_file import (
        AT_RANDOM as AT_RANDOM,
        CHOSEN as CHOSEN,
        LABEL_ENDINGS as LABEL_ENDINGS,
        LEAST_SURE as LEAST_SURE,
        about_ids as about_ids,
        columns_of as columns_of,
        label_rows as label_rows,
        unused_columns as unused_columns,
        was_left_open as was_left_open,
        was_reviewed as was_reviewed,
        without_documents as without_documents,
    )
    from raypd.dataset.look import (
        MOST_ROWS as MOST_ROWS,
        Look as Look,
        batch_rows as batch_rows,
        look_for_columns as look_for_columns,
    )
    from raypd.dataset.plan import (
        Plan as Plan,
        PlanTotals as PlanTotals,
        PlanWriter as PlanWriter,
        stored as stored,
        take_apart as take_apart,
    )
    from raypd.dataset.planner import documents_of_last_unit as documents_of_last_unit
    from raypd.dataset.reader import (
        filled as filled,
        may_have as may_have,
        read_table as read_table,
        read_unit as read_unit,
    )
    from raypd.dataset.stretches import stretch_of as stretch_of
    from raypd.dataset.summary_rows import COUNTS as COUNTS
    from raypd.dataset.table_writer import TableWriter as TableWriter
    from raypd.dataset.tables import kind_of as kind_of
    from raypd.dataset.unit_rows import rows_of as rows_of
    from raypd.dataset.writer import typed_table as typed_table

__getattr__ = LazyExports(
    __name__,
    {
        "committed": ("CommittedUnits", "unit_objects"),
        "compacted": ("TableFile",),
        "compaction": ("table_folder",),
        "digests": ("DigestSet", "digest"),
        "formats": ("row_in_words",),
        "label_file": (
            "AT_RANDOM",
            "CHOSEN",
            "LABEL_ENDINGS",
            "LEAST_SURE",
            "about_ids",
            "columns_of",
            "label_rows",
            "unused_columns",
            "was_left_open",
            "was_reviewed",
            "without_documents",
        ),
        "look": ("Look", "MOST_ROWS", "batch_rows", "look_for_columns"),
        "plan": ("Plan", "PlanTotals", "PlanWriter", "stored", "take_apart"),
        "planner": ("documents_of_last_unit",),
        "reader": ("filled", "may_have", "read_table", "read_unit"),
        "stretches": ("stretch_of",),
        "summary_rows": ("COUNTS",),
        "table_writer": ("TableWriter",),
        "tables": ("kind_of",),
        "unit_rows": ("rows_of",),
        "writer": ("typed_table",),
    },
    modules=(
        "batch_files",
        "compacted",
        "compaction",
        "delimited",
        "look",
        "plan",
        "planner",
        "summaries",
        "unit_rows",
        "writer",
    ),
)
