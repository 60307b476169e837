"""Writes a JSON Schema as one regular expression, and checks finished answers against it.

Decoding restricts an answer to the expression. Every text that it matches is valid under the
schema, but not every valid text matches it: an object has only members that the schema names, and a
value without a type is not deeply nested. A schema with a keyword that an expression cannot enforce
is rejected.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema
from referencing.exceptions import Unresolvable

from raypd.config import (
    DEEPEST,
    MOST_PROPERTIES,
    UNSUPPORTED_KEYWORDS,
    Conflict,
    Tree,
    conjunction,
    permitted_values,
    referred,
    types_of,
    unsupported_keyword,
    validator,
)
from raypd.schema import (
    FORMATS,
    LengthBounds,
    Node,
    UnsupportedPattern,
    match_tree,
    patterns,
    search_tree,
    simplified,
)

# The maximum length of an expression. A longer one takes more than a few seconds to compile.
_MAX_LENGTH = 1 << 20
# The maximum number of combinations of anyOf and oneOf, one of which is decoded.
_MAX_BRANCHES = 64
_UNSUPPORTED = UNSUPPORTED_KEYWORDS - {"prefixItems"}
_TOO_LARGE = "its pattern takes too long to compile"
_TOO_NESTED = (
    f"more than {MOST_PROPERTIES:,} schemas with those it refers to, or nested more than {DEEPEST} "
    "deep"
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords that imply the type of a value in a schema without `type`.
_TYPE_OF_KEYWORD = {
    "properties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "pattern": "string",
    "format": "string",
    "minLength": "string",
    "maxLength": "string",
}
_COLON = ": ?"
_COMMA = ", ?"
_CHARACTER = r'([^"\\\x00-\x1f]|\\["\\/bfnrt])'
# It avoids an alternative under a star, which would take xgrammar milliseconds per token.
_STRING = r'"[^"\\\x00-\x1f]*(\\(["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
# No number that it matches is so large that a parser reads it as infinite.
_NUMBER = _INTEGER + r"(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"
_SCALAR = f"({_STRING}|{_NUMBER}|true|false|null)"
_OFFSET = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": FORMATS["date"],
    "date-time": FORMATS["date-time"],
    "time": FORMATS["time"] + _OFFSET,
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}",
}


@lru_cache(128)
def expression(schema_text: str) -> str:
    """Return the regular expression of JSON texts that are valid under a schema.

    Args:
        schema_text: The schema, as JSON.

    Returns:
        An expression that matches a whole answer.

    Raises:
        ValueError: The schema is not valid, is too large, permits nothing, or has a keyword that an
            expression cannot enforce; the message names it.
    """
    schema = json.loads(schema_text)
    validator_class = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    try:
        validator_class.check_schema(schema)
        expression = _Expressions(schema).of(schema, (), 0)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{error.json_path}: {error.message:.200}") from None
    except RecursionError:
        raise ValueError(_TOO_NESTED) from None
    if expression is None:
        raise ValueError("no value is valid under it")
    return expression


def mismatch(text: str, schema_text: str | None) -> str | None:
    """Return why a finished answer is not valid under a schema; None if it is.

    Args:
        text: The answer.
        schema_text: The schema, as JSON; None permits any object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"it is not JSON: {error}"
    except RecursionError:
        return "it is nested too deeply"
    if schema_text is None:
        if isinstance(value, dict):
            return None
        return "it is not a JSON object"
    try:
        errors = _validator(schema_text).iter_errors(value)
        mismatch_error = jsonschema.exceptions.best_match(errors)
    except RecursionError:
        return "it is nested too deeply"
    if mismatch_error is None:
        return None
    return f"{mismatch_error.json_path}: {mismatch_error.message:.200}"


@lru_cache(128)
def _validator(schema_text: str) -> Any:
    return validator(json.loads(schema_text))


class _Branch(NamedTuple):
    """A schema without references and combinations.

    Attributes:
        schema: The schema.
        references: The references that led to it, none of which may recur inside it.
    """

    schema: Tree
    references: tuple[str, ...]


