"""The files of infra/ with the values of the example settings in their placeholders."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def load_module(path: Path) -> ModuleType:
    """A script of infra/ as a module; infra is no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILL = load_module(INFRA / "fill.py")
SETTINGS: dict[str, str] = FILL.read_settings(INFRA / "settings.example.env")


def text(name: str) -> str:
    return FILL.fill((INFRA / name).read_text(), SETTINGS)


def documents(name: str) -> list[Any]:
    return list(yaml.load_all(text(name), yaml.CSafeLoader))


def policy(name: str) -> dict[str, Any]:
    return json.loads(text(f"iam/{name}.json"))
