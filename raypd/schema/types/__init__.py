"""The types of values, by their names in a configuration.

To add a type, write a `ValueType` in a file of this folder, import it here and add its line to
`TYPES`. docs/architecture.md (An attribute type) has the steps.
"""

from raypd.schema.types.base import LabelError, UnsupportedSchema, ValueType
from raypd.schema.types.boolean import BooleanType
from raypd.schema.types.date import DateTimeType, DateType, TimeType
from raypd.schema.types.enum import EnumType
from raypd.schema.types.integer import IntegerType
from raypd.schema.types.list import ListType
from raypd.schema.types.number import NumberType
from raypd.schema.types.pattern import PatternType
from raypd.schema.types.rows import RowType
from raypd.schema.types.text import TextType

__all__ = ["TYPES", "LabelError", "ListType", "UnsupportedSchema", "ValueType"]

# The last type that accepts a JSON Schema gets it, so text, which takes any string, comes first.
TYPES: dict[str, type[ValueType]] = {
    value_type.name: value_type
    for value_type in (
        TextType,
        NumberType,
        IntegerType,
        BooleanType,
        EnumType,
        DateType,
        TimeType,
        DateTimeType,
        PatternType,
        RowType,
    )
}
