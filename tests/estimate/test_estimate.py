"""The estimate: its arithmetic by hand and by simulation, its sample, its clock, and the paper's own example."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raypd.billing import prices
from raypd.config import RunConfig
from raypd.dataset import planner
from raypd.errors import ConfigError, InputError
from raypd.estimate import bench, clock, estimate_command, estimation, machines, measuring, sampling, weighing
from raypd.estimate.clock import Cost
from raypd.estimate.estimate import estimate
from raypd.estimate.estimate_options import Options
from raypd.estimate.estimate_result import Estimate
from raypd.estimate.estimation import Group, Machines, Mean, Speed, Surroundings
from raypd.estimate.measuring import Bench, Measured, in_flight
from raypd.tasks.base import Request
from raypd.testing import fake

# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_the_ratio_estimator_by_hand() -> None:
    # values 2 and 4 over 1 and 1: 3; squares 1 + 1, over 2 x 1 clusters, root, over a mean base of 1
    assert estimation.ratio([2, 4], [1, 1]) == Mean(3, 1.0, 1)
    assert estimation.ratio([2, 4], [1, 1], population=2).error == 0  # all of them were drawn
    assert estimation.ratio([2, 4], [1, 1], population=4).error == pytest.approx(math.sqrt(0.5))
    assert math.isnan(estimation.ratio([2], [1]).error)  # one tells nothing of the scatter
    assert Mean(1, math.nan).interval() is None


def test_the_stratified_mean_by_hand() -> None:
    found = estimation.stratified([Group(0.75, 300, [1, 3]), Group(0.25, 100, [10, 10])])
    assert found.value == 0.75 * 2 + 0.25 * 10
    assert found.error == pytest.approx(0.75 * math.sqrt((1 - 2 / 300) * 2 / 2))
    whole = estimation.stratified([Group(1.0, 3, [1, 2, 6])])
    assert (whole.value, whole.error) == (3, 0)


def test_a_stratum_of_one_has_the_scatter_of_the_others() -> None:
    both = [Group(0.5, 1000, [8, 12]), Group(0.5, 1000, [100])]
    scatter = math.sqrt(8) / 10
    wanted = 0.5**2 * (1 - 2 / 1000) * 8 / 2 + 0.5**2 * (1 - 1 / 1000) * (scatter * 100) ** 2
    assert estimation.stratified(both).error == pytest.approx(math.sqrt(wanted))
    assert math.isnan(estimation.stratified([Group(1.0, 10, [3])]).error)


def test_intervals_hold_what_they_promise() -> None:
    """1,000 corpora of which a few dozen documents are drawn: 95% of the intervals hold the true mean, about."""
    draws = random.Random(3)
    held = 0
    for _ in range(1000):
        lengths = {
            "a": [draws.lognormvariate(6, 1) for _ in range(300)],
            "b": [draws.uniform(1, 50) for _ in range(100)],
        }
        took = {name: [0.01 * x + draws.uniform(0.5, 3) for x in xs] for name, xs in lengths.items()}
        groups = []
        for name, xs in lengths.items():
            places = draws.sample(range(len(xs)), 24 if name == "a" else 8)
            drawn, seconds = [xs[i] for i in places], [took[name][i] for i in places]
            groups.append(Group(len(xs) / 400, len(xs), seconds, drawn, sum(xs) / len(xs)))
        low, high = estimation.stratified(groups).interval() or (0, 0)
        truth = sum(sum(values) for values in took.values()) / 400
        held += low <= truth <= high
        assert high / low < 1.6  # length explains most of it
    assert 0.92 <= held / 1000 <= 0.985


def test_the_parts_of_a_bill_add_up() -> None:
    speed = Speed("hyper_parallel", Mean(0.5, 0.02, 10), "")
    machines = Machines("x", 8, 30.0, "", head_usd_per_hour=0.4)
    bill = estimation.bill(Mean(100_000), speed, machines, 4, Surroundings(300, 256))
    assert sum(bill.parts.values()) == pytest.approx(bill.usd.value, abs=1e-9)
    assert bill.usd.value == pytest.approx(bill.hours.value * (4 * 30 + 0.4))
    assert bill.gpu_hours.value == pytest.approx(100_000 * 0.5 / 3600)
    # all workers decode for as long as they share the work, then wait half a unit for the last of them
    assert bill.hours.value * 3600 == pytest.approx(300 + 50_000 / 32 + 0.5 * 128 * (1 - 1 / 32))
    # a corpus of fewer units than workers takes as long as one unit
    assert estimation.bill(Mean(300), speed, machines, 4, Surroundings(0, 256)).hours.value * 3600 == 128


# ----------------------------------------------------------------------------------------------------- the paper's case


def test_the_papers_example() -> None:
    """HPD, section 6 and table 1: 500 million documents, Qwen3-8B, 8 GPUs at $30.13 an hour.

    Table 4 prints 0.77 documents/s for autoregressive decoding, which stands for 0.765 to 0.775; the $1.362 that table
    1 prints says 0.7678 to 0.7685, and $597,000 saved the same.
    """
    options = estimate_command.options(
        throughput=["6.28"], baseline_throughput=["0.7684"], documents=500e6, instances=["g6e.48xlarge"], nodes=8
    )
    result = estimate(None, options)
    (row,) = result.rows
    assert round(row.machines.usd_per_hour, 2) == 30.13
    assert row.machines.workers == 8
    assert row.baseline is not None
    assert row.saved is not None
    assert round(estimation.usd_per_1000(row.ours, row.machines).value, 3) == 0.167
    assert round(estimation.usd_per_1000(row.baseline, row.machines).value, 3) == 1.362
    assert round(row.saved.value, -3) == 597_000
    rounded = Speed("autoregressive", Mean(1 / 0.77), "")
    assert estimation.usd_per_1000(rounded, row.machines).value == pytest.approx(1.359, abs=5e-4)
    assert "L40S" not in result.not_measured


# ---------------------------------------------------------------------------------------------------------- the sample


def corpus(tmp_path: Path, count: int = 1000, **keys: object) -> RunConfig:
    """Documents of three categories, 60%, 30% and 10%, with lengths that differ much."""
    draws = random.Random(1)
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for number in range(count):
            name = draws.choices("abc", [6, 3, 1])[0]
            text = "x" * int(draws.lognormvariate(6.5, 0.9))
            file.write(json.dumps({"id": str(number), "category": name, "title": text}) + "\n")
    names = {"a": 2, "b": 6, "c": 20}
    tree = {
        "input": {"path": str(tmp_path / "corpus.jsonl"), "text_columns": ["title"]},
        "output": {"path": str(tmp_path / "out")},
        "model": {
            "name": "fake",
            "fake": {
                "load_seconds": 1.0,
                "step_seconds": 0.002,
                "prefill_tokens_per_second": 20_000,
                "decode_tokens_per_second": 2000,
            },
        },
        "task": {"categories": {n: {"attributes": [{"name": f"{n}{i}"} for i in range(k)]} for n, k in names.items()}},
        "cluster": {"address": "local", "unit_documents": 25},
        "cost": {"prices": {"local": 36.0}},
    }
    for key, value in keys.items():
        tree[key] = {**tree.get(key, {}), **value}  # type: ignore[dict-item]
    return RunConfig.model_validate(tree)


def test_a_sample_has_every_category_in_proportion_and_all_lengths(tmp_path) -> None:
    sample = sampling.draw(corpus(tmp_path), 100)
    assert sample.look.documents == Mean(1000, 0.0, math.inf)
    drawn = Counter(s.category for s in sample.strata for _ in s.documents)
    assert sum(drawn.values()) == 100
    there = Counter(one.category for one in sample.look.seen)
    assert all(abs(drawn[name] - there[name] / 10) <= 1 for name in "abc")
    for name in "abc":
        own = [s for s in sample.strata if s.category == name]
        assert sum(s.population for s in own) == there[name]
        assert all(s.documents for s in own)
        edges = [(min(m.length for m in s.members), max(m.length for m in s.members)) for s in own]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(edges))
    # the documents are the ones that were chosen
    chosen = [(one, d) for s in sample.strata for one, d in zip(s.chosen, s.documents, strict=True)]
    assert all(len(d.fields["title"]) == one.length and d.fields["category"] == one.category for one, d in chosen)


def test_a_rare_category_is_in_the_sample(tmp_path) -> None:
    config = corpus(tmp_path, 300)
    with open(tmp_path / "corpus.jsonl", "a") as file:
        for number in range(2):
            file.write(json.dumps({"id": f"rare{number}", "category": "rare", "title": "x"}) + "\n")
    sample = sampling.draw(config, 20)
    (rare,) = [s for s in sample.strata if s.category == "rare"]
    assert len(rare.documents) == 2
    assert len(sample.documents) == 20
    assert sum(s.population for s in sample.strata) == 302


def test_a_large_corpus_is_looked_at_in_places_all_over_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "LOOKED_AT", 250)
    config = corpus(tmp_path)
    looked = sampling.look(config)
    assert looked.units_planned in (40, 41)  # cut by bytes, of which the first megabyte is read
    assert len(looked.units) in (10, 11)
    assert 230 <= len(looked.seen) <= 290
    assert looked.documents.value == pytest.approx(1000, rel=0.1)
    size = (tmp_path / "corpus.jsonl").stat().st_size / looked.units_planned
    places = sorted(round(unit.start / size) for unit in looked.units)
    assert all(b - a in (3, 4) for a, b in itertools.pairwise(places))
    assert not looked.whole


def test_the_size_of_a_corpus_that_nobody_counted(tmp_path, monkeypatch) -> None:
    """Large JSON Lines are cut by bytes: documents are estimated from the units that were read."""
    monkeypatch.setattr(sampling, "LOOKED_AT", 800)
    config = corpus(tmp_path, 20_000)
    plan = planner.plan(config)
    assert not plan.exact
    looked = sampling.look(config)
    assert not looked.whole
    low, high = looked.documents.interval() or (0, 0)
    assert low <= 20_000 <= high
    assert high / low < 1.5


def test_what_cannot_be_read_takes_nothing_and_is_counted(tmp_path) -> None:
    config = corpus(tmp_path, 100)
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write("no json\n" * 100)
    sample = sampling.draw(config, 50)
    assert sample.unreadable == 100
    measured = _measured([Cost(1.0, 10, 0, 2)] * 50)
    speed = weighing.speed_of(sample, sample.documents, measured, [])
    assert speed.seconds.value == pytest.approx(0.5)
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "category": "a", "title": ""}\n')
    with pytest.raises(InputError, match="none of the 1 documents"):
        sampling.draw(config, 50)


def _measured(costs: list[Cost | None], **keys: object) -> Measured:
    facts: dict = {"gpu": None, "gpu_memory_gib": 0.0, "machine": "here", "threads": 1, "complete": True}
    stretches = [(10.0, 1.0)] * 8
    return Measured("hyper_parallel", costs, len(costs), 10.0, stretches, 1.0, 1.0, **{**facts, **keys})


def test_strata_are_weighted_by_their_share_of_the_corpus(tmp_path) -> None:
    """Documents of b take ten times as long: the estimate is that of the corpus, whatever share of them was drawn."""
    sample = sampling.draw(corpus(tmp_path), 100)
    documents = sample.documents
    costs: list[Cost | None] = [Cost(10.0 if d.fields["category"] == "b" else 1.0, 1, 0, 1) for d in documents]
    share = sum(one.category == "b" for one in sample.look.seen) / 1000
    speed = weighing.speed_of(sample, documents, _measured(costs), [])
    assert speed.seconds.value == pytest.approx(10 * share + (1 - share))
    half = [c if i % 2 else None for i, c in enumerate(costs)]  # not all were done in time
    notes: list[str] = []
    assert weighing.speed_of(sample, documents, _measured(half), notes).seconds.value == pytest.approx(
        10 * share + (1 - share), rel=0.2
    )


# ----------------------------------------------------------------------------------------------------------- the clock


class Time:
    """Stands for the module `time` where the engine of `model: fake` sleeps and where a measurement reads the time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def in_one_thread(config: RunConfig, stream: list, folder: str, meter: clock.Meter, threads: int | None) -> None:
    """Takes numbered documents through engine and task as a worker does, which has a thread for each."""
    parts = meter.parts
    copies = [replace(one, row=n, fields={**one.fields, clock.RING: ring}) for n, (ring, one) in enumerate(stream)]
    items: list = list(parts.task.plan(copies))
    while items or parts.engine.pending:
        for item in items:
            if isinstance(item, Request):
                parts.engine.submit(item.program, tag=item, sampling=parts.sampling, seed=item.seed)
        ended = parts.engine.step()
        items = [more for done in ended for more in (done.tag.fail("") if done.error else done.tag.finish(done.answer))]


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for module in (fake, clock, measuring):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(measuring, "_run", in_one_thread)
    return made


