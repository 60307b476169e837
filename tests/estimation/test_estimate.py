"""The estimate: its bootstrap against scipy and by simulation, its sample, its profile, and the
paper's own example.
"""

import contextlib
import functools
import gzip
import itertools
import json
import math
import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd.answering import progress
from raypd.answering.request_queue import RequestQueue, UnitState
from raypd.billing import meter
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import WorkerTime
from raypd.cluster import driver, one_worker
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.dataset import planner, unsplit
from raypd.errors import ConfigError, InputError, RunError
from raypd.estimation import (
    bootstrap,
    earlier,
    estimate as estimates,
    machines,
    profile,
    sampling,
    views,
    workload,
)
from raypd.estimation.bootstrap import Array, exact, figure
from raypd.estimation.estimate import _NEEDS_TRAINING, estimate
from raypd.estimation.machines import EstimateOptions, NodeKind, Overhead
from raypd.estimation.profile import DocumentCost, Profile, Profiler, WorkerFacts, most_in_flight
from raypd.estimation.records import Estimate, Figure
from raypd.estimation.tables import with_interval
from raypd.run import UnitSummary, records
from raypd.tasks.base import Document, Record, Request
from raypd.testing import fake
from tests.runs import Clock, extraction, run_config, says

COSTS = {
    "load_seconds": 1.0,
    "step_seconds": 0.002,
    "prefill_tokens_per_second": 20_000,
    "decode_tokens_per_second": 2000,
}
# Slow enough that the seconds around decoding do not count, and that a busy machine still sleeps as
# it should.
SLOW = COSTS | {
    "step_seconds": 0.01,
    "prefill_tokens_per_second": 10_000,
    "decode_tokens_per_second": 1000,
}
LOCAL = {"address": "local", "unit_documents": 50, "cpus_per_worker": 1}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def of_one_length(values: list[float], population: float = np.inf) -> Array:
    return bootstrap.mean(np.array(values), np.zeros(len(values)), 0.0, population, rng())


@pytest.mark.parametrize(("count", "wider"), [(12, 1.18), (200, 1.0)])
def test_intervals_are_those_of_scipy(count: int, wider: float) -> None:
    """Its errors are those of the sample at hand: ours are wider by n / (n - 1), and by Student's t
    (11 of 12).
    """
    stats = pytest.importorskip("scipy.stats")
    draws = rng(3)
    base = draws.uniform(50, 150, count)
    values = base * draws.lognormal(-4, 0.3, count)
    found = figure(bootstrap.ratio(values.tolist(), base.tolist(), rng()))

    def ratio(a, b, axis):
        return a.sum(axis) / b.sum(axis)

    how = {"paired": True, "n_resamples": 20_000, "rng": rng(1)}
    ends = stats.bootstrap((values, base), ratio, **how).confidence_interval
    width = (ends.high - ends.low) * wider
    assert found.high - found.low == pytest.approx(width, rel=0.08)
    assert (found.high + found.low) / 2 == pytest.approx(
        (ends.high + ends.low) / 2, abs=0.08 * width
    )


def test_what_was_counted_has_no_interval_and_one_document_tells_of_none() -> None:
    drawn = bootstrap.ratio([2, 4], [1, 1], rng(), population=2)  # all of them
    known = (exact(3), drawn, of_one_length([1.0, 2.0, 6.0], population=3))
    assert [figure(one) for one in known] == [Figure(3, 3, 3)] * 3
    single = (bootstrap.ratio([2], [1], rng()), exact(10) * of_one_length([3.0], population=10))
    assert [figure(one) for one in single] == [Figure(2), Figure(30)]
    # Two units agree or differ by chance, and ends that are far apart say nothing.
    two = figure(bootstrap.ratio([200.0, 61.0], [256.0, 71.0], rng()))
    assert with_interval(two, lambda value: f"{value:.2f}") == "0.80 [?]"
    far = figure(bootstrap.ratio([1.0, 30.0, 2.0, 60.0], [1.0] * 4, rng()))
    assert (far.value, far.low, far.high) == (23.25, None, None)
    near = figure(bootstrap.ratio([10.0, 12.0, 11.0], [10.0] * 3, rng()))
    assert near.low is not None
    assert near.high is not None
    assert near.high < 2 * near.low
    half, free = (
        figure(bootstrap.ratio([2, 4] * 10, [1, 1] * 10, rng(), population=n))
        for n in (40, math.inf)
    )
    # Half of the clusters are known.
    assert (3 - half.low) / (3 - free.low) == pytest.approx(0.5**0.5, rel=0.05)


@pytest.mark.parametrize(("drawn", "widest"), [(32, 1.2), (8, 4.0)])
def test_intervals_hold_what_they_promise(drawn: int, widest: float) -> None:
    """Corpora of which a few documents are drawn: 95% of the intervals hold the true mean, or more
    of them.
    """
    draws = rng(3)
    held = 0
    trials = 300
    widths = []
    errors = []
    for trial in range(trials):
        # Of two categories.
        lengths = np.r_[np.sort(draws.lognormal(6, 1, 300)), np.sort(draws.uniform(1, 50, 100))]
        took = 0.01 * lengths + draws.uniform(0.5, 3, 400)
        places = ((np.arange(drawn) + draws.random()) * 400 / drawn).astype(int)
        found = figure(
            bootstrap.mean(took[places], lengths[places], lengths.mean(), 400, rng(trial))
        )
        held += found.holds(took.mean()) or False
        widths.append(found.high / found.low)
        errors.append(found.value / took.mean() - 1)
    assert held / trials >= 0.92
    assert np.mean(widths) < widest  # length explains most of it
    assert abs(np.mean(errors)) < 0.01


