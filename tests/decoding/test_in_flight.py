"""Two passes in flight, whose results are read late: answers as of one pass after the other."""

import random
import re
from typing import Any

import pytest

from raypd.decoding import native, scheduler
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.linear import is_possible
from raypd.decoding.memory import LEAST_TOKENS
from raypd.decoding.pack import pack
from raypd.decoding.sampling import Sampling
from tests.decoding.cases import CASES, pair
from tests.decoding.drivers import small_device
from tests.tiny import in_float64, tiny_model

METHODS = ["autoregressive", "hyper_parallel", "intra_prompt", "apar", "space", "pasta"]
needs_native = pytest.mark.skipif(native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16")


class Watched(Engine):
    """`flights`: how many were in flight behind each start; each program is in one of them, and keeps its place."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.most = 0

    def _start(self, chunks: list[Any]) -> str | None:
        reason = super()._start(chunks)
        flying = [chunk.seq for flight in self.flights for chunk in flight.chunks]
        assert len(flying) == len(set(map(id, flying))) == sum(seq.in_flight for seq in self.scheduler.sequences)
        assert all(len(seq.owner) for seq in flying)
        self.most = max(self.most, len(self.flights))
        return reason


def said(engine: Engine, stock: Any, digits: int) -> list[str]:
    """All that the programs of all methods answer, figures rounded to so many digits."""
    programs = [program for method in METHODS for program in CASES[method](stock).programs()]
    answers = engine.run(programs, sampling=Sampling(0.8), seed=3)
    return [re.sub(r"-?\d+\.\d+(e-\d+)?", lambda m: str(round(float(m[0]), digits)), repr(one)) for one in answers]


@pytest.mark.parametrize("digits", [pytest.param(17, marks=needs_native), 9])
def test_answers_are_those_of_one_pass_after_the_other(digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit where a token's figures do not depend on what else is in the pass, as in bfloat16 on CPUs."""
    monkeypatch.setattr(scheduler, "_LEAST_HALF", 1)
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: digits == 17)
    model, stock = tiny_model("llama", head_dim=32), pair("llama")[1]
    model = pack(model.bfloat16()) if digits == 17 else in_float64(model)
    engines = [Watched(model, max_num_seqs=12, passes=passes) for passes in (None, 2)]
    assert said(engines[0], stock, digits) == said(engines[1], stock, digits)
    assert [engine.most for engine in engines] == [1, 2]
    assert 1.5 * engines[0].steps < engines[1].steps


@pytest.mark.parametrize(("cache_tokens", "fails"), [(None, 0.3), (350, 0.0)])
def test_what_takes_a_pass_back_leaves_the_other_alone(cache_tokens, fails, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that have no memory, some of them alone; and programs that have no room in the cache."""
    monkeypatch.setattr(scheduler, "_LEAST_HALF", 1)
    monkeypatch.setattr("tests.decoding.test_in_flight.METHODS", ["autoregressive", "hyper_parallel", "space"])
    (model, stock), unlucky, back = pair("qwen3"), random.Random(2), []
    model = in_float64(model)
    expected = said(Watched(model, max_num_seqs=12), stock, 9)
    engine = Watched(model, max_num_seqs=12, max_num_batched_tokens=120, cache_tokens=cache_tokens, passes=2)
    rollback, preempt = engine.scheduler.rollback, engine.scheduler._preempt
    engine.scheduler.rollback = lambda *a, alone: back.append(alone) or rollback(*a, alone=alone)
    engine.scheduler._preempt = lambda *a: back.append("preempted") or preempt(*a)
    small_device(engine, lambda tokens: unlucky.random() < (fails if tokens > LEAST_TOKENS or engine.flights else 0))
    assert said(engine, stock, 9) == expected
    assert (set(back), engine.most) == ({True, False} if fails else {"preempted"}, 2)


def test_few_tokens_go_in_one_pass() -> None:
    model, stock = pair("qwen3")
    engines = [Watched(model, max_num_seqs=4, passes=passes) for passes in (1, 2)]
    for engine in engines:
        said(engine, stock, 1)
    assert engines[1].steps <= 1.05 * engines[0].steps