def test_the_clock_runs_for_every_document_once_and_not_for_the_start(tmp_path, fake_time) -> None:
    config = corpus(tmp_path, 200, engine={"max_num_seqs": 4})
    sample = sampling.draw(config, 40)
    documents = sampling.ring_order(sample.documents)
    measured = Bench(1).measure(config, documents)
    assert measured.complete
    assert measured.load_seconds == pytest.approx(1.0)
    assert all(cost is not None and cost.error is None and cost.rows for cost in measured.costs)
    assert 40 <= measured.documents <= 40 + in_flight(config)  # to the end of the pass in which the last one was told
    # The engine's own arithmetic: what it slept for these documents, and its fixed time a pass.
    tokens = sum(c.prefill_tokens / 20_000 + c.decode_tokens / 2000 for c in measured.costs if c is not None)
    assert measured.seconds > 0.9 * tokens
    once = measured.seconds * 40 / measured.documents
    assert sum(c.seconds for c in measured.costs if c is not None) == pytest.approx(once, rel=0.2)
    # the instruction was computed at warm-up: the clock saw it shared
    assert all(c.shared_tokens > 0 for c in measured.costs if c is not None)
    long, short = (sorted(documents, key=lambda d: len(d.fields["title"]))[i] for i in (-1, 0))
    of = {d.id: c for d, c in zip(documents, measured.costs, strict=True)}
    assert of[long.id].seconds > of[short.id].seconds  # type: ignore[union-attr]