def test_the_parts_of_a_bill_add_up() -> None:
    kind = NodeKind("x", 8, 30.0, "", head_usd_per_hour=0.4)
    small = NodeKind("x", 1, 36.0, "")
    bill = machines.bill(exact(100_000), exact(0.5), kind, 4, Overhead(300, 0, 32))
    assert sum(bill.parts.values()) == pytest.approx(bill.usd.value, abs=1e-9)
    assert bill.usd.value == pytest.approx(bill.hours.value * (4 * 30 + 0.4))
    assert bill.gpu_hours.value == pytest.approx(100_000 * 0.5 / 3600)
    for documents, of, nodes, overhead, seconds in (
        # all workers decode for as long as they share the work, then wait half a unit for the last
        # of them
        (100_000, kind, 4, Overhead(300, 0, 32), 300 + 50_000 / 32 + 0.5 * 16 * (1 - 1 / 32)),
        # larger units are cut into four at the end
        (100_000, kind, 4, Overhead(300, 0, 256), 300 + 50_000 / 32 + 0.5 * 32 * (1 - 1 / 32)),
        # a corpus of fewer units than workers takes as long as one unit, or as many as a worker
        # overlaps
        (300, kind, 4, Overhead(0, 0, 256), 128),
        (300, kind, 4, Overhead(0, 0, 100, 2), 100),
        (1000, small, 2, Overhead(0, 0, 256), 250 + 0.5 * 128 * 0.5),  # so few units are not cut
    ):
        found = machines.bill(exact(documents), exact(0.5), of, nodes, overhead)
        assert found.hours.value * 3600 == pytest.approx(seconds)
    # what passes before a node is paid, and after it, takes time and no money
    late = machines.bill(exact(1000), exact(0.5), small, 1, Overhead(20, 7, 256))
    assert late.hours.value * 3600 == pytest.approx(527)
    assert late.usd.value == pytest.approx(5.2)


def test_the_papers_example() -> None:
    """HPD, section 6, table 1: 8 GPUs at $30.13 an hour; of table 4's 0.77 documents/s, $1.362 say
    0.7684.
    """
    given = {"documents": 500e6, "instances": ["g6e.48xlarge"], "nodes": 8}
    result = estimate(
        None, EstimateOptions(throughput=["6.28"], baseline_throughput=["0.7684"], **given)
    )
    (row,) = result.machines
    assert round(row.usd_per_hour, 2) == 30.13
    assert row.workers == 8
    assert round(row.usd_per_1000.value, 3) == 0.167
    assert round(row.baseline_usd_per_1000.value, 3) == 1.362
    assert round(row.saved_usd.value, -3) == 597_000
    assert records.from_json(Estimate, json.loads(records.encoded(result)), "") == result


def corpus(tmp_path, count: int = 1000, **keys) -> RunConfig:
    """Documents of three categories, 60%, 30% and 10%, with lengths that differ much."""
    draws = random.Random(1)
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for number in range(count):
            name = draws.choices("abc", [6, 3, 1])[0]
            text = "x" * int(draws.lognormvariate(6.5, 0.9))
            file.write(
                json.dumps(
                    {
                        "id": str(number),
                        "category": name,
                        "title": text,
                    }
                )
                + "\n"
            )
    task = extraction(
        a=["a0", "a1"],
        b=[f"b{i}" for i in range(6)],
        c=[f"c{i}" for i in range(20)],
    )
    sections = {
        "input": {"text_columns": ["title"]},
        "model": {"name": "fake", "fake": COSTS},
        "cluster": {"address": "local", "unit_documents": 25},
        "cost": {"prices": {"local": 36.0}},
    }
    sections |= {name: {**sections.get(name, {}), **more} for name, more in keys.items()}
    return run_config(task, tmp_path / "corpus.jsonl", tmp_path / "out", **sections)


def by_category(documents: list[Document]) -> list[DocumentCost | None]:
    return [DocumentCost(10.0 if d.fields["category"] == "b" else 1.0, 1, 0, 1) for d in documents]


def test_changes_that_do_not_fit_together_are_said_in_one_line(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.kind vllm does not support hyper_parallel: set [^\n]*$"
    ):
        with_changes(corpus(tmp_path), {"engine.kind": "vllm"})
    with pytest.raises(
        ConfigError, match=r"^decoding\.metod: unknown key; did you mean 'method'\?$"
    ):
        with_changes(corpus(tmp_path), {"decoding.metod": "guided"})


def test_a_sample_has_every_category_in_proportion_and_all_lengths(tmp_path) -> None:
    sample = sampling.draw(corpus(tmp_path), 100)
    assert figure(sample.scan.documents).counted
    drawn = [sample.readable[place] for place in sample.readable_indices]
    assert len(set(sample.readable_indices)) == 100
    for name in "abc":
        there = sorted(one.length for one in sample.scan.scanned if one.category == name)
        lengths = sorted(one.length for one in drawn if one.category == name)
        assert abs(len(lengths) - len(there) / 10) <= 1
        for share in (0.25, 0.5, 0.75):
            assert np.mean(np.array(there) <= np.quantile(lengths, share)) == pytest.approx(
                share, abs=0.1
            )
    # The documents are the ones that were chosen.
    chosen = zip(drawn, sample.documents, strict=True)
    assert all(
        len(d.fields["title"]) == one.length and d.fields["category"] == one.category
        for one, d in chosen
    )


