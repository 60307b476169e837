"""How often attention's kernel reads the keys of a pass: once for a block of queries.

    python -m benchmarks.gpu.key_reads      # on paper: W1 and W6 on several GPUs, without a GPU

A block of queries reads each key that one of them sees once. So the keys that a pass reads depend
on how many queries share a block: those of all slots of a document, and those of all documents for
the prefix that they share (cascade attention). `raypd.decoding.attention.plan` cuts the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.gpu.results import table
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.works import WORKS, Work
from raypd.decoding.attention.plan import Item, KernelPlan, PlanKey
from raypd.decoding.attention.step import Step
from raypd.decoding.engine import Engine

_VOCABULARY = 1000
# Compute capability, multiprocessors, and gigabytes a second of GPUs.
CARDS = {
    "L40S": ((8, 9), 142, 864),
    "H100": ((9, 0), 132, 3350),
    "H200": ((9, 0), 132, 4800),
}


class KeyReads(NamedTuple):
    """Keys of one layer and key head that a pass reads."""

    read: int  # By all blocks of queries.
    unshared: int  # If each span read the prefix that it shares by itself.
    distinct: int  # Keys that there are, each counted once.
    per_query: int  # If each query read all that it sees by itself.


def key_reads(step: Step) -> KeyReads | None:
    """Return the keys that the kernel reads in a pass; None if the pass did not use the kernel."""
    plans = [(key, plan) for key, plan in step.plans.items() if isinstance(plan, KernelPlan)]
    if not plans:
        return None
    key, plan = plans[0]
    alone = KernelPlan(step, key.repeat, key.block_rows, fill=0)
    distinct = 0
    per_query = 0
    for group in step.groups:
        distinct += group.length
        for span in group.spans:
            distinct += span.key_count
            per_query += span.query_count * group.length + int(span.visibility.sum())
    return KeyReads(_keys_of(plan), _keys_of(alone), distinct, per_query)


def _keys_of(plan: KernelPlan) -> int:
    """Return the keys that all blocks of a plan read."""
    keys = 0
    for _, items in plan.blocks:
        for fields in items.tolist():
            keys += Item(*fields).keys
    return keys


def decode_pass(shape: Shape, work: Work, card: str, documents: int) -> KeyReads:
    """Return the keys that a decode pass reads on a GPU, planned without one.

    The engine plans every pass as on a GPU, and computes none.

    Args:
        shape: The model's shape, of which the heads matter.
        work: The work.
        card: A key of `CARDS`.
        documents: Documents that decode at the same time.
    """
    from raypd.decoding.attention.triton_kernel import tiles

    capability, multiprocessors, _ = CARDS[card]
    config = shape.config()
    repeat = config.num_attention_heads // config.num_key_value_heads
    sizes = tiles(capability, config.head_dim, 2)
    fill = 2 * multiprocessors // config.num_key_value_heads
    key = PlanKey(repeat, tuple(sizes), fill)
    largest = (0, KeyReads(0, 0, 0, 0))  # The queries of a pass, and what it reads.

    class Planned(Engine):
        """An engine that plans passes, and computes none."""

        def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
            nonlocal largest
            is_decoding = all(len(span.queries[0]) <= work.attributes for span in step.spans)
            if is_decoding and len(step.slots) >= largest[0]:
                KernelPlan.of(step, key)
                reads = key_reads(step)
                assert reads is not None
                largest = (len(step.slots), reads)
            return torch.zeros(len(step.sample_rows), 1)

        def _sample(self, samples: Any, logits: Any, hidden: Any) -> torch.Tensor:
            return torch.tensor([[5.0], [-1.0]]).repeat(1, len(samples.rows))

    model = tiny_with_heads(config)
    engine = Planned(model, max_num_seqs=documents, max_num_batched_tokens=8192, attention="sdpa")
    for tokens in work.draw(documents, _VOCABULARY, seed=1):
        engine.submit(work.program(tokens, _VOCABULARY, shape.is_recurrent))
    while engine.pending:
        engine.step()
    return largest[1]


def tiny_with_heads(config: PretrainedConfig) -> PreTrainedModel:
    """Return a tiny model with the heads of another one."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": _VOCABULARY,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))


def _lines() -> Iterator[list[object]]:
    for model in ("Qwen3-8B", "Qwen3-1.7B", "Qwen3-30B-A3B"):
        shape = SHAPES[model]
        config = shape.config()
        # Keys and values of all layers and key heads, in bfloat16.
        key_bytes = 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        for name in ("W1 keys", "W6"):
            for card, (_, _, gigabytes) in CARDS.items():
                work = WORKS[name]
                reads = decode_pass(shape, work, card, 64 if name == "W1 keys" else 16)
                cells = []
                for keys in (reads.per_query, reads.unshared, reads.read, reads.distinct):
                    cells.append(f"{keys * key_bytes / 1e9:.1f}")
                milliseconds = reads.read * key_bytes / gigabytes / 1e6
                yield [model, name, card, *cells, f"{milliseconds:.1f}"]


def main() -> None:
    """Print the table."""
    columns = (
        "model",
        "work",
        "GPU",
        "GB, each query by itself",
        "each block, its own prefix",
        "as planned",
        "each key once",
        "ms at the memory's rate",
    )
    print(table(columns, list(_lines())))


if __name__ == "__main__":
    main()
