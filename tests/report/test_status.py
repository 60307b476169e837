"""`raypd status`: figures from storage alone, cheap at every look."""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from raypd import storage
from raypd.report import data, page, status, terminal
from raypd.report.status import Watch
from raypd.run.records import PlanTotals, write
from tests.report import builder
from tests.report.builder import Plan, build, edit_bill


def _shown(found):
    """A look as the terminal has it; of a folder the first one."""
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal.render(Watch(str(found)).look() if isinstance(found, Path) else found))
    return console.file.getvalue()


def planned(root, units, documents, **more):
    (root / "plan").mkdir(exist_ok=True)
    write(str(root / "plan/plan.json"), PlanTotals("p", units, documents, **more))
    return root


def test_a_run_in_the_middle(tmp_path):
    plan = Plan(units=40, documents=25, missing=20, how="running", now=time.time() - 3)
    root = planned(build(tmp_path / "run", plan), 40, 1000)
    found = Watch(str(root)).look()
    assert (found.state, found.units, found.units_planned) == ("running", 20, 40)
    assert (found.documents, found.documents_planned, found.exact) == (500, 1000, True)
    assert found.eta_seconds == pytest.approx(500 / found.documents_per_second)
    report = data.load(str(root))
    assert "20 of 40 units committed (50%)" in page.render(report)
    usd = report.bill.usd
    assert (found.usd, found.usd_at_end) == (usd, pytest.approx(usd + 4.1 * 2.25 * found.eta_seconds / 3600))
    text = _shown(found)
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["documents", "units"]  # the bar has its own line
    for part in ("500 of 1,000, 50%", "20 of 40 committed", "documents/s", "of $40.00", "at the end", "last errors"):
        assert part in text, part


def test_a_finished_run_has_no_forecast(tmp_path, capsys):
    root = build(tmp_path / "run", Plan(units=8, model="fake"))
    terminal.show(Watch(str(root)), as_json=True)
    found, run = json.loads(capsys.readouterr().out), data.load(str(root))
    assert (found["state"], found["units"], found["eta_seconds"], found["usd_at_end"]) == ("complete", 8, None, None)
    assert found["documents_per_second"] == pytest.approx(run.units.total("documents") / run.seconds)
    assert "MADE UP" in _shown(root)


def test_a_machine_without_a_price_costs_no_dollars(tmp_path):
    text = _shown(build(tmp_path / "run", Plan(units=4, usd_per_hour=0.0, budget_usd=None)))
    assert ("no price" in text, "$" in text) == (True, False)


def test_documents_are_those_that_are_committed_whatever_the_bill_says(tmp_path, monkeypatch):
    """A session that was killed committed units that its bill does not know of."""
    root = planned(build(tmp_path / "run", Plan(units=90, documents=10, sessions=2)), 90, 900)
    edit_bill(root, lambda tree: tree["totals"].update(documents=430))
    monkeypatch.setattr(status, "_FOOTERS", 20)
    found = Watch(str(root)).look()
    assert (found.state, found.documents, found.documents_planned, found.exact) == ("complete", 900, 900, True)
    assert f"{1000 * found.usd / 900:.2f} per 1,000" in _shown(found)
    (root / "manifest.json").unlink()  # it was killed before it wrote one
    watch = Watch(str(root))
    assert "about 900 of 900, 100%" in _shown(watch.look())
    for _ in range(4):
        found = watch.look()
    assert "  900 of 900, 100%" in _shown(found)


def test_of_lines_cut_by_bytes_the_number_is_not_known_before_the_end(tmp_path):
    for name, more, said in (("run", {"missing": 4, "how": "killed"}, "100 of about 200, 50%"),
                             ("done", {}, "200 of 200, 100%")):  # fmt: skip
        assert said in _shown(planned(build(tmp_path / name, Plan(units=8, documents=25, **more)), 8, 43, exact=False))


def test_complete_beside_input_that_cannot_be_read_says_so(tmp_path):
    root = planned(build(tmp_path / "run", Plan(units=4)), 4, 100, damaged=2)
    assert Watch(str(root)).look().state == "complete"
    for text in (_shown(root), page.render(data.load(str(root)))):
        assert "2 units of the input cannot be read" in text