def test_a_large_corpus_is_looked_at_in_places_all_over_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "SCANNED", 250)
    config = corpus(tmp_path)
    looked = sampling.scan(config)
    # Large JSON Lines are cut by bytes: nobody has counted the documents.
    assert not planner.plan(config).exact
    assert 40 <= looked.units_planned <= 41
    assert 10 <= len(looked.units) <= 11
    assert 230 <= len(looked.scanned) <= 290
    found = figure(looked.documents)
    assert found.value == pytest.approx(1000, rel=0.1)
    assert found.holds(1000) is True
    assert found.high / found.low < 1.5  # type: ignore[operator]
    size = (tmp_path / "corpus.jsonl").stat().st_size / looked.units_planned
    places = sorted(round(unit.start / size) for unit in looked.units)
    assert all(b - a in (3, 4) for a, b in itertools.pairwise(places))
    assert not looked.complete


def test_units_that_were_not_read_may_hold_something_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "SCANNED", 250)
    sample = sampling.draw(corpus(tmp_path), 40)
    assert sample.readable_indices != sorted(sample.readable_indices)  # well mixed
    scan = replace(sample.scan, units_planned=len(sample.scan.units))
    costs = by_category(sample.documents)
    as_whole = replace(sample, scan=scan)
    some, whole = (
        figure(estimates.speed_of(which, _profile(costs), []).seconds)
        for which in (sample, as_whole)
    )
    assert some.value == pytest.approx(whole.value)
    assert some.high - some.low > 1.1 * (whole.high - whole.low)


def test_what_cannot_be_read_takes_nothing_and_is_counted(tmp_path) -> None:
    config = corpus(tmp_path, 100)
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write("no json\n" * 100)
    sample = sampling.draw(config, 50)
    assert sample.unreadable == 100
    assert estimates.speed_of(sample, _profile([DocumentCost(1.0, 10, 0, 2)] * 50), []).seconds[
        0
    ] == pytest.approx(0.5)
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "category": "a", "title": ""}\n')
    with pytest.raises(InputError, match="none of the 1 document that were scanned can be read"):
        sampling.draw(config, 50)


def _profile(
    costs: list[DocumentCost | None], gpu: str | None = None, memory: float = 0.0, **keys
) -> Profile:
    worker = WorkerFacts(gpu or "here", machines.instance_gpu(gpu, memory) if gpu else None)
    return replace(
        Profile("hyper_parallel", costs, 10.0, [(10.0, 10.0)] * 8, 1.0, 1.0, worker, True), **keys
    )


def test_the_estimate_is_that_of_the_corpus(tmp_path) -> None:
    sample = sampling.draw(corpus(tmp_path), 100)
    costs = by_category(sample.documents)
    mean = np.mean([10 if one.category == "b" else 1 for one in sample.scan.scanned])
    half = [c if i % 2 else None for i, c in enumerate(costs)]  # not all were done in time
    for own, near in ((costs, 0.03), (half, 0.2)):
        assert estimates.speed_of(sample, _profile(own), []).seconds[0] == pytest.approx(
            mean, rel=near
        )


class Time(Clock):
    """Of the engine of `model: fake` and of a profile. stop: when the request queue waits for its
    end.
    """

    stop = math.inf


class OneThread(RequestQueue):
    def __init__(self, time: Time, parts, meter: meter.Meter) -> None:
        self.time = time
        self.parts = parts
        self.meter = meter
        self.cancelled = threading.Event()

    def unit(self, unit: str):
        return contextlib.nullcontext(UnitState(0, unit))

    def answer(self, unit: UnitState, documents: list[Document]) -> None:
        """Takes every document through engine and task before the next one has its turn in the
        batch.
        """
        engine = self.parts.engine
        items = list(self.parts.task.plan(documents))
        while items or engine.pending:
            if self.time.now >= self.time.stop:
                assert self.cancelled.wait(60)
                return
            for item in items:
                if isinstance(item, Request):
                    engine.submit(
                        item.program,
                        tag=item,
                        sampling=None,
                        seed=item.seed,
                    )
            items = []
            for done in self.meter.step(engine, {unit.unit: engine.pending}):
                self.meter.tokens(
                    unit.unit, [unit.categories[row] for row in done.tag.documents], done.counts
                )
                items += done.tag.finish(done.answer)
            unit.records += [item for item in items if isinstance(item, Record)]

    def cancel(self, *_, **__) -> None:
        self.cancelled.set()

    def close(self) -> None: ...


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for module in (fake, profile):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(
        profile, "SteppedMeter", functools.partial(profile.SteppedMeter, clock=made.monotonic)
    )
    monkeypatch.setattr(profile, "RequestQueue", functools.partial(OneThread, made))
    return made


def profiled(
    tmp_path, count: int, limit: float = math.inf, **decoding
) -> tuple[list, Profile, list[DocumentCost]]:
    """Profiles `count` documents, four prompts at a time; returns them, their profile, and the
    costs that it has.
    """
    config = corpus(
        tmp_path,
        200,
        engine={"max_num_seqs": 4},
        decoding=decoding,
    )
    documents = sampling.draw(config, count).documents
    found = Profiler(1).profile(config, documents, limit=limit)
    return documents, found, [cost for cost in found.costs if cost is not None]


