"""What is asked of a document: attributes and the types of their values."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.schema import patterns as patterns
    from raypd.schema.attribute import Attribute as Attribute
    from raypd.schema.mentions import find_number as find_number
    from raypd.schema.misread import (
        asks_for_multiples as asks_for_multiples,
        is_misread as is_misread,
        lacks_multiplier as lacks_multiplier,
    )
    from raypd.schema.names import bare as bare
    from raypd.schema.numbers import read_number as read_number
    from raypd.schema.patterns import (
        LengthBounds as LengthBounds,
        Node as Node,
        UnsupportedPattern as UnsupportedPattern,
        match_tree as match_tree,
        pattern_widths as pattern_widths,
        search_tree as search_tree,
        simplified as simplified,
    )
    from raypd.schema.ranges import (
        asks_for_an_end as asks_for_an_end,
        is_end_of_range as is_end_of_range,
    )
    from raypd.schema.reading import (
        BARE_VALUE as BARE_VALUE,
        DASHES as DASHES,
        STRING_BODY as STRING_BODY,
        CheckedValue as CheckedValue,
        Status as Status,
        dumps as dumps,
        string_end as string_end,
        structure_end as structure_end,
    )
    from raypd.schema.record import record_pattern as record_pattern, record_schema as record_schema
    from raypd.schema.section import Section as Section
    from raypd.schema.separate_process import Unfinished as Unfinished, run_apart as run_apart
    from raypd.schema.slots import pattern_automaton as pattern_automaton
    from raypd.schema.types import (
        TYPES as TYPES,
        LabelError as LabelError,
        ListType as ListType,
        UnsupportedSchema as UnsupportedSchema,
    )
    from raypd.schema.types.date import FORMATS as FORMATS
    from raypd.schema.types.number import NumberType as NumberType, bounds as bounds
    from raypd.schema.types.text import JSON_STRING as JSON_STRING

__getattr__ = LazyExports(
    __name__,
    {
        "attribute": ("Attribute",),
        "names": ("bare",),
        "numbers": ("read_number",),
        "patterns": (
            "LengthBounds",
            "Node",
            "UnsupportedPattern",
            "match_tree",
            "pattern_widths",
            "search_tree",
            "simplified",
        ),
        "mentions": ("find_number",),
        "misread": ("asks_for_multiples", "is_misread", "lacks_multiplier"),
        "ranges": ("asks_for_an_end", "is_end_of_range"),
        "reading": (
            "BARE_VALUE",
            "CheckedValue",
            "DASHES",
            "STRING_BODY",
            "Status",
            "dumps",
            "string_end",
            "structure_end",
        ),
        "record": ("record_pattern", "record_schema"),
        "section": ("Section",),
        "separate_process": ("Unfinished", "run_apart"),
        "slots": ("pattern_automaton",),
        "types": ("LabelError", "ListType", "TYPES", "UnsupportedSchema"),
        "types.date": ("FORMATS",),
        "types.number": ("NumberType", "bounds"),
        "types.text": ("JSON_STRING",),
    },
    modules=("patterns",),
)
