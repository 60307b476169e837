"""What is asked of a document: attributes and the types of their values."""

from raypd.schema.attribute import Attribute
from raypd.schema.names import bare
from raypd.schema.record import record_pattern, record_schema
from raypd.schema.section import Section
from raypd.schema.types import TYPES, LabelError, UnsupportedSchema, ValueType
from raypd.schema.types.date import FORMATS

__all__ = [
    "FORMATS",
    "TYPES",
    "Attribute",
    "LabelError",
    "Section",
    "UnsupportedSchema",
    "ValueType",
    "bare",
    "record_pattern",
    "record_schema",
]
