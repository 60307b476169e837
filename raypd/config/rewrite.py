"""The configuration that `raypd tune` writes: the user's own file, comments and all, with the changed keys."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import yaml

from raypd.config import RunConfig
from raypd.config.load import load_config
from raypd.errors import ConfigError, RunError

_MARK = "# Written by raypd tune."
_PATHS = ("input.path", "task.categories_file", "task.template", "task.few_shot", "model.name", "model.adapter")


def check_target(target: Path, source: Path) -> None:
    """Raises ConfigError where writing there would lose something that is the user's."""
    if target.resolve() == source.resolve():
        raise ConfigError(f"--output {target}: is the configuration itself; tune never writes over it")
    if target.is_dir():
        raise ConfigError(f"--output {target}: is a folder; give a file")
    if target.exists() and not target.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
        raise ConfigError(f"{target}: is there already and not from raypd tune; --output names another file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: the folder {target.parent} does not exist")


def write(source: Path, overrides: list[str], changes: dict[str, Any], target: Path, why: str) -> RunConfig:
    """Writes `source` with the overrides of the command line and the changes; what it reads as.

    Relative paths keep their meaning. Raises RunError when it cannot be written.
    """
    from ruamel.yaml import YAML

    roundtrip = YAML()
    roundtrip.preserve_quotes = True
    roundtrip.width = 4096
    roundtrip.indent(mapping=2, sequence=4, offset=2)
    tree = roundtrip.load(source.read_text(encoding="utf-8"))
    before = load_config(source, overrides)
    typed = {key: yaml.safe_load(value) if value else None for key, _, value in (o.partition("=") for o in overrides)}
    moved = target.resolve().parent != source.resolve().parent
    # An override's relative path is relative to the current folder, a file's is to the file.
    paths = {key: value for key, value in _anchored(before).items() if moved or key in typed}
    for key, value in {**typed, **paths, **changes}.items():
        _set(tree, key, value)
    out = io.StringIO()
    roundtrip.dump(tree, out)
    told = [part for line in why.splitlines() for part in textwrap.wrap(line, 98, break_on_hyphens=False)]
    lines = [_MARK, *(f"# {line}" for line in told), ""]
    try:
        target.write_text("\n".join(lines) + "\n" + out.getvalue(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error}; --output names another file") from None
    made = load_config(target)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if getattr(getattr(made, section), name) != value:
            raise RunError(f"{target}: {key} does not read back as {value!r}; set it by hand")
    return made


def _anchored(config: RunConfig) -> dict[str, Any]:
    """The path keys of a loaded configuration that are local paths, absolute."""
    found: dict[str, Any] = {}
    for key in _PATHS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name, None)
        if isinstance(value, list):
            found[key] = [_absolute(one) for one in value]
        elif value is not None and not (section == "model" and not Path(value).is_dir()):
            found[key] = _absolute(value)
    return found


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _set(tree: Any, key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            name = tree.get(part)
            tree[part] = {"name": name} if part == "model" and isinstance(name, str) else {}  # model: NAME is short
        tree = tree[part]
    tree[last] = value
