"""What a worker measures: time without gaps, every second and token on one unit, and the energy of its GPUs."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from raypd.billing import energy
from raypd.billing.meter import Meter, coarser, joined
from raypd.decoding.counts import TokenCounts
from raypd.run.records import CardUse, Energy
from tests.billing.test_book import report


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def meter(clock: SimpleNamespace) -> Meter:
    """Of a worker that has loaded, with a unit."""
    made = Meter("n", "hyper_parallel", clock=lambda: clock.now)
    clock.now += 10
    made.ready()
    made.begin("u")
    return made


class Engine:
    """Steps that take the seconds and feed the tokens that it is reports."""

    def __init__(self, clock: SimpleNamespace, steps: list[tuple[float, int, int]]) -> None:
        self.clock, self.steps, self.sequences = clock, steps, [SimpleNamespace(counts=TokenCounts())]

    def step(self):
        seconds, prefill, decode = self.steps.pop(0)
        self.clock.now += seconds
        row = self.sequences[0].counts
        row.prefill_tokens += prefill
        row.decode_tokens += decode
        return []


def test_a_worker_s_time_is_startup_busy_and_idle_without_a_gap(meter: Meter, clock: SimpleNamespace) -> None:
    clock.now += 2
    engine = Engine(clock, [(4.0, 300, 100), (1.0, 0, 50), (1.0, 0, 0)])
    meter.begin("v")
    meter.step(engine, {"u": 3, "v": 1})  # 3 s of prefill, 1 s of decoding
    meter.step(engine, {"u": 1})  # all of it decoding
    clock.now += 0.01  # a pause that belongs to the steps
    meter.step(engine, {"u": 1})  # nothing was fed: as the one before
    report, expected = meter.report(), {"startup": 10, "prefill": 3, "decode": 3.01, "idle": 2, "lost": 0}
    assert vars(report.seconds) == pytest.approx(expected, abs=1e-6)
    assert report.open == {"u": pytest.approx((2.25, 0.75 + 2.01)), "v": pytest.approx((0.75, 0.25))}
    assert [(kind, unit) for _, _, kind, unit in report.spans] == [("startup", None), ("idle", None), ("busy", "u")]
    assert [end for _, end, *_ in report.spans] == [*(began for began, *_ in report.spans[1:]), clock.now]


def test_a_step_that_runs_is_reported_as_far_as_it_is(meter: Meter, clock: SimpleNamespace) -> None:
    reports = []

    class Slow(Engine):
        def step(self):
            clock.now += 3
            reports.append(meter.report())
            return super().step()

    meter.step(Slow(clock, [(1.0, 10, 0)]), {"u": 1})
    for told, seconds in ((reports[0], 3), (meter.report(), 4)):  # not the three twice
        assert (told.seconds.busy, sum(told.open["u"])) == pytest.approx((seconds, seconds))
    assert reports[0].spans[-1][2:] == ("busy", "u")


def test_the_documents_of_one_prompt_share_its_tokens(meter: Meter) -> None:
    meter.tokens("u", ["a", "b", "b"], TokenCounts(7, 0, 1))
    found = meter.end("u").categories
    assert [(found[name]["prefill_tokens"], found[name]["decode_tokens"]) for name in "ab"] == [(2, 0), (5, 1)]


def test_an_attempt_that_is_not_committed_is_lost(meter: Meter, clock: SimpleNamespace) -> None:
    meter.step(Engine(clock, [(2.0, 100, 300)]), {"u": 1})
    meter.lose("u")
    meter.lose("u")
    report = meter.report()
    assert (report.seconds.busy, report.seconds.lost, report.open) == (0, pytest.approx(2.0), {})


def test_a_unit_s_seconds_go_to_its_categories_by_tokens(meter: Meter, clock: SimpleNamespace) -> None:
    meter.documents("u", ["a", "a", "b"])
    meter.step(Engine(clock, [(4.0, 100, 100)]), {"u": 3})
    meter.tokens("u", ["a"], TokenCounts(75, 0, 10))
    meter.tokens("u", ["b"], TokenCounts(25, 0, 90))
    done, expected = meter.end("u"), (2 * 0.75 + 2 * 0.1, 2 * 0.25 + 2 * 0.9)
    assert [done.categories[name]["seconds"] for name in "ab"] == pytest.approx(expected)
    assert meter.report().ok == 0  # not before it is committed
    meter.commit("u", done, 2, 1)
    meter.lose("u")  # as the worker always does at the end
    report = meter.report()
    assert ((report.ok, report.failed, report.seconds.lost), report.categories["a"]["documents"]) == ((2, 1, 0), 2)
    assert meter.end("w").categories == {}


def test_the_picture_of_a_worker_stays_small() -> None:
    spans = []
    for i in range(5000):
        spans = joined(spans, (i, i + 1.0, "busy" if i % 2 else "idle", None))
    assert len(spans) <= 120
    assert ((spans[0][0], spans[-1][1]), len(coarser(spans))) == ((0, 5000), -(-len(spans) // 2))
    assert joined([(0, 1, "busy", "u")], (1, 2, "busy", "u")) == [(0, 2, "busy", "u")]


def driver(monkeypatch, counts: bool = True) -> list[int]:
    """A driver with two GPUs, whose counters (millijoules) the test moves."""
    counters, error = [1000, 5000], type("NVMLError", (Exception,), {})
    fake = SimpleNamespace(NVMLError=error, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
                           nvmlDeviceGetHandleByIndex=lambda index: index,
                           nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
                           nvmlDeviceGetTotalEnergyConsumption=counters.__getitem__, NVML_CLOCK_SM=1,
                           nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=[50, 90][card]),
                           nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=[2 << 30, 40 << 30][card]),
                           nvmlDeviceGetClockInfo=lambda card, kind: [900, 2100][card],
                           nvmlDeviceGetMaxClockInfo=lambda card, kind: 2520)  # fmt: skip
    if not counts:
        fake.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=error)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return counters


@pytest.mark.parametrize(("shown", "gpus", "joules"), [
    ("0,1", 2, 11.0), ("1", 1, 8.0), ("GPU-b", 1, 8.0), ("1", 0.5, 4.0)])  # fmt: skip
def test_the_counter_of_the_gpus_that_a_worker_sees(monkeypatch, shown, gpus, joules) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    counters, meter = driver(monkeypatch), energy.CardWatch(gpus).joules
    assert meter() == 0
    counters[:] = [4000, 13_000]
    assert meter() == joules


@pytest.mark.parametrize(("shown", "gpus", "counts"), [("", 0, True), ("", 1, True), ("0", 1, False), ("0", 1, None)])
def test_without_gpu_counter_or_driver_nobody_knows(monkeypatch, shown, gpus, counts) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    driver(monkeypatch, counts is True)
    if counts is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert energy.CardWatch(gpus).joules() is None


def test_how_gpus_are_used(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    driver(monkeypatch)
    watch = energy.CardWatch(2)
    assert [watch(), watch()] == [CardUse(2, 0.7, 40.0, 1500.0, 2520.0), CardUse(4, 0.7, 40.0, 1500.0, 2520.0)]
    cards = [None, watch(), CardUse(6, 0.2, 41.0, 300.0, 2520.0)]
    assert energy.together(cards) == CardUse(12, 0.45, 41.0, 900.0, 2520.0)
    assert str(watch()) == "GPUs 70% busy, 40 GiB at most, 1,500 of 2,520 MHz"
    error = sys.modules["pynvml"].NVMLError()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo", mock.Mock(side_effect=error))
    assert (watch().samples, watch.is_lost()) == (8, False)
    error.value = 15
    assert watch.is_lost()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetHandleByIndex", mock.Mock(side_effect=error))
    assert energy.CardWatch(2).is_lost()  # before this process began


@pytest.mark.parametrize("package", [None, "without a driver"])
def test_without_nvml_nothing_is_known_of_the_use(monkeypatch, package) -> None:
    driver(monkeypatch) if package else monkeypatch.setitem(sys.modules, "pynvml", None)
    if package:
        sys.modules["pynvml"].nvmlInit = mock.Mock(side_effect=sys.modules["pynvml"].NVMLError)
    watch = energy.CardWatch(1)
    assert (watch(), watch.is_lost(), energy.together([None])) == (None, False, None)


def test_kwh_of_a_run() -> None:
    measured, given = report(1, decode=3600.0), report(1, decode=1800.0)
    measured.joules, measured.gpus, given.gpus = 3.6e6, 1.0, 2.0
    assert energy.of([measured], None, 400.0) == Energy(1.0, 0.4, "NVML")
    assert energy.of([measured, given], 350.0, None) == Energy(1.35, None, "NVML and cost.watts_per_gpu")
    assert energy.of([measured, given], None, 400.0) == Energy()
    assert energy.of([report(1)], 350.0, 400.0) == Energy()  # no GPU at all