def test_the_window_has_every_document_once_and_not_the_start(tmp_path, fake_time) -> None:
    documents, found, costs = profiled(tmp_path, 40)
    assert found.complete is True
    assert found.load_seconds == pytest.approx(1.0)
    assert [bool(cost.rows) and cost.error is None for cost in costs] == [True] * 40
    # The engine's own arithmetic: what it slept for these documents, and its fixed time a pass.
    assert found.seconds > 0.9 * sum(
        c.prefill_tokens / 20_000 + c.decode_tokens / 2000 for c in costs
    )
    assert sum(c.seconds for c in costs) == pytest.approx(found.seconds, rel=0.2)
    assert np.sum(found.samples, axis=0) == pytest.approx(found.seconds)
    assert len(found.samples) == 8
    # the instruction was computed at warm-up: the window saw it shared
    assert all(c.shared_tokens > 0 for c in costs)
    short, *_, long = (
        costs[i].seconds for i in np.argsort([len(d.fields["title"]) for d in documents])
    )
    assert long > short


def test_a_small_sample_is_repeated_and_documents_of_one_prompt_share_its_tokens(
    tmp_path, fake_time
) -> None:
    config = corpus(tmp_path, 200, engine={"max_num_seqs": 16})
    documents = sampling.draw(config, 6).documents
    found, large = (Profiler(1).profile(config, some) for some in (documents, documents * 8))
    assert found.documents_per_second == pytest.approx(large.documents_per_second, rel=0.2)
    decoding = {"isolate": "none", "stacked_documents": 4}
    _, _, costs = profiled(tmp_path, 40, **decoding)
    assert most_in_flight(corpus(tmp_path, 1, decoding=decoding)) == 256 * 4
    assert len(costs) == 40
    assert min(cost.decode_tokens for cost in costs) >= 1


@pytest.mark.parametrize(("batch", "count"), [(4, 40), (16, 10), (16, 40), (16, 130), (64, 40)])
def test_with_its_start_and_end_a_small_run_takes_what_was_estimated(
    tmp_path, fake_time, batch, count
) -> None:
    """Against an empty engine that answers the corpus to its end; a pass that is not full costs its
    20 ms.
    """
    costs = {"name": "fake", "fake": COSTS | {"step_seconds": 0.02}}
    config = corpus(
        tmp_path,
        count,
        engine={"max_num_seqs": batch},
        model=costs,
    )
    documents = sorted(sampling.draw(config, count).documents, key=lambda document: document.index)
    assert len(documents) == count
    found = Profiler(1).profile(config, documents)
    decoding = sum(cost.seconds for cost in found.costs if cost is not None)
    own = meter.Meter(clock=fake_time.monotonic)
    unit = UnitState(0, "run")
    unit.categories = {document.index: "" for document in documents}
    own.ready()
    own.begin("run")
    queue = OneThread(fake_time, profile.build(config, 1, None), own)
    began = fake_time.now
    queue.answer(unit, documents)
    took = fake_time.now - began
    assert found.warmup_seconds + decoding == pytest.approx(took, rel=0.12)
    assert decoding < took


def test_start_and_end_are_reckoned_as_a_bill_does(tmp_path, monkeypatch) -> None:
    """A Ray of its own makes its node after 5 s, which is paid; the connection stands 3 s later,
    the worker 4 s on.
    """
    now = [1000.0]

    def passes(seconds: float):
        def advance(*_: object) -> bool:
            now[0] += seconds
            return True

        return advance

    nodes = [{"began": 1005.0, "ended": None}]
    worker = one_worker.OneWorker(corpus(tmp_path, 1), False, lambda _: (object, ()))
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    for owner, name, stub in (
        (one_worker, "time", clock),
        (one_worker.ray_session, "connect", passes(8)),
        (worker, "_start", passes(4)),
        (one_worker.ray_session, "worker_resources", lambda config: None),
        (one_worker.ray, "shutdown", passes(2)),
        (one_worker.ray_private, "node_infos", lambda: nodes),
    ):
        monkeypatch.setattr(owner, name, stub)
    with worker:
        assert worker.unpaid_seconds == 5
        assert worker.startup_seconds == 7
    assert worker.closing_seconds == 2
    # A cluster that was there is paid from the command on; what is gone from it does not count.
    nodes[:] = [{"began": 5.0, "ended": None}, {"began": 2000.0, "ended": 2000.0}]
    with worker:
        assert worker.unpaid_seconds == 0
        assert worker.startup_seconds == 12


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Task was killed due to the node running low on memory.\nMore", "killed by Ray because"),
        ("The actor died.\nMore", "died (out of memory?): The actor died."),
    ],
)
def test_the_death_of_the_worker_is_explained(message, said, tmp_path, monkeypatch) -> None:
    worker = one_worker.OneWorker(corpus(tmp_path, 1), False, lambda _: (object, ()))
    worker._actor = SimpleNamespace(measure=SimpleNamespace(remote=lambda: None))

    def wait(*_: object, **__: object) -> None:
        raise one_worker.ray.exceptions.OutOfMemoryError(message)

    monkeypatch.setattr(one_worker.ray, "wait", wait)
    with pytest.raises(RunError) as died:
        worker.call("16 documents", "measure", progress=lambda _: None)
    assert str(died.value).startswith("16 documents: the worker ")
    assert said in str(died.value)
    assert "?" not in str(died.value) or "memory?" in said


