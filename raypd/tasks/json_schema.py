"""A JSON Schema as one regular expression, that an answer is held to while it is decoded, and the
check of a finished answer.

Every text that the expression matches is valid under the schema. The reverse does not hold: an
object has no other members than those that are named, and a value without a type is not nested
deeply. What an expression cannot enforce is rejected by its keyword.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

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

_MOST_LETTERS = 1 << 20  # of an expression: a longer one has more states than are ready in seconds
_MOST_BRANCHES = 64
_UNSUPPORTED = UNSUPPORTED_KEYWORDS - {"prefixItems"}
_TOO_LARGE = "its pattern is too large to be ready in a few seconds"
_TOO_NESTED = (
    f"more than {MOST_PROPERTIES:,} schemas with what it refers to, or {DEEPEST} in one another"
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords that say of which type a value without `type` is meant to be.
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
# Unrolled: as an alternative under a star the same language takes xgrammar milliseconds a token.
_STRING = r'"[^"\\\x00-\x1f]*(\\(["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
# No number is so large that a reader takes it as infinite.
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
    try:
        jsonschema.validators.validator_for(
            schema, default=jsonschema.Draft202012Validator
        ).check_schema(schema)
        whole = _Expressions(schema).of(schema, (), 0)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{error.json_path}: {error.message:.200}") from None
    except RecursionError:
        raise ValueError(_TOO_NESTED) from None
    if whole is None:
        raise ValueError("no value is valid under it")
    return whole


def mismatch(text: str, schema_text: str | None) -> str | None:
    """Why a finished answer is not JSON of a schema; None: it is.

    Args:
        text: The answer.
        schema_text: The schema, as JSON; None: any object is right.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"it is not JSON: {error}"
    except RecursionError:
        return "it is nested too deeply"
    if schema_text is None:
        return None if isinstance(value, dict) else "it is not a JSON object"
    try:
        fault = jsonschema.exceptions.best_match(_validator(schema_text).iter_errors(value))
    except RecursionError:
        return "it is nested too deeply"
    return None if fault is None else f"{fault.json_path}: {fault.message:.200}"


@lru_cache(128)
def _validator(schema_text: str) -> Any:
    return validator(json.loads(schema_text))


class _Expressions:
    """Writes the expressions of one schema's parts."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._schemas = 0
        # The references in a part are resolved in the part, when jsonschema checks a value.
        self._definitions: Tree = {}
        if isinstance(root, dict):
            names = ("$defs", "definitions", "$schema")
            self._definitions = {name: root[name] for name in names if name in root}

    def of(self, schema: Any, within: tuple[str, ...], depth: int) -> str | None:
        """The expression of a schema's values; None: no value is valid. within: the references
        that led here, none of which may recur.
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
        """The values that a branch lists, as far as the rest of it permits them."""
        try:
            return permitted_values({**self._definitions, **branch})
        except Unresolvable as error:
            raise ValueError(f"enum beside $ref cannot be decoded: {error}") from None

    def _branches(
        self, schema: Any, within: tuple[str, ...], depth: int
    ) -> list[tuple[Tree, tuple[str, ...]]]:
        """Schemas without references and combinations, of which a value is valid under one; with
        the references that led to each.
        """
        self._schemas += 1
        if self._schemas > MOST_PROPERTIES or depth > DEEPEST:
            raise ValueError(_TOO_NESTED)
        if schema is True:
            return [({}, within)]
        if schema is False:
            return []
        if keyword := unsupported_keyword(schema, _UNSUPPORTED):
            raise ValueError(f"{keyword} would not be held to; take it out")
        combining = ("$ref", "allOf", "anyOf", "oneOf", "nullable")
        flat = {key: value for key, value in schema.items() if key not in combining}
        branches = [(flat, within)]
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in within:
                raise ValueError(f"{ref} holds itself: a schema without an end cannot be decoded")
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
            # What stands beside the options may tell them apart.
            combined = [_both(branches, option) for option in options]
            if keyword == "oneOf":
                self._check_exclusive(combined, depth)
            branches = [branch for option in combined for branch in option]
        if len(branches) > _MOST_BRANCHES:
            raise ValueError(f"anyOf and oneOf: more than {_MOST_BRANCHES} combinations")
        return branches

    def _check_exclusive(
        self, options: Sequence[list[tuple[Tree, tuple[str, ...]]]], depth: int
    ) -> None:
        """Raises ValueError where a value of one option of oneOf may be valid under another."""
        for number, option in enumerate(options):
            others = [branch for other in options[number + 1 :] for branch in other]
            for branch, within in option:
                for other, other_within in others:
                    forward = self._excludes(branch, within, other, other_within, depth)
                    backward = self._excludes(other, other_within, branch, within, depth)
                    if not (forward and backward):
                        raise ValueError(
                            "oneOf: a value may be valid under two of its schemas; write anyOf, or "
                            "tell them apart by a required constant"
                        )

    def _excludes(
        self,
        branch: Tree,
        within: tuple[str, ...],
        other: Tree,
        other_within: tuple[str, ...],
        depth: int,
    ) -> bool:
        """Whether every value that is written for a branch is invalid under another."""
        values = self._permitted(branch)
        if values is not None:
            check = validator({**self._definitions, **other})
            return not any(check.is_valid(value) for value in values)
        kinds = set(_types_written(branch))
        other_values = self._permitted(other)
        other_kinds = set(types_of(other) or _TYPES)
        if other_values is not None:
            other_kinds = set(map(_type_of_value, other_values))
        if not _with_numbers(kinds) & _with_numbers(other_kinds):
            return True
        if kinds != {"object"} or "properties" not in branch:
            return False
        names = set(self._members(branch))
        other_names = self._members(other)
        if any(name not in names for name in other.get("required", [])):
            return True
        for name in branch.get("required", []):
            if name not in other_names:
                if other.get("additionalProperties") is False:
                    return True
                continue
            member = self._branches(self._members(branch)[name], within, depth + 1)
            other_member = self._branches(other_names[name], other_within, depth + 1)
            if all(
                self._excludes(first, references, second, other_references, depth + 1)
                for first, references in member
                for second, other_references in other_member
            ):
                return True
        return False

    def _members(self, branch: Tree) -> dict[str, Any]:
        """The members that an object may have, by name; required ones without a schema, too."""
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
                    raise ValueError(f"{keyword} would not be held to; take it out")
            return _INTEGER if kind == "integer" else _NUMBER
        if kind == "string":
            return _string(branch)
        if kind == "array":
            return self._array(branch, within, depth)
        return self._object(branch, within, depth)

    def _array(self, branch: Tree, within: tuple[str, ...], depth: int) -> str | None:
        fewest = int(branch.get("minItems", 0))
        most = branch.get("maxItems")
        first_items: list[str] = []
        for part in branch.get("prefixItems", [])[:most]:
            item = self.of(part, within, depth + 1)
            if item is None:
                most = len(first_items)
                break
            first_items.append(item)
        further = self._inner(branch.get("items", True), within, depth)
        if further is None:
            most = min(len(first_items), len(first_items) if most is None else most)
        if most is not None and most < fewest:
            return None
        more_fewest = max(0, fewest - len(first_items))
        more_most = None if most is None else int(most) - len(first_items)
        items = _COMMA.join(first_items)
        if further is None or more_most == 0:
            return rf"\[{items}\]"
        if first_items:
            return rf"\[{items}({_COMMA}{further}){_times(more_fewest, more_most)}\]"
        rest_most = None if more_most is None else more_most - 1
        listed = f"{further}({_COMMA}{further}){_times(max(0, more_fewest - 1), rest_most)}"
        return rf"\[{listed}\]" if more_fewest else rf"\[({listed})?\]"

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
        """The expression of a member or an item; one that may be anything is a scalar."""
        if schema is True or schema == {}:
            list_ = rf"\[({_SCALAR}({_COMMA}{_SCALAR})*)?\]"
            return f"({_SCALAR}|{list_})" if depth == 0 else _SCALAR
        return self.of(schema, within, depth + 1)


