"""What `raypd review` shows, and what becomes of its corrected CSV: from a spreadsheet, and saved
by a real browser.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypd.answering.components import build
from raypd.cluster import driver
from raypd.config.load import make_config
from raypd.errors import ConfigError, InputError
from raypd.evaluation.labels import read_labels
from raypd.evaluation.page import write_page
from raypd.evaluation.score import describe, evaluate
from raypd.report import review
from raypd.schema import Attribute
from raypd.tasks.columns import RowValue
from raypd.tasks.labels import typed
from raypd.verify.export import export
from tests.processes import wait_for
from tests.runs import config_tree, extraction, write_rows

ATTRIBUTES = [
    {"name": "Brand"},
    {"name": "Size", "type": "number"},
    {"name": "Color", "type": "enum", "values": ["red", "blue"]},
    {"name": "Tags", "many": True},
    {"name": "From", "type": "date"},
    {"name": "New", "type": "boolean"},
]

# Labels that `--apply` accepts, and then those that it refuses.
DECIMALS = ["7.5", "-7.5", "1.299,50", "1 299.5", "0.5 km"]
INTEGERS = [
    "7",
    "-7",
    "\u22127",
    "1e5",
    "1.5e3",
    "1,299.00",
    "1.299,-",
    "1'299.00",
    "7.0",
    "Rs.500",
]
INTEGERS += [
    "$5",
    "5 kg",
    "1 299",
    "1'299",
    "99%",
    "~20 l",
    "١٢",
    "5\u00ad0",
    "1\u200b,299.00",
    ".0",
]
NO_NUMBERS = ["seven", "1 h 30 min", "4 to 6", "4-6", "12.05.2024", "10:30", "5 x 3", "1 2", "1/2"]


@pytest.fixture
def run(tmp_path, in_process) -> str:
    """The folder of a run over forty documents."""
    rows = [
        {
            "id": f"={n}",
            "title": f"<b>Shoe</b> {n}",
            "category": "shoes",
        }
        for n in range(40)
    ]
    write_rows(tmp_path / "in.jsonl", rows)
    fake = {"name": "fake", "fake": {"load_seconds": 0}}
    tree = config_tree(
        extraction(shoes=ATTRIBUTES),
        tmp_path / "in.jsonl",
        tmp_path / "run",
        model=fake,
        input={"text_columns": ["title"]},
    )
    config = make_config(tree | {"cluster": {"unit_documents": 10}})
    driver.run_extract(config, build=build)
    return config.output.path


def corrected(path: str, **values: str) -> list[dict[str, str]]:
    """The lines of a CSV, with other values for all documents in the column `correct`."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {
            **row,
            "correct": values.get(row["attribute"], row["correct"]),
            "reviewed": "x",
        }
        for row in rows
    ]


def saved(
    rows: list[dict[str, str]], path: Path, delimiter: str = ",", encoding: str = "utf-8"
) -> str:
    with open(path, "w", newline="", encoding=encoding) as file:
        out = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        out.writeheader()
        out.writerows(rows)
    return str(path)


def test_corrections_become_labels_that_evaluate_reads(run, tmp_path):
    page, table, _ = review.write(run, 12)
    html = Path(page).read_text()
    assert "<b>Shoe" not in html
    assert html.count("<article") == 12
    rows = corrected(
        table, Brand="'=1+1", Size="", Color="blue", Tags='["a", "b"]', New="TRUE", From=""
    )  # as a spreadsheet has it
    assert all(row["id"].startswith("'=") for row in rows)  # no spreadsheet runs it
    where, count, _, _ = review.apply(run, saved(rows, tmp_path / "mine.csv"), None)
    labels = [json.loads(line) for line in Path(where).read_text().splitlines()]
    assert count == len(labels) == 12
    first = labels[0]
    assert first["target"] == {
        "Brand": "=1+1",
        "Size": None,
        "Color": "blue",
        "Tags": ["a", "b"],
        "New": True,
        "From": None,
    }
    assert first["id"][0] == "="
    assert first["title"][:4] == "<b>S"
    assert first["category"] == "shoes"
    assert evaluate(run, where).unlabelled == 28
    # The other lines were deleted.
    seen = [row for row in corrected(table, Color="N/A") if row["attribute"] == "Color"]
    where, _, _, _ = review.apply(run, saved(seen, tmp_path / "some.csv", delimiter=";"), None)
    labels = [json.loads(line) for line in Path(where).read_text().splitlines()]
    assert [row["target"] for row in labels] == [{"Color": None}] * 12
    # The same are drawn again, if none has labels in the run's folder.
    Path(where).unlink()
    drawn = Path(table).read_bytes()
    assert Path(review.write(run, 12)[1]).read_bytes() == drawn


