"""The input and the output table: files become units of work, and units become committed rows.

Planning (`planner`) asks each file's format (`formats`) for its parts and puts them into units. A
unit is read as documents (`reader`), and its rows are committed as one Parquet file (`writer`).

Other rooms use the names in `__all__`. They are imported when they are used, so that a command that
only looks at input does not load what writes output.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.dataset import batch_files, delimited, planner, summaries, writer
    from raypd.dataset.committed import CommittedUnits
    from raypd.dataset.label_file import LABEL_ENDINGS, label_rows, without_documents
    from raypd.dataset.look import MOST_ROWS, Look, batch_rows, describe, look_for_columns
    from raypd.dataset.plan import Plan, PlanWriter, stored, take_apart
    from raypd.dataset.planner import documents_of_last_unit
    from raypd.dataset.reader import filled, may_have, read_table, read_unit
    from raypd.dataset.tables import kind_of
    from raypd.dataset.unit_rows import of_paths as tables_of_paths
    from raypd.dataset.unit_rows import rows_of
    from raypd.dataset.unit_rows import tables as unit_tables
    from raypd.dataset.unit_rows import with_ids as rows_with_ids
    from raypd.dataset.writer import typed_table

__all__ = [
    "LABEL_ENDINGS",
    "MOST_ROWS",
    "CommittedUnits",
    "Look",
    "Plan",
    "PlanWriter",
    "batch_files",
    "batch_rows",
    "delimited",
    "describe",
    "documents_of_last_unit",
    "filled",
    "kind_of",
    "label_rows",
    "look_for_columns",
    "may_have",
    "planner",
    "read_table",
    "read_unit",
    "rows_of",
    "rows_with_ids",
    "stored",
    "summaries",
    "tables_of_paths",
    "take_apart",
    "typed_table",
    "unit_tables",
    "without_documents",
    "writer",
]

# Name -> the module that defines it. The other names of `__all__` are modules themselves.
_MODULE_OF = {
    "CommittedUnits": "committed",
    "LABEL_ENDINGS": "label_file",
    "MOST_ROWS": "look",
    "Look": "look",
    "Plan": "plan",
    "PlanWriter": "plan",
    "batch_rows": "look",
    "describe": "look",
    "documents_of_last_unit": "planner",
    "filled": "reader",
    "kind_of": "tables",
    "label_rows": "label_file",
    "look_for_columns": "look",
    "may_have": "reader",
    "read_table": "reader",
    "read_unit": "reader",
    "rows_of": "unit_rows",
    "rows_with_ids": "unit_rows",
    "stored": "plan",
    "tables_of_paths": "unit_rows",
    "take_apart": "plan",
    "typed_table": "writer",
    "unit_tables": "unit_rows",
    "without_documents": "label_file",
}
# The names that differ in their modules.
_NAME_THERE = {"rows_with_ids": "with_ids", "tables_of_paths": "of_paths", "unit_tables": "tables"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULE_OF:
        return importlib.import_module(f"{__name__}.{name}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, _NAME_THERE.get(name, name))