def test_a_sample_smaller_than_the_batch_goes_round_until_it_fills_it(tmp_path, fake_time) -> None:
    config = corpus(tmp_path, 200, engine={"max_num_seqs": 16})
    documents = sampling.ring_order(sampling.draw(config, 6).documents)
    measured = Bench(1).measure(config, documents)
    assert 18 <= measured.documents <= 18 + 16  # three rounds, to the end of the pass
    large = Bench(1).measure(config, documents * 8)  # fills it without rounds
    assert measured.documents_per_second == pytest.approx(large.documents_per_second, rel=0.2)


def test_a_limit_ends_the_clock(tmp_path, fake_time) -> None:
    config = corpus(tmp_path, 200, engine={"max_num_seqs": 4})
    documents = sampling.ring_order(sampling.draw(config, 150).documents)
    measured = Bench(1).measure(config, documents, limit=3)
    assert not measured.complete
    assert 0 < measured.documents < 150


def test_a_baseline_for_which_no_time_was_left_is_told_and_left_out(tmp_path, monkeypatch, capsys) -> None:
    class Stub:
        startup_seconds = 2.0

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Stub:
            return self

        def __exit__(self, *_: object) -> None: ...

        def measure(self, config: RunConfig, documents: list, limit: float | None, label: str) -> Measured:
            if config.decoding.method == "autoregressive":
                return replace(_measured([None] * len(documents), complete=False), documents=0, seconds=0.0)
            return _measured([Cost(1.0, 10, 0, 2)] * len(documents))

    monkeypatch.setattr(bench, "Workbench", Stub)
    estimate_command.run(corpus(tmp_path, 100), Options(sample=20, minutes=1.0), False, False)
    tree = json.loads((tmp_path / "out" / "estimate.json").read_text())
    assert tree["baseline"] == []
    assert tree["machines"][0]["bills"][0]["usd"]["value"] > 0
    assert "came to no figure in the time given" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ what is said of GPUs


