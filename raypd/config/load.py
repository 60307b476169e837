"""Turns YAML files and overrides into a checked RunConfig.

Relative paths in a file are relative to its folder; those of overrides and of the output are
relative to the current folder.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from raypd.config.explain import explain
from raypd.config.options import read
from raypd.config.paths import anchor_paths
from raypd.config.run import RunConfig
from raypd.config.schema import UNNAMED_CATEGORY, categories_of, lists_attributes
from raypd.config.secrets import redact
from raypd.config.sections import drop_options, set_key
from raypd.config.yaml_file import YamlFile, parse
from raypd.errors import ConfigError, raised_as

# Where overrides come from, in messages, unless the caller says otherwise.
COMMAND_LINE = "on the command line"
# The keys of a task that say what is extracted; a task has exactly one of them.
_SCHEMA_KEYS = ("schema", "attributes", "categories", "categories_file")


def load_config(
    path: str | Path,
    overrides: list[str] | None = None,
    trains: bool = False,
    origin: str = COMMAND_LINE,
) -> RunConfig:
    """Read the configuration in a YAML file.

    Args:
        path: The file.
        overrides: `key=value` texts with dotted keys; the last one for a key wins.
        trains: Whether a model will be trained. Whatever the file leaves open is then chosen for
            training: hyper_parallel, in slots.
        origin: Where the overrides were given, for messages.

    Raises:
        ConfigError: The file cannot be read, or the configuration has mistakes; the message has one
            line for each.
    """
    overrides = list(overrides or [])
    source = YamlFile.read(Path(path))
    folder = Path(path).parent
    anchor_paths(source.tree, folder)
    config = _checked(source, overrides, folder, origin)
    if not trains:
        return config
    defaults = _defaults_of_training(source, config)
    if not defaults:
        return config
    return load_config(path, [*overrides, *defaults], origin=origin)


def leaves_method_open(path: str | Path, overrides: Sequence[str]) -> bool:
    """Return whether raypd chooses the decoding method, because nothing names one.

    Args:
        path: The YAML file of a configuration that can be loaded.
        overrides: `key=value` texts with dotted keys.
    """
    source = YamlFile.read(Path(path))
    override(source, overrides)
    decoding: dict[str, Any] = source.tree.get("decoding") or {}
    return decoding.get("method", "auto") == "auto"


def _defaults_of_training(source: YamlFile, config: RunConfig) -> list[str]:
    """Return overrides for whatever a configuration leaves open and training decides
    differently.
    """
    decoding = config.decoding
    method = (source.tree.get("decoding") or {}).get("method", "auto")
    is_open = method == "auto" and decoding.method == "guided"
    overrides = []
    if is_open:
        overrides.append("decoding.method=hyper_parallel")
    # The skeleton is open unless the file or the weights' card names one. Stacked documents keep
    # the paper's skeleton.
    is_skeleton_open = "skeleton" not in decoding.model_fields_set and decoding.isolate != "none"
    if is_skeleton_open and (is_open or decoding.method == "hyper_parallel"):
        overrides.append("decoding.skeleton=slots")
    return overrides


def make_config(
    tree: dict[str, Any], overrides: list[str] | None = None, origin: str = COMMAND_LINE
) -> RunConfig:
    """Check a configuration that comes from no file; its paths are relative to the current folder.

    Args:
        tree: The configuration as plain mappings.
        overrides: `key=value` texts with dotted keys; the last one for a key wins.
        origin: Where the overrides were given, for messages.

    Raises:
        ConfigError: The configuration has mistakes; the message has one line for each.
    """
    try:
        return _checked(YamlFile(None, copy.deepcopy(tree)), overrides or [], Path(), origin)
    except RecursionError:
        raise ConfigError("the configuration, or a schema in it, is nested too deeply") from None


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with the values of some dotted keys changed.

    Raises:
        ConfigError: The changed configuration has mistakes.
    """
    source = YamlFile(None, config.model_dump())
    drop_options(source.tree, changes.get("decoding.method", config.decoding.method))
    for key, value in changes.items():
        # A copy, because a later change may set a key inside this value.
        set_key(source.tree, key, copy.deepcopy(value))
    return _validated(source)


