"""Small passes on a GPU as CUDA graphs: the host starts one graph where it would start hundreds of
kernels. There is one for each size of pass, captured when one of its size comes again; tokens that
fill a pass up put their keys into a slot of the cache that no sequence has, and attention leaves
them out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from raypd.decoding.attention.plan import Item, KernelPlan, power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.kv_cache import KVCache

# Tokens times weights of a layer: more keep an H100 busy for longer than the host needs to start
# kernels.
_WORK = 220e9
_LEAST_ROWS = 64  # of results that are merged: fewer graphs
_MOST_ROWS = 2048  # of logits, which are held twice: 1.2 GB of a vocabulary of 152,000
_MOST_GRAPHS = 256  # each takes memory of the driver; passes of other sizes go without

# Tokens, predictions, words of a set of segments, rows of results that are merged and tokens that
# have them, and for each number of rows that a block of queries has the items of such blocks.
Size = tuple[int, int, int, tuple[int, ...], tuple[tuple[int, int], ...]]

_log = logging.getLogger(__name__)


class Graphs:
    """The graphs of one model; `forward`: tokens [n], positions [n] and the pass -> logits [kept,
    vocabulary].
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, Step], torch.Tensor],
        cache: KVCache,  # a slot of it is taken
        config: PreTrainedConfig,
    ) -> None:
        from raypd.decoding.attention.triton_kernel import card, tiles

        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.forward, self.cache, self.most = forward, cache, most_tokens(config)
        capability, processors = card(cache.device)
        self.repeat, self.fill = heads // kv_heads, 2 * processors // kv_heads
        self.tiles = partial(tiles, capability)
        self.window = getattr(config, "sliding_window", None)
        self.spare = cache.alloc(1)
        # Of the cache: where it has moved, graphs read what is no longer there.
        self.generation = -1
        self.keys = torch.empty(0)  # of a pass, in whatever graph: [slots, 3], as in `KernelPlan`
        # Logits of a pass, in whatever graph: [rows, vocabulary].
        self.out: torch.Tensor | None = None
        self.graphs: dict[Size, _Graph] = {}
        self.sizes: set[Size] = set()  # that have come: a graph is made when one comes again
        self.failed = False
        self.pool: Any = None  # of memory, and the stream, that all captures share
        self.stream: Any = None
        if cache.device.type == "cuda":
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(cache.device)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor | None:
        """[kept, vocabulary] of tokens and positions [tokens].

        None where the pass has to go without a graph: it is the first of its size, large, predicts
        nothing, a window hides keys, there are many graphs, or a capture failed.
        """
        windowed = any(
            span.felt(self.window) is not None for group in step.groups for span in group.spans
        )
        large = len(ids) > self.most or len(step.kept) > _MOST_ROWS
        if self.failed or windowed or large or not len(step.kept) or not self.cache.keys:
            return None
        if self.generation != self.cache.generation:
            self.graphs.clear()
            self.generation = self.cache.generation
            self.keys = torch.zeros(
                self.cache.allocator.slots, 3, dtype=torch.int32, device=ids.device
            )
        stored = next(iter(self.cache.keys.values()))  # [slots, kv_heads, head_dim]
        rows = tuple(self.tiles(stored.shape[2], stored.element_size()))
        plan = step.plans[self.repeat] = KernelPlan(step, self.repeat, rows, self.fill)
        blocks = tuple((size, power_of_two(len(items))) for size, items in plan.blocks)
        split = tuple(
            max(_LEAST_ROWS, power_of_two(n)) for n in (plan.split_rows, len(plan.merged)) if n
        )
        size = rounded(len(ids)), rounded(len(step.kept)), plan.words, split, blocks
        if size not in self.graphs and (size not in self.sizes or len(self.graphs) >= _MOST_GRAPHS):
            self.sizes.add(size)
            return None
        graph = self.graphs.get(size) or _Graph(size, step, self.repeat, self.spare, self.keys)
        graph.fill(ids, positions, step, plan)
        if size not in self.graphs:
            try:
                graph.replay = captured(
                    partial(self._run, graph), ids.device, self.pool, self.stream
                )
            except RuntimeError as error:
                _log.warning("no CUDA graphs, passes go on without: %s", error)
                self.failed = True
                self.graphs.clear()
                return None
            self.graphs[size] = graph
        graph.replay()
        assert self.out is not None
        return self.out[: len(step.kept)].clone()  # the next pass writes over it

    def _run(self, graph: _Graph) -> None:
        """A graph's pass.

        It keeps no result of its own, so that the next graph's can lie in the same memory.
        """
        logits = self.forward(graph.ids, graph.positions, graph.step)
        if self.out is None:
            self.out = logits.new_empty(rounded(min(self.most, _MOST_ROWS)), logits.shape[1])
        self.out[: len(logits)] = logits


