"""Answers to JSON Schemas: what an expression permits is valid by jsonschema, whatever is drawn."""

import json
import random
from typing import Any

import jsonschema
import pytest

from raypd.schema.pattern_table import table_of
from raypd.tasks.json_schema import expression, mismatch

_DRAWS = 60
TEXT = {"type": "string", "maxLength": 5}
INTEGER = {"type": "integer"}
CAT = {"properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]}
DOG = {"properties": {"kind": {"const": "dog"}, "breed": TEXT}, "required": ["kind"]}


def of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def string(**keywords: Any) -> dict[str, Any]:
    return of("a", a={"type": "string", **keywords})


SCHEMAS = {
    "any value": of("note", note={}),
    "any object": {"type": "object"},
    "no member": {"type": "object", "additionalProperties": False},
    "a map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "required without a schema": {"type": "object", "required": ["x"]},
    "optional members": of(
        a={"const": 1},
        b={"const": 2},
        c={"const": 3},
    ),
    "one required member": of(
        "b",
        a={"const": 1},
        b={"const": 2},
        c={"const": 3},
    ),
    "allOf": {"type": "object", "allOf": [of("a", a=TEXT), of("b", b=INTEGER)]},
    "allOf beside properties": {**of("a", a=TEXT), "allOf": [of("b", b=INTEGER)]},
    "allOf of one member twice": {
        **of("a", a={"type": "string"}),
        "allOf": [of(a={"minLength": 2}), of(a={"maxLength": 3})],
    },
    "allOf forbids": {
        "type": "object",
        "allOf": [of(a=INTEGER, b=INTEGER), {**of(a=INTEGER), "additionalProperties": False}],
    },
    "anyOf beside properties": {
        **of(a=TEXT, b=TEXT),
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "anyOf and anyOf": of(
        "a",
        a={
            "allOf": [
                {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
            ]
        },
    ),
    "oneOf by a constant": of("pet", pet={"type": "object", "oneOf": [CAT, DOG]}),
    "oneOf by what stands beside it": {
        **of(a=TEXT, b=TEXT),
        "additionalProperties": False,
        "oneOf": [
            {"required": ["a"], "properties": {"b": False}},
            {"required": ["b"], "properties": {"a": False}},
        ],
    },
    "$ref beside keywords": {
        **of("a", a={"$ref": "#/$defs/text", "maxLength": 4}),
        "$defs": {
            "text": {
                "type": "string",
                "minLength": 2,
                "maxLength": 9,
            }
        },
    },
    "percent-encoded $ref": {
        **of("a", a={"$ref": "#/$defs/Maker%20Info/oneOf/1"}),
        "$defs": {"Maker Info": {"oneOf": [INTEGER, {"enum": ["x", "y"]}]}},
    },
    "pattern": string(pattern="^SKU-"),
    "pattern in the middle": string(pattern="[A-Z]{2}"),
    "patterns with anchors": string(pattern="^S$|^M$"),
    "pattern of anything but": string(pattern="^[^/]{1,12}$"),
    "pattern of signs that JSON escapes": string(pattern=r'^["\\\n] "[!-#]\\$'),
    "pattern of no space": string(pattern=r"^\S+@\S+$"),
    "pattern with lengths": string(pattern="^[A-Z]+$", minLength=2, maxLength=4),
    "pattern in parts with lengths": string(pattern="^[a-z]+-[0-9]*$", minLength=4, maxLength=6),
    "pattern somewhere with lengths": string(pattern="[A-Z]{2}", minLength=3, maxLength=5),
    "lengths": string(minLength=2, maxLength=4),
    "least length": string(minLength=3),
    "formats": of(
        "a",
        "b",
        a={"type": "string", "format": "date"},
        b={"format": "ipv4"},
    ),
    "email": string(format="email"),
    "uuid": string(format="uuid"),
    "keys that JSON escapes": of(
        '"',
        "a\\b",
        **{
            '"': INTEGER,
            "a\\b": INTEGER,
            "ü\n": INTEGER,
        },
    ),
    "values that JSON escapes": of(
        "a",
        a={
            "enum": [
                '"',
                "\\.",
                "ü",
                None,
                1.5,
                [1],
                {"b": 2},
            ]
        },
    ),
    "enum beside keywords": of(
        "a",
        a={
            "enum": ["x", "yy", 7, 70],
            "maxLength": 1,
            "maximum": 9,
        },
    ),
    "enum and const": of("a", a={"anyOf": [{"enum": ["x", "y"]}, {"const": "z"}]}),
    "lists": of(
        "a",
        a={
            "type": "array",
            "items": INTEGER,
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "an empty list": of("a", a={"type": "array", "items": False}),
    "lists of any length": of(
        "a",
        a={
            "type": "array",
            "minItems": 2,
            "items": {"const": 1},
        },
    ),
    "tuples": of("a", a={"prefixItems": [TEXT, {"const": 1}], "items": {"const": 2}}),
    "tuples without more": of("a", a={"prefixItems": [{"const": 1}], "items": False}),
    "several types": of("a", a={"type": ["integer", "boolean", "null"]}),
    "keywords that say nothing": of(
        "a",
        a={
            "type": "array",
            "items": INTEGER,
            "uniqueItems": False,
            "contains": {},
        },
    )
    | {
        "minProperties": 0,
        "patternProperties": {},
        "if": {"required": ["b"]},
    },
}
SCHEMAS["keywords that say nothing"]["properties"]["a"]["minContains"] = 0


def drawn(schema: dict[str, Any], draw: random.Random) -> str:
    """A text that the schema's expression permits, over the bytes of its automaton."""
    table, finals = table_of(expression(json.dumps(schema)))
    distances = distances_to_end(table, finals)
    state = 0
    text = ""
    while True:
        row = table[state]
        is_long = len(text) > 40
        if state in finals and (not row or is_long or draw.random() < 0.2):
            return text.encode("latin-1").decode()
        chars = sorted(row)
        if is_long:
            chars = [min(chars, key=lambda char: distances[row[char]])]
        # Signs of JSON as often as the many letters.
        signs = [char for char in chars if char in '"\\{}[],:0/']
        char = draw.choice(signs if signs and draw.random() < 0.5 else chars)
        state = row[char]
        text += char


def distances_to_end(table: list[dict[str, int]], finals: list[int]) -> list[int]:
    distances = [10**9] * len(table)
    for state in finals:
        distances[state] = 0
    changed = True
    while changed:
        changed = False
        for state, row in enumerate(table):
            nearest = min((distances[after] + 1 for after in row.values()), default=10**9)
            if nearest < distances[state]:
                distances[state] = nearest
                changed = True
    return distances


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    draw = random.Random(name)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for _ in range(_DRAWS):
        text = drawn(schema, draw)
        validator.validate(json.loads(text))
        assert mismatch(text, json.dumps(schema)) is None


REACHED = [  # of a schema, the values that draws reach
    ("enum beside keywords", "a", {"x", 7}),
    ("enum and const", "a", {"x", "y", "z"}),
    ("patterns with anchors", "a", {"S", "M"}),
    ("anyOf and anyOf", "a", None),
    ("percent-encoded $ref", "a", {"x", "y"}),
]


@pytest.mark.parametrize(("name", "key", "values"), REACHED)
def test_every_value_can_be_drawn(name: str, key: str, values: set[Any] | None) -> None:
    draw = random.Random(0)
    reached = {json.loads(drawn(SCHEMAS[name], draw))[key] for _ in range(_DRAWS)}
    if values is None:
        assert {type(value) for value in reached} == {int}
    else:
        assert reached == values


def test_optional_members_come_in_every_combination() -> None:
    draw = random.Random(1)
    texts = {drawn(SCHEMAS["optional members"], draw).replace(" ", "") for _ in range(400)}
    assert len(texts) == 8


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (of(a={"minimum": 3}), "minimum cannot be enforced"),
        (of(a={"not": {"const": 1}}), "not cannot be enforced"),
        (of(a={"uniqueItems": True}), "uniqueItems cannot be enforced"),
        (of(a={"$ref": "#/$defs/b"}), r"\$ref: #/\$defs/b is not in the schema"),
        (of(a={"$ref": "#"}), "# contains itself"),
        (of(a={"oneOf": [TEXT, {"type": "string"}]}), "oneOf: a value may be valid under two"),
        (of(a={"oneOf": [{"type": "number"}, INTEGER]}), "oneOf: a value may be valid under two"),
        (string(pattern="(?=a)b"), "pattern '.*': look-around cannot be decoded"),
        (string(pattern="^2", format="date"), "pattern beside format date"),
        (of(a={"allOf": [{"pattern": "a"}, {"pattern": "b"}]}), "pattern: two different ones"),
        (
            string(pattern="^(a|bb)+$", maxLength=3),
            "pattern '.*': minLength and maxLength beside",
        ),
        (string(minLength=3, maxLength=2) | {"required": ["a"]}, "no value is valid under it"),
        (of("a", a=False), "no value is valid under it"),
        (of("a", a={"enum": ["x"], "type": "integer"}), "no value is valid under it"),
        (of(a={"type": "foo"}), r"\$\.properties\.a\.type: 'foo'"),
        (of(a={"type": "string", "pattern": "["}), "is not a .regex."),
    ],
)
def test_what_is_not_enforced_is_rejected_by_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expression(json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1}', None),
        ('{"a": "1"}', "$.a: '1' is not of type 'integer'"),
        ("{}", "$: 'a' is a required property"),
        ('{"a": 1', "it is not JSON"),
    ],
)
def test_a_finished_answer_is_checked(text: str, reason: str | None) -> None:
    found = mismatch(text, json.dumps(of("a", a=INTEGER)))
    assert found == reason or (reason is not None and str(found).startswith(reason))


def test_the_check_ends_on_a_pattern_that_holds_re_up() -> None:
    schema = json.dumps(string(pattern="^(a+)+$"))
    assert mismatch(json.dumps({"a": "a" * 5000 + "!"}), schema) is not None