@pytest.mark.parametrize(
    ("encoding", "delimiter"), [("cp1252", ";"), ("utf-16", "\t"), ("utf-8-sig", ";")]
)
def test_a_spreadsheet_may_save_corrections_in_its_own_encoding(run, tmp_path, encoding, delimiter):
    rows = corrected(review.write(run, 4)[1], Brand="Möbelhäuser in München, Köln und Österreich")
    file = saved(rows, tmp_path / "mine.csv", delimiter, encoding)
    labels, _, _, _ = review.apply(run, file, None)
    for line in Path(labels).read_text().splitlines():
        assert json.loads(line)["target"]["Brand"] == "Möbelhäuser in München, Köln und Österreich"


def test_an_unsure_value_stands_in_its_box_as_the_model_gave_it(run, monkeypatch):
    unsure = [
        RowValue("", "Size", None, "unsure", 0.2, "7.50"),
        RowValue("", "Color", None, "unsure", 0.2, '"Red"'),
    ]
    monkeypatch.setattr(review, "row_values", lambda row: unsure)
    page, table, _ = review.write(run, 1)
    assert [(row["attribute"], row["correct"]) for row in corrected(table)] == [
        ("Size", "7.5"),
        ("Color", "red"),
    ]
    assert 'value="red"' in Path(page).read_text()


UNREAD = [
    RowValue("", "Brand", "Acme", "ok", 0.9, None),
    RowValue("", "Size", None, "ambiguous", 0.87, '"7.500 <b>"'),
    RowValue("", "Color", None, "invalid", 0.9, '"green"'),
    RowValue("", "From", None, "null", 0.9, None),
    RowValue("", "New", None, "unsure", 0.2, "maybe"),
    RowValue("", "Tags", None, "invalid", 0.9, "["),
]


@pytest.fixture
def unread_run(run, monkeypatch) -> str:
    """The folder of a run in which four answers of each document are no values."""
    monkeypatch.setattr(review, "row_values", lambda row: UNREAD)
    return run


def both_ways(run: str, file: str) -> dict[str, Any]:
    """The only label that `--apply` makes of a file, which `evaluate` reads in the same way."""
    where, count, _, _ = review.apply(run, file, None)
    assert count == 1
    label = json.loads(Path(where).read_text())
    assert read_labels(file, "target", run)[label["id"]]["target"] == label["target"]
    return label["target"]


def test_an_answer_that_is_no_value_becomes_a_label_only_if_somebody_writes_it(
    unread_run, tmp_path
):
    table = review.write(unread_run, 1)[1]
    rows = corrected(table)
    shown = {row["attribute"]: (row["status"], row["raw"], row["correct"]) for row in rows}
    assert shown["Size"] == ("ambiguous", '"7.500 <b>"', "")
    assert shown["New"] == ("invalid", "maybe", "")
    assert shown["From"] == ("null", "", "")
    file = saved(rows, tmp_path / "seen.csv")
    assert both_ways(unread_run, file) == {"Brand": "Acme", "From": None}
    rows = corrected(table, Size="7500", Color="null")
    file = saved(rows, tmp_path / "written.csv")
    assert both_ways(unread_run, file) == {
        "Brand": "Acme",
        "Size": 7500,
        "Color": None,
        "From": None,
    }
    rows = [row for row in corrected(table) if row["attribute"] == "Size"]
    with pytest.raises(InputError, match="Write the value into `correct`, or `null` if"):
        review.apply(unread_run, saved(rows, tmp_path / "open.csv"), None)
    # A file of an earlier version has no statuses.
    rows = [{k: v for k, v in row.items() if k not in ("status", "raw")} for row in rows]
    assert both_ways(unread_run, saved(rows, tmp_path / "old.csv")) == {"Size": None}


