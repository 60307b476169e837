"""The documents of a plan as a Ray Data source, with one row per document."""

import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from ray import data

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import Plan, read_unit
from raypd.errors import InputError
from raypd.run import Unit

# Columns besides those of the documents.
_ORIGIN = pa.schema([("read_error", pa.string()), ("source", pa.string()), ("row", pa.int64())])


class DocumentSource(data.Datasource):
    """The documents of a plan, as the workers of a run read them.

    A row has the id of its document, the columns that the configuration reads, `read_error` (why
    the document could not be read, or null), `source` (its file) and `row` (where it begins there,
    as in the table of a run).

    Args:
        plan: The plan.
        config: The configuration that the plan was made with.
        columns: Columns to read besides those of the configuration.
    """

    def __init__(self, plan: Plan, config: RunConfig, columns: Sequence[str]) -> None:
        super().__init__()
        self._plan = plan
        self._config = config
        self._columns = columns

    def get_name(self) -> str:
        """Return the name of the operator in Ray's dashboard."""
        return "Documents"

    def estimate_inmemory_data_size(self) -> int:
        """Return the stored bytes of the input."""
        return self._plan.bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[data.ReadTask]:
        """Divide the units of the plan, in order, into at most `parallelism` tasks."""
        units = list(self._plan)
        per_task = math.ceil(len(units) / max(1, parallelism))
        tasks = []
        for begin in range(0, len(units), per_task):
            chosen = units[begin : begin + per_task]
            rows = sum(unit.expected for unit in chosen)
            size = sum(unit.bytes for unit in chosen)
            metadata = data.block.BlockMetadata(rows, size, None, None)
            read = partial(_read_documents, chosen, self._config, self._columns)
            tasks.append(data.ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read_documents(
    units: Sequence[Unit], config: RunConfig, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the documents of each unit as a table.

    Raises:
        InputError: If a unit cannot be read, and `input.on_damaged` is `fail`.
    """
    storage.configure(config.storage)
    for unit in units:
        try:
            yield _table(unit, config, columns)
        except InputError as error:
            if config.input.on_damaged == "fail":
                raise
            print(f"raypd: left out: {error}", file=sys.stderr, flush=True)


def _table(unit: Unit, config: RunConfig, columns: Sequence[str]) -> pa.Table:
    source = config.input
    texts = list(config.text_columns())
    if source.category_column is not None:
        texts.append(source.category_column)
    documents = read_unit(unit, config, columns)
    table: dict[str, Any] = {"id": pa.array([document.id for document in documents], pa.string())}
    for name in texts:
        values = [document.fields.get(name) for document in documents]
        table[name] = pa.array([_text(value) for value in values], pa.string())
    for name in columns:
        table.setdefault(name, pa.array([document.fields.get(name) for document in documents]))
    origin = {
        "read_error": [document.error for document in documents],
        "source": [document.source for document in documents],
        "row": [document.row for document in documents],
    }
    for field in _ORIGIN:
        table[field.name] = pa.array(origin[field.name], field.type)
    return pa.table(table)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
