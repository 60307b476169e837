"""A list of values of another type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypd.decoding import Automaton, ListOf, OrNull
from raypd.schema.reading import CheckedValue, list_items
from raypd.schema.types.base import AttributeKeys, Tree, ValueType

if TYPE_CHECKING:
    import pyarrow as pa


class ListType(ValueType):
    """A list; `item` is the type of its values."""

    has_span = False

    def __init__(self, attribute: AttributeKeys, item: ValueType) -> None:
        super().__init__(attribute)
        self.item = item

    @property
    def column_type(self) -> str:  # type: ignore[override]
        return f"list of {self.item.column_type}"

    @property
    def title(self) -> str:
        return f"list of {self.item.title}"

    def problem(self) -> str | None:
        min_items = self.attribute.min_items or 0
        max_items = self.attribute.max_items
        if max_items is not None and min_items > max_items:
            return "`min_items` is above `max_items`"
        return self.item.problem()

    def json_schema(self) -> Tree:
        schema: Tree = {"type": "array", "items": self.item.json_schema()}
        if self.attribute.max_items is not None:
            schema["maxItems"] = self.attribute.max_items
        if self.attribute.min_items is not None:
            schema["minItems"] = self.attribute.min_items
        return schema

    def hint(self) -> str:
        if self.attribute.max_items is None:
            return self.item.list_hint("")
        return self.item.list_hint(f" of {self.attribute.max_items} at most")

    def automaton(self, bare: bool = False) -> Automaton:
        min_items = self.attribute.min_items or 0
        items = ListOf(self.item.table(), self.attribute.max_items, min_items)
        return OrNull(items, self.attribute.nullable)

    def expression(self) -> str:
        item = self.item.expression()
        min_further = max((self.attribute.min_items or 0) - 1, 0)
        max_further = "" if self.attribute.max_items is None else self.attribute.max_items - 1
        may_be_empty = "" if self.attribute.min_items else "?"
        return rf"\[(({item})(, ({item})){{{min_further},{max_further}}}){may_be_empty}\]"

    def check_cell(self, text: str) -> CheckedValue:
        """Read a cell: a list in JSON, or items in the notation of people, `a; b`."""
        stripped = text.strip()
        if self.says_null(stripped):
            return CheckedValue("null", None, text)
        if stripped.startswith("[") or not self.item.has_plain_cells:
            return self.check(text)
        values = []
        for part in stripped.split(";"):
            if not part.strip():
                continue
            checked = self.item.check_cell(part.strip())
            if checked.status not in ("ok", "null"):
                return CheckedValue(checked.status, None, text)
            if checked.status == "ok":
                values.append(checked.value)
        if not self.fits(values):
            return CheckedValue("invalid", None, text)
        return CheckedValue("ok", values, text)

    def read(self, text: str, closed: bool, bare: bool = False) -> CheckedValue:
        """Read a list. A single value is read as a list of that value; a list that was cut keeps
        its complete values.
        """
        text = text.strip()
        if not text.startswith("["):
            single = self.item.read(text, closed)
            if single.status == "ok":
                return CheckedValue("ok", [single.value], text)
            return CheckedValue(single.status, None, text)
        items, is_whole = list_items(text)
        values = []
        for item in items:
            checked = self.item.read(item, closed=True)
            if checked.status not in ("ok", "null"):
                return CheckedValue("invalid", None, text)
            if checked.status == "ok":
                values.append(checked.value)
        return CheckedValue("ok" if is_whole and closed else "truncated", values, text)

    def fits(self, value: Any) -> bool:
        if not isinstance(value, list) or len(value) < (self.attribute.min_items or 0):
            return False
        max_items = self.attribute.max_items
        if max_items is not None and len(value) > max_items:
            return False
        return all(map(self.item.fits, value))

    def united(self, lists: list[list[Any]]) -> list[Any]:
        """Return the values of several lists without repetitions, up to `max_items`."""
        values: list[Any] = []
        for items in lists:
            for item in items:
                if item not in values:
                    values.append(item)
        return values[: self.attribute.max_items]

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.list_(self.item.arrow_type())

    def stored(self, value: Any) -> Any:
        return [self.item.to_arrow(item) for item in value]

    def in_record(self, value: Any) -> Any:
        return [self.item.in_record(item) for item in value]

    def arranged(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [self.item.arranged(item) for item in value]

    def cannot_write(self, text: str) -> bool:
        return self.item.cannot_write(text)
