"""Scores against labels, calibration, and the page of `raypd evaluate`.

Figures are compared with hand-made ones, with scikit-learn and scipy, and with the rules of SQuAD;
calibrations with known chances.
"""

import gzip
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypd import storage
from raypd.answering.components import build
from raypd.cli import main
from raypd.cli.main import app
from raypd.cluster import driver
from raypd.config import ModelConfig
from raypd.errors import ConfigError, InputError, ModelError
from raypd.evaluation import calibration_file, labels as label_files, page, score
from raypd.evaluation.calibration import (
    LabelledValue,
    calibration_error,
    fit_calibration,
    is_improved,
    reliability,
)
from raypd.evaluation.outcome import (
    NN,
    NV,
    VC,
    VN,
    VW,
    outcome,
    parts_of_questions,
    parts_of_record,
    token_f1,
)
from raypd.evaluation.score import evaluate, labelled_values
from raypd.report import labels_of_page
from raypd.run import layout
from raypd.tasks import Document, trained_on
from raypd.tasks.calibration import FILE, Calibration, calibration_of
from tests.report.browser import PHONE, browser, open_page  # noqa: F401
from tests.runs import (
    FAKE,
    TITLES,
    extraction,
    run_config,
    says,
    with_keys,
    write_jsonl,
    write_rows,
)
from tests.tasks.test_cascade import rows, scripted
from tests.tasks.test_extraction import answers, document, make

# Document id -> (the run's brand, the run's size, the labels).
GOLD = {
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
    ("answer", "forms", "expected"),
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
def test_a_value_is_compared_with_all_forms_of_its_label(answer, forms, expected):
    assert outcome(answer, forms) == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [(205, VC), (200.0, VC), (209, VW), ("204", VC), (None, VN)]
)
def test_a_number_may_differ_by_the_tolerance(answer, expected):
    assert outcome(answer, [204], 0.02) == expected


def test_a_boolean_is_no_number():
    assert outcome(True, [1], 0.02) == VW


def test_f1_equals_scikit_learns():
    """Micro F1 is defined over (document, value) pairs as sets."""
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    sums = np.zeros(5)
    gold_pairs = set()
    answer_pairs = set()
    for number in range(200):
        gold, answer = draw.choice(["a", "b", ""], 2)
        sums[outcome(answer or None, [gold or None])] += 1
        if gold:
            gold_pairs.add((number, gold))
        if answer:
            answer_pairs.add((number, answer))
    pairs = sorted(gold_pairs | answer_pairs)
    truth = [pair in gold_pairs for pair in pairs]
    predicted = [pair in answer_pairs for pair in pairs]
    f1 = score.METRICS["strict F1"].figure(sums)
    precision = score.METRICS["strict precision"].figure(sums)
    recall = score.METRICS["strict recall"].figure(sums)
    assert f1 == pytest.approx(metrics.f1_score(truth, predicted))
    assert precision == pytest.approx(metrics.precision_score(truth, predicted))
    assert recall == pytest.approx(metrics.recall_score(truth, predicted))


def test_scored_counts_the_listed_attributes_with_all_accepted_forms():
    labels = {
        "target": {"Brand": "Acme", "Color": "red", "Size": None},
        "scored": ["Color"],
        "accepted": {"Color": ["red", "dark red"]},
    }
    record = {"Brand": "Zeta", "Color": "Dark  red", "Size": "7"}
    parts = parts_of_record(record, labels["target"], labels, 0.0)
    assert parts["scored"] == [1, 0, 0, 0, 0]
    assert parts["scored exact"] == [0, 1, 0, 0, 0]  # ExtractGPT compares case
    assert parts["strict"] == [0, 2, 1, 0, 0]


def test_questions_are_compared_as_squad_does():
    questions = [
        {"id": "a", "answers": ["the Seine river"]},
        {"id": "b", "answers": []},
        {
            "id": "c",
            "choices": ["x", "y"],
            "answers": ["y"],
            "answer_idx": [1],
        },
        {"id": "d", "answers": ["Rollo"]},
        {"id": "e", "answers": []},  # it failed, and no answer is not the right answer
        {
            "id": "f",
            "choices": ["x", "y", "z"],
            "answer_idx": [0, 2],
            "multi_select": True,
        },
        {
            "id": "g",
            "choices": ["x", "y", "z"],
            "answer_idx": [0, 2],
            "multi_select": True,
        },
    ]
    answer_rows = [
        {"question_id": "a", "answer": "Seine, a river!", "choice_index": None},
        {"question_id": "b", "answer": None, "choice_index": None},
        {"question_id": "c", "answer": "y", "choice_index": 1},
        {"question_id": "f", "answer": "A, C", "choice_index": None},
        {"question_id": "g", "answer": "AB", "choice_index": None},
    ]
    parts = parts_of_questions(answer_rows, questions)
    assert parts == {
        "exact match": [2, 4],
        "token F1": [2, 4],
        "accuracy": [2, 3],
    }


def test_token_f1_ignores_articles_as_squad_does():
    assert token_f1("in the Seine", "Seine river") == pytest.approx(0.5)


def exact_match_scores(right):
    return [score.Score("", {"exact match": [float(value), 1.0]}) for value in right]


def test_an_interval_equals_scipys_and_that_of_a_difference_in_pairs_is_narrower():
    stats = pytest.importorskip("scipy.stats")
    right = np.random.default_rng(1).random(300) < 0.7
    flipped = right.copy()
    flipped[:6] ^= True
    scores = exact_match_scores(right)
    measure = score._measure("exact match", score.METRICS["exact match"], scores)
    assert measure is not None
    data = (right.astype(float),)
    expected = stats.bootstrap(
        data,
        np.mean,
        method="percentile",
        rng=0,
    ).confidence_interval
    assert measure.low == pytest.approx(expected.low, abs=0.01)
    assert measure.high == pytest.approx(expected.high, abs=0.01)
    (difference,) = score._differences(scores, exact_match_scores(flipped))
    assert difference.ours - difference.theirs == pytest.approx(right.mean() - flipped.mean())
    assert difference.high - difference.low < (measure.high - measure.low) / 2