def test_the_start_of_an_earlier_run_is_that_of_its_bills() -> None:
    """A Ray of its own, whose node came after 4 s, and a cluster that was there; both decode 12 s
    after their begin.
    """
    workers = [
        WorkerTime(
            "w",
            "n",
            1005.0,
            spans=[(1005.0, 1012.0, "startup", None), (1012.0, 1020.0, "busy", "u")],
        )
    ]
    bills = [
        Bill(
            "s",
            1000.0,
            1.0,
            nodes=[NodeTime("n", began)],
            workers=workers,
        )
        for began in (1004.0, 1000.0)
    ]
    assert earlier._overhead(bills) == Overhead(startup=10, unpaid=2)
    assert earlier._overhead([Bill("s", 1000.0, 1.0)]) is None


def test_a_limit_ends_it(tmp_path, fake_time) -> None:
    fake_time.stop = 4.0  # the limit is over by then, and not all documents are answered
    _, found, costs = profiled(tmp_path, 150, limit=1.5)
    assert not found.complete
    assert 0 < len(costs) < 150
    assert found.documents_per_second > 0
    assert found.answers is not None
    given, wanted = found.answers
    assert len(costs) <= given < wanted


def test_time_that_ends_while_the_engine_fills_leaves_a_guess(tmp_path, fake_time) -> None:
    config = corpus(tmp_path, 200, engine={"max_num_seqs": 64})
    documents = sampling.draw(config, 10).documents
    whole = Profiler(1).profile(config, documents)
    fake_time.stop = fake_time.now + 1.6
    guess = Profiler(1).profile(config, documents, limit=0.1)
    assert not guess.complete
    assert (
        whole.documents_per_second / 2
        < guess.documents_per_second
        <= 1.1 * whole.documents_per_second
    )


def test_a_limit_leaves_the_seconds_that_were_spent_and_what_had_not_ended(tmp_path) -> None:
    costs = {"name": "fake", "fake": COSTS | {"load_seconds": 0.0, "decode_tokens_per_second": 100}}
    keys = {
        "engine": {"max_num_seqs": 64},
        "model": costs,
        "decoding": {"method": "autoregressive"},
    }
    config = corpus(tmp_path, 200, **keys)
    documents = sampling.draw(config, 10).documents
    assert Profiler(1).profile(config, documents, limit=3.0).seconds > 0.8
    guess = Profiler(1).profile(
        config,
        documents,
        limit=3.0,
        slow=True,
    )
    ended = [cost.decode_tokens for cost in guess.costs if cost is not None and cost.rows]
    assert guess.complete is False
    assert 0 < len(ended) < 10
    assert guess.answers == (len(ended), 10)
    assert np.mean([cost.decode_tokens for cost in guess.costs if cost is not None]) > np.mean(
        ended
    )
    assert None not in guess.costs


@pytest.mark.parametrize("share", [3.5, 1.52])  # of the seconds that the sample alone takes
def test_a_slow_method_is_priced_though_a_full_engine_ends_nothing(
    tmp_path, fake_time, share
) -> None:
    """By the tokens of the sample alone; with next to no time left for the full engine, by its
    seconds, too.
    """
    config = corpus(
        tmp_path, 200, engine={"max_num_seqs": 64}, decoding={"method": "autoregressive"}
    )
    documents = sampling.draw(config, 10).documents
    whole = Profiler(1).profile(config, documents)
    began = fake_time.now
    parts = profile.build(config, 1, None)
    Profiler(1)._answer(config, parts, documents, 0, math.inf)  # the model's load and the sample
    limit = share * (fake_time.now - began - whole.load_seconds)
    fake_time.stop = fake_time.now + whole.load_seconds + limit
    guess = Profiler(1).profile(config, documents, limit, slow=True)
    for name in ("decode_tokens", "rows"):
        assert [getattr(cost, name) for cost in guess.costs] == [
            getattr(cost, name) for cost in whole.costs
        ]
    assert guess.complete
    assert guess.answers is None
    # The sample alone fills no pass.
    assert 0.4 < guess.documents_per_second / whole.documents_per_second < 1.3


@pytest.mark.parametrize("slow", [False, True])
def test_the_progress_never_goes_backwards(tmp_path, fake_time, slow, monkeypatch, capsys) -> None:
    """The window begins later as the engine fills up, and a slow method has two passes."""
    seen: list[tuple[int, int]] = []

    class Watched(Profiler):
        def __setattr__(self, name: str, value) -> None:
            super().__setattr__(name, value)
            if name == "_progress":
                seen.append(value)

    config = corpus(
        tmp_path, 200, engine={"max_num_seqs": 64}, decoding={"method": "autoregressive"}
    )
    documents = sampling.draw(config, 10).documents
    Watched(1).profile(config, documents, slow=slow)
    answered = [done for done, _ in seen]
    assert answered == sorted(answered)
    assert seen[-1][0] == seen[-1][1] > 10

    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    with profile._display("measure", math.inf) as update:
        for counts in ((0, 0), (27, 100), (30, 136), (60, 136), (136, 136)):
            update(counts)
    assert capsys.readouterr().err.splitlines() == [
        "measure: loading the model, warming up",
        "measure: 27% done",
        "measure: 44% done",
        "measure: 100% done",
    ]


def test_a_speed_from_a_run_is_without_its_start_and_says_so(tmp_path) -> None:
    """The engine was busy for 10 s for 20 documents; the run took 100 s."""
    units = [
        UnitSummary(name, "f", "s", "a", 0, 10, 10, 0, 100.0, busy_seconds=5.0)
        for name in ("u1", "u2", "u3")
    ]
    speed = earlier._speed("runs/a", "guided", units, [])
    assert speed.seconds[0] == pytest.approx(0.5)
    assert speed.source == "3 units of runs/a, 30 documents, without start-up and idle time"
    found = machines.assemble(
        corpus(tmp_path, 10), EstimateOptions(), exact(10), [speed], [], Overhead(60.0), []
    )
    assert [machine.name for machine in found.machines] == ["the machine of that run"]


