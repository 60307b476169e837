"""What all types of values share: how values are decoded, read, checked, stored and described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from raypd.decoding import Automaton, OrNull, TransitionTable
from raypd.schema.reading import NULLS, CheckedValue, Status, as_text, dumps, read_scalar

if TYPE_CHECKING:
    import pyarrow as pa

Tree = dict[str, Any]


class LabelError(ValueError):
    """A label is not a value of its attribute; the message says what it is instead."""


class UnsupportedSchema(ValueError):
    """A keyword of a JSON Schema that cannot be decoded, and why."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


class AttributeKeys(Protocol):
    """What the types read of an attribute (`raypd.schema.Attribute`)."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def values(self) -> list[str]: ...
    @property
    def many(self) -> bool: ...
    @property
    def max_items(self) -> int | None: ...
    @property
    def min_items(self) -> int | None: ...
    @property
    def columns(self) -> Sequence[AttributeKeys]: ...
    @property
    def pattern(self) -> str | None: ...
    @property
    def minimum(self) -> float | None: ...
    @property
    def maximum(self) -> float | None: ...
    @property
    def min_length(self) -> int | None: ...
    @property
    def max_length(self) -> int | None: ...
    @property
    def required(self) -> bool: ...
    @property
    def omit_null(self) -> bool: ...
    @property
    def nullable(self) -> bool: ...
    @property
    def value_type(self) -> ValueType: ...


class ValueType:
    """The type of one attribute's values.

    Each subclass describes a type. Each of its objects belongs to one attribute and reads that
    attribute's keys (`values`, `pattern`, bounds). To add a type, write a subclass and name it in
    `raypd.schema.types.TYPES`. A type overrides whatever differs from a plain text, and has to
    define `table`, `expression` and `fits`.

    Every command reads a configuration, so pyarrow is imported only when an Arrow type is needed.
    """

    # The type's name in a configuration.
    name: ClassVar[str]
    # The keys of an attribute that this type understands, in addition to those of all types.
    keys: ClassVar[frozenset[str]] = frozenset()
    # A slot may say null even if the attribute is required.
    always_nullable: ClassVar[bool] = False
    # A value may be a part of the document's text.
    has_span: ClassVar[bool] = True
    # A cell of a table can contain the value without JSON.
    has_plain_cells: ClassVar[bool] = True
    # The kind of value in a column of the table; attributes of several categories may share one.
    column_type: str = "text"
    # The text that training adds after a value: a number ends at a newline, other values end
    # themselves.
    label_end: ClassVar[str] = ""
    # An example of a value in labels; "" if people may write any text.
    example: ClassVar[str] = ""

    def __init__(self, attribute: AttributeKeys) -> None:
        self.attribute = attribute

    def label_pattern(self) -> str:
        """Return a regular expression that every label of this type matches; "" for any text."""
        return ""

    # --------------------------------------------------------------------
    # configuration

    @classmethod
    def normalized(cls, keys: Tree) -> Tree:
        """Return the keys of an attribute in the form in which they are kept."""
        return keys

    def problem(self) -> str | None:
        """Return why the attribute's keys do not fit together, or None if they do."""
        return None

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        """Turn a JSON Schema into the keys of an attribute.

        Args:
            schema: The schema of one value without `enum`, `const`, references and null.

        Returns:
            The keys, among them `type`, or None if its values are not of this type.

        Raises:
            UnsupportedSchema: This type does not enforce one of the keywords.
        """
        return None

    @classmethod
    def from_values(cls, values: list[Any]) -> Tree | None:
        """Turn the values of `enum` or `const` into the keys of an attribute.

        Returns:
            The keys, among them `type`, or None if the values are not of this type.
        """
        return None

    def json_schema(self) -> Tree:
        """Return the JSON Schema of a value that is not null; its `type` is a single one."""
        return {"type": "string"}

    # --------------------------------------------------------------------
    # prompts

    def hint(self) -> str:
        """Return the text that a prompt adds to the description.

        It names no possible answer, because a small model would copy it.
        """
        return ""

    def list_hint(self, limit: str) -> str:
        """Return the text that a prompt adds to the description of a list.

        Args:
            limit: The list's limit in words, such as " of 3 at most".
        """
        parts = [self.hint(), f"a JSON list{limit}, in brackets"]
        return "; ".join(filter(None, parts))

    def column_hint(self) -> str:
        """Return what a prompt says about a column of rows with such values."""
        return self.hint() or "text"

    # --------------------------------------------------------------------
    # decoding

    def automaton(self, bare: bool = False) -> Automaton:
        """Return the automaton of the attribute's slot.

        Args:
            bare: A text has no quotes and ends at a newline.

        Raises:
            ValueError: The attribute's pattern cannot be decoded.
        """
        return OrNull(self.table(), self.attribute.nullable)

    def table(self) -> TransitionTable:
        """Return the automaton of a value in a list or an object; Raises is that of `automaton`."""
        raise NotImplementedError

    def expression(self) -> str:
        """Return the expression of a value's JSON, for servers that decode whole answers."""
        raise NotImplementedError

    # --------------------------------------------------------------------
    # reading

    def check(self, text: str, closed: bool = True, bare: bool = False) -> CheckedValue:
        """Read a decoded text and check the value.

        Args:
            text: The text that was decoded for the attribute.
            closed: Whether the value is complete; otherwise it was cut.
            bare: A text has no quotes and ends at a newline.

        Returns:
            The value, with status `invalid` if it does not fit the attribute.
        """
        checked = self.read(text, closed, bare)
        is_unchecked = checked.value is None or checked.status == "truncated"
        if is_unchecked or self.fits(checked.value):
            return checked
        return CheckedValue("invalid", None, text)

    def check_cell(self, text: str) -> CheckedValue:
        """Read a cell of a table, whose texts have no quotes, and check the value."""
        return self.check(dumps(text))

    def read(self, text: str, closed: bool, bare: bool = False) -> CheckedValue:
        """Read a decoded text without checking bounds; the Args are those of `check`."""
        value, status = read_scalar(text, closed)
        if status == "invalid":
            return CheckedValue("invalid", None, text)
        if value is None or (isinstance(value, str) and self.says_null(value.strip())):
            return CheckedValue("null", None, text)
        return self.read_value(value, status, text)

    def read_value(self, value: object, status: Status, text: str) -> CheckedValue:
        """Read a JSON scalar that is not null.

        Args:
            value: The scalar.
            status: Whether it is ok, truncated or invalid.
            text: The decoded text.
        """
        if status == "truncated":
            # A part of the value would be a different value.
            return CheckedValue("truncated", None, text)
        converted = self.convert(as_text(value).strip())
        if converted is None:
            return CheckedValue("invalid", None, text)
        return CheckedValue(status, converted, text)

    def says_null(self, word: str) -> bool:
        """Return whether a text means null."""
        return word.casefold() in NULLS

    def convert(self, word: str) -> Any:
        """Return a text without blanks at its ends as a value of the type, or None if it is not
        one.
        """
        return word

    # --------------------------------------------------------------------
    # validation

    def fits(self, value: Any) -> bool:
        """Return whether a JSON value is of the type and within the attribute's bounds; null is
        not.
        """
        raise NotImplementedError

    # --------------------------------------------------------------------
    # storage

    def arrow_type(self) -> pa.DataType:
        """Return the Arrow type of a column of such values."""
        import pyarrow as pa

        return pa.string()

    def to_arrow(self, value: Any) -> Any:
        """Return a JSON value, or None, in the form that pyarrow takes."""
        return None if value is None else self.stored(value)

    def stored(self, value: Any) -> Any:
        """Return a JSON value that is not null in the form that pyarrow takes."""
        return value

    def in_record(self, value: Any) -> Any:
        """Return a value that is not null in the form that the column `record` shows."""
        return value

    # --------------------------------------------------------------------
    # training

    @property
    def title(self) -> str:
        """The type's name in messages."""
        return self.name

    def arranged(self, value: Any) -> Any:
        """Return a label with its keys in the order in which they are decoded."""
        return value

    def null_text(self, bare: bool) -> str:
        """Return the decoded form of a label without a value."""
        return " null\n"

    def label_text(self, value: Any, bare: bool = False) -> str:
        """Write a label as it is decoded: after its key, up to the closing quote or newline.

        Args:
            value: The label, which is not null.
            bare: Whether texts have no quotes.

        Raises:
            LabelError: The label is not a value of the attribute.
        """
        value = self.arranged(value)
        text = dumps(value)
        if self.check(text) != CheckedValue("ok", value, text) or self.cannot_write(text):
            raise LabelError(f"a label is not a valid {self.title}")
        return f" {text}{self.label_end}"

    def cannot_write(self, text: str) -> bool:
        """Return whether a label's JSON contains something that the automaton never writes."""
        return False
