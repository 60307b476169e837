"""A pydantic model or JSON Schema as a category, and back.

Nested objects are attributes `a.b.c`; `$` is the whole.
"""

import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    unsupported_keyword,
)
from raypd.config.patterns import UnsupportedPattern, whole_text
from raypd.config.tasks import FORMATS, NUMBERS, Attribute
from raypd.config.yaml_file import parse
from raypd.errors import ConfigError, in_words

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_TYPES: dict[str, Any] = {"properties": dict, "$ref": str, "description": str | None}  # of keywords
_TYPES |= dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf"), list)
_TYPES |= dict.fromkeys(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), float | int | None
)
_TYPES |= dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int | None)
_TYPES |= dict.fromkeys(("pattern", "format"), str | None) | {"type": str | list | None}
_BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_MOST_VALUES = 20_000
MOST_PROPERTIES = 5_000  # behind all references
DEEPEST = 50  # objects in objects


class _Refused(Exception):
    """What cannot be decoded, with its path in the schema."""


def is_file(schema: Any) -> bool:
    return isinstance(schema, str) and schema.endswith((".json", ".yaml", ".yml"))


def categories_of(schema: str | Tree, folder: Path) -> Tree:
    """The category of task.schema (`package.module:Class`, a file, or JSON Schema), as YAML has it.

    It is named as the schema's title or `record`; modules are looked for in `folder`, too. Raises
    ConfigError, with the path in the schema, where it cannot be read or not be decoded in slots.
    """
    tree = schema
    if isinstance(schema, str):
        tree = _read(schema) if is_file(schema) else _imported(schema, folder)
    if not isinstance(tree, dict):
        raise ConfigError(f"task.schema: {schema}: expected an object, found {type(tree).__name__}")
    try:
        flat = _Flattened(tree)
        flat.add_object(tree, "$", [], optional=False)
    # Also of a bound that is infinite, or none.
    except (_Refused, OverflowError, ValueError) as error:
        raise ConfigError(f"task.schema: {error}") from None
    if not flat.attributes:
        raise ConfigError("task.schema: $: it has no properties: name what is to be extracted")
    category: Tree = {"attributes": [a.model_dump(exclude_defaults=True) for a in flat.attributes]}
    category |= (
        {"description": " ".join(tree["description"].split())} if tree.get("description") else {}
    )
    category |= {"optional_objects": flat.optional} if flat.optional else {}
    return {str(tree.get("title") or "record"): category}


def task_of(given: Any) -> Tree:
    """A schema of Python code as keys of section `task`.

    Raises ConfigError. given: a pydantic model; a JSON Schema, or its path; attributes (names, also
    "Brand, Color", or {name, type}); {category: {attributes}}, or such a YAML.
    """
    expected = "schema: name the attributes, or give a pydantic model or a JSON Schema"
    if not given:
        raise ConfigError(expected)
    if hasattr(given, "model_json_schema"):
        return {"schema": given.model_json_schema()}
    if isinstance(given, str) and not set(given) & set("./:\\"):  # names, and no path
        given = [name.strip() for name in given.split(",") if name.strip()]
    if isinstance(given, (str, Path)):
        path = str(given)
        tree = _read(path) if path.endswith((".yaml", ".yml")) else {"properties": {}}
        return {"schema" if _is_json_schema(tree) else "categories_file": path}
    if isinstance(given, Mapping):
        return {"schema" if _is_json_schema(given) else "categories": dict(given)}
    listed = list(given) if isinstance(given, Iterable) else [given]
    if wrong := [one for one in listed if not isinstance(one, (str, Mapping))]:
        raise ConfigError(f"{expected}, not {wrong[0]!r:.80}")
    attributes = [{"name": one} if isinstance(one, str) else dict(one) for one in listed]
    return {"categories": {"record": {"attributes": attributes}}}


def _is_json_schema(tree: Any) -> bool:
    """Categories hold objects alone."""
    return (
        not isinstance(tree, Mapping)
        or "properties" in tree
        or isinstance(tree.get("$ref", tree.get("type")), str)
    )


