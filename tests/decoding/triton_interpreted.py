"""The triton kernel in triton's interpreter on the CPU. test_triton.py runs this file under TRITON_INTERPRET=1, which
must be set before triton is imported."""

from __future__ import annotations

import copy

import pytest
import torch

from raypd.decoding.attention import sdpa, triton_kernel
from raypd.decoding.engine import Engine
from tests.decoding.cases import CASES, pair
from tests.decoding.kernel_cases import compare
from tests.decoding.test_properties import check
from tests.tiny import in_float64

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_random_pass_is_what_torchs_attention_makes_of_it(seed, monkeypatch):
    if seed % 2:  # small blocks, so that small passes have several
        monkeypatch.setattr(triton_kernel, "_KEY_BYTES", 1)
        monkeypatch.setattr(triton_kernel, "_ROWS", (16, 16))
    compare(triton_kernel.attention, sdpa.attention, seed, CPU, torch.float64, 1e-10)


# Not bfloat16, whose bits the interpreter multiplies as integers (triton-lang/triton#11584).
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_other_precisions(dtype, atol):
    for seed in range(3):
        compare(triton_kernel.attention, sdpa.attention, seed, CPU, dtype, atol, dim=16, value_dim=16)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("hyper_parallel", "qwen3"),
        ("intra_prompt", "gemma2"),
        pytest.param("apar", "llama", marks=pytest.mark.slow),
        pytest.param("space", "mistral", marks=pytest.mark.slow),
    ],
)
def test_a_method_decodes_what_the_unmodified_model_says(method, kind):
    model, stock = (in_float64(one) for one in pair(kind))
    case, sizes = CASES[method](stock), {"max_num_seqs": 3, "max_num_batched_tokens": 60}
    other = copy.deepcopy(model)
    answers = Engine(model, **sizes, attention="triton").run(case.programs())
    case.check(answers, 1e-9)
    same = Engine(other, **sizes).run(case.programs())
    assert tokens_in(answers) == tokens_in(same)


def test_random_programs_equal_the_rule_written_out():
    model, stock = (one.double() for one in pair("mistral", sliding_window=6))
    check(range(4), Engine(model, max_num_seqs=3, max_num_batched_tokens=40, attention="triton"), True, stock)


def tokens_in(answer) -> list:
    """The tokens of an answer, whatever its parts are."""
    if isinstance(answer, list):
        return [tokens_in(part) for part in answer]
    return [tokens_in(part) for part in answer.points] if hasattr(answer, "points") else list(answer.tokens)
