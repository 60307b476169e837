"""Tuning: agreement of values, the search, its file of measurements, and the configuration that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    same = [("Sony", " sony. "), ("1,200", "1200.0"), ("Over  Ear", "over ear"), ("ﬁve", "five"), (True, "true")]
    for a, b in [*same, ('"x"', "x")]:
        assert agreement.normal(a) == agreement.normal(b)
    for a, b in [("1.2", "12"), ("sony", "sonny"), (None, "null"), ("3 l", "3"), ("-1", "1")]:
        assert agreement.normal(a) != agreement.normal(b)


def values(**of: tuple[Any, str]) -> DocumentCost:
    """A document whose record has these values, each with its status."""
    rows = [{"values": [{"name": name, "value": value, "status": status} for name, (value, status) in of.items()]}]
    return DocumentCost(1.0, 1, 0, 1, rows)


def test_a_cut_value_never_agrees_and_a_cut_reference_is_left_out() -> None:
    reference = [
        values(a=("x", "ok"), b=(None, "null"), c=("y", "truncated"), d=("long tex", "ok")),
        values(a=("1", "ok")),
        DocumentCost(1.0, 1, 0, 1, error="too long"),
    ]
    other = [
        values(a=("X", "ok"), b=(None, "null"), c=("y", "ok"), d=("long tex", "truncated")),
        None,  # the whole document was not answered
        values(a=("1", "ok")),
    ]

    def compare(some: list[DocumentCost | None], others: list[DocumentCost | None]) -> Agreement:
        return agreement.compare([*map(agreement.values_of, some)], [*map(agreement.values_of, others)])

    assert compare(reference, other) == Agreement(agree=2, of=4, left_out=2)
    assert compare(reference, reference) == Agreement(4, 4, 2)
    null, ambiguous = values(a=(None, "null")), values(a=(None, "ambiguous"))
    assert compare([ambiguous], [ambiguous]) == Agreement(0, 0, 1)
    assert compare([null], [ambiguous]) == compare([null], [values(a=("none", "ok"))]) == Agreement(0, 1)


def test_answers_of_the_other_tasks() -> None:
    asked = {"question": "?", "question_id": "7", "answer": "Yes.", "answer_status": "ok"}
    wrote = {"sample": 0, "turn": 1, "text": "A b", "finish_reason": "length"}
    found = [agreement.values_of(DocumentCost(1.0, 1, 0, 1, [row])) for row in (asked, wrote)]
    assert found == [{"7": NormalValue("yes", True)}, {"sample 0, turn 1": NormalValue("a b", False)}]


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


def short(changes: Changes) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in changes.items()}


def physics(s: dict[str, Any]) -> tuple[float, float]:
    """Speed, and share that agrees.

    Hyper-parallel is 5 times as fast; batch pays up to 64, passes up to 4096 tokens; stacking agrees less.
    """
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


class World:
    """What every setting measures, by a rule of the test: its speed and the share of documents that agree.

    whole: documents whose value autoregressive decoding writes whole (as a small model may not). most: measurements.
    """

    def __init__(self, rule: Any = physics, documents: int = 1000, whole: int = 1000, most: int = 1000) -> None:
        self.rule, self.documents, self.whole, self.most = rule, documents, whole, most
        self.asked: list[Changes] = []

    def __call__(self, changes: Changes, limit: float | None) -> Trial:
        if len(self.asked) == self.most:
            raise OutOfTime("the time was up")
        self.asked.append(changes)
        setting = {"method": "hyper_parallel", "isolate": "documents", "stacked_documents": 6} | short(changes)
        speed, share = self.rule(setting)
        if limit is not None and 1 / speed > limit:
            return Trial(changes, [speed], cut=True)
        free, same = setting["method"] == "autoregressive", round(share * self.documents)
        found = [NormalValue("x" if n < same else "y", n < self.whole or not free) for n in range(self.documents)]
        return Trial(changes, [speed], answers=[{"a": value} for value in found])


def test_the_fastest_that_agrees_wins() -> None:
    world = World()
    search = Search(make(), world, Floor(0.9))
    best = search.run()
    assert best is not None
    # four agree in 91%, not surely in 90%
    engine = {"max_num_seqs": 32, "max_num_batched_tokens": 4096}
    assert short(best.changes) == {"isolate": "none", "stacked_documents": 2, **engine}
    assert best.agreement.share >= 0.9
    assert world.asked[0] == {"decoding.method": "autoregressive"}  # the reference comes first
    assert len(best.speeds) == 3
    assert len(world.asked) < 45
    settings = [{"isolate": "none", "stacked_documents": j, "max_num_seqs": 16 // j} for j in (2, 4)]
    two, four = (next(t for t in search.trials if short(t.changes) == setting) for setting in settings)
    assert four.speed > two.speed
    assert not search.agrees(four)  # it was measured, and passed over


def agreeing(share: float) -> Any:
    """Physics in which settings but those of the references agree in this share."""
    return lambda s: (physics(s)[0], 1.0 if s["method"] in ("autoregressive", "guided") else share)


BY_SHARE = {"floor": Floor(0.9, "share"), "wanted": "document"}


@pytest.mark.parametrize(
    ("world", "how", "references", "judged", "method"),
    [
        (World(), {"floor": Floor(0.99)}, "autoregressive", True, "autoregressive"),  # which alone reaches it
        # Free-running answers are broken: guided ones are the reference.
        (World(agreeing(1.0), 40, 12), {}, "autoregressive guided", True, "hyper_parallel"),
        (World(agreeing(0.8), 100, 12), {}, "autoregressive guided", True, "guided"),
        # A good reference is kept however small the sample is: guided decoding would not bring more values.
        (World(agreeing(1.0), 10), {}, "autoregressive", False, "hyper_parallel"),
        # The user has decided that 12 values will do.
        (World(agreeing(1.0), 40, 12), BY_SHARE, "autoregressive", True, "hyper_parallel"),
        (World(agreeing(1.0), 40), {"wanted": "guided"}, "guided", True, "hyper_parallel"),
    ],
)
def test_the_reference_and_what_is_held_to_it(world, how, references, judged, method) -> None:
    search = Search(**{"config": make(), "measure": world, "floor": Floor(0.9), **how})
    best = search.run()
    assert best is not None
    assert [asked["decoding.method"] for asked in world.asked[: len(references.split())]] == references.split()
    assert (search.by_guided, search.judged) == ("guided" in references, judged)
    assert search.method_of(best.changes) == method
    assert search.agrees(best)
    if references == "autoregressive guided":
        free = search.trials[0]  # it is held to the reference, too
        assert (free.agreement.agree, free.agreement.of) == (12, world.documents)
        assert not search.agrees(free)


def test_what_is_measured_when_time_is_up_counts() -> None:
    search = Search(make(), World(most=2), Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes == {}
    assert search.ended == "the time was up"
    assert Search(make(), World(most=0), Floor(0.9)).run() is None
    # nothing is made of a reference alone by which the floor cannot be judged
    assert Search(make(), World(documents=40, whole=12, most=1), Floor(0.9), wanted="document").run() is None


def test_a_setting_that_is_far_slower_is_cut_short_and_does_not_win() -> None:
    search = Search(make(), World(lambda s: (0.01, 1.0) if s.get("max_num_seqs", 16) > 16 else physics(s)), Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes.get("engine.max_num_seqs", 16) <= 16
    assert any(trial.cut for trial in search.trials)


def test_the_median_of_the_best_two_decides() -> None:
    """The setting that was lucky once loses to the one that is steady."""
    luck = iter([9.0, 3.0, 3.0])

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        if s["method"] == "autoregressive":
            return 1.0, 1.0
        return next(luck) if s["isolate"] == "values" else 5.0, 1.0

    def only(changes: Changes, limit: float | None) -> Trial:
        if set(changes) - {"decoding.method", "decoding.isolate"}:
            return Trial(changes, error="not of interest")
        return world(changes, None)

    world = World(rule)
    search = Search(make(), only, Floor(0.9))
    best = search.run()
    assert best is not None
    assert best.changes == {}
    assert sorted(next(t for t in search.trials if t.changes == {"decoding.isolate": "values"}).speeds) == [3, 3, 9]


def tuned(rule: Any, **keys: Any) -> tuple[dict[str, Any], list[Changes]]:
    """The best setting of a configuration with another method than World takes it for, and those of its own tried."""
    config, world = make(**keys), World(rule)
    own = {"decoding.method": config.decoding.method}
    best = Search(config, lambda changes, limit: world({**own, **changes}, limit), Floor(0.9)).run()
    assert best is not None
    return short(best.changes), [asked for asked in world.asked if asked["decoding.method"] == own["decoding.method"]]


@pytest.mark.parametrize("kind", ["extraction", "generation"])
def test_speculative_decoding_is_tuned_by_the_length_of_its_drafts(kind: str) -> None:
    """One prompt at a time: the batch is none of its settings."""

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        drafting = 3 - abs(s.get("draft_tokens", 20) - 5) / 10
        return {"autoregressive": 1.0, "hyper_parallel": 1.5}.get(s["method"], drafting), 1.0

    task = make().task.model_dump() if kind == "extraction" else {"kind": kind}
    best, asked = tuned(rule, task=task, decoding={"method": "speculative", "draft_model": "x"})
    assert best == {"method": "speculative", "draft_tokens": 5}
    assert {key for one in asked for key in one} == {"decoding.method", "decoding.draft_tokens"}


def test_other_tasks_have_their_own_settings() -> None:
    def rule(s: dict[str, Any]) -> tuple[float, float]:
        return 1.0 if s["method"] == "autoregressive" else 2.0 + s.get("contexts_per_prompt", 1) / 10, 1.0

    best, _ = tuned(rule, task={"kind": "question_answering"})
    assert best["contexts_per_prompt"] == 32
    world = World()
    search = Search(make(task={"kind": "generation"}), world, Floor(0.9), wanted="guided")
    assert search.run() is not None
    assert search.reference is search.trials[0]
    assert not search.by_guided  # it has no keys to give
    assert not any("decoding.isolate" in asked for asked in world.asked)


# ------------------------------------------------------------------------------------------ measurements and their file


class StubBench:
    """In place of a worker: documents/s by the physics above. Notes what was really measured.

    small: of what autoregressive decoding writes one document in ten is whole. before: called with each configuration.
    """

    def __init__(self, small: bool = False, before: Callable[[RunConfig], None] = lambda config: None) -> None:
        self.small, self.before = small, before
        self.measured: list[dict[str, Any]] = []

    def __enter__(self) -> StubBench:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def facts(self, config: RunConfig) -> WorkerFacts:
        return WorkerFacts(None, 0.0, "a test")

    def profile(self, config: RunConfig, documents: Sequence[Any], limit: float | None, label: str) -> Profile:
        self.before(config)
        setting = config.decoding.model_dump() | config.engine.model_dump()
        self.measured.append(setting)
        speed, share = physics(setting)
        broken = len(documents) * 9 // 10 if self.small and setting["method"] == "autoregressive" else 0
        costs: list[DocumentCost | None] = []
        for number in range(len(documents)):
            # values that differ are spread over the documents
            same = [(10 * number + 37 * i) % 100 < 100 * share for i in range(10)]
            status = "invalid" if number < broken else "ok"
            found = values(**{f"a{i}": ("same" if one else "other", status) for i, one in enumerate(same)})
            costs.append(replace(found, seconds=1 / speed))
        seconds = len(documents) / speed
        return Profile(setting["method"], costs, seconds, [(1.0, 1.0)] * 8, 0.0, 0.0, self.facts(config), True)


Bench = Callable[..., StubBench]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A configuration with comments and its documents in the current folder; puts a StubBench in the worker's place."""
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
    monkeypatch.chdir(tmp_path)

    def use(**how: Any) -> StubBench:
        made = StubBench(**how)
        monkeypatch.setattr(tune, "RemoteProfiler", lambda *_: made)
        return made

    use()
    return use