def test_a_cut_text_becomes_a_label_only_if_somebody_writes_it(run, tmp_path, monkeypatch):
    values = [
        RowValue("", "Brand", "Acme and Acme and Ac", "truncated", 0.6, None),
        RowValue("", "Color", "red", "ok", 0.9, None),
    ]
    monkeypatch.setattr(review, "row_values", lambda row: values)
    page, table, _ = review.write(run, 1)
    assert "cut before its end" in Path(page).read_text()
    rows = corrected(table)
    shown = {row["attribute"]: (row["value"], row["raw"], row["correct"]) for row in rows}
    assert shown["Brand"] == ("", "Acme and Acme and Ac", "")
    seen = saved(rows, tmp_path / "seen.csv")
    assert both_ways(run, seen) == {"Color": "red"}
    written = saved(corrected(table, Brand="Acme"), tmp_path / "written.csv")
    assert both_ways(run, written) == {"Brand": "Acme", "Color": "red"}
    # Files of earlier versions and of `raypd export` have the cut text as value.
    for row in rows:
        if row["attribute"] == "Brand":
            row["value"] = row["correct"] = "Acme and Acme and Ac"
    earlier = saved(rows, tmp_path / "earlier.csv")
    assert both_ways(run, earlier) == {"Color": "red"}
    for row in rows:
        if row["attribute"] == "Brand":
            row["correct"] = "null"
    absent = saved(rows, tmp_path / "absent.csv")
    assert both_ways(run, absent) == {"Brand": None, "Color": "red"}


def reload_until(view: Any, shows: Callable[[], bool]) -> None:
    """Load a page again until it shows what was done: on a busy machine Chromium's processes tell
    each other a little later what a page has kept.
    """

    def reloaded() -> bool:
        view.reload()
        return shows()

    wait_for(reloaded)


def test_a_browser_makes_no_null_of_an_answer_that_is_no_value(unread_run, tmp_path, closable):
    view = closable.new_page()
    problems: list[str] = []
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.goto(f"file://{review.write(unread_run, 1)[0]}")
    size = view.locator(".field[data-name=Size]")
    assert "ambiguous" in size.inner_text()
    assert 'the model wrote "7.500 <b>": not clearly one number' in size.inner_text()
    color = "box => getComputedStyle(box).borderColor"
    brand_color = view.locator(".field[data-name=Brand] .box").evaluate(color)
    assert size.locator(".box").evaluate(color) != brand_color
    assert view.locator(".field[data-name=From] .hint").count() == 0
    view.locator(".field[data-name=Brand] .box").press("Enter")
    with view.expect_download() as download:
        view.click("#save")
    download.value.save_as(tmp_path / "seen.csv")
    assert "1 of 1 reviewed; 4 without a label" in view.inner_text("#done")
    seen = {"Brand": "Acme", "From": None}
    assert both_ways(unread_run, str(tmp_path / "seen.csv")) == seen
    size.locator(".absent").check()
    for name in ("Color", "New", "Tags"):
        view.locator(f".field[data-name={name}] .absent").check()
    # Who writes a value takes back that there is none.
    view.locator(".field[data-name=Color] .box").select_option("blue")
    new = view.locator(".field[data-name=New] .absent")
    new.uncheck()
    reload_until(view, lambda: size.locator(".absent").is_checked() and not new.is_checked())
    with view.expect_download() as download:
        view.click("#save")
    download.value.save_as(tmp_path / "said.csv")
    said = seen | {"Size": None, "Color": "blue", "Tags": None}
    assert both_ways(unread_run, str(tmp_path / "said.csv")) == said
    assert problems == []


