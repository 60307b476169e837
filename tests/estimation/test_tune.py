"""Tuning: agreement of values, the search, its file of measurements, and the configuration that it
writes.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from raypd.cli import tune as tune_command
from raypd.config import METHODS, RunConfig, rewrite
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError, InputError, RunError
from raypd.estimation import agreement, tune
from raypd.estimation.agreement import Agreement, Floor, NormalValue
from raypd.estimation.profile import DocumentCost, Profile, WorkerFacts, _copy
from raypd.estimation.search import Changes, Search, Trial
from raypd.run.console import Interrupted
from raypd.tasks.base import Document
from tests.runs import config_tree, extraction, run_config, says, write_jsonl

Rule = Callable[[dict[str, Any]], tuple[float, float]]  # settings -> speed, share that agrees
EXTRACTION = extraction(c=["a"])
REFERENCES = ("autoregressive", "guided")
BY_SHARE = {"floor": Floor(0.9, "share"), "reference_kind": "document"}
Before = Callable[[RunConfig], None]
RUN = """\
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


def test_values_of_all_tasks_are_compared_after_normalisation() -> None:
    same = [
        ("Sony", " sony. "),
        ("1,200", "1200.0"),
        ("Over  Ear", "over ear"),
        ("ﬁve", "five"),
        (True, "true"),
        ('"x"', "x"),
    ]
    for a, b in [
        *same,
        ("1.2", "12"),
        ("sony", "sonny"),
        (None, "null"),
        ("3 l", "3"),
        ("-1", "1"),
    ]:
        assert (agreement.normal(a) == agreement.normal(b)) == ((a, b) in same)
    asked = {"question": "?", "question_id": "7", "answer": "Yes.", "answer_status": "ok"}
    wrote = {"sample": 0, "turn": 1, "text": "A b", "finish_reason": "length"}
    found = [agreement.values_of(DocumentCost(1.0, 1, 0, 1, [row])) for row in (asked, wrote)]
    assert found == [
        {"7": NormalValue("yes", True)},
        {"turn 1, sample 0": NormalValue("a b", False)},
    ]


def values(**of: tuple[Any, str]) -> DocumentCost:
    """A document whose record has these values, each with its status."""
    rows = [
        {
            "values": [
                {"name": name, "value": value, "status": status}
                for name, (value, status) in of.items()
            ]
        }
    ]
    return DocumentCost(1.0, 1, 0, 1, rows)


def compare(
    some: Sequence[DocumentCost | None], others: Sequence[DocumentCost | None]
) -> Agreement:
    return agreement.compare([*map(agreement.values_of, some)], [*map(agreement.values_of, others)])


def test_a_cut_value_never_agrees_and_a_cut_reference_is_left_out() -> None:
    reference = [
        values(
            a=("x", "ok"),
            b=(None, "null"),
            c=("y", "truncated"),
            d=("long tex", "ok"),
        ),
        values(a=("1", "ok")),
        DocumentCost(1.0, 1, 0, 1, error="too long"),
    ]
    other = [
        values(
            a=("X", "ok"),
            b=(None, "null"),
            c=("y", "ok"),
            d=("long tex", "truncated"),
        ),
        None,
        values(a=("1", "ok")),
    ]  # of the second, nothing was answered
    assert compare(reference, other) == Agreement(
        agree=2,
        of=4,
        left_out=2,
    )
    assert compare(reference, reference) == Agreement(4, 4, 2)
    null = values(a=(None, "null"))
    ambiguous = values(a=(None, "ambiguous"))
    assert compare([ambiguous], [ambiguous]) == Agreement(0, 0, 1)
    assert (
        compare([null], [ambiguous])
        == compare([null], [values(a=("none", "ok"))])
        == Agreement(0, 1)
    )


