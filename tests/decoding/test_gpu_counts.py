"""The cost of a pass on a GPU, counted on the meta device.

Kernels are counted, the bytes that they move, and copies between host and device.
"""

from __future__ import annotations

import collections
import importlib.util

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.works import WORKS
from raypd.decoding import kv_cache, passes as packing
from raypd.decoding.attention import plan, sdpa, step
from raypd.decoding.engine import Engine
from raypd.decoding.quantized import quantize
from raypd.decoding.recurrence import plan as recurrence_plan
from tests.decoding.drivers import built

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
LAYERS = 3
META = torch.device("meta")
HYBRIDS = {
    "Qwen3.5-4B": SHAPES["Qwen3.5-4B"],
    "Granite-4-H-Micro": Shape(
        "granitemoehybrid",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 0,
            "shared_intermediate_size": 8192,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "residual_multiplier": 0.22,
            "vocab_size": 100_352,
        },
        is_recurrent=True,
    ),
}
PRODUCTS = {"_scaled_mm", "mm", "addmm", "bmm", "linear", "matmul", "addmm_"}
# Operations that create a tensor or a view of one, and start no kernel.
VIEWS = {
    "view",
    "_unsafe_view",
    "transpose",
    "t",
    "permute",
    "expand",
    "unsqueeze",
    "slice",
    "select",
    "as_strided",
    "detach",
    "split",
    "split_with_sizes",
    "unflatten",
    "flatten",
    "unbind",
    "alias",
    "empty",
    "new_empty",
    "empty_like",
}
GROWTH = {"new_zeros", "copy_"}  # The cache grows by these.


