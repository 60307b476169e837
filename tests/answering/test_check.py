"""What is said of the way that a machine decodes."""

import pytest
import torch

from raypd.answering.check import path_of
from raypd.decoding import native
from tests.runs import run_config


@pytest.mark.parametrize(
    ("refusal", "capabilities", "dtype", "words"),
    [
        (None, {"avx512_bf16"}, "bfloat16", "in bfloat16, with AVX-512 BF16"),
        (None, {"avx512_bf16", "amx_bf16"}, "bfloat16", "in bfloat16, by oneDNN with AMX"),
        (None, {"avx512_bf16"}, "float32", "in float32, by torch alone: the fast path is for bfloat16"),
        ("cannot be compiled (x)", {"avx512_bf16"}, "bfloat16", "torch alone: the fast path cannot be compiled (x)"),
        ("needs a processor with AVX-512 BF16", set(), "float32", "the fast path needs a processor with AVX-512 BF16"),
    ],
)  # fmt: skip
def test_it_says_why_the_fast_path_is_not_taken(refusal, capabilities, dtype, words, monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda: refusal)
    monkeypatch.setattr(native, "has", lambda capability: capability in capabilities)
    if torch.cuda.is_available():
        pytest.skip("a GPU decodes here")
    assert path_of(run_config(model={"dtype": dtype})).endswith(words)
