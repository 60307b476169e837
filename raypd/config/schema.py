"""Turns a pydantic model, a JSON Schema or a list of attributes into a category of attributes.

A property `b` of a nested object `a` becomes the attribute `a.b`; `$` is the schema itself.
"""

import importlib
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from ruamel.yaml.error import YAMLError

from raypd.config.json_schema import (
    Conflict,
    Tree,
    conjunction,
    permitted_values,
    referred,
    types_of,
    unsupported_keyword,
    validator,
)
from raypd.config.yaml_file import parse
from raypd.errors import ConfigError, closest_file, did_you_mean, in_words
from raypd.schema import TYPES, Attribute, UnsupportedSchema, bounds

# The category of a task that does not name one, such as one with `task.attributes`. It is not shown
# to users.
UNNAMED_CATEGORY = "record"
# The types that the values of keywords must have.
_KEYWORD_TYPES: dict[str, Any] = {
    "properties": dict,
    "$ref": str,
    "description": str | None,
    "type": str | list | None,
    "pattern": str | None,
    "format": str | None,
    **dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf"), list),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int | None),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), float | int | None
    ),
}
# What a file may contain instead of a schema, in words.
_FOUND = {list: "an empty list", type(None): "nothing", str: "a text"}
_JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_VALUES = 20_000
# The limit on properties, including those behind references.
MOST_PROPERTIES = 5_000
# The limit on the nesting of objects.
DEEPEST = 50


class _Refused(Exception):
    """A part of a schema that cannot be decoded, with its path."""


def is_file(schema: Any) -> bool:
    return isinstance(schema, str) and schema.endswith((".json", ".yaml", ".yml"))


def categories_of(schema: str | Tree, folder: Path) -> Tree:
    """Turn `task.schema` into a category.

    Args:
        schema: A pydantic model (`package.module:Class`), a JSON Schema, or a file. A file contains
            a JSON Schema, a list of attributes, or a mapping whose `attributes` are such a list.
        folder: A folder in which modules are searched for, in addition to the usual places.

    Returns:
        The category in the form that YAML has, under the schema's title or UNNAMED_CATEGORY.

    Raises:
        ConfigError: The schema cannot be read, or cannot be decoded in slots; the message has the
            path in the schema.
    """
    tree = schema
    if isinstance(schema, str):
        tree = _read(schema) if is_file(schema) else _imported(schema, folder)
    if isinstance(schema, str) and isinstance(tree, list) and tree:
        return {UNNAMED_CATEGORY: {"attributes": tree}}
    if isinstance(tree, dict) and lists_attributes(tree):
        return {UNNAMED_CATEGORY: tree}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"task.schema: {schema}: expected a JSON Schema or a list of attributes, found "
            f"{_FOUND.get(type(tree), type(tree).__name__)}"
        )
    # The name of the file, or of the pydantic model.
    source = f"{schema}: " if isinstance(schema, str) else ""
    flat = _Flattened(tree)
    try:
        flat.add_object(tree, "$", [], optional=False)
    # A bound that is infinite, or not a number, raises OverflowError or ValueError.
    except (_Refused, OverflowError, ValueError) as error:
        raise ConfigError(f"task.schema: {source}{error}") from None
    if not flat.attributes:
        raise ConfigError(f"task.schema: {source}$: it has no properties: name what to extract")
    category: Tree = {"attributes": [a.model_dump(exclude_defaults=True) for a in flat.attributes]}
    if tree.get("description"):
        category["description"] = _description(tree)
    if flat.optional:
        category["optional_objects"] = flat.optional
    return {str(tree.get("title") or UNNAMED_CATEGORY): category}