class _Expressions:
    """Writes the expressions of the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._schemas = 0
        # Each part gets the definitions, because jsonschema resolves references only within the
        # part.
        self._definitions: Tree = {}
        if isinstance(root, dict):
            names = ("$defs", "definitions", "$schema")
            self._definitions = {name: root[name] for name in names if name in root}

    def of(self, schema: Any, within: tuple[str, ...], depth: int) -> str | None:
        """Return the expression of a schema's values; None if no value is valid.

        Args:
            schema: The schema.
            within: The references that led here, none of which may recur.
            depth: The number of schemas that it is nested in.
        """
        expressions: list[str] = []
        for branch, references in self._branches(schema, within, depth):
            values = self._permitted(branch)
            if values is not None:
                texts = (json.dumps(value, ensure_ascii=False) for value in values)
                expressions += map(_literal, texts)
                continue
            for kind in _types_written(branch):
                text = self._of_type(kind, branch, references, depth)
                if text is not None:
                    expressions.append(text)
        if not expressions:
            return None
        return _of_size(_either(expressions))

    def _permitted(self, branch: Tree) -> list[Any] | None:
        """Return the values that a branch lists and permits; None if it lists none."""
        try:
            return permitted_values({**self._definitions, **branch})
        except Unresolvable as error:
            raise ValueError(f"enum beside $ref cannot be decoded: {error}") from None

    def _branches(self, schema: Any, within: tuple[str, ...], depth: int) -> list[_Branch]:
        """Return schemas without references and combinations, such that a value is valid under one.

        Each is returned with the references that led to it. The arguments are those of `of`.
        """
        self._schemas += 1
        if self._schemas > MOST_PROPERTIES or depth > DEEPEST:
            raise ValueError(_TOO_NESTED)
        if schema is True:
            return [_Branch({}, within)]
        if schema is False:
            return []
        keyword = unsupported_keyword(schema, _UNSUPPORTED)
        if keyword:
            raise ValueError(f"{keyword} cannot be enforced; remove it")
        combining = ("$ref", "allOf", "anyOf", "oneOf", "nullable")
        flat = {key: value for key, value in schema.items() if key not in combining}
        branches = [_Branch(flat, within)]
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in within:
                raise ValueError(f"{ref} contains itself: a recursive schema cannot be decoded")
            target = referred(self._root, ref)
            if target is None:
                raise ValueError(f"$ref: {ref} is not in the schema")
            branches = _both(branches, self._branches(target, (*within, ref), depth + 1))
        for part in schema.get("allOf", []):
            branches = _both(branches, self._branches(part, within, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            options = [self._branches(part, within, depth + 1) for part in schema[keyword]]
            # Keywords next to the options may make them exclusive.
            combined = [_both(branches, option) for option in options]
            if keyword == "oneOf":
                self._check_exclusive(combined, depth)
            branches = [branch for option in combined for branch in option]
        if len(branches) > _MAX_BRANCHES:
            raise ValueError(f"anyOf and oneOf: more than {_MAX_BRANCHES} combinations")
        return branches

    def _check_exclusive(self, options: Sequence[list[_Branch]], depth: int) -> None:
        """Raise ValueError if a value of one option of oneOf may be valid under another."""
        for number, option in enumerate(options):
            later_branches = [branch for later in options[number + 1 :] for branch in later]
            for branch in option:
                for other in later_branches:
                    forward = self._excludes(branch, other, depth)
                    backward = self._excludes(other, branch, depth)
                    if not (forward and backward):
                        raise ValueError(
                            "oneOf: a value may be valid under two of its schemas; write anyOf, or "
                            "tell them apart by a required constant"
                        )

    def _excludes(self, branch: _Branch, other: _Branch, depth: int) -> bool:
        """Return whether every value that is decoded for a branch is invalid under another."""
        values = self._permitted(branch.schema)
        if values is not None:
            check = validator({**self._definitions, **other.schema})
            return not any(check.is_valid(value) for value in values)
        kinds = set(_types_written(branch.schema))
        other_values = self._permitted(other.schema)
        if other_values is not None:
            other_kinds = set(map(_type_of_value, other_values))
        else:
            other_kinds = set(types_of(other.schema) or _TYPES)
        if not _with_numbers(kinds) & _with_numbers(other_kinds):
            return True
        if kinds != {"object"} or "properties" not in branch.schema:
            return False
        return self._excludes_objects(branch, other, depth)

    def _excludes_objects(self, branch: _Branch, other: _Branch, depth: int) -> bool:
        """Do the same as `_excludes` for a branch whose values are objects."""
        members = self._members(branch.schema)
        other_members = self._members(other.schema)
        if any(name not in members for name in other.schema.get("required", [])):
            return True
        for name in branch.schema.get("required", []):
            if name not in other_members:
                if other.schema.get("additionalProperties") is False:
                    return True
                continue
            options = self._branches(members[name], branch.references, depth + 1)
            other_options = self._branches(other_members[name], other.references, depth + 1)
            pairs = itertools.product(options, other_options)
            if all(self._excludes(first, second, depth + 1) for first, second in pairs):
                return True
        return False

    def _members(self, branch: Tree) -> dict[str, Any]:
        """Return the schemas of an object's members by name, including those only in `required`."""
        members = dict(branch.get("properties", {}))
        for name in branch.get("required", []):
            members.setdefault(name, branch.get("additionalProperties", True))
        return members

    def _of_type(self, kind: str, branch: Tree, within: tuple[str, ...], depth: int) -> str | None:
        if kind == "null":
            return "null"
        if kind == "boolean":
            return "(true|false)"
        if kind in ("integer", "number"):
            for keyword in _BOUNDS:
                if branch.get(keyword) is not None:
                    raise ValueError(f"{keyword} cannot be enforced; remove it")
            return _INTEGER if kind == "integer" else _NUMBER
        if kind == "string":
            return _string(branch)
        if kind == "array":
            return self._array(branch, within, depth)
        return self._object(branch, within, depth)

    def _array(self, branch: Tree, within: tuple[str, ...], depth: int) -> str | None:
        min_items = int(branch.get("minItems", 0))
        max_items = branch.get("maxItems")
        first_items: list[str] = []
        for part in branch.get("prefixItems", [])[:max_items]:
            item = self.of(part, within, depth + 1)
            if item is None:
                max_items = len(first_items)
                break
            first_items.append(item)
        further = self._inner(branch.get("items", True), within, depth)
        if further is None:
            # There can be no item after the first ones.
            max_items = len(first_items) if max_items is None else min(len(first_items), max_items)
        if max_items is not None and max_items < min_items:
            return None
        min_further = max(0, min_items - len(first_items))
        max_further = None if max_items is None else int(max_items) - len(first_items)
        items = _COMMA.join(first_items)
        if further is None or max_further == 0:
            return rf"\[{items}\]"
        if first_items:
            return rf"\[{items}({_COMMA}{further}){_times(min_further, max_further)}\]"
        max_after_first = None if max_further is None else max_further - 1
        listed = f"{further}({_COMMA}{further}){_times(max(0, min_further - 1), max_after_first)}"
        return rf"\[{listed}\]" if min_further else rf"\[({listed})?\]"

    def _object(self, branch: Tree, within: tuple[str, ...], depth: int) -> str | None:
        required = branch.get("required", [])
        members: list[tuple[str, bool]] = []
        for name, schema in self._members(branch).items():
            value = self._inner(schema, within, depth)
            if value is not None:
                key = _literal(json.dumps(name, ensure_ascii=False))
                members.append((f"{key}{_COLON}{value}", name in required))
            elif name in required:
                return None
        if self._members(branch):
            return rf"\{{{_listed(members)}\}}"
        value = self._inner(branch.get("additionalProperties", True), within, depth)
        if value is None:
            return r"\{\}"
        member = f"{_STRING}{_COLON}{value}"
        return rf"\{{({member}({_COMMA}{member})*)?\}}"

    def _inner(self, schema: Any, within: tuple[str, ...], depth: int) -> str | None:
        """Return the expression of a member or an item; one without a schema is a scalar."""
        if schema is True or schema == {}:
            if depth > 0:
                return _SCALAR
            scalars = rf"\[({_SCALAR}({_COMMA}{_SCALAR})*)?\]"
            return f"({_SCALAR}|{scalars})"
        return self.of(schema, within, depth + 1)


