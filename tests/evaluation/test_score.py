"""Figures by hand, scikit-learn's and SQuAD's rules; calibration against known chances; the page of
`evaluate`.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypd import storage
from raypd.answering.components import build
from raypd.cli.main import app
from raypd.cluster import driver
from raypd.config import ModelConfig
from raypd.errors import ConfigError, InputError, ModelError
from raypd.evaluation import page, score
from raypd.evaluation.calibrate import calibrate_run
from raypd.evaluation.calibration import LabelledValue, calibrate, calibration_error, reliability
from raypd.evaluation.score import NN, NV, VC, VN, VW, evaluate, labelled_values
from raypd.tasks.calibration import FILE, Calibration, calibration_of
from tests.report.browser import PHONE, browser, open_page  # noqa: F401
from tests.runs import TITLES, extraction, run_config, with_keys, write_jsonl, write_rows
from tests.tasks.test_cascade import rows, scripted
from tests.tasks.test_extraction import answers, document, make

GOLD = {  # id -> (brand, size, label)
    "right": ("acme", 42.0, {"Brand": "Acme", "Size": 42}),
    "another": ("Zeta", 42.0, {"Brand": "Acme", "Size": 42}),
    "part": ("Ac", 42.0, {"Brand": "Acme", "Size": 42}),
    "more": ("Acme Inc", 42.0, {"Brand": "Acme", "Size": 42}),
    "invented": ("Acme", 42.0, {"Brand": "Acme", "Size": None}),
    "failed": (None, None, {"Brand": "Acme", "Size": 1}),
    "missing": (None, None, {"Brand": "Acme", "Size": None}),
    "accepted": ("A.C.M.E.", None, {"Brand": "Acme", "Size": None}),
}


@pytest.mark.parametrize(
    ("answer", "forms", "outcome"),
    [
        ("Acme", ["acme "], VC),
        ("Acme", ["Zeta"], VW),
        (None, ["Zeta"], VN),
        ("Acme", [None], NV),
        (None, [None], NN),
        (7.0, ["7"], VC),
        (7.5, [7.5], VC),
        (True, [True], VC),
        ("red", ["Red", "red patent"], VC),
        (12345.67, [12345.69], VW),
        (12345.67, ["12345.69"], VW),
        ("12345.67", [12345.67], VC),
        (0.1 + 0.2, ["0.3"], VC),
        ([5.0, "CAF\u00c9"], [[5, "caf\u00e9 "]], VC),
        ([{"item": "Cup", "n": 2.0}], [[{"n": 2, "item": "cup", "note": None}]], VC),
        ([1.0], [[2]], VW),
        ([{"item": "Cup", "n": None}], [[{"item": "cup"}]], VC),
        ([{"item": "cup"}], [[{"note": "cup"}]], VW),
    ],
)
def test_outcome_of_a_value(answer, forms, outcome):
    assert score.outcome(answer, forms) == outcome


def test_a_number_may_be_off_by_what_a_unit_rounds():
    assert [score.outcome(answer, [204], 0.02) for answer in (205, 200.0, 209, "204", None)] == [
        VC,
        VC,
        VW,
        VC,
        VN,
    ]
    assert score.outcome(True, [1], 0.02) == VW


def test_f1_is_scikit_learns():
    """Micro F1 over (document, attribute, value) pairs as sets, which is how it is defined for
    extraction.
    """
    draw = np.random.default_rng(0)
    metrics = pytest.importorskip("sklearn.metrics")
    sums, gold_pairs, given_pairs = np.zeros(5), set(), set()
    for i in range(200):
        gold, answer = draw.choice(["a", "b", ""], 2)
        sums[score.outcome(answer or None, [gold or None])] += 1
        gold_pairs |= {(i, gold)} if gold else set()
        given_pairs |= {(i, answer)} if answer else set()
    pairs = sorted(gold_pairs | given_pairs)
    truth, predicted = (
        [pair in gold_pairs for pair in pairs],
        [pair in given_pairs for pair in pairs],
    )
    assert score._f1(sums) == pytest.approx(metrics.f1_score(truth, predicted))
    assert score._METRICS["strict precision"][1](sums) == pytest.approx(
        metrics.precision_score(truth, predicted)
    )
    assert score._METRICS["strict recall"][1](sums) == pytest.approx(
        metrics.recall_score(truth, predicted)
    )


def test_scored_looks_at_the_listed_attributes_and_all_accepted_forms():
    labels = {
        "target": {"Brand": "Acme", "Color": "red", "Size": None},
        "scored": ["Color"],
        "accepted": {"Color": ["red", "dark red"]},
    }
    parts = score._of_record(
        {"Brand": "Zeta", "Color": "Dark  red", "Size": "7"}, labels["target"], labels, 0.0
    )
    assert parts["scored"] == [1, 0, 0, 0, 0]
    assert parts["scored exact"] == [0, 1, 0, 0, 0]  # ExtractGPT compares case
    assert parts["strict"] == [0, 2, 1, 0, 0]


def test_questions_are_compared_as_squad_does():
    questions = [
        {"id": "a", "answers": ["the Seine river"]},
        {"id": "b", "answers": []},
        {"id": "c", "choices": ["x", "y"], "answers": ["y"], "answer_idx": [1]},
        {"id": "d", "answers": ["Rollo"]},
        {"id": "e", "answers": []},  # failed: no answer is not the right answer
        {"id": "f", "choices": ["x", "y", "z"], "answer_idx": [0, 2], "multi_select": True},
        {"id": "g", "choices": ["x", "y", "z"], "answer_idx": [0, 2], "multi_select": True},
    ]
    answered = (
        ("a", "Seine, a river!", None),
        ("b", None, None),
        ("c", "y", 1),
        ("f", "A, C", None),
        ("g", "AB", None),
    )
    rows = [
        dict(zip(("question_id", "answer", "choice_index"), row, strict=True)) for row in answered
    ]
    assert score._of_questions(rows, questions) == {
        "exact match": [2, 4],
        "token F1": [2, 4],
        "accuracy": [2, 3],
    }
    assert score._token_f1("in the Seine", "Seine river") == pytest.approx(0.5)


def test_intervals_are_scipys_and_pairs_are_narrower():
    stats = pytest.importorskip("scipy.stats")
    right = np.random.default_rng(1).random(300) < 0.7
    scores = [score.Score("", {"exact match": [float(r), 1.0]}) for r in right]
    flipped = right.copy()
    flipped[:6] ^= True
    flipped_scores = [score.Score("", {"exact match": [float(r), 1.0]}) for r in flipped]
    measure = score._measure("exact match", score._METRICS["exact match"], scores)
    assert measure is not None
    expected = stats.bootstrap(
        (right.astype(float),), np.mean, method="percentile", rng=0
    ).confidence_interval
    assert (measure.low, measure.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    (difference,) = score._differences(scores, flipped_scores)
    assert difference.ours - difference.theirs == pytest.approx(right.mean() - flipped.mean())
    assert difference.high - difference.low < (measure.high - measure.low) / 2


def test_a_run_against_its_labels(config, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_jsonl(tmp_path / "in.jsonl", ["x" * (i + 1) for i in range(6)])
    run = with_keys(config(str(path)), model={"name": "fake"})
    driver.run_extract(run, build=build)
    rows = [{"id": str(i), "gold": {"a": None, "never asked": "x"}} for i in (0, 1, 99)]
    labels = write_rows(tmp_path / "labels.jsonl", rows)
    with pytest.raises(
        InputError,
        match="has 'target', 'questions', 'reference', or columns called as its attributes",
    ):
        score.evaluate(run.output.path, str(labels))
    result = score.evaluate(run.output.path, str(labels), run.output.path, labels_column="gold")
    assert (result.unlabelled, result.missing) == (4, 1)
    figures = {measure.name: measure.value for measure in result.measures}
    assert (figures["null everywhere"], result.not_asked, figures["values right"]) == (1.0, 2, 0.0)
    assert all(d.ours == d.theirs and d.low == d.high == 0 for d in result.differences)
    assert "values right" in score.describe(result)
    table = tmp_path / "labels.csv"
    table.write_text("id;a;never asked\n0;;x\n1;;x\n99;;x\n")
    assert score.evaluate(run.output.path, str(table)).measures == result.measures
    labels.with_suffix(".json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), labels.with_suffix(".parquet"))
    labels.with_suffix(".gz").write_bytes(gzip.compress(labels.read_bytes()))
    for form in (".json", ".parquet", ".gz"):
        scored = score.evaluate(
            run.output.path, str(labels.with_suffix(form)), labels_column="gold"
        )
        assert scored.measures == result.measures
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"title": "x" * n, "gold": {"a": None}} for n in (1, 3)]
    )
    without_ids = with_keys(
        config(str(rows)), model={"name": "fake"}, input={"id_column": None}, output={"path": "n"}
    )
    driver.run_extract(without_ids, build=build)
    assert score.evaluate("n", str(rows), labels_column="gold").missing == 0
    table.write_text("id,a\n0\n")
    with pytest.raises(
        InputError, match=r"labels\.csv: cannot be read: line 2: 1 field where the header has 2"
    ):
        score.evaluate(run.output.path, str(table))
    with pytest.raises(InputError, match=r"no such file or folder; did you mean .*labels.jsonl"):
        score.evaluate(run.output.path, str(tmp_path / "label.jsonl"))
    labels.write_text('{"id": "0", "questions": [{"question": "Who?"}]}\n')
    with pytest.raises(
        InputError, match=r"labels\.jsonl:1: a question without a list of 'answers'"
    ):
        score.evaluate(run.output.path, str(labels))
    row = b'{"id": "0", "target": {"a": %d}}\n'
    labels.write_bytes(row % 1 + row % 1 + row % 2)
    with pytest.raises(InputError, match=r"labels\.jsonl:3: the id '0' has other labels above"):
        score.evaluate(run.output.path, str(labels))
    labels.write_text('{"id": "0", "reference": "x"}\n')
    with pytest.raises(InputError, match=r"another kind of task than .*'turn'"):
        score.evaluate(run.output.path, str(labels))
    for data, words in (
        (b"[]\n", ":1: expected an object"),
        (b"\xe9", ":1: not JSON"),
        (b"[" * 99_999, ":1: not"),
    ):
        labels.write_bytes(data)
        with pytest.raises(InputError, match=r"labels\.jsonl" + words):
            score.evaluate(run.output.path, str(labels))


def test_a_row_of_the_input_with_its_columns_is_a_label(config, tmp_path, in_process):
    """Names of labels may be those of its columns; its id is in the run's column; JSON does not
    escape U+2028.
    """
    row = {
        "sku": 7,
        "id": "of another",
        "title": "x\u2028y\x85",
        "questions": "Who?",
        "scored": 1,
        "accepted": "a",
    }
    path, labels = tmp_path / "in.jsonl", tmp_path / "labels.jsonl"
    path.write_text(json.dumps(row))
    run = with_keys(config(str(path), id_column="sku"), model={"name": "fake"})
    driver.run_extract(run, build=build)
    labels.write_text(
        json.dumps({**row, "target": {"a": None}}, ensure_ascii=False), encoding="utf-8-sig"
    )
    last = score.evaluate(run.output.path, str(labels)).measures[-1]
    assert (last.name, last.value) == ("null everywhere", 1)


def test_columns_of_labels_are_typed_by_the_category_of_their_row(tmp_path, monkeypatch):
    asked = {
        "shoes": [{"name": "Size", "type": "number"}],
        "hats": [{"name": n} for n in ("Size", "Color", "Note")],
    }
    task = {"categories": {name: {"attributes": attributes} for name, attributes in asked.items()}}
    source = {"category_column": "kind", "text_columns": ["Note"]}  # the latter is no label
    monkeypatch.setattr(score, "_config", lambda run: {"input": source, "task": task})
    (tmp_path / "labels.csv").write_text("id,kind,Size,Color,Note\n1,shoes,7,,x\n2,hats,7,red,x\n")
    labels = score.read_labels(str(tmp_path / "labels.csv"), "target", "run").values()
    assert [row["target"] for row in labels] == [{"Size": 7.0}, {"Size": "7", "Color": "red"}]


@pytest.fixture
def run(tmp_path, in_process):
    """(the folder of a run, its labels)."""
    documents = [
        {"id": name, "title": f"<img src=x onerror=alert(1)> {name} Zeta"} for name in GOLD
    ]
    corpus = write_rows(tmp_path / "in.jsonl", documents)
    accepted = {"Brand": ["Acme", "A.C.M.E."]}
    rows_of_labels = (
        {"id": name, "target": gold[-1], "accepted": accepted} for name, gold in GOLD.items()
    )
    labels = write_rows(tmp_path / "labels.jsonl", rows_of_labels)
    answers = {name: rows(brand, 0.9, size, 0.25) for name, (brand, size, _) in GOLD.items()} | {
        "failed": "too long"
    }
    task = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
    config = run_config(task, corpus, tmp_path / "run", input=TITLES, model={"name": "fake"})
    driver.run_extract(config, build=scripted(answers))
    return config.output.path, str(labels)


def test_a_failed_document_is_held_to_what_the_run_asked_for(run, tmp_path):
    """It has no row that names its category: the only one of the run is its, on the page, too."""
    (tmp_path / "labels.jsonl").write_text(
        '{"id": "failed", "target": {"Brand": "Acme", "Size": 1, "Color": "red"}}'
    )
    evaluation = evaluate(*run)
    assert (evaluation.failed, evaluation.not_asked) == (1, 1)
    mistakes, by_attribute = page.find(*run, "target", 0.0)
    assert [[value.attribute for value in document.values] for document in mistakes] == [
        ["Brand", "Size"]
    ]
    assert by_attribute.keys() == {("shoes", "Brand"), ("shoes", "Size")}


def test_every_wrong_value_has_its_reason(run):
    mistakes, by_attribute = page.find(*run, "target", 0.0)
    assert {
        document.id: [(v.attribute, v.reason) for v in document.values] for document in mistakes
    } == {
        "another": [("Brand", "another value")],
        "part": [("Brand", "a part of the label")],
        "more": [("Brand", "more than the label")],
        "invented": [("Size", "no label")],
        "missing": [("Brand", "missing")],
        "failed": [("Brand", "no answer"), ("Size", "no answer")],
    }
    assert by_attribute["shoes", "Brand"] == {
        "right": 3,
        "another value": 1,
        "a part of the label": 1,
        "more than the label": 1,
        "missing": 1,
        "no answer": 1,
    }


def test_the_page_in_a_browser(run, browser):  # noqa: F811
    where = page.write(*run, evaluate(*run), "target", 0.0)
    tab, requests, errors = open_page(browser, Path(where), viewport=PHONE)
    assert (requests, errors, tab.locator("article").count()) == ([Path(where).as_uri()], [], 6)
    cells = tab.locator("figure tbody tr").last.locator("th, td").all_text_contents()
    # Of the brands three are right.
    assert [cell.strip() for cell in cells] == ["this run", "0.90", "0.43", "7"]
    another = tab.locator("article", has_text="another")
    assert another.locator("mark").all_inner_texts() == ["Zeta"]
    assert (
        " ".join(another.locator("tbody tr").first.inner_text().split())
        == "Brand Acme Zeta another value 0.90"
    )
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize(
    ("lost", "words"), [("in.jsonl", "evaluation.html\n"), ("run/run.json", "no page: ")]
)
def test_without_the_input_or_the_run_s_configuration_the_figures_stand(run, tmp_path, lost, words):
    (tmp_path / lost).unlink()
    done = CliRunner().invoke(app, ["evaluate", *run], env={"COLUMNS": "500"})
    assert (done.exit_code, "values right" in done.output, words in done.output) == (
        0,
        True,
        True,
    ), done.output
    if lost == "in.jsonl":
        html = Path(tmp_path, "run", page.PAGE).read_text()
        assert ("Without the documents" in html, html.count("<article")) == (True, 6)


def drawn(count: int, seed: int) -> list[LabelledValue]:
    """Values that are surer than right: by a power, the more for Color, the less where they stand
    in the document.
    """
    draw, values = np.random.default_rng(seed), []
    for number in range(count):
        attribute, sure, stands = (
            ("Brand", "Color")[number % 2],
            draw.uniform(0.3, 1.0),
            bool(draw.random() < 0.5),
        )
        chance = sure ** {"Brand": 2, "Color": 6}[attribute] * (1.0 if stands else 0.6)
        values.append(
            LabelledValue("shoes", attribute, sure, False, stands, bool(draw.random() < chance))
        )
    return values


@pytest.mark.parametrize("count", [400, 4000])
def test_calibrated_confidences_are_the_share_of_right_values(count):
    made, fresh = calibrate(drawn(count, 0)), drawn(4000, 1)
    assert calibration_error(reliability(fresh)) > 0.3
    assert calibration_error(reliability(fresh, made)) < 0.04
    for kind in (
        {"attribute": "Color"},
        {"attribute": "Brand"},
        {"stands": True},
        {"stands": False},
    ):
        values = [value for value in fresh if kind.items() <= vars(value).items()]
        assert calibration_error(reliability(values, made)) < 0.07, kind


def test_the_error_is_the_mean_gap_and_weights_of_any_size_give_a_confidence():
    rights = [(0.05, False), (0.15, True), (0.15, False), (1.0, True)]
    points = reliability(
        [LabelledValue("", "", confidence, False, False, right) for confidence, right in rights]
    )
    assert points == [(0.05, 0.0, 1), (0.15, 0.5, 2), (1.0, 1.0, 1)]
    assert calibration_error(points) == pytest.approx((0.05 * 1 + 0.35 * 2) / 4)
    wide, *_ = page.reliability_chart({"accent": ("this run", points)}, "").forms.values()
    assert wide.count("s-accent") == 1 + len(points)  # a line, and a dot each
    sure = [
        Calibration([w, 0, 0, 0], 0.0, {}).confidence("c", "a", 0.01, False, False)
        for w in (1e6, 0.0, -1e6)
    ]
    assert sure == [0.0, 0.5, 1.0]


def test_a_task_calibrates_and_leaves_out_what_is_unsure(tmp_path, monkeypatch):
    path = tmp_path / FILE
    Calibration([0.5, 0.0, 1.0, 2.0], -0.5, {"shoes/Brand": 0.3}).write(path)
    each = (
        {},
        {"model": {"calibration": str(path)}},
        {"output": {"path": "out", "min_confidence": 0.999}},
    )
    (plain,), (calibrated,), (strict,) = (
        answers(make(**keys), [document(0)]).values() for keys in each
    )
    made = calibration_of(ModelConfig(calibration=str(path)))
    assert made is not None
    for before, after in zip(plain.columns["values"], calibrated.columns["values"], strict=True):
        place = ("shoes", before["name"], before["confidence"])
        expected = made.confidence(
            *place, null=before["value"] is None, stands=before["span"] is not None
        )
        assert after == {**before, "confidence": pytest.approx(expected)}
    unsure = [value for value in strict.columns["values"] if value["status"] == "unsure"]
    assert unsure
    for value in unsure:
        assert (value["value"], value["confidence"] < 0.999, bool(value["raw"])) == (
            None,
            True,
            True,
        )
        assert json.loads(strict.columns["record"])[value["name"]] is None
    monkeypatch.setattr(
        storage, "read", {"s3://b/weights/calibration.json": path.read_bytes()}.__getitem__
    )
    monkeypatch.setattr(storage, "exists", lambda path: True)
    assert calibration_of(ModelConfig(name="s3://b/weights")) == made


def test_the_command_writes_what_a_run_reads(config, tmp_path, in_process, monkeypatch):
    run = with_keys(
        config(str(write_jsonl(tmp_path / "in.jsonl", ["x", "xx"]))), model={"name": "fake"}
    )
    driver.run_extract(run, build=build)
    labels, output = tmp_path / "labels.jsonl", str(tmp_path / "made.json")
    labels.write_text('{"id": "0", "target": {"a": "b"}}')
    with pytest.raises(ConfigError, match="lie in no folder here; --output names a file"):
        calibrate_run(run.output.path, str(labels))
    with pytest.raises(InputError, match="0 labelled values"):  # the fake engine is never sure
        calibrate_run(run.output.path, str(labels), output)
    monkeypatch.setattr("raypd.evaluation.calibrate.labelled_values", lambda *_: drawn(400, 0))
    beside = lambda *_: calibration_of(ModelConfig(calibration=output))  # noqa: E731
    for _ in range(2):
        assert "fitted on 400 values" in calibrate_run(run.output.path, str(labels), output)
        monkeypatch.setattr("raypd.evaluation.calibrate.calibration_of", beside)
    calibrated = with_keys(
        run, model={"calibration": output}, output={"path": str(tmp_path / "next")}
    )
    assert calibrated.fingerprint() != run.fingerprint()
    driver.run_extract(calibrated, build=build)
    with pytest.raises(ConfigError, match="calibrated already; run it with model"):
        calibrate_run(calibrated.output.path, str(labels), output)
    strict = with_keys(run, output={"path": str(tmp_path / "strict"), "min_confidence": 0.5})
    driver.run_extract(strict, build=build)
    with pytest.raises(ConfigError, match="took unsure values away"):
        calibrate_run(strict.output.path, str(labels), output)
    (tmp_path / FILE).write_bytes(Path(output).read_bytes())
    there = [
        calibration_of(ModelConfig(name=str(tmp_path)), method)
        for method in ("guided", "hyper_parallel")
    ]
    assert there == [beside(), None]


def test_the_labels_of_a_run_are_joined_by_attribute(monkeypatch):
    """A null is right where the label is null, and only there; an unsure value, which was no null,
    is left out.
    """
    names = {"Size": "size.eu", "Color": "Color", "Fit": "Fit", "Sport": "Sport", "Sole": "Sole"}
    record = {"size": {"eu": "7"}, "Color": None, "Fit": None, "Sport": "golf", "Sole": None}
    texts = {"Size": "7", "Color": None, "Fit": None, "Sport": "golf"}
    values = [
        {"name": name, "value": text, "confidence": 0.5, "span": None}
        for name, text in texts.items()
    ]
    values.append(
        {"name": "Sole", "value": None, "confidence": 0.3, "span": None, "status": "unsure"}
    )
    row = {"id": "0", "category": "shoes", "record": json.dumps(record), "values": values}
    target = {"size": {"eu": "8"}, "Color": None, "Fit": "wide", "Sport": None, "Sole": None}
    gold = {"id": "0", "target": target, "accepted": {"size.eu": ["8", "7"]}}
    monkeypatch.setattr(score, "read_answers", lambda run: {"0": [row], "1": []})
    monkeypatch.setattr(score, "read_labels", lambda *_: {"0": gold})
    monkeypatch.setattr(score, "asked_attributes", lambda run: {"shoes": names})
    joined = [
        (value.attribute, value.null, value.right) for value in labelled_values("run", "labels")
    ]
    assert joined == [
        ("Size", False, True),
        ("Color", True, True),
        ("Fit", True, False),
        ("Sport", False, False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"weights": [1], "intercept": 0, "attributes": {}}',
        "[1]",
        pytest.param("[" * 100_000, id="deep"),
        *(
            f'{{"weights": [1, 1, 1, {weight}], "intercept": 0, "attributes": {attributes}}}'
            for weight, attributes in (
                ("1", "[]"),
                ("1", "null"),
                ("1", '{"c/a": "x"}'),
                ("NaN", "{}"),
            )
        ),
    ],
)
def test_a_file_that_is_none_is_refused(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelError, match=r"calibration\.json: cannot be read"):
        calibration_of(ModelConfig(name=str(tmp_path)))
    assert calibration_of(ModelConfig(name=str(tmp_path), calibration="none")) is None