def override(source: YamlFile, overrides: Sequence[str], origin: str = COMMAND_LINE) -> None:
    """Set the keys of `key=value` texts.

    Args:
        source: The configuration, which is changed.
        overrides: The texts.
        origin: Where they were given, for messages.

    Raises:
        ConfigError: A text is not of the form key=value, or a part of its key already has a value.
    """
    methods = [text for text in overrides if text.startswith("decoding.method=")]
    if methods:
        drop_options(source.tree, methods[-1].partition("=")[2])
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{redact(text)!r}: an override is written key=value, such as "
                "decoding.method=guided"
            )
        with raised_as(ConfigError, repr(redact(text)), TypeError):
            set_key(source.tree, key, value_of(value))
        keys = tuple(key.split("."))
        # The message omits the value, because it may be long, or a misplaced secret.
        source.overrides[keys] = f"{redact(key)}=... {origin}"


def value_of(text: str) -> Any:
    """Return the value that YAML reads in a text, or the text itself if it is not valid YAML."""
    if not text:
        return None
    try:
        return parse(text)
    except YAMLError:
        return text


def value_at(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; an option that is not set has its default value."""
    *parents, last = key.split(".")
    section: Any = config
    for name in parents:
        if isinstance(section, dict):
            section = section.get(name)
        else:
            section = read(section, name)
    if isinstance(section, dict):
        return section.get(last)
    return getattr(section, last)


def _checked(source: YamlFile, overrides: list[str], folder: Path, origin: str) -> RunConfig:
    """Apply overrides, resolve the task's schema, and check the result.

    Args:
        source: The configuration that was read.
        overrides: `key=value` texts.
        folder: The folder in which pydantic models of `task.schema` are searched for.
        origin: Where the overrides were given, for messages.
    """
    override(source, overrides, origin)
    if isinstance(source.tree.get("task"), dict):
        _resolve_schema(source, source.tree["task"], folder)
    return _validated(source)


def _resolve_schema(source: YamlFile, task: dict[str, Any], folder: Path) -> None:
    """Turn the key of a task that says what is extracted into `task.categories`."""
    tree = source.tree
    keys = [key for key in _SCHEMA_KEYS if task.get(key)]
    if len(keys) > 1:
        raise ConfigError(f"task.{keys[0]} and task.{keys[1]} are both set: keep one")
    if keys == ["categories_file"]:
        task["categories"] = _categories_in(Path(task["categories_file"]))
        source.include(("task", "categories"), task["categories_file"])
    elif keys == ["schema"]:
        task["categories"] = categories_of(task["schema"], folder)
        _include_attributes(source, task["schema"])
    elif keys == ["attributes"] and isinstance(task["attributes"], list):
        task["categories"] = {UNNAMED_CATEGORY: {"attributes": task["attributes"]}}
        task["attributes"] = []
    # Documents need not name their category if there is only one schema.
    if keys in (["schema"], ["attributes"]) and isinstance(tree.get("input"), dict):
        tree["input"].setdefault("category_column", None)


def _include_attributes(source: YamlFile, schema: Any) -> None:
    """Record the lines of the attributes in the file of `task.schema`, if it lists attributes."""
    if not isinstance(schema, str) or not schema.endswith((".yaml", ".yml")):
        return
    tree = parse(Path(schema).read_text(encoding="utf-8"))
    if isinstance(tree, list):
        source.include(("task", "schema", "attributes"), schema)
    elif lists_attributes(tree):
        source.include(("task", "schema"), schema)


def _categories_in(path: Path) -> dict[str, Any]:
    """Return the categories in the file of `task.categories_file`.

    Raises:
        ConfigError: The file cannot be read, or it has attributes without a category.
    """
    tree = YamlFile.read(path).tree
    if lists_attributes(tree):
        raise ConfigError(
            f"task.categories_file: {path}: has attributes without a category: set task.schema to "
            "this file instead"
        )
    return tree


def _validated(source: YamlFile) -> RunConfig:
    try:
        return RunConfig.model_validate(source.tree)
    except ValidationError as error:
        raise ConfigError(explain(error, source)) from None
