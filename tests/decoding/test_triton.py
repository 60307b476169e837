"""The triton kernel without a GPU: in triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from raypd.answering.components import build
from raypd.decoding.attention import sdpa
from raypd.decoding.attention.kernels import NAME
from raypd.decoding.engine import Engine
from raypd.errors import ModelError
from tests.processes import ended, start
from tests.runs import with_keys
from tests.tiny import tiny_model, tiny_tokenizer

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHARED_MEMORY = 99 * 1024  # bytes that a block may have on the smallest GPUs of these kinds (sm86, sm89)


@needs_triton
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernel_in_the_interpreter(which):
    tests = "tests/decoding/triton_interpreted.py"
    ended(start("-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which, tests, TRITON_INTERPRET="1"))


@needs_triton
def test_the_benchmark_of_gpus_makes_its_table():
    said = ended(start("-m", "benchmarks.gpu", "--tiny", TRITON_INTERPRET="1"))
    rows = [line.split(" | ")[1:3] for line in said.splitlines() if line.startswith("| tiny")]
    assert [attention for method, attention in rows if method.startswith("hyper_parallel")] == ["sdpa", "triton"] * 2
    assert len(rows) == 7


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "rows", "flags"),
    [(80, "bf16", 128, 64, {}), (90, "bf16", 96, 16, {"WORDS": 2}),
     (90, "bf16", 256, 64, {"WINDOW": True, "SOFTCAP": True})],
)  # fmt: skip
def test_the_kernel_compiles(capability, dtype, dim, rows, flags, monkeypatch, tmp_path):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from raypd.decoding.attention import triton_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HEADS": 16, "KV_HEADS": 8, "DIM": dim, "VALUE_DIM": dim, "WORDS": 1, "WINDOW": False}
    constants |= {"SOFTCAP": False, **triton_kernel.sizes(rows, dim, dim, 4 if dtype == "fp32" else 2), **flags}
    signature = dict.fromkeys(["query_rows", "stored_keys", "stored_values", "out"], f"*{dtype}")
    signature |= dict.fromkeys(["items", "queries", "keys", "starts"], "*i32")
    signature |= {"scale": "fp32", "softcap": "fp32"}
    strides = ["token_stride", "head_stride", "key_slot", "key_head", "value_slot", "value_head"]
    signature |= dict.fromkeys(strides, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    assert list(signature) == triton_kernel._attend.arg_names
    source = ASTSource(triton_kernel._attend, signature, constants)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})
    assert "cubin" in compiled.asm
    assert compiled.metadata.shared <= SHARED_MEMORY


def test_where_triton_is_missing_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "raypd.decoding.attention.triton_kernel", raising=False)
    monkeypatch.delattr("raypd.decoding.attention.triton_kernel", raising=False)
    model = tiny_model("gemma2")
    before = model.config._attn_implementation
    for keys, words in (
        ({"attention": "triton"}, "needs the package triton"),
        ({"attention": "flash"}, "no attention 'flash'"),
        ({"cuda_graphs": True}, "cuda_graphs needs attention 'triton'"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(model, **keys)
    assert model.config._attn_implementation == before != NAME


@pytest.mark.parametrize("attention", ["auto", "sdpa", "triton"])
def test_a_worker_takes_the_one_that_its_configuration_names(attention, config):
    made = with_keys(config("in.jsonl"), engine={"attention": attention})
    loaded = SimpleNamespace(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), context_length=4096, packed=None)
    if attention == "triton":
        with pytest.raises(ModelError, match=r"engine\.attention: attention 'triton' needs"):
            build(made, None, lambda _: loaded)
    else:
        assert build(made, None, lambda _: loaded).engine.attend is sdpa.attend