def test_half_of_them_are_the_least_sure(run, monkeypatch):
    monkeypatch.setattr(review, "_confidence", lambda row: 1 / (1 + row["row"]))  # the last ones
    rows = sorted({int(row["row"]) for row in corrected(review.write(run, 8)[1])})
    last = sorted(place for _, place in review._chosen_rows(run, 40)[0])
    assert set(last[-4:]) <= set(rows)
    assert set(last[-8:]) != set(rows)  # the others are drawn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"Color": "green"},
            r"mine\.csv:\d+: 'green' is not a value of 'Color', which is one of red, blue",
        ),
        ({"Size": "7/8"}, r"'7/8' is not a value of 'Size', which is a number: write it as 7.5"),
        (
            {"From": "16.03.2026"},
            r"'16.03.2026' is not a value of 'From', which is a date: write it as 2026-03-16",
        ),
        ({"row": "x"}, "not a line of `raypd review`"),
        ({"row": "9" * 5000}, "not a line of `raypd review`"),
        ({"row": "999999"}, "the input does not have"),
        ({"attribute": "Brnd"}, "'Brnd' is not an attribute of 'shoes'"),
        ({"correct": None}, "mine.csv:1: no column correct"),
    ],
)
def test_what_cannot_be_a_label_is_named_with_its_line(change, message, run, tmp_path):
    rows = corrected(review.write(run, 4)[1], **{k: v for k, v in change.items() if k[0].isupper()})
    for row in rows:
        for name, value in change.items():
            if name in row and value is None:
                del row[name]
            elif name in row:
                row[name] = value
    with pytest.raises(InputError, match=message):
        review.apply(run, saved(rows, tmp_path / "mine.csv"), None)


def test_lines_that_contradict_each_other_are_refused_and_the_same_twice_is_no_fault(run, tmp_path):
    rows = corrected(review.write(run, 2)[1], Color="red")
    first = next(row for row in rows if row["attribute"] == "Color")
    _, count, _, _ = review.apply(run, saved([*rows, first], tmp_path / "twice.csv"), None)
    assert count == 2
    rows.append({**first, "correct": "blue"})
    line = len(rows) + 1
    with pytest.raises(InputError, match=rf"mine\.csv:{line}: 'Color' .* 'blue' here and 'red' on"):
        review.apply(run, saved(rows, tmp_path / "mine.csv"), None)


@pytest.mark.parametrize(
    "text",
    [
        "=1+1",
        "\t=1+1",
        "\r\n=1+1",
        " =1+1",
        "\u3000\uff1d1+1",
        "\uff1d1+1",
        "\uff0b1+a",
        "\uff201",
        "@SUM(A1)",
        "-2+3",
        "\tx",
        "'=1",
    ],
)
def test_no_cell_begins_as_a_formula_and_each_is_read_back(run, tmp_path, monkeypatch, text):
    monkeypatch.setattr(
        review, "row_values", lambda row: [RowValue("", "Brand", text, "ok", 0.5, None)]
    )
    rows = corrected(review.write(run, 1)[1])
    assert [row["correct"] for row in rows] == ["'" + text]
    where, _, _, _ = review.apply(run, saved(rows, tmp_path / "mine.csv"), None)
    assert json.loads(Path(where).read_text())["target"] == {"Brand": text.strip()}


def test_only_extractions_that_have_begun_are_reviewed(run, tmp_path):
    for unit in Path(run, "units").iterdir():
        unit.unlink()
    with pytest.raises(ConfigError, match="no document is answered yet"):
        review.write(run, 4)
    with pytest.raises(ConfigError, match="no run here"):
        review.write(str(tmp_path / "nothing"), 4)