def task_of(schema: Any) -> Tree:
    """Turn a schema from Python code into keys of section `task`.

    Args:
        schema: A pydantic model; a JSON Schema; attributes (names, also as "Brand, Color", or
            {name, type}), or a mapping whose `attributes` are such a list;
            {category: {attributes}}; or the path of a file with one of these.

    Raises:
        ConfigError: The schema is none of these.
    """
    expected = "schema: name the attributes, or give a pydantic model or a JSON Schema"
    if not schema:
        raise ConfigError(expected)
    if hasattr(schema, "model_json_schema"):
        return {"schema": schema.model_json_schema()}
    if isinstance(schema, str) and not set(schema) & set("./:\\"):
        # The text lists names, because a path would contain one of these characters.
        names = [name.strip() for name in schema.split(",")]
        return _task_of_attributes([name for name in names if name])
    if isinstance(schema, (str, Path)):
        path = str(schema)
        may_be_categories = path.endswith((".yaml", ".yml"))
        if may_be_categories:
            tree = _read(path)
            if not lists_attributes(tree) and not _is_json_schema(tree):
                return {"categories_file": path}
        return {"schema": path}
    if isinstance(schema, Mapping):
        if _is_json_schema(schema):
            return {"schema": dict(schema)}
        if lists_attributes(schema):
            return {"categories": {UNNAMED_CATEGORY: dict(schema)}}
        return {"categories": dict(schema)}
    if not isinstance(schema, Iterable):
        raise ConfigError(f"{expected}, not {schema!r:.80}")
    listed = list(schema)
    for item in listed:
        if not isinstance(item, (str, Mapping)):
            raise ConfigError(f"{expected}, not {item!r:.80}")
    return _task_of_attributes(listed)


def _task_of_attributes(listed: list[Any]) -> Tree:
    attributes = [{"name": item} if isinstance(item, str) else dict(item) for item in listed]
    return {"categories": {UNNAMED_CATEGORY: {"attributes": attributes}}}


def lists_attributes(tree: Any) -> bool:
    """Return whether a mapping lists the attributes of all documents, without a category.

    A category that is named `attributes` is a mapping rather than a list.
    """
    if not isinstance(tree, Mapping) or "properties" in tree:
        return False
    return isinstance(tree.get("attributes"), list)


def _is_json_schema(tree: Any) -> bool:
    """Return whether a tree is a JSON Schema; a mapping of categories contains only objects."""
    if not isinstance(tree, Mapping) or "properties" in tree:
        return True
    return isinstance(tree.get("$ref", tree.get("type")), str)


def _read(path: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text) if path.endswith(".json") else parse(text)
    except RecursionError:
        raise ConfigError(f"task.schema: {path}: is nested too deeply") from None
    except FileNotFoundError:
        files = {other.stem: other for other in Path(path).parent.glob(f"*{Path(path).suffix}")}
        similar = closest_file(Path(path).stem, files)
        hint = "" if similar is None else f"; did you mean {files[similar]}?"
        raise ConfigError(f"task.schema: {path}: no such file{hint}") from None
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"task.schema: {path}: cannot be read: {in_words(error)}") from None


def _imported(target: str, folder: Path) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(
            f"task.schema: {target!r} is neither a file (.json, .yaml) nor a pydantic model "
            "(module:Class)"
        )
    try:
        return TypeAdapter(imported("task.schema", target, folder)).json_schema()
    except PydanticUserError as error:
        raise ConfigError(f"task.schema: {target}: has no JSON Schema: {error.message}") from None


def imported(key: str, target: str, folder: Path | None = None) -> Any:
    """Import the object that `module:name` names.

    Args:
        key: The configuration key, for messages.
        target: The module and the object's name in it.
        folder: The folder that is searched first for the module; the current folder is next.

    Raises:
        ConfigError: It cannot be imported.
    """
    module, _, name = target.partition(":")
    path_before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    if folder is not None:
        sys.path.insert(0, str(folder.resolve()))
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value
    # A user's module may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{key}: {target}: cannot be imported: {type(error).__name__}: {error}"
        ) from None
    finally:
        sys.path[:] = path_before


