"""Messages for a configuration that pydantic rejects: one line per mistake, with file and line."""

import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raypd.config.moved import moved_to
from raypd.config.options import OptionsError, options_in
from raypd.config.run import RunConfig
from raypd.config.schema import UNNAMED_CATEGORY, is_file
from raypd.config.secrets import redact
from raypd.config.tasks import KINDS, Category
from raypd.config.yaml_file import YamlFile
from raypd.errors import did_you_mean
from raypd.schema import Attribute

Location = tuple[str | int, ...]


def explain(error: ValidationError, source: YamlFile) -> str:
    """Return one line for each mistake in a configuration.

    Args:
        error: The error of pydantic.
        source: The configuration that was read; it knows the line of each key.
    """
    lines = []
    for item in error.errors():
        keys = tuple(part for part in item["loc"] if isinstance(part, (str, int)))
        location = _written_location(keys, source)
        problem = item.get("ctx", {}).get("error")
        if isinstance(problem, OptionsError):
            lines += _explain_options(problem, location, source)
        else:
            lines.append(_line(location, _explain_item(item, keys, location), source))
    return "\n".join(lines)


def _line(location: Location, problem: str, source: YamlFile) -> str:
    """Return `file:line: key: problem`, without the parts that are not known.

    An override is named instead of the file, as `key=... on the command line: problem`.
    """
    parts = [source.where(location)]
    if location not in source.overrides:
        parts.append(".".join(map(str, location)))
    parts.append(problem)
    return ": ".join(part for part in parts if part)


def _written_location(keys: Location, source: YamlFile) -> Location:
    """Return the keys under which the user wrote what pydantic calls by different keys."""
    location = keys
    # Pydantic names the kind of a task, which is not a key.
    if keys[:1] == ("task",) and len(keys) > 1 and keys[1] in KINDS:
        location = ("task", *keys[2:])
    # `task.attributes` is short for an unnamed category.
    task = source.tree.get("task", {})
    if location[:3] == ("task", "categories", UNNAMED_CATEGORY):
        if "attributes" in task and location[3:4] == ("attributes",):
            location = ("task", *location[3:])
        elif is_file(task.get("schema")):
            location = ("task", "schema", *location[3:])
    return location


def _explain_item(item: ErrorDetails, keys: Location, location: Location) -> str:
    """Say what is wrong with one key."""
    error_type = item["type"]
    value = item["input"]
    if error_type == "extra_forbidden":
        return moved_to(".".join(map(str, location))) or _explain_unknown_key(keys, location)
    if error_type == "missing":
        return "missing"
    if error_type == "string_type" and isinstance(value, (bool, int, float, date)):
        text = str(value).lower()
        return f"YAML reads it as the {_yaml_kind(value)} {text}, not as text: quote it"
    if error_type == "literal_error":
        problem = _explain_choice(item)
    elif error_type == "model_type" and location[-2:-1] == ("attributes",):
        problem = "expected a name, or a mapping such as {name: Brand, type: text}"
    elif error_type == "model_type":
        problem = "expected a mapping of keys"
    else:
        problem = item["msg"].removeprefix("Value error, ")
    if error_type != "value_error" and not isinstance(value, (dict, list)):
        problem = f"{problem} (it is {redact(value)!r})"
    return problem


def _explain_choice(item: ErrorDetails) -> str:
    """List the values that a key may have, and name the one that was probably meant."""
    choices = re.findall("'([^']*)'", item["ctx"]["expected"])
    hint = did_you_mean(str(item["input"]), choices)
    return f"{hint} choose from {', '.join(choices)}".strip()


def _yaml_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, date):
        return "date"
    return "number"


def _explain_unknown_key(keys: Location, location: Location) -> str:
    """Suggest similar keys and options of the same section, and sections that have the key."""
    name = str(location[-1])
    options = _options_of(keys[:-1])
    hints = []
    if name in options:
        hints.append(f"write {'.'.join(map(str, location[:-1]))}.{options[name]}")
    else:
        full_names = {**options, **{key: key for key in _keys_of(keys[:-1])}}
        hints.append(did_you_mean(name, full_names, lambda key: repr(full_names[key])))
    for section in RunConfig.model_fields:
        if name in _keys_of((section,)):
            hints.append(f"there is {section}.{name}")
    hint = " ".join(hint for hint in hints if hint)
    return f"unknown key; {hint or '`raypd config show` lists all keys'}"


def _keys_of(location: Location) -> list[str]:
    """Return the keys that the section at a location may have."""
    if "categories" in location:
        return [*Category.model_fields, *Attribute.model_fields]
    return list(_fields_of(location))


def _options_of(location: Location) -> dict[str, str]:
    """Return `mapping.option` for each option of a section's mappings, by the option's name."""
    options = {}
    for key, info in _fields_of(location).items():
        for mapping in options_in(info):
            for section in mapping.sections.values():
                options.update({name: f"{key}.{name}" for name in section.model_fields})
    return options


def _fields_of(location: Location) -> Mapping[str, FieldInfo]:
    """Return the keys that the section at a location may have, and the type of each."""
    section: Any = RunConfig
    for part in location:
        if part in KINDS:
            section = KINDS[str(part)]
        elif part != "task" and part in getattr(section, "model_fields", {}):
            section = section.model_fields[part].annotation
    fields: Mapping[str, FieldInfo] = getattr(section, "model_fields", {})
    return fields


def _explain_options(error: OptionsError, location: Location, source: YamlFile) -> list[str]:
    """Return one line for each wrong option of a mapping.

    Args:
        error: What is wrong with the options.
        location: The keys that lead to the mapping.
        source: The configuration that was read.
    """
    lines = []
    for name, problem in error.problems:
        option_keys = name.split(".") if name else []
        lines.append(_line((*location, *option_keys), problem, source))
    return lines
