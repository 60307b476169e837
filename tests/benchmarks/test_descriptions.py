"""The table of descriptions and examples in the prompt; a fake engine answers `fake`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import descriptions
from raypd.errors import RunError
from raypd.run import load_record
from raypd.testing import fake
from tests.runs import write_rows

APP = typer.Typer()
APP.command()(descriptions.main)
SENTENCES = "The 'Brand' attribute refers to a fake name. It is printed on the box."


def row(number: int, category: str) -> dict[str, Any]:
    target = {"Brand": "fake", "Color": None}
    return {
        "id": f"{category}-{number}",
        "category": category,
        "title": f"A thing {number}",
        "description": "",
        "target": target,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three sets with two categories, and the descriptions of WDC-PAVE."""
    data = tmp_path / "data"
    for key in descriptions.SETS.values():
        rows = [row(number, category) for category in ("hats", "teas") for number in range(4)]
        write_rows(data / f"{key}.test.dev.jsonl", rows)
        training = [{**each, "id": f"train-{each['id']}"} for each in rows]
        write_rows(data / f"{key}.train.jsonl", training)
    schema = {"attributes": {"Brand": {"description": SENTENCES}, "Color": {"description": None}}}
    text = json.dumps({"wdc-pave": {"hats": schema, "teas": schema}})
    (data / "attributes.json").write_text(text)
    return data


def results(folder: Path, name: str = "WDC-PAVE") -> dict[str, descriptions.Result]:
    """The results of a set with two documents, by prompt."""
    work = folder.parent / "work"
    data = descriptions.read_set(name, folder, work, 2)
    return dict(descriptions.results_of(data, {"name": "fake"}, work, None))


def table(folder: Path, documents: int) -> list[list[str]]:
    """The cells of the rows that the script prints."""
    work = folder.parent / "work"
    arguments = [str(folder), "fake", "--documents", str(documents), "--work", str(work)]
    result = CliRunner().invoke(APP, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("| fake ")]
    return [re.split(r" \| ", line.strip("| ")) for line in rows]


@pytest.mark.slow
def test_each_set_is_answered_with_each_prompt(folder):
    rows = table(folder, 4)
    pairs = [(name, prompt) for name in descriptions.SETS for prompt in descriptions.PROMPTS]
    assert [(cells[1], cells[2]) for cells in rows] == pairs
    for cells in rows:
        # Brand is right, and Color has a value where its label has none: 2 / (2 + 1).
        assert cells[3] == "0.667 (0.667 to 0.667)"
        if cells[2] == descriptions.NAMES:
            assert cells[4] == ""
        else:
            assert cells[4] == "+0.000 (+0.000 to +0.000)"
        # `fake` stands in WDC-PAVE's description of Brand alone.
        assert cells[5] == ("4 of 8" if cells[1] == "WDC-PAVE" else "0 of 8")


@pytest.mark.slow
def test_prompts_differ_in_descriptions_and_examples_alone(folder):
    results(folder)
    runs = folder.parent / "work"
    tasks = {
        prompt: load_record(str(runs / "wdcpave-2" / prompt.replace(" ", "-"))).config["task"]
        for prompt in descriptions.PROMPTS
    }
    shown = {
        prompt: [
            attribute["description"]
            for category in ("hats", "teas")
            for attribute in task["categories"][category]["attributes"]
        ]
        for prompt, task in tasks.items()
    }
    brand = "The 'Brand' attribute refers to a fake name"
    assert shown[descriptions.NAMES] == shown[descriptions.EXAMPLES] == [""] * 4
    assert shown[descriptions.DESCRIPTIONS] == [brand, "", brand, ""]
    assert tasks[descriptions.NAMES]["examples"] is None
    assert tasks[descriptions.DESCRIPTIONS]["examples"] is None
    examples = tasks[descriptions.EXAMPLES]["examples"]
    assert (Path(examples["path"]), examples["count"]) == (folder / "wdcpave.train.jsonl", 3)


def test_documents_are_of_all_categories(folder):
    data = descriptions.read_set("AE-110k", folder, folder.parent / "work", 4)
    ids = [json.loads(line)["id"] for line in data.documents.read_text().splitlines()]
    assert ids == ["hats-0", "hats-2", "teas-0", "teas-2"]


@pytest.mark.slow
def test_complete_runs_are_kept(folder, monkeypatch):
    first = results(folder)
    monkeypatch.setattr(descriptions, "DecodeWorker", None)
    assert results(folder) == first


def test_a_difference_is_to_names_only(folder, monkeypatch):
    right = fake._record

    def better(name, category):
        # Color, which is null in the labels, is left out where there are descriptions.
        described = any(attribute.description for attribute in category.attributes)
        attributes = category.attributes[:1] if described else category.attributes
        return right(name, category.model_copy(update={"attributes": attributes}))

    monkeypatch.setattr(fake, "_record", better)
    by_prompt = results(folder)
    assert by_prompt[descriptions.NAMES].f1 == pytest.approx(2 / 3)
    assert by_prompt[descriptions.DESCRIPTIONS].f1 == 1
    assert by_prompt[descriptions.DESCRIPTIONS].difference == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert by_prompt[descriptions.EXAMPLES].difference == (0, 0, 0)


def test_documents_that_fail_end_the_measurement(folder):
    file = folder / "oamine.test.dev.jsonl"
    file.write_text(file.read_text().replace("A thing 0", ""))
    with pytest.raises(RunError, match="2 documents failed"):
        results(folder, "OA-Mine")


def test_the_first_sentence_ends_before_a_period_and_a_blank():
    assert descriptions.first_sentence("Weight in lb. or g/m². More. ") == "Weight in lb"
    assert descriptions.first_sentence("Measured in 0.5 steps.") == "Measured in 0.5 steps"
