"""What a run's answers show without labels."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raypd.report import answer_check, data, sample as report_sample
from raypd.report.answer_check import RunProgress
from raypd.report.sample import AnswerSample
from raypd.run.manifest import RunRecord
from tests.report.builder import Plan, build, value

DONE = RunProgress(
    state="complete",
    documents=20,
    failed=0,
    seconds=10.0,
)
SCHEMA = [
    {"name": "title", "type": "text", "description": "the job's title"},
    {"name": "remote", "type": "boolean", "description": ""},
    {"name": "years", "type": "number", "description": ""},
    {"name": "start", "type": "date", "description": ""},
    {"name": "skills", "type": "text", "many": True, "description": ""},
]


def config(model: Any = "smollm2-135m-instruct", **task: Any) -> dict[str, Any]:
    """A configuration as run.json has it."""
    if isinstance(model, str):
        model = {"name": model}
    return {
        "model": model,
        "task": {
            "kind": "extraction",
            "categories": {"job": {"description": "", "attributes": SCHEMA}},
            **task,
        },
        "decoding": {"method": "guided", "max_value_tokens": 30},
    }


def sample_of(name: str, values: Sequence[dict[str, Any]]) -> AnswerSample:
    """The answers to one attribute, one document each."""
    sample = AnswerSample()
    for number, row in enumerate(values):
        sample.add(
            {
                "id": str(number),
                "status": "ok",
                "category": "job",
                "values": [{**row, "name": name}],
            }
        )
    return sample


def spread_confidence(number: int) -> float:
    return 0.3 + 0.03 * number


def kinds(name: str, values: Sequence[dict[str, Any]]) -> list[str]:
    return [fault.kind for fault in answer_check.warnings(config(), sample_of(name, values))]


def stands(text: str, number: int) -> dict[str, Any]:
    """A value that stands in its document."""
    span = {"begin": 0, "end": len(text), "page": None}
    return {**value("title", text, spread_confidence(number)), "span": span}


def test_a_value_copied_from_its_description_is_named_with_its_number():
    values = [value("title", "The Job's Title", spread_confidence(n)) for n in range(18)]
    values += [stands(f"Baker {n}", n) for n in range(2)]
    (fault,) = answer_check.warnings(config(), sample_of("title", values))
    assert fault.kind == "copied"
    assert "18 of 20 documents" in fault.text
    assert "The Job's Title" in fault.text


def test_a_value_that_stands_in_its_documents_is_not_called_copied():
    assert kinds("title", [stands("The job's title", n) for n in range(20)]) == ["same"]


def test_answers_that_differ_get_no_warning():
    assert kinds("title", [stands(f"Baker {n}", n) for n in range(20)]) == []


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([value("title", "Clerk", spread_confidence(n)) for n in range(20)], "same"),
        ([value("title", None, spread_confidence(n), "null") for n in range(20)], "null"),
        (
            [value("title", f"[{n}]", spread_confidence(n), "truncated") for n in range(20)],
            "cut",
        ),
        ([{**stands(f"Baker {n}", n), "confidence": 0.75} for n in range(20)], "confidence"),
    ],
)
def test_each_fault_of_an_attribute_is_found(rows, kind):
    assert kinds("title", rows) == [kind]


@pytest.mark.parametrize(("copy", "whose"), [("Job", "category"), ("title", "own name")])
def test_answers_that_are_a_name_of_the_prompt_are_named_from_a_third_on(copy, whose):
    copies = [value("title", copy, spread_confidence(n)) for n in range(8)]
    others = [stands(f"Baker {n}", n) for n in range(12)]
    (fault,) = answer_check.warnings(config(), sample_of("title", copies + others))
    assert fault.kind == "name"
    assert "8 of 20 documents" in fault.text
    assert whose in fault.text
    fewer = copies[:2] + others
    assert kinds("title", fewer) == []
    # A document may say it.
    assert kinds("title", [stands(copy, n) for n in range(8)] + others) == []


def test_an_attribute_whose_answers_are_names_alone_has_one_warning():
    assert kinds("title", [value("title", "job", spread_confidence(n)) for n in range(20)]) == [
        "name"
    ]


def test_items_of_lists_may_be_the_name_of_the_category():
    rows = [
        value("skills", json.dumps(["job", f"skill {n}"]), spread_confidence(n)) for n in range(20)
    ]
    assert kinds("skills", rows) == ["same"]


@pytest.mark.parametrize("year", ["1899", "1111", "2101", "2999"])
def test_dates_of_unlikely_years_are_named_from_ten_percent_on(year):
    far = [value("start", f"{year}-05-{n + 10}", spread_confidence(n)) for n in range(3)]
    near = [value("start", f"1900-06-{n + 10}", spread_confidence(n)) for n in range(9)]
    near += [value("start", f"2100-06-{n + 10}", spread_confidence(n)) for n in range(9)]
    (fault,) = answer_check.warnings(config(), sample_of("start", far + near))
    assert fault.kind == "year"
    assert "3 of 21 dates" in fault.text
    assert f"{year}-05-10" in fault.text
    assert kinds("start", far[1:] + near) == []
    # Nulls are no dates.
    nulls = [value("start", None, spread_confidence(n), "null") for n in range(10)]
    assert kinds("start", far + near + nulls) == ["year"]


def test_texts_that_stand_nowhere_are_named_if_they_are_most():
    made_up = [value("title", f"Clerk {n}", spread_confidence(n)) for n in range(11)]
    others = [stands(f"Baker {n}", n) for n in range(9)]
    (fault,) = answer_check.warnings(config(), sample_of("title", made_up + others))
    assert fault.kind == "elsewhere"
    assert "55%" in fault.text
    assert kinds("title", made_up[1:] + others) == ["elsewhere"]
    assert kinds("title", made_up[2:] + others) == []
    # Nothing says where an item of a list stands.
    listed = [value("skills", f'["skill {n}"]', spread_confidence(n)) for n in range(20)]
    assert kinds("skills", listed) == []
    # The answers of the model fake are made up anyway.
    assert answer_check.warnings(config("fake"), sample_of("title", made_up)) == []


def test_numbers_that_do_not_occur_in_their_documents_are_named_from_one_in_twenty():
    made_up = [value("years", "2000", spread_confidence(n)) for n in range(3)]
    others = [{**stands(str(n), n), "name": "years"} for n in range(38)]
    (fault,) = answer_check.warnings(config(), sample_of("years", made_up + others))
    assert fault.kind == "elsewhere"
    assert "7.3% of 41 (such as 2000)" in fault.text
    assert kinds("years", made_up[1:] + others) == []
    assert kinds("years", others) == []


def test_a_choice_that_is_mostly_one_value_is_no_fault_but_always_one_is():
    mostly = [value("remote", "true", spread_confidence(n)) for n in range(15)]
    mostly += [value("remote", "false", spread_confidence(n)) for n in range(5)]
    assert kinds("remote", mostly) == []
    always = [value("remote", "true", spread_confidence(n)) for n in range(20)]
    assert kinds("remote", always) == ["same"]


@pytest.mark.parametrize(
    ("keys", "most", "total", "found"),
    [
        ({"type": "enum", "values": ["a", "b", "c"]}, 218, 230, ["same"]),
        ({"type": "enum", "values": ["a", "b", "c"]}, 90, 100, ["same"]),
        ({"type": "enum", "values": ["a", "b", "c"]}, 89, 100, []),
        ({"type": "enum", "values": ["a", "b"]}, 97, 100, []),
        ({"type": "enum", "values": ["a", "b"]}, 98, 100, ["same"]),
        ({"type": "boolean"}, 97, 100, []),
        ({"type": "boolean"}, 98, 100, ["same"]),
        ({"type": "number"}, 59, 100, []),
        ({"type": "number"}, 60, 100, ["same"]),
    ],
)
def test_the_share_of_one_value_that_is_a_fault_depends_on_the_type(keys, most, total, found):
    tree = config()
    tree["task"]["categories"]["job"]["attributes"] = [{"name": "rank", **keys}]
    other, common = ("false", "true") if keys["type"] == "boolean" else ("b", "a")
    if keys["type"] == "number":
        other, common = "6", "5"
    values = []
    for number in range(total):
        text = common if number < most else other
        span = {"begin": 0, "end": 1, "page": None}
        values.append({**value("rank", text, number / total), "span": span})
    faults = answer_check.warnings(tree, sample_of("rank", values))
    assert [fault.kind for fault in faults] == found


def test_a_few_answers_show_no_pattern():
    assert kinds("title", [value("title", "Clerk", 0.5) for _ in range(4)]) == []


def test_items_of_lists_are_compared_one_by_one():
    values = [
        value("title", json.dumps(["the job's title", f"skill {n}"]), spread_confidence(n))
        for n in range(20)
    ]
    assert kinds("title", values) == ["copied"]


CLERKS = [value("title", "Clerk", spread_confidence(n)) for n in range(20)]
GOOD = [stands(f"Baker {n}", n) for n in range(20)]
CUT = [value("title", f"[{n}]", spread_confidence(n), "truncated") for n in range(20)]
QWEN = "Qwen/Qwen3-1.7B"
CARD = {"task": "extraction", "method": "guided", "documents": 200}
SLOW = RunProgress(
    state="complete",
    documents=500,
    failed=0,
    seconds=5000.0,
)


@pytest.mark.parametrize(
    ("tree", "card", "values", "progress", "part"),
    [
        (config("fake"), {}, GOOD, DONE, "raypd init DATA --for"),
        (config(), {}, CLERKS, DONE, "model.name=Qwen/Qwen3-1.7B"),
        (config(), {}, GOOD, DONE, "model.name=Qwen/Qwen3-1.7B"),
        (config(QWEN), {}, CLERKS, DONE, "task.examples"),
        (config(QWEN, examples={"path": "x.jsonl"}), {}, CLERKS, DONE, "raypd fit"),
        (config(QWEN), {}, GOOD, DONE, "raypd review"),
        (config(QWEN), CARD, CLERKS, DONE, "raypd review"),
        (config(QWEN), {}, CUT, DONE, "decoding.max_value_tokens=60"),
        (config(QWEN), {}, GOOD, SLOW, "a GPU"),
        (
            config(QWEN),
            {},
            GOOD,
            RunProgress("killed", 20, 0, 5.0),
            "run the same command again to resume",
        ),
        (config(QWEN), {}, [], RunProgress("complete", 20, 20, 5.0), "raypd errors"),
        (config(QWEN, kind="generation"), {}, [], DONE, "raypd evaluate"),
    ],
)
def test_the_next_step_fits_the_state_of_the_run(tmp_path, tree, card, values, progress, part):
    record = RunRecord("f", tree, model_card=card)
    check = answer_check.check(str(tmp_path), record, sample_of("title", values), progress)
    assert part in check.next_step


@pytest.mark.parametrize("state", ["interrupted", "killed", "budget"])
@pytest.mark.parametrize(
    ("tree", "values", "then"),
    [
        (config(QWEN), GOOD, ""),
        (config(), CLERKS, "; then use a larger model (model.name=Qwen/Qwen3-1.7B)"),
        (config(QWEN), CUT, "; then for longer values, run the same command with decoding."),
    ],
)
def test_an_unfinished_run_says_first_how_to_resume(tmp_path, state, tree, values, then):
    record = RunRecord("f", tree)
    progress = RunProgress(state, 20, 0, 5.0)
    check = answer_check.check(str(tmp_path), record, sample_of("title", values), progress)
    assert check.next_step.startswith(f"run the same command again to resume{then}")


def test_numbers_that_do_not_end_need_a_better_model_and_not_a_higher_limit(tmp_path):
    record = RunRecord("f", config(QWEN))
    cut = [value("years", f"[{n}]", spread_confidence(n), "truncated") for n in range(20)]
    sample = sample_of("years", cut)
    check = answer_check.check(str(tmp_path), record, sample, DONE)
    assert "max_value_tokens (30), or the model does not stop" in check.warnings[0]
    assert "task.examples" in check.next_step


def test_ambiguous_numbers_are_named_from_five_percent_on():
    unread = [value("years", None, spread_confidence(n), "ambiguous") for n in range(2)]
    others = [{**stands(str(n), n), "name": "years"} for n in range(38)]
    (fault,) = answer_check.warnings(config(), sample_of("years", unread + others))
    assert fault.kind == "ambiguous"
    assert "'years' is ambiguous in 2 of 40 documents, and so null" in fault.text
    assert kinds("years", unread + others + others[:1]) == []


def test_a_running_run_that_answers_well_asks_for_nothing(tmp_path):
    record = RunRecord("f", config(QWEN))
    progress = RunProgress("running", 20, 0, 5.0)
    check = answer_check.check(str(tmp_path), record, sample_of("title", GOOD), progress)
    assert check.next_step == ""


def test_labels_in_the_folder_lead_to_their_evaluation(tmp_path):
    (tmp_path / "labels.jsonl").write_text("{}\n" * 60)
    record = RunRecord("f", config(QWEN))
    check = answer_check.check(str(tmp_path), record, sample_of("title", GOOD), DONE)
    assert "raypd evaluate" in check.next_step
    assert f"raypd fit CONFIG fit.labels={tmp_path}/labels.jsonl" in check.next_step
    # After the evaluation the step comes that follows it.
    (tmp_path / "evaluation.html").touch()
    check = answer_check.check(str(tmp_path), record, sample_of("title", GOOD), DONE)
    assert f"raypd fit CONFIG fit.labels={tmp_path}/labels.jsonl" in check.next_step
    assert "raypd evaluate" not in check.next_step


@pytest.mark.parametrize(
    ("documents", "part"),
    [
        (100, "/run` for 54 more labels, from which `raypd fit` makes a better model"),
        (20, "/run` for 14 more labels, then extract and label 40 more documents"),
        (6, "all answered documents of this run have labels: extract and label 54 more"),
    ],
)
def test_a_fit_is_advised_once_its_labels_are_enough(tmp_path, documents, part):
    root = tmp_path / "run"
    root.mkdir()
    (root / "labels.jsonl").write_text("{}\n" * 6)
    progress = RunProgress("complete", documents, 0, 5.0)
    check = answer_check.check(
        str(root), RunRecord("f", config(QWEN)), sample_of("title", GOOD), progress
    )
    assert part in check.next_step
    assert "fit CONFIG" not in check.next_step


def write_answers(path: Path, documents: int) -> Path:
    """A user's own file of labels."""
    path.write_text("id,title\n" + "".join(f"{n},Baker\n" for n in range(documents)))
    return path


