"""A cascade's second model answers what the first is not sure of, and nothing else."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pyarrow.dataset as ds
import pytest
from pydantic import ValidationError

from raypd.answering.components import WorkerComponents, build
from raypd.answering.request_queue import answer
from raypd.billing import book
from raypd.billing.meter import Meter
from raypd.cluster.driver import run_extract
from raypd.decoding.counts import Finished, TokenCounts
from raypd.errors import ConfigError, InputError, RunError
from raypd.estimation.profile import DocumentCost
from raypd.evaluation import cascade as tuning
from raypd.run.usage import UsageKey
from raypd.tasks import trained_on
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.cascade import Cascade
from raypd.tasks.columns import columns_of, rows_of, value_row
from raypd.verify.verification import verify
from tests.models.test_endpoint import completion, server
from tests.runs import (
    TITLES,
    config_tree,
    extraction,
    run_config,
    run_here,
    with_keys,
    write_jsonl,
    write_rows,
)

SHOES = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
SECOND = {"model": {"name": "fake"}}


def rows(brand, sure_brand, size, sure_size, brand_span=None):
    """A record's columns as a model gives them."""
    values = [("Brand", brand, sure_brand, brand_span), ("Size", size, sure_size, None)]
    listed = []
    for name, value, sure, span in values:
        row = value_row(name, value, "ok" if value else "null", sure)
        row["span"] = span
        row["span_exact"] = None if span is None else True
        row["window"] = None
        listed.append(row)
    record = {"Brand": brand, "Size": size}
    return {"category": "shoes", "record": record, "values": listed, "truncated": False}


class ScriptedTask:
    """A request a document, whose answer is looked up by its id: columns, or the reason of an
    error.
    """

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def plan(self, documents):
        for document in documents:
            self.asked.append(document.id)
            if isinstance(self.answers[document.id], Exception):
                raise self.answers[document.id]
            yield Request([document.index], document.id, lambda _, d=document: [self.record(d)])

    def record(self, document):
        reply = self.answers[document.id]
        if isinstance(reply, str):
            return Record(document.index, error=reply)
        return Record(document.index, reply)


class LastInFirstOut:
    """An engine whose programs end in the reverse of their order."""

    patience = None
    waiting = ""

    def __init__(self):
        self.sequences = []

    @property
    def pending(self):
        return len(self.sequences)

    def submit(self, program, *, tag, sampling=None, seed=0):
        self.sequences.append(Finished(tag, program, None, TokenCounts()))

    def step(self):
        return [self.sequences.pop()]


def scripted(answers):
    """What a worker is built from that gives these answers."""
    return lambda *_: WorkerComponents(
        LastInFirstOut(), ScriptedTask(answers), None, max_num_seqs=8
    )


def cascaded(first, second, **settings):
    """({id: row}, what the second model was asked)."""
    config = run_config(SHOES, cascade={**SECOND, **settings})
    tasks = ScriptedTask(first), ScriptedTask(second)
    parts = build(
        with_keys(
            config, cascade={"model": None}, model={"name": "fake", "fake": {"load_seconds": 0}}
        ),
        None,
    )
    parts.task, parts.engine = (
        Cascade(*tasks, config.cascade, config.task.categories),
        LastInFirstOut(),
    )
    records = answer(
        parts, [Document(index, name, {}) for index, name in enumerate(first)], Meter("", "guided")
    )
    assert [len(each) for each in records] == [1] * len(first)
    return dict(zip(first, (each[0] for each in records), strict=True)), tasks[1].asked


def test_values_under_the_threshold_are_the_second_model_s_and_say_so():
    first = {
        "sure": rows("Acme", 0.9, 42.0, 0.8),
        "brand": rows("Ac", 0.79, 42.0, 0.9),
        "null": rows("Acme", 0.95, None, 0.3),
        "unrated": rows("Acme", 0.95, 1.0, None),
        "failed": "too long",
    }
    records, asked = cascaded(
        first, {name: rows("Zeta", 0.5, 43.0, 0.5) for name in first}, under=0.8
    )
    assert sorted(asked) == ["brand", "null", "unrated"]
    assert records["failed"].error == "too long"
    columns = {name: record.columns for name, record in records.items() if record.error is None}
    found = {
        name: (one["record"], [v["model"] for v in one["values"]]) for name, one in columns.items()
    }
    assert found == {
        "sure": ({"Brand": "Acme", "Size": 42.0}, ["first", "first"]),
        "brand": ({"Brand": "Zeta", "Size": 42.0}, ["second", "first"]),
        **dict.fromkeys(
            ("null", "unrated"), ({"Brand": "Acme", "Size": 43.0}, ["first", "second"])
        ),
    }
    assert [value["confidence"] for value in records["brand"].columns["values"]] == [0.5, 0.9]


