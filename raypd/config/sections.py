"""Accesses dotted keys of a configuration that is still a tree of plain mappings."""

import copy
from typing import Any

from raypd.config.model import METHOD_OPTIONS
from raypd.config.moved import LONG_DOCUMENTS, MOVED, REMOVED
from raypd.schema import Section


def section_at(tree: Any, name: str) -> Any:
    """Return a section of a mapping, or None if there is none.

    `model: NAME` is short for `model: {name: NAME}`, which replaces it in the tree.
    """
    if not isinstance(tree, dict):
        return None
    if name == "model" and isinstance(tree.get(name), str):
        tree[name] = {"name": tree[name]}
    return tree.get(name)


def set_key(tree: Any, key: str, value: Any) -> None:
    """Set a dotted key in a mapping of mappings, and add missing sections.

    Raises:
        TypeError: A part of the key contains a value instead of keys.
    """
    *parents, last = key.split(".")
    section = tree
    for parent in parents:
        if section_at(section, parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise TypeError(f"{parent!r} holds no keys")
    section[last] = value


def _has_key(tree: Any, key: str) -> bool:
    """Return whether a mapping of mappings contains a dotted key."""
    for name in key.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def drop_options(tree: dict[str, Any], method: str) -> None:
    """Remove the options that a decoding method lacks, if it replaces the method of the tree."""
    decoding = tree.get("decoding")
    if not isinstance(decoding, dict) or decoding.get("method", method) == method:
        return
    options = decoding.get("options")
    if isinstance(options, dict):
        decoding["options"] = _known_options(options, method)


def _known_options(options: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the options that a decoding method has."""
    fields = METHOD_OPTIONS.get(method, Section).model_fields
    return {name: value for name, value in options.items() if name in fields}


def with_current_keys(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of an earlier release's run with the keys of this release.

    It omits options of other decoding methods, which that release also recorded.
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
        if isinstance(value, dict):
            moved = {f"{new}.{option}": option_value for option, option_value in value.items()}
        else:
            moved = {new: value}
        for key, moved_value in moved.items():
            if not _has_key(tree, key):
                set_key(tree, key, moved_value)
    decoding = tree.get("decoding")
    if isinstance(decoding, dict) and "options" in decoding:
        decoding["options"] = _known_options(decoding["options"], decoding.get("method", ""))
    task = tree.get("task")
    if isinstance(task, dict) and task.get("kind") != "generation" and "too_long" in task:
        task["long_documents"] = LONG_DOCUMENTS[task.pop("too_long")]
    return tree