def stub_profiler(monkeypatch: pytest.MonkeyPatch, measured) -> None:
    for name, stub in (
        ("__enter__", lambda self: self),
        ("__exit__", lambda *_: None),
        ("profile", measured),
    ):
        monkeypatch.setattr(profile.RemoteProfiler, name, stub)


def test_autoregressive_decoding_is_measured_where_it_is_asked_for(tmp_path, monkeypatch) -> None:
    methods: list[str] = []

    def note(
        _: object, config: RunConfig, documents: list, limit: float, label: str, slow: bool = False
    ) -> Profile:
        methods.append(config.decoding.method)
        costs = [DocumentCost(1.0, 10, 0, 512 if slow else 2, server_usd=0.25)] * len(documents)
        return _profile(
            costs,
            method=config.decoding.method,
            complete=not slow,
            answers=(15, 20) if slow else None,
            load_seconds=3.0,
            warmup_seconds=2.0,
        )

    stub_profiler(monkeypatch, note)
    plain, with_it = (
        estimate(corpus(tmp_path, 100), EstimateOptions(sample=20, baseline=b))
        for b in (False, True)
    )
    assert methods == ["hyper_parallel", "hyper_parallel", "autoregressive"]
    assert plain.baseline == []
    assert plain.startup_seconds == 5.0
    assert plain.sample["server_usd"] == pytest.approx(0.25)
    assert [one.method for one in with_it.baseline] == ["autoregressive"]
    # Whoever was not answered in time may take any number of seconds.
    assert with_it.baseline[0].documents_per_second.low is None
    assert with_it.speeds[0].documents_per_second.low is not None
    # The line on the speed names how many were answered if the time was up.
    assert "here, 20 documents, " in with_it.speeds[0].source
    assert "here, 15 of 20 answers, " in with_it.baseline[0].source
    guess, endless = (note for note in with_it.notes if "autoregressive" in note)
    assert guess == (
        "autoregressive: the time was up before the sample was done, so this is a guess; raise "
        "--minutes"
    )
    limit = "autoregressive: 20 of 20 answers did not end before decoding.max_new_tokens=512"
    assert endless == f"{limit}: with weights trained to end their answers it costs less"


def test_a_baseline_for_which_no_time_was_left_is_named_and_one_document_is_one(
    tmp_path, monkeypatch, capsys
) -> None:
    def measured(
        _: object, config: RunConfig, documents: list, *limits: object, slow: bool = False
    ) -> Profile:
        if config.decoding.method == "autoregressive":
            return _profile(
                [None] * len(documents),
                complete=False,
                seconds=0.0,
            )
        return _profile([DocumentCost(1.0, 10, 0, 2)] * len(documents))

    stub_profiler(monkeypatch, measured)
    estimates.run(corpus(tmp_path, 1), EstimateOptions(minutes=1.0, baseline=True), False, False)
    tree = json.loads((tmp_path / "out" / "estimate.json").read_text())
    assert tree["baseline"] == []
    assert tree["machines"][0]["bills"][0]["usd"]["value"] > 0
    out = capsys.readouterr().out
    assert out.startswith("1 document with fake\n")
    says(out, "here, 1 document, 10 s", "there was no time to measure autoregressive decoding")
    assert "1 documents" not in out