def test_of_every_100_documents_the_least_sure_share_is_asked_and_no_answer_is_an_error_row():
    records, _ = cascaded(
        {"a": rows("Acme", 0.1, 1.0, 0.1)}, {"a": "the server said 500"}, under=0.5
    )
    assert records["a"].error == "the cascade's second model: the server said 500"
    records, _ = cascaded(
        dict.fromkeys("abc", rows("Acme", 0.1, 1.0, 0.1)),
        dict.fromkeys("abc", ValueError("no")),
        under=0.5,
        share=0.9,
    )
    assert {record.error for record in records.values()} == {
        "the cascade's second model: ValueError: no"
    }
    sure = {f"d{n:03}": 0.001 * ((37 * n) % 250) for n in range(250)}  # all unsure, in no order
    first = {name: rows("Acme", confidence, 1.0, 0.9) for name, confidence in sure.items()}
    records, asked = cascaded(
        first, dict.fromkeys(first, rows("Zeta", 0.5, 2.0, 0.5)), under=0.8, share=0.07
    )
    # 4: of 3.5.
    groups = ((list(sure)[a:b], 7 if b < 250 else 4) for a, b in pairwise((0, 100, 200, 250)))
    assert set(asked) == {
        name for group, most in groups for name in sorted(group, key=sure.get)[:most]
    }
    brands = [record.columns["record"]["Brand"] for record in records.values()]
    assert brands.count("Zeta") == 7 + 7 + 4


@pytest.fixture(scope="module")
def answers_of():
    """The records of one configuration over some listings, with the embedded model."""
    texts = [f"Acme Trail {n} running shoe, size {36 + n}" for n in range(5)]
    documents = [Document(n, str(n), {"title": text}) for n, text in enumerate(texts)]

    def answers(max_value_tokens=30, **sections):
        decoding = {"method": "guided", "max_value_tokens": max_value_tokens}
        config = run_config(SHOES, input=TITLES, decoding=decoding, **sections)
        records = answer(build(config, None), documents, Meter("", "guided"))
        return [
            {value["name"]: value for value in record[0].columns["values"]} for record in records
        ]

    return answers


def test_two_real_models_answer_as_each_does_alone(answers_of):
    plain = answers_of()
    cut = answers_of(max_value_tokens=2)
    under = sorted(value["confidence"] for row in plain for value in row.values())[4]
    second = {"model": "smollm2-135m-instruct", "decoding": {"max_value_tokens": 2}}
    both = answers_of(cascade={**second, "under": under, "share": 1.0})
    alone = {"first": plain, "second": cut}
    assert {value["model"] for row in both for value in row.values()} == {"first", "second"}
    for n, row in enumerate(both):
        for name, value in row.items():
            assert value["model"] == ("second" if plain[n][name]["confidence"] < under else "first")
            same = alone[value["model"]][n][name] | {"model": value["model"]}
            # Rounded as the sums of a pass come out, which differ with what else it holds.
            assert value.pop("confidence") == pytest.approx(same.pop("confidence"), rel=1e-3)
            assert value == same


def test_a_run_asks_a_server_for_what_the_first_model_is_unsure_of_bills_each_resumes_and_verifies(
    tmp_path, ray_here
):
    path = write_jsonl(tmp_path / "in.jsonl", [f"Acme shoe {n}" for n in range(30)])
    fake = {"name": "fake", "fake": {"load_seconds": 0.0, "step_seconds": 0.001}}
    with server(lambda *_: completion('{"Brand": "Acme", "Size": 42}')) as (url, received):
        endpoint = {"url": url, "key_variable": None, "usd_per_million_answer_tokens": 5e4}
        sections = {
            "input": TITLES,
            "output": {"columns": "typed"},
            "model": fake,
            "cost": {"prices": {"local": 0.0}},
            "decoding": {"method": "autoregressive"},
            "cascade": {"model": {"name": "gpt", "endpoint": endpoint}, "share": 0.1},
        }
        cluster = {"address": "local", "unit_documents": 10, "max_workers": 1}
        config = run_config(SHOES, path, tmp_path / "out", cluster=cluster, **sections)
        with pytest.raises(RunError, match="cut off"):
            run_here(config, build=build, most=1)
        result = run_extract(config)
    # A fake model is never sure: one of ten.
    assert result.documents == 30
    assert result.ok == 30
    assert len(received) == 3
    assert verify(str(tmp_path / "out"), config).passed
    table = ds.dataset(tmp_path / "out" / "units").to_table().to_pylist()
    assert [(row["Brand"], row["Size"]) for row in table if row["Brand__model"] == "second"] == [
        ("Acme", 42)
    ] * 3
    (bill,) = book.bills(str(tmp_path / "out"))
    first = bill.categories[UsageKey("shoes", "first")]
    second = bill.categories[UsageKey("shoes", "second")]
    assert first["documents"] == 20
    assert second["documents"] == 0
    assert first["decode_tokens"] > second["decode_tokens"] == 20
    # And nothing for the first model's tokens.
    assert bill.parts["endpoint"] == pytest.approx(20 * 5e4 / 1e6)