class Counts(TorchDispatchMode):
    """Counts kernels by name, the bytes of those that are no products, and copies by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.pinned = False  # Whether a copy by `to_device` is under way.
        self.tokens = 0  # Tokens of the pass.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        name = func._schema.name.removeprefix("aten::")
        if len(devices) > 1 and name in ("_to_copy", "copy_", "to"):
            self.copies["pinned" if self.pinned else "pageable"] += 1
        elif name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.copies[name] += 1
        elif "meta" in devices and name not in VIEWS:
            self.count(name, tensors)
        return out

    def count(self, name: str, tensors: list[torch.Tensor]) -> None:
        self.kernels[name] += 1
        if name == "embedding":
            self.tokens = len(tensors[-1])
        elif name not in PRODUCTS | GROWTH:
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)


class Launches:
    """Stands in for a kernel of triton, and counts what it moves.

    `moved` are the numbers of the arguments that are tensors the kernel reads or writes.
    """

    def __init__(self, counts: list[Counts], name: str, moved: tuple[int, ...]) -> None:
        self.counts = counts
        self.name = name
        self.moved = moved

    def __getitem__(self, grid):
        # A GPU has these limits for the axes of a grid.
        assert 0 < grid[0] < 1 << 31
        assert all(0 < size < 1 << 16 for size in grid[1:])
        return self._launch

    def _launch(self, *args, **_) -> None:
        self.counts[-1].count(self.name, [args[number] for number in self.moved])


def count_copies(monkeypatch, passed: list[Counts]) -> None:
    """Count copies by `to_device` as pinned ones."""

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        passed[-1].pinned = True
        moved = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        passed[-1].pinned = False
        return moved

    for module in (packing, plan, step, kv_cache, recurrence_plan):
        monkeypatch.setattr(module, "to_device", to_device)


def passes(
    monkeypatch,
    attention: str,
    packed: bool,
    documents: int,
    fp8: bool = False,
    shape: str = "Qwen3-8B",
) -> list[Counts]:
    """Count each pass of hyper-parallel decoding by the layers of a model."""
    from raypd.decoding.attention import triton_kernel
    from raypd.decoding.layers import (
        in_triton,
        triton_experts,
        triton_kernels,
        triton_recurrent,
    )

    passed: list[Counts] = []
    kernels = {
        "_norm": (0, 2),
        "_store_heads": (0, 0),
        "_gated": (0, 1),
        "_quantize": (0, 1),
    }
    for name, moved in kernels.items():
        monkeypatch.setattr(triton_kernels, name, Launches(passed, name, moved))
    kernels = {
        "_choose": (0, 1, 2),
        "_rank": (0, 1),
        "_sort": (0, 1, 2),
        "_mix": (0, 1, 1),
    }
    kernels["_grouped"] = ()
    for name, moved in kernels.items():
        monkeypatch.setattr(triton_experts, name, Launches(passed, name, moved))
    kernels = {
        "_convolve": (0, 6),
        "_gather": (3, 3),
        "_delta_scan": (6, 11),
        "_mamba_scan": (6,),
    }
    kernels |= {"_gated_norm": (0, 1, 3), "_sigmoid_gate": (0, 0, 2)}
    for name, moved in kernels.items():
        monkeypatch.setattr(triton_recurrent, name, Launches(passed, name, moved))
    for name, moved in {"_attend": (0, 3), "_merge": (0, 2)}.items():
        monkeypatch.setattr(triton_kernel, name, Launches(passed, name, moved))
    l40s = triton_kernel.Gpu((8, 9), 142)
    monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: l40s)
    monkeypatch.setattr(triton_kernel, "refusal", lambda _: None)
    monkeypatch.setattr(sdpa, "_has_kernel", lambda *_: True)

    def sample(self, samples, logits, hidden) -> torch.Tensor:
        return torch.tensor([[5.0], [-1.0]]).repeat(1, len(samples.rows))

    count_copies(monkeypatch, passed)
    monkeypatch.setattr(Engine, "_sample", sample)
    with META:
        shapes = SHAPES | HYBRIDS
        sizes = shapes[shape].sizes | {"num_hidden_layers": LAYERS}
        if shapes[shape].is_recurrent:
            sizes["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
        config = AutoConfig.for_model(shapes[shape].kind, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if fp8:
        quantize(model, "fp8")
    if packed:
        model = built(model, in_triton.CudaBuilder())
    engine = Engine(model, max_num_seqs=64, max_num_batched_tokens=8192, attention=attention)
    work = WORKS["W1 keys"]
    for tokens in work.draw(documents, 1000, seed=1):
        engine.submit(work.program(tokens, 1000, isolate=shapes[shape].is_recurrent))
    while engine.pending:
        passed.append(Counts())
        with passed[-1]:
            engine.step()
    return passed


@pytest.mark.parametrize(("documents", "fp8"), [(1, False), (64, False), (64, True)])
def test_a_layer_is_few_launches_and_moves_little_beside_its_products(documents, fp8, monkeypatch):
    for counts in passes(monkeypatch, "triton", True, documents, fp8):
        launches_per_layer = 12
        if fp8 and "_merge" in counts.kernels:
            launches_per_layer += 1
        around_layers = 16  # Embedding, rotary embedding, last norm, head.
        launches = sum(count for name, count in counts.kernels.items() if name not in GROWTH)
        assert launches <= launches_per_layer * LAYERS + around_layers
        # Results are merged if a pass has too few blocks for all multiprocessors.
        merged_bytes = counts.bytes.pop("_merge", 0)
        assert merged_bytes == 0 or counts.tokens <= 512
        kilobytes = counts.bytes.total() / counts.tokens / LAYERS / 1024
        assert kilobytes <= (210 if fp8 else 200)
        assert set(counts.copies) == {"pinned"}
        assert counts.copies["pinned"] <= 2


@pytest.mark.parametrize("shape", ["Qwen3-30B-A3B", "gpt-oss-20b"])
@pytest.mark.parametrize(("documents", "fp8"), [(1, False), (64, False), (64, True)])
def test_a_layer_of_experts_is_few_launches(documents, fp8, shape, monkeypatch):
    for counts in passes(monkeypatch, "triton", True, documents, fp8, shape):
        around_layers = 18  # Embedding, rotary embedding, last norm, head.
        launches = sum(count for name, count in counts.kernels.items() if name not in GROWTH)
        assert launches <= 20 * LAYERS + around_layers
        assert set(counts.copies) == {"pinned"}
        assert counts.copies["pinned"] <= 3
        counts.bytes.pop("_merge", 0)
        kilobytes = counts.bytes.total() / counts.tokens / LAYERS / 1024
        assert kilobytes <= (190 if fp8 else 130)


@pytest.mark.parametrize("shape", HYBRIDS)
@pytest.mark.parametrize(("documents", "fp8"), [(1, False), (16, False), (16, True)])
def test_a_recurrent_layer_is_few_launches(documents, fp8, shape, monkeypatch):
    counted = passes(monkeypatch, "triton", True, documents, fp8, shape)
    scan = "_delta_scan" if shape == "Qwen3.5-4B" else "_mamba_scan"
    for counts in counted:
        around_layers = 20  # Embedding, rotary embedding, last norm, head.
        # The convolution of a prompt is three launches.
        launches_per_layer = 16 if counts.kernels["_gather"] else 14
        launches = sum(count for name, count in counts.kernels.items() if name not in GROWTH)
        assert launches <= launches_per_layer * LAYERS + around_layers
        assert counts.kernels[scan] == 2
        assert set(counts.copies) == {"pinned"}
        assert counts.copies["pinned"] <= 5
    # In decoding a convolution is one launch.
    assert counted[-1].kernels["_convolve"] == 2
    assert counted[-1].kernels["_gather"] == 0


def test_without_triton_scores_are_not_written_out_either(monkeypatch):
    for counts in passes(monkeypatch, "sdpa", False, 64):
        assert not {"softmax", "_softmax", "logsumexp", "exp"} & set(counts.kernels)
        assert set(counts.copies) == {"pinned"}


def test_a_region_closes_up_while_the_host_goes_on(monkeypatch):
    cache = kv_cache.KVCache(64, None, META)
    tensor = torch.empty(1, 2, 16, device=META)
    cache.layer(0, tensor, tensor)
    with Counts() as counts:
        count_copies(monkeypatch, [counts])
        cache.compact(8, np.array([0, 3, 4]))
    assert set(counts.copies) == {"pinned"}