def test_figures_stand_only_for_the_gpu_that_was_profiled(tmp_path) -> None:
    config = corpus(tmp_path, 100)
    sample = sampling.draw(config, 20)

    def on(gpu: str | None, memory: float) -> tuple[Estimate, list[str]]:
        speed = estimates.speed_of(
            sample, _profile([DocumentCost(1.0, 10, 0, 2)] * 20, gpu, memory), []
        )
        found = machines.assemble(
            config, EstimateOptions(), sample.scan.documents, [speed], [], Overhead(60.0), []
        )
        return found, [row.name for row in found.machines]

    _, names = on(None, 0)
    assert names == ["this machine (here)"]
    server, names = on("NVIDIA L40S", 44.4)
    assert {name.partition(".")[0] for name in names} == {"g6e"}
    assert [bill.nodes for bill in server.machines[names.index("g6e.48xlarge")].bills] == [
        1,
        2,
        4,
        8,
    ]
    assert on("NVIDIA GeForce RTX 4090", 23.5)[1] == ["this machine (NVIDIA GeForce RTX 4090)"]


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
        ({"throughput": ["L40S=6.28"]}, "--documents"),
        ({"throughput": ["6.28"], "documents": 5}, "which GPU"),
        (
            {"throughput": ["L40=6.28"], "documents": 5},
            "no instance type has a L40; choose from A100 40GB",
        ),
        ({"throughput": ["L40S=fast"], "documents": 5}, "give documents per second"),
        (
            {"throughput": ["6"], "documents": 5, "instances": ["g6e.48xl"]},
            "did you mean g6e.48xlarge",
        ),
        (
            {"throughput": ["L40S=6"], "baseline": True},
            "--throughput decodes nothing: .*; --baseline-throughput gives",
        ),
        ({"run": "runs/a", "baseline": True}, "--from decodes nothing: leave --baseline out"),
        ({"baseline_throughput": ["L40S=1"]}, "--baseline-throughput needs --throughput"),
        ({}, "give a configuration"),
        (
            {"throughput": ["L40S=6"], "model": "Qwen/Qwen3-8B"},
            "--throughput and --model: each of them sets the speed",
        ),
        ({"model": "Qwen/Qwen3-8B", "tokens": (1, 0, 3, 4, 5)}, "--tokens 1 0 3 4 5: no document"),
        ({"model": "Qwen/Qwen3-8B", "instances": ["m7i.2xlarge"]}, "memory of the GPUs of these"),
        (
            {"throughput": ["L40S=6"], "baseline_throughput": ["1"], "documents": 5},
            "does --baseline-throughput apply to",
        ),
    ],
)
def test_mistakes_are_told(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(None, EstimateOptions(**given))


def test_a_prediction_of_weights_that_are_trained_for_the_method_does_not_ask_for_a_training(
    tmp_path, monkeypatch
) -> None:
    config = with_changes(corpus(tmp_path, 8), {"decoding.method": "hyper_parallel"})
    options = EstimateOptions(model="Qwen/Qwen3-8B", instances=["g6e.xlarge"])
    named = with_changes(config, {"model.name": "Qwen/Qwen3-8B"})
    note = _NEEDS_TRAINING
    monkeypatch.setattr("raypd.estimation.estimate.untrained", lambda config: "no card")
    assert note in estimate(named, options).notes
    monkeypatch.setattr("raypd.estimation.estimate.untrained", lambda config: None)
    assert note not in estimate(named, options).notes
    # The card is of another model than the predicted one.
    assert note in estimate(config, options).notes


def test_a_prediction_takes_the_tokens_of_the_configuration(tmp_path, capsys) -> None:
    """With three times the text per document it has three times the text in its workload."""
    model = "Qwen/Qwen3-8B"
    (tmp_path / "long").mkdir()
    short = corpus(tmp_path, 60)
    written = (tmp_path / "corpus.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in written]
    rows = [json.dumps(line | {"title": line["title"] * 3}) for line in lines]
    (tmp_path / "long/corpus.jsonl").write_text("\n".join(rows))
    long = with_changes(short, {"input.path": str(tmp_path / "long/corpus.jsonl")})
    counts = []
    for config in (short, long):
        sample = sampling.draw(config, 60)
        counts.append(workload.of_config(config, sample).tokens)
    texts = [len(line["title"]) for line in lines]
    characters = short.model.fake_costs.characters_per_token
    assert counts[0].own == pytest.approx(sum(texts) / 60 / characters, abs=2)
    assert counts[1].own == pytest.approx(3 * counts[0].own, abs=3)
    assert counts[1]._replace(own=0) == counts[0]._replace(own=0)
    by_options = [
        estimate(config, EstimateOptions(model=model, instances=["g6e.xlarge"]))
        for config in (short, long)
    ]
    rates = [result.speeds[0].documents_per_second.value for result in by_options]
    assert rates[0] > 1.5 * rates[1]
    views.show_estimate(by_options[1])
    out = capsys.readouterr().out
    says(out, "assumed per document: ", f"{counts[1].own:g} of its own", "assumed)")
    given = EstimateOptions(
        model=model,
        instances=["g6e.xlarge"],
        tokens=(400, 300, 80, 80, 5),
    )
    assert estimate(long, given).speeds == estimate(short, given).speeds
    alone = estimate(None, replace(given, tokens=None))
    assert any("workload W1" in note for note in alone.notes)
    assert alone.speeds == estimate(short, given).speeds


def test_95_percent_stands_only_over_intervals(capsys) -> None:
    given = {"documents": 5e6, "instances": ["g6e.xlarge"]}
    result = estimate(None, EstimateOptions(throughput=["6.28"], **given))
    views.show_estimate(result)
    out = capsys.readouterr().out
    assert "documents/s" in out
    assert "95%" not in out
    speed = replace(result.speeds[0], documents_per_second=Figure(6.0, 5.0, 7.0))
    result.speeds = [speed]
    views.show_estimate(result)
    assert "documents/s [95%]" in capsys.readouterr().out


@pytest.mark.parametrize(("gpu", "memory"), [(None, 0), ("NVIDIA L40S", 44.4)])
def test_a_number_of_nodes_that_does_not_apply_is_named(gpu, memory, tmp_path) -> None:
    """The speed of a CPU says nothing about nodes of a cluster: --nodes is not dropped silently."""
    config = corpus(tmp_path, 100)
    sample = sampling.draw(config, 20)
    profiled = _profile([DocumentCost(1.0, 10, 0, 2)] * 20, gpu, memory)
    speed = estimates.speed_of(sample, profiled, [])
    found = {}
    for nodes in (None, 64):
        result = machines.assemble(
            config,
            EstimateOptions(nodes=nodes),
            sample.scan.documents,
            [speed],
            [],
            Overhead(60.0),
            [],
        )
        said = any(note.startswith("--nodes 64 does not apply") for note in result.notes)
        found[nodes] = (said, [bill.nodes for bill in result.machines[0].bills])
    if gpu is None:
        assert found == {None: (False, [1]), 64: (True, [1])}
    else:
        assert found == {None: (False, [1, 2, 4, 8]), 64: (False, [1, 2, 4, 8, 16, 32, 64])}


def test_an_instance_type_that_the_speed_says_nothing_about_is_named(tmp_path) -> None:
    """A CPU was measured, or another GPU: --instance is not dropped silently."""
    config = corpus(tmp_path, 100)
    sample = sampling.draw(config, 20)
    options = EstimateOptions(instances=["g6e.xlarge", "m7i.2xlarge"])
    notes = {}
    for gpu, memory in ((None, 0), ("NVIDIA H100 80GB HBM3", 79.1), ("NVIDIA L40S", 44.4)):
        profiled = _profile([DocumentCost(1.0, 10, 0, 2)] * 20, gpu, memory)
        speed = estimates.speed_of(sample, profiled, [])
        result = machines.assemble(
            config, options, sample.scan.documents, [speed], [], Overhead(60.0), []
        )
        notes[gpu] = [note for note in result.notes if note.startswith("--instance")]
    says(notes[None][0], "--instance g6e.xlarge is not in the tables", "here", "L40S=RATE")
    says(notes[None][1], "--instance m7i.2xlarge is not in the tables", "its CPU")
    says(notes["NVIDIA H100 80GB HBM3"][0], "--instance g6e.xlarge", "measured on H100")
    assert [note.split()[1] for note in notes["NVIDIA L40S"]] == ["m7i.2xlarge"]


def test_large_objects_that_cannot_be_split_are_named_with_the_way_out(
    tmp_path, monkeypatch
) -> None:
    """A file of lines can be split, and so can a table of many row groups."""
    rows = [
        {
            "id": str(number),
            "category": "a",
            "title": "x" * 50,
        }
        for number in range(400)
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "plain.jsonl").write_bytes(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "one.parquet")
    pq.write_table(table, folder / "many.parquet", row_group_size=20)
    config = with_changes(corpus(tmp_path, 10), {"input.format": "auto"})
    notes = {}
    for name in ("plain.jsonl", "packed.jsonl.gz", "one.parquet", "many.parquet"):
        own = with_changes(config, {"input.path": str(folder / name)})
        assert sampling.scan(own).unsplit == []  # these are small
        with monkeypatch.context() as patch:
            patch.setattr(unsplit, "_LARGE_BYTES", 100)
            notes[name] = sampling.scan(own).unsplit
            given = EstimateOptions(throughput=["L40S=6.28"])
            assert set(notes[name]) <= set(estimate(own, given).notes)
    assert notes["plain.jsonl"] == notes["many.parquet"] == []
    says(notes["packed.jsonl.gz"][0], "packed.jsonl.gz: gz", "cannot be split", "128 MB")
    says(notes["one.parquet"][0], "1 row group of", "rewrite it with row groups of")


def test_planning_a_run_says_which_objects_cannot_be_split(tmp_path, monkeypatch, capsys) -> None:
    lines = [
        json.dumps(
            {
                "id": str(n),
                "category": "a",
                "title": "x" * 50,
            }
        )
        for n in range(100)
    ]
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    config = with_changes(corpus(tmp_path, 10), {"input.path": str(tmp_path / "packed.jsonl.gz")})
    monkeypatch.setattr(unsplit, "_LARGE_BYTES", 100)
    monkeypatch.setattr(driver.writer, "committed", Mock(side_effect=RunError("planned")))
    with pytest.raises(RunError, match="planned"):
        driver.run_extract(config)
    says(capsys.readouterr().err, "packed.jsonl.gz: gz", "cannot be split: one process at a time")


def test_a_fake_model_that_costs_nothing_is_not_told_to_take_longer(tmp_path) -> None:
    free = {"step_seconds": 0, "prefill_tokens_per_second": 1e15, "decode_tokens_per_second": 1e15}
    config = corpus(tmp_path, 20, model={"name": "fake", "fake": free | {"load_seconds": 0}})
    documents = sampling.draw(config, 10).documents
    # On a busy machine, answering takes some time all the same.
    profiled = replace(Profiler().profile(config, documents), seconds=0.0)
    with pytest.raises(RunError, match=r"too little time to measure.*model\.fake") as caught:
        profile.check_sample(profiled)
    assert "--minutes" not in str(caught.value)
    with pytest.raises(RunError, match="raise --minutes"):
        profile.check_sample(replace(profiled, costs=[None] * 10))
    # A fit has keys for both.
    with pytest.raises(RunError, match=r"raise fit\.sample_minutes or lower"):
        profile.check_sample(
            replace(profiled, costs=[None] * 10), "fit.sample", "fit.sample_minutes"
        )
    with pytest.raises(RunError, match=r"raise fit\.sample;"):
        profile.check_sample(profiled, "fit.sample", "fit.sample_minutes")


@pytest.mark.slow
@pytest.mark.idle
def test_from_a_twentieth_of_a_run_its_bill_within_5_percent(tmp_path) -> None:
    config = corpus(
        tmp_path,
        1600,
        model={"name": "fake", "fake": SLOW},
        cluster=LOCAL,
    )
    (bill,) = estimate(config, EstimateOptions(sample=80, baseline=False)).machines[0].bills
    made = driver.run_extract(config)
    assert made.ok == 1600
    usd = sum(
        json.loads(path.read_text())["usd"] for path in (tmp_path / "out" / "ledger").glob("*.json")
    )
    print(f"estimated ${bill.usd.value:.4f}, billed ${usd:.4f}")
    assert bill.usd.value == pytest.approx(usd, rel=0.05)
    # The run itself, taken as a sample, says what it cost.
    again = estimate(config, EstimateOptions(run=str(tmp_path / "out")))
    print(f"from the run itself ${again.machines[0].bills[0].usd.value:.4f}")
    assert again.machines[0].bills[0].usd.value == pytest.approx(usd, rel=0.05)
    assert again.speeds[0].tokens_per_document["decode_tokens"].value == pytest.approx(
        made.decode_tokens / 1600
    )