@pytest.fixture
def fake_run(config, tmp_path, in_process):
    """Run the fake model over six documents with the attribute `a`, which is always wrong."""
    path = write_jsonl(tmp_path / "in.jsonl", ["x" * (number + 1) for number in range(6)])
    run = with_keys(config(str(path)), model=FAKE)
    driver.run_extract(run, build=build)
    return run.output.path


@pytest.fixture
def label_rows():
    """Labels of two documents of `fake_run`, and of one that it does not hold."""
    target = {"a": None, "never asked": "x"}
    return [{"id": str(number), "gold": target} for number in (0, 1, 99)]


def test_a_run_is_compared_with_its_labels(fake_run, label_rows, tmp_path):
    labels = write_rows(tmp_path / "labels.jsonl", label_rows)
    result = evaluate(fake_run, str(labels), fake_run, labels_column="gold")
    figures = {measure.name: measure.value for measure in result.measures}
    assert result.unlabelled == 4
    assert result.missing == 1
    assert result.not_asked == 2
    assert figures["if every value were null"] == 1.0
    assert figures["values right"] == 0.0
    for difference in result.differences:
        assert difference.ours == difference.theirs
        assert difference.low == 0
        assert difference.high == 0
    assert "values right" in score.describe(result)


def test_labels_may_be_a_table_or_any_file_of_rows(fake_run, label_rows, tmp_path):
    labels = write_rows(tmp_path / "labels.jsonl", label_rows)
    expected = evaluate(fake_run, str(labels), labels_column="gold").measures
    table = tmp_path / "labels.csv"
    table.write_text("id;a;never asked\n0;;x\n1;;x\n99;;x\n")
    assert evaluate(fake_run, str(table)).measures == expected
    labels.with_suffix(".json").write_text(json.dumps(label_rows))
    pq.write_table(pa.Table.from_pylist(label_rows), labels.with_suffix(".parquet"))
    labels.with_suffix(".gz").write_bytes(gzip.compress(labels.read_bytes()))
    for ending in (".json", ".parquet", ".gz"):
        file = str(labels.with_suffix(ending))
        assert evaluate(fake_run, file, labels_column="gold").measures == expected


def test_a_table_without_the_column_of_ids_is_refused_and_the_column_is_named(fake_run, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("file,a\n0,x\n1,x\n")
    message = (
        "it has no column 'id', by which labels find their document; its columns: 'file', 'a'. "
        "The column 'file' has ids of this run: name it 'id'"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        evaluate(fake_run, str(table))
    table.write_text("file,a\nzero,x\n")
    with pytest.raises(InputError, match=r"Name the column of the ids 'id'$"):
        evaluate(fake_run, str(table))


def test_attributes_without_labels_are_named_and_the_columns_that_may_be_meant(run, tmp_path):
    table = tmp_path / "mine.csv"
    name = next(iter(GOLD))
    table.write_text(f"id,title,Sizes,Brand\n{name},Shoe,7,Acme\n")
    result = evaluate(run[0], str(table))
    assert (result.without_labels, result.other_columns) == (["Size"], ["Sizes"])
    note = (
        "no labels of 'Size': the labels have nothing with this name. These columns of the labels "
    )
    note += "match no attribute: 'Sizes'. If 'Sizes' is 'Size', rename it"
    assert note in score.describe(result)
    labels = write_rows(tmp_path / "mine.jsonl", [{"id": name, "target": {"Brand": "Acme"}}])
    text = score.describe(evaluate(run[0], str(labels)))
    assert "no labels of 'Size': the labels have nothing with this name" in text
    assert "match no attribute" not in text
    assert "no labels of" not in score.describe(evaluate(*run))


def test_documents_without_ids_are_joined_by_their_rows(config, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = [{"title": "x" * length, "gold": {"a": None}} for length in (1, 3)]
    path = write_rows(tmp_path / "rows.jsonl", documents)
    run = with_keys(
        config(str(path)),
        model=FAKE,
        input={"id_column": None},
        output={"path": "n"},
    )
    driver.run_extract(run, build=build)
    assert evaluate("n", str(path), labels_column="gold").missing == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b'{"id": "0", "gold": {"a": null}}\n',
            "has 'target', 'questions', 'reference', or columns named like its attributes",
        ),
        (
            b'{"id": "0", "questions": [{"question": "Who?"}]}\n',
            r"labels\.jsonl:1: a question without a list of 'answers'",
        ),
        (
            b'{"id": "0", "target": {"a": 1}}\n' * 2 + b'{"id": "0", "target": {"a": 2}}\n',
            r"labels\.jsonl:3: the id '0' has other labels above",
        ),
        (b'{"id": "0", "reference": "x"}\n', r"another kind of task than .*'turn'"),
        (b"[]\n", r"labels\.jsonl:1: expected an object"),
        (b"\xe9", r"labels\.jsonl:1: not JSON"),
        (b"[" * 99_999, r"labels\.jsonl:1: not"),
    ],
    ids=["other column", "question", "two labels", "other task", "list", "no text", "deep"],
)
def test_unusable_labels_are_refused_with_their_line(fake_run, tmp_path, text, message):
    labels = tmp_path / "labels.jsonl"
    labels.write_bytes(text)
    with pytest.raises(InputError, match=message):
        evaluate(fake_run, str(labels))