def most_tokens(config: PreTrainedConfig) -> int:
    """Of a pass that is worth a graph: fewer of a larger model."""
    layer = config.hidden_size * (
        4 * config.hidden_size + 3 * getattr(config, "intermediate_size", 0)
    )
    return int(min(4096, max(1024, _WORK // layer)))


def rounded(n: int) -> int:
    """The lowest eighth of a power of two, or multiple of 8, that is n at least."""
    eighth = max(8, power_of_two(n) // 8)
    return -(-n // eighth) * eighth


class _Graph:
    """Passes of one size; for the kernel their `KernelPlan`, too.

    `step`: the first one; `repeat` query heads share a key head; `spare`: the slot for keys of
    tokens that fill up.
    """

    replay: Callable[[], None]  # is there once it is captured

    def __init__(self, size: Size, step: Step, repeat: int, spare: int, keys: torch.Tensor) -> None:
        tokens, kept, self.words, split, blocks = size
        self.split_rows, merged = split or (0, 0)
        device, self.spare, self.keys = step.cache.device, spare, keys
        self.ids, self.positions, to = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        places = torch.zeros(kept, dtype=torch.int64, device=device)
        self.step = Step(step.cache, [], to, places, step.attend, {repeat: self})
        integers = partial(torch.zeros, dtype=torch.int32, device=device)
        self.queries = integers(tokens, 2 + 2 * self.words)
        self.blocks = [(rows, integers(items, len(Item._fields))) for rows, items in blocks]
        self.merged, self.merged_rows = integers(merged, 3), integers(self.split_rows)

    def starts(self, window: int | None) -> None:
        """No window hides anything."""

    def fill(
        self, ids: torch.Tensor, positions: torch.Tensor, step: Step, plan: KernelPlan
    ) -> None:
        """Copies a pass to where the graph reads, all on the device."""
        self.step.slots[len(ids) :] = self.spare
        if self.split_rows:
            self.merged[len(plan.merged) :] = plan.merged[-1]  # once more
        mine = [
            self.ids,
            self.positions,
            self.step.slots,
            self.step.kept,
            self.queries,
            self.keys,
            self.merged,
            self.merged_rows,
        ]
        new = [
            ids,
            positions,
            step.slots,
            step.kept,
            plan.queries,
            plan.keys,
            plan.merged,
            plan.merged_rows,
        ]
        for (_, room), (_, items) in zip(self.blocks, plan.blocks, strict=True):
            room[len(items) :] = 0  # blocks of no queries
            mine.append(room)
            new.append(items)
        for target, source in zip(mine, new, strict=True):
            target[: len(source)] = source


def captured(
    run: Callable[[], None], device: torch.device, pool: Any, side: torch.cuda.Stream
) -> Callable[[], None]:
    """What does again on a GPU what a function does, over the same memory.

    Raises RuntimeError where the GPU has no memory for it, or the function does what a graph cannot
    hold.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            run()  # kernels are compiled, libraries take the memory that they want
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            run()
    return graph.replay