def test_a_browser_saves_what_was_looked_at(run, tmp_path, browser):
    view = browser.new_page()
    problems: list[str] = []
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.goto(f"file://{review.write(run, 6)[0]}")
    view.click("#save")
    assert view.inner_text("#done") == "nothing is reviewed yet"
    view.locator(".field[data-name=Brand] .box").nth(1).fill('\uff1da "b", c')
    with view.expect_download() as download:
        view.click("#save")
    download.value.save_as(tmp_path / "saved.csv")
    assert '"x","least sure"' in (tmp_path / "saved.csv").read_text()
    assert '"\'\uff1da ""b"", c"' in (tmp_path / "saved.csv").read_text()
    where, count, _, _ = review.apply(
        run, str(tmp_path / "saved.csv"), str(tmp_path / "mine.jsonl")
    )
    assert count == 1
    assert json.loads(Path(where).read_text())["target"]["Brand"] == '\uff1da "b", c'
    assert problems == []


def test_a_browser_marks_a_text_that_is_not_written_as_its_type_wants_it(run, browser):
    view = browser.new_page()
    view.goto(f"file://{review.write(run, 2)[0]}")
    header = view.inner_text("header")
    assert header.count("orange") == 1
    assert "orange frame marks a value to look at: its confidence is below 0.5, or the" in header

    def is_marked_as(value_type: str, text: str) -> bool:
        """Whether a box of a type marks a text."""
        pattern = review._pattern(Attribute(name="a", type=value_type))
        check = """([keys, text]) => {
            const box = Object.assign(document.createElement("input"), keys);
            box.value = text;
            return !box.checkValidity();
        }"""
        return view.evaluate(check, [{"type": "text", "pattern": pattern}, text])

    assert not is_marked_as("date-time", "2026-03-16T18:30:00+01:00")
    assert is_marked_as("date-time", "2026-03-16 18:30")
    for text in (*INTEGERS, *DECIMALS):
        assert not is_marked_as("number", text), text
    for text in INTEGERS:
        assert not is_marked_as("integer", text), text
    for text in DECIMALS:
        assert is_marked_as("integer", text), text
    for value_type in ("number", "integer"):
        for text in NO_NUMBERS:
            assert is_marked_as(value_type, text), text
    for name, wrong, right in (
        ("From", "16.03.2026", "2026-03-16"),
        ("Size", "1 h 30 min", "7,5 cm"),
    ):
        field = view.locator(f".field[data-name={name}]").first
        box = field.locator(".box")
        for text, is_marked in ((wrong, True), (right, False), ("", False)):
            box.fill(text)
            assert box.evaluate("box => box.matches(':invalid')") == is_marked
            assert field.locator(".form").is_visible() == is_marked
        box.fill(wrong)
    with view.expect_download():
        view.click("#save")
    assert view.inner_text("#done").endswith("; 2 not in the form of their type (red)")


@pytest.mark.parametrize("value_type", ["number", "integer"])
def test_the_format_of_a_number_holds_for_every_label_that_is_accepted(value_type):
    attribute = Attribute(name="a", type=value_type)
    pattern = attribute.value_type.label_pattern()
    accepted = INTEGERS if value_type == "integer" else [*INTEGERS, *DECIMALS]
    for text in accepted:
        assert typed(attribute, text) is not None
        assert re.fullmatch(pattern, text), text
    for text in NO_NUMBERS:
        assert re.fullmatch(pattern, text) is None
        with pytest.raises(ValueError, match="is not a value of"):
            typed(attribute, text)


def test_documents_that_nobody_reviewed_become_no_labels(run, tmp_path):
    _, table, _ = review.write(run, 6)
    with pytest.raises(InputError, match="no document is marked as reviewed"):
        review.apply(run, table, None)
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    marked = rows[0]["id"]
    changed = rows[-1]["id"]
    for row in rows:
        if row["id"] == marked:
            row["reviewed"] = "x"
    rows[-1]["correct"] = "" if rows[-1]["value"] else "true"
    where, count, _, values = review.apply(run, saved(rows, tmp_path / "mine.csv"), None)
    labels = [json.loads(line) for line in Path(where).read_text().splitlines()]
    assert count == 2
    assert values == 1
    assert {"'" + label["id"] for label in labels} == {marked, changed}
    # `evaluate` reads the corrected file itself, and as `--apply` does.
    by_file = evaluate(run, str(tmp_path / "mine.csv"))
    by_labels = evaluate(run, where)
    assert by_file.measures == by_labels.measures
    assert by_file.unlabelled == 38