def _sampled(tmp_path: Path, gpu: str | None, memory: float) -> Estimate:
    config = corpus(tmp_path, 100)
    sample = sampling.draw(config, 20)
    measured = _measured([Cost(1.0, 10, 0, 2)] * 20, gpu=gpu, gpu_memory_gib=memory, machine=gpu or "here")
    speed = weighing.speed_of(sample, sample.documents, measured, [])
    return machines.assemble(config, Options(), sample.look.documents, [speed], [], 60.0, [])


def test_figures_stand_only_for_the_gpu_that_was_measured(tmp_path) -> None:
    laptop = _sampled(tmp_path, None, 0)
    assert [row.machines.name for row in laptop.rows] == ["this machine (here)"]
    assert set(laptop.not_measured) == {i.gpu for i in prices.INSTANCES.values() if i.gpu}
    server = _sampled(tmp_path, "NVIDIA L40S", 44.4)
    assert {row.machines.name.partition(".")[0] for row in server.rows} == {"g6e"}
    assert "L40S" not in server.not_measured
    assert "L4" in server.not_measured
    bills = next(row for row in server.rows if row.machines.name == "g6e.48xlarge").bills
    assert [bill.nodes for bill in bills] == [1, 2, 4, 8]
    gamer = _sampled(tmp_path, "NVIDIA GeForce RTX 4090", 23.5)
    assert [row.machines.name for row in gamer.rows] == ["this machine (NVIDIA GeForce RTX 4090)"]


@pytest.mark.parametrize(
    ("name", "memory", "gpu"),
    [
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA H100 NVL", 93.0, None),
        ("NVIDIA L40", 44.4, None),
    ],
)
def test_names_of_gpus(name: str, memory: float, gpu: str | None) -> None:
    assert machines.instance_gpu(name, memory) == gpu


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"throughput": ["6.28"]}, "--documents"),
        ({"throughput": ["6.28"], "documents": 5}, "which GPU"),
        ({"throughput": ["L40=6.28"], "documents": 5}, "no instance type has a L40; choose from A100 40GB"),
        ({"throughput": ["L40S=fast"], "documents": 5}, "give documents per second"),
        ({"throughput": ["6"], "documents": 5, "instances": ["g6e.48xl"]}, "did you mean g6e.48xlarge"),
        ({}, "give a configuration"),
    ],
)
def test_mistakes_are_told(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(None, estimate_command.options(**given))
