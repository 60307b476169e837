"""Tuning: agreement of values, the search, its file of measurements, and the configuration that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raypd.cli import tune as tune_command
from raypd.cluster.driver import Interrupted
from raypd.config import RunConfig, rewrite
from raypd.config.load import load_config
from raypd.errors import ConfigError, InputError, RunError
from raypd.estimate import agreement, tune
from raypd.estimate.agreement import Agreement, Floor, NormalValue
from raypd.estimate.profile import DocumentCost, Profile, WorkerFacts
from raypd.estimate.search import Changes, OutOfTime, Search, Trial

# ----------------------------------------------------------------------------------------------------------- agreement


def test_values_are_compared_after_normalisation() -> None:
    for a, b in [
        ("Sony", " sony. "),
        ("1,200", "1200.0"),
        ("Over  Ear", "over ear"),
        ("ﬁve", "five"),
        (True, "true"),
        ('"x"', "x"),
    ]:
        assert agreement.normal(a) == agreement.normal(b)
    for a, b in [("1.2", "12"), ("sony", "sonny"), (None, "null"), ("3 l", "3"), ("-1", "1")]:
        assert agreement.normal(a) != agreement.normal(b)


def row(**values: tuple[Any, str]) -> dict[str, Any]:
    return {"values": [{"name": n, "value": v, "status": s} for n, (v, s) in values.items()]}


def cost(*rows: dict[str, Any], error: str | None = None) -> DocumentCost:
    return DocumentCost(1.0, 1, 0, 1, list(rows), error)


def test_a_cut_value_never_agrees_and_a_cut_reference_is_left_out() -> None:
    reference = [
        agreement.values_of(cost(row(a=("x", "ok"), b=(None, "null"), c=("y", "truncated"), d=("long tex", "ok")))),
        agreement.values_of(cost(row(a=("1", "ok")))),
        agreement.values_of(cost(error="too long")),
    ]
    other = [
        agreement.values_of(cost(row(a=("X", "ok"), b=(None, "null"), c=("y", "ok"), d=("long tex", "truncated")))),
        None,  # the whole document was not answered
        agreement.values_of(cost(row(a=("1", "ok")))),
    ]
    assert agreement.compare(reference, other) == Agreement(agree=2, of=4, left_out=2)
    assert agreement.compare(reference, reference) == Agreement(4, 4, 2)
    flagged = [agreement.values_of(cost(row(a=(None, "ambiguous"))))]
    assert agreement.compare(flagged, flagged) == Agreement(0, 0, 1)
    assert agreement.compare([agreement.values_of(cost(row(a=(None, "null"))))], flagged) == Agreement(0, 1)
    null = [{"a": NormalValue(None, True)}]
    assert agreement.compare(null, [{"a": NormalValue("none", True)}]).agree == 0


def test_answers_of_the_other_tasks() -> None:
    asked = {"question": "?", "question_id": "7", "answer": "Yes.", "answer_status": "ok"}
    assert agreement.values_of(cost(asked)) == {"7": NormalValue("yes", True)}
    wrote = {"sample": 0, "turn": 1, "text": "A b", "finish_reason": "length"}
    assert agreement.values_of(cost(wrote)) == {"sample 0, turn 1": NormalValue("a b", False)}


def test_the_interval_of_a_share_by_hand() -> None:
    """Wilson, as tables have it: 9 of 10 is 59.6% to 98.2%; n of n begins at n / (n + 1.96 squared)."""
    assert Agreement(9, 10).interval() == pytest.approx((0.596, 0.982), abs=5e-4)
    assert Agreement(36, 36).interval()[0] == pytest.approx(36 / (36 + 1.96**2))
    assert Agreement(0, 0).interval() == (0.0, 1.0)
    assert Agreement(90, 100, alike=10).interval() == pytest.approx(Agreement(9, 10).interval())


def test_values_of_a_document_that_err_together_count_for_less() -> None:
    def answers(*documents: str) -> list[dict[str, NormalValue]]:
        return [{str(i): NormalValue(text, True) for i, text in enumerate(one)} for one in documents]

    wanted = answers(*["xxxxx"] * 8)
    together = agreement.compare(wanted, answers(*["xxxxx"] * 6, "yyyyy", "yyyyy"))
    apart = agreement.compare(wanted, answers(*["xxxxy"] * 6, "xxxyy", "xxxyy"))
    assert (together.agree, together.of) == (apart.agree, apart.of) == (30, 40)
    assert together.alike > 5
    assert apart.alike == 1
    assert together.interval()[0] < apart.interval()[0]


@pytest.mark.parametrize(("floor", "needed"), [(0.9, 35), (0.95, 73), (0.5, 4), (0.0, 0)])
def test_how_many_values_a_floor_needs(floor: float, needed: int) -> None:
    found = Floor(floor)
    assert found.needed == needed
    assert found.reached(Agreement(needed, needed))
    assert found.judged(Agreement(needed, needed))
    if needed:
        assert not found.reached(Agreement(needed - 1, needed - 1))
        assert not found.judged(Agreement(needed - 1, needed - 1))
    assert not Floor(1.0).judged(Agreement(10_000, 10_000))
    assert Floor(1.0, "share").reached(Agreement(10, 10))
    assert not Floor(0.9, "share").reached(Agreement(0, 0))


# -------------------------------------------------------------------------------------------------------------- search


def make(**keys: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "input": {"path": "x.jsonl"},
        "output": {"path": "out"},
        "task": {"categories": {"c": {"attributes": [{"name": "a"}]}}},
    }
    return RunConfig.model_validate({**tree, **keys})


class World:
    """What every setting would measure: the speed and the share that agrees, by a rule of the test."""

    def __init__(self, rule: Any, most: int = 1000) -> None:
        self.rule, self.most, self.asked = rule, most, [dict]
        self.asked = []

    def __call__(self, changes: Changes, limit: float | None) -> Trial:
        if len(self.asked) == self.most:
            raise OutOfTime("the time was up")
        self.asked.append(changes)
        speed, share = self.rule(
            {"method": "hyper_parallel", "isolate": "documents", "stacked_documents": 6} | short(changes)
        )
        if limit is not None and 1 / speed > limit:
            return Trial(changes, [speed], Agreement(0, 0), cut=True)
        return Trial(changes, [speed], Agreement(round(1000 * share), 1000))


def short(changes: Changes) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in changes.items()}


def physics(s: dict[str, Any]) -> tuple[float, float]:
    """Hyper-parallel is 5 times as fast; batch pays up to 64, passes up to 4096 tokens; stacking agrees less."""
    speed = {"autoregressive": 1.0, "guided": 2.0}.get(s["method"], 5.0)
    share = 1.0 if s["method"] in ("autoregressive", "guided") else 0.95
    stack = s["stacked_documents"] if s["method"] == "hyper_parallel" and s["isolate"] == "none" else 1
    batch, budget = s.get("max_num_seqs", 16) * stack, s.get("max_num_batched_tokens", 2048)
    speed *= min(batch, 64) ** 0.5 / (1 + max(0, batch - 64) / 64)
    speed *= 1.0 - abs(budget - 4096) / 10_000
    if s["method"] == "hyper_parallel" and s["isolate"] == "none":
        speed, share = speed * (1 + s["stacked_documents"] / 10), share - 0.01 * s["stacked_documents"]
    if s.get("max_value_tokens", 30) < 15:
        speed, share = speed * 1.5, share - 0.3
    return speed, share


def test_the_fastest_that_agrees_wins() -> None:
    world = World(physics)
    search = Search(make(), world, Floor(0.9))
    best = search.run()
    assert best is not None
    found = short(best.changes)
    assert (found["isolate"], found["stacked_documents"]) == ("none", 2)  # four agree in 91%, not surely in 90%
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (32, 4096)
    assert best.agreement.share >= 0.9
    assert world.asked[0] == {"decoding.method": "autoregressive"}  # the reference comes first
    assert len(best.speeds) == 3
    assert len(world.asked) < 45
    two, four = (
        next(
            t
            for t in search.trials
            if short(t.changes) == {"isolate": "none", "stacked_documents": j, "max_num_seqs": 16 // j}
        )
        for j in (2, 4)
    )
    assert four.speed > two.speed
    assert not search.agrees(four)  # it was measured, and passed over


def test_a_floor_that_only_autoregressive_decoding_reaches() -> None:
    best = Search(make(), World(physics), Floor(0.99)).run()
    assert best is not None
    assert best.changes["decoding.method"] == "autoregressive"
    assert best.changes["engine.max_num_seqs"] == 64


def test_what_is_measured_when_time_is_up_counts() -> None:
    search = Search(make(), World(physics, most=2), Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes == {}
    assert search.ended == "the time was up"
    assert Search(make(), World(physics, most=0), Floor(0.9)).run() is None


def test_a_setting_that_fails_or_is_far_slower_does_not_win() -> None:
    def rule(s: dict[str, Any]) -> tuple[float, float]:
        return (0.01, 1.0) if s.get("max_num_seqs", 16) > 16 else physics(s)

    world = World(rule)
    search = Search(make(), world, Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes.get("engine.max_num_seqs", 16) <= 16
    assert any(t.cut for t in search.trials)

    def fails(changes: Changes, limit: float | None) -> Trial:
        if "decoding.isolate" in changes or "decoding.stacked_documents" in changes:
            return Trial(changes, error="does not fit")
        return world(changes, limit)

    assert Search(make(), fails, Floor(0.9)).run() is not None


def test_the_median_of_the_best_two_decides() -> None:
    """The setting that was lucky once loses to the one that is steady."""
    luck = iter([9.0, 3.0, 3.0])

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        if s["method"] == "autoregressive":
            return 1.0, 1.0
        if s["isolate"] == "values":
            return next(luck), 1.0
        return (5.0, 1.0) if len(s) == 3 else (2.0, 1.0)

    class Lucky(World):
        def __call__(self, changes: Changes, limit: float | None) -> Trial:
            return super().__call__(changes, None)

    def only(changes: Changes, limit: float | None) -> Trial:
        if set(changes) - {"decoding.method", "decoding.isolate"}:
            return Trial(changes, error="not of interest")
        return lucky(changes, limit)

    lucky = Lucky(rule)
    search = Search(make(), only, Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes == {}
    assert sorted(next(t for t in search.trials if t.changes == {"decoding.isolate": "values"}).speeds) == [3, 3, 9]


class Broken:
    """A small model: of the values that it writes by itself `whole` are whole; guided all of them are."""

    def __init__(self, documents: int = 40, whole: int = 12, agree: float = 1.0) -> None:
        self.documents, self.whole, self.agree, self.asked = documents, whole, agree, []

    def __call__(self, changes: Changes, limit: float | None) -> Trial:
        self.asked.append(changes)
        setting = {"method": "hyper_parallel", "isolate": "documents", "stacked_documents": 6} | short(changes)
        free = setting["method"] == "autoregressive"
        alone = setting["method"] == "guided"
        answers = []
        for number in range(self.documents):
            text = "x" if free or alone or number < self.agree * self.documents else "y"
            answers.append({"a": NormalValue(text, number < self.whole or not free)})
        return Trial(changes, [physics(setting)[0]], answers=answers)


def test_where_free_running_answers_are_broken_guided_ones_are_the_reference() -> None:
    world = Broken()
    search = Search(make(), world, Floor(0.9))
    best = search.run()
    assert best is not None
    assert search.by_guided
    assert search.judged
    assert world.asked[:2] == [{"decoding.method": "autoregressive"}, {"decoding.method": "guided"}]
    free = search.trials[0]
    assert (free.agreement.agree, free.agreement.of) == (12, 40)  # it is held to the reference, too
    assert not search.agrees(free)
    assert search.agrees(best)
    assert best.agreement.of == 40


def test_a_setting_that_differs_from_guided_answers_is_passed_over() -> None:
    search = Search(make(), Broken(documents=100, agree=0.8), Floor(0.9))
    best = search.run()
    assert best is not None
    assert short(best.changes)["method"] == "guided"


def test_what_cannot_be_judged_changes_no_answers() -> None:
    """A reference of 12 values, and none other wanted: only batch and token budget may be changed."""
    world = Broken()
    search = Search(make(), world, Floor(0.9), [("float32", "none")], wanted="document")
    best = search.run()
    assert best is not None
    assert not search.judged
    assert not search.by_guided
    assert set(best.changes) == {"engine.max_num_seqs", "engine.max_num_batched_tokens"}
    asked = [set(changes) for changes in world.asked]
    assert asked[0] == {"decoding.method"}
    assert all(keys <= {"engine.max_num_seqs", "engine.max_num_batched_tokens"} for keys in asked[1:])
    by_share = Search(make(), Broken(), Floor(0.9, "share"), wanted="document")
    assert by_share.run() is not None
    assert by_share.judged  # the user has decided that 12 values will do


def test_a_good_reference_is_kept_however_small_the_sample_is() -> None:
    """No value is broken: guided decoding would not bring more of them."""
    search = Search(make(), Broken(documents=10, whole=10), Floor(0.9))
    search.run()
    assert not search.by_guided
    assert not search.judged


def test_a_reference_can_be_asked_for() -> None:
    world = Broken(whole=40)
    search = Search(make(), world, Floor(0.9), wanted="guided")
    search.run()
    assert search.by_guided
    assert world.asked[0] == {"decoding.method": "guided"}
    other = Search(make(task={"kind": "generation"}), world, Floor(0.9), wanted="guided")
    other.run()
    assert not other.by_guided  # it has no keys to give


def test_nothing_is_made_of_a_reference_alone() -> None:
    """Time was up before the configuration itself was measured, and the floor cannot be judged."""

    class Short(Broken):
        def __call__(self, changes: Changes, limit: float | None) -> Trial:
            if self.asked:
                raise OutOfTime("the time was up")
            return super().__call__(changes, limit)

    assert Search(make(), Short(), Floor(0.9), wanted="document").run() is None


@pytest.mark.parametrize("kind", ["extraction", "generation"])
def test_speculative_decoding_is_tuned_by_the_length_of_its_drafts(kind: str) -> None:
    """One prompt at a time: the batch is none of its settings."""

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        drafting = 3 - abs(s.get("draft_tokens", 20) - 5) / 10
        return {"autoregressive": 1.0, "hyper_parallel": 1.5}.get(s["method"], drafting), 1.0

    task = make().task.model_dump() if kind == "extraction" else {"kind": kind}
    config = make(task=task, decoding={"method": "speculative", "draft_model": "x"})
    world = World(rule)
    best = Search(config, lambda c, limit: world({"decoding.method": "speculative", **c}, limit), Floor(0.9)).run()
    assert best is not None
    assert short(best.changes) == {"method": "speculative", "draft_tokens": 5}
    drafting = [asked for asked in world.asked if asked["decoding.method"] == "speculative"]
    assert {key for asked in drafting for key in asked} == {"decoding.method", "decoding.draft_tokens"}


def test_other_tasks_have_their_own_settings() -> None:
    world = World(
        lambda s: (1.0 if s["method"] == "autoregressive" else 2.0 + s.get("contexts_per_prompt", 1) / 10, 1.0)
    )
    config = make(task={"kind": "question_answering"})
    best = Search(config, lambda c, limit: world({"decoding.method": "intra_prompt", **c}, limit), Floor(0.9)).run()
    assert best is not None
    assert short(best.changes)["contexts_per_prompt"] == 32
    wrote = Search(make(task={"kind": "generation"}), World(physics), Floor(0.9)).run()
    assert wrote is not None
    assert "decoding.isolate" not in wrote.changes


# ------------------------------------------------------------------------------------------ measurements and their file


class StubBench:
    """In place of a worker: documents/s by the physics above. Notes what was really measured."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.measured: list[dict[str, Any]] = []
        self.stop_after = stop_after

    def __enter__(self) -> StubBench:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def facts(self, config: RunConfig) -> WorkerFacts:
        return WorkerFacts(None, 0.0, "a test")

    def profile(self, config: RunConfig, documents: Sequence[Any], limit: float | None, label: str) -> Profile:
        if len(self.measured) == self.stop_after:
            raise KeyboardInterrupt
        decoding, engine = config.decoding, config.engine
        setting = decoding.model_dump() | engine.model_dump()
        if decoding.isolate != "none":
            setting["stacked_documents"] = 6
        self.measured.append(setting)
        speed, share = physics(setting)
        costs: list[DocumentCost | None] = []
        for number in range(len(documents)):
            # values that differ are spread over the documents
            same = [(10 * number + 37 * i) % 100 < 100 * share for i in range(10)]
            costs.append(cost(row(**{f"a{i}": ("same" if one else "other", "ok") for i, one in enumerate(same)})))
        seconds = len(documents) / speed
        for one in costs:
            one.seconds = 1 / speed
        return Profile(decoding.method, costs, seconds, [(1.0, 1.0)] * 8, 0.0, 0.0, self.facts(config), True)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with comments and its documents; the worker is a StubBench, kept in `tune.bench`."""
    documents = [{"id": str(i), "title": f"text {i}"} for i in range(100)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    (tmp_path / "run.yaml").write_text(
        """\
