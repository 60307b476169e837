"""The estimate on the page: what was estimated, how the bill held against it, and a folder that has nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypd.errors import ConfigError, RunError
from raypd.report import data, estimate_section, page
from raypd.report.status import Watch
from raypd.run import text
from tests.report import estimates, hostile
from tests.report.browser import DESKTOP, PHONE, open_page
from tests.report.builder import Plan, build
from tests.report.test_page import Tags


def _compared(root: Path) -> estimate_section.BillComparison:
    return estimate_section.section(data.load(str(root))).comparison


def _rows(found: estimate_section.BillComparison) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in found.table.rows}


def test_what_was_estimated_stands_on_the_page(tmp_path):
    root = build(tmp_path / "run", Plan(units=40))
    tree = estimates.put(root)
    shown = Tags(page.render(data.load(str(root)))).text
    for part in (
        "Made 2026-09-20 20:00:00 UTC for 1,000 documents.",
        "hyper_parallel: measured on NVIDIA L40S, 64 documents, 83 s.",
        "hyper_parallel on L40S is 5 [4.71-5.31] times as fast as autoregressive decoding.",
        "0.769 [0.724-0.817]", "24.3", "GPU-hours", "8 nodes", "g6e.48xlarge", "1.360 [1.281-1.444]", "6.800",
        "start-up is as measured here, 48 s",
    ):  # fmt: skip
        assert part in shown, part
    whole = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][0]
    assert f"22 min 28 s ${whole['usd']['value']:.2f} [$" in " ".join(shown.split())


def test_the_bill_is_held_against_the_estimate_for_its_kind_and_number_of_machines(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, workers=4))
    tree = estimates.put(root)
    run = data.load(str(root))
    four = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][2]
    assert four["nodes"] == 4
    found = _compared(root)
    off = f"{100 * (run.bill.usd / four['usd']['value'] - 1):+.1f}%"
    rows = _rows(found)
    assert rows["documents"] == ["1,000", "1,000", "+0.0%", text.NONE]
    assert rows["the whole bill"][0] == f"${four['usd']['value']:.2f}"
    assert rows["the whole bill"][1:3] == [f"${run.bill.usd:.2f}", off]
    assert rows["1,000 documents, all costs"] == rows["the whole bill"]
    assert rows["time"][0] == "6 min 13 s"
    assert f"The bill is ${run.bill.usd:.2f}: {off[1:]} above the estimate" in found.said
    assert "outside its 95% interval" in found.said
    assert "for 4 nodes of g6e.xlarge; the run had 4" in found.table.note
    assert "taken to cost $1.86, and was billed at $2.25" in found.table.note


def test_machines_that_followed_one_another_are_not_counted_together(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, workers=2, sessions=3))
    estimates.put(root)
    found = _compared(root)
    assert "for 2 nodes of g6e.xlarge; the run had 2" in found.table.note


def test_a_run_that_goes_on_or_is_of_other_documents_is_compared_by_the_document(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, missing=10, how="interrupted"))
    estimates.put(root)
    found = _compared(root)
    rows = _rows(found)
    assert list(rows) == ["documents", "1,000 documents, all costs"]
    assert rows["documents"][1:3] == ["750", "75% of it"]
    assert found.said.startswith("So far, the bill of 1,000 documents is $")
    root = build(tmp_path / "other", Plan(units=40))
    estimates.put(root, documents=500_000)
    found = _compared(root)
    assert list(_rows(found)) == ["documents", "1,000 documents, all costs"]
    assert "another number of documents" in found.table.note


@pytest.mark.parametrize(
    ("keys", "plan", "said"),
    [
        ({"fingerprint": "ba9876543210"}, {}, "made for another configuration"),
        ({"instances": ["g6e.48xlarge"]}, {}, "no figure for the machines that the run had"),
        ({}, {"ledger": False}, "no bill yet"),
        ({}, {"usd_per_hour": 0.0}, "had no price"),
    ],
)
def test_what_cannot_be_compared_is_said_and_why(no_charts, tmp_path, keys, plan, said):
    root = build(tmp_path / "run", Plan(**{"units": 6, **plan}))
    estimates.put(root, **keys)
    found = _compared(root)
    assert found.table is None
    assert said in found.said
    assert said in Tags(page.render(data.load(str(root)))).text


def test_an_estimate_without_a_run_has_a_page_of_its_own(tmp_path):
    estimates.put(tmp_path / "run")
    run = data.load(str(tmp_path / "run"))
    assert run.state == "estimated"
    shown = Tags(page.render(run)).text
    for part in ("not begun: an estimate", "Qwen/Qwen3-1.7B", "1,000", "0.769", "$0.67", "22 min 28 s", "starts it"):
        assert part in shown, part
    for part in ("Sessions", "Against the bill", "No unit is committed", "None"):
        assert part not in shown, part
    assert Path(page.write(run)) == tmp_path / "run/report.html"
    with pytest.raises(ConfigError, match="only an estimate: start the run"):
        Watch(str(tmp_path / "run"), []).look()
    estimates.put(tmp_path / "run", model="fake")
    assert "Made-up figures." in Tags(page.render(data.load(str(tmp_path / "run")))).text


@pytest.mark.parametrize("broken", ["{", "[]", '{"documents": 3}', json.dumps({"created": "?"})])
def test_a_damaged_estimate_is_named_and_costs_no_report(no_charts, tmp_path, broken):
    root = build(tmp_path / "run", Plan(units=3))
    shown = Tags(page.render(data.load(str(root)))).text
    assert "No estimate stands in the folder of this run. raypd estimate with its configuration" in shown
    (root / "estimate.json").write_text(broken)
    shown = Tags(page.render(data.load(str(root)))).text
    assert f"The estimate cannot be read: {root / 'estimate.json'}" in shown
    (tmp_path / "only").mkdir()
    (tmp_path / "only/estimate.json").write_text(broken)
    with pytest.raises(RunError, match="`raypd estimate` makes it anew"):
        data.load(str(tmp_path / "only"))


def test_an_interval_that_is_not_known_is_not_made_up(no_charts, tmp_path):
    root = build(tmp_path / "run", Plan(units=40))
    tree = estimates.put(root)
    for bill in (bill for one in tree["machines"] for bill in one["bills"]):
        bill["usd"] |= {"low": None, "high": None}
    (root / "estimate.json").write_text(json.dumps(tree))
    found = _compared(root)
    assert _rows(found)["the whole bill"][3] == "unknown"
    assert "interval" not in found.said


@pytest.mark.parametrize(
    ("size", "only"),
    [
        (PHONE, False),
        (DESKTOP, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((PHONE, True), (DESKTOP, False))),
    ],
)
def test_hostile_words_run_nothing_and_it_fits(browser, tmp_path, size, only):
    root = tmp_path / "run" if only else build(tmp_path / "run", Plan(units=6, workers=2))
    texts = hostile.TEXTS
    tree = estimates.put(root, model=texts[1], task=texts[2], method=texts[3], notes=texts[:8])
    tree["speeds"][0] |= {"source": texts[2], "gpu": texts[4]}
    tree["machines"][1]["name"] = texts[5]
    tree["not_measured"] = {texts[6]: [texts[7], texts[18]]}
    (root / "estimate.json").write_text(json.dumps(tree))
    file = tmp_path / "report.html"
    file.write_text(page.render(data.load(str(root))))
    tab, asked, errors = open_page(browser, file, viewport=size)
    assert tab.evaluate(f"window.{hostile.MARK}") is None
    assert asked == [file.as_uri()]
    assert errors == []
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