def next_step(root: Path, tree: dict[str, Any], values: Sequence[dict[str, Any]] = GOOD) -> str:
    sample = sample_of("title", values)
    return answer_check.check(str(root), RunRecord("f", tree), sample, DONE).next_step


def test_labels_that_the_configuration_names_lead_to_a_fit(tmp_path):
    (tmp_path / "labels.jsonl").write_text("{}\n" * 14)
    labels = write_answers(tmp_path / "labels.csv", 160)
    tree = {**config(QWEN), "fit": {"labels": str(labels)}}
    assert "; `raypd fit CONFIG` trains a better or cheaper" in next_step(tmp_path, tree)
    # The labels of a folder, such as a teacher's run, are not counted.
    folder = {**tree, "fit": {"labels": str(tmp_path)}}
    assert "; `raypd fit CONFIG` trains a better or cheaper" in next_step(tmp_path, folder)
    toy = {**config(), "fit": {"labels": str(labels)}}
    step = next_step(tmp_path, toy, CLERKS)
    assert step.endswith("or train this one on your labels: `raypd fit CONFIG`")
    write_answers(labels, 20)
    for path in (labels, tmp_path / "gone.csv", tmp_path / "gone"):
        tree["fit"] = {"labels": str(path)}
        assert "for 6 more labels" in next_step(tmp_path, tree)
    assert "raypd review" in next_step(tmp_path, {**toy, "fit": tree["fit"]}, CLERKS)