def test_the_interval_of_a_share_by_hand_is_wider_where_values_err_together() -> None:
    """Wilson, as tables have it: 9 of 10 is 59.6% to 98.2%; n of n begins at n / (n + 1.96
    squared).
    """
    assert Agreement(9, 10).interval() == pytest.approx((0.596, 0.982), abs=5e-4)
    assert Agreement(36, 36).interval()[0] == pytest.approx(36 / (36 + 1.96**2))
    assert Agreement(0, 0).interval() == (0.0, 1.0)
    assert Agreement(90, 100, alike=10).interval() == pytest.approx(Agreement(9, 10).interval())

    def answers(*documents: str) -> list[DocumentCost]:
        return [
            values(**{f"a{i}": (text, "ok") for i, text in enumerate(one)}) for one in documents
        ]

    wanted = answers(*["xxxxx"] * 8)
    together = compare(wanted, answers(*["xxxxx"] * 6, "yyyyy", "yyyyy"))
    apart = compare(wanted, answers(*["xxxxy"] * 6, "xxxyy", "xxxyy"))
    assert together == apart == Agreement(30, 40)
    assert together.alike > 5 > apart.alike == 1


@pytest.mark.parametrize(("floor", "needed"), [(0.9, 35), (0.95, 73), (0.5, 4), (0.0, 0)])
def test_how_many_values_a_floor_needs(floor: float, needed: int) -> None:
    found = Floor(floor)
    assert found.needed == needed
    for count in range(max(0, needed - 1), needed + 1):
        assert (
            found.reached(Agreement(count, count))
            == found.judged(Agreement(count, count))
            == (count == needed)
        )
    assert not Floor(1.0).judged(Agreement(10_000, 10_000))
    assert Floor(1.0, "share").reached(Agreement(10, 10))
    assert not Floor(0.9, "share").reached(Agreement(0, 0))


def physics(s: dict[str, Any]) -> tuple[float, float]:
    """Hyper-parallel is 5 times as fast; batch pays up to 64, passes up to 4096 tokens; stacking
    agrees less.
    """
    speed = {"autoregressive": 1.0, "guided": 2.0}.get(s["method"], 5.0)
    share = 1.0 if s["method"] in REFERENCES else 0.95
    if s["method"] == "hyper_parallel" and s["isolate"] == "none":
        stack = s["stacked_documents"]
    else:
        stack = 0
    batch = 64 if s["max_num_seqs"] == "auto" else s["max_num_seqs"] * max(1, stack)
    speed *= min(batch, 64) ** 0.5 / (1 + max(0, batch - 64) / 64)
    tokens = 2048 if s["max_num_batched_tokens"] == "auto" else s["max_num_batched_tokens"]
    speed *= (1.0 - abs(tokens - 4096) / 10_000) * (1 + stack / 10)
    share -= 0.01 * stack
    return (speed * 1.5, share - 0.3) if s["max_value_tokens"] < 15 else (speed, share)


def searched(
    rule: Rule = physics,
    documents: int = 1000,
    whole: int = 1000,
    task: Any = EXTRACTION,
    decoding: Any = (),
    seqs: int | str = 64,
    **how: Any,
) -> tuple[Search, Trial]:
    """A search over what `rule` says of each setting, and its best. whole: documents that a model
    writes whole.
    """
    method = METHODS[task.get("kind", "extraction")][0]
    config = run_config(
        task, decoding={"method": method, **dict(decoding)}, engine={"max_num_seqs": seqs}
    )

    def measure(changes: Changes, limit: float) -> Trial:
        short = {key.partition(".")[2]: value for key, value in changes.items()}
        setting = config.decoding.model_dump() | config.engine.model_dump() | short
        speed, share = rule(setting)
        if 1 / speed > limit:
            return Trial(changes, [speed], cut=True)
        free = setting["method"] == "autoregressive"
        same = round(share * documents)
        found = [
            NormalValue("x" if n < same else "y", n < whole or not free) for n in range(documents)
        ]
        return Trial(changes, [speed], answers=[{"a": value} for value in found])

    search = Search(config, measure, **{"floor": Floor(0.9), **how})
    best = search.run()
    assert best is not None
    return search, best


def agreeing(share: float) -> Rule:
    """Physics in which settings but those of the references agree in this share."""
    return lambda s: (physics(s)[0], 1.0 if s["method"] in REFERENCES else share)