# my run
input:
  path: data.jsonl   # beside this file
  text_columns: [title]
  category_column: null
output: {path: out}
model: fake
task:
  categories:
    c:
      attributes:
        - {name: a, description: "what it is"}   # the only one

engine:
  max_num_seqs: 16  # as last year
cost: {prices: {local: 3.6}}
"""
    )
    use(monkeypatch, StubBench())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, bench: StubBench) -> StubBench:
    monkeypatch.setattr(tune, "RemoteProfiler", lambda *_: bench)
    return bench


def command(path: str = "run.yaml", *overrides: str, **options: Any) -> None:
    output = options.pop("output", None)
    tune_command.run(path, list(overrides), output, tune.TuneOptions(**{"sample": 50, **options}), verbose=False)


def test_the_users_file_comes_back_with_only_the_changed_keys(files, capsys) -> None:
    before = (files / "run.yaml").read_text()
    command()
    assert (files / "run.yaml").read_text() == before
    text = (files / "run.tuned.yaml").read_text()
    for kept in (
        "# my run",
        "# beside this file",
        "# the only one",
        "# as last year",
        '{name: a, description: "what it is"}',
    ):
        assert kept in text
    assert text.startswith("# Written by raypd tune.\n# changed: ")
    made, mine = load_config("run.tuned.yaml"), load_config("run.yaml")
    assert made.engine.max_num_seqs == 32
    assert made.engine.max_num_batched_tokens == 4096
    assert made.decoding.isolate == "none"
    assert made.input == mine.input
    assert made.task == mine.task
    out = capsys.readouterr().out
    assert re.search(r"best +\nmax_num_seqs=32,\s+max_num_batched_tokens=4096", out)
    assert "unsure" in out
    assert "per 1,000" in out
    assert max(map(len, out.partition("fastest")[0].splitlines())) <= 80
    assert "93.0% [90-95%] of 500 values agree" in out


class SmallBench(StubBench):
    """A small model: of what it writes by itself one document in ten is whole."""

    def profile(self, config: RunConfig, documents: Sequence[Any], limit: float | None, label: str) -> Profile:
        found = super().profile(config, documents, limit, label)
        if config.decoding.method == "autoregressive":
            for one in found.costs[: len(documents) * 9 // 10]:
                assert one is not None
                for value in one.rows[0]["values"]:
                    value["status"] = "invalid"
        return found


def test_a_small_model_gets_an_honest_answer(files, monkeypatch, capsys) -> None:
    use(monkeypatch, SmallBench())
    command()
    seen = capsys.readouterr()
    assert re.search(r"1\. method=autoregressive: .* 50 values to compare others with, 450 are not whole\n", seen.err)
    assert re.search(r"2\. method=guided: .* 500 values to compare others with\n", seen.err)
    out = " ".join(seen.out.split())
    assert "agree with guided decoding in at least 90%" in out
    assert "(decoding.method: guided): autoregressive decoding gave 50 whole values and nothing whole for 450" in out
    assert "guided decoding" in (files / "run.tuned.yaml").read_text().replace("\n# ", " ")


def test_time_that_ends_before_the_configuration_was_measured_is_said(files, monkeypatch) -> None:
    use(monkeypatch, SmallBench())
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    measure = tune._Trials.measure

    def slow(self: Any, *given: Any) -> Trial:
        now[0] += 45.0
        return measure(self, *given)

    monkeypatch.setattr(tune._Trials, "measure", slow)
    with pytest.raises(RunError, match=r"before the configuration itself was measured: raise --minutes .* goes on"):
        command(sample=30, reference="document", minutes=1)


def test_a_floor_that_cannot_be_judged_is_said_and_changes_no_answers(files, monkeypatch, capsys) -> None:
    use(monkeypatch, SmallBench())
    command(sample=30, reference="document")
    out = " ".join(capsys.readouterr().out.split())
    assert "agreement was NOT judged: autoregressive decoding gave 30 whole values, and a floor of 90% needs 35" in out
    assert "not judged" in out
    made, mine = load_config("run.tuned.yaml"), load_config("run.yaml")
    assert made.decoding == mine.decoding
    assert made.model == mine.model
    assert made.engine.max_num_seqs != mine.engine.max_num_seqs
    assert "NOT judged" in (files / "run.tuned.yaml").read_text()


def test_ctrl_c_loses_only_the_measurement_in_hand(files, monkeypatch, capsys) -> None:
    first = use(monkeypatch, StubBench(stop_after=5))
    with pytest.raises(Interrupted, match="the same command goes on from there"):
        command()
    with open(files / "run.tuned.jsonl", "a") as file:
        file.write('{"key": "torn')  # killed while writing
    second = use(monkeypatch, StubBench())
    command()
    assert len(first.measured) == 5
    assert not [setting for setting in second.measured[:1] if setting in first.measured]
    whole = use(monkeypatch, StubBench())
    command(fresh=True)
    assert len(whole.measured) == len(first.measured) + len(second.measured)
    again = use(monkeypatch, StubBench())
    command()
    assert again.measured == []  # all of it stands in the file
    assert "are from the file" in capsys.readouterr().out


def test_measurements_hold_for_their_sample_and_configuration_only(files, monkeypatch) -> None:
    command()
    other = use(monkeypatch, StubBench())
    command(sample=40)
    assert other.measured
    changed = use(monkeypatch, StubBench())
    command("run.yaml", "decoding.sampling.temperature=0.5")
    assert changed.measured
    tuned = load_config("run.tuned.yaml")
    assert tuned.decoding.sampling.temperature == 0.5  # what was said on the command line stands in the file, too


def test_a_limit_of_money_needs_a_price_and_ends_the_search(files, monkeypatch) -> None:
    bench = use(monkeypatch, StubBench())
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    profile = bench.profile

    def slow(*given: Any) -> Profile:
        now[0] += 100.0
        return profile(*given)

    bench.profile = slow  # type: ignore[method-assign]
    command(budget_usd=0.35)  # 3.6 USD an hour: 350 s
    assert len(bench.measured) == 4
    with pytest.raises(ConfigError, match=r"cost\.prices\.local"):
        command("run.yaml", "cost.prices={}", budget_usd=1.0)


def test_paths_keep_their_meaning_in_another_folder(files) -> None:
    (files / "elsewhere").mkdir()
    command(output="elsewhere/new.yaml", minutes=10)
    assert load_config("elsewhere/new.yaml").input.path == str(files / "data.jsonl")
    assert (files / "elsewhere/new.jsonl").exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("run.yaml", "never writes over it"),
        ("mine.yaml", "not from raypd tune"),
        (".", "is a folder"),
        ("no/x.yaml", "does not exist"),
    ],
)
def test_nothing_of_the_users_is_written_over(files, output, message) -> None:
    (files / "mine.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=message):
        command(output=output)
    assert (files / "mine.yaml").read_text() == "a: 1\n"
    command()
    command()  # its own file it may


def test_mistakes_are_told_before_anything_is_measured(files, monkeypatch) -> None:
    bench = use(monkeypatch, StubBench())
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        command("run.yaml", "engine.max_num_sequences=3")
    with pytest.raises(InputError, match="no such file"):
        command("run.yaml", "input.path=nowhere.jsonl")
    with pytest.raises(ConfigError, match="from 0 to 1"):
        command(agreement=90)
    with pytest.raises(ConfigError, match="has not the GPU"):
        command(instance="g6e.48xlarge")
    assert bench.measured == []


def test_a_worker_that_cannot_measure_at_all_ends_it(files, monkeypatch) -> None:
    bench = use(monkeypatch, StubBench())

    def fails(*_: Any) -> Profile:
        raise RunError("the worker died (out of memory?)")

    bench.profile = fails  # type: ignore[method-assign]
    with pytest.raises(RunError, match="out of memory"):
        command()


def test_a_setting_that_does_not_fit_is_told_and_passed_over(files, monkeypatch, capsys) -> None:
    """Now, and when it is taken from the file."""
    for _ in range(2):
        bench = use(monkeypatch, StubBench())
        profile = bench.profile

        def picky(config: RunConfig, *given: Any, profile: Any = profile) -> Profile:
            if config.decoding.max_value_tokens < 30:
                raise ConfigError("an enum needs 20 tokens")
            return profile(config, *given)

        bench.profile = picky  # type: ignore[assignment]
        command()
        seen = capsys.readouterr()
        assert "max_value_tokens=15: an enum needs 20 tokens" in seen.err
        assert load_config("run.tuned.yaml").decoding.max_value_tokens == 30
    assert bench.measured == []


def test_a_short_model_key_can_take_a_type(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(
        "input: {path: x.jsonl}\noutput: {path: out}\nmodel: fake\ntask: {categories: {c: {attributes: [{name: a}]}}}\n"
    )
    made = rewrite.write(tmp_path / "a.yaml", [], {"model.dtype": "float32"}, tmp_path / "b.yaml", "why")
    assert (made.model.name, made.model.dtype) == ("fake", "float32")
