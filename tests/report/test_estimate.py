"""The estimate on the page: what was estimated, how the bill held against it, and a folder that has nothing else."""

import json
import math
import re
from dataclasses import asdict

import numpy as np
import pytest

from raypd.errors import ConfigError, RunError
from raypd.estimation.bootstrap import Array, exact
from raypd.estimation.machines import EstimateOptions, MethodSpeed, Overhead, assemble
from raypd.report import comparison, data, page
from raypd.report.status import Watch
from raypd.run import text
from raypd.run.layout import ESTIMATE
from tests.report import hostile
from tests.report.browser import DESKTOP, PHONE, open_page
from tests.report.builder import Plan, build
from tests.report.test_page import shown as words_of
from tests.runs import says

FIGURE = {"value": 400.0, "low": 390.0, "high": 410.0}
HOSTED = {
    "model": "other-model", "input": 0.1, "output": 0.5, "date": "2026-11-01", "source": "the vendor's page",
    "usd_per_1000": {"value": 0.012, "low": 0.011, "high": 0.013}, "usd": {"value": 12.0, "low": 11.0, "high": 13.0},
}  # fmt: skip
INSTANCES = ("g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge")


def spread(value: float, by: float) -> Array:
    """A quantity whose 95% interval goes from value / by to value * by."""
    return value * np.exp(np.r_[0.0, math.log(by) / 0.95 * np.linspace(-1, 1, 2001)])


def put(root, documents: float = 1000, instances=INSTANCES, method: str = "hyper_parallel", **keys):
    """Puts an estimate into a run's folder, as `raypd estimate` writes it; other keys replace those of the file."""

    fed = {"prefill_tokens": spread(310, 1.03), "shared_tokens": exact(400)}
    ours, theirs = (MethodSpeed(of, seconds, f"measured on NVIDIA L40S, 64 documents, {took} s", "L40S", "NVIDIA L40S",
                                {**fed, "decode_tokens": spread(decoded, 1.05)})
                    for of, seconds, took, decoded in ((method, spread(1.3, 1.062), 83, 24.3),
                                                       ("autoregressive", exact(6.5), 9, 131)))  # fmt: skip
    options = EstimateOptions(instances=list(instances), head="none", nodes=8)
    found = assemble(None, options, exact(documents), [ours], [theirs], Overhead(48.0), [])
    about = {"fingerprint": "0123456789ab", "model": "Qwen/Qwen3-1.7B", "task": "extraction"}
    tree = {**asdict(found), **about, "created": "2026-09-20T20:00:00+00:00", **keys}
    root.mkdir(parents=True, exist_ok=True)
    (root / ESTIMATE).write_text(json.dumps(tree, allow_nan=False))
    return tree


def compared(root) -> tuple[str, str, dict[str, list[str]]]:
    """What the section says of the bill; its table's note and rows."""
    run = data.load(str(root))
    made = comparison.compare(run, run.forecast)
    return made.sentence, made.note, {row[0]: row[1:] for row in made.rows}


def shown(root) -> str:
    return words_of(data.load(str(root)))


def test_what_was_estimated_stands_on_the_page(no_charts, tmp_path):
    root = build(tmp_path / "run", Plan(units=40))
    assert "No estimate stands in the folder of this run. raypd estimate with its configuration" in shown(root)
    tree = put(root, hosted=[HOSTED], hosted_tokens={"input": FIGURE, "output": FIGURE})
    assert "the same as a hosted batch: other-model $0.012 [0.011-0.013] per 1,000" in shown(root)
    whole, found = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][0], shown(root)
    says(found,
        "Made 2026-09-20 20:00:00 UTC for 1,000 documents.",
        "hyper_parallel: measured on NVIDIA L40S, 64 documents, 83 s.",
        "hyper_parallel on L40S is 5 [4.71-5.31] times as fast as autoregressive decoding.",
        "0.769 [0.724-0.817]", "24.3", "GPU-hours", "8 nodes", "g6e.48xlarge", "1.360 [1.281-1.444]", "6.800",
        "start-up is as measured here, 48 s", f"22 min 28 s ${whole['usd']['value']:.2f} [$")  # fmt: skip


