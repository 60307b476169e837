"""Run configurations for the public attribute extraction benchmarks, made from their own attribute lists.

    python -m benchmarks.ave DATA_FOLDER oamine > oamine.yaml
    raypd extract oamine.yaml output.path=runs/oamine

DATA_FOLDER holds attributes.json and NAME.test.dev.jsonl, as records {id, category, title, description, target}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from raypd.config.yaml_file import dump
from raypd.errors import InputError

_LISTS = {"oamine": "oa-mine", "ae110k": "ae-110k", "wdcpave": "wdc-pave"}  # file name -> key in attributes.json


def _run_tree(folder: Path, name: str, split: str = "test.dev") -> dict[str, Any]:
    """A run configuration for one benchmark; attributes that only its training part has are left out.

    Raises InputError where the folder lacks a file or the benchmark is not known.
    """
    if name not in _LISTS:
        raise InputError(f"{name}: no such benchmark; choose from {', '.join(_LISTS)}")
    data, lists = folder / f"{name}.{split}.jsonl", folder / "attributes.json"
    for file in (data, lists):
        if not file.is_file():
            raise InputError(f"{file}: not there")
    categories = {}
    for category, known in json.loads(lists.read_text(encoding="utf-8"))[_LISTS[name]].items():
        attributes = [
            {"name": attribute, **({"description": facts["description"].strip()} if facts["description"] else {})}
            for attribute, facts in known["attributes"].items()
            if not facts.get("train_only")
        ]
        if attributes:
            categories[category] = {"attributes": attributes}
    return {
        "input": {"path": str(data.resolve())},
        "output": {"path": f"runs/{name}"},
        "task": {"kind": "extraction", "categories": categories},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with attributes.json and the data")],
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(_LISTS)}")],
    split: Annotated[str, typer.Option(help="Part of the data: NAME.SPLIT.jsonl")] = "test.dev",
) -> None:
    """Print the run configuration of a benchmark as YAML."""
    try:
        tree = _run_tree(folder, name, split)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    print(dump(tree, width=120), end="")


if __name__ == "__main__":
    typer.run(main)