def _read(path: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text) if path.endswith(".json") else parse(text)
    except RecursionError:
        raise ConfigError(f"task.schema: {path}: is nested too deeply") from None
    except FileNotFoundError:
        raise ConfigError(f"task.schema: {path}: no such file") from None
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"task.schema: {path}: cannot be read: {in_words(error)}") from None


def _imported(target: str, folder: Path) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(
            f"task.schema: {target!r} is no file (.json, .yaml), and no pydantic model "
            "(module:Class)"
        )
    try:
        return TypeAdapter(imported("task.schema", target, folder)).json_schema()
    except PydanticUserError as error:
        raise ConfigError(f"task.schema: {target}: has no JSON Schema: {error.message}") from None


def imported(key: str, target: str, folder: Path | None = None) -> Any:
    """What `module:name` names, looked for in a folder and the current one, too.

    Raises ConfigError, with the key.
    """
    module, _, name = target.partition(":")
    before = list(sys.path)
    sys.path[:0] = [*([str(folder.resolve())] if folder is not None else []), str(Path.cwd())]
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value
    except Exception as error:  # of anybody's module
        raise ConfigError(
            f"{key}: {target}: cannot be imported: {type(error).__name__}: {error}"
        ) from None
    finally:
        sys.path[:] = before


@dataclass
class _Flattened:
    """The attributes of a schema, and the paths of objects that may be absent. root: what `$ref`
    points into.
    """

    root: Tree
    attributes: list[Attribute] = field(default_factory=list)
    optional: list[list[str]] = field(default_factory=list)
    properties: int = 0

    def add_object(
        self, schema: Tree, at: str, path: list[str], optional: bool, within: tuple[str, ...] = ()
    ) -> None:
        """Adds an object's properties. at: in the schema; path: in the record. optional: it may be
        absent, so nothing in it is required. within: the `$ref` that led here; none may recur.
        """
        schema, _, within = self._resolved(schema, at, within)
        if schema.get("type") not in (None, "object") or not isinstance(
            schema.get("properties"), dict
        ):
            raise _Refused(
                f"{at}: an object without `properties` cannot be decoded in slots; name its "
                "properties"
            )
        if isinstance(schema.get("additionalProperties"), dict):
            raise _Refused(
                f"{at}.additionalProperties: names that are not known cannot be decoded in slots"
            )
        if len(path) > DEEPEST:
            raise _Refused(f"{at}: objects are nested more than {DEEPEST} deep")
        self.properties += len(schema["properties"])
        if self.properties > MOST_PROPERTIES:
            raise _Refused(
                f"{at}: with what it refers to the schema has more than {MOST_PROPERTIES:,} "
                "properties"
            )
        required = schema.get("required", [])
        for name, inner in schema["properties"].items():
            self._add(
                inner, f"{at}.properties.{name}", [*path, name], name in required, optional, within
            )

    def _add(
        self,
        given: Any,
        at: str,
        path: list[str],
        listed: bool,
        optional: bool,
        within: tuple[str, ...],
    ) -> None:
        schema, nullable, inside = self._resolved(given, at, within)
        if _kind(schema) == "object":
            # What is required and may be null is always there: nothing in slots tells an object
            # from null.
            if not listed:
                self.optional.append(path)
            self.add_object(schema, at, path, optional or not listed, inside)
            return
        keys: Tree = {"required": listed and not nullable and not optional, "omit_null": not listed}
        if _kind(schema) == "array":
            items, null, _ = self._resolved(schema.get("items") or {}, f"{at}.items", inside)
            if _kind(items) == "array" or null:
                raise _Refused(
                    f"{at}.items: a list of {'null' if null else 'lists'} cannot be decoded in "
                    "slots"
                )
            keys |= {
                "many": True,
                "max_items": schema.get("maxItems"),
                "min_items": schema.get("minItems"),
            }
            if _kind(items) == "object":
                rows = _Flattened(self.root, properties=self.properties)
                rows.add_object(schema["items"], f"{at}.items", [], False, inside)
                if deep := next((column.path for column in rows.attributes if column.path), None):
                    raise _Refused(
                        f"{at}.items.properties.{deep[0]}: an object in a list's objects "
                        "cannot be decoded"
                    )
                self.properties = rows.properties
                keys |= {
                    "type": "rows",
                    "columns": [a.model_dump(exclude_defaults=True) for a in rows.attributes],
                }
            else:
                keys |= _scalar(items, f"{at}.items")
        else:
            keys |= _scalar(schema, at)
        described = next((s["description"] for s in (given, schema) if s.get("description")), "")
        try:
            text, place = " ".join(described.split()), path if len(path) > 1 else []
            attribute = Attribute(name=".".join(path), description=text, path=place, **keys)
        except ValidationError as error:
            raise _Refused(
                f"{at}: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
            ) from None
        default = given.get("default", schema.get("default"))
        if default is not None and not attribute.fits(default):
            raise _Refused(f"{at}.default: {json.dumps(default, default=str)} is not of its type")
        self.attributes.append(attribute)

    def _resolved(
        self, schema: Any, at: str, within: tuple[str, ...]
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """(what a schema says behind its references, without null; whether it may be null; the
        references)
        """
        try:
            flat, nullable, within = self._flat(schema, at, within, 0)
        except Conflict as conflict:
            raise _Refused(
                f"{at}.{conflict.keyword}: two different ones at once cannot be decoded; write "
                "them as one"
            ) from None
        if isinstance(flat.get("type"), list):
            if len(flat["type"]) != 1:
                raise _Refused(
                    f"{at}.type: several types cannot be decoded in one slot; choose one"
                )
            flat = {**flat, "type": flat["type"][0]}
        if keyword := unsupported_keyword(flat):
            raise _Refused(f"{at}.{keyword}: would not be held to; take it out")
        return flat, nullable, within

    def _flat(
        self, schema: Any, at: str, within: tuple[str, ...], depth: int
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """As `_resolved`, of a schema that may still have several types and any keyword."""
        if depth > DEEPEST:
            raise _Refused(f"{at}: schemas in schemas, more than {DEEPEST} deep")
        _check_types(schema, at)
        flat = {key: value for key, value in schema.items() if key not in _COMBINING}
        flat, nullable = _without_null(flat)
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in within:
                raise _Refused(
                    f"{at}: {ref} holds itself: a schema without an end cannot be decoded in slots"
                )
            within = (*within, ref)
            target = referred(self.root, ref)
            if target is None:
                raise _Refused(f"{at}.$ref: {ref} is not in the schema")
            inner, inner_nullable, within = self._flat(target, at, within, depth + 1)
            flat = conjunction(inner, flat)
            nullable |= inner_nullable
        for part in schema.get("allOf", []):
            inner, inner_nullable, within = self._flat(part, f"{at}.allOf", within, depth + 1)
            flat = conjunction(inner, flat)
            nullable |= inner_nullable
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            chosen, inner_nullable, within = self._one_option(
                schema[keyword], f"{at}.{keyword}", within, depth + 1
            )
            flat = conjunction(chosen, flat)
            nullable |= inner_nullable
        return flat, nullable, within

    def _one_option(
        self, options: list[Any], at: str, within: tuple[str, ...], depth: int
    ) -> tuple[Tree, bool, tuple[str, ...]]:
        """The one schema that stands for the options of anyOf or oneOf."""
        left = [option for option in options if option != {"type": "null"}]
        nullable = len(left) < len(options)
        flat = []
        references = within
        # A single option keeps its place in messages: null beside it is no choice.
        inner_at = at.rpartition(".")[0] if len(left) == 1 else at
        for option in left:
            inner, inner_nullable, inner_within = self._flat(option, inner_at, within, depth)
            flat.append(inner)
            nullable |= inner_nullable
            references = tuple(dict.fromkeys([*references, *inner_within]))
        if len(flat) == 1:
            return flat[0], nullable, references
        return _one_of(flat, at), nullable, references


def _without_null(schema: Tree) -> tuple[Tree, bool]:
    """A schema without null among its types and values, and whether it had it."""
    schema = dict(schema)
    nullable = schema.pop("nullable", False) is True  # OpenAPI 3.0
    if isinstance(schema.get("type"), list):
        types = [kind for kind in schema["type"] if kind != "null"]
        nullable |= len(types) < len(schema["type"])
        schema["type"] = types
    if None in schema.get("enum", []):
        nullable = True
        schema["enum"] = [value for value in schema["enum"] if value is not None]
    return schema, nullable


def _check_types(schema: Any, at: str) -> None:
    if not isinstance(schema, dict):
        raise _Refused(f"{at}: a value of any kind cannot be decoded; give it a type")
    for keyword in _TYPES.keys() & schema.keys():
        if not isinstance(schema[keyword], _TYPES[keyword]):
            raise _Refused(f"{at}.{keyword}: {schema[keyword]!r:.80} is not of its type")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(name, str) or not isinstance(inner, dict):
            raise _Refused(f"{at}.properties.{name}: expected a name, as text, and its schema")


def _one_of(options: list[Tree], at: str) -> Tree:
    """What stands for several: a number for what may be written as one, an enum for single
    values, an object for objects that a constant tells apart.
    """
    for option in options:
        if keyword := unsupported_keyword(option):
            raise _Refused(f"{at}.{keyword}: would not be held to; take it out")
    listed = [permitted_values(option) for option in options]
    if options and all(values is not None for values in listed):
        return {"enum": _each_once(itertools.chain(*(values or [] for values in listed)))}
    kinds = set(map(_kind, options))
    if kinds == {"integer"} or ("number" in kinds and kinds <= {"number", "integer", "string"}):
        return _one_range([option for option in options if _kind(option) != "string"], at)
    if kinds == {"object"} and (union := _union(options)) is not None:
        return union
    what = "objects" if "object" in kinds else "several types"
    raise _Refused(f"{at}: one of {what} cannot be decoded in slots; choose one")


def _each_once(values: Iterable[Any]) -> list[Any]:
    """Values without those that stand twice; 1 and true are two."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _one_range(numbers: list[Tree], at: str) -> Tree:
    """The number whose bounds permit what any of several numbers permits."""
    if any(permitted_values(number) is not None for number in numbers):
        raise _Refused(f"{at}: a number or one of some values cannot be decoded; choose one")
    ranges = []
    for number in numbers:
        bounds = _bounds(number, _kind(number) == "integer")
        low = bounds.get("minimum", -math.inf)
        high = bounds.get("maximum", math.inf)
        if low > high:
            raise _Refused(f"{at}: minimum ({low:g}) is above maximum ({high:g})")
        ranges.append((low, high, _kind(number)))
    real = [limits for limits in ranges if limits[2] == "number"] or ranges
    real.sort()
    low, high, kind = real[0]
    for next_low, next_high, _ in real[1:]:
        gap = 1 if kind == "integer" else 0
        if next_low > high + gap:
            raise _Refused(f"{at}: bounds with a gap between them cannot be held to; choose one")
        high = max(high, next_high)
    for other_low, other_high, _ in ranges:
        if other_low < low or other_high > high:
            raise _Refused(
                f"{at}: integers beyond the bounds of the numbers cannot be held to; choose one"
            )
    described = next((number for number in numbers if _kind(number) == kind), numbers[0])
    result = {key: value for key, value in described.items() if key not in _BOUND_KEYWORDS}
    if low > -math.inf:
        result["minimum"] = low
    if high < math.inf:
        result["maximum"] = high
    return result


def _union(options: list[Tree]) -> Tree | None:
    """The object with the properties of several, told apart by one that is a constant text in each;
    None: by none.
    """
    named = [option.get("properties") or {} for option in options]
    tags = [
        key
        for key in named[0]
        if all(isinstance(own.get(key, {}).get("const"), str) for own in named)
    ]
    merged: Tree = {}
    for own in named:
        if any(
            merged.setdefault(key, inner) != inner for key, inner in own.items() if key not in tags
        ):
            return None
    merged = {tag: {"enum": [own[tag]["const"] for own in named]} for tag in tags[:1]} | merged
    required = [
        key
        for key in merged
        if key in tags or all(key in option.get("required", []) for option in options)
    ]
    return (
        {"type": "object", "properties": merged, "required": required} if len(tags) == 1 else None
    )


def _kind(schema: Tree) -> str:
    return str(schema.get("type") or ("object" if "properties" in schema else ""))


def _scalar(schema: Tree, at: str) -> Tree:
    values = permitted_values(schema)
    if values is not None:
        if not values:
            raise _Refused(f"{at}.enum: its other keywords permit none of the values")
        types = {type(value) for value in values}
        if not types or not (types == {str} or types <= {int, float}):
            raise _Refused(
                f"{at}.enum: values other than texts, or numbers, cannot be decoded as an "
                "enum; quote them"
            )
        if len(values) > _MOST_VALUES:
            raise _Refused(
                f"{at}.enum: {len(values)} values; {_MOST_VALUES} at most are ready in a few "
                "seconds"
            )
        return {
            "type": "enum" if types == {str} else "integer" if types == {int} else "number",
            "values": values,
        }
    kind, form = _kind(schema), schema.get("format")
    if kind == "boolean":
        return {"type": kind}
    if kind in ("integer", "number"):
        return {"type": kind, **_bounds(schema, kind == "integer")}
    if kind != "string":
        raise _Refused(
            f"{at}: {f'type {kind}' if kind else 'a value of any kind'} cannot be decoded; "
            "give it a type"
        )
    lengths = {"min_length": schema.get("minLength"), "max_length": schema.get("maxLength")}
    pattern = schema.get("pattern")
    if pattern is not None and form == "uuid":
        raise _Refused(f"{at}.pattern: beside format uuid it would not be held to; keep one")
    if form == "uuid":
        return {"type": "pattern", "pattern": _UUID, **lengths}
    if pattern is not None:
        try:
            pattern = whole_text(pattern)
        except UnsupportedPattern as error:
            raise _Refused(f"{at}.pattern: {error}") from None
        if form in FORMATS:
            return {"type": form, "pattern": pattern}
        return {"type": "pattern", "pattern": pattern, **lengths}
    return {"type": form} if form in ("date", "time", "date-time") else {"type": "text", **lengths}


def _bounds(schema: Tree, whole: bool) -> Tree:
    """minimum and maximum; what is exclusive as the next number within."""
    found = {key: schema[key] for key in ("minimum", "maximum") if schema.get(key) is not None}
    for key, beyond, step in (("minimum", math.inf, 1), ("maximum", -math.inf, -1)):
        bound = schema.get(f"exclusive{key.capitalize()}")
        if isinstance(bound, bool):  # draft 4: whether the other bound is exclusive
            bound = found.pop(key, None) if bound else None
        if bound is not None:
            own = math.floor(bound) + 1 if step > 0 else math.ceil(bound) - 1
            own = own if whole else math.nextafter(bound, beyond)
            found[key] = max(own * step, found.get(key, own) * step) * step
    return found


def record_schema(attributes: Sequence[Attribute]) -> Tree:
    """The schema of an answer, for a server that holds it to one: every attribute is a key, in
    order, or null.
    """
    return {
        "type": "object",
        "properties": {attribute.name: _attribute_schema(attribute) for attribute in attributes},
        "required": [attribute.name for attribute in attributes],
        "additionalProperties": False,
    }


def _attribute_schema(attribute: Attribute) -> Tree:
    schema = _value_schema(attribute)
    if attribute.many:
        limits = {"maxItems": attribute.max_items, "minItems": attribute.min_items}
        schema = {"type": "array", "items": schema} | {
            k: v for k, v in limits.items() if v is not None
        }
    if not attribute.nullable:
        return schema
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    return {**schema, "type": [schema["type"], "null"]}


def _value_schema(attribute: Attribute) -> Tree:
    if attribute.type == "rows":
        return record_schema(attribute.columns)
    schema: Tree = {"type": attribute.type if attribute.type in (*NUMBERS, "boolean") else "string"}
    if attribute.values:
        schema["enum"] = [
            value if attribute.type == "enum" else json.loads(value) for value in attribute.values
        ]
    elif attribute.type in FORMATS:
        schema["format"] = attribute.type
    elif attribute.type == "pattern":
        schema["pattern"] = f"^(?:{attribute.regex})$"
    return schema