def _types_written(branch: Tree) -> list[str]:
    """The types that values are written of: those that are named, or that the keywords are for."""
    types = types_of(branch)
    if types:
        return [kind for kind in types if not (kind == "integer" and "number" in types)]
    meant = {kind for keyword, kind in _TYPE_OF_KEYWORD.items() if keyword in branch}
    if meant:
        return sorted(meant)
    return [kind for kind in _TYPES if kind != "integer"]


def _both(
    branches: Iterable[tuple[Tree, tuple[str, ...]]],
    others: Iterable[tuple[Tree, tuple[str, ...]]],
) -> list[tuple[Tree, tuple[str, ...]]]:
    """Every pair of branches as one; pairs that no value is valid under are left out."""
    listed = list(others)
    both: dict[str, tuple[Tree, tuple[str, ...]]] = {}
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
            both[json.dumps(merged, sort_keys=True)] = (merged, references)
            if len(both) > _MOST_BRANCHES:
                raise ValueError(f"anyOf and oneOf: more than {_MOST_BRANCHES} combinations")
    return list(both.values())


def _with_numbers(kinds: set[str]) -> set[str]:
    """Types with integers as numbers: 1.0 is an integer, too."""
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
    fewest = int(branch.get("minLength", 0))
    most = branch.get("maxLength")
    if most is not None and most < fewest:
        return None
    tree: Node | None = None
    try:
        if form in _FORMATS:
            if pattern is not None:
                raise ValueError(f"pattern beside format {form} would not be held to; keep one")
            tree = match_tree(_FORMATS[form])
        elif pattern is not None:
            tree = search_tree(pattern)
        if tree is not None:
            bounded = LengthBounds().bounded(tree, fewest, most)
            return None if bounded is None else f'"{patterns.written(simplified(bounded), True)}"'
    except UnsupportedPattern as error:
        raise ValueError(f"pattern {pattern!r:.100}: {error}") from None
    if most is not None:
        return f'"{_CHARACTER}{_times(fewest, int(most))}"'
    if fewest:
        return f'"{_CHARACTER}{_times(fewest, fewest)}{_STRING[1:]}'
    return _STRING


def _listed(members: Sequence[tuple[str, bool]]) -> str:
    """An object's members in their order, those that are not required at will. The commas depend
    on which comes first.
    """
    behind = ""  # what may follow where a member stands before it
    first = ""  # what may stand where no member does
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
    if len(text) > _MOST_LETTERS:
        raise ValueError(_TOO_LARGE)
    return text


def _either(expressions: Sequence[str]) -> str:
    options = list(dict.fromkeys(expressions))
    return options[0] if len(options) == 1 else f"({'|'.join(options)})"


def _times(fewest: int, most: int | None) -> str:
    return f"{{{fewest},{'' if most is None else most}}}"


def _literal(text: str) -> str:
    return "".join("\\" + char if char in r"\.^$*+?()[]{}|" else char for char in text)