@dataclass
class _Flattened:
    """The attributes of a schema, and the paths of the objects that may be absent.

    `root` is the schema that references point into. In the methods, `json_path` is a path in the
    schema, `path` is a path in the record, and `references` are the references that led to a part
    of the schema, none of which may recur.
    """

    root: Tree
    attributes: list[Attribute] = field(default_factory=list)
    optional: list[list[str]] = field(default_factory=list)
    properties: int = 0

    def add_object(
        self,
        schema: Tree,
        json_path: str,
        path: list[str],
        optional: bool,
        references: tuple[str, ...] = (),
    ) -> None:
        """Add the properties of an object; if it is `optional`, it may be absent, so none is
        required.
        """
        schema, _, references = self._resolved(schema, json_path, references)
        properties = schema.get("properties")
        if schema.get("type") not in (None, "object") or not isinstance(properties, dict):
            raise _Refused(
                f"{json_path}: an object without `properties` cannot be decoded in slots; name "
                "its properties"
            )
        if isinstance(schema.get("additionalProperties"), dict):
            raise _Refused(
                f"{json_path}.additionalProperties: names that are not known cannot be decoded in "
                "slots"
            )
        if len(path) > DEEPEST:
            raise _Refused(f"{json_path}: objects are nested more than {DEEPEST} deep")
        self.properties += len(properties)
        if self.properties > MOST_PROPERTIES:
            raise _Refused(
                f"{json_path}: including what it refers to, the schema has more than "
                f"{MOST_PROPERTIES:,} properties"
            )
        required = schema.get("required", [])
        for name, inner in properties.items():
            self._add_property(
                inner,
                f"{json_path}.properties.{name}",
                [*path, name],
                name in required,
                optional,
                references,
            )

    def _add_property(
        self,
        schema: Any,
        json_path: str,
        path: list[str],
        listed: bool,
        optional: bool,
        references: tuple[str, ...],
    ) -> None:
        """Add a property; `listed` says whether the object's `required` names it."""
        resolved, nullable, references = self._resolved(schema, json_path, references)
        kind = _kind(resolved)
        if kind in ("object", "array"):
            _check_no_values(resolved, json_path)
        if kind == "object":
            # A required object that may be null is always present, because slots cannot express its
            # null.
            if not listed:
                self.optional.append(path)
            self.add_object(resolved, json_path, path, optional or not listed, references)
            return
        keys: Tree = {
            "name": ".".join(path),
            "description": _description(schema, resolved),
            "required": listed and not nullable and not optional,
            "omit_null": not listed,
        }
        if len(path) > 1:
            keys["path"] = path
        if kind == "array":
            keys |= self._list_keys(resolved, json_path, references)
        else:
            keys |= _scalar_keys(resolved, json_path)
        try:
            attribute = Attribute(**keys)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise _Refused(f"{json_path}: {reason}") from None
        default = schema.get("default", resolved.get("default"))
        # A default may be valid although raypd never writes such a value: pydantic's default of a
        # Decimal is a text.
        is_default_wrong = default is not None and not attribute.fits(default)
        if is_default_wrong and not self._permits(schema, default):
            shown = json.dumps(default, default=str)
            raise _Refused(f"{json_path}.default: {shown} is not of its type")
        self.attributes.append(attribute)

    def _permits(self, schema: Tree, value: Any) -> bool:
        """Return whether a value is valid under a part of the schema."""
        return bool(validator(self.root).evolve(schema=schema).is_valid(value))

    def _list_keys(self, schema: Tree, json_path: str, references: tuple[str, ...]) -> Tree:
        """Return the attribute's keys of a list."""
        items_path = f"{json_path}.items"
        items, nullable, _ = self._resolved(schema.get("items") or {}, items_path, references)
        if nullable:
            raise _Refused(f"{items_path}: a list of null cannot be decoded in slots")
        if _kind(items) == "array":
            raise _Refused(f"{items_path}: a list of lists cannot be decoded in slots")
        keys: Tree = {
            "many": True,
            "max_items": schema.get("maxItems"),
            "min_items": schema.get("minItems"),
        }
        if _kind(items) != "object":
            return keys | _scalar_keys(items, items_path)
        _check_no_values(items, items_path)
        rows = _Flattened(self.root, properties=self.properties)
        rows.add_object(schema["items"], items_path, [], False, references)
        self.properties = rows.properties
        for column in rows.attributes:
            if column.path:
                raise _Refused(
                    f"{items_path}.properties.{column.path[0]}: an object in a list's objects "
                    "cannot be decoded"
                )
        columns = [column.model_dump(exclude_defaults=True) for column in rows.attributes]
        return keys | {"type": "rows", "columns": columns}

    def _resolved(
        self, schema: Any, json_path: str, references: tuple[str, ...]
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """Follow a schema's references.

        Returns:
            The schema that the references lead to, without null; whether it may be null; and the
            references.
        """
        try:
            flat, nullable, references = self._flat(schema, json_path, references, 0)
        except Conflict as conflict:
            raise _Refused(
                f"{json_path}.{conflict.keyword}: two different ones at once cannot be decoded; "
                "write them as one"
            ) from None
        if isinstance(flat.get("type"), list):
            if len(flat["type"]) != 1:
                raise _Refused(
                    f"{json_path}.type: several types cannot be decoded in one slot; choose one"
                )
            flat = {**flat, "type": flat["type"][0]}
        _check_supported(flat, json_path)
        return flat, nullable, references

    def _flat(
        self, schema: Any, json_path: str, references: tuple[str, ...], depth: int
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """Do the same as `_resolved`, but the result may still have several types and any
        keyword.
        """
        if depth > DEEPEST:
            raise _Refused(f"{json_path}: schemas are nested more than {DEEPEST} deep")
        _check_types(schema, json_path)
        flat = {key: value for key, value in schema.items() if key not in _COMBINING}
        flat, nullable = _without_null(flat)
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in references:
                raise _Refused(
                    f"{json_path}: {ref} contains itself: a recursive schema cannot be decoded "
                    "in slots"
                )
            references = (*references, ref)
            target = referred(self.root, ref)
            if target is None:
                raise _Refused(f"{json_path}.$ref: {ref} is not in the schema")
            inner, is_null, references = self._flat(target, json_path, references, depth + 1)
            flat = conjunction(inner, flat)
            nullable |= is_null
        for part in schema.get("allOf", []):
            part_path = f"{json_path}.allOf"
            inner, is_null, references = self._flat(part, part_path, references, depth + 1)
            flat = conjunction(inner, flat)
            nullable |= is_null
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                inner, is_null, references = self._one_option(
                    schema[keyword], f"{json_path}.{keyword}", references, depth + 1
                )
                flat = conjunction(inner, flat)
                nullable |= is_null
        return flat, nullable, references

    def _one_option(
        self, options: list[Any], json_path: str, references: tuple[str, ...], depth: int
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """Return a single schema for the options of anyOf or oneOf."""
        non_null = [option for option in options if not _is_null(option)]
        nullable = len(non_null) < len(options)
        # A message about a single option names the property, because null beside it is not a
        # choice.
        option_path = json_path.rpartition(".")[0] if len(non_null) == 1 else json_path
        flat = []
        all_references = references
        for option in non_null:
            inner, is_null, inner_references = self._flat(option, option_path, references, depth)
            flat.append(inner)
            nullable |= is_null
            all_references = tuple(dict.fromkeys([*all_references, *inner_references]))
        if len(flat) == 1:
            return flat[0], nullable, all_references
        one = _one_of(flat, json_path, is_exclusive=json_path.endswith(".oneOf"))
        return one, nullable, all_references


def _is_null(schema: Any) -> bool:
    """Return whether a schema permits only null, in any of the ways to express that."""
    if not isinstance(schema, dict) or any(keyword in schema for keyword in _COMBINING):
        return False
    if schema.get("type") in ("null", ["null"]):
        return "enum" not in schema and "const" not in schema
    return schema.get("enum") == [None] or schema.get("const", ...) is None


def _description(*schemas: Tree) -> str:
    """Return the first description of some schemas, on one line."""
    for schema in schemas:
        if schema.get("description"):
            return " ".join(schema["description"].split())
    return ""


def _check_supported(schema: Tree, json_path: str) -> None:
    keyword = unsupported_keyword(schema)
    if keyword:
        raise _Refused(f"{json_path}.{keyword}: cannot be enforced; remove it")


def _check_no_values(schema: Tree, json_path: str) -> None:
    """Reject `enum` and `const` of objects and lists."""
    for keyword in ("enum", "const"):
        if keyword in schema:
            raise _Refused(f"{json_path}.{keyword}: cannot be enforced for objects and lists")


def _without_null(schema: Tree) -> tuple[Tree, bool]:
    """Return a schema without null among its types and values, and whether it permitted null."""
    schema = dict(schema)
    # OpenAPI 3.0 has this keyword.
    nullable = schema.pop("nullable", False) is True
    if isinstance(schema.get("type"), list):
        types = [kind for kind in schema["type"] if kind != "null"]
        nullable |= len(types) < len(schema["type"])
        schema["type"] = types
    if None in schema.get("enum", []):
        nullable = True
        schema["enum"] = [value for value in schema["enum"] if value is not None]
    return schema, nullable


def _check_types(schema: Any, json_path: str) -> None:
    if not isinstance(schema, dict):
        raise _Refused(f"{json_path}: a value of any kind cannot be decoded; give it a type")
    for keyword in _KEYWORD_TYPES.keys() & schema.keys():
        if not isinstance(schema[keyword], _KEYWORD_TYPES[keyword]):
            raise _Refused(f"{json_path}.{keyword}: {schema[keyword]!r:.80} is not of its type")
    for kind in types_of(schema):
        if kind not in _JSON_TYPES:
            suggestion = did_you_mean(str(kind), _JSON_TYPES)
            hint = suggestion or f"choose from {', '.join(_JSON_TYPES)}"
            raise _Refused(f"{json_path}.type: {kind!r:.80} is not a type of JSON Schema; {hint}")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(name, str) or not isinstance(inner, dict):
            raise _Refused(
                f"{json_path}.properties.{name}: expected a name, as text, and its schema"
            )


def _one_of(options: list[Tree], json_path: str, is_exclusive: bool) -> Tree:
    """Return a single schema that replaces several.

    It is an enum for single values, a number for values that may be written as a number, and an
    object for objects that a constant distinguishes.

    Args:
        options: The schemas.
        json_path: Their path, for messages.
        is_exclusive: Whether a value must be valid under only one of them.
    """
    for option in options:
        _check_supported(option, json_path)
    listed = [permitted_values(option) for option in options]
    if options and all(values is not None for values in listed):
        values = list(itertools.chain(*(values or [] for values in listed)))
        if is_exclusive:
            counts = Counter(json.dumps(value, sort_keys=True) for value in values)
            values = [value for value in values if counts[json.dumps(value, sort_keys=True)] == 1]
        return {"enum": _each_once(values)}
    kinds = set(map(_kind, options))
    is_number = "number" in kinds and kinds <= {"number", "integer", "string"}
    if is_number or kinds == {"integer"}:
        numbers = [option for option in options if _kind(option) != "string"]
        return _one_range(numbers, json_path, is_exclusive)
    if kinds == {"object"}:
        union = _union(options)
        if union is not None:
            return union
    content = "objects" if "object" in kinds else "several types"
    raise _Refused(f"{json_path}: a choice of {content} cannot be decoded in slots; choose one")


def _each_once(values: Iterable[Any]) -> list[Any]:
    """Return values without duplicates; 1 and true are different values."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _one_range(numbers: list[Tree], json_path: str, is_exclusive: bool) -> Tree:
    """Return a number whose bounds permit every value that one of several numbers permits.

    Args:
        numbers: The schemas of the numbers.
        json_path: Their path, for messages.
        is_exclusive: Whether no value may be valid under two of them.
    """
    if any(permitted_values(number) is not None for number in numbers):
        raise _Refused(f"{json_path}: either a number or an enum cannot be decoded; choose one")
    ranges = [_range(number, json_path) for number in numbers]
    for first, second in itertools.combinations(ranges, 2):
        if is_exclusive and first[0] <= second[1] and second[0] <= first[1]:
            raise _Refused(
                f"{json_path}: a number may be valid under two of its schemas; write anyOf"
            )
    real = [limits for limits in ranges if limits[2] == "number"] or ranges
    real.sort()
    low, high, kind = real[0]
    gap = 1 if kind == "integer" else 0
    for next_low, next_high, _ in real[1:]:
        if next_low > high + gap:
            raise _Refused(
                f"{json_path}: bounds with a gap between them cannot be enforced; choose one"
            )
        high = max(high, next_high)
    for other_low, other_high, _ in ranges:
        if other_low < low or other_high > high:
            raise _Refused(
                f"{json_path}: integers beyond the bounds of the numbers cannot be enforced; "
                "choose one"
            )
    described = next((number for number in numbers if _kind(number) == kind), numbers[0])
    result = {key: value for key, value in described.items() if key not in _BOUND_KEYWORDS}
    if low > -math.inf:
        result["minimum"] = low
    if high < math.inf:
        result["maximum"] = high
    return result


def _range(number: Tree, json_path: str) -> tuple[float, float, str]:
    """Return the least and the greatest value of a number, and its type."""
    kind = _kind(number)
    limits = bounds(number, is_integer=kind == "integer")
    low = limits.get("minimum", -math.inf)
    high = limits.get("maximum", math.inf)
    if low > high:
        raise _Refused(f"{json_path}: minimum ({low:g}) is above maximum ({high:g})")
    return low, high, kind


def _union(options: list[Tree]) -> Tree | None:
    """Return an object with the properties of several that a constant text distinguishes.

    The result is None unless exactly one property is a constant in all of the objects, and the
    properties that they share are equal.
    """
    properties = [option.get("properties") or {} for option in options]
    tags = [key for key in properties[0] if all(_is_constant(own.get(key)) for own in properties)]
    if len(tags) != 1:
        return None
    tag = tags[0]
    merged: Tree = {tag: {"enum": [own[tag]["const"] for own in properties]}}
    for own in properties:
        for key, inner in own.items():
            if key != tag and merged.setdefault(key, inner) != inner:
                return None
    required = [tag]
    for key in merged:
        if key != tag and all(key in option.get("required", []) for option in options):
            required.append(key)
    return {"type": "object", "properties": merged, "required": required}


def _is_constant(schema: Tree | None) -> bool:
    return schema is not None and isinstance(schema.get("const"), str)


def _kind(schema: Tree) -> str:
    """Return the type of a schema; "" if it has none."""
    if schema.get("type"):
        return str(schema["type"])
    return "object" if "properties" in schema else ""


def _scalar_keys(schema: Tree, json_path: str) -> Tree:
    """Return the attribute's keys of a value that is neither a list nor an object."""
    values = permitted_values(schema)
    if values is not None:
        return _keys_of_values(values, json_path)
    for value_type in reversed(TYPES.values()):
        try:
            keys = value_type.from_json_schema(schema)
        except UnsupportedSchema as error:
            raise _Refused(f"{json_path}.{error.keyword}: {error}") from None
        if keys is not None:
            return keys
    content = "a value of any kind"
    if _kind(schema):
        content = f"type {_kind(schema)}"
    raise _Refused(f"{json_path}: {content} cannot be decoded; give it a type")


def _keys_of_values(values: list[Any], json_path: str) -> Tree:
    """Return the attribute's keys of a value that is one of a list of values."""
    if not values:
        raise _Refused(f"{json_path}.enum: its other keywords permit none of the values")
    if len(values) > _MAX_VALUES:
        raise _Refused(
            f"{json_path}.enum: {len(values)} values; at most {_MAX_VALUES} can be compiled in "
            "a few seconds"
        )
    for value_type in reversed(TYPES.values()):
        keys = value_type.from_values(values)
        if keys is not None:
            return keys
    raise _Refused(
        f"{json_path}.enum: values other than texts or numbers cannot be decoded as an enum; "
        "quote them"
    )
