"""JSON Schema: its keywords, its references, and the merging of several schemas into one."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import jsonschema
import regex
from jsonschema.protocols import Validator
from referencing import Registry

Tree = dict[str, Any]
UNSUPPORTED_KEYWORDS = frozenset(
    {
        "multipleOf",
        "uniqueItems",
        "contains",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "not",
        "if",
        "patternProperties",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "minProperties",
        "maxProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_NEUTRAL_VALUES: dict[str, list[Any]] = {
    "uniqueItems": [False],
    "additionalItems": [True, {}],
    "unevaluatedItems": [True, {}],
    "not": [False],
    "patternProperties": [{}],
    "propertyNames": [True, {}],
    "dependencies": [{}],
    "dependentRequired": [{}],
    "dependentSchemas": [{}],
    "minProperties": [0],
    "prefixItems": [[]],
}
_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
# If two schemas differ in one of these, the outer one wins, because they restrict no value.
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
    }
)
_PATTERN_SECONDS = 1.0


class Conflict(ValueError):
    """Two schemas apply together and no single schema can express both; names the keyword."""

    def __init__(self, keyword: str) -> None:
        super().__init__(f"{keyword}: two different ones at once cannot be decoded")
        self.keyword = keyword


def says_nothing(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether a keyword of a schema permits every value, such as `uniqueItems: false`."""
    value = schema[keyword]
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if keyword == "multipleOf":
        return value == 1 and schema.get("type") == "integer"
    # JSON distinguishes a truth value from a number, but Python's == does not.
    return any(
        type(value) is type(neutral) and value == neutral
        for neutral in _NEUTRAL_VALUES.get(keyword, [])
    )


def unsupported_keyword(
    schema: Mapping[str, Any], unsupported: frozenset[str] = UNSUPPORTED_KEYWORDS
) -> str | None:
    """Return the first keyword of a schema that restricts values and is not enforced, or None."""
    for keyword in sorted(unsupported & schema.keys()):
        if not says_nothing(schema, keyword):
            return keyword
    return None


def referred(root: Any, ref: str) -> Any:
    """Return what a `$ref` points to inside a schema, or None.

    A reference is a JSON pointer as a URI fragment: percent-encoded, `~1` for a slash, `~0` for a
    tilde, numbers for the items of a list.
    """
    if not ref.startswith("#"):
        return None
    pointer = unquote(ref[1:])
    if not pointer:
        return root
    if not pointer.startswith("/"):
        return None
    target = root
    for part in pointer[1:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target


def conjunction(inner: Tree, outer: Tree) -> Tree:
    """Return the schema of values that are valid under both of two schemas.

    Neither schema contains `$ref`, `allOf`, `anyOf` or `oneOf`, except inside its properties and
    items, where the result may contain `allOf`.

    Raises:
        Conflict: Both have a keyword, such as `pattern`, whose values cannot be combined.
    """
    result = dict(inner)
    properties = _both_properties(inner, outer)
    for keyword, value in outer.items():
        if keyword not in inner or keyword in _ANNOTATIONS or _same(inner[keyword], value):
            result[keyword] = value
        elif keyword != "properties":
            result[keyword] = _both_values(keyword, inner[keyword], value)
    if properties is not None:
        result["properties"] = properties
    return result


def _both_properties(inner: Tree, outer: Tree) -> Tree | None:
    if "properties" not in inner and "properties" not in outer:
        return None
    inner_properties = inner.get("properties", {})
    outer_properties = outer.get("properties", {})
    both: Tree = {}
    for name in dict.fromkeys([*inner_properties, *outer_properties]):
        parts: list[Any] = []
        for schema, properties in ((inner, inner_properties), (outer, outer_properties)):
            part = properties.get(name, schema.get("additionalProperties", True))
            if part is not True and part not in parts:
                parts.append(part)
        if not parts:
            both[name] = True
        elif len(parts) == 1:
            both[name] = parts[0]
        elif False in parts:
            both[name] = False
        else:
            both[name] = {"allOf": parts}
    return both


def _both_values(keyword: str, inner: Any, outer: Any) -> Any:
    is_number = not isinstance(inner, bool) and not isinstance(outer, bool)
    if keyword in _LARGER | _SMALLER and (inner is None or outer is None):
        return outer if inner is None else inner
    if keyword in _LARGER and is_number:
        return max(inner, outer)
    if keyword in _SMALLER and is_number:
        return min(inner, outer)
    if keyword == "required":
        return list(dict.fromkeys([*inner, *outer]))
    if keyword == "enum":
        return [value for value in inner if any(_same(value, other) for other in outer)]
    if keyword == "type":
        return _both_types(inner, outer)
    if keyword == "items" or keyword == "additionalProperties":
        return _both_schemas(inner, outer)
    if keyword == "uniqueItems":
        return inner or outer
    if keyword == "nullable":
        return inner and outer
    raise Conflict(keyword)


def _both_schemas(inner: Any, outer: Any) -> Any:
    if inner is False or outer is False:
        return False
    if inner is True:
        return outer
    if outer is True:
        return inner
    return {"allOf": [inner, outer]}


def _both_types(inner: Any, outer: Any) -> Any:
    inner_types = types_of({"type": inner})
    outer_types = types_of({"type": outer})
    both = [kind for kind in inner_types if kind in outer_types]
    for kinds, others in ((inner_types, outer_types), (outer_types, inner_types)):
        if "integer" in kinds and "number" in others and "integer" not in both:
            both.append("integer")
    if not both:
        raise Conflict("type")
    return both[0] if len(both) == 1 else both


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names; an empty list if it names none."""
    types = schema.get("type")
    if types is None:
        return []
    return list(types) if isinstance(types, list) else [types]


def _same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not a number."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def permitted_values(schema: Tree) -> list[Any] | None:
    """Return the values of `enum` and `const` that the other keywords permit; None for any
    value.
    """
    if "enum" in schema:
        values = list(schema["enum"])
        listing = "enum"
    elif "const" in schema:
        values = [schema["const"]]
        listing = "const"
    else:
        return None
    beside = {key: value for key, value in schema.items() if key not in (listing, "format")}
    check = validator(beside)
    return [value for value in values if check.is_valid(value)]


def validator(schema: Any) -> Validator:
    """Return a jsonschema validator that fetches nothing and terminates on every pattern.

    It checks only the formats that the decoder enforces: date, uuid, ipv4 and email.
    """
    version = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    bounded = jsonschema.validators.extend(version, {"pattern": _check_pattern})
    formats = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])
    return bounded(schema, registry=Registry(), format_checker=formats)


def _check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Any:
    if not isinstance(value, str):
        return
    try:
        is_found = regex.search(pattern, value, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError:
        is_found = False
    if not is_found:
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")