def test_a_model_that_was_trained_for_the_task_is_evaluated_and_not_fitted_again(tmp_path):
    labels = write_answers(tmp_path / "labels.csv", 160)
    tree = {**config(QWEN), "fit": {"labels": str(labels)}}
    card = {"method": "hpd", "documents": 100}
    record = RunRecord("f", tree, model_card=card)
    sample = sample_of("title", GOOD)

    def step() -> str:
        return answer_check.check(str(tmp_path), record, sample, DONE).next_step

    assert step() == f"`raypd evaluate {tmp_path} LABELS` says how many values are right"
    (tmp_path / "evaluation.html").write_text("")
    assert step() == f"{tmp_path}/evaluation.html shows which values were wrong"


@pytest.mark.parametrize(
    ("column", "keys"), [("target", ""), ("gold", " training.labels_column=gold")]
)
def test_labels_of_the_last_evaluation_lead_to_a_fit(tmp_path, column, keys):
    (tmp_path / "labels.jsonl").write_text("{}\n" * 14)
    labels = write_answers(tmp_path / "a&b.csv", 160)
    page = tmp_path / "evaluation.html"
    path = str(labels).replace("&", "&amp;")
    page.write_text(f'<main data-labels="{path}" data-column="{column}">')
    fit = f"`raypd fit CONFIG 'fit.labels={labels}'{keys}`"
    shows = f"{page} shows which values were wrong; {fit} trains a better"
    assert next_step(tmp_path, config(QWEN)).startswith(shows)
    assert next_step(tmp_path, config(), CLERKS).endswith(f"on your labels: {fit}")
    write_answers(labels, 59)
    assert "for 6 more labels" in next_step(tmp_path, config(QWEN))
    labels.unlink()
    assert "for 6 more labels" in next_step(tmp_path, config(QWEN))


