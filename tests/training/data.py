"""A small corpus whose values stand in its texts, a configuration, and what each token sees."""

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
from tests.runs import config_tree, decoding_section, extraction, write_rows
from tests.tiny import tiny_model, tiny_tokenizer

COLORS = ["red", "blue", "green", "black"]
BRANDS = ["Acme", "Zeta", "Orla"]
VALUES = {
    "Brand": BRANDS,
    "Color": [*COLORS, None, None],
    "Size": [7, 12, 40, None],
}


def write_corpus(path: Path, count: int, seed: int = 0) -> Path:
    """Write listings with labels; return the path."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        target: dict[str, Any] = {name: draw.choice(values) for name, values in VALUES.items()}
        title = " ".join(str(value) for value in target.values() if value is not None)
        rows.append(
            {
                "id": str(number),
                "category": "shoes",
                "title": title,
                "target": target,
            }
        )
    return write_rows(path, rows)


def tree(corpus: Path, output: Path, model: str, /, **sections: Any) -> dict[str, Any]:
    """Return the tree of a configuration of extraction; `sections` add to it."""
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
    for name, keys in sections.items():
        defaults[name] = {**defaults.get(name, {}), **keys}
    task = extraction(
        shoes=[
            "Brand",
            colors,
            {"name": "Size", "type": "number"},
        ]
    )
    return config_tree({**task, "template": str(template)}, corpus, output, **defaults)


def generation_tree(
    method: str, training: Any = None, path: Any = "in.jsonl", **decoding: Any
) -> dict[str, Any]:
    """Return the tree of a configuration for documents with `turns` and `responses`."""
    sections = {
        "input": {"text_columns": ["turns"], "category_column": None},
        "decoding": decoding_section(method, **decoding),
        "training": {"labels_column": "responses", **(training or {})},
    }
    return config_tree({"kind": "generation", "prompt_column": "turns"}, path, **sections)


def loaded_tiny(model: Any, method: str = "") -> LoadedModel:
    """Return a tiny model with the control tokens of a method."""
    tokenizer = tiny_tokenizer()
    if method in CONTROL_TOKENS and method != "pasta":
        add_control_tokens(model, tokenizer, method)
    return LoadedModel(model, tokenizer, "tiny", torch.float32, torch.device("cpu"), 4096)


def dense_logits(model: Any, example: Example) -> torch.Tensor:
    """Return the logits of an unmodified model with a dense mask, at the example's targets.

    They are [targets, vocabulary].
    """
    n = len(example)
    visible = np.tril(np.ones((n, n), dtype=bool))
    visible[example.shared :] = example.visibility()
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64)
    mask = mask.masked_fill(~torch.from_numpy(visible), -torch.inf)
    output = model(
        torch.from_numpy(example.tokens)[None],
        attention_mask=mask,
        position_ids=torch.from_numpy(example.positions)[None],
        use_cache=False,
    )
    return output.logits[0][list(example.targets)]


Token = tuple[int, int]  # (position, segment)


def allowed(example: Example) -> dict[Token, set[Token]]:
    """Return the keys that each own token of an example sees."""
    tokens = list(zip(example.positions.tolist(), example.segments.tolist(), strict=True))
    keys_by_query = {}
    for query, row in enumerate(example.visibility(), start=example.shared):
        keys_by_query[tokens[query]] = {tokens[key] for key in np.flatnonzero(row)}
    return keys_by_query


def recorded(program: Program[Any], example: Example, size: int = 256) -> dict[Token, set[Token]]:
    """Return the keys that each own token sees in the engine.

    The engine's model answers with the example's targets. `size` is the number of token ids.
    """
    gold = {}
    for index, token in example.targets.items():
        gold[int(example.positions[index]), int(example.segments[index])] = token
    engine = Engine(tiny_model("llama", vocab_size=size))
    engine.few = None  # so that all tokens come from the model's logits
    keys_by_query: dict[Token, set[Token]] = {}
    forward = engine.model.forward

    def teach(ids: Any, positions: Any, step: Any, *arguments: Any, **named: Any) -> Any:
        logits, hidden = forward(ids, positions, step, *arguments, **named)
        (group,) = step.groups
        (span,) = group.spans
        prefix = {(position, 0) for position in range(group.length)}
        keys = list(zip(*span.keys[:2].tolist(), strict=True))
        queries = list(zip(*span.queries[:2].tolist(), strict=True))
        for row, query in zip(span.visibility, queries, strict=True):
            keys_by_query[query] = prefix | {keys[key] for key in np.flatnonzero(row)}
        for row, index in enumerate(step.sample_rows.tolist()):
            logits[row] = -1000.0
            logits[row, gold[queries[index]]] = 1000.0
        return logits, hidden

    engine.model.forward = teach
    engine.run([program])
    return {query: keys for query, keys in keys_by_query.items() if query[0] >= example.shared}
