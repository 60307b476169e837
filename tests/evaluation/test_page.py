"""The page of `raypd evaluate`: every wrong value with its reason, and no text of a document runs in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypd.cluster import driver
from raypd.evaluation import page
from raypd.evaluation.score import evaluate
from tests.report.browser import PHONE, browser, open_page  # noqa: F401
from tests.runs import TITLES, extraction, run_config
from tests.tasks.test_cascade import rows, scripted

GOLD = {  # id -> (brand, size, label)
    "right": ("acme", 42.0, {"Brand": "Acme", "Size": 42}),
    "another": ("Zeta", 42.0, {"Brand": "Acme", "Size": 42}),
    "part": ("Ac", 42.0, {"Brand": "Acme", "Size": 42}),
    "more": ("Acme Inc", 42.0, {"Brand": "Acme", "Size": 42}),
    "invented": ("Acme", 42.0, {"Brand": "Acme", "Size": None}),
    "missing": (None, None, {"Brand": "Acme", "Size": None}),
    "accepted": ("A.C.M.E.", None, {"Brand": "Acme", "Size": None}),
    "failed": (None, None, {"Brand": "Acme", "Size": 1}),
}


@pytest.fixture
def run(tmp_path, in_process):
    """(the folder of a run, its labels)."""
    documents = [{"id": name, "title": f"<img src=x onerror=alert(1)> {name} Zeta"} for name in GOLD]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    accepted = {"Brand": ["Acme", "A.C.M.E."]}
    labels = [{"id": name, "target": gold[-1], "accepted": accepted} for name, gold in GOLD.items()]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    answers = {name: rows(brand, 0.9, size, 0.25) for name, (brand, size, _) in GOLD.items()} | {"failed": "too long"}
    task = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
    config = run_config(task, tmp_path / "in.jsonl", tmp_path / "run", input=TITLES, model={"name": "fake"})
    driver.run_extract(config, build=scripted(answers))
    return config.output.path, str(tmp_path / "labels.jsonl")


def test_every_wrong_value_has_its_reason(run):
    mistakes, by_attribute = page.find(*run, "target", 0.0)
    assert {document.id: [(v.attribute, v.reason) for v in document.values] for document in mistakes} == {
        "another": [("Brand", "another value")],
        "part": [("Brand", "a part of the label")],
        "more": [("Brand", "more than the label")],
        "invented": [("Size", "no label")],
        "missing": [("Brand", "missing")],
        "failed": [("Brand", "no answer"), ("Size", "no answer")],
    }
    brands = next(counts for (_, name), counts in by_attribute.items() if name == "Brand" and counts["right"])
    assert brands == {"right": 3, "another value": 1, "a part of the label": 1, "more than the label": 1, "missing": 1}


def test_the_page_in_a_browser(run, browser):  # noqa: F811
    where = page.write(*run, evaluate(*run), "target", 0.0)
    tab, requests, errors = open_page(browser, Path(where), viewport=PHONE)
    assert (requests, errors) == ([Path(where).as_uri()], [])
    assert tab.locator("article").count() == 6
    another = tab.locator("article", has_text="another")
    assert another.locator("mark").all_inner_texts() == ["Zeta"]
    assert " ".join(another.locator("tbody tr").first.inner_text().split()) == "Brand Acme Zeta another value 0.90"
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