def _types_written(branch: Tree) -> list[str]:
    """Return the types of the values that are decoded for a branch.

    They are the types that it names, or else those that its keywords imply. Numbers include
    integers.
    """
    types = types_of(branch)
    if "number" in types:
        return [kind for kind in types if kind != "integer"]
    if types:
        return list(types)
    meant = {kind for keyword, kind in _TYPE_OF_KEYWORD.items() if keyword in branch}
    if meant:
        return sorted(meant)
    return [kind for kind in _TYPES if kind != "integer"]


def _both(
    branches: Iterable[_Branch],
    others: Iterable[_Branch],
) -> list[_Branch]:
    """Return every pair of branches as one branch, except pairs under which no value is valid."""
    listed = list(others)
    both: dict[str, _Branch] = {}
    for outer, within in branches:
        for inner, inner_within in listed:
            for schema, beside in ((outer, inner), (inner, outer)):
                if "prefixItems" in schema and ("items" in beside or "prefixItems" in beside):
                    raise Conflict("prefixItems")
            try:
                merged = conjunction(outer, inner)
            except Conflict as conflict:
                if conflict.keyword in ("type", "const"):
                    continue
                raise
            references = tuple(dict.fromkeys([*within, *inner_within]))
            both[json.dumps(merged, sort_keys=True)] = _Branch(merged, references)
            if len(both) > _MAX_BRANCHES:
                raise ValueError(f"anyOf and oneOf: more than {_MAX_BRANCHES} combinations")
    return list(both.values())