def test_the_start_of_workers_does_not_count_as_slow_work(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, documents=25, missing=20, how="running", now=time.time() - 3))

    def slow_start(tree):
        tree["began"] = began = tree["until"] - 100
        tree["series"] = [[began + t, 0.1, max(0, t - 50) * 5, 0, 0] for t in range(0, 101, 10)]

    edit_bill(root, slow_start)
    assert Watch(str(root)).look().documents_per_second == pytest.approx(5)


def test_without_a_bill_a_look_reads_few_units_and_none_twice(tmp_path, monkeypatch):
    root = build(tmp_path / "run", Plan(units=300, documents=10, ledger=False, how="running", now=time.time()))
    monkeypatch.setattr(status, "_FOOTERS", 64)
    opened, real = [], storage.open_file
    monkeypatch.setattr(storage, "open_file", lambda path, *a, **k: (opened.append(path), real(path, *a, **k))[1])
    watch = Watch(str(root))
    first = watch.look()
    assert (first.usd, first.workers) == (None, [])
    assert "no bill is kept" in _shown(first)
    assert len(opened) <= status._FOOTERS + status._ERROR_UNITS
    assert (first.exact, first.documents) == (False, 3000)
    for _ in range(5):
        last = watch.look()
    assert last.exact  # by now it has seen them all
    assert max(map(opened.count, opened)) <= 2  # once for the footer, once for its errors


def test_a_unit_that_was_replaced_is_read_again(tmp_path):
    root = build(tmp_path / "run", Plan(units=3, documents=10))
    watch = Watch(str(root))
    assert watch.look().documents == 30
    other = build(tmp_path / "other", Plan(units=1, documents=30))
    next((other / "units").iterdir()).rename(min((root / "units").iterdir()))
    assert watch.look().documents == 50


def test_workers_and_what_they_do(tmp_path):
    root = build(tmp_path / "run", Plan(units=12, workers=3, how="running", missing=1, now=time.time()))

    def at_work(tree):
        for worker, kind in zip(tree["workers"], ("busy", "idle", "busy"), strict=True):
            worker["spans"].append([tree["until"], tree["until"] + 1, kind, None])
        tree["workers"][2]["ended"] = tree["until"]

    edit_bill(root, at_work)
    found = Watch(str(root)).look()
    assert [w.state for w in found.workers] == ["busy", "idle", "ended"]
    assert "1 busy, 1 idle, 1 ended" in _shown(found)


def test_texts_of_documents_are_no_markup(tmp_path):
    row = builder.document(1, builder.random.Random(1))
    row |= {"status": "error", "error": "[red]x[/red] \x1b[2J [/]", "values": None}

    rows = lambda first, count: [{**row, "row": n} for n in range(first, first + count)]  # noqa: E731
    text = _shown(build(tmp_path / "run", Plan(units=2, rows=rows)))
    assert ("[red]x[/red] \\u001b[NJ [/]" in text, "\x1b" in text) == (True, False)


def test_watching_ends_with_the_run(tmp_path, capsys, monkeypatch):
    root, naps = build(tmp_path / "run", Plan(units=6, missing=2, how="running", now=time.time())), []

    def nap(seconds):
        naps.append(seconds)
        for file in (root / "sessions").iterdir():
            file.write_text(json.dumps({**json.loads(file.read_text()), "how": "interrupted", "ended": time.time()}))

    monkeypatch.setattr(terminal.time, "sleep", nap)
    terminal.show(Watch(str(root)), again=3.0, as_json=True)
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert (states, naps) == (["running", "interrupted"], [3.0])


def test_report_and_status_of_a_run_on_s3(connected, bucket, tmp_path):
    root = build(tmp_path / "run", Plan(units=12, sessions=2, config={"storage": {"endpoint_url": connected.url}}))
    for file in filter(lambda path: path.is_file(), root.rglob("*")):
        storage.put(f"{bucket}/runs/a/{file.relative_to(root)}", file.read_bytes())
    override = [f"storage.endpoint_url={connected.url}"]
    read = data.load(f"{bucket}/runs/a", override)
    assert (read.units.total("documents"), page.write(read)) == (300, f"{bucket}/runs/a/report.html")
    assert b"</html>" in storage.read(f"{bucket}/runs/a/report.html")
    found = Watch(f"{bucket}/runs/a", override).look()
    assert (found.state, found.documents, found.usd) == ("complete", 300, read.bill.usd)
