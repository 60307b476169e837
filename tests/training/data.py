"""A small corpus whose values stand in its listings, and a configuration for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

COLORS, BRANDS = ["red", "blue", "green", "black"], ["Acme", "Zeta", "Orla"]


def write_corpus(path: Path, count: int, seed: int = 0) -> Path:
    """Listings with labels; a third of the values is null."""
    draw = random.Random(seed)
    with open(path, "w") as file:
        for number in range(count):
            target: dict[str, Any] = {
                "Brand": draw.choice(BRANDS),
                "Color": draw.choice([*COLORS, None, None]),
                "Size": draw.choice([7, 12, 40, None]),
            }
            words = [str(value) for value in target.values() if value is not None]
            file.write(json.dumps({"id": str(number), "category": "shoes", "title": " ".join(words), "target": target}))
            file.write("\n")
    return path


def tree(corpus: Path, output: Path, model: str, **sections: Any) -> dict[str, Any]:
    """A configuration's tree; `sections` add to it."""
    attributes = [
        {"name": "Brand"},
        {"name": "Color", "type": "enum", "values": COLORS},
        {"name": "Size", "type": "number"},
    ]
    made: dict[str, Any] = {
        "input": {"path": str(corpus), "text_columns": ["title"]},
        "output": {"path": str(output)},
        "task": {"categories": {"shoes": {"attributes": attributes}}, "template": str(output.parent / "template.j2")},
        "model": {"name": model, "device": "cpu", "dtype": "float32"},
        "decoding": {"max_value_tokens": 12},
    }
    (output.parent / "template.j2").write_text(
        "{% for a in category.attributes %}{{ a.name }} {% endfor %}{{ products }}"
    )
    for name, keys in sections.items():
        made[name] = {**made.get(name, {}), **keys}
    return made