def test_the_bill_is_held_against_the_estimate_for_its_kind_and_number_of_machines(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, workers=4))
    tree, billed = put(root), data.load(str(root)).bill.usd
    four = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][2]
    assert four["nodes"] == 4
    said, note, rows = compared(root)
    off = f"{100 * (billed / four['usd']['value'] - 1):+.1f}%"
    assert rows["documents"] == ["1,000", "1,000", "+0.0%", text.NONE]
    assert rows["the whole bill"][:3] == [f"${four['usd']['value']:.2f}", f"${billed:.2f}", off]
    assert (rows["1,000 documents, all costs"], rows["time"][0]) == (rows["the whole bill"], "6 min 13 s")
    says(said + note,
        f"The bill is ${billed:.2f}: {off[1:]} above the estimate", "outside its 95% interval",
        "for 4 nodes of g6e.xlarge; the run had 4", "taken to cost $1.86, and was billed at $2.25")  # fmt: skip
    # An interval that is not known is not made up.
    for bill in (bill for one in tree["machines"] for bill in one["bills"]):
        bill["usd"] |= {"low": None, "high": None}
    (root / ESTIMATE).write_text(json.dumps(tree))
    said, _, rows = compared(root)
    assert (rows["the whole bill"][3], "interval" in said) == ("unknown", False)


def test_a_run_that_goes_on_or_has_other_documents_is_compared_by_the_document(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, missing=10, how="interrupted"))
    put(root)
    said, _, rows = compared(root)
    assert (list(rows), rows["documents"][1:3]) == (["documents", "1,000 documents, all costs"], ["750", "75% of it"])
    assert said.startswith("So far, the bill of 1,000 documents is $")
    # Machines that followed one another are not counted together.
    root = build(tmp_path / "other", Plan(units=40, workers=2, sessions=3))
    put(root)
    assert "for 2 nodes of g6e.xlarge; the run had 2" in compared(root)[1]
    put(root, documents=500_000)
    _, note, rows = compared(root)
    assert (list(rows), "another number of documents" in note) == (["documents", "1,000 documents, all costs"], True)


@pytest.mark.parametrize(("keys", "plan", "said"), [
    ({"fingerprint": "ba9876543210"}, {}, "made for another configuration"),
    ({"instances": ("g6e.48xlarge",)}, {}, "no figure for the machines that the run had"),
    ({}, {"ledger": False}, "no bill yet"), ({}, {"usd_per_hour": 0.0}, "had no price")])  # fmt: skip
def test_what_cannot_be_compared_is_said_and_why(no_charts, tmp_path, keys, plan, said):
    root = build(tmp_path / "run", Plan(**{"units": 6, **plan}))
    put(root, **keys)
    sentence, _, rows = compared(root)
    assert (rows, said in sentence, said in shown(root)) == ({}, True, True)


def test_an_estimate_without_a_run_has_a_page_of_its_own(tmp_path):
    root = tmp_path / "run"
    put(root)
    run, found = data.load(str(root)), shown(root)
    says(found, "not begun: an estimate", "Qwen/Qwen3-1.7B", "1,000", "0.769", "$0.67", "22 min 28 s", "starts it")
    assert not re.search("Sessions|Against the bill|No unit is committed|None|Made-up figures.", found)
    assert (run.state, page.write(run)) == ("estimated", f"{root}/report.html")
    with pytest.raises(ConfigError, match="only an estimate: start the run"):
        Watch(str(root), []).look()
    put(root, model="fake")
    assert "Made-up figures." in shown(root)


@pytest.mark.parametrize("broken", ["{", "[]", '{"documents": 3}', json.dumps({"created": "?"})])
def test_a_damaged_estimate_is_named_and_costs_no_report(no_charts, tmp_path, broken):
    root = build(tmp_path / "run", Plan(units=3))
    (root / ESTIMATE).write_text(broken)
    assert f"The estimate cannot be read: {root / ESTIMATE}" in shown(root)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / ESTIMATE).write_text(broken)
    with pytest.raises(RunError, match="`raypd estimate` makes it anew"):
        data.load(str(tmp_path / "only"))


@pytest.mark.parametrize("only", [False, True])
def test_hostile_words_run_nothing_and_it_fits(browser, tmp_path, only):
    root = tmp_path / "run" if only else build(tmp_path / "run", Plan(units=6, workers=2))
    texts = hostile.TEXTS
    tree = put(root, model=texts[1], task=texts[2], method=texts[3], notes=texts[:8])
    tree["speeds"][0] |= {"source": texts[2], "gpu": texts[4]}
    tree["machines"][1]["name"] = texts[5]
    (root / ESTIMATE).write_text(json.dumps(tree))
    file = tmp_path / "report.html"
    file.write_text(page.render(data.load(str(root))))
    for size in (PHONE, DESKTOP):
        tab, asked, errors = open_page(browser, file, viewport=size)
        assert (tab.evaluate(f"window.{hostile.MARK}"), asked, errors) == (None, [file.as_uri()], [])
        assert tab.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