def command(*overrides: str, output: str | None = None, **options: Any) -> None:
    tune_command.run("run.yaml", list(overrides), output, tune.TuneOptions(**{"sample": 50, **options}), verbose=False)


def test_the_users_file_comes_back_with_only_the_changed_keys(bench, capsys) -> None:
    before = Path("run.yaml").read_text()
    command()
    assert Path("run.yaml").read_text() == before
    text = Path("run.tuned.yaml").read_text()
    comments = ("# my run", "# beside this file", "# the only one", "# as last year")
    assert all(kept in text for kept in (*comments, '{name: a, description: "what it is"}'))
    assert text.startswith("# Written by raypd tune.\n# changed: ")
    made, mine = load_config("run.tuned.yaml"), load_config("run.yaml")
    assert (made.engine.max_num_seqs, made.engine.max_num_batched_tokens) == (32, 4096)
    assert made.decoding.isolate == "none"
    assert (made.input, made.task) == (mine.input, mine.task)
    out = capsys.readouterr().out
    assert re.search(r"best +\nmax_num_seqs=32,\s+max_num_batched_tokens=4096", out)
    assert "unsure" in out
    assert "per 1,000" in out
    assert max(map(len, out.partition("fastest")[0].splitlines())) <= 80
    assert "93.0% [90-95%] of 500 values agree" in out


