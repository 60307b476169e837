"""Writes the YAML of `raypd tune` and `raypd fit`: the user's own file, including its comments,
with the changed keys.
"""

import io
import textwrap
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from raypd.config.load import load_config, value_at, value_of
from raypd.config.paths import anchor_paths, anchored
from raypd.config.run import RunConfig
from raypd.config.sections import drop_options, set_key
from raypd.errors import ConfigError, RunError, raised_as
from raypd.schema import Section

_MARK = "# Written by {}."


def check_target(target: Path, source: Path) -> None:
    """Check that writing a file overwrites nothing of the user's.

    Raises:
        ConfigError: It would, or the file cannot be created there.
    """
    if target.resolve() == source.resolve():
        raise ConfigError(
            f"--output {target}: is the configuration itself; tune never writes over it"
        )
    if target.is_dir():
        raise ConfigError(f"--output {target}: is a folder; give a file")
    mark = _MARK.format("raypd tune")
    if target.exists() and not target.read_text(encoding="utf-8", errors="replace").startswith(
        mark
    ):
        raise ConfigError(
            f"{target} already exists and was not written by raypd tune; choose another file with "
            "--output"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: the folder {target.parent} does not exist")


def write(
    source: Path,
    overrides: list[str],
    changes: dict[str, Any],
    target: Path,
    why: str,
    by: str = "raypd tune",
    *,
    keep_comments: bool = True,
) -> RunConfig:
    """Write a configuration with overrides and changes; relative paths keep their meaning.

    Args:
        source: The user's file.
        overrides: `key=value` texts, each of which replaces a key of the file.
        changes: The new value of each dotted key.
        target: The file that is written.
        why: The comment at the top.
        by: The command that writes.
        keep_comments: Whether to keep the user's comments, which may not describe the changes.

    Returns:
        The configuration that the written file contains.

    Raises:
        RunError: If the file cannot be written or read back.
    """
    roundtrip = YAML()
    roundtrip.preserve_quotes = True
    roundtrip.width = 4096
    roundtrip.indent(mapping=2, sequence=4, offset=2)
    tree = roundtrip.load(source.read_text(encoding="utf-8"))
    if not keep_comments:
        tree = _without_comments(tree)
    typed = {
        key: value_of(value)
        for key, _, value in (override.partition("=") for override in overrides)
    }
    moved = target.resolve().parent != source.resolve().parent
    # An override's relative path is relative to the current folder, and a file's is to the file.
    paths = anchor_paths(load_config(source, overrides).model_dump(), Path.cwd())
    paths = {key: value for key, value in paths.items() if moved or key in typed}
    changes = anchored(changes, Path.cwd())
    updates = {**typed, **paths, **changes}
    if "decoding.method" in updates:
        drop_options(tree, updates["decoding.method"])
    for key, value in updates.items():
        set_key(tree, key, value)
    out = io.StringIO()
    roundtrip.dump(tree, out)
    reasons = [
        part
        for line in why.splitlines()
        for part in textwrap.wrap(line, 98, break_on_hyphens=False)
    ]
    lines = [_MARK.format(by), *(f"# {line}" for line in reasons), ""]
    with raised_as(
        RunError, f"{target}: cannot be written", advice="; --output names another file"
    ):
        target.write_text("\n".join(lines) + "\n" + out.getvalue(), encoding="utf-8")
    made = load_config(target)
    for key, value in changes.items():
        held = value_at(made, key)
        if held != (type(held).model_validate(value) if isinstance(held, Section) else value):
            raise RunError(f"{target}: {key} does not read back as {value!r}; set it by hand")
    return made


def _without_comments(tree: Any) -> Any:
    """Return a tree of a round trip as plain mappings and lists, which have no comments."""
    if isinstance(tree, dict):
        return {key: _without_comments(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_comments(item) for item in tree]
    return tree
