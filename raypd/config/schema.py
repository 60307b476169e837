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

from raypd.config.tasks import FORMATS, NUMBERS, Attribute
from raypd.config.yaml_file import parse
from raypd.errors import ConfigError, in_words

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
NOT_HELD = {  # keywords that say what is valid, and that would not be held to
    "multipleOf",
    "uniqueItems",
    "contains",
    "prefixItems",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
}
_TYPES: dict[str, Any] = {"properties": dict, "$ref": str, "description": str | None}  # of keywords
_TYPES |= dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf"), list)
_TYPES |= dict.fromkeys(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), float | int | None
)
_MOST_VALUES = 20_000
MOST_PROPERTIES = 5_000  # behind all references
DEEPEST = 50  # objects in objects
Tree = dict[str, Any]


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
        nullable = False
        for steps in itertools.count():
            if steps > DEEPEST:
                raise _Refused(f"{at}: schemas in schemas, more than {DEEPEST} deep")
            _check_types(schema, at)
            beside = {
                key: value
                for key, value in schema.items()
                if key not in ("$ref", "allOf", "anyOf", "oneOf")
            }
            if "$ref" in schema:
                ref = schema["$ref"]
                if ref in within:
                    raise _Refused(
                        f"{at}: {ref} holds itself: a schema without an end cannot be decoded "
                        "in slots"
                    )
                within, inner = (*within, ref), referred(self.root, ref)
                if inner is None:
                    raise _Refused(f"{at}.$ref: {ref} is not in the schema")
            elif "allOf" in schema and len(schema["allOf"]) == 1:
                inner = schema["allOf"][0]
            elif options := schema.get("anyOf") or schema.get("oneOf"):
                left = [option for option in options if option != {"type": "null"}]
                nullable |= len(left) < len(options)
                inner = (
                    left[0]
                    if len(left) == 1
                    else _one_of([_behind(self.root, option) for option in left], at)
                )
            elif "allOf" in schema:
                raise _Refused(
                    f"{at}.allOf: several schemas at once cannot be decoded; write them as one"
                )
            else:
                break
            schema = {**inner, **beside} if isinstance(inner, dict) else inner
        nullable |= schema.get("nullable") is True  # OpenAPI 3.0
        if isinstance(schema.get("type"), list):
            types = [one for one in schema["type"] if one != "null"]
            nullable |= len(types) < len(schema["type"])
            if len(types) != 1:
                raise _Refused(
                    f"{at}.type: several types cannot be decoded in one slot; choose one"
                )
            schema = {**schema, "type": types[0]}
        for keyword in NOT_HELD & schema.keys():
            raise _Refused(f"{at}.{keyword}: would not be held to; take it out")
        if None in schema.get("enum", []):
            nullable, schema = (
                True,
                {**schema, "enum": [value for value in schema["enum"] if value is not None]},
            )
        return schema, nullable, within


def _check_types(schema: Any, at: str) -> None:
    if not isinstance(schema, dict):
        raise _Refused(f"{at}: a value of any kind cannot be decoded; give it a type")
    for keyword in _TYPES.keys() & schema.keys():
        if not isinstance(schema[keyword], _TYPES[keyword]):
            raise _Refused(f"{at}.{keyword}: {schema[keyword]!r:.80} is not of its type")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(name, str) or not isinstance(inner, dict):
            raise _Refused(f"{at}.properties.{name}: expected a name, as text, and its schema")


def referred(root: Any, ref: str) -> Any:
    """What a `$ref` of a JSON Schema points to; None: nothing in it."""
    found = root if ref.startswith("#") else None
    for part in ref.removeprefix("#").strip("/").split("/") if ref != "#" else []:
        found = (
            found.get(part.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, dict)
            else None
        )
    return found


def _one_of(options: list[Any], at: str) -> Tree:
    """What stands for several: a number for what may be written as one, an enum for single
    texts.
    """
    for option in options:
        _check_types(option, f"{at}.anyOf")
    kinds = set(map(_kind, options))
    if "number" in kinds and kinds <= {"number", "integer", "string"}:
        return next(option for option in options if _kind(option) == "number")
    constants = [option.get("const") for option in options]
    if not {type(constant) for constant in constants} - {str, int}:
        return {"enum": constants}
    if kinds == {"object"} and (union := _union(options)) is not None:
        return union
    what = "objects" if "object" in kinds else "several types"
    raise _Refused(f"{at}.anyOf: one of {what} cannot be decoded in slots; choose one")


def _behind(root: Any, option: Any) -> Any:
    ref = option["$ref"] if isinstance(option, dict) and option.keys() == {"$ref"} else None
    return referred(root, ref) if isinstance(ref, str) else option


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
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
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
    if "pattern" in schema or form == "uuid":
        return {"type": "pattern", "pattern": schema.get("pattern", _UUID), **lengths}
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
