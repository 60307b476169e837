"""The configuration written out as YAML: every key with its value or default, and what it means
beside it.
"""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypd.config.options import OptionsOf
from raypd.config.run import RunConfig
from raypd.config.tasks import KINDS
from raypd.config.yaml_file import dump

_WIDTH = 48  # column of the comments
_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    NoneType: "null",
    Any: "value",
}


def render(config: RunConfig | None = None) -> str:
    """YAML of a configuration, or of the defaults; a key that must be given stands as `null  #
    required`.
    """
    return "\n".join(_section(RunConfig, config, 0)) + "\n"


def _section(model: type[BaseModel], values: BaseModel | None, depth: int) -> list[str]:
    out: list[str] = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        extra = info.json_schema_extra  # the word for a default that depends on other keys
        shown = extra.get("shown", default) if isinstance(extra, dict) else default
        value = getattr(values, name) if values is not None else shown
        if name == "task":
            kinds = [type(value)] if isinstance(value, BaseModel) else list(KINDS.values())
            for kind in kinds:  # a run has one: the others stand as comments
                note = (kind.__doc__ or "").strip().splitlines()[0]
                lines = [
                    f"task:  # {note}",
                    *_section(kind, value if isinstance(value, BaseModel) else None, 1),
                ]
                out += lines if kind is kinds[0] else ["", *(f"# {line}" for line in lines)]
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            note = f"  # {(inner.__doc__ or '').strip().splitlines()[0]}"
            out.append(f"{'  ' * depth}{name}:{note}")
            out += _section(inner, value if isinstance(value, BaseModel) else None, depth + 1)
        else:
            out += _leaf(name, info, value, values is None and info.is_required(), depth)
            for options in _options_of(info):
                out += _options(options, depth + 1)
        if depth == 0:
            out.append("")
    return out[:-1] if depth == 0 else out


def _options_of(info: FieldInfo) -> list[OptionsOf]:
    """What a key says about the mapping that it holds: a list of at most one item."""
    return [part for part in info.metadata if isinstance(part, OptionsOf)]


def _options(options: OptionsOf, depth: int) -> list[str]:
    """Comments that name all options that a mapping may have, with their defaults.

    Args:
        options: Which classes check the mapping.
        depth: Levels of keys above the options.
    """
    lines = []
    indent = "  " * depth
    for owner, section in options.sections.items():
        if owner and section.model_fields:
            lines.append(f"{indent}# {options.chosen_by} {owner}:")
        for name, info in section.model_fields.items():
            for line in _leaf(name, info, info.get_default(), False, 0):
                lines.append(f"{indent}# {line}")
    return lines


def _leaf(name: str, info: FieldInfo, value: Any, required: bool, depth: int) -> list[str]:
    description = " ".join((info.description or "").split())
    note = ". ".join(
        [_type(info.annotation), *["required"] * required, *filter(None, [description])]
    )
    plain = _plain(value)
    if isinstance(plain, dict) and plain:
        body = dump(plain).rstrip().splitlines()
        head = f"{'  ' * depth}{name}:"
        lines = [f"{'  ' * (depth + 1)}{line}" for line in body]
    else:
        head, lines = f"{'  ' * depth}{name}: {dump(plain, flow=True, width=10_000).strip()}", []
    return [f"{head.ljust(_WIDTH)}  # {note}", *lines]


def _type(annotation: Any) -> str:
    """What a key takes, in words of YAML: `on-demand | spot | null`, `list of text`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        # Each kind of task knows its own alone.
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