@pytest.mark.parametrize(
    ("how", "references", "judged", "method"),
    [
        (
            {"floor": Floor(0.99)},
            "autoregressive",
            True,
            "autoregressive",
        ),  # which alone reaches it
        # Free-running answers are broken: guided ones are the reference.
        (
            {"rule": agreeing(1.0), "documents": 40, "whole": 12},
            "autoregressive guided",
            True,
            "hyper_parallel",
        ),
        (
            {"rule": agreeing(0.8), "documents": 100, "whole": 12},
            "autoregressive guided",
            True,
            "guided",
        ),
        # A good reference is kept however small the sample is: guided decoding would not bring more
        # values.
        ({"rule": agreeing(1.0), "documents": 10}, "autoregressive", False, "hyper_parallel"),
        # The user has decided that 12 values will do.
        (
            {"rule": agreeing(1.0), "documents": 40, "whole": 12, **BY_SHARE},
            "autoregressive",
            True,
            "hyper_parallel",
        ),
        (
            {"rule": agreeing(1.0), "documents": 40, "reference_kind": "guided"},
            "guided",
            True,
            "hyper_parallel",
        ),
        # Text has no keys to give.
        (
            {"task": {"kind": "generation"}, "reference_kind": "guided"},
            "autoregressive",
            True,
            "autoregressive",
        ),
    ],
)
def test_the_reference_and_what_is_held_to_it(how, references, judged, method) -> None:
    search, best = searched(**how)
    first = search.trials[: len(references.split())]
    assert [search.value(trial.changes, "decoding.method") for trial in first] == references.split()
    assert (search.reference_method == "guided") == ("guided" in references)
    assert search.judged == judged
    assert search.value(best.changes, "decoding.method") == method
    assert search.agrees(best) is True
    if references == "autoregressive guided":
        free = search.trials[0]  # it is held to the reference, too
        assert free.agreement.agree == 12
        assert free.agreement.of == how["documents"]
        assert search.agrees(free) is False
    if "task" in how:
        assert not any("decoding.isolate" in trial.changes for trial in search.trials)


def with_vllm(speed: float) -> Rule:
    return lambda s: (
        (speed * min(s["max_num_seqs"], 128), 1.0) if s["kind"] == "vllm" else physics(s)
    )


@pytest.mark.parametrize(
    ("speed", "installed", "kind"),
    [(9.0, True, "vllm"), (0.1, True, "raypd"), (9.0, False, "raypd")],
)
def test_vllm_is_weighed_where_it_is_installed(speed: float, installed: bool, kind: str) -> None:
    search, best = searched(with_vllm(speed), vllm=installed)
    order = [trial.changes for trial in search.trials]
    tried = [n for n, changes in enumerate(order) if changes.get("engine.kind") == "vllm"]
    sizes = next(n for n, changes in enumerate(order) if "engine.max_num_batched_tokens" in changes)
    assert bool(tried) is installed
    assert not installed or tried[0] < sizes  # it is the larger choice, and minutes end
    assert best.changes.get("engine.kind", "raypd") == kind
    if kind == "vllm":
        assert best.changes == {
            "engine.kind": "vllm",
            "decoding.method": "guided",
            "engine.max_num_seqs": 128,
        }


def test_what_is_searched_and_how_copies_differ_for_vllm_alone() -> None:
    search, best = searched(with_vllm(0.2), vllm=True, seqs="auto")
    seqs = [
        (trial.changes.get("engine.kind"), trial.changes.get("engine.max_num_seqs"))
        for trial in search.trials
    ]
    assert {number for kind, number in seqs if kind is None} == {None}
    assert [number for kind, number in seqs if kind == "vllm"][:2] == [64, 128]
    assert any(trial.changes.get("decoding.stacked_documents") == 2 for trial in search.trials)
    assert best.changes["engine.max_num_batched_tokens"] == 4096
    # Its prefix cache would answer them from the first one's keys and values.
    tree = config_tree(input={"text_columns": ["title"]})
    document = Document(0, "a", {"title": "shoe"})
    for keys, titles in (
        ([], ["shoe", "shoe"]),
        (["engine.kind=vllm", "decoding.method=guided"], ["shoe", "1 shoe"]),
    ):
        copies = [_copy(make_config(tree, keys), document, 5 + number, number) for number in (0, 1)]
        assert [(one.index, one.fields["title"]) for one in copies] == [
            (5, titles[0]),
            (6, titles[1]),
        ]
    assert document.fields == {"title": "shoe"}