def test_typed_rows_read_back():
    config = run_config(SHOES, cascade=SECOND, output={"columns": "typed"})
    columns = rows("Acme", 0.9, 42.0, 0.8)
    columns["values"] = [{**value, "model": "second"} for value in columns["values"]]
    (record,) = rows_of([Record(0, columns)], config)
    assert record.columns["Size__model"] == "second"
    assert {*record.columns} == {*columns_of(config).names}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"task": "generation"},
            "only an extraction can have a second model, not generation",
        ),
        (
            {"decoding": {"metod": "guided"}},
            r"cascade\.decoding\.metod: unknown key; .* lists all keys",
        ),
        (
            {"decoding": {"method": "apar"}},
            "cascade: decoding.method apar does not support extraction",
        ),
        ({"under": 1.5}, "under"),
    ],
)
def test_what_cannot_be_a_cascade_is_refused(sections, reason):
    task = sections.get("task", SHOES)
    cascade = SECOND | {key: value for key, value in sections.items() if key != "task"}
    with pytest.raises(ValidationError, match=reason):
        run_config(task, cascade=cascade)


def test_only_a_cascade_that_is_there_changes_the_fingerprint():
    def fingerprint(**cascade):
        return run_config(SHOES, cascade=cascade).fingerprint()

    assert fingerprint() == fingerprint(under=0.3)
    assert (
        len(
            {
                fingerprint(),
                fingerprint(**SECOND),
                fingerprint(**SECOND, under=0.3),
            }
        )
        == 3
    )


def test_the_lowest_threshold_that_surely_holds_the_floor_is_taken(tmp_path, monkeypatch):
    """100 documents: the first model is right where it is at least 0.6 sure, the second always, at
    3 times the cost.
    """
    lines = (
        {
            "sku": n,
            "title": f"shoe {n}",
            "target": {"Brand": "Acme", "Size": n + 1},
        }
        for n in range(100)
    )
    labels = write_rows(tmp_path / "labels.jsonl", lines)
    profiled = []

    def profile(config, documents, limit, label):
        profiled.append(label)
        second = config.model.name == "fake"
        costs = []
        for number in (int(document.id) for document in documents):
            brand = "Acme" if second or number >= 60 else "Nobody"
            answer = rows(brand, 1.0 if second else number / 100, number + 1.0, 1.0)
            costs.append(DocumentCost(3.0 if second else 1.0, 1, 1, 1, [answer]))
        return SimpleNamespace(costs=costs, seconds=1.0)

    monkeypatch.setattr(
        tuning, "RemoteProfiler", lambda *_: nullcontext(SimpleNamespace(profile=profile))
    )
    monkeypatch.setattr(tuning, "check_model", lambda config: None)
    # The corpus; the labels are JSON lines.
    table = TITLES | {"id_column": "sku", "format": "delta", "version": 3}
    config = run_config(
        SHOES,
        tmp_path / "table",
        tmp_path / "out",
        input=table,
        cascade=SECOND,
    )
    result = tuning.tune_cascade(config, str(labels), 0.9, 100)
    tried = [trial.under for trial in result.trials]
    assert tried == sorted(tried, reverse=True)
    # The first that fails ends it.
    assert result.trials[-1].f1.low < 0.9 <= result.trials[-2].f1.low
    assert result.best is result.trials[-2]
    by = {trial.under: trial for trial in result.trials}
    assert by[0.6].f1.value == 1.0
    assert by[0.6].asked == pytest.approx(0.6)
    assert by[0.6].seconds == pytest.approx(1.0 + 0.6 * 3.0)
    assert result.first.f1.value == pytest.approx(0.7)
    assert result.first.seconds == 1.0
    assert result.second.f1.value == 1.0
    assert result.second.seconds == 3.0
    assert f"cascade.under: {result.best.under:g} holds 0.9" in tuning.describe_cascade(result)
    impossible = tuning.tune_cascade(config, str(labels), 1.1, 100)
    assert impossible.best is None
    assert "no threshold is certain to reach 1.1" in tuning.describe_cascade(impossible)
    weights = tmp_path / "adapter"
    weights.mkdir()
    trained_on([Document(n, str(n), {}) for n in range(20)], []).write(weights)
    adapted = with_keys(config, model={"adapter": str(weights)})
    result = tuning.tune_cascade(adapted, str(labels), 0.9, 100)
    assert (result.documents, result.left_out) == (80, 20)
    assert "20 documents trained or validated a model" in tuning.describe_cascade(result)
    trained_on([Document(n, str(n), {}) for n in range(100)], []).write(weights)
    with pytest.raises(InputError, match="trained on all of these documents"):
        tuning.tune_cascade(adapted, str(labels), 0.9, 100)
    profiled.clear()
    with pytest.raises(
        InputError, match=r"no document has labels in training.labels_column \('gold'\)"
    ):
        tuning.tune_cascade(
            with_keys(config, training={"labels_column": "gold"}), str(labels), 0.9, 100
        )
    assert profiled == []  # that is known before anything is decoded
    with pytest.raises(ConfigError, match="name the second model"):
        tuning.tune_cascade(run_config(**config_tree(SHOES)), str(labels), 0.9, 100)
