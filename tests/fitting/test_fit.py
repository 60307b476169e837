"""A fit with tiny random models through Ray: cut off, out of money, taken up again; and its rules
without Ray.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from raypd.answering.components import build
from raypd.billing.budget import BudgetReached
from raypd.cluster import driver, one_worker
from raypd.cluster.driver import run_extract
from raypd.config import RunConfig
from raypd.config.load import load_config, with_changes
from raypd.dataset.plan import Plan
from raypd.errors import ConfigError, InputError, UserError
from raypd.fitting import candidate, labels, page
from raypd.fitting.fit import _begin, missing, recommend, run_fit
from raypd.fitting.result import AS_CONFIGURED, TEACHER, CandidateScore, FitResult
from raypd.run import records
from raypd.run.console import Interrupted
from raypd.run.records import Figure, Manifest
from raypd.training import teacher
from raypd.training.job import run_training
from tests.runs import extraction, run_config, run_here, says
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
    """Writes a configuration over a corpus of so many labelled documents: its path."""

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
        config = tree(corpus, tmp_path / "out", str(model), training=training, fit=keys)
        config["decoding"]["isolate"] = "documents"
        config["cost"] = {"prices": {"local": 1.0}}
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
        return str(tmp_path / "fit.yaml")

    return write


@pytest.fixture
def one_start(monkeypatch):
    """Of a worker, beside the training's: the rest is in this process.

    Returns what is in place of `run_extract`.
    """

    def start(self) -> None:
        kind, arguments = self._make(self.share)
        self._actor = kind(*arguments)

    def run(config: RunConfig, planned: Plan | None = None, **_) -> Manifest:
        if config.output.path.endswith("/configured"):
            return run_extract(config)
        return driver.finish(config, config.output.path, run_here(config, build, planned))

    call = lambda self, label, method, *arguments, progress: getattr(self._actor, method)(  # noqa: E731
        *arguments
    )
    monkeypatch.setattr(one_worker.OneWorker, "_start", start)
    monkeypatch.setattr(one_worker.OneWorker, "call", call)
    for module in (driver, labels):
        monkeypatch.setattr(module, "run_extract", run)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    return run


@pytest.mark.timeout(900)
def test_it_recommends_what_can_be_run(tmp_path, yaml_of, ray_here, one_start):
    result = run_fit(
        yaml_of(curve=[]), ["output.min_confidence=0.3", "cascade.model=fake"], say=quiet
    )
    untrained, full = result.scores
    assert (untrained.name, full.name, result.recommended) == (AS_CONFIGURED, "full", "full")
    assert (untrained.holds(0.5), full.holds(0.5), full.labels) == (
        False,
        True,
        result.documents["train"],
    )
    bills = [
        json.loads(bill.read_text())["usd"]
        for bill in (tmp_path / "out-fit").rglob("ledger/*.json")
    ]
    assert result.usd == pytest.approx(sum(bills))
    assert 0 < full.training_usd < result.usd
    assert "<svg" in (tmp_path / "out-fit/report.html").read_text()
    config = load_config(str(result.configuration))
    assert (config.output.min_confidence, config.cascade.model) == (0, None)  # as it was measured
    run = one_start(config)
    assert (run.ok, run.failed) == (96, 0)
    with pytest.raises(ConfigError, match="holds the fit of other documents"):
        run_fit(yaml_of(curve=[]), ["fit.documents=95"], say=quiet)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_goes_on_and_has_a_learning_curve(tmp_path, yaml_of, ray_here):
    path, folder, trainings = yaml_of(), tmp_path / "out-fit", []

    def stop_at_the_second(line: str) -> None:
        trainings.extend([line] * line.startswith("full: training"))
        if len(trainings) > 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="the same command goes on"):
        run_fit(path, [], say=stop_at_the_second)
    weights = next(folder.rglob("model.safetensors"))
    written = weights.stat().st_mtime_ns
    stopped = run_fit(path, ["cost.budget_usd=0.0000001"], say=quiet)
    assert (stopped.scores, stopped.recommended) == ([], None)
    assert "cost.budget_usd" in str(stopped.stopped)
    result = run_fit(path, [], say=quiet)
    # It was not trained again.
    assert (weights.stat().st_mtime_ns, result.stopped) == (written, None)
    assert [(s.name, s.labels < result.scores[1].labels, s.error) for s in result.curve] == [
        ("full", True, None)
    ]


@pytest.mark.slow
def test_a_training_ends_with_the_money(yaml_of, ray_here):
    """At 3,600 USD an hour a second costs one; the start of Ray Train alone takes some."""
    keys = [
        "cost.prices.local=3600",
        "cost.budget_usd=6",
        "cost.reserve_seconds=1",
        "decoding.method=hyper_parallel",
    ]
    with pytest.raises(BudgetReached, match="is kept up to its latest checkpoint"):
        run_training(load_config(yaml_of(), [*keys, "training.epochs=1000"]), say=quiet)


def test_a_teacher_labels_what_is_drawn(tmp_path, yaml_of, one_start):
    path = yaml_of(teacher={"model.name": "fake"})
    # The only one with notes, which is not drawn.
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"id": "96", "title": "x", "notes": "y"}\n')
    keys = [
        "training.labels_column=labels",
        "input.text_columns=[title,notes]",
        "output.min_confidence=0.99",
    ]
    config = load_config(path, [*keys, "fit.documents=60"])
    context = labels.FitContext(config, str(tmp_path / "f"), False, quiet)
    few = replace(context, config=load_config(path, [*keys, "fit.documents=12"]))
    records.write(f"{context.folder}/fit.json", _begin(few.config, context.folder))
    with pytest.raises(
        InputError, match=r"12 labelled documents, .* raise fit.documents, or change"
    ):
        labels.parts_of(few)
    with pytest.raises(ConfigError, match="the fit of other documents"):
        _begin(load_config(path, [*keys, "training.seed=2"]), context.folder)
    _begin(config, context.folder)  # as it said
    # The fake engine is never unsure.
    assert labels.teacher_config(config, "x.jsonl", "y").output.min_confidence == 0
    parts = labels.parts_of(context)
    answers = {
        row["id"]: json.loads(row["record"])
        for row in teacher.rows_of(f"{context.folder}/teacher-60")
    }
    assert {row["id"]: row["labels"] for rows in parts.values() for row in rows} == answers
    assert len(answers) == 60


@pytest.mark.slow
def test_a_teacher_that_was_down_is_asked_again_and_its_tokens_cost(tmp_path, yaml_of, one_start):
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    choice = {
        "message": {"content": '{"Brand": "Acme", "Color": null, "Size": 7}'},
        "finish_reason": "stop",
    }
    answer, down = json.dumps({"choices": [choice], "usage": usage}).encode(), [True]
    with serving(lambda call: Reply(500) if down else Reply(200, answer)) as url:
        server = {
            "url": url,
            "key_variable": None,
            "retries": 0,
            "usd_per_million_answer_tokens": 1e4,
        }
        config = load_config(
            yaml_of(teacher={"model.name": "big", "model.endpoint": server}), ["fit.documents=60"]
        )
        context = labels.FitContext(config, str(tmp_path / "f"), False, quiet)
        with pytest.raises(
            UserError, match=r"fit.teacher answered none of 60 documents: Unreachable"
        ):
            labels.parts_of(context)
        down.clear()
        assert sum(map(len, labels.parts_of(context).values())) == 60
    cost = CandidateScore(name=TEACHER, method="m", changes=labels.teacher_keys(config))
    candidate.measure(context, cost, f"{context.folder}/teacher-60")
    # 42 of 60 texts differ, each of which takes 0.1 USD, beside the node at 1 USD an hour.
    assert cost.usd_per_1000.value == pytest.approx(1000 * 0.1 * 42 / 60, abs=1)
    assert cost.corpus_usd.value == pytest.approx(96 * 0.1 * 42 / 60, abs=0.1)


def test_labels_are_read_as_what_they_are_and_ids_twice_are_said(tmp_path, yaml_of):
    path, corpus, said = yaml_of(), tmp_path / "corpus.jsonl", []
    corpus.write_text(corpus.read_text() + corpus.read_text().splitlines()[0])
    config = load_config(
        path, ["input.reader=a:b", "input.html_columns=[title]", f"fit.labels={corpus}"]
    )
    context = labels.FitContext(config, str(tmp_path / "f"), False, said.append)
    assert sum(map(len, labels.parts_of(context).values())) == 95
    assert said == ["1 document with the id of another: left out"]
    taught = candidate.training_config(context, {}, "x.jsonl", "y")
    assert (taught.input.format, taught.input.html_columns, taught.decoding.bare) == (
        "jsonl",
        [],
        True,
    )
    rows = [
        {**row.pop("target"), **row} for row in map(json.loads, corpus.read_text().splitlines())
    ]
    # Of which no more is read than is named.
    pd.DataFrame(rows).to_parquet(tmp_path / "labels.parquet")
    of_columns = with_changes(config, {"fit.labels": str(tmp_path / "labels.parquet")})
    # For the input's ids.
    pd.DataFrame(rows).drop(columns="title").assign(Brand="x").to_csv(tmp_path / "labels.CSV")
    by_id = with_changes(
        load_config(path), {"fit.labels": str(tmp_path / "labels.CSV"), "fit.documents": 97}
    )
    again, joined = (
        labels.parts_of(labels.FitContext(changed, str(tmp_path / folder), False, said.append))
        for changed, folder in ((of_columns, "g"), (by_id, "h"))
    )
    assert again == labels.parts_of(context)
    assert sorted(row["id"] for part in joined.values() for row in part) == sorted(
        {row["id"] for row in rows}
    )
    first, labelled = joined["train"][0], {row["id"]: {**row, "Brand": "x"} for row in rows}
    assert {**first["target"], **first} == {"target": first["target"]} | labelled[first["id"]]


@pytest.mark.parametrize(
    ("documents", "message"), [(10, "10 labelled documents, of which"), (0, "no labelled")]
)
def test_too_few_labels_are_refused_with_what_to_do(documents, message, yaml_of, ray_here):
    path = yaml_of(max(documents, 1))
    # Nothing was begun: another configuration is no other fit.
    for changed in ([], ["fit.test_share=0.3"]):
        with pytest.raises(InputError, match=message):
            run_fit(
                path,
                changed if documents else [*changed, "training.labels_column=nothing"],
                say=quiet,
            )


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (["Brand", "Size"], None, "every label of 96 documents is null"),
        (["Marke"], "Acme", "the labels are of Marke, the attributes are Brand, Color, Size"),
    ],
)
def test_labels_that_teach_nothing_are_said(names, value, message, tmp_path, yaml_of, ray_here):
    path = yaml_of()
    corpus = tmp_path / "corpus.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    corpus.write_text(
        "".join(json.dumps({**row, "target": dict.fromkeys(names, value)}) + "\n" for row in rows)
    )
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
        ("fit.candidates={teacher: {model.name: x}}", "give the candidate another"),
        (
            "fit.teacher={model.endpoint: {url: 'http://h', api_key: sk-1}}",
            "api_key: a configuration holds no secrets",
        ),
        ("fit.teacher={model.endpoint.url: 'http://me:pw@h'}", "must hold no credentials"),
        ("input={path: x, text_columns: [id], id_column: sku}", "keeps a document's id in `id`"),
        ("fit.curve=[1.5]", "between 0 and 1"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_done(override, message, tmp_path, yaml_of):
    with pytest.raises(Exception, match=message):
        run_fit(yaml_of(), [override], say=quiet)
    assert not (tmp_path / "out-fit").exists()


def rows_of(titles: list[str], categories: int = 1) -> list[labels.Row]:
    return [
        {"id": str(n), "category": f"c{n % categories}", "title": title}
        for n, title in enumerate(titles)
    ]


def test_the_same_documents_are_in_one_part_every_category_in_all_and_the_same_label_is_said(
    tmp_path,
):
    titles = [f"{'SHOE' if n % 2 else 'Shoe'} {n // 3}{'!' * (n % 3)}" for n in range(300)]
    parts = labels.split(rows_of(titles), run_config())
    places = [{row["title"].strip("!").lower() for row in rows} for rows in parts.values()]
    assert sum(map(len, places)) == 100 == len(set().union(*places))
    assert [len(parts[name]) for name in labels.PARTS] == pytest.approx([195, 30, 75], abs=6)
    parts = labels.split(rows_of([f"t{n}" for n in range(200)], 8), run_config())
    for rows in parts.values():
        assert {row["category"] for row in rows} == {f"c{n}" for n in range(8)}
    # A prefix is a sample.
    assert [row["id"] for row in parts["train"]] != sorted(row["id"] for row in parts["train"])
    (tmp_path / "shown.jsonl").write_text(
        "".join(f'{{"title": "T{n}!", "target": {{}}}}\n' for n in range(20))
    )
    examples = {"path": str(tmp_path / "shown.jsonl"), "count": 20}  # which every prompt shows
    config = run_config({**extraction(c=["a"]), "examples": examples})
    parts = labels.split(rows_of([f"t{n}" for n in range(200)]), config)
    assert {str(n) for n in range(20)} <= {row["id"] for row in parts["train"]}
    rows = [{"id": str(n), "target": {"Brand": f"b{n}", "Color": "red"}} for n in range(9)]
    (line,) = labels._warnings(rows, run_config())
    assert "Color (1 of 2 attributes, 50%)" in line


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
    dear, cheap = score("dear", 0.75, 0.8, 1, 2.0), score("cheap", 0.7, 0.8, 1, 1.0)
    unsure = score("no", 0.69, 0.9, 9, 0)
    assert recommend(result_of(dear, cheap, unsure)) == "cheap"
    # Without prices.
    assert recommend(result_of(score("slow", 0.8, 0.9, 1), score("fast", 0.8, 0.9, 2))) == "fast"
    # Of no price.
    assert (
        recommend(result_of(score("server", 0.8, 0.9, 9, 0.5), score("here", 0.8, 0.9))) == "here"
    )
    assert recommend(result_of(unsure)) is None


def test_a_fit_is_read_back_whatever_its_candidates_change(tmp_path):
    changes = {
        "engine.max_num_seqs": 8,
        "model.endpoint": {"url": "http://h"},
        "model.adapter": None,
    }
    result = result_of(score("a", 0.1, 0.2, changes=changes))
    records.write(str(tmp_path / "fit.json"), result)
    assert records.read(FitResult, str(tmp_path / "fit.json")) == result


def test_a_candidate_has_a_folder_for_each_of_its_settings(yaml_of, monkeypatch):
    """Weights of another position gap are trained anew; under other prices or engines an estimate
    is made anew.
    """
    outputs = []
    monkeypatch.setattr(
        candidate, "run_training", lambda config, **_: outputs.append(config.output.path) or 1 / 0
    )
    for keys in ([], [], ["decoding.max_value_tokens=11"], ["training.seed=5"]):
        context = labels.FitContext(load_config(yaml_of(), keys), "/f", False, quiet)
        with pytest.raises(ZeroDivisionError):
            candidate.train(context, "full", TRAINED["full"], 9, 1.0)
    assert (outputs[0] == outputs[1], len(set(outputs))) == (True, 3)
    monkeypatch.setattr(records, "read", lambda kind, path: outputs.append(path) or 1 / 0)
    keys = (
        "cost.budget_usd=5",
        "cost.budget_usd=6",
        "cost.prices.local=2",
        "engine.max_num_seqs=8",
        "fit.sample=5",
    )
    for key in keys:
        context = labels.FitContext(load_config(yaml_of(), [key]), "/f", False, quiet)
        with pytest.raises(ZeroDivisionError):
            candidate.measure(context, score("full", 0.1, 0.2))
    assert (outputs[4] == outputs[5], len(set(outputs[4:]))) == (True, 4)


def test_what_is_missing_is_said():
    near = result_of(
        score("near", 0.66, 0.74, labels=100), curve=(score("near", 0.5, 0.7, labels=50),)
    )
    # (0.08 / 0.04) ** 2 times as many.
    assert "about 200 test documents would tell, and there are 50" in missing(near)
    assert "from 50 to 100 labels it gained +0.040: more labels would help" in missing(near)
    assert "above the F1 of the teacher itself, 0.600" in missing(
        result_of(score(TEACHER, 0.5, 0.6))
    )
    assert (
        missing(result_of(CandidateScore(name="a", method="", error="broke")))
        == "no candidate could be scored"
    )


def test_terminal_and_page_show_what_failed_and_run_nothing(tmp_path):
    bad = CandidateScore(
        name="<script>alert(1)</script>", method="", error="<img src=x onerror=alert(1)>"
    )
    result = result_of(score("good", 0.8, 0.9), bad, gold=False)
    result.path = str(tmp_path)
    html = Path(page.write(result, "because")).read_text()
    assert ("<script>alert" in html, "<img" in html, "&lt;img" in html) == (False, False, True)
    shown = page.describe(result, "because")
    says(shown, "agreement with the teacher", "none is surely at fit.f1_floor, 0.7: because")