def test_a_small_model_gets_an_honest_answer(bench, capsys) -> None:
    bench(small=True)
    command()
    seen = capsys.readouterr()
    assert re.search(r"1\. method=autoregressive: .* 50 values to compare others with, 450 are not whole\n", seen.err)
    assert re.search(r"2\. method=guided: .* 500 values to compare others with\n", seen.err)
    out = " ".join(seen.out.split())
    assert "agree with guided decoding in at least 90%" in out
    assert "(decoding.method: guided): autoregressive decoding gave 50 whole values and nothing whole for 450" in out
    assert "guided decoding" in Path("run.tuned.yaml").read_text().replace("\n# ", " ")


def test_a_floor_that_cannot_be_judged_is_reported_and_changes_no_answers(bench, capsys) -> None:
    made = bench(small=True)
    command(sample=30, reference="document")
    out = " ".join(capsys.readouterr().out.split())
    assert "agreement was NOT judged: autoregressive decoding gave 30 whole values, and a floor of 90% needs 35" in out
    engine = ("max_num_seqs", "max_num_batched_tokens")
    reference, *others = ({key: one[key] for key in one if key not in engine} for one in made.measured)
    assert reference["method"] == "autoregressive"
    assert all(one == others[0] for one in others)  # nothing else was tried
    tuned, mine = load_config("run.tuned.yaml"), load_config("run.yaml")
    assert (tuned.decoding, tuned.model) == (mine.decoding, mine.model)
    assert tuned.engine.max_num_seqs != mine.engine.max_num_seqs
    assert "NOT judged" in Path("run.tuned.yaml").read_text()


