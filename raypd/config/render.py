"""Writes the configuration as YAML: every key with its value or default, and its meaning in a
comment.
"""

import textwrap
from collections.abc import Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypd.config.options import OptionsOf, options_in
from raypd.config.run import RunConfig
from raypd.config.tasks import KINDS
from raypd.config.yaml_file import dump

# The column of the comments.
_WIDTH = 48
# The columns of a wrapped comment, even in a narrower terminal.
_LEAST_ROOM = 24
_NONE: Mapping[str, str] = MappingProxyType({})
_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    NoneType: "null",
    Any: "value",
}


def render(
    config: RunConfig | None = None, width: int | None = None, remarks: Mapping[str, str] = _NONE
) -> str:
    """Return the YAML of a configuration, or of the defaults; a required key appears as
    `null  # required`.

    Args:
        config: The configuration; None for the defaults.
        width: Columns into which the comments are wrapped; None does not wrap them.
        remarks: Remarks on the values of some dotted keys, for their comments.
    """
    return "\n".join(_section(RunConfig, config, 0, width, remarks)) + "\n"


def known_keys() -> dict[str, list[FieldInfo]]:
    """Return the fields of each dotted key; several if kinds of a task or options share its
    name.
    """
    keys: dict[str, list[FieldInfo]] = {}
    _add_keys(RunConfig, "", keys)
    return keys


def _add_keys(section: type[BaseModel], parent: str, keys: dict[str, list[FieldInfo]]) -> None:
    """Add the keys of a section and of all sections in it.

    Args:
        section: The class of the section.
        parent: The dotted key of the section with a final dot; "" for the whole configuration.
        keys: The fields of each dotted key, to which this function adds.
    """
    for name, info in section.model_fields.items():
        key = f"{parent}{name}"
        keys.setdefault(key, []).append(info)
        for inner in _sections_below(key, info):
            _add_keys(inner, f"{key}.", keys)


def _sections_below(key: str, info: FieldInfo) -> list[type[BaseModel]]:
    """Return the classes of the sections that a dotted key may contain, and of its options."""
    if key == "task":
        return list(KINDS.values())
    choices = [info.annotation]
    if get_origin(info.annotation) in (Union, UnionType):
        choices += get_args(info.annotation)
    for options in options_in(info):
        choices += options.sections.values()
    return [
        choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)
    ]


def render_key(key: str, width: int | None = None) -> str:
    """Return the YAML of one key with its default, below the sections that contain it.

    Args:
        key: A dotted key of `known_keys`.
        width: Columns into which the comments are wrapped; None does not wrap them.
    """
    *parents, name = key.split(".")
    depth = len(parents)
    variants: list[list[str]] = []
    for info in known_keys()[key]:
        lines = _key(name, info, None, depth, width, _NONE, "")
        if lines not in variants:
            variants.append(lines)
    head = [f"{'  ' * level}{parent}:" for level, parent in enumerate(parents)]
    # A key has one value, so those of other kinds are comments.
    for lines in variants[1:]:
        variants[0] += [f"# {line}" for line in lines]
    return "\n".join([*head, *variants[0]]) + "\n"


