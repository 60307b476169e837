"""A small corpus whose values stand in its listings, a configuration for it, and what the engine
shows each token.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.program import Program
from raypd.models.control_tokens import CONTROL_TOKENS, add_control_tokens
from raypd.models.load import LoadedModel
from raypd.training.example import Example
from tests.runs import config_tree, extraction, write_rows
from tests.tiny import tiny_model, tiny_tokenizer

COLORS, BRANDS = ["red", "blue", "green", "black"], ["Acme", "Zeta", "Orla"]


def write_corpus(path: Path, count: int, seed: int = 0) -> Path:
    """Listings with labels; a third of the values is null."""
    draw, kinds = (
        random.Random(seed),
        {"Brand": BRANDS, "Color": [*COLORS, None, None], "Size": [7, 12, 40, None]},
    )
    rows = []
    for number in range(count):
        target: dict[str, Any] = {name: draw.choice(values) for name, values in kinds.items()}
        title = " ".join(str(value) for value in target.values() if value is not None)
        rows.append({"id": str(number), "category": "shoes", "title": title, "target": target})
    return write_rows(path, rows)


def tree(corpus: Path, output: Path, model: str, /, **sections: Any) -> dict[str, Any]:
    """A configuration's tree; `sections` add to it."""
    colors = {"name": "Color", "type": "enum", "values": COLORS}
    template = output.parent / "template.j2"
    template.write_text(
        "{% for a in category.attributes %}{{ a.name }} {% endfor %}{{ documents }}"
    )
    defaults: dict[str, Any] = {
        "input": {"text_columns": ["title"]},
        "model": {"name": model, "device": "cpu", "dtype": "float32"},
        "decoding": {"method": "hyper_parallel", "max_value_tokens": 12},
    }
    sections = defaults | {
        name: {**defaults.get(name, {}), **keys} for name, keys in sections.items()
    }
    task = extraction(shoes=["Brand", colors, {"name": "Size", "type": "number"}])
    return config_tree({**task, "template": str(template)}, corpus, output, **sections)


def generation_tree(
    method: str, training: Any = None, path: Any = "in.jsonl", **decoding: Any
) -> dict[str, Any]:
    """A configuration's tree for documents with `turns` and `responses`."""
    given = {"text_columns": ["turns"], "category_column": None}
    labels = {"labels_column": "responses", **(training or {})}
    sections = {"input": given, "decoding": {"method": method, **decoding}, "training": labels}
    return config_tree({"kind": "generation", "prompt_column": "turns"}, path, **sections)


def loaded_tiny(model: Any, method: str = "") -> LoadedModel:
    """A tiny model with the control tokens of a method."""
    tokenizer = tiny_tokenizer()
    if method in CONTROL_TOKENS and method != "pasta":
        add_control_tokens(model, tokenizer, method)
    return LoadedModel(model, tokenizer, "tiny", torch.float32, torch.device("cpu"), 4096)


def dense_logits(model: Any, example: Example) -> torch.Tensor:
    """The logits at the targets of an unmodified model with a dense mask: [targets, vocabulary]."""
    n = len(example)
    visible = np.tril(np.ones((n, n), dtype=bool))
    visible[example.shared :] = example.visibility()
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(
        ~torch.from_numpy(visible), -torch.inf
    )
    ids, positions = (
        torch.from_numpy(example.tokens)[None],
        torch.from_numpy(example.positions)[None],
    )
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0][
        list(example.targets)
    ]


def allowed(example: Example) -> dict[Any, Any]:
    """{(position, segment) of a query: those of its keys}."""
    name = list(zip(example.positions.tolist(), example.segments.tolist(), strict=True))
    visibility = example.visibility()
    return {
        name[q + example.shared]: {name[k] for k in np.flatnonzero(row)}
        for q, row in enumerate(visibility)
    }


def recorded(program: Program[Any], example: Example, size: int = 256) -> dict[Any, Any]:
    """The same of an engine whose model answers with the example's targets."""
    gold = {
        (int(example.positions[i]), int(example.segments[i])): token
        for i, token in example.targets.items()
    }
    engine = Engine(tiny_model("llama", vocab_size=size))
    engine.few = None  # all tokens are answered by the model's logits
    keys_by_query: dict[Any, Any] = {}
    forward = engine.model.forward

    def teach(ids: Any, positions: Any, step: Any, *others: Any, **named: Any) -> Any:
        logits, hidden = forward(ids, positions, step, *others, **named)
        (group,) = step.groups
        (span,) = group.spans
        prefix = {(p, 0) for p in range(group.length)}
        keys = list(zip(*span.keys[:2].tolist(), strict=True))
        queries = list(zip(*span.queries[:2].tolist(), strict=True))
        for row, query in zip(span.seen, queries, strict=True):
            keys_by_query[query] = prefix | {keys[k] for k in np.flatnonzero(row)}
        for place, index in enumerate(step.kept.tolist()):
            logits[place] = -1000.0
            logits[place, gold[queries[index]]] = 1000.0
        return logits, hidden

    engine.model.forward = teach
    engine.run([program])
    return {query: keys for query, keys in keys_by_query.items() if query[0] >= example.shared}