def test_an_unreadable_table_is_refused_with_its_line(fake_run, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("id,a\n0\n")
    message = r"labels\.csv: cannot be read: line 2: 1 field, but the header has 2"
    with pytest.raises(InputError, match=message):
        evaluate(fake_run, str(table))


def test_a_file_with_a_similar_name_is_suggested(fake_run, label_rows, tmp_path):
    write_rows(tmp_path / "labels.jsonl", label_rows)
    with pytest.raises(InputError, match=r"no such file or folder; did you mean .*labels.jsonl"):
        evaluate(fake_run, str(tmp_path / "label.jsonl"))


def test_a_folder_that_does_not_exist_is_no_run_without_answers(label_rows, tmp_path):
    write_rows(tmp_path / "labels.jsonl", label_rows)
    (tmp_path / "offers").mkdir()
    for name, reason in (
        ("offer", f"no such folder; did you mean {tmp_path}/offers\\?"),
        ("offers", "holds no answers; give the output folder of a run"),
        ("x/y", "no such folder$"),
    ):
        with pytest.raises(InputError, match=f"^{tmp_path}/{name}: {reason}"):
            evaluate(str(tmp_path / name), str(tmp_path / "labels.jsonl"))


def test_a_row_of_the_input_with_its_columns_is_a_label(config, tmp_path, in_process):
    """Its columns may have names of labels, and its id is in the run's column.

    JSON does not escape U+2028.
    """
    row = {
        "sku": 7,
        "id": "of another",
        "title": "x\u2028y\x85",
        "questions": "Who?",
        "scored": 1,
        "accepted": "a",
    }
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row))
    run = with_keys(config(str(path), id_column="sku"), model=FAKE)
    driver.run_extract(run, build=build)
    labels = tmp_path / "labels.jsonl"
    label = json.dumps({**row, "target": {"a": None}}, ensure_ascii=False)
    labels.write_text(label, encoding="utf-8-sig")
    measure = evaluate(run.output.path, str(labels)).measures[-1]
    assert measure.name == "if every value were null"
    assert measure.value == 1


def test_columns_of_labels_are_typed_by_the_category_of_their_row(tmp_path, monkeypatch):
    categories = {
        "shoes": {"attributes": [{"name": "Size", "type": "number"}]},
        "hats": {
            "attributes": [
                {"name": "Size"},
                {"name": "Color"},
                {"name": "Note"},
            ]
        },
    }
    config = {
        "input": {"category_column": "kind", "text_columns": ["Note"]},  # Note is no label
        "task": {"categories": categories},
    }
    monkeypatch.setattr(label_files, "_recorded_config", lambda run: config)
    (tmp_path / "labels.csv").write_text("id,kind,Size,Color,Note\n1,shoes,7,,x\n2,hats,7,red,x\n")
    labels = label_files.read_labels(str(tmp_path / "labels.csv"), "target", "run")
    assert labels["1"]["target"] == {"Size": 7.0}
    assert labels["2"]["target"] == {"Size": "7", "Color": "red"}


@pytest.fixture
def run(tmp_path, in_process):
    """(the folder of a run that gives the answers of GOLD, its labels)."""
    documents = [
        {"id": name, "title": f"<img src=x onerror=alert(1)> XZeta9 {name} Zeta"} for name in GOLD
    ]
    corpus = write_rows(tmp_path / "in.jsonl", documents)
    accepted = {"Brand": ["Acme", "A.C.M.E."]}
    script = {}
    labels = []
    for name, (brand, size, target) in GOLD.items():
        begin = documents[len(script)]["title"].rfind("Zeta")
        span = {"begin": begin, "end": begin + 4} if brand == "Zeta" else None
        script[name] = rows(brand, 0.9, size, 0.25, span)
        labels.append({"id": name, "target": target, "accepted": accepted})
    script["failed"] = "too long"
    labels_file = write_rows(tmp_path / "labels.jsonl", labels)
    task = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
    config = run_config(
        task,
        corpus,
        tmp_path / "run",
        input=TITLES,
        model=FAKE,
    )
    driver.run_extract(config, build=scripted(script))
    return config.output.path, str(labels_file)


def test_a_failed_document_counts_in_the_only_category_of_the_run(run, tmp_path):
    """It has no row that names its category, and is scored and shown in the run's."""
    (tmp_path / "labels.jsonl").write_text(
        '{"id": "failed", "target": {"Brand": "Acme", "Size": 1, "Color": "red"}}'
    )
    evaluation = evaluate(*run)
    assert evaluation.failed == 1
    assert evaluation.not_asked == 1
    (wrong,), counts = page.find_wrong_values(*run, "target", 0.0)
    assert [value.attribute for value in wrong.values] == ["Brand", "Size"]
    assert counts.keys() == {("shoes", "Brand"), ("shoes", "Size")}


def test_documents_that_the_prompt_shows_are_left_out(run, tmp_path):
    record = json.loads((tmp_path / "run/run.json").read_text())
    lines = (tmp_path / "labels.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "examples.jsonl").write_text("".join(lines[:4]))
    examples = {"path": str(tmp_path / "examples.jsonl"), "count": 3, "nearest": False}
    record["config"]["task"]["examples"] = examples
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    evaluation = evaluate(*run)
    assert evaluation.shown == 3
    assert evaluation.measures[0].documents == len(GOLD) - 3
    assert "3 documents shown in the prompt" in score.describe(evaluation)
    documents, _ = page.find_wrong_values(*run, "target", 0.0)
    assert not {"right", "another", "part"} & {document.id for document in documents}

    # A document is not shown itself as one of the examples that are most like it.
    record["config"]["task"]["examples"]["nearest"] = True
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert evaluate(*run).shown == 0

    record["config"]["task"]["examples"] = {"path": run[1], "count": 100}
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="shows all of these documents"):
        evaluate(*run)


def set_in_record(folder: Path, section: str, **keys) -> None:
    """Change the configuration that a run has recorded."""
    record = json.loads((folder / "run.json").read_text())
    record["config"][section] |= keys
    (folder / "run.json").write_text(json.dumps(record))


def write_trained_on(weights: Path, names: Iterable[str], titles: dict[str, str]) -> None:
    """Write weights that were trained on documents, with the title of each."""
    weights.mkdir(exist_ok=True)
    documents = [Document(0, name, {"title": titles.get(name, name)}) for name in names]
    trained_on(documents, ["title"]).write(weights)