def _with_numbers(kinds: set[str]) -> set[str]:
    """Return types with numbers instead of integers, because 1.0 is also an integer."""
    return {"number" if kind == "integer" else kind for kind in kinds}


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _string(branch: Tree) -> str | None:
    pattern = branch.get("pattern")
    form = branch.get("format")
    min_length = int(branch.get("minLength", 0))
    max_length = branch.get("maxLength")
    if max_length is not None and max_length < min_length:
        return None
    tree: Node | None = None
    try:
        if form in _FORMATS:
            if pattern is not None:
                raise ValueError(f"pattern beside format {form} cannot be enforced; keep one")
            tree = match_tree(_FORMATS[form])
        elif pattern is not None:
            tree = search_tree(pattern)
        if tree is not None:
            bounded = LengthBounds().bounded(tree, min_length, max_length)
            if bounded is None:
                return None
            return f'"{patterns.written(simplified(bounded), True)}"'
    except UnsupportedPattern as error:
        raise ValueError(f"pattern {pattern!r:.100}: {error}") from None
    if max_length is not None:
        return f'"{_CHARACTER}{_times(min_length, int(max_length))}"'
    if min_length:
        return f'"{_CHARACTER}{_times(min_length, min_length)}{_STRING[1:]}'
    return _STRING


def _listed(members: Sequence[tuple[str, bool]]) -> str:
    """Return the expression of an object's members in their order; some members are optional.

    Args:
        members: The expression of each member, and whether it is required.
    """
    # Commas depend on whether a member comes before. The loop goes backwards and keeps two
    # expressions of the members so far: after another member, and at the beginning of the object.
    behind = ""
    first = ""
    for member, is_required in reversed(members):
        if is_required:
            first = f"{member}{behind}"
            behind = f"{_COMMA}{member}{behind}"
        else:
            first = f"({member}{behind}|{first})"
            behind = f"({_COMMA}{member})?{behind}"
        _of_size(first)
    return first


def _of_size(text: str) -> str:
    """Return an expression unchanged; raise ValueError if it is too long."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(_TOO_LARGE)
    return text


def _either(expressions: Sequence[str]) -> str:
    """Return an expression that matches whatever one of several expressions matches."""
    options = list(dict.fromkeys(expressions))
    if len(options) == 1:
        return options[0]
    return f"({'|'.join(options)})"


def _times(minimum: int, maximum: int | None) -> str:
    """Return the repetition of an expression; None means any number."""
    if maximum is None:
        return f"{{{minimum},}}"
    return f"{{{minimum},{maximum}}}"


def _literal(text: str) -> str:
    """Return the expression that matches only this text."""
    return "".join("\\" + char if char in r"\.^$*+?()[]{}|" else char for char in text)
