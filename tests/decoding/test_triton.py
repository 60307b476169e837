"""The triton kernels in the interpreter, and compiled for GPUs that are not here.

The tests for a GPU also run on a CPU.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from raypd.answering import components
from raypd.answering.components import build
from raypd.decoding import pack as packing
from raypd.decoding.attention import kernels, sdpa
from raypd.decoding.attention.kernels import NAME
from raypd.decoding.engine import Engine
from raypd.errors import ModelError
from tests.processes import ended, start
from tests.runs import with_keys
from tests.tiny import tiny_model, tiny_tokenizer

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
# `make kernels`, which continuous integration runs, compiles by two versions of triton.
made_by_make_kernels = pytest.mark.slow
# Bytes of shared memory that a block may have on the smallest GPUs of these kinds (sm86, sm89).
SHARED_MEMORY = 99 * 1024


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "which",
    [pytest.param("not slow", id="few", marks=pytest.mark.ci), pytest.param("slow", id="many")],
)
def test_the_kernel_in_the_interpreter(which):
    tests = "tests/decoding/triton_interpreted.py"
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which)
    ended(start(*options, tests, TRITON_INTERPRET="1"), seconds=1200)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_families_in_the_interpreter() -> None:
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-x", "-k", "parts_for_gpus")
    output = ended(
        start(*options, "tests/decoding/test_families.py", TRITON_INTERPRET="1"), seconds=1200
    )
    assert "skipped" not in output


@pytest.mark.slow
@pytest.mark.ci
def test_the_tests_for_a_gpu_pass_on_a_cpu() -> None:
    options = ("--noconftest", "-p", "no:cacheprovider", "-p", "tests.decoding.stubbed_gpu")
    needs_gpu = ("triton", "graphs", "packed", "random_pass", "sized_once", "real_model")
    selected = " and ".join(f"not {word}" for word in needs_gpu)
    output = ended(start("-m", "pytest", *options, "tests/test_gpu.py", "-k", selected))
    assert " passed" in output
    assert "failed" not in output
    assert "error" not in output


def compiled(kernel, capability: int, types: dict[str, str], constants: dict, warps: int):
    """Compile a kernel for a GPU that is not here, as the JIT would.

    Returns:
        The compiled kernel, and the bytes that its threads spill.
    """
    from triton import compile
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    attributes = {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "i32")
        if signature[name] != "fp32":
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    result = compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": 2},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    return result, int(stack[1])


@needs_triton
@made_by_make_kernels
@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "rows", "flags"),
    [
        (80, "bf16", 128, 64, {}),
        (89, "bf16", 128, 64, {"SPLIT": True}),
        (89, "bf16", 64, 64, {"SPLIT": True, "WINDOW": True, "SINKS": True}),
        (90, "bf16", 128, 128, {}),
        (89, "bf16", 128, 64, {"SPLIT": True, "cache": "fp8e4nv"}),
        (90, "bf16", 128, 128, {"cache": "fp8e4nv"}),
        # The latents and rotated keys of DeepSeek V3.
        (89, "bf16", 512, 16, {"SPLIT": True, "REST_DIM": 64, "REST_BLOCK": 64}),
        (89, "fp16", 64, 64, {}),
        (89, "fp16", 64, 64, {"SPLIT": True, "WINDOW": True, "cache": "fp8e4nv"}),
        (89, "bf16", 256, 64, {"cache": "fp8e4nv"}),
        (89, "bf16", 512, 16, {"REST_DIM": 64, "REST_BLOCK": 64, "cache": "fp8e4nv"}),
        (90, "bf16", 64, 64, {"SPLIT": True, "SINKS": True, "cache": "fp8e4nv"}),
        (89, "bf16", 128, 16, {"SPLIT": True, "WORDS": 2}),
        (89, "bf16", 256, 64, {}),
        (89, "bf16", 128, 64, {"SPLIT": True, "WORDS": 2, "WINDOW": True}),
        (89, "fp32", 256, 16, {"SPLIT": True}),
        (90, "bf16", 96, 16, {"WORDS": 2}),
        (90, "bf16", 128, 64, {"SPLIT": True}),
        (90, "bf16", 256, 64, {"SOFTCAP": True}),
    ],
)
def test_attention_compiles_into_what_a_card_has(
    capability, dtype, dim, rows, flags, monkeypatch, tmp_path
):
    from raypd.decoding.attention import triton_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    itemsize = 4 if dtype == "fp32" else 2
    flags = dict(flags)
    cache_type = flags.pop("cache", dtype)
    key_dim = dim + flags.get("REST_DIM", 0)
    tile = triton_kernel.tiles(divmod(capability, 10), key_dim, itemsize)[rows]
    power = triton_kernel.power_of_two(dim)
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "DIM": dim,
        "REST_DIM": 0,
        "VALUE_DIM": dim,
        "WORDS": 1,
        "WINDOW": False,
        "SOFTCAP": False,
        "SINKS": False,
        "SPLIT": False,
        "ROWS": rows,
        "BLOCK": tile.keys,
        "DIM_BLOCK": power,
        "REST_BLOCK": 16,
        "VALUE_BLOCK": power,
        **flags,
    }
    types = {
        **dict.fromkeys(["query_rows", "out", "sinks"], f"*{dtype}"),
        **dict.fromkeys(["stored_keys", "stored_values"], f"*{cache_type}"),
        **dict.fromkeys(["items", "queries", "keys", "starts"], "*i32"),
        **dict.fromkeys(["scale", "softcap"], "fp32"),
        **dict.fromkeys(["split", "split_lse"], "*fp32"),
    }
    result, stack = compiled(triton_kernel._attend, capability, types, constants, tile.warps)
    shared_memory = SHARED_MEMORY
    if (capability, dtype, dim) == (89, "bf16", 128):
        # Two blocks must fit a multiprocessor of an L40S.
        shared_memory = 48 * 1024
    assert result.metadata.shared <= shared_memory
    # Triton 3.6 puts 16 bytes on the stack where 128 rows read a cache in 8 bits.
    assert stack <= (16 if cache_type == "fp8e4nv" else 0)
    assert dtype == "fp32" or re.search(r"\b(wgmma\.)?mma[._]", result.asm["ptx"])


@needs_triton
@made_by_make_kernels
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernels_around_it_compile(capability, monkeypatch, tmp_path):
    from raypd.decoding.attention import triton_kernel
    from raypd.decoding.layers import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ["x", "weight", "joined", "keys", "values", "cos", "sin", "query_weight", "key_weight"]
    names += ["sinks", "query", "latents", "absorbed"]
    types = {
        **dict.fromkeys(names, "*bf16"),
        **dict.fromkeys(["scale", "split", "split_lse"], "*fp32"),
        **dict.fromkeys(["merged", "rows", "order"], "*i32"),
        "slots": "*i64",
        "eps": "fp32",
    }
    heads = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "NORM": True,
        "NORM_VALUES": False,
        "HALF": 64,
    }
    heads |= {"STYLE": 0, "ROTATE": True, "BLOCK": triton_kernels._HEADS}
    gated = {"DIM": 12288, "GATE": 1}
    latents = {"HEADS": 128, "PLAIN_DIM": 128, "LATENT_DIM": 512, "HALF": 32}
    latents |= {"STYLE": 0, "BLOCK": triton_kernels._HEADS}
    merge = {"HEADS": 32, "VALUE_DIM": 128, "VALUE_BLOCK": 128}
    caches = [{"keys": "*bf16", "values": "*bf16"}]
    if capability >= 89:
        caches.append({"keys": "*fp8e4nv", "values": "*fp8e4nv"})
    for cache_types in caches:
        for kernel, constants in (
            (triton_kernels._store_heads, heads),
            (triton_kernels._store_latents, latents),
        ):
            _, stack = compiled(kernel, capability, types | cache_types, constants, 4)
            assert stack == 0
    for kernel, constants, warps in (
        (
            triton_kernels._norm,
            {
                "DIM": 4096,
                "BLOCK": 4096,
                "STYLE": 0,
                "FP8": False,
            },
            4,
        ),
        (
            triton_kernels._gated,
            {
                **gated,
                "BLOCK": triton_kernels._BLOCK,
                "FP8": False,
            },
            4,
        ),
        (
            triton_kernels._gated,
            {
                **gated,
                "GATE": 3,
                "BLOCK": 1024,
                "FP8": False,
            },
            4,
        ),
        (
            triton_kernels._norm,
            {
                "DIM": 4096,
                "BLOCK": 4096,
                "STYLE": 2,
                "FP8": True,
            },
            4,
        ),
        (
            triton_kernels._gated,
            {
                **gated,
                "BLOCK": 16384,
                "FP8": True,
            },
            16,
        ),
        (triton_kernels._quantize, {"DIM": 4096, "BLOCK": 4096}, 4),
        (triton_kernel._merge, {**merge, "SINKS": False}, 1),
        (triton_kernel._merge, {**merge, "SINKS": True}, 1),
    ):
        fp8 = constants.get("FP8", kernel is triton_kernels._quantize)
        if fp8 and capability < 89:
            continue
        out = {"out": "*fp8e4nv" if fp8 else "*bf16"}
        result, stack = compiled(kernel, capability, types | out, constants, warps)
        assert result.metadata.shared <= SHARED_MEMORY
        assert stack == 0


@needs_triton
@made_by_make_kernels
@pytest.mark.parametrize(
    ("capability", "dtype", "rows", "flags"),
    [
        (89, "bf16", 64, {"GATE": 1}),
        (90, "bf16", 16, {"GATE": 2, "BIAS": True}),
        (90, "fp8e4nv", 64, {"GATE": 1, "SCALED": True, "DEPTH": 128}),
        (80, "bf16", 64, {"WEIGHTED": True, "BIAS": True}),
        (89, "fp8e4nv", 64, {"WEIGHTED": True, "SCALED": True, "DEPTH": 128}),
        (89, "fp16", 16, {"WEIGHTED": True}),
        (90, "bf16", 64, {"GATE": 2, "BIAS": True}),
    ],
)
def test_the_products_of_experts_compile(capability, dtype, rows, flags, monkeypatch, tmp_path):
    from raypd.decoding.layers import triton_experts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "INPUTS": 2048,
        "OUTPUTS": 768,
        "EXPERTS": 128,
        "K": 8,
        "GATE": 0,
        "BIAS": False,
        "SCALED": False,
        "WEIGHTED": False,
        "ROWS": rows,
        "COLUMNS": 64,
        "DEPTH": 64,
        "EXPERT_BLOCK": 128,
        **flags,
    }
    # The weights are read along their inputs.
    constants["input_stride"] = 1
    types = {
        **dict.fromkeys(["x", "weight"], f"*{dtype}"),
        **dict.fromkeys(["x_scale", "weight_scale", "entry_weights"], "*fp32"),
        **dict.fromkeys(["bias", "out"], "*bf16"),
        **dict.fromkeys(["counts", "order"], "*i32"),
        **dict.fromkeys(["alpha", "limit"], "fp32"),
    }
    result, stack = compiled(triton_experts._grouped, capability, types, constants, 4)
    assert result.metadata.shared <= SHARED_MEMORY
    assert stack == 0
    assert re.search(r"\b(wgmma\.)?mma[._]", result.asm["ptx"])


@needs_triton
@made_by_make_kernels
def test_the_kernels_around_the_experts_compile(monkeypatch, tmp_path):
    from raypd.decoding.layers import triton_experts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {
        **dict.fromkeys(["logits", "entries", "residual"], "*bf16"),
        "weights": "*fp32",
        **dict.fromkeys(["numbers", "ranks", "counts", "order"], "*i32"),
    }
    experts = {"EXPERTS": 128, "EXPERT_BLOCK": 128, "BLOCK": triton_experts._ENTRIES}
    choice = {"EXPERTS": 128, "K": 8, "BLOCK": 128, "RENORMALIZE": True}
    count = {"entries": "i32"}
    for kernel, more_types, constants in (
        (triton_experts._choose, {}, choice),
        (triton_experts._rank, count, {"BLOCK": triton_experts._ENTRIES}),
        (triton_experts._sort, count, experts),
        (
            triton_experts._mix,
            {},
            {
                "DIM": 2048,
                "K": 8,
                "BLOCK": triton_experts._BLOCK,
            },
        ),
    ):
        _, stack = compiled(kernel, 89, types | more_types, constants, 4)
        assert stack == 0


@needs_triton
@made_by_make_kernels
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernels_of_recurrent_layers_compile(capability, monkeypatch, tmp_path):
    from raypd.decoding.layers import triton_recurrent

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ["values", "store", "weight", "bias", "mixed", "writing", "forgetting", "decay"]
    names += ["offset", "steps", "through", "gate"]
    indices = ["numbers", "starts", "ends", "offsets", "rows", "groups"]
    factors = ["scale", "eps", "lowest", "highest"]
    types = {
        **dict.fromkeys(names, "*bf16"),
        **dict.fromkeys(indices, "*i64"),
        **dict.fromkeys(factors, "fp32"),
        "states": "*fp32",
        "x": "*fp32",
        "out": "*bf16",
    }
    scan_types = types | {"out": "*fp32"}
    # The sizes of Qwen3.5-4B and Granite 4-H-Micro.
    convolution = {"CHANNELS": 8192, "BIAS": True, "SILU": True, "INPUTS": 3}
    convolution["BLOCK"] = triton_recurrent._CHANNELS
    delta = {
        "HEADS": 32,
        "KEY_HEADS": 16,
        "KEYS": 128,
        "VALUES": 128,
        "KEY_BLOCK": 128,
    }
    delta["VALUE_BLOCK"] = triton_recurrent._VALUES
    mamba = {
        "HEADS": 64,
        "KEY_GROUPS": 1,
        "DIM": 64,
        "STATE": 128,
        "STATE_BLOCK": 128,
    }
    mamba["DIM_BLOCK"] = triton_recurrent._VALUES
    norm = {"PARTS": 32, "DIM": 128, "BLOCK": 128, "NORM": True}
    gather = {"CHANNELS": 8192, "BLOCK": triton_recurrent._CHANNELS}
    for kernel, its_types, constants in (
        (triton_recurrent._convolve, types, convolution | {"SINGLE": True}),
        (triton_recurrent._convolve, types, convolution | {"SINGLE": False}),
        (triton_recurrent._gather, types, gather),
        (triton_recurrent._delta_scan, scan_types, delta),
        (triton_recurrent._mamba_scan, scan_types, mamba),
        (triton_recurrent._gated_norm, types, norm | {"GATE_FIRST": False, "APART": False}),
        (triton_recurrent._gated_norm, types, norm | {"GATE_FIRST": True, "APART": True}),
        (
            triton_recurrent._sigmoid_gate,
            types | {"x": "*bf16"},
            {"DIM": 4096, "BLOCK": triton_recurrent._CHANNELS},
        ),
    ):
        result, stack = compiled(kernel, capability, its_types, constants, 4)
        assert result.metadata.shared <= SHARED_MEMORY
        assert stack == 0


@pytest.mark.parametrize(
    ("dtype", "capability", "error", "message"),
    [
        ("bfloat16", (8, 9), 0.4, None),
        ("float16", (8, 0), 3.0, "off by 3"),
        ("bfloat16", (9, 0), OSError("no gcc"), "gcc"),
        ("float32", (9, 0), 0.0, ""),
        ("float16", (7, 5), 0.0, ""),
    ],
)
@needs_triton
def test_auto_is_triton_on_a_gpu_where_it_is_right(
    dtype, capability, error, message, monkeypatch, caplog
):
    from raypd.decoding.attention import triton_kernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(kernels, "error_of", mock.Mock(side_effect=[error] * 9))
    kernels._fastest_on_gpu.cache_clear()
    config = tiny_model("llama").config
    device = torch.device("cuda", 0)
    attends = {
        kernels.choose_attention("auto", device, getattr(torch, dtype), config) for _ in range(2)
    }
    kernels._fastest_on_gpu.cache_clear()
    # The message is None if triton is chosen, and empty if sdpa is chosen without a warning.
    if message is None:
        assert attends == {triton_kernel.attend}
    else:
        assert attends == {sdpa.attend}
        assert message in caplog.text
    assert caplog.text.count("in place of 'triton'") == bool(message)


def test_where_triton_is_missing_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "raypd.decoding.attention.triton_kernel", raising=False)
    monkeypatch.delattr("raypd.decoding.attention.triton_kernel", raising=False)
    model = tiny_model("gemma2")
    before = model.config._attn_implementation
    for keys, words in (
        ({"attention": "triton"}, "needs the package triton"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"cuda_graphs": True}, "cuda_graphs needs attention 'triton'"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(model, **keys)
    assert model.config._attn_implementation == before != NAME


@pytest.mark.parametrize(
    ("device", "tokens", "warmed"), [("cuda", 8192, [2048]), ("cpu", 2048, [])]
)
def test_a_worker_on_a_gpu_has_larger_passes_and_is_warm_before_it_begins(
    device, tokens, warmed, config, monkeypatch
):
    warm_up = mock.Mock()
    monkeypatch.setattr(components, "warm_up", warm_up)
    loaded = SimpleNamespace(
        model=tiny_model("llama"),
        tokenizer=tiny_tokenizer(),
        device=torch.device(device),
        context_length=4096,
        packed=None,
    )
    engine = build(config("in.jsonl"), None, lambda _: loaded).engine
    assert engine.budget.limit == tokens
    assert warm_up.call_args_list == [mock.call(engine, tokens) for tokens in warmed]


@needs_triton
@pytest.mark.parametrize(
    ("kind", "head_dim", "attend", "error", "message"),
    [
        ("qwen3", 16, "triton", 0.01, None),
        ("qwen3", 16, "triton", 0.2, "off by 0.2"),
        # transformers' own layers compute it.
        ("mimo_v2_flash", 16, "triton", 0.0, ""),
        ("qwen3", 16, "triton", OSError("no gcc"), "no gcc"),
        ("qwen3", 16, "sdpa", 0.0, ""),
        # Only its attention is left to torch.
        ("llama", 24, "triton", 0.0, None),
    ],
)
def test_layers_for_gpus_are_taken_where_they_are_right(
    kind, head_dim, attend, error, message, monkeypatch, caplog
):
    from raypd.decoding.attention import triton_kernel
    from raypd.decoding.layers.in_triton import CudaBuilder

    model = tiny_model(kind, head_dim=head_dim)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    module = {"triton": triton_kernel, "sdpa": sdpa}[attend]
    monkeypatch.setattr(packing, "choose_attention", lambda *_: module.attend)
    monkeypatch.setattr(packing, "layers_error", mock.Mock(side_effect=[error]))
    packed = packing.pack_model(model)
    # The message is None if the layers are used, and empty if they are not, without a warning.
    if message is None:
        assert type(packed.builder) is CudaBuilder
    else:
        assert packed is model
        assert message in caplog.text
    assert caplog.text.count("in place of those for GPUs") == bool(message)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "triton"])
def test_a_worker_takes_the_one_that_its_configuration_names(attention, config):
    settings = with_keys(config("in.jsonl"), engine={"attention": attention})
    loaded = SimpleNamespace(
        model=tiny_model("llama"),
        tokenizer=tiny_tokenizer(),
        device=torch.device("cpu"),
        context_length=4096,
        packed=None,
    )
    if attention == "triton":
        with pytest.raises(ModelError, match="engine: attention 'triton' needs"):
            build(settings, None, lambda _: loaded)
    else:
        assert build(settings, None, lambda _: loaded).engine.attend is sdpa.attend