def test_documents_that_trained_the_model_are_left_out_and_named(run, tmp_path):
    folder = tmp_path / "run"
    weights = tmp_path / "adapter"
    expected = evaluate(*run)
    assert expected.trained == 0
    write_trained_on(weights, ["right", "another", "not labelled"], {})
    set_in_record(folder, "model", adapter=str(weights))
    evaluation = evaluate(*run)
    assert evaluation.trained == 2
    assert evaluation.measures[0].documents == len(GOLD) - 2
    assert evaluation.measures[0].value < expected.measures[0].value
    assert "2 documents trained or validated the model: left out" in score.describe(evaluation)
    documents, _ = page.find_wrong_values(*run, "target", 0.0)
    assert not {"right", "another"} & {document.id for document in documents}
    _, trained = labelled_values(*run)
    assert trained == 2

    write_trained_on(weights, GOLD, {})
    for measure in (evaluate, labelled_values):
        with pytest.raises(InputError, match=r"was trained on all of these .* test\.jsonl in its"):
            measure(*run)


def test_documents_that_trained_the_other_model_are_left_out_of_the_comparison(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    write_trained_on(tmp_path / "adapter", ["right", "part", "more"], {})
    set_in_record(other, "model", adapter=str(tmp_path / "adapter"))
    evaluation = evaluate(*run, str(other))
    assert evaluation.trained == 0
    assert evaluation.other_left_out == 3
    assert evaluation.measures[0].documents == len(GOLD)
    assert {pair.documents for pair in evaluation.differences} == {len(GOLD) - 3}
    assert "3 documents trained the model of the other run" in score.describe(evaluation)
    write_trained_on(tmp_path / "adapter", GOLD, {})
    with pytest.raises(InputError, match="trained the model of"):
        evaluate(*run, str(other))


def test_the_next_step_after_an_evaluation_works(run, tmp_path):
    """The run has eight documents; the figures stand for larger ones."""
    evaluation = evaluate(*run)
    more = main._after_evaluation(*run, evaluation, "target", 0.0)
    assert more.startswith("all answered documents of this run have labels: extract and label 52")
    # The configuration may name enough labels, although these are too few.
    write_rows(tmp_path / "gold.jsonl", [{"id": str(n), "target": {}} for n in range(60)])
    set_in_record(tmp_path / "run", "fit", labels=str(tmp_path / "gold.jsonl"))
    more = main._after_evaluation(*run, evaluation, "target", 0.0)
    assert more == "`raypd fit CONFIG` trains a better or cheaper model on the labels"
    Path(run[0], "run.json").rename(tmp_path / "run.json")
    assert "extract and label 52" in main._after_evaluation(*run, evaluation, "target", 0.0)
    (tmp_path / "run.json").rename(Path(run[0], "run.json"))
    for measure in evaluation.measures:
        measure.documents = 62
    evaluation.reliability = [(0.5, 0.5, 300)]
    first, second = main._after_evaluation(*run, evaluation, "gold", 0.0).split("; ")
    made = storage.join(run[0], FILE)
    assert first.startswith(f"`raypd calibrate {run[0]} {run[1]} --output {made} --labels-column g")
    assert second.startswith(f"`raypd fit CONFIG fit.labels={run[1]} training.labels_column=gold`")
    evaluation.trained = 178
    set_in_record(tmp_path / "run", "output", min_confidence=0.5)
    after = main._after_evaluation(*run, evaluation, "target", 0.0)
    assert after.startswith("`raypd report")


def test_the_texts_of_labels_tell_documents_with_equal_ids_apart(run, tmp_path):
    """Without texts, ids decide. With texts of which none was trained on, the ids are others'."""
    folder = tmp_path / "run"
    set_in_record(folder, "model", adapter=str(tmp_path / "adapter"))
    set_in_record(folder, "input", text_columns=["title"])
    titles = {name: f"A text of {name}" for name in GOLD}
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    for row in rows:
        row["title"] = titles[row["id"]]
    write_rows(tmp_path / "labels.jsonl", rows)
    # Another id and the same text, with other spaces and punctuation.
    write_trained_on(tmp_path / "adapter", ["x"], {"x": "a text, of  RIGHT"})
    assert evaluate(*run).trained == 1
    # The same ids, and other texts.
    write_trained_on(tmp_path / "adapter", ["right", "part"], {})
    assert evaluate(*run).trained == 0
    # One text is known, so an edited text is the document that its id says.
    write_trained_on(tmp_path / "adapter", ["right", "part"], {"right": titles["right"]})
    assert evaluate(*run).trained == 2
    # The text of HTML is not its markup.
    write_trained_on(tmp_path / "adapter", ["right", "part"], {})
    set_in_record(folder, "input", html_columns=["title"])
    assert evaluate(*run).trained == 2


def test_the_documents_of_an_earlier_fit_are_known_by_its_parts(run, tmp_path):
    weights = tmp_path / "fit/candidates/lora-1/100/training/adapter"
    weights.mkdir(parents=True)
    set_in_record(tmp_path / "run", "model", adapter=str(weights))
    (tmp_path / "fit/train.jsonl").write_text('{"id": "right"}\n{"id": "part"}\n')
    (tmp_path / "fit/validation.jsonl").write_text('{"id": "more"}\n')
    (tmp_path / "fit/test.jsonl").write_text('{"id": "another"}\n')
    assert evaluate(*run).trained == 0
    (tmp_path / "fit/fit.json").write_text("{}")
    assert evaluate(*run).trained == 3
    (weights / "trained_on.json").write_text("[]")
    with pytest.raises(ModelError, match="trained on cannot be read"):
        evaluate(*run)


def test_figures_of_few_documents_come_with_a_caution(run, tmp_path):
    lines = (tmp_path / "labels.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "labels.jsonl").write_text("".join(lines[:2]))
    done = CliRunner().invoke(app, ["evaluate", *run], env={"COLUMNS": "500"})
    few = "2 documents are too few: the real uncertainty is larger than these intervals. "
    assert f"{few}Label at least 10, better 60 documents\n" in done.stdout
    # The run has five more documents with answers, and then others have to be extracted.
    assert "for 5 more labels, then extract and label 53 more documents" in done.stdout
    (tmp_path / "labels.jsonl").write_text("".join(lines))
    done = CliRunner().invoke(app, ["evaluate", *run], env={"COLUMNS": "500"})
    assert "review" not in done.stdout
    assert "extract and label 52 more documents" in done.stdout


def test_figures_without_a_wrong_value_come_with_an_exact_bound(run, tmp_path):
    described = score.describe(evaluate(*run))
    assert "counts no fault" not in described
    lines = (tmp_path / "labels.jsonl").read_text().splitlines(keepends=True)
    right = [line for line in lines if json.loads(line)["id"] in ("right", "accepted")]
    (tmp_path / "labels.jsonl").write_text("".join(right))
    described = score.describe(evaluate(*run))
    # One of the two has an accepted form, which only the scored F1 counts as right.
    bound = "scored F1 is 1.000 on 2 documents: it counts no fault in any of them. Up to 77.6% of"
    assert bound in described
    # With this share of faulty documents, two of two are right in 5% of all samples.
    both_right = (1 - 0.776) ** 2
    assert both_right == pytest.approx(0.05, abs=0.001)


def test_every_wrong_value_has_its_reason(run):
    documents, counts = page.find_wrong_values(*run, "target", 0.0)
    reasons = {}
    for wrong in documents:
        reasons[wrong.id] = [(value.attribute, value.reason) for value in wrong.values]
    assert reasons == {
        "another": [("Brand", "another value")],
        "part": [("Brand", "a part of the label")],
        "more": [("Brand", "more than the label")],
        "invented": [("Size", "no label")],
        "missing": [("Brand", "missing")],
        "failed": [("Brand", "no answer"), ("Size", "no answer")],
    }
    assert counts["shoes", "Brand"] == {
        "right": 3,
        "another value": 1,
        "a part of the label": 1,
        "more than the label": 1,
        "missing": 1,
        "no answer": 1,
    }


@pytest.mark.parametrize(
    ("value", "label", "reason"),
    [
        (36, 36000, "another value"),
        (36000.0, 36.0, "another value"),
        (True, "not True", "another value"),
        ("X", "X200", "a part of the label"),
        ("X200", "X", "more than the label"),
        (["a"], ["a", "b"], "a part of the label"),
        (["b", "a"], ["a"], "more than the label"),
        (["a"], ["ab"], "another value"),
    ],
)
def test_only_texts_and_lists_can_be_a_part_of_their_label(value, label, reason):
    assert page._reason(value, [label], 0.0, is_free=True) == reason


def test_one_value_of_an_enum_is_never_more_than_another(run):
    folder, labels = run
    record = json.loads(Path(folder, "run.json").read_text())
    (brand,) = (
        attribute
        for attribute in record["config"]["task"]["categories"]["shoes"]["attributes"]
        if attribute["name"] == "Brand"
    )
    brand.update(type="enum", values=["Acme", "Acme Inc", "Ac", "Zeta"])
    Path(folder, "run.json").write_text(json.dumps(record))
    _, counts = page.find_wrong_values(folder, labels, "target", 0.0)
    assert counts["shoes", "Brand"]["another value"] == 3
    assert not counts["shoes", "Brand"].keys() & {"a part of the label", "more than the label"}


def test_a_run_within_a_fit_takes_the_user_s_column_of_ids(run, tmp_path):
    """The files of a fit have their ids in `id`, and the labels of the user elsewhere."""
    folder, path = run
    record = json.loads(Path(folder, "run.json").read_text())
    record["config"]["input"]["id_column"] = "id"
    Path(folder, "run.json").write_text(json.dumps(record))
    own = tmp_path / "own.jsonl"
    own.write_text(Path(path).read_text().replace('"id":', '"advert_no":'))
    with pytest.raises(InputError, match="column 'advert_no' has ids of this run: name it 'id'"):
        evaluate(folder, str(own))
    (tmp_path / "fit.json").write_text('{"id_column": "advert_no"}')
    assert evaluate(folder, str(own)).measures == evaluate(folder, path).measures


def test_each_attribute_has_an_f1_and_the_lowest_is_first(run):
    brand, size = evaluate(*run).attributes
    # Of the brands 3 are right, 3 wrong and 2 missing; of the sizes 4 values and 2 nulls are right,
    # 1 is invented and 1 missing.
    assert (brand.attribute, brand.right, brand.values) == ("Brand", 3, 8)
    assert brand.f1 == pytest.approx(2 * 3 / (2 * 3 + 2 * 3 + 2))
    assert (size.attribute, size.right, size.values) == ("Size", 6, 8)
    labels = Counter(json.dumps(target.get("Size")) for _, _, target in GOLD.values())
    assert (size.frequent_label, size.frequent_right) == labels.most_common(1)[0]
    assert brand.frequent_right >= brand.right
    assert size.f1 == pytest.approx(2 * 4 / (2 * 4 + 1 + 1))
    described = score.describe(evaluate(*run)).splitlines()
    assert described[-2].split() == ["Brand", f"{brand.f1:.3f}", "3", "of", "8"]


def test_the_page_shows_labels_beside_values_and_runs_nothing(run, browser):  # noqa: F811
    written = page.write_page(*run, evaluate(*run), "target", 0.0)
    assert written is not None
    path = Path(written[0])
    tab, requests, errors = open_page(browser, path, viewport=PHONE)
    assert requests == [path.as_uri()]
    assert errors == []
    assert tab.locator("article").count() == 6
    cells = tab.locator("figure tbody tr").last.locator("th, td").all_text_contents()
    # Three of the seven brands are right.
    assert [cell.strip() for cell in cells] == ["this run", "0.90", "0.43", "7"]
    another = tab.locator("article", has_text="another")
    # The mark is at the span of the value, not at the same letters in a code before it.
    assert another.locator("mark").all_inner_texts() == ["Zeta"]
    assert "XZeta9 another" in another.locator("p", has=tab.locator("mark")).first.inner_text()
    before = "document.querySelector('mark').previousSibling.innerText"
    assert tab.evaluate(before).endswith("another ")
    first_row = another.locator("tbody tr").first.inner_text()
    assert first_row.split() == ["Brand", "Acme", "Zeta", "another", "value", "0.90"]
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    # On a phone every cell of a wrong value is in sight, without scrolling aside.
    for cell in another.locator("tbody tr").first.locator("th, td").all():
        box = cell.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"]
    first_attribute = tab.locator("section", has_text="By attribute").locator("tbody tr").first
    assert first_attribute.inner_text().split()[2:5] == ["Brand", "0.429", "3"]


@pytest.mark.parametrize(
    ("lost", "message"), [("in.jsonl", "evaluation.html\n"), ("run/run.json", "no page: ")]
)
def test_figures_are_shown_even_if_the_page_cannot_be_complete(run, tmp_path, lost, message):
    (tmp_path / lost).unlink()
    done = CliRunner().invoke(app, ["evaluate", *run], env={"COLUMNS": "500"})
    assert done.exit_code == 0, done.output
    assert "values right" in done.output
    assert message in done.output
    if lost == "in.jsonl":
        html = Path(tmp_path, "run", layout.EVALUATION).read_text()
        assert "Without the documents" in html
        assert html.count("<article") == 6


def test_a_page_that_is_replaced_by_one_of_other_labels_is_named(run, tmp_path):
    def printed(labels: str) -> str:
        done = CliRunner().invoke(app, ["evaluate", run[0], labels])
        assert done.exit_code == 0, done.output
        return done.output

    other = tmp_path / "a & b.jsonl"
    other.write_text(Path(run[1]).read_text())
    assert "in place of" not in printed(run[1])
    assert "in place of" not in printed(run[1])
    assert f"(in place of the page with the labels {run[1]})" in printed(str(other))
    assert labels_of_page(str(Path(run[0], layout.EVALUATION))) == (str(other), "target")
    assert f"(in place of the page with the labels {other})" in printed(run[1])


def drawn(count: int, seed: int) -> list[LabelledValue]:
    """Values whose confidence is higher than their chance to be right.

    The chance is a power of the confidence, a higher one for Color, and lower if the value does not
    stand in the document.
    """
    draw = np.random.default_rng(seed)
    values = []
    for number in range(count):
        attribute = ("Brand", "Color")[number % 2]
        confidence = draw.uniform(0.3, 1.0)
        stands = bool(draw.random() < 0.5)
        chance = confidence ** {"Brand": 2, "Color": 6}[attribute]
        if not stands:
            chance *= 0.6
        right = bool(draw.random() < chance)
        values.append(
            LabelledValue(
                "shoes", attribute, confidence, False, stands, right, document=str(number // 2)
            )
        )
    return values


def honest(count: int, seed: int) -> list[LabelledValue]:
    """Values whose confidence is their chance to be right, two in a document."""
    draw = np.random.default_rng(seed)
    return [
        replace(value, right=bool(draw.random() < value.confidence)) for value in drawn(count, seed)
    ]


@pytest.mark.parametrize("count", [400, 4000])
def test_calibrated_confidences_are_the_share_of_right_values(count):
    calibration = fit_calibration(drawn(count, 0))
    fresh = drawn(4000, 1)
    assert calibration_error(reliability(fresh)) > 0.3
    assert calibration_error(reliability(fresh, calibration)) < 0.04
    groups = {
        "Color": [value for value in fresh if value.attribute == "Color"],
        "Brand": [value for value in fresh if value.attribute == "Brand"],
        "in the text": [value for value in fresh if value.in_document],
        "not in the text": [value for value in fresh if not value.in_document],
    }
    for name, values in groups.items():
        assert calibration_error(reliability(values, calibration)) < 0.07, name


def test_only_a_calibration_that_improves_other_documents_is_kept():
    """On 98 values, as many as a small fit has in its validation part."""
    seeds = range(20)
    assert all(is_improved(drawn(400, seed)) for seed in seeds)
    assert sum(is_improved(drawn(98, seed)) for seed in seeds) >= 18
    fresh = honest(4000, 1000)
    own_error = calibration_error(reliability(fresh))
    assert own_error < 0.03
    kept = 0
    for seed in seeds:
        values = honest(98, seed)
        # Each makes confidences worse that are right already.
        assert calibration_error(reliability(fresh, fit_calibration(values))) > own_error
        kept += is_improved(values)
        assert is_improved(values[::-1]) == is_improved(values)
    assert kept <= 1


def test_a_calibration_is_not_kept_if_labels_cannot_show_that_it_improves():
    values = drawn(400, 0)
    few = [replace(value, document=str(number % 4)) for number, value in enumerate(values)]
    assert not is_improved(few)
    # The only wrong value, of which the model was sure.
    single = [replace(value, right=number > 0) for number, value in enumerate(values)]
    single[0] = replace(single[0], confidence=0.9999)
    fit_calibration(single)
    assert not is_improved(single)


def test_the_calibration_error_is_the_mean_gap_between_confidence_and_share_right():
    rights = [
        (0.05, False),
        (0.15, True),
        (0.15, False),
        (1.0, True),
    ]
    points = reliability(
        [
            LabelledValue("", "", confidence, False, False, right, document="")
            for confidence, right in rights
        ]
    )
    assert points == [
        (0.05, 0.0, 1),
        (0.15, 0.5, 2),
        (1.0, 1.0, 1),
    ]
    assert calibration_error(points) == pytest.approx((0.05 * 1 + 0.35 * 2) / 4)
    svg, *_ = page.reliability_chart({"accent": ("this run", points)}, "").forms.values()
    assert svg.count("s-accent") == 1 + len(points)  # a line, and a dot per point


@pytest.mark.parametrize(("weight", "expected"), [(1e6, 0.0), (0.0, 0.5), (-1e6, 1.0)])
def test_weights_of_any_size_give_a_confidence(weight, expected):
    calibration = Calibration([weight, 0, 0, 0], 0.0, {})
    assert calibration.confidence("c", "a", 0.01, null=False, in_document=False) == expected


@pytest.fixture
def calibration_path(tmp_path):
    path = tmp_path / FILE
    Calibration([0.5, 0.0, 1.0, 2.0], -0.5, {"shoes/Brand": 0.3}).write(path)
    return path


def record_of(**keys):
    """The record of a document that a task with some keys makes."""
    (record,) = answers(make(**keys), [document(0)]).values()
    return record


def test_a_task_calibrates_its_confidences(calibration_path):
    plain = record_of()
    calibrated = record_of(model={"calibration": str(calibration_path)})
    calibration = calibration_of(ModelConfig(calibration=str(calibration_path)))
    assert calibration is not None
    for before, after in zip(plain.columns["values"], calibrated.columns["values"], strict=True):
        expected = calibration.confidence(
            "shoes",
            before["name"],
            before["confidence"],
            null=before["value"] is None,
            in_document=before["span"] is not None,
        )
        assert after == {**before, "confidence": pytest.approx(expected)}


def test_a_calibration_of_an_earlier_version_does_not_look_for_numbers_in_documents():
    values = [replace(value, is_number=value.attribute == "Color") for value in drawn(400, 0)]
    calibration = fit_calibration(values)
    assert calibration.finds_numbers
    confidences = [
        calibration.confidence(
            "shoes", "Color", 0.8, null=False, in_document=in_document, is_number=True
        )
        for in_document in (False, True)
    ]
    assert confidences[0] < confidences[1]
    earlier = replace(calibration, finds_numbers=False)
    for in_document in (False, True):
        confidence = earlier.confidence(
            "shoes", "Color", 0.8, null=False, in_document=in_document, is_number=True
        )
        assert confidence == confidences[0]
    # No number of an earlier version's run has a span.
    without = [replace(value, in_document=False) for value in values if value.is_number]
    texts = [value for value in values if not value.is_number]
    assert not fit_calibration([*texts, *without]).finds_numbers


def test_a_task_leaves_out_values_below_the_minimum_confidence():
    record = record_of(output={"path": "out", "min_confidence": 0.999})
    unsure = [value for value in record.columns["values"] if value["status"] == "unsure"]
    assert unsure
    for value in unsure:
        assert value["value"] is None
        assert value["confidence"] < 0.999
        assert value["raw"]
        assert record.columns["record"][value["name"]] is None


def test_a_calibration_is_read_from_beside_weights_on_an_object_store(
    calibration_path, monkeypatch
):
    objects = {"s3://b/weights/calibration.json": calibration_path.read_bytes()}
    monkeypatch.setattr(storage, "read", objects.__getitem__)
    monkeypatch.setattr(storage, "exists", lambda path: path in objects)
    calibration = calibration_of(ModelConfig(name="s3://b/weights"))
    assert calibration is not None
    assert calibration.attributes == {"shoes/Brand": 0.3}


class TestCalibrateRun:
    """`raypd calibrate` over a run of the fake model, whose values have no confidence."""

    @pytest.fixture
    def configured(self, config, tmp_path, in_process):
        path = write_jsonl(tmp_path / "in.jsonl", ["x", "xx"])
        run = with_keys(config(str(path)), model=FAKE)
        driver.run_extract(run, build=build)
        return run

    @pytest.fixture
    def labels(self, tmp_path):
        path = tmp_path / "labels.jsonl"
        path.write_text('{"id": "0", "target": {"a": "b"}}')
        return str(path)

    @pytest.fixture
    def calibration(self, configured, labels, tmp_path, monkeypatch):
        """The path of a calibration of the run, fitted on drawn values."""
        output = str(tmp_path / "calibration-of-run.json")
        monkeypatch.setattr(calibration_file, "labelled_values", lambda *_: (drawn(400, 0), 3))
        text, step = calibration_file.calibrate_run(configured.output.path, labels, output)
        assert step.startswith("run other labelled documents with this calibration")
        assert "fitted on 400 values" in text
        assert "left out: 3 documents that trained or validated the model" in text
        return output

    def test_it_needs_a_file_if_the_weights_lie_in_no_folder(self, configured, labels):
        with pytest.raises(ConfigError, match="has no local folder; name a file with --output"):
            calibration_file.calibrate_run(configured.output.path, labels)

    def test_it_needs_values_with_confidences(self, configured, labels, tmp_path):
        output = str(tmp_path / "calibration-of-run.json")
        with pytest.raises(InputError, match="needs 50 labelled values; there are 0"):
            calibration_file.calibrate_run(configured.output.path, labels, output)

    def test_it_can_be_repeated_over_the_same_run(
        self, configured, labels, calibration, monkeypatch
    ):
        existing = calibration_of(ModelConfig(calibration=calibration))
        monkeypatch.setattr(calibration_file, "calibration_of", lambda *_: existing)
        text, _ = calibration_file.calibrate_run(configured.output.path, labels, calibration)
        assert "fitted on 400 values" in text
        assert "left out: 3 documents that trained or validated the model" in text

    def test_it_writes_nothing_if_confidences_are_as_good_without(
        self, configured, labels, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(calibration_file, "labelled_values", lambda *_: (honest(98, 0), 0))
        run = configured.output.path
        output = tmp_path / "calibration-of-run.json"
        words = ["calibrate", run, labels, "--output", str(output)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert (
            "as good without a calibration from these labels, so nothing was written\n"
            in result.output
        )
        assert " now; " not in result.output
        assert f"Next: `raypd report {run}` shows" in result.output
        assert not output.exists()
        # One that is there may come from more labels.
        Calibration([1.0, 0.0, 0.0, 0.0], 0.0, {}).write(output)
        existing = output.read_bytes()
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        says(result.output, f"{output}, from an earlier calibration, stays as it was")
        says(result.output, "Next: run with model.calibration=none to have the model's own")
        assert output.read_bytes() == existing
        # That of the weights counts by its place alone.
        weights = tmp_path / "weights"
        weights.mkdir()
        beside = output.rename(weights / FILE)
        set_in_record(Path(run), "model", adapter=str(weights))
        monkeypatch.setattr(calibration_file, "calibration_of", lambda *_: None)
        _, step = calibration_file.calibrate_run(run, labels)
        assert step == f"delete {beside} to have the model's own confidences"
        assert beside.read_bytes() == existing

    def test_it_is_advised_where_the_command_works(self, configured, labels, tmp_path, monkeypatch):
        run = configured.output.path
        points = [(0.5, 0.5, 400)]
        command = calibration_file.calibrate_command(run, labels, points, tolerance=0.02)
        monkeypatch.setattr(calibration_file, "labelled_values", lambda *_: (drawn(400, 0), 0))
        result = CliRunner().invoke(app, shlex.split(command or "")[1:])
        assert result.exit_code == 0, result.output
        made = storage.join(run, FILE)
        assert f"{made}: fitted on 400 values" in result.output

        def command_for(points=points, **model):
            set_in_record(Path(run), "model", **model)
            return calibration_file.calibrate_command(run, labels, points)

        assert command_for([(0.5, 0.5, 49)]) is None
        assert command_for([(0.5, 1.0, 400)]) is None
        assert command_for(calibration=made) is None
        weights = tmp_path / "weights"
        weights.mkdir()
        beside = command_for(calibration=None, adapter=str(weights))
        assert beside == shlex.join(["raypd", "calibrate", run, labels])
        set_in_record(Path(run), "output", min_confidence=0.5)
        assert command_for() is None

    def test_it_refuses_a_calibrated_run(self, configured, labels, calibration, tmp_path):
        run = with_keys(
            configured,
            model={"calibration": calibration},
            output={"path": str(tmp_path / "next")},
        )
        assert run.fingerprint() != configured.fingerprint()
        driver.run_extract(run, build=build)
        with pytest.raises(ConfigError, match="already calibrated; run it with model"):
            calibration_file.calibrate_run(run.output.path, labels, calibration)

    def test_it_refuses_a_run_without_unsure_values(self, configured, labels, tmp_path):
        output = {"path": str(tmp_path / "strict"), "min_confidence": 0.5}
        run = with_keys(configured, output=output)
        driver.run_extract(run, build=build)
        with pytest.raises(ConfigError, match="took unsure values away"):
            calibration_file.calibrate_run(run.output.path, labels, str(tmp_path / "x.json"))

    def test_it_counts_for_the_method_of_its_run_only(self, configured, calibration, tmp_path):
        (tmp_path / FILE).write_bytes(Path(calibration).read_bytes())
        model = ModelConfig(name=str(tmp_path))
        expected = calibration_of(ModelConfig(calibration=calibration))
        assert expected is not None
        assert calibration_of(model, configured.decoding.method) == expected
        assert calibration_of(model, "hyper_parallel") is None


def test_values_are_joined_with_their_labels_by_attribute(monkeypatch):
    """A null is right only where the label is null.

    An unsure value is left out, because it was no null.
    """
    names = {
        "Size": "size.eu",
        "Color": "Color",
        "Fit": "Fit",
        "Sport": "Sport",
        "Sole": "Sole",
    }
    record = {
        "size": {"eu": "7"},
        "Color": None,
        "Fit": None,
        "Sport": "golf",
        "Sole": None,
    }
    texts = {"Size": "7", "Color": None, "Fit": None, "Sport": "golf"}
    values = [
        {"name": name, "value": text, "confidence": 0.5, "span": None}
        for name, text in texts.items()
    ]
    values.append(
        {
            "name": "Sole",
            "value": None,
            "confidence": 0.3,
            "span": None,
            "status": "unsure",
        }
    )
    row = {
        "id": "0",
        "category": "shoes",
        "record": json.dumps(record),
        "values": values,
    }
    target = {
        "size": {"eu": "8"},
        "Color": None,
        "Fit": "wide",
        "Sport": None,
        "Sole": None,
    }
    gold = {
        "id": "0",
        "target": target,
        "accepted": {"size.eu": ["8", "7"]},
    }
    monkeypatch.setattr(score, "answers_for", lambda run, ids: ({"0": [row], "1": []}, 0))
    monkeypatch.setattr(score, "read_labels", lambda *_: {"0": gold})
    monkeypatch.setattr(score, "asked_attributes", lambda run: {"shoes": names})
    labelled = {value.attribute: value for value in labelled_values("run", "labels")[0]}
    assert list(labelled) == ["Size", "Color", "Fit", "Sport"]
    assert {value.document for value in labelled.values()} == {"0"}
    assert [value.null for value in labelled.values()] == [False, True, True, False]
    assert [value.right for value in labelled.values()] == [True, True, False, False]


def broken_calibrations() -> Iterator[str]:
    yield "{"
    yield "{}"
    yield '{"weights": [1], "intercept": 0, "attributes": {}}'
    yield "[1]"
    yield '{"weights": [1, 1, 1, NaN], "intercept": 0, "attributes": {}}'
    for attributes in ("[]", "null", '{"c/a": "x"}'):
        yield f'{{"weights": [1, 1, 1, 1], "intercept": 0, "attributes": {attributes}}}'


@pytest.mark.parametrize("text", [*broken_calibrations(), pytest.param("[" * 100_000, id="deep")])
def test_a_broken_calibration_is_refused_unless_it_is_switched_off(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelError, match=r"calibration\.json: cannot be read"):
        calibration_of(ModelConfig(name=str(tmp_path)))
    assert calibration_of(ModelConfig(name=str(tmp_path), calibration="none")) is None


def figures(value, documents):
    return [
        score.Measure(name, value, value - 0.1, value + 0.1, documents)
        for name in ("strict F1", "values right")
    ]


@pytest.mark.parametrize(
    ("of_all", "at_random", "documents", "stands", "better"),
    [
        (0.376, 0.337, 6, False, False),
        (0.376, 0.9, 29, False, False),
        (0.376, 0.9, 30, True, True),
        (0.376, 0.376, 30, True, False),
        (0.376, 0.337, 30, True, False),
    ],
)
def test_what_is_said_of_a_review_s_random_documents_fits_their_figures_and_number(
    of_all, at_random, documents, stands, better
):
    evaluation = score.Evaluation(
        figures(of_all, 2 * documents),
        least_sure=documents,
        at_random=figures(at_random, documents),
    )
    text = score.about_review(evaluation)
    assert ("at random represent all documents:" in text) is stands
    advice = f"only {documents} of them have labels: strict F1"
    assert (advice in text) is not stands
    assert ("Label at least 30 documents that were chosen at random" in text) is not stands
    assert ("probably better" in text) is better
    assert f"strict F1 {at_random:.3f}" in text


def test_without_random_documents_nothing_is_said_of_all():
    text = score.about_review(score.Evaluation(figures(0.4, 6), least_sure=6))
    assert "No document that it chose at random has labels" in text
    assert "better" not in text