def test_ctrl_c_loses_only_the_measurement_in_flight(bench, capsys) -> None:
    def stop(config: RunConfig) -> None:
        if len(first.measured) == 5:
            raise KeyboardInterrupt

    first = bench(before=stop)
    with pytest.raises(Interrupted, match="the same command goes on from there"):
        command()
    with open("run.tuned.jsonl", "a") as file:
        file.write('{"key": "torn')  # killed while writing
    second = bench()
    command()
    assert len(first.measured) == 5
    assert second.measured[0] not in first.measured
    whole = bench()
    command(fresh=True)
    assert len(whole.measured) == len(first.measured) + len(second.measured)
    again = bench()
    command()
    assert again.measured == []  # all of it stands in the file
    assert "are from the file" in capsys.readouterr().out


def test_measurements_hold_for_their_sample_and_configuration_only(bench) -> None:
    command()
    other = bench()
    command(sample=40)
    assert other.measured
    changed = bench()
    command("decoding.sampling.temperature=0.5")
    assert changed.measured
    tuned = load_config("run.tuned.yaml")
    assert tuned.decoding.sampling.temperature == 0.5  # what was given on the command line stands in the file, too


def test_a_limit_of_money_or_time_ends_the_search(bench, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def tick(config: RunConfig) -> None:
        now[0] += 100

    made = bench(before=tick)
    command(budget_usd=0.35)  # 3.6 USD an hour: 350 s
    assert len(made.measured) == 4
    with pytest.raises(ConfigError, match=r"cost\.prices\.local"):
        command("cost.prices={}", budget_usd=1.0)
    bench(small=True, before=tick)
    with pytest.raises(RunError, match=r"before the configuration itself was measured: raise --minutes .* goes on"):
        command(sample=30, reference="document", minutes=1)


def test_paths_keep_their_meaning_in_another_folder(bench, tmp_path) -> None:
    Path("elsewhere").mkdir()
    command(output="elsewhere/new.yaml", minutes=10)
    assert load_config("elsewhere/new.yaml").input.path == str(tmp_path / "data.jsonl")
    assert Path("elsewhere/new.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "message", "overrides", "options"),
    [
        (ConfigError, "never writes over it", [], {"output": "run.yaml"}),
        (ConfigError, "not from raypd tune", [], {"output": "mine.yaml"}),
        (ConfigError, "is a folder", [], {"output": "."}),
        (ConfigError, "does not exist", [], {"output": "no/x.yaml"}),
        (ConfigError, "did you mean 'max_num_seqs'", ["engine.max_num_sequences=3"], {}),
        (InputError, "no such file", ["input.path=nowhere.jsonl"], {}),
        (ConfigError, "from 0 to 1", [], {"agreement": 90}),
        (ConfigError, "has not the GPU", [], {"instance": "g6e.48xlarge"}),
        (ConfigError, "g6e.48xl: no such instance type; did you mean g6e.48xlarge", [], {"instance": "g6e.48xl"}),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(bench, error, message, overrides, options) -> None:
    Path("mine.yaml").write_text("a: 1\n")
    made = bench()
    with pytest.raises(error, match=message):
        command(*overrides, **options)
    assert made.measured == []
    assert Path("mine.yaml").read_text() == "a: 1\n"  # nothing of the user's is written over


def test_a_worker_that_cannot_measure_at_all_ends_it(bench) -> None:
    def fails(config: RunConfig) -> None:
        raise RunError("the worker died (out of memory?)")

    bench(before=fails)
    with pytest.raises(RunError, match="out of memory"):
        command()


def test_a_setting_that_does_not_fit_is_reported_and_passed_over(bench, capsys) -> None:
    """Now, and when it is taken from the file; and its own file tune may write over."""

    def picky(config: RunConfig) -> None:
        if config.decoding.max_value_tokens < 30:
            raise ConfigError("an enum needs 20 tokens")

    for _ in range(2):
        made = bench(before=picky)
        command()
        assert "max_value_tokens=15: an enum needs 20 tokens" in capsys.readouterr().err
        assert load_config("run.tuned.yaml").decoding.max_value_tokens == 30
    assert made.measured == []


def test_a_short_model_key_can_take_a_type(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(
        "input: {path: x.jsonl}\noutput: {path: out}\nmodel: fake\ntask: {categories: {c: {attributes: [{name: a}]}}}\n"
    )
    made = rewrite.write(tmp_path / "a.yaml", [], {"model.dtype": "float32"}, tmp_path / "b.yaml", "why")
    assert (made.model.name, made.model.dtype) == ("fake", "float32")