def test_a_corrected_export_is_applied_for_its_changed_documents_alone(run, tmp_path):
    path = tmp_path / "answers.csv"
    assert export(run, str(path)) == 40
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with pytest.raises(InputError, match="add a column `reviewed` and put an x into the lines"):
        review.apply(run, str(path), None)
    marked = [{**row, "reviewed": "x" if row["id"] == rows[5]["id"] else ""} for row in rows]
    other = str(tmp_path / "other.jsonl")
    _, count, _, changed = review.apply(run, saved(marked, tmp_path / "marked.csv"), other)
    assert (count, changed) == (1, 0)
    rows[3]["Tags"] = "a; b"
    where, count, _, changed = review.apply(run, saved(rows, tmp_path / "mine.csv"), None)
    assert count == 1
    assert changed == 1
    label = json.loads(Path(where).read_text())
    assert label["target"]["Tags"] == ["a", "b"]
    assert label["id"] == "=3"


def test_an_empty_cell_of_an_export_is_no_label_if_the_answer_was_no_value(
    run, tmp_path, monkeypatch
):
    path = tmp_path / "answers.csv"
    export(run, str(path))
    with open(path, encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    row.update(reviewed="x", Size="", From="")
    rows_of = review.unit_rows.rows_of

    def unread(root):
        for answer in rows_of(root):
            for value in answer["values"]:
                if value["name"] in ("Size", "From"):
                    status = "ambiguous" if value["name"] == "Size" else "null"
                    value.update(value=None, status=status)
            yield answer

    monkeypatch.setattr(review.unit_rows, "rows_of", unread)
    where, _, _, _ = review.apply(run, saved([row], tmp_path / "empty.csv"), None)
    target = json.loads(Path(where).read_text())["target"]
    assert "Size" not in target
    assert target["From"] is None
    row["Size"] = "null"
    where, _, _, _ = review.apply(run, saved([row], tmp_path / "null.csv"), None)
    assert json.loads(Path(where).read_text())["target"]["Size"] is None


def test_a_file_that_does_not_exist_is_named_without_a_guess_at_another(run, tmp_path):
    (tmp_path / "answers.csv").touch()
    with pytest.raises(InputError) as failed:
        review.apply(run, str(tmp_path / "nope.csv"), None)
    assert str(failed.value) == f"{tmp_path}/nope.csv: no such file or folder"
    with pytest.raises(InputError, match=r"no such file or folder; did you mean .*/answers\.csv"):
        review.apply(run, str(tmp_path / "answer.csv"), None)


def test_a_number_that_an_export_writes_in_another_way_is_no_correction() -> None:
    size = Attribute(name="Size", type="number")
    assert review._is_same(size, "58000", 58000.0)
    assert review._is_same(size, "", None)
    assert not review._is_same(size, "58000", 58001.0)
    assert not review._is_same(size, "", 0.0)
    assert not review._is_same(size, "unknown", None)


def test_a_new_review_never_replaces_corrections_that_are_in_the_file(run, tmp_path):
    _, table, _ = review.write(run, 6)
    saved(corrected(table, Brand="Acme"), Path(table))
    edited = Path(table).read_bytes()
    with pytest.raises(ConfigError, match="holds the review of 6 documents"):
        review.write(run, 6)
    assert Path(table).read_bytes() == edited
    review.apply(run, table, None)
    # The labels hold what the file held.
    review.write(run, 6)


def test_a_second_review_shows_documents_without_labels(run, tmp_path):
    _, table, left_out = review.write(run, 6)
    assert left_out == 0
    first = corrected(table, Brand="Acme")
    review.apply(run, saved(first, tmp_path / "first.csv"), None)
    page, table, left_out = review.write(run, 60)
    assert left_out == 6
    assert "6 documents with labels are left out." in Path(page).read_text()
    second = corrected(table, Brand="Bolt")
    assert {row["id"] for row in second}.isdisjoint(row["id"] for row in first)
    assert len({row["id"] for row in second}) == 34
    _, count, new, _ = review.apply(run, saved(second, tmp_path / "second.csv"), None)
    assert (count, new) == (40, 34)
    with pytest.raises(ConfigError, match="all 40 answered documents already have labels"):
        review.write(run, 6)


def test_applying_another_file_keeps_the_labels_of_other_documents(run, tmp_path):
    _, table, _ = review.write(run, 6)
    rows = corrected(table, Brand="Acme")
    where, count, new, _ = review.apply(run, saved(rows, tmp_path / "first.csv"), None)
    assert count == new == 6
    ids = {json.loads(line)["id"] for line in Path(where).read_text().splitlines()}
    of_one = [row for row in corrected(table, Brand="Bolt") if row["id"] == rows[0]["id"]]
    where, count, new, _ = review.apply(run, saved(of_one, tmp_path / "second.csv"), None)
    assert count == 6
    assert new == 1
    labels = [json.loads(line) for line in Path(where).read_text().splitlines()]
    assert {label["id"] for label in labels} == ids
    brands = {label["id"]: label["target"]["Brand"] for label in labels}
    assert brands.pop(rows[0]["id"].removeprefix("'")) == "Bolt"
    assert set(brands.values()) == {"Acme"}


def applied(view: Any, run: str, file: Path) -> tuple[int, dict[str, Any]]:
    """Save a page's corrections and apply them; return the documents and the first one's label."""
    with view.expect_download() as download:
        view.click("#save")
    download.value.save_as(file)
    where, count, _, _ = review.apply(run, str(file), None)
    return count, json.loads(Path(where).read_text().splitlines()[0])["target"]


def test_a_browser_edits_choices_and_lists_and_advances_with_enter(run, tmp_path, browser):
    view = browser.new_page()
    view.goto(f"file://{review.write(run, 3)[0]}")
    first = view.locator("article").nth(0)
    first.locator(".field[data-name=Color] select").select_option("blue")
    first.locator(".field[data-name=New] select").select_option("true")
    tags = first.locator(".field[data-name=Tags]")
    for item in ("a, b", "c"):
        tags.locator(".more").click()
        tags.locator(".box").last.fill(item)
    second = view.locator("article").nth(1)
    first.locator(".field[data-name=Brand] .box").press("Enter")
    assert second.locator(".box").first.evaluate("box => box === document.activeElement")
    second.locator(".box").first.press("Enter")
    assert view.inner_text("#done") == "2 of 3 reviewed"
    count, target = applied(view, run, tmp_path / "saved.csv")
    assert count == 2
    assert target["Color"] == "blue"
    assert target["New"] is True
    assert target["Tags"] == ["a, b", "c"]


@pytest.fixture
def closable(browser):
    """A context of the browser with storage of its own, in which a page can be opened again."""
    context = browser.new_context()
    yield context
    context.close()


def test_a_review_is_still_there_when_the_page_is_loaded_again(run, tmp_path, closable):
    view = closable.new_page()
    problems: list[str] = []
    view.on("pageerror", lambda error: problems.append(str(error)))
    path = review.write(run, 3)[0]
    view.goto(f"file://{path}")
    first = view.locator("article").nth(0)
    first.locator(".field[data-name=Brand] .box").fill("Acme")
    first.locator(".field[data-name=Color] select").select_option("blue")
    tags = first.locator(".field[data-name=Tags]")
    while tags.locator(".drop").count():
        tags.locator(".drop").first.click()
    for item in ("a, b", "c"):
        tags.locator(".more").click()
        tags.locator(".box").last.fill(item)
    view.locator("article").nth(1).locator(".looked").check()
    view.locator("article").nth(2).locator(".looked").check()
    view.locator("article").nth(2).locator(".looked").uncheck()
    reload_until(view, lambda: view.inner_text("#done") == "2 of 3 reviewed")
    view.close()
    view = closable.new_page()
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.goto(f"file://{path}")
    assert view.inner_text("#done") == "2 of 3 reviewed"
    count, target = applied(view, run, tmp_path / "saved.csv")
    assert count == 2
    assert target["Brand"] == "Acme"
    assert target["Color"] == "blue"
    assert target["Tags"] == ["a, b", "c"]
    # Another run of the same documents begins anew.
    record = json.loads(Path(run, "run.json").read_text())
    Path(run, "run.json").write_text(json.dumps({**record, "created": "2020-01-01T00:00:00Z"}))
    Path(run, "labels.jsonl").unlink()
    view.goto(f"file://{review.write(run, 3)[0]}")
    assert view.inner_text("#done") == "0 of 3 reviewed"
    assert problems == []


def test_without_storage_the_browser_asks_before_a_review_is_lost(run, closable):
    full = "Storage.prototype.setItem = () => { throw new DOMException('full'); };"
    closable.add_init_script(full)
    view = closable.new_page()
    dialogs: list[str] = []
    view.on("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.accept()))
    view.goto(f"file://{review.write(run, 3)[0]}")
    view.reload()
    assert dialogs == []
    view.locator(".field[data-name=Brand] .box").first.fill("Acme")
    view.reload()
    assert dialogs == ["beforeunload"]
    view.locator(".field[data-name=Brand] .box").first.fill("Acme")
    with view.expect_download():
        view.click("#save")
    view.reload()
    assert dialogs == ["beforeunload"]


def test_figures_of_a_review_s_random_documents_are_given_apart(run, tmp_path, monkeypatch):
    monkeypatch.setattr(review, "_confidence", lambda row: 1 / (1 + row["row"]))
    page, table, _ = review.write(run, 8)
    rows = corrected(table)
    chosen = {row["id"]: row["chosen_by_review"] for row in rows}
    # Who reviews the first documents alone has both halves.
    assert list(chosen.values()) == ["at random", "least sure"] * 4
    assert 'data-chosen="least sure"' in Path(page).read_text()
    # The model is right in all documents that were drawn, and wrong in the others.
    for row in rows:
        if row["chosen_by_review"] == "least sure":
            row["correct"] = {"Size": "-1", "Color": "", "New": "", "From": ""}.get(
                row["attribute"], "other"
            )
    where, _, _, _ = review.apply(run, saved(rows, tmp_path / "mine.csv"), None)
    # The marks of a file of labels survive a copy of it, and `evaluate` reads the CSV, too.
    for labels in (Path(where).rename(tmp_path / "copy.jsonl"), tmp_path / "mine.csv"):
        evaluation = evaluate(run, str(labels))
        right = {measure.name: measure for measure in evaluation.at_random}["values right"]
        assert (evaluation.least_sure, right.documents, right.value) == (4, 4, 1.0)
        assert evaluation.measures[0].documents == 8
        text = describe(evaluation)
        assert "chose 4 documents because the model was least sure of them" in text
        # So few do not.
        assert (
            "Only documents that it chose at random represent all documents, and only 4 of them "
            "have labels: " in text
        )
        assert "chosen at random; `raypd review RUN` chooses more" in text
        assert "probably better" not in text
        assert "values right 1.000" in text
    write_page(run, str(labels), evaluation, "target", 0.0)
    assert "only 4 of them have labels" in (Path(run) / "evaluation.html").read_text()
    unsure = [row for row in rows if row["chosen_by_review"] == "least sure"]
    evaluation = evaluate(run, saved(unsure, tmp_path / "unsure.csv"))
    assert "No document that it chose at random has labels" in describe(evaluation)
    drawn = [row for row in rows if row["chosen_by_review"] == "at random"]
    assert "least sure" not in describe(evaluate(run, saved(drawn, tmp_path / "drawn.csv")))