def test_the_median_of_the_best_two_decides_and_questions_have_their_own_settings() -> None:
    """The setting that was lucky once loses to the one that is steady; all others are far slower,
    and cut short.
    """
    luck = iter([9.0, 3.0, 3.0])

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        engine = (s["max_num_seqs"], s["max_num_batched_tokens"], s["max_value_tokens"])
        if s["method"] == "autoregressive" or s["isolate"] == "none" or engine != (64, "auto", 30):
            return 1.0, 1.0
        return next(luck) if s["isolate"] == "values" else 5.0, 1.0

    search, best = searched(rule)
    assert best.changes == {}
    assert any(trial.cut for trial in search.trials)
    assert sorted(
        next(t for t in search.trials if t.changes == {"decoding.isolate": "values"}).speeds
    ) == [3, 3, 9]

    def rule(s: dict[str, Any]) -> tuple[float, float]:
        return (
            1.0
            if s["method"] == "autoregressive"
            else 2.0 + s.get("options.contexts_per_prompt", 1) / 10
        ), 1.0

    _, best = searched(
        rule,
        task={"kind": "question_answering"},
        decoding={},
    )
    assert best.changes == {"decoding.options.contexts_per_prompt": 32}


class StubProfiler:
    """In place of a worker: documents/s by the physics above. measured: the settings that it was
    asked for.
    """

    def __init__(self, small: bool, before: Before, clock: SimpleNamespace) -> None:
        self.small = small
        self.before = before
        self.clock = clock
        self.measured: list[dict[str, Any]] = []

    def facts(self, config: RunConfig) -> WorkerFacts:
        return WorkerFacts("a test")

    def profile(
        self, config: RunConfig, documents: Sequence[Any], limit: float, label: str
    ) -> Profile:
        self.before(config)
        setting = config.decoding.model_dump() | config.engine.model_dump()
        self.measured.append(setting)
        speed, share = physics(setting)
        if self.small and setting["method"] == "autoregressive":
            broken = len(documents) * 9 // 10
        else:
            broken = 0
        costs: list[DocumentCost | None] = []
        for number in range(len(documents)):
            # values that differ are spread over the documents
            same = [(10 * number + 37 * i) % 100 < 100 * share for i in range(10)]
            status = "invalid" if number < broken else "ok"
            found = values(
                **{f"a{i}": ("same" if one else "other", status) for i, one in enumerate(same)}
            )
            costs.append(replace(found, seconds=1 / speed))
        seconds = len(documents) / speed
        share = min(1.0, limit / seconds)
        self.clock.now += share * seconds
        costs = costs if share == 1 or self.clock.seen else [None] * len(documents)
        return Profile(
            setting["method"],
            costs,
            seconds,
            [(1.0, 1.0)] * 8,
            0.0,
            0.0,
            self.facts(config),
            share == 1,
        )


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs the command on a configuration in the current folder; returns the settings that it
    measured. small: of what autoregressive decoding writes one document in ten is whole. before: is
    called at each measurement. seen: 0 where no document of a measurement that is cut short is
    answered.
    """
    write_jsonl(tmp_path / "data.jsonl", [f"text {i}" for i in range(100)])
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    clock = SimpleNamespace(
        now=0.0,
        seen=1.0,
        time=time.time,
        monotonic=lambda: clock.now,
    )
    monkeypatch.setattr(tune, "time", clock)

    def run(
        *overrides: str,
        output: str | None = None,
        small: bool = False,
        before: Before = lambda _: None,
        seen: float = 1.0,
        **options: Any,
    ) -> list[dict[str, Any]]:
        made = StubProfiler(small, before, clock)
        clock.seen = seen
        monkeypatch.setattr(tune, "RemoteProfiler", lambda *_: contextlib.nullcontext(made))
        tune_command.run(
            "run.yaml",
            [*overrides],
            output,
            tune.TuneOptions(**{"sample": 50, **options}),
            verbose=False,
        )
        return made.measured

    return run


def test_the_fastest_that_agrees_is_written_into_the_users_file(command, capsys) -> None:
    measured = command()
    assert len(measured) < 45
    text = Path("run.tuned.yaml").read_text()
    # The reference comes first.
    assert measured[0]["method"] == "autoregressive"
    assert Path("run.yaml").read_text() == RUN
    assert text.startswith("# Written by raypd tune.\n# changed: ")
    comments = ("# my run", "# beside this file", "# the only one", "# as last year")
    assert all(kept in text for kept in (*comments, '{name: a, description: "what it is"}'))
    made = load_config("run.tuned.yaml")
    mine = load_config("run.yaml")
    assert made.engine.max_num_seqs == 32
    assert made.engine.max_num_batched_tokens == 4096
    assert made.decoding.isolate == "none"
    assert made.decoding.stacked_documents == 2
    assert made.input == mine.input
    assert made.task == mine.task
    assert measured.count(made.decoding.model_dump() | made.engine.model_dump()) == 3
    out = capsys.readouterr().out
    assert re.search(r"best +\nmax_num_seqs=32,\s+max_num_batched_tokens=4096", out)
    assert all(
        part in out for part in ("unsure", "per 1,000", "93.0% [90-95%] of 500 values agree")
    )
    assert max(map(len, out.partition("fastest")[0].splitlines())) <= 80


def test_a_setting_of_which_nothing_came_in_time_is_too_slow(command, capsys, monkeypatch) -> None:
    usual_physics = physics

    def slow_values(settings):
        speed, share = usual_physics(settings)
        if settings["isolate"] == "values":
            speed /= 100
        return speed, share

    monkeypatch.setitem(globals(), "physics", slow_values)
    command(seen=0.0)
    seen = capsys.readouterr()
    assert ". isolate=values: stopped: far slower than the best so far" in seen.err
    assert re.search(r"isolate=values +-.* too slow", seen.out)
    assert "raise --minutes" not in seen.err + seen.out


def test_a_small_model_gets_an_honest_answer(command, capsys) -> None:
    command(small=True)
    seen = capsys.readouterr()
    assert re.search(
        r"1\. method=autoregressive: .* 50 values to compare others with, 450 are incomplete\n",
        seen.err,
    )
    assert re.search(r"2\. method=guided: .* 500 values to compare others with\n", seen.err)
    says(
        " ".join(seen.out.split()),
        "agree with guided decoding in at least 90%",
        "the reference is guided decoding",
    )
    assert "guided decoding" in Path("run.tuned.yaml").read_text().replace("\n# ", " ")


def test_a_floor_that_cannot_be_judged_is_reported_and_changes_no_answers(command, capsys) -> None:
    measured = command(small=True, sample=30, reference="document")
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "agreement was NOT judged: autoregressive decoding gave 30 complete values, and a "
        "floor of 90% needs 35"
    ) in out
    mine = load_config("run.yaml")
    tuned = load_config("run.tuned.yaml")
    assert measured[0]["method"] == "autoregressive"
    # Nothing else was tried.
    assert all(one.items() >= mine.decoding.model_dump().items() for one in measured[1:])
    assert tuned.decoding == mine.decoding
    assert tuned.model == mine.model
    assert tuned.engine.max_num_seqs != mine.engine.max_num_seqs
    assert "NOT judged" in Path("run.tuned.yaml").read_text()


def test_ctrl_c_loses_only_the_measurement_in_flight(command, capsys) -> None:
    first: list[RunConfig] = []

    def stop(config: RunConfig) -> None:
        if len(first) == 5:
            raise KeyboardInterrupt
        first.append(config)

    with pytest.raises(Interrupted, match="run the same command again to resume"):
        command(before=stop)
    with open("run.tuned.jsonl", "a") as file:
        file.write('{"key": "torn')  # killed while writing
    second = command()
    assert second[0] not in [
        config.decoding.model_dump() | config.engine.model_dump() for config in first
    ]
    assert len(command(fresh=True)) == len(first) + len(second)
    assert command() == []  # all of it stands in the file
    assert "are from the file" in capsys.readouterr().out
    assert command(sample=40)  # measurements hold for their sample and configuration only
    assert command("decoding.sampling.temperature=0.5")
    # As on the command line.
    assert load_config("run.tuned.yaml").decoding.sampling.temperature == 0.5


def test_a_limit_of_money_or_time_ends_the_search(command) -> None:

    def tick(_):
        return tune.time.__dict__.update(now=tune.time.now + 100)

    assert len(command(before=tick, budget_usd=0.35)) == 4  # 3.6 USD an hour: 350 s
    assert Path("run.tuned.yaml").exists()  # what was measured counts
    for error, words, overrides, how in (
        (ConfigError, r"cost\.prices\.local", ["cost.prices={}"], {"budget_usd": 1.0}),
        (
            RunError,
            r"no setting can be used \(.*\): raise .* to resume",
            [],
            {
                "small": True,
                "before": tick,
                "sample": 30,
                "reference": "document",
                "minutes": 1,
            },
        ),
        (
            RunError,
            r"no setting can be used \(the time or money given was used up\): raise",
            [],
            {"fresh": True, "minutes": 0},
        ),
    ):
        with pytest.raises(error, match=words):
            command(*overrides, **how)


def test_paths_keep_their_meaning_in_another_folder(command, tmp_path) -> None:
    Path("elsewhere").mkdir()
    command(output="elsewhere/new.yaml", minutes=10)
    assert load_config("elsewhere/new.yaml").input.path == str(tmp_path / "data.jsonl")
    assert Path("elsewhere/new.jsonl").exists()
    changes = {"model.dtype": "float32", "model.fake": {"load_seconds": 3}}
    made = rewrite.write(Path("run.yaml"), [], changes, Path("typed.yaml"), "why")
    # Once a name.
    assert made.model.name == "fake"
    assert made.model.dtype == "float32"
    assert made.model.fake["load_seconds"] == 3
    for name in ("elsewhere/t", "elsewhere/a", "far/off"):
        Path(name).mkdir(parents=True)
    fit = {
        "teacher": {"model.name": "./t", "engine.kind": "vllm", "decoding.method": "guided"},
        "candidates": {"a": {"model.adapter": "a"}},
    }
    decoding = {"method": "speculative", "options": {"draft_model": "../drafts"}}
    keys = {"decoding": decoding, "fit": fit, "model": "./fake"}
    Path("elsewhere/fit.yaml").write_text(
        json.dumps({**yaml.safe_load(Path("run.yaml").read_text()), **keys})
    )
    loaded = load_config("elsewhere/fit.yaml")
    made = rewrite.write(
        Path("elsewhere/fit.yaml"), [], loaded.fit.teacher, Path("far/off/made.yaml"), "why"
    )
    assert made.model.name == str(tmp_path / "elsewhere/t")
    assert made.fit.teacher["model.name"] == str(tmp_path / "elsewhere/t")
    assert made.fit.candidates == {"a": {"model.adapter": str(tmp_path / "elsewhere/a")}}
    assert loaded.decoding.draft_model == "elsewhere/../drafts"


@pytest.mark.parametrize(
    ("error", "message", "overrides", "options"),
    [
        (ConfigError, "never writes over it", [], {"output": "run.yaml"}),
        (ConfigError, "was not written by raypd tune", [], {"output": "mine.yaml"}),
        (ConfigError, "is a folder", [], {"output": "."}),
        (ConfigError, "does not exist", [], {"output": "no/x.yaml"}),
        (ConfigError, "did you mean 'max_num_seqs'", ["engine.max_num_sequences=3"], {}),
        (InputError, "no such file", ["input.path=nowhere.jsonl"], {}),
        (ConfigError, "from 0 to 1", [], {"agreement": 90}),
        (ConfigError, "does not have the GPU", [], {"instance": "g6e.48xlarge"}),
        (
            ConfigError,
            "g6e.48xl: no such instance type; did you mean g6e.48xlarge",
            [],
            {"instance": "g6e.48xl"},
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(
    command, error, message, overrides, options
) -> None:
    Path("mine.yaml").write_text("a: 1\n")
    with pytest.raises(error, match=message):
        command(
            *overrides,
            before=lambda _: pytest.fail("measured"),
            **options,
        )
    assert Path("mine.yaml").read_text() == "a: 1\n"  # nothing of the user's is written over


def test_a_setting_that_fails_is_passed_over_and_a_worker_that_cannot_measure_at_all_ends_it(
    command, capsys
) -> None:
    def picky(config: RunConfig, error: Exception | None = None) -> None:
        if error or config.decoding.max_value_tokens < 30:
            raise error or ConfigError("an enum needs 20 tokens")

    with pytest.raises(RunError, match="out of memory"):
        command(before=lambda config: picky(config, RunError("the worker died (out of memory?)")))
    # Now, and when it is taken from the file; and its own file tune may write over.
    for _ in range(2):
        measured = command(before=picky)
        assert "max_value_tokens=15: an enum needs 20 tokens" in capsys.readouterr().err
        assert load_config("run.tuned.yaml").decoding.max_value_tokens == 30
    assert measured == []
