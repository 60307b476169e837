"""The functions of native.c for recurrent layers, against the formulas written out in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import silu, softplus

from raypd.decoding import native
from raypd.decoding.native import RecurrentRuns, Taps
from raypd.decoding.recurrence.chains import RecurrentRun
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.recurrence.states import StatePool, StateShape

pytestmark = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)
CPU = torch.device("cpu")
SLOTS = 9
INPUTS = 3
# Runs of prompts with forks, and of decoding. Each has its length, the slot from which it continues
# and the one into which its state goes; slots 1 to 4 have states before the pass.
TREE = [
    (40, 0, 5),
    (3, 5, 5),
    (1, 5, 6),
    (2, 5, 7),
    (17, 1, 1),
    (16, 2, 8),
    (1, 8, 8),
]
SINGLE = [
    (1, 1, 1),
    (1, 2, 2),
    (1, 2, 5),
    (1, 0, 6),
    (1, 3, 4),
]


def pass_of(lengths: list[tuple[int, int, int]], shapes: list[StateShape]) -> RecurrentPass:
    """Make a pass whose rows go to the runs at random, in the order of each run."""
    rng = random.Random(0)
    owners = [number for number, (length, _, _) in enumerate(lengths) for _ in range(length)]
    rng.shuffle(owners)
    levels: dict[int, int] = {}  # Of the run that writes a slot last.
    runs: list[RecurrentRun] = []
    for number, (_, start, end) in enumerate(lengths):
        level = levels.get(start, -1) + 1
        levels[end] = level
        runs.append(RecurrentRun(np.flatnonzero(np.array(owners) == number), start, end, level))
    pool = StatePool(shapes, SLOTS, CPU)
    generator = torch.Generator().manual_seed(0)
    for store in [*pool.inputs, *pool.recurrent]:
        if store is not None:
            store[1:5] = torch.randn(store[1:5].shape, generator=generator).to(store.dtype)
    return RecurrentPass(runs, len(owners), pool)


def fits(found: torch.Tensor, exact: torch.Tensor, rtol: float = 1e-5) -> None:
    assert float((found.double() - exact).norm()) < rtol * float(exact.norm())


@pytest.mark.parametrize("lengths", [TREE, SINGLE])
@pytest.mark.parametrize("silu_follows", [True, False])
def test_a_convolution_follows_the_chains(lengths, silu_follows):
    torch.manual_seed(0)
    channels = 48
    work = pass_of(lengths, [StateShape(INPUTS, channels, torch.bfloat16)])
    tokens = work.taps(INPUTS).taps.shape[0]
    values = torch.randn(tokens, channels + 16).bfloat16()[:, :channels]
    weight = torch.randn(INPUTS + 1, channels)
    bias = torch.randn(channels)
    store = work.pool.inputs[0]
    states = {slot: store[slot].double() for slot in range(SLOTS)}
    expected = torch.empty(tokens, channels, dtype=torch.float64)
    for run in work._runs:
        inputs = torch.cat([states[run.start], values[run.rows].double()])
        for number, row in enumerate(run.rows):
            total = (inputs[number : number + INPUTS + 1] * weight.double()).sum(0) + bias
            expected[row] = silu(total) if silu_follows else total
        states[run.end] = inputs[-INPUTS:]
    found = native.convolve(values, store, work.taps(INPUTS), weight, bias, silu_follows)
    fits(found, expected)
    for run in work._runs:
        assert torch.equal(store[run.end].double(), states[run.end])


def scanned(work: RecurrentPass, states: torch.Tensor, token) -> torch.Tensor:
    """Let states in float64 go through the runs token by token, and return the outputs by row."""
    by_slot = {slot: states[slot].double() for slot in range(SLOTS)}
    out: dict[int, torch.Tensor] = {}
    for run in work._runs:
        state = by_slot[run.start]
        for row in run.rows.tolist():
            state, out[row] = token(state, row)
        by_slot[run.end] = state
    for run in work._runs:
        states[run.end] = by_slot[run.end]
    return torch.stack([out[row] for row in range(len(out))])


@pytest.mark.parametrize("lengths", [TREE, SINGLE])
@pytest.mark.parametrize("values", [16, 64, 80])
@pytest.mark.parametrize("forgetting", [0.05, 30.0])
def test_the_gated_delta_rule_is_the_one_written_out(lengths, values, forgetting):
    torch.manual_seed(0)
    heads = 4
    key_heads = 2
    keys = 32
    work = pass_of(lengths, [StateShape(1, 16, torch.bfloat16, (heads, keys, values))])
    tokens = sum(length for length, _, _ in lengths)
    mixed = torch.randn(tokens, 2 * key_heads * keys + heads * values)
    rates = torch.randn(tokens, 2 * heads).bfloat16()
    speed = torch.rand(heads) * forgetting
    offset = torch.randn(heads)
    kept, beta = native.delta_rates(rates[:, :heads], rates[:, heads:], speed, offset)
    exact_beta = rates[:, :heads].double().sigmoid()
    exact_kept = (-speed * softplus(rates[:, heads:].double() + offset)).exp()
    fits(beta, exact_beta)
    fits(kept, exact_kept)
    key_size = key_heads * keys
    query, key, value = mixed.double().split([key_size, key_size, heads * values], -1)

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.view(tokens, key_heads, keys).repeat_interleave(heads // key_heads, 1)
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    query = unit(query) * keys**-0.5
    key = unit(key)
    value = value.view(tokens, heads, values)

    def token(state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = state * exact_kept[row][:, None, None]
        read = torch.einsum("hk,hkv->hv", key[row], state)
        change = (value[row] - read) * exact_beta[row][:, None]
        state = state + key[row][:, :, None] * change[:, None]
        return state, torch.einsum("hk,hkv->hv", query[row], state)

    states = work.states(0)
    expected_states = states.double()
    expected = scanned(work, expected_states, token)
    found = native.delta_scan(states, work.runs, mixed, kept, beta, key_heads)
    fits(found, expected)
    fits(states, expected_states)


@pytest.mark.parametrize("lengths", [TREE, SINGLE])
def test_mamba_2_is_the_one_written_out(lengths):
    torch.manual_seed(0)
    heads = 4
    groups = 2
    dim = 24
    size = 32
    work = pass_of(lengths, [StateShape(1, 16, torch.bfloat16, (heads, dim, size))])
    tokens = sum(length for length, _, _ in lengths)
    mixed = torch.randn(tokens, heads * dim + 2 * groups * size)
    raw_steps = torch.randn(tokens, heads).bfloat16()
    speed = torch.rand(heads) * 3
    offset = torch.randn(heads)
    through = torch.randn(heads)
    steps, kept = native.mamba_rates(raw_steps, speed, offset, (0.3, 1.5))
    exact_steps = softplus(raw_steps.double() + offset).clamp(0.3, 1.5)
    fits(steps, exact_steps)
    inputs, written, asked = mixed.double().split([heads * dim, groups * size, groups * size], -1)
    inputs = inputs.view(tokens, heads, dim)
    written = written.view(tokens, groups, size).repeat_interleave(heads // groups, 1)
    asked = asked.view(tokens, groups, size).repeat_interleave(heads // groups, 1)

    def token(state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        step = exact_steps[row][:, None]
        state = state * (-speed[:, None] * step).exp()[:, :, None]
        state = state + (step * inputs[row])[:, :, None] * written[row][:, None]
        out = torch.einsum("hpn,hn->hp", state, asked[row])
        return state, out + through[:, None] * inputs[row]

    states = work.states(0)
    expected_states = states.double()
    expected = scanned(work, expected_states, token)
    found = native.mamba_scan(states, work.runs, mixed, steps, kept, through, groups)
    fits(found, expected)
    fits(states, expected_states)


@pytest.mark.parametrize(
    ("parts", "weights", "gate_first"), [(3, 1, False), (3, 3, True), (1, 1, True), (3, 0, True)]
)
def test_a_gated_norm_rounds_once(parts, weights, gate_first):
    torch.manual_seed(0)
    rows = 7
    dim = 32
    x = torch.randn(rows, parts, dim)
    gate = torch.randn(rows, parts * dim + 16).bfloat16()[:, : parts * dim]
    weight = torch.randn(weights * dim).bfloat16() if weights else None
    exact = x.double()
    gates = silu(gate.double()).view(rows, parts, dim)
    if gate_first:
        exact = exact * gates
    if weight is not None:
        mean = exact.square().mean(-1, keepdim=True)
        exact = exact / (mean + 1e-5).sqrt() * weight.double().view(-1, dim)
    if not gate_first:
        exact = exact * gates
    found = native.gated_norm(x, gate, weight, 1e-5, gate_first)
    torch.testing.assert_close(
        found.double(),
        exact.view(rows, -1),
        atol=1e-6,
        rtol=2**-8,
    )


def test_a_sigmoid_scales_in_place():
    torch.manual_seed(0)
    x = torch.randn(5, 64).bfloat16()
    gate = (torch.randn(5, 96) * 4).bfloat16()[:, 32:]
    exact = x.double() * gate.double().sigmoid()
    native.sigmoid_gate(x, gate)
    torch.testing.assert_close(
        x.double(),
        exact,
        atol=1e-6,
        rtol=2**-8,
    )


def test_runs_that_continue_from_each_other_are_in_one_group():
    work = pass_of(TREE, [StateShape(INPUTS, 16, torch.bfloat16)])
    assert isinstance(work.runs, RecurrentRuns)
    assert work.runs.groups.tolist() == [0, 4, 5, 7]
    assert isinstance(work.taps(INPUTS), Taps)
