"""Relative paths in a configuration: which keys contain paths, and what they are relative to."""

from pathlib import Path
from typing import Any

from raypd.config.schema import is_file
from raypd.config.sections import section_at

PATH_KEYS = (
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
# Keys of these sections may also contain a name on the Hub.
_HUB_SECTIONS = ("model.", "cascade.", "decoding.")


def anchor_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the relative paths of a configuration relative to a folder, except the output's.

    Args:
        tree: The configuration that was read; its paths are replaced.
        folder: The folder of the file that contains the configuration.

    Returns:
        The new value of each dotted key that contains a path, or keys with paths.
    """
    anchored_keys: dict[str, Any] = {}
    for key in PATH_KEYS:
        *parents, name = key.split(".")
        section: Any = tree
        for parent in parents:
            section = section_at(section, parent)
        if not isinstance(section, dict):
            continue
        path = _anchored_path(key, section.get(name), folder)
        if path is not None:
            section[name] = path
            anchored_keys[key] = path
    return anchored_keys | _anchor_fit(tree, folder)


def _anchor_fit(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Anchor the dotted keys in `fit.teacher` and `fit.candidates`."""
    fit = section_at(tree, "fit")
    teacher = section_at(fit, "teacher")
    candidates = section_at(fit, "candidates")
    anchored_keys: dict[str, Any] = {}
    if _holds_paths(teacher):
        teacher |= anchored(teacher, folder)
        anchored_keys["fit.teacher"] = teacher
    if isinstance(candidates, dict):
        for candidate in candidates.values():
            if _holds_paths(candidate):
                candidate |= anchored(candidate, folder)
                anchored_keys["fit.candidates"] = candidates
    return anchored_keys


def _holds_paths(keys: Any) -> bool:
    return isinstance(keys, dict) and not keys.keys().isdisjoint(PATH_KEYS)


def anchored(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return dotted keys with their values, whose relative paths become relative to a folder."""
    return {key: _anchored_path(key, value, folder) or value for key, value in keys.items()}


def _anchored_path(key: str, value: Any, folder: Path) -> Any:
    """Return the path, paths or keys of a value relative to a folder; None if it has no path."""
    if key not in PATH_KEYS or value is None:
        return None
    if key == "task.schema" and not is_file(value):
        return None
    is_local = str(value).startswith(("./", "../")) or (folder / str(value)).exists()
    if key.startswith(_HUB_SECTIONS) and not is_local:
        return None
    if isinstance(value, list):
        return [_anchored_path(key, path, folder) for path in value]
    if isinstance(value, dict):
        # The value contains the keys of a run that has not been created yet.
        return anchored(value, folder)
    if not isinstance(value, str) or "://" in value:
        return value
    return str(folder / Path(value).expanduser())