@pytest.mark.parametrize(
    ("model", "card", "part"),
    [
        ("fake", {}, "made up"),
        ("smollm2-135m-instruct", {}, "toy"),
        (QWEN, {}, "not trained for this task"),
        (QWEN, CARD, "trained for this task on 200 documents"),
        (QWEN, {**CARD, "method": "hyper_parallel"}, "not for this run's method"),
        ({"name": "gpt", "endpoint": {"url": "https://x.test/v1"}}, {}, "at https://x.test/v1"),
    ],
)
def test_the_model_is_called_what_it_is(model, card, part):
    text = answer_check.describe_model(config(model), card)
    assert part in text
    if card and "not the one" not in part:
        assert "not trained" not in text


def test_a_calibrated_confidence_names_its_labels(tmp_path):
    calibration = {
        "weights": [1.0, 0.0, 0.0, 0.0],
        "intercept": 0.0,
        "attributes": {},
        "values": 120,
    }
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    calibrated = config({"name": str(tmp_path)})
    assert "120" in answer_check.describe_confidence(calibrated)
    assert "uncalibrated" in answer_check.describe_confidence(config(QWEN))
    # The run began before this file was made, or with another one.
    assert "uncalibrated" in answer_check.describe_confidence(calibrated, calibrated_on=0)
    assert "70" in answer_check.describe_confidence(calibrated, calibrated_on=70)


def test_the_page_of_a_run_shows_its_check(tmp_path: Path):
    run = data.load(str(build(tmp_path / "run", Plan(units=4))))
    assert run.check is not None
    assert run.check.model
    assert run.check.next_step


def test_a_page_shows_as_many_documents_as_it_can_of_units_of_different_sizes():
    """327 documents in units of 256 and 71: an equal share of both would leave a quarter free."""
    units = []
    for name, documents in (("a.jsonl", 256), ("b.jsonl", 71)):
        rows = [{"source": name, "row": n, "id": str(n), "status": "ok"} for n in range(documents)]
        units.append([[row] for row in rows])
    shown = report_sample._documents(units, [])
    assert len(shown) == 240
    assert Counter(document.source for document in shown) == {"a.jsonl": 169, "b.jsonl": 71}
