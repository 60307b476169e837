"""An object of a list, such as an invoice line: a row with a value for each column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypd.decoding import TransitionTable, joined, one_of
from raypd.schema.names import bare
from raypd.schema.reading import DECODER, NULLS, CheckedValue, dumps, repaired
from raypd.schema.record import members, record_schema
from raypd.schema.slots import as_bytes
from raypd.schema.types.base import AttributeKeys, Tree, ValueType

if TYPE_CHECKING:
    import pyarrow as pa


class RowType(ValueType):
    """The type of one object of an attribute of type rows, which is always a list."""

    has_plain_cells = False
    name = "rows"
    keys = frozenset({"columns"})
    has_span = False

    @property
    def column_type(self) -> str:  # type: ignore[override]
        columns = [(c.name, c.value_type.column_type) for c in self.attribute.columns]
        return f"rows{columns}"

    @classmethod
    def normalized(cls, keys: Tree) -> Tree:
        return {**keys, "many": True}

    def problem(self) -> str | None:
        columns = self.attribute.columns
        if not columns:
            return "type rows needs `columns`"
        for column in columns:
            if column.many:
                return f"column {column.name!r}: a column is a single value"
        if len({bare(column.name) for column in columns}) < len(columns):
            return "two columns have the same name"
        return None

    def json_schema(self) -> Tree:
        return record_schema(self.attribute.columns)

    def list_hint(self, limit: str) -> str:
        columns = []
        for column in self.attribute.columns:
            kind = column.value_type.column_hint()
            description = "; ".join(filter(None, [column.description, kind]))
            columns.append(f"{column.name} ({description})")
        return f"a JSON list{limit} of objects with the keys {', '.join(columns)}"

    def table(self) -> TransitionTable:
        parts: list[TransitionTable] = []
        for column in self.attribute.columns:
            before = ", " if parts else "{"
            parts.append(one_of([as_bytes(f"{before}{dumps(column.name)}: ")]))
            parts.append(_cell_table(column))
        return joined([*parts, one_of(["}"])])

    def expression(self) -> str:
        return rf"\{{{', '.join(members(self.attribute.columns))}\}}"

    def read(self, text: str, closed: bool, bare: bool = False) -> CheckedValue:
        """Read an object; its keys may differ in case and punctuation."""
        try:
            members = DECODER.decode(repaired(text)).items()
        except (ValueError, AttributeError):
            if text.casefold() in NULLS:
                return CheckedValue("null", None, text)
            return CheckedValue("invalid" if closed else "truncated", None, text)
        return self._read_cells(members, text)

    def _read_cells(self, members: Any, text: str) -> CheckedValue:
        cells = {bare(name): dumps(cell) for name, cell in members}
        row = {}
        for column in self.attribute.columns:
            cell = column.value_type.read(cells.get(bare(column.name), "null"), closed=True)
            if cell.status not in ("ok", "null"):
                return CheckedValue("invalid", None, text)
            row[column.name] = cell.value
        if all(value is None for value in row.values()):
            return CheckedValue("null", None, text)
        return CheckedValue("ok", row, text)

    def fits(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return all(_fits_cell(column, value.get(column.name)) for column in self.attribute.columns)

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.struct([(c.name, c.value_type.arrow_type()) for c in self.attribute.columns])

    def stored(self, value: Any) -> Any:
        columns = self.attribute.columns
        return {c.name: c.value_type.to_arrow(value.get(c.name)) for c in columns}

    def in_record(self, value: Any) -> Any:
        """Return a row without the columns that are absent rather than null."""
        absent = {column.name for column in self.attribute.columns if column.omit_null}
        return {
            name: cell for name, cell in value.items() if cell is not None or name not in absent
        }

    def arranged(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {column.name: value.get(column.name) for column in self.attribute.columns}


def _fits_cell(column: AttributeKeys, cell: Any) -> bool:
    if cell is None:
        return column.nullable
    return column.value_type.fits(cell)


def _cell_table(column: AttributeKeys) -> TransitionTable:
    """Return the automaton of a value in a row, or of null."""
    value = column.value_type.table()
    if not column.nullable:
        return value
    null = one_of(["null"])
    # The states of null follow those of the value, and both begin in state 0.
    shift = len(value.table)
    shifted = [{char: after + shift for char, after in row.items()} for row in null.table]
    start = {**value.table[0], **shifted[0]}
    table = [start, *value.table[1:], *shifted]
    return TransitionTable(table, [*value.finals, *(state + shift for state in null.finals)])
