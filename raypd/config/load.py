"""YAML and overrides to a checked RunConfig.

Relative paths: to the file; of overrides and output: to the cwd.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from raypd.config import KINDS, Category, RunConfig, redact
from raypd.config.model import METHOD_OPTIONS
from raypd.config.moved import MOVED, REMOVED, moved_to
from raypd.config.options import OptionsError, read
from raypd.config.schema import categories_of, is_file
from raypd.config.yaml_file import YamlFile, parse
from raypd.errors import ConfigError, did_you_mean, raised_as
from raypd.schema import Attribute, Section

_PATHS = (
    "input.path",
    "task.categories_file",
    "task.schema",
    "task.template",
    "task.few_shot",
    "task.examples.path",
    "model.name",
    "model.adapter",
    "model.calibration",
    "decoding.options.heads",
    "decoding.options.draft_model",
    "cascade.model.name",
    "cascade.model.adapter",
    "cascade.model.calibration",
    "fit.labels",
    "training.labels",
    "training.validation",
    "training.annotations",
    "training.preference.samples",
    "training.preference.baseline",
    "training.preference.judged",
)


def load_config(
    path: str | Path, overrides: list[str] | None = None, trains: bool = False
) -> RunConfig:
    """Reads a YAML file; later overrides win. trains: what is left open is as one trains.

    Raises ConfigError.
    """
    source = YamlFile.read(Path(path))
    anchor_paths(source.tree, Path(path).parent)
    config = _checked(source, overrides, Path(path).parent)
    is_open = (source.tree.get("decoding") or {}).get(
        "method", "auto"
    ) == "auto" and config.decoding.method == "guided"
    # In slots, unless the file or the weights' card says a skeleton, or documents are stacked as in
    # the paper.
    in_slots = is_open or config.decoding.method == "hyper_parallel"
    in_slots &= (
        "skeleton" not in config.decoding.model_fields_set and config.decoding.isolate != "none"
    )
    given = ["decoding.method=hyper_parallel"] * is_open + ["decoding.skeleton=slots"] * in_slots
    return load_config(path, [*(overrides or []), *given]) if trains and given else config


def make_config(tree: dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """Checks a tree of no file; its paths are relative to the current folder.

    Raises ConfigError with all mistakes.
    """
    try:
        return _checked(YamlFile(None, copy.deepcopy(tree)), overrides)
    except RecursionError:
        raise ConfigError("the configuration, or a schema in it, is nested too deeply") from None


def override(tree: dict[str, Any], overrides: Sequence[str] | None) -> None:
    """Sets the keys of `key=value`. Raises ConfigError."""
    overrides = list(overrides or [])
    methods = [text for text in overrides if text.startswith("decoding.method=")]
    if methods:
        drop_options(tree, methods[-1].partition("=")[2])
    for given in overrides:
        key, equals, value = given.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{redact(given)!r}: an override is written key=value, such as "
                "decoding.method=guided"
            )
        with raised_as(ConfigError, repr(redact(given)), TypeError):
            set_key(tree, key, value_of(value))


def with_current_keys(recorded: dict[str, Any]) -> dict[str, Any]:
    """The configuration of an earlier release's run, with the keys of this release.

    Options of decoding methods other than its own, which that release recorded too, are left out.
    """
    tree = copy.deepcopy(recorded)
    for removed in REMOVED:
        section, _, name = removed.partition(".")
        if isinstance(tree.get(section), dict):
            tree[section].pop(name, None)
    for old, new in MOVED.items():
        section, _, name = old.partition(".")
        if not isinstance(tree.get(section), dict) or name not in tree[section]:
            continue
        value = tree[section].pop(name)
        values = value if isinstance(value, dict) else {new.rpartition(".")[2]: value}
        mapping = tree[section].setdefault(new.split(".")[1], {})
        for option, option_value in values.items():
            mapping.setdefault(option, option_value)
    decoding = tree.get("decoding")
    if isinstance(decoding, dict) and "options" in decoding:
        known = METHOD_OPTIONS.get(decoding.get("method", ""), Section).model_fields
        decoding["options"] = {
            name: value for name, value in decoding["options"].items() if name in known
        }
    return tree


def drop_options(tree: dict[str, Any], method: str) -> None:
    """Remove the options that another decoding method, which takes the place of the tree's, does
    not have.
    """
    decoding = tree.get("decoding")
    if not isinstance(decoding, dict) or decoding.get("method", method) == method:
        return
    options = decoding.get("options")
    known = METHOD_OPTIONS.get(method, Section).model_fields
    if isinstance(options, dict):
        decoding["options"] = {name: options[name] for name in options if name in known}


def _checked(
    source: YamlFile, overrides: list[str] | None, folder: Path | None = None
) -> RunConfig:
    tree: dict[str, Any] = source.tree
    override(tree, overrides)
    task: Any = tree.get("task")
    keys = ("schema", "attributes", "categories", "categories_file")
    sources = [key for key in keys if isinstance(task, dict) and task.get(key)]
    if len(sources) > 1:
        raise ConfigError(f"task.{sources[0]} and task.{sources[1]} are both set: keep one")
    if sources == ["categories_file"]:
        task["categories"] = YamlFile.read(Path(task["categories_file"])).tree
    if sources == ["schema"]:
        task["categories"] = categories_of(task["schema"], folder or Path())
    if sources == ["attributes"] and isinstance(task["attributes"], list):
        attributes = [
            {"name": name} if isinstance(name, str) else name for name in task["attributes"]
        ]
        task |= {"categories": {"record": {"attributes": attributes}}, "attributes": []}
    if sources in (["schema"], ["attributes"]) and isinstance(tree.get("input"), dict):
        tree["input"].setdefault("category_column", None)  # one schema: documents need not name it
    return _validated(source)


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with some keys (dotted) changed.

    Raises ConfigError where they do not fit together.
    """
    source = YamlFile(None, config.model_dump())
    drop_options(source.tree, changes.get("decoding.method", config.decoding.method))
    for key, value in changes.items():
        set_key(source.tree, key, value)
    return _validated(source)


