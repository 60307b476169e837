"""A fit with tiny random models through Ray: interrupted, out of budget, resumed; and its rules."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow.dataset as ds
import pytest
import yaml
from typer.testing import CliRunner

from raypd.answering.components import build
from raypd.billing import book
from raypd.billing.bill import Bill
from raypd.billing.budget import BudgetReached
from raypd.cli.main import app
from raypd.cluster import driver, one_worker, ray_session
from raypd.cluster.driver import run_extract
from raypd.config import RunConfig
from raypd.config.load import load_config, with_changes
from raypd.dataset.plan import Plan
from raypd.errors import ConfigError, InputError, UserError
from raypd.estimation.records import Figure
from raypd.evaluation import AttributeScore, evaluate
from raypd.fitting import candidate, context as fit_context, fit, labels, page, parts as fit_parts
from raypd.fitting.context import FitContext, teacher_config, teacher_keys
from raypd.fitting.fit import (
    Fit,
    _begin,
    _write_recommended,
    missing,
    recommend,
    run_fit,
)
from raypd.fitting.parts import PARTS, parts_of, split
from raypd.fitting.result import AS_CONFIGURED, TEACHER, AttributeResult, CandidateScore, FitResult
from raypd.run import load_record, records
from raypd.run.console import Interrupted
from raypd.run.manifest import Manifest
from raypd.run.usage import RunCost
from raypd.tasks import Document, trained_on
from raypd.tasks.calibration import FILE
from raypd.training import teacher
from raypd.training.job import run_training
from tests.evaluation.test_score import drawn, honest
from tests.runs import extraction, run_config, run_here, says, with_keys, write_rows
from tests.servers import Reply, serving
from tests.tiny import save_tiny
from tests.training.data import tree, write_corpus

TRAINED = {
    "full": {"training.weights": "full", "training.learning_rates": [3e-3], "training.epochs": 25}
}


def quiet(line: str) -> None:
    pass


@pytest.fixture
def yaml_of(tmp_path: Path):
    """Writes a configuration over a corpus of labelled documents, and returns its path."""

    def write(documents: int = 96, seed: int = 0, **fit) -> str:
        corpus = write_corpus(tmp_path / "corpus.jsonl", documents, seed)
        model = tmp_path / "base"
        if not model.exists():
            save_tiny(model, hidden_size=64)
        training = {"batch_size": 24, "evaluations": 1}
        keys = {
            "documents": 96,
            "curve": [0.5],
            "sample": 4,
            "f1_floor": 0.5,
            "candidates": TRAINED,
            **fit,
        }
        config = tree(
            corpus,
            tmp_path / "out",
            str(model),
            training=training,
            fit=keys,
        )
        config["decoding"]["isolate"] = "documents"
        config["cost"] = {"prices": {"local": 1.0}}
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
        return str(tmp_path / "fit.yaml")

    return write


@pytest.fixture
def one_start(monkeypatch):
    """Starts no Ray workers but those of the training; everything else runs in this process.

    Returns what replaces `run_extract`.
    """

    def start(self) -> None:
        kind, arguments = self._make(self.share)
        self._actor = kind(*arguments)

    def call(self, label, method, *arguments, progress):
        return getattr(self._actor, method)(*arguments)

    def run(config: RunConfig, planned: Plan | None = None, **_) -> Manifest:
        if config.output.path.endswith("/configured"):
            return run_extract(config)
        return driver.finish(config, config.output.path, run_here(config, build, planned))

    monkeypatch.setattr(one_worker.OneWorker, "_start", start)
    monkeypatch.setattr(one_worker.OneWorker, "call", call)
    for module in (driver, fit_context):
        monkeypatch.setattr(module, "run_extract", run)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    return run


def run_folder(result: FitResult) -> str:
    """Return where the run of the recommended configuration writes."""
    return load_config(str(result.configuration)).output.path


def context_of(config: RunConfig, folder: Path | str, say=quiet) -> FitContext:
    return FitContext(config, str(folder), verbose=False, say=say)


def count_documents(parts: dict[str, list[labels.Row]]) -> int:
    return sum(len(rows) for rows in parts.values())


@pytest.mark.parametrize(
    ("documents", "total", "advice"),
    [
        (400, 49, "label more documents; 60 are enough with the default shares"),
        (50, 50, "raise fit.documents (50), or label more documents; 60 are enough"),
        (400, 90, "label more documents, or change fit.test_share and training.validation_share"),
    ],
)
def test_only_what_helps_against_too_few_labels_is_advised(documents, total, advice) -> None:
    config = with_keys(run_config(), fit={"documents": documents})
    assert fit_parts._advice(config, total).startswith(advice)


@pytest.mark.parametrize(
    ("curve", "others", "trainings", "about", "advice"),
    [
        ([], {}, "1 training", "19 min 34 s", ""),
        (
            [0.5],
            {},
            "2 trainings",
            "30 min 11 s",
            "; it is faster without the learning curve (fit.curve=[])",
        ),
        (
            [],
            {"more": {"training.epochs": 2, "training.learning_rates": [1e-4, 3e-4]}},
            "2 trainings",
            "57 min",
            "; it is faster with fewer candidates (fit.candidates)",
        ),
    ],
)
def test_how_long_a_fit_takes_is_told_from_its_first_run(
    yaml_of, tmp_path, monkeypatch, curve, others, trainings, about, advice
) -> None:
    """The figures of the first run of a fit that then took 15 min 42 s, without a curve."""
    manifest = Manifest(
        documents=62,
        prefill_tokens=9915,
        shared_tokens=7869,
        decode_tokens=5666,
        seconds=100.508,
        cost=RunCost(0.0, seconds={"prefill": 45.526, "decode": 20.075}),
    )
    monkeypatch.setattr(fit.read, "record", lambda kind, *_: manifest if kind is Manifest else None)
    lines: list[str] = []
    one = {"one": {"training.epochs": 2, "training.learning_rates": [1e-4]}}
    config = load_config(yaml_of(curve=curve, candidates=one | others))
    result = SimpleNamespace(path=str(tmp_path), documents={"test": 62})
    Fit(context_of(config, tmp_path, lines.append), result)._say_how_long(155)
    (line,) = lines
    assert line.startswith(f"{trainings} on up to 155 documents, each scored on 62: about {about}")
    assert line.endswith(
        f"on this machine if nothing else runs on it, from the speed of the first run{advice}. "
        "Measuring the cost of each model comes on top, up to 2 min each (fit.sample_minutes)"
    )


def test_trainings_that_are_complete_are_not_announced(yaml_of, tmp_path, monkeypatch) -> None:
    manifest = Manifest(
        documents=62,
        prefill_tokens=9915,
        seconds=100.0,
        cost=RunCost(0.0, seconds={"prefill": 45.0}),
    )
    monkeypatch.setattr(fit.read, "record", lambda kind, *_: manifest if kind is Manifest else None)
    trained = {("one", 1.0)}
    monkeypatch.setattr(
        candidate, "is_trained", lambda context, name, changes, share: (name, share) in trained
    )
    lines: list[str] = []
    config = load_config(yaml_of(curve=[0.5], candidates={"one": {"training.epochs": 2}}))
    result = SimpleNamespace(path=str(tmp_path), documents={"test": 62})
    resumed = Fit(context_of(config, tmp_path, lines.append), result)
    resumed._say_how_long(155)
    assert lines[0].startswith("1 training on up to 155 documents")
    trained.add(("one", 0.5))
    resumed._say_how_long(155)
    assert len(lines) == 1


def test_the_progress_of_a_learning_curve_names_its_labels(yaml_of, tmp_path, monkeypatch):
    lines: list[str] = []
    parts = {"train": [0] * 96, "validation": [0] * 9, "test": [0] * 30}
    monkeypatch.setattr(fit, "parts_of", lambda _: parts)
    made = CandidateScore(name="lora", method="")
    for name in ("train", "test"):
        monkeypatch.setattr(fit.candidate, name, lambda *_: made)
    monkeypatch.setattr(fit.candidate, "add_costs", lambda *_: Figure(1.0, None, None))
    config = load_config(yaml_of(curve=[0.5], candidates={"lora": {"training.epochs": 1}}))
    result = FitResult(
        path=str(tmp_path), identity="", floor=0.5, gold=True, task="extraction", model="fake"
    )
    Fit(context_of(config, tmp_path, lines.append), result).run()
    assert lines[-2:] == [
        "lora: training and running over the test part",
        "lora with 48 of the labels: training and running over the test part",
    ]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_fit_recommends_a_configuration_that_runs(
    tmp_path, yaml_of, ray_here, one_start, monkeypatch
):
    # The runs of the tiny model are too short to tell a speed.
    monkeypatch.setattr(fit, "_MEASURABLE", 0.0)
    lines: list[str] = []
    overrides = ["output.min_confidence=0.3", "cascade.model=fake"]
    result = run_fit(yaml_of(curve=[]), overrides, say=lines.append)
    (how_long,) = (line for line in lines if "from the speed of the first run" in line)
    costs = f"{AS_CONFIGURED}: measuring what the corpus would cost"
    assert lines.index(how_long) < lines.index(costs)
    untrained, full = result.scores
    assert untrained.name == AS_CONFIGURED
    assert not untrained.holds(0.5)
    assert full.name == "full"
    assert full.holds(0.5)
    assert full.labels == result.documents["train"]
    assert {attribute.score.values for attribute in full.attributes} == {result.documents["test"]}
    assert result.recommended == "full"
    usd = 0.0
    for bill in (tmp_path / "out-fit").rglob("ledger/*.json"):
        usd += json.loads(bill.read_text())["usd"]
    assert result.usd == pytest.approx(usd)
    assert 0 < full.training_usd < result.usd
    assert "<svg" in (tmp_path / "out-fit/report.html").read_text()
    config = load_config(str(result.configuration))
    # The recommended model runs as it was scored.
    assert config.output.min_confidence == 0
    assert config.cascade.model is None
    run = one_start(config)
    assert run.ok == 96
    assert run.failed == 0
    # The corpus holds the labels. Those that trained or validated the model measure nothing.
    measured = evaluate(run_folder(result), str(tmp_path / "corpus.jsonl"))
    assert measured.trained == result.documents["train"] + result.documents["validation"]
    assert measured.measures[0].documents == result.documents["test"]
    with pytest.raises(ConfigError, match="holds the fit of other documents"):
        run_fit(yaml_of(curve=[]), ["fit.documents=95"], say=quiet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_moe"])
def test_a_fitted_hybrid_or_mixture_answers_what_it_learnt(
    kind, tmp_path, yaml_of, ray_here, one_start
):
    save_tiny(tmp_path / "base", kind)
    candidate = {**TRAINED["full"], "training.epochs": 20}
    path = yaml_of(curve=[], candidates={"full": candidate})
    result = run_fit(path, ["decoding.isolate=values"], say=quiet)
    untrained, full = result.scores
    assert not untrained.holds(0.5)
    assert full.holds(0.5)
    assert result.recommended == "full"
    run = one_start(load_config(str(result.configuration)))
    assert run.ok == 96
    rows = ds.dataset(run_folder(result) + "/units").to_table().to_pylist()
    records = {row["id"]: json.loads(row["record"]) for row in rows}
    labels_by_id = {}
    for line in (tmp_path / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        labels_by_id[row["id"]] = row["target"]
    right = [
        records[key][name] == value
        for key, target in labels_by_id.items()
        for name, value in target.items()
    ]
    assert sum(right) > 0.6 * len(right)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_fit_resumes_and_has_a_learning_curve(tmp_path, yaml_of, ray_here):
    path = yaml_of()
    folder = tmp_path / "out-fit"
    trainings = []

    def stop_at_the_second(line: str) -> None:
        if line.startswith("full") and ": training" in line:
            trainings.append(line)
        if len(trainings) > 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="run the same command again to resume"):
        run_fit(path, [], say=stop_at_the_second)
    weights = next(folder.rglob("model.safetensors"))
    written = weights.stat().st_mtime_ns
    stopped = run_fit(path, ["cost.budget_usd=0.0000001"], say=quiet)
    assert stopped.scores == []
    assert stopped.recommended is None
    assert "cost.budget_usd" in str(stopped.stopped)
    result = run_fit(path, [], say=quiet)
    assert result.stopped is None
    assert weights.stat().st_mtime_ns == written, "it was trained again"
    (fewer_labels,) = result.curve
    assert fewer_labels.name == "full"
    assert fewer_labels.error is None
    assert fewer_labels.labels < result.scores[1].labels


@pytest.mark.slow
def test_a_training_ends_when_the_budget_is_spent(yaml_of, ray_here):
    """At 3,600 USD per hour a second costs 1 USD, and the start of Ray Train alone takes some."""
    keys = [
        "cost.prices.local=3600",
        "cost.budget_usd=15",
        "decoding.method=hyper_parallel",
    ]
    with pytest.raises(BudgetReached, match="is kept up to its latest checkpoint"):
        run_training(load_config(yaml_of(), [*keys, "training.epochs=1000"]), say=quiet)


@pytest.fixture
def taught(tmp_path, yaml_of, one_start):
    """Returns the context of a fit whose labels the fake model makes, with some overrides."""
    path = yaml_of(teacher={"model.name": "fake"})
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        # The only document with notes, which is not drawn.
        corpus.write('{"id": "96", "title": "x", "notes": "y"}\n')
    keys = [
        "training.labels_column=labels",
        "input.text_columns=[title,notes]",
        "output.min_confidence=0.99",
    ]

    def context(*overrides: str) -> FitContext:
        return context_of(load_config(path, [*keys, *overrides]), tmp_path / "f")

    return context


def test_a_teacher_labels_the_drawn_documents(taught):
    context = taught("fit.documents=60")
    parts = parts_of(context)
    answers = {}
    for row in teacher.rows_of(f"{context.folder}/teacher-60"):
        answers[row["id"]] = json.loads(row["record"])
    labelled = {row["id"]: row["labels"] for rows in parts.values() for row in rows}
    assert labelled == answers
    assert len(labelled) == 60


def test_a_teacher_s_values_are_labels_however_unsure_they_are(taught):
    """The fake engine is never unsure, so the configuration has to be looked at."""
    config = taught("fit.documents=60").config
    assert teacher_config(config, "x.jsonl", "y").output.min_confidence == 0


def test_more_documents_may_be_drawn_after_a_teacher_was_asked(taught):
    few = taught("fit.documents=12")
    records.write(f"{few.folder}/fit.json", _begin(few.config, few.folder))
    message = r"12 labelled documents, .* raise fit.documents \(12\).*; 60 are enough"
    with pytest.raises(InputError, match=message):
        parts_of(few)
    with pytest.raises(ConfigError, match="the fit of other documents"):
        _begin(taught("fit.documents=60", "training.seed=2").config, few.folder)
    more = taught("fit.documents=60")
    _begin(more.config, more.folder)
    assert count_documents(parts_of(more)) == 60


@pytest.mark.slow
def test_a_teacher_that_was_down_is_asked_again_and_its_tokens_cost(tmp_path, yaml_of, one_start):
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    message = {"content": '{"Brand": "Acme", "Color": null, "Size": 7}'}
    choice = {"message": message, "finish_reason": "stop"}
    answer = json.dumps({"choices": [choice], "usage": usage}).encode()
    is_down = [True]

    def reply(call) -> Reply:
        return Reply(500) if is_down else Reply(200, answer)

    with serving(reply) as url:
        server = {
            "url": url,
            "key_variable": None,
            "retries": 0,
            "usd_per_million_answer_tokens": 1e4,
        }
        path = yaml_of(teacher={"model.name": "big", "model.endpoint": server})
        config = load_config(path, ["fit.documents=60"])
        context = context_of(config, tmp_path / "f")
        error = r"fit.teacher answered none of 60 documents: Unreachable"
        with pytest.raises(UserError, match=error):
            parts_of(context)
        is_down.clear()
        assert count_documents(parts_of(context)) == 60
    cost = CandidateScore(name=TEACHER, method="m", changes=teacher_keys(config))
    candidate.add_costs(context, cost, f"{context.folder}/teacher-60")
    # 42 of the 60 texts differ. Each takes 0.1 USD, beside the node at 1 USD per hour.
    assert cost.usd_per_1000.value == pytest.approx(1000 * 0.1 * 42 / 60, abs=1)
    assert cost.corpus_usd.value == pytest.approx(96 * 0.1 * 42 / 60, abs=0.1)


class TestLabels:
    """Labels of a corpus, from its own column, from a table, and from a file by id."""

    @pytest.fixture
    def path(self, tmp_path, yaml_of):
        """The configuration of a corpus of 96 documents, whose first one is there twice."""
        path = yaml_of()
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text(corpus.read_text() + corpus.read_text().splitlines()[0])
        return path

    @pytest.fixture
    def rows(self, path, tmp_path):
        """The rows of the corpus with a column per label."""
        rows = []
        for line in (tmp_path / "corpus.jsonl").read_text().splitlines():
            row = json.loads(line)
            target = row.pop("target")
            rows.append({**target, **row})
        return rows

    @pytest.fixture
    def config(self, path, tmp_path):
        overrides = [
            "input.reader=a:b",
            "input.html_columns=[title]",
            f"fit.labels={tmp_path / 'corpus.jsonl'}",
        ]
        return load_config(path, overrides)

    def test_a_document_whose_id_is_there_twice_is_used_once(self, config, tmp_path):
        lines = []
        parts = parts_of(context_of(config, tmp_path / "f", lines.append))
        assert count_documents(parts) == 95
        assert lines == ["1 document with the id of another: left out"]

    def test_a_training_reads_the_parts_and_not_the_corpus(self, config, tmp_path):
        context = context_of(config, tmp_path / "f")
        training = candidate.training_config(context, {}, "x.jsonl", "y")
        assert training.input.format == "jsonl"
        assert training.input.html_columns == []
        assert training.decoding.bare

    def test_a_table_of_labels_has_a_column_per_attribute(self, config, rows, tmp_path):
        pd.DataFrame(rows).to_parquet(tmp_path / "labels.parquet")
        table = with_changes(config, {"fit.labels": str(tmp_path / "labels.parquet")})
        expected = parts_of(context_of(config, tmp_path / "f"))
        assert parts_of(context_of(table, tmp_path / "g")) == expected

    def test_documents_that_are_left_out_are_counted_with_the_reason(self, path, rows, tmp_path):
        """A file of labels whose first row has a text contains documents; others need one, too."""
        lines = [json.dumps({"id": row["id"], "target": {"Brand": "x"}}) for row in rows]
        first_rows = [json.dumps(row) for row in rows[:70]]
        (tmp_path / "mixed.jsonl").write_text("\n".join(first_rows + lines[70:]))
        config = with_changes(load_config(path), {"fit.labels": str(tmp_path / "mixed.jsonl")})
        said: list[str] = []
        parts = parts_of(context_of(config, tmp_path / "f", said.append))
        assert count_documents(parts) == 70
        assert any(
            line.startswith(f"{len(rows) - 70} documents left out: ") and "title" in line
            for line in said
        ), said

    def test_labels_that_are_no_values_leave_out_their_documents_and_are_counted(
        self, path, rows, tmp_path
    ):
        # The first id is there twice.
        for row in rows[1:3]:
            row["Size"] = "big"
        pd.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
        config = with_changes(load_config(path), {"fit.labels": str(tmp_path / "labels.csv")})
        said: list[str] = []
        parts = parts_of(context_of(config, tmp_path / "f", said.append))
        (left_out,) = [line for line in said if "left out: " in line and "big" in line]
        assert left_out.startswith("2 documents left out: ")
        ids = {row["id"] for part in parts.values() for row in part}
        assert ids.isdisjoint(row["id"] for row in rows[1:3])

    def test_columns_of_labels_with_other_names_are_named(self, path, rows, tmp_path):
        table = pd.DataFrame(rows).drop(columns="title").rename(columns={"Brand": "Brands"})
        labels_file = tmp_path / "labels.csv"
        config = with_changes(load_config(path), {"fit.labels": str(labels_file)})
        table.rename(columns={"id": "file"}).to_csv(labels_file, index=False)
        message = "no column 'id', by which labels find their document; its columns: .*'file'"
        with pytest.raises(InputError, match=message):
            parts_of(context_of(config, tmp_path / "f"))
        table.to_csv(labels_file, index=False)
        lines: list[str] = []
        parts_of(context_of(config, tmp_path / "g", lines.append))
        assert lines == [
            "no labels of 'Brand': the labels have nothing with this name. These columns of the "
            "labels match no attribute: 'Brands'. If 'Brands' is 'Brand', rename it"
        ]

    def test_labels_without_documents_are_joined_by_id(self, path, rows, tmp_path):
        table = pd.DataFrame(rows).drop(columns="title").assign(Brand="x")
        table.to_csv(tmp_path / "labels.CSV")
        changes = {"fit.labels": str(tmp_path / "labels.CSV"), "fit.documents": 97}
        config = with_changes(load_config(path), changes)
        parts = parts_of(context_of(config, tmp_path / "h"))
        ids = [row["id"] for part in parts.values() for row in part]
        assert sorted(ids) == sorted({row["id"] for row in rows})
        first = parts["train"][0]
        label = {row["id"]: row for row in rows}[first["id"]]
        assert {**first["target"], "title": first["title"]} == {
            "Brand": "x",
            "Color": label["Color"],
            "Size": label["Size"],
            "title": label["title"],
        }


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (10, "10 labelled documents, but .*: label more documents; 60 are enough"),
        (0, "no labelled"),
    ],
)
def test_too_few_labels_are_refused_before_ray_starts(
    documents, message, tmp_path, yaml_of, monkeypatch
):
    def connected(*_: object) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(ray_session, "connected", connected)
    path = yaml_of(max(documents, 1))
    overrides = [] if documents else ["training.labels_column=nothing"]
    with pytest.raises(InputError, match=message):
        run_fit(path, overrides, say=quiet)
    assert not (tmp_path / "out-fit").exists()
    # A folder that was there is the user's, and stays.
    (tmp_path / "out-fit").mkdir()
    # Nothing was stored, so that another configuration does not count as another fit.
    with pytest.raises(InputError, match=message):
        run_fit(path, [*overrides, "fit.test_share=0.3"], say=quiet)
    assert (tmp_path / "out-fit").exists()


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (["Brand", "Size"], None, "every label of 96 documents is null"),
        (["Marke"], "Acme", "the labels are of Marke, the attributes are Brand, Color, Size"),
    ],
)
def test_useless_labels_are_refused(names, value, message, tmp_path, yaml_of, ray_here):
    path = yaml_of()
    corpus = tmp_path / "corpus.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    for row in rows:
        row["target"] = dict.fromkeys(names, value)
    write_rows(corpus, rows)
    with pytest.raises(InputError, match=message):
        run_fit(path, [], say=quiet)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "fit.candidates={a: {training.weights: fulll}}",
            "fit.candidates.a: training.weights: .*lora",
        ),
        ("fit.candidates={a: {task.kind: x}}", "give keys of model, decoding, training, engine"),
        (
            "fit.candidates={a: {decoding.method: guided}}",
            "fit.candidates.a: .* guided .* cannot be trained",
        ),
        ("fit.teacher={model.name: ./nowhere}", "fit.teacher: .*nowhere"),
        ("fit.path=s3://bucket/fit", "give a local one"),
        ("fit.candidates={teacher: {model.name: x}}", "choose another"),
        (
            "fit.teacher={model.endpoint: {url: 'http://h', api_key: sk-1}}",
            "api_key: a configuration must not hold secrets",
        ),
        ("fit.teacher={model.endpoint.url: 'http://me:pw@h'}", "must hold no credentials"),
        ("input={path: x, text_columns: [id], id_column: sku}", "keeps a document's id in `id`"),
        ("fit.curve=[1.5]", "between 0 and 1"),
    ],
)
def test_unusable_keys_are_refused_before_anything_is_done(override, message, tmp_path, yaml_of):
    with pytest.raises(Exception, match=message):
        run_fit(yaml_of(), [override], say=quiet)
    assert not (tmp_path / "out-fit").exists()


def test_labels_that_do_not_exist_are_named_beside_a_fit_with_others(tmp_path, yaml_of):
    folder = tmp_path / "out-fit"
    folder.mkdir()
    records.write(str(folder / "fit.json"), result_of())
    (folder / "train.jsonl").write_text("")
    with pytest.raises(InputError, match=r"lables.jsonl: no such file or folder"):
        run_fit(yaml_of(), [f"fit.labels={tmp_path}/lables.jsonl"], say=quiet)


def rows_of(titles: list[str], categories: int = 1) -> list[labels.Row]:
    rows = []
    for number, title in enumerate(titles):
        rows.append(
            {
                "id": str(number),
                "category": f"c{number % categories}",
                "title": title,
            }
        )
    return rows


def test_documents_with_the_same_text_are_in_one_part():
    titles = []
    for number in range(300):
        word = "SHOE" if number % 2 else "Shoe"
        titles.append(f"{word} {number // 3}{'!' * (number % 3)}")
    parts = split(rows_of(titles), run_config())
    texts = [{row["title"].strip("!").lower() for row in rows} for rows in parts.values()]
    assert sum(map(len, texts)) == 100
    assert len(set().union(*texts)) == 100
    assert [len(parts[name]) for name in PARTS] == pytest.approx([195, 30, 75], abs=6)


def test_the_manual_has_the_sizes_of_the_parts():
    """Its table is of documents whose texts all differ."""
    manual = (Path(__file__).parents[2] / "docs/fit.md").read_text()
    table = re.findall(r"^\| (\d+)[^|]* \| (\d+) \| (\d+) \| (\d+) \|$", manual, re.MULTILINE)
    assert len(table) == 3
    for line in table:
        total, *sizes = map(int, line)
        parts = split(rows_of([f"text {number}" for number in range(total)]), run_config(), seen=())
        assert [len(parts[part]) for part in PARTS] == sizes


def test_every_category_is_in_all_parts_and_the_first_of_train_are_a_sample():
    parts = split(rows_of([f"t{n}" for n in range(200)], 8), run_config())
    for rows in parts.values():
        assert {row["category"] for row in rows} == {f"c{n}" for n in range(8)}
    ids = [row["id"] for row in parts["train"]]
    assert ids != sorted(ids)


def test_the_examples_of_the_prompt_are_in_train(tmp_path):
    shown = [{"title": f"T{number}!", "target": {}} for number in range(20)]
    write_rows(tmp_path / "shown.jsonl", shown)
    examples = {"path": str(tmp_path / "shown.jsonl"), "count": 20}
    config = run_config({**extraction(c=["a"]), "examples": examples})
    parts = split(rows_of([f"t{n}" for n in range(200)]), config)
    assert {str(n) for n in range(20)} <= {row["id"] for row in parts["train"]}


@pytest.mark.parametrize("of_candidate", [False, True])
def test_documents_that_trained_a_model_before_are_in_train(tmp_path, of_candidate):
    """A fit that begins with an adapter of an earlier fit measures no F1 on its documents."""
    config = run_config()
    rows = [{"id": str(n), "title": f"text {n}", "target": {}} for n in range(200)]
    documents = [Document(n, row["id"], row) for n, row in enumerate(rows[:90])]
    trained_on(documents, config.text_columns()).write(tmp_path)
    keys = {"model.adapter": str(tmp_path)}
    if of_candidate:
        keys = {"fit.candidates": {"again": keys}}
    before = split(rows, config)
    parts = split(rows, with_changes(config, keys))
    known = {row["id"] for row in rows[:90]}
    assert known <= {row["id"] for row in parts["train"]}
    assert known & {row["id"] for row in before["test"]}
    assert len(parts["test"]) >= 30


def test_a_label_that_is_the_same_everywhere_is_a_warning():
    rows = [{"id": str(n), "target": {"Brand": f"b{n}", "Color": "red"}} for n in range(9)]
    warning = labels.constant_labels(rows, run_config())
    assert "Color (1 of 2 attributes, 50%)" in str(warning)


def score(
    name: str, low: float, value: float, speed: float = 1.0, usd: float | None = None, **keys
) -> CandidateScore:
    f1 = Figure(value, low, 2 * value - low)
    price = None if usd is None else Figure(usd)
    return CandidateScore(
        name=name, method="m", f1=f1, documents_per_second=Figure(speed), usd_per_1000=price, **keys
    )


def result_of(
    *scores: CandidateScore, floor: float = 0.7, curve: tuple = (), gold: bool = True
) -> FitResult:
    parts = {"train": 100, "validation": 20, "test": 50}
    return FitResult(
        path="/x/fit",
        identity="i",
        floor=floor,
        gold=gold,
        task="extraction",
        model="<m>",
        documents=parts,
        scores=list(scores),
        curve=list(curve),
    )


def test_the_cheapest_that_surely_holds_the_floor_is_recommended():
    dear = score("dear", 0.75, 0.8, 1, 2.0)
    cheap = score("cheap", 0.7, 0.8, 1, 1.0)
    unsure = score("no", 0.69, 0.9, 9, 0)
    assert recommend(result_of(dear, cheap, unsure)) == "cheap"
    assert recommend(result_of(unsure)) is None


def test_without_prices_the_fastest_is_recommended():
    slow = score("slow", 0.8, 0.9, 1)
    fast = score("fast", 0.8, 0.9, 2)
    assert recommend(result_of(slow, fast)) == "fast"


def test_a_machine_without_a_price_comes_before_a_server_with_one():
    server = score("server", 0.8, 0.9, 9, 0.5)
    here = score("here", 0.8, 0.9)
    assert recommend(result_of(server, here)) == "here"


def test_a_fit_is_read_back_whatever_its_candidates_change(tmp_path):
    changes = {
        "engine.max_num_seqs": 8,
        "model.endpoint": {"url": "http://h"},
        "model.adapter": None,
    }
    result = result_of(score("a", 0.1, 0.2, changes=changes))
    records.write(str(tmp_path / "fit.json"), result)
    assert records.read(FitResult, str(tmp_path / "fit.json")) == result


class Stopped(Exception):
    """Raised where a test ends a step."""


@pytest.mark.parametrize(
    ("usd", "left_seconds", "message"),
    [(0.0, -1.0, "cost.deadline is reached"), (5.0, 60.0, "cost.budget_usd .* is spent")],
)
def test_no_candidate_begins_once_the_deadline_or_the_budget_is_over(
    yaml_of, tmp_path, usd, left_seconds, message
):
    book.write(
        str(tmp_path / "run"),
        Bill(
            "s",
            began=0.0,
            usd=usd,
            final=True,
        ),
    )
    context = context_of(load_config(yaml_of(), ["cost.budget_usd=5"]), tmp_path)
    fit = Fit(replace(context, ends=time.time() + left_seconds), result_of())
    begun = []
    with pytest.raises(BudgetReached, match=message):
        fit._add([], "full", lambda: begun.append("full"))
    assert begun == []


def test_a_fit_without_candidates_trains_an_adapter_at_a_rate_for_the_size_of_the_model(yaml_of):
    keys = ["fit.candidates={}"]
    (changes,) = candidate.candidates_of(load_config(yaml_of(), keys)).values()
    small_rates = changes.pop("training.learning_rates")
    assert changes == {"training.weights": "lora", "training.epochs": 2}
    # The tiny model has a hidden size of 64, the embedded one of 576.
    embedded = load_config(yaml_of(), [*keys, "model.name=smollm2-135m-instruct"])
    (changes,) = candidate.candidates_of(embedded).values()
    assert changes["training.learning_rates"] == [pytest.approx(1.3e-3)]
    assert small_rates[0] > 1.3e-3
    mine = [*keys, "training.weights=full", "training.epochs=7", "training.learning_rates=[0.5]"]
    candidates = candidate.candidates_of(load_config(yaml_of(), mine))
    assert candidates == {"full": {"training.weights": "full"}}


def test_a_candidate_has_a_folder_per_settings_of_its_training(yaml_of, monkeypatch):
    outputs = []

    def run_training(config, **_):
        outputs.append(config.output.path)
        raise Stopped

    monkeypatch.setattr(candidate, "run_training", run_training)
    for keys in ([], [], ["decoding.max_value_tokens=11"], ["training.seed=5"]):
        context = context_of(load_config(yaml_of(), keys), "/f")
        with pytest.raises(Stopped):
            candidate.train(context, "full", TRAINED["full"], 9, 1.0)
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3


def test_a_training_that_begins_again_with_other_keys_says_so(yaml_of, tmp_path, monkeypatch):
    lines: list[str] = []

    def run_training(config, **_):
        Path(config.output.path).mkdir(parents=True)
        raise Stopped

    monkeypatch.setattr(candidate, "run_training", run_training)
    said = []
    for keys in ([], [], ["training.seed=5"], ["training.seed=5"]):
        lines.clear()
        context = context_of(load_config(yaml_of(), keys), tmp_path / "f", lines.append)
        with pytest.raises(Stopped):
            candidate.train(context, "full", TRAINED["full"], 9, 1.0)
        for training in (tmp_path / "f/candidates").rglob("training"):
            training.rmdir()
        said.append(any("its training begins again" in line for line in lines))
    assert said == [False, False, True, False]


def test_a_candidate_has_an_estimate_per_settings_of_its_speed_and_cost(yaml_of, monkeypatch):
    paths = []

    def read(kind, path):
        paths.append(path)
        raise Stopped

    monkeypatch.setattr(records, "read", read)
    for key in (
        "cost.budget_usd=5",
        "cost.budget_usd=6",
        "cost.prices.local=2",
        "engine.max_num_seqs=8",
        "fit.sample=5",
    ):
        context = context_of(load_config(yaml_of(), [key]), "/f")
        with pytest.raises(Stopped):
            candidate.add_costs(context, score("full", 0.1, 0.2))
    assert paths[0] == paths[1]  # a budget changes no estimate
    assert len(set(paths)) == 4


def test_an_estimate_of_a_fit_names_the_keys_of_the_fit(yaml_of, monkeypatch, tmp_path):
    seen = []

    def estimate(config, options, verbose):
        seen.append(options)
        raise Stopped

    monkeypatch.setattr(candidate.estimate, "estimate", estimate)
    context = context_of(load_config(yaml_of(), []), tmp_path / "f")
    with pytest.raises(Stopped):
        candidate.add_costs(context, score("full", 0.1, 0.2))
    assert seen[0].sample_option == "fit.sample"
    assert seen[0].minutes_option == "fit.sample_minutes"


def test_missing_says_how_many_documents_and_labels_would_help():
    fewer_labels = score("near", 0.5, 0.7, labels=50)
    near = result_of(score("near", 0.66, 0.74, labels=100), curve=(fewer_labels,))
    # The interval has to become half as wide, which takes four times as many documents.
    assert "about 200 test documents would settle it, and there are 50" in missing(near)
    assert "from 50 to 100 labels it gained +0.040: more labels would help" in missing(near)


def test_missing_says_that_the_floor_is_above_the_teacher():
    result = result_of(score(TEACHER, 0.5, 0.6))
    assert "above the F1 of the teacher itself, 0.600" in missing(result)


def test_missing_says_that_no_candidate_could_be_scored():
    failed = CandidateScore(name="a", method="", error="broke")
    assert missing(result_of(failed)) == "no candidate could be scored"


def test_terminal_and_page_show_what_failed_and_run_nothing(tmp_path):
    bad = CandidateScore(
        name="<script>alert(1)</script>", method="", error="<img src=x onerror=alert(1)>"
    )
    result = result_of(score("good", 0.8, 0.9), bad, gold=False)
    result.path = str(tmp_path)
    written = Path(page.write(result, "because")).read_text()
    assert "<script>alert" not in written
    assert "<img" not in written
    assert "&lt;img" in written
    shown = page.describe(result, "because")
    says(shown, "agreement with the teacher", "none is certain to reach fit.f1_floor, 0.7: because")


def test_an_f1_of_one_comes_with_what_it_says_about_other_documents():
    shown = page.describe(result_of(score("best", 1.0, 1.0), score("good", 0.8, 0.9)), "")
    # (1 - 0.058) ** 50 is 0.05.
    says(
        shown,
        "strict F1 is 1.000 on 50 documents: it counts no fault in any of them. Up to 5.8% of all",
    )
    assert "counts no fault" not in page.describe(result_of(score("good", 0.8, 0.9)), "")


@pytest.mark.parametrize(("values_of", "kept"), [(drawn, True), (honest, False)])
def test_a_fit_keeps_a_calibration_only_if_it_improves_confidences(
    yaml_of, tmp_path, monkeypatch, values_of, kept
):
    """The file beside the weights is that of an earlier version, which kept every calibration."""
    file = tmp_path / FILE
    file.write_text("of an earlier version")
    monkeypatch.setattr(candidate, "_run", lambda *_: None)
    monkeypatch.setattr(candidate, "labelled_values", lambda *_, **__: (values_of(98, 0), 0))
    lines: list[str] = []
    context = context_of(load_config(yaml_of()), tmp_path, lines.append)
    good = score("lora", 0.8, 0.9)
    candidate._calibrate(context, good, tmp_path, str(tmp_path))
    assert file.exists() == kept
    assert len(good.calibration_error) == len(good.reliability) == 1 + kept
    result = result_of(score("other", 0.5, 0.6), good)
    result.path = str(tmp_path)
    shown = page.describe(result, "")
    (line,) = (line for line in shown.splitlines() if line.startswith("confidence: "))
    written = html.unescape(Path(page.write(result, "")).read_text())
    if kept:
        assert not lines
        before, after = good.calibration_error
        assert line.endswith(f"lora, calibration error {before:.3f}, calibrated {after:.3f}")
        says(written, f"calibration error {before:.3f} before calibration and {after:.3f} after it")
    else:
        says(lines[0], "lora: its confidences stay uncalibrated")
        (error,) = good.calibration_error
        says(line, f"lora, calibration error {error:.3f}, uncalibrated because")
        says(written, f"calibration error {error:.3f} on the test part", "stay uncalibrated")
        assert "after it" not in written


def test_the_table_says_how_many_documents_the_input_has_and_that_there_is_no_price():
    priced = score("priced", 0.8, 0.9, 2.0, 0.5)
    failed = CandidateScore(name="failed", method="", error="broke")
    result = result_of(priced, score("here", 0.8, 0.9), failed)
    result.corpus_documents = Figure(1240.0)
    heads, *rows = page.describe(result, "because").splitlines()[:4]
    says(heads, "1,000 documents  all 1,240 documents  its training")
    assert ["no price" in row for row in rows] == [False, True, False]
    assert "$0.50" in rows[0]


@pytest.mark.parametrize(("usd", "best"), [(None, "fastest"), (0.5, "cheapest")])
def test_without_prices_the_fastest_is_recommended_and_called_so(usd, best, tmp_path):
    result = result_of(score("good", 0.8, 0.9, usd=usd))
    result.recommended = recommend(result)
    says(page.describe(result, ""), f"recommended: good, the {best} that is certain")
    result.path = str(tmp_path)
    says(Path(page.write(result, "")).read_text(), f"The {best} of those")


def test_below_the_floor_the_best_is_written_and_named_as_such(yaml_of, tmp_path):
    path = yaml_of()
    better = score("better", 0.5, 0.6)
    better.changes = {"model.name": "Qwen/Qwen3-1.7B"}
    result = result_of(score("worse", 0.3, 0.4), better)
    result.path = str(tmp_path)
    result.recommended = recommend(result)
    assert result.recommended is None
    _write_recommended(result, path, [])
    assert result.best == "better"
    assert result.configuration is None
    written = Path(result.best_configuration or "")
    assert written.name == "best.yaml"
    assert load_config(str(written)).model.name == "Qwen/Qwen3-1.7B"
    assert "not certain to reach fit.f1_floor" in written.read_text()
    shown = page.describe(result, "because")
    says(shown, "best nevertheless: better", "a larger model would help most")
    assert f"`raypd extract {written}`" in shown


def test_the_command_of_terminal_and_page_runs_beside_the_run_that_was_there(yaml_of, tmp_path):
    path = Path(yaml_of())
    path.write_text("# The model is a toy, not trained for your documents.\n" + path.read_text())
    good = score("good", 0.8, 0.9)
    good.labels = 55
    result = result_of(good)
    result.path = str(tmp_path / "a fit")
    Path(result.path).mkdir()
    result.recommended = recommend(result)
    _write_recommended(result, str(path), ["output.path=runs/my tickets"])
    last = [line for line in page.describe(result, "").splitlines() if line.startswith("Next:")]
    (command,) = last
    words = shlex.split(command.split("`")[1])
    shown = html.unescape(Path(page.write(result, "")).read_text())
    assert f"<code>{shlex.join(words)}</code>" in shown
    assert words[:2] == ["raypd", "extract"]
    config = load_config(words[2], words[3:])
    assert config.output.path == "runs/my tickets-fitted"
    written = Path(words[2]).read_text()
    assert "not trained for your documents" not in written
    says(written, "good: ", "Its model was trained on 55 labelled documents", f"Made from {path}")
    assert not (tmp_path / "best.yaml").exists()


def attribute_of(name: str, right: int, frequent_right: int, **faults: str) -> AttributeResult:
    figures = AttributeScore("advert", name, right / 43, right, 43, "false", frequent_right)
    return AttributeResult(score=figures, faults=faults)


def test_a_worthless_attribute_of_the_recommended_model_is_named_next_to_it(tmp_path):
    good = score("lora", 0.8, 0.9)
    good.attributes = [
        attribute_of("remote", 19, 24, same="'remote' has the same value in all 43 documents"),
        attribute_of("role", 30, 30, same="'role' has the same value in 43 documents"),
        attribute_of("start", 28, 9),
        attribute_of("salary", 42, 3),
        attribute_of("country", 43, 43, same="'country' has the same value in all 43 documents"),
    ]
    other = score("other", 0.5, 0.6)
    other.attributes = [attribute_of("remote", 40, 24)]
    result = result_of(good, other)
    result.path = str(tmp_path)
    result.recommended = "lora"
    lines = page.describe(result, "").splitlines()
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("recommended"))
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert lines[begin + 1 : begin + 3] == warnings
    says(warnings[0], "remote right in 19 of 43 documents", "right in 24", "the same value in all")
    says(warnings[1], "role right in 30 of 43", "the same value")
    assert lines[begin + 3].startswith("what helps: ")
    (low,) = (line for line in lines if line.startswith("attributes: "))
    says(low, "remote 0.442 (19 of 43 right)", "role 0.698", "start 0.651")
    assert "salary" not in low
    assert "country" not in low
    written = html.unescape(Path(page.write(result, "")).read_text())
    says(written, "remote right in 19 of 43 documents", "⚠ 0.442, 44% right", "0.930, 93% right")
    assert records.from_json(FitResult, json.loads(json.dumps(asdict(result))), "f") == result


def test_a_model_without_worthless_attributes_gets_no_warning():
    good = score("lora", 0.8, 0.9)
    good.attributes = [attribute_of("remote", 40, 24)]
    result = result_of(good)
    result.recommended = "lora"
    shown = page.describe(result, "")
    assert "warning" not in shown
    assert "attributes: " not in shown


def test_the_status_of_a_fit_names_its_latest_run(tmp_path):
    """It is a folder of runs, and none itself."""
    (tmp_path / "fit.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is the folder of a fit.*result when it has ended$"):
        load_record(str(tmp_path))
    for number, name in enumerate(("configured", "candidates/lora/100/test")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        os.utime(folder / "run.json", (number, number))
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    latest = f"`raypd status {folder}` shows its latest run"
    assert str(done.exception).endswith(latest)
    training = tmp_path / "candidates/full/100/training"
    (training / "ledger").mkdir(parents=True)
    with pytest.raises(ConfigError) as raised:
        load_record(str(tmp_path))
    assert latest in str(raised.value)
    assert str(raised.value).endswith(f"the training {training} has begun since, and is not a run")


@pytest.mark.parametrize(
    ("found", "says_so"),
    [
        (
            {"recommended": "lora", "configuration": "x/recommended.yaml"},
            "The fit has ended and recommends lora: x/recommended.yaml",
        ),
        (
            {"best": "lora", "best_configuration": "x/best.yaml"},
            "The fit has ended and recommends no model; the best one is lora: x/best.yaml",
        ),
        (
            {"stopped": "cost.deadline is reached"},
            "The fit has ended early (cost.deadline is reached) and recommends no model",
        ),
    ],
)
def test_the_status_of_a_fit_that_has_ended_names_what_it_recommends(tmp_path, found, says_so):
    """Its latest run may be one with fewer labels."""
    run = tmp_path / "candidates/lora/50/test"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    os.utime(run / "run.json", (1, 1))
    (tmp_path / "fit.json").write_text(json.dumps({"scores": [{"name": "lora"}], **found}))
    os.utime(tmp_path / "fit.json", (2, 2))
    with pytest.raises(ConfigError) as raised:
        load_record(str(tmp_path))
    expected = f"{says_so}. {tmp_path}/report.html shows its results"
    assert str(raised.value).endswith(f"is the folder of a fit, not of a run. {expected}")
    # It has been resumed.
    os.utime(run / "run.json", (3, 3))
    with pytest.raises(ConfigError, match=f"`raypd status {run}` shows its latest run"):
        load_record(str(tmp_path))