def _commented(head: str, note: str, column: int, width: int | None) -> list[str]:
    """Return a line of YAML with its comment, which continues on further lines if it is long.

    Args:
        head: The line.
        note: The comment.
        column: The column of the comment, if the line does not reach it.
        width: Columns that a line may take; None for any number.
    """
    if width is None or max(len(head), column) + len("  # ") + len(note) <= width:
        return [f"{head.ljust(column)}  # {note}"]
    indent = len(head) - len(head.lstrip(" "))
    column = max(indent + 2, min(column, width // 3))
    room = max(_LEAST_ROOM, width - column - len("  # "))
    notes = textwrap.wrap(note, room, break_long_words=False, break_on_hyphens=False)
    further = [f"{'':{column}}  # {part}" for part in notes[1:]]
    if len(head) + len("  # ") + len(notes[0]) <= width and len(head) <= column:
        return [f"{head.ljust(column)}  # {notes[0]}", *further]
    return [head, f"{'':{column}}  # {notes[0]}", *further]


def _section(
    model: type[BaseModel],
    values: BaseModel | None,
    depth: int,
    width: int | None,
    remarks: Mapping[str, str],
    parent: str = "",
) -> list[str]:
    """Return the lines of a section.

    Args:
        model: The class of the section.
        values: The section; None for the defaults.
        depth: Levels of keys above it.
        width: Columns into which the comments are wrapped; None does not wrap them.
        remarks: Remarks on the values of some dotted keys.
        parent: The dotted key of the section with a final dot; "" for the whole configuration.
    """
    out: list[str] = []
    for name, info in model.model_fields.items():
        if name == "task":
            value = getattr(values, name) if values is not None else None
            kinds = [type(value)] if isinstance(value, BaseModel) else list(KINDS.values())
            # A run has one kind, so the others are comments.
            for kind in kinds:
                note = (kind.__doc__ or "").strip().splitlines()[0]
                room = width
                if kind is not kinds[0] and width is not None:
                    room = width - len("# ")
                lines = [
                    *_commented("task:", note, 0, room),
                    *_section(
                        kind,
                        value if isinstance(value, BaseModel) else None,
                        1,
                        room,
                        remarks,
                        "task.",
                    ),
                ]
                out += lines if kind is kinds[0] else ["", *(f"# {line}" for line in lines)]
        else:
            out += _key(name, info, values, depth, width, remarks, parent)
        if depth == 0:
            out.append("")
    return out[:-1] if depth == 0 else out


def _key(
    name: str,
    info: FieldInfo,
    values: BaseModel | None,
    depth: int,
    width: int | None,
    remarks: Mapping[str, str],
    parent: str,
) -> list[str]:
    """Return the lines of a key, and of all keys below it.

    Args:
        name: The key.
        info: The field of the key.
        values: The section that contains the key; None for the defaults.
        depth: Levels of keys above it.
        width: Columns into which the comments are wrapped; None does not wrap them.
        remarks: Remarks on the values of some dotted keys.
        parent: The dotted key of the section with a final dot; "" for the whole configuration.
    """
    inner = info.annotation
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    # The schema has the word for a default that depends on other keys.
    extra = info.json_schema_extra
    shown = extra.get("shown", default) if isinstance(extra, dict) else default
    value = getattr(values, name) if values is not None else shown
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        note = (inner.__doc__ or "").strip().splitlines()[0]
        return [
            *_commented(f"{'  ' * depth}{name}:", note, 0, width),
            *_section(
                inner,
                value if isinstance(value, BaseModel) else None,
                depth + 1,
                width,
                remarks,
                f"{parent}{name}.",
            ),
        ]
    required = values is None and info.is_required()
    remark = remarks.get(f"{parent}{name}", "")
    lines = _leaf(name, info, value, required, depth, width, remark)
    for options in options_in(info):
        lines += _options(options, depth + 1, width)
    for section in _optional_sections(info):
        lines += _keys_in_comments(section, depth + 1, width)
    return lines


def _options(options: OptionsOf, depth: int, width: int | None) -> list[str]:
    """Return comments that name all options of a mapping, with their defaults.

    Args:
        options: The annotation with the classes that check the mapping.
        depth: Levels of keys above the options.
        width: Columns into which the comments are wrapped; None does not wrap them.
    """
    lines = []
    for owner, section in options.sections.items():
        if owner and section.model_fields:
            lines.append(f"{'  ' * depth}# {options.chosen_by} {owner}:")
        lines += _keys_in_comments(section, depth, width)
    return lines


def _optional_sections(info: FieldInfo) -> list[type[BaseModel]]:
    """Return the class of a section that a key may contain instead of null: a list of at most one.

    A class that is a section of every configuration is left out, because its keys are shown there.
    """
    everywhere = [field.annotation for field in RunConfig.model_fields.values()]
    sections = []
    if get_origin(info.annotation) in (Union, UnionType):
        for choice in get_args(info.annotation):
            is_section = isinstance(choice, type) and issubclass(choice, BaseModel)
            if is_section and choice not in everywhere:
                sections.append(choice)
    return sections


def _keys_in_comments(section: type[BaseModel], depth: int, width: int | None) -> list[str]:
    """Return comments with the keys of a section, their defaults and their meanings.

    Args:
        section: The class of the section.
        depth: Levels of keys above those of the section.
        width: Columns into which the comments are wrapped; None does not wrap them.
    """
    lines = []
    indent = "  " * depth
    room = None
    if width is not None:
        room = width - len(indent) - len("# ")
    for name, info in section.model_fields.items():
        required = info.is_required()
        default = None if required else info.get_default()
        for line in _leaf(name, info, default, required, 0, room):
            lines.append(f"{indent}# {line}")
    return lines


def _leaf(
    name: str,
    info: FieldInfo,
    value: Any,
    required: bool,
    depth: int,
    width: int | None,
    remark: str = "",
) -> list[str]:
    """Return the lines of a key that contains no section.

    Args:
        name: The key.
        info: The field of the key.
        value: Its value.
        required: Whether it must be given.
        depth: Levels of keys above it.
        width: Columns into which its comment is wrapped; None does not wrap it.
        remark: A remark on this value, for the comment.
    """
    description = " ".join((info.description or "").split())
    parts = [_type(info.annotation)]
    if remark:
        parts.insert(0, remark)
    if required:
        parts.append("required")
    if description:
        parts.append(description)
    note = ". ".join(parts)
    plain = _plain(value)
    if isinstance(plain, dict) and plain:
        body = dump(plain).rstrip().splitlines()
        head = f"{'  ' * depth}{name}:"
        lines = [f"{'  ' * (depth + 1)}{line}" for line in body]
    else:
        head, lines = f"{'  ' * depth}{name}: {dump(plain, flow=True, width=10_000).strip()}", []
    return [*_commented(head, note, _WIDTH, width), *lines]


def _type(annotation: Any) -> str:
    """Return the type of a key in words of YAML: `on-demand | spot | null`, `list of text`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        # Each kind of task knows only its own name.
        return " | ".join(map(str, KINDS if inner[0] in KINDS else inner))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type, inner)))
    if origin is Annotated:
        return _type(inner[0])
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"mapping of {_type(inner[0])} to {_type(inner[1])}"
    if annotation is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return _WORDS[annotation]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {
            k: _plain(v)
            for k, v in value
            if (v not in ("", [], None) and v is not False) or k == "name"
        }
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