def _validated(source: YamlFile) -> RunConfig:
    try:
        return RunConfig.model_validate(source.tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def value_of(text: str) -> Any:
    """The value that stands behind `key=`, as YAML reads it, or as text where that is no YAML."""
    try:
        return parse(text) if text else None
    except YAMLError:
        return text


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; an option that is not set has its default."""
    *parents, last = key.split(".")
    value: Any = config
    for name in parents:
        if isinstance(value, dict):
            value = value.get(name)
        else:
            value = read(value, name)
    return value.get(last) if isinstance(value, dict) else getattr(value, last)


def set_key(tree: Any, key: str, value: Any) -> None:
    """Sets a dotted key in a mapping of mappings.

    Raises TypeError where a part of it holds something else.
    """
    *above, last = key.split(".")
    for part in above:
        if _section(tree, part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise TypeError(f"{part!r} holds no keys")
    tree[last] = value


def _section(tree: Any, name: str) -> Any:
    """A section of a mapping, None without it.

    `model: NAME` is short for {name: NAME}, which it becomes.
    """
    if not isinstance(tree, dict):
        return None
    if name == "model" and isinstance(tree.get(name), str):
        tree[name] = {"name": tree[name]}
    return tree.get(name)


def anchor_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes relative paths of a tree (but the output's) relative to a folder; key -> path, or what
    holds paths.
    """
    found: dict[str, Any] = {}
    for key in _PATHS:
        *sections, name = key.split(".")
        part: Any = tree
        for section in sections:
            part = _section(part, section)
        if isinstance(part, dict) and (path := _anchored(key, part.get(name), folder)) is not None:
            found[key] = part[name] = path
    fit = _section(tree, "fit")
    teacher, candidates = _section(fit, "teacher"), _section(fit, "candidates")
    for keys in (teacher, *(candidates.values() if isinstance(candidates, dict) else ())):
        if isinstance(keys, dict) and keys.keys() & _PATHS:
            keys |= anchored(keys, folder)
            found |= {"fit.teacher": teacher} if keys is teacher else {"fit.candidates": candidates}
    return found


def anchored(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Dotted keys with their values, of which paths are relative to a folder."""
    return {key: _anchored(key, value, folder) or value for key, value in keys.items()}


def _anchored(key: str, value: Any, folder: Path) -> Any:
    """None where a key holds no path."""
    if key not in _PATHS or value is None or (key == "task.schema" and not is_file(value)):
        return None
    near = str(value).startswith(("./", "../")) or (folder / str(value)).exists()
    if key.startswith(("model.", "cascade.", "decoding.")) and not near:  # of the Hub
        return None
    if isinstance(value, list):
        return [_anchored(key, path, folder) for path in value]
    if isinstance(value, dict):  # keys of a run that is made
        return anchored(value, folder)
    return (
        value
        if not isinstance(value, str) or "://" in value
        else str(folder / Path(value).expanduser())
    )


def _keys_of(location: tuple[str | int, ...]) -> list[str]:
    model: Any = RunConfig
    for part in location:
        if part in KINDS:
            model = KINDS[str(part)]
        elif part == "categories":
            return [*Category.model_fields, *Attribute.model_fields]
        elif part != "task" and part in getattr(model, "model_fields", {}):
            model = model.model_fields[part].annotation
    return list(getattr(model, "model_fields", {}))


def _explain(error: ValidationError, source: YamlFile) -> str:
    lines = []
    for item in error.errors():
        keys = tuple(part for part in item["loc"] if isinstance(part, (str, int)))
        # Pydantic names the kind of a task, which does not stand there.
        place = tuple(
            part
            for i, part in enumerate(keys)
            if not (i == 1 and keys[0] == "task" and part in KINDS)
        )
        if (
            place[:4] == ("task", "categories", "record", "attributes")
            and "attributes" in source.tree["task"]
        ):
            place = ("task", *place[3:])
        problem = item.get("ctx", {}).get("error")
        if isinstance(problem, OptionsError):
            lines += _explain_options(problem, place, source)
            continue
        moved = moved_to(".".join(map(str, place)))
        if item["type"] == "extra_forbidden" and moved:
            what = moved
        elif item["type"] == "extra_forbidden":
            near = did_you_mean(str(place[-1]), _keys_of(keys[:-1]))
            there = [
                f"there is {key}.{place[-1]}"
                for key in RunConfig.model_fields
                if place[-1] in _keys_of((key,))
            ]
            hint = " ".join(filter(None, [near, *there]))
            what = f"unknown key; {hint or '`raypd config show` lists all keys'}"
        elif item["type"] == "missing":
            what = "missing"
        else:
            what = item["msg"].removeprefix("Value error, ")
            if item["type"] == "literal_error":
                choices = re.findall("'([^']*)'", item["ctx"]["expected"])
                what = (
                    f"{did_you_mean(str(item['input']), choices)} choose from {', '.join(choices)}"
                ).strip()
            if item["type"] == "string_type" and isinstance(
                value := item["input"], (bool, int, float, date)
            ):
                kind = (
                    "boolean"
                    if isinstance(value, bool)
                    else "date"
                    if isinstance(value, date)
                    else "number"
                )
                what = f"YAML reads it as the {kind} {str(value).lower()}, not as text: quote it"
            elif item["type"] != "value_error" and not isinstance(item["input"], (dict, list)):
                what += f" (it is {redact(item['input'])!r})"
        lines.append(
            ": ".join(
                part for part in (source.where(place), ".".join(map(str, place)), what) if part
            )
        )
    return "\n".join(lines)


def _explain_options(
    error: OptionsError, location: tuple[str | int, ...], source: YamlFile
) -> list[str]:
    """One line for each wrong option of a mapping.

    Args:
        error: What is wrong with the options.
        location: The keys that lead to the mapping.
        source: The configuration as it was read, which knows the lines of its keys.
    """
    lines = []
    for name, problem in error.problems:
        keys = (*location, *name.split(".")) if name else location
        parts = [source.where(keys), ".".join(map(str, keys)), problem]
        lines.append(": ".join(part for part in parts if part))
    return lines
