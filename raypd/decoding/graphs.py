"""Small passes on a GPU as CUDA graphs: the host starts one graph instead of hundreds of kernels.

There is one graph per pass size. It is captured when a pass of that size occurs for the second
time. A pass is filled up with padding tokens; their keys go into a cache slot that belongs to no
sequence and that attention ignores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from raypd.decoding.attention.plan import Item, KernelPlan, PlanKey, power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.recurrence.plan import SinglePass
from raypd.decoding.recurrence.states import EMPTY, StatePool

# Tokens times weights of a layer. Above this, kernels keep an H100 busy for longer than the host
# needs to launch them.
_MAX_WORK = 220e9
# The most tokens of a pass that runs as a graph: of a small model, and of a large one.
_MAX_TOKENS = 8192
_MIN_MAX_TOKENS = 1024
# Graphs have room for at least this many partial results, so that there are fewer graphs.
_MIN_SPLIT_ROWS = 64
# The rows of logits that graphs may have. They are stored twice: 1.2 GB for a vocabulary of
# 152,000.
_MAX_LOGIT_ROWS = 2048
# Each graph takes driver memory. Passes of further sizes run without a graph.
_MAX_GRAPHS = 256

_log = logging.getLogger(__name__)


class PlanSize(NamedTuple):
    """The size of a `KernelPlan`."""

    key: PlanKey
    words: int  # Words of a set of segments.
    split_rows: int  # Results that are merged.
    merged: int  # Tokens that have such results.
    # For each number of rows that a block of queries can have, the number of such blocks.
    blocks: tuple[tuple[int, int], ...]
    # The windows that hide keys.
    windows: tuple[int, ...]


class Size(NamedTuple):
    """What two passes must have in common to use one graph."""

    tokens: int
    samples: int
    plans: tuple[PlanSize, ...]


class Graphs:
    """The CUDA graphs of one model.

    Attributes:
        graphs: The graphs that were captured.
        sizes: The sizes that have occurred so far.
        failed: Whether a capture failed, after which all passes run without graphs.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, Step], torch.Tensor],
        cache: KVCache,
        config: PreTrainedConfig,
        states: StatePool | None = None,
    ) -> None:
        """
        Args:
            forward: Computes logits [samples, vocabulary] from ids [tokens], positions [tokens] and
                the pass.
            cache: The KV cache. One slot of it is taken for padding.
            config: The model's text configuration.
            states: The states of recurrent layers, of which one is taken for padding; None if the
                model has no such layers.
        """
        self.forward = forward
        self.cache = cache
        self.max_tokens = max_graph_tokens(config)
        # The plans that the model's layers ask for in a pass, and for which windows.
        self.windows: dict[PlanKey, set[int | None]] = {}
        self.padding_slot = cache.alloc(1)
        self.states = states
        self.padding_state = EMPTY
        if states is not None:
            states.reserve(1)
            self.padding_state = states.take()
        # The generations of the cache and of the states for which graphs were captured. If these
        # move, the graphs would read freed memory.
        self.generation = (-1, -1)
        # All graphs share the keys of a pass, [slots, 3], as in `KernelPlan`.
        self.keys = torch.empty(0)
        # All graphs share the logits of a pass, [rows, vocabulary].
        self.out: torch.Tensor | None = None
        self.graphs: dict[Size, _Graph] = {}
        self.sizes: set[Size] = set()
        self.failed = False
        # All captures share a pool of memory and a stream.
        self.pool: Any = None
        self.stream: Any = None
        if cache.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(cache.device)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Run a pass as a graph.

        Args:
            ids: [tokens]
            positions: [tokens]
            step: The pass.

        Returns:
            Logits [samples, vocabulary], or None if the pass must run without a graph: it is the
            first of its size, it is large, it samples nothing, there are too many graphs, or a
            capture failed.
        """
        if self.failed or not self._takes(step):
            return None
        if self.generation != self._generation:
            self._forget_graphs()
        size = self._size(step)
        graph = self.graphs.get(size)
        if graph is not None:
            graph.fill(ids, positions, step)
        elif size in self.sizes and len(self.graphs) < _MAX_GRAPHS:
            graph = _Graph(size, step, self.padding_slot, self.padding_state, self.keys)
            graph.fill(ids, positions, step)
            if graph.single is not None:
                # Capturing runs the pass, and recurrent states must advance only once.
                graph.single.clear()
            if not self._capture(graph):
                return None
            graph.fill(ids, positions, step)
            self.graphs[size] = graph
        else:
            self.sizes.add(size)
            return None
        graph.replay()
        assert self.out is not None
        # The next pass overwrites the logits, so they are copied.
        return self.out[: len(step.sample_rows)].clone()

    def _takes(self, step: Step) -> bool:
        """Return whether a pass is worth a graph and can run as one."""
        samples = len(step.sample_rows)
        if samples == 0 or samples > _MAX_LOGIT_ROWS or len(step.slots) > self.max_tokens:
            return False
        if step.recurrence is not None and not step.recurrence.is_single:
            # Prompts have runs of all lengths, so hardly any two passes have the same size.
            return False
        # The first pass shows which plans there are and allocates the cache's layers. A graph can
        # do neither.
        return len(self.windows) > 0

    def learn(self, step: Step) -> None:
        """Record which plans the layers asked for in a pass without a graph."""
        for key, plan in step.plans.items():
            self.windows.setdefault(key, set()).update(plan.windows)

    @property
    def _generation(self) -> tuple[int, int]:
        return self.cache.generation, 0 if self.states is None else self.states.generation

    def _forget_graphs(self) -> None:
        """Discard the graphs after the cache or the states have moved."""
        self.graphs.clear()
        self.generation = self._generation
        slots = self.cache.allocator.slots
        self.keys = torch.zeros(slots, 3, dtype=torch.int32, device=self.cache.device)

    def _size(self, step: Step) -> Size:
        """Build the plans of a pass as the layers would, and return the size of the pass."""
        plans = []
        for key, windows in self.windows.items():
            plan = KernelPlan.of(step, key)
            hiding = [window for window in windows if plan.starts(window) is not None]
            plans.append(_plan_size(key, plan, tuple(sorted(filter(None, hiding)))))
        return Size(rounded(len(step.slots)), rounded(len(step.sample_rows)), tuple(plans))

    def _capture(self, graph: _Graph) -> bool:
        """Capture a graph; return False if it fails, and use none from then on."""
        run = partial(self._run, graph)
        try:
            graph.replay = captured(run, self.cache.device, self.pool, self.stream)
        except RuntimeError as error:
            _log.warning("no CUDA graphs, passes continue without them: %s", error)
            self.failed = True
            self.graphs.clear()
            return False
        return True

    def _run(self, graph: _Graph) -> None:
        """Compute a graph's pass.

        The graph keeps no result, so that the next one can use the same memory.
        """
        logits = self.forward(graph.ids, graph.positions, graph.step)
        if self.out is None:
            rows = rounded(min(self.max_tokens, _MAX_LOGIT_ROWS))
            self.out = logits.new_empty(rows, logits.shape[1])
        self.out[: len(logits)] = logits


def max_graph_tokens(config: PreTrainedConfig) -> int:
    """Return the tokens of the largest pass that is worth a graph: fewer for a larger model."""
    width = getattr(config, "intermediate_size", None) or 0
    experts = getattr(config, "num_experts_per_tok", None) or 0
    # Experts are as wide as an MLP unless the configuration says otherwise.
    width = experts * (getattr(config, "moe_intermediate_size", None) or width) or width
    layer_weights = config.hidden_size * (4 * config.hidden_size + 3 * width)
    return int(min(_MAX_TOKENS, max(_MIN_MAX_TOKENS, _MAX_WORK // layer_weights)))


def rounded(n: int) -> int:
    """Round n up to an eighth of a power of two, or to a multiple of 8."""
    eighth = max(8, power_of_two(n) // 8)
    return -(-n // eighth) * eighth


def _plan_size(key: PlanKey, plan: KernelPlan, windows: tuple[int, ...]) -> PlanSize:
    """Return the size to which a plan is filled up."""
    split_rows = 0
    merged = 0
    if plan.split_rows:
        split_rows = max(_MIN_SPLIT_ROWS, power_of_two(plan.split_rows))
        merged = max(_MIN_SPLIT_ROWS, power_of_two(len(plan.merged)))
    blocks = tuple((rows, power_of_two(len(items))) for rows, items in plan.blocks)
    return PlanSize(key, plan.words, split_rows, merged, blocks, windows)


class _GraphPlan:
    """The plan of all passes of one size. To the kernel, it looks like a `KernelPlan`."""

    def __init__(self, tokens: int, size: PlanSize, keys: torch.Tensor) -> None:
        """
        Args:
            tokens: Tokens of a pass.
            size: The size.
            keys: The tensor with the keys of a pass, which all graphs share.
        """
        new_integers = partial(torch.zeros, dtype=torch.int32, device=keys.device)
        self.keys = keys
        self.words = size.words
        self.split_rows = size.split_rows
        self.queries = new_integers(tokens, 2 + 2 * size.words)
        self.blocks = [
            (rows, new_integers(items, len(Item._fields))) for rows, items in size.blocks
        ]
        self.merged = new_integers(size.merged, 3)
        self.merged_rows = new_integers(size.split_rows)
        self._starts = {window: new_integers(tokens) for window in size.windows}

    def starts(self, window: int | None) -> torch.Tensor | None:
        """Return what `KernelPlan.starts` does."""
        return None if window is None else self._starts.get(window)

    def fill(self, plan: KernelPlan) -> None:
        """Copy a plan to where the graph reads it, all on the device."""
        if self.split_rows:
            # The padding merges the last token again.
            self.merged[len(plan.merged) :] = plan.merged[-1]
        _copy(plan.queries, self.queries)
        _copy(plan.keys, self.keys)
        _copy(plan.merged, self.merged)
        _copy(plan.merged_rows, self.merged_rows)
        for (_, target), (_, items) in zip(self.blocks, plan.blocks, strict=True):
            target[len(items) :] = 0  # The padding consists of blocks without queries.
            _copy(items, target)
        for window, target in self._starts.items():
            starts = plan.starts(window)
            assert starts is not None
            _copy(starts, target)


class _Graph:
    """Passes of one size.

    Attributes:
        replay: Runs the graph, once it is captured.
    """

    replay: Callable[[], None]

    def __init__(
        self, size: Size, step: Step, padding_slot: int, padding_state: int, keys: torch.Tensor
    ) -> None:
        """
        Args:
            size: The size.
            step: The first pass of this size.
            padding_slot: The slot for the keys of padding tokens.
            padding_state: The slot for their recurrent states.
            keys: The tensor with the keys of a pass, which all graphs share.
        """
        device = step.cache.device
        self.padding_slot = padding_slot
        self.ids = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        slots = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        sample_rows = torch.zeros(size.samples, dtype=torch.int64, device=device)
        self.plans = {plan.key: _GraphPlan(size.tokens, plan, keys) for plan in size.plans}
        self.step = Step(step.cache, [], slots, sample_rows, step.attend, dict(self.plans))
        self.single: SinglePass | None = None
        if step.recurrence is not None:
            self.single = SinglePass(size.tokens, step.recurrence.pool, padding_state)
            self.step.recurrence = self.single

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> None:
        """Copy a pass to where the graph reads it, all on the device."""
        self.step.slots[len(ids) :] = self.padding_slot
        _copy(ids, self.ids)
        _copy(positions, self.positions)
        _copy(step.slots, self.step.slots)
        _copy(step.sample_rows, self.step.sample_rows)
        for key, plan in self.plans.items():
            plan.fill(step.plans[key])
        if self.single is not None:
            assert step.recurrence is not None
            self.single.fill(step.recurrence)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to the beginning of a larger one."""
    target[: len(source)] = source


def captured(
    run: Callable[[], None], device: torch.device, pool: Any, stream: torch.cuda.Stream
) -> Callable[[], None]:
    """Capture what a function does on a GPU.

    Args:
        run: The function.
        device: The GPU.
        pool: The pool of memory that the captures share.
        stream: The stream that the captures share.

    Returns:
        A function that does the same again, over the same memory.

    Raises:
        RuntimeError: If the GPU has no memory for it, or the function does something that a graph
            cannot hold.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # A first run compiles kernels and lets libraries allocate their memory.
            run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay
