"""`raypd status`, a run's folder read whole, torn or unfinished, and the estimate on the page."""

import io
import json
import math
import re
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from raypd import storage
from raypd.billing.bill import Bill
from raypd.config.secrets import HIDDEN, redact
from raypd.dataset.plan import PlanTotals
from raypd.errors import ConfigError, RunError
from raypd.estimation.bootstrap import Array, exact
from raypd.estimation.machines import EstimateOptions, MethodSpeed, Overhead, assemble
from raypd.report import answer_check, comparison, data, page, status, terminal, units
from raypd.report.charts import RunningTime, speeds
from raypd.report.ledger import RunBill
from raypd.report.status import Watch
from raypd.run.layout import ESTIMATE
from raypd.run.records import from_json, write
from raypd.text import NONE
from tests.report import builder, hostile
from tests.report.browser import DESKTOP, PHONE, open_page
from tests.report.builder import Plan, build, edit_bill
from tests.report.test_page import shown as words_of
from tests.runs import says


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
    plan = Plan(
        units=40,
        documents=25,
        missing=20,
        how="running",
        now=time.time() - 3,
    )
    root = planned(build(tmp_path / "run", plan), 40, 1000)
    found = Watch(str(root)).look()
    assert found.state == "running"
    assert found.units == 20
    assert found.units_planned == 40
    assert found.documents == 500
    assert found.documents_planned == 1000
    assert found.exact is True
    assert found.eta_seconds == pytest.approx(500 / found.documents_per_second)
    report = data.load(str(root))
    assert "20 of 40 units committed (50%)" in page.render(report)
    usd = report.bill.usd
    assert found.usd == usd
    assert found.usd_at_end == pytest.approx(usd + 4.1 * 2.25 * found.eta_seconds / 3600)
    for path in (root / "ledger").iterdir():  # tokens of a server, of half of the documents
        bill = json.loads(path.read_text())
        path.write_text(json.dumps({**bill, "parts": {**bill["parts"], "endpoint": 50.0}}))
    assert Watch(str(root)).look().usd_at_end == pytest.approx(found.usd_at_end + 50, abs=0.01)
    text = _shown(found)
    # The bar has its own line.
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["documents", "units"]
    says(
        text,
        "500 of 1,000, 50%",
        "20 of 40 committed",
        "documents/s",
        "of $40.00",
        "at the end",
        "last errors",
    )


def test_a_finished_run_has_no_forecast(tmp_path, capsys):
    root = build(tmp_path / "run", Plan(units=8, model="fake"))
    terminal.show(Watch(str(root)), as_json=True)
    found = json.loads(capsys.readouterr().out)
    run = data.load(str(root))
    assert found["state"] == "complete"
    assert found["units"] == 8
    assert found["eta_seconds"] is None
    assert found["usd_at_end"] is None
    assert found["documents_per_second"] == pytest.approx(
        run.units.total("documents") / run.seconds
    )
    assert "MADE UP" in _shown(root)


def test_a_machine_without_a_price_costs_no_dollars(tmp_path):
    text = _shown(
        build(
            tmp_path / "run",
            Plan(
                units=4,
                usd_per_hour=0.0,
                budget_usd=None,
            ),
        )
    )
    assert "no price" in text
    assert "$" not in text


def test_documents_are_those_that_are_committed_whatever_the_bill_says(tmp_path, monkeypatch):
    root = planned(
        build(
            tmp_path / "run",
            Plan(
                units=90,
                documents=10,
                sessions=2,
            ),
        ),
        90,
        900,
    )
    edit_bill(root, lambda tree: tree["totals"].update(documents=430))
    monkeypatch.setattr(status, "_FOOTERS", 20)
    found = Watch(str(root)).look()
    assert found.state == "complete"
    assert found.documents == 900
    assert found.documents_planned == 900
    assert found.exact is True
    assert f"{1000 * found.usd / 900:.2f} per 1,000" in _shown(found)
    (root / "manifest.json").unlink()  # it was killed before it wrote one
    watch = Watch(str(root))
    assert "about 900 of 900, 100%" in _shown(watch.look())
    for _ in range(4):
        found = watch.look()
    assert "  900 of 900, 100%" in _shown(found)


def test_what_is_not_known_of_the_input_is_said(tmp_path):
    for name, more, said in (
        ("run", {"missing": 4, "how": "killed"}, "100 of about 200, 50%"),
        ("done", {}, "200 of 200, 100%"),
    ):
        assert said in _shown(
            planned(
                build(
                    tmp_path / name,
                    Plan(
                        units=8,
                        documents=25,
                        **more,
                    ),
                ),
                8,
                43,
                exact=False,
            )
        )
    root = planned(build(tmp_path / "run", Plan(units=4)), 4, 100, damaged=2)
    assert Watch(str(root)).look().state == "complete"
    for text in (_shown(root), page.render(data.load(str(root)))):
        assert "2 units of the input cannot be read" in text


def test_the_start_of_workers_does_not_count_as_slow_work(tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=40,
            documents=25,
            missing=20,
            how="running",
            now=time.time() - 3,
        ),
    )

    def slow_start(tree):
        tree["began"] = began = tree["until"] - 100
        tree["series"] = [[began + t, 0.1, max(0, t - 50) * 5, 0, 0] for t in range(0, 101, 10)]

    edit_bill(root, slow_start)
    assert Watch(str(root)).look().documents_per_second == pytest.approx(5)


def test_without_a_bill_a_look_reads_few_units_and_none_twice(tmp_path, monkeypatch):
    root = build(
        tmp_path / "run",
        Plan(
            units=300,
            documents=10,
            ledger=False,
            how="running",
            now=time.time(),
        ),
    )
    monkeypatch.setattr(status, "_FOOTERS", 64)
    opened = []
    open_file = storage.open_file

    def recorded(path, *arguments, **keywords):
        opened.append(path)
        return open_file(path, *arguments, **keywords)

    monkeypatch.setattr(storage, "open_file", recorded)
    watch = Watch(str(root))
    first = watch.look()
    assert first.usd is None
    assert first.workers == []
    assert "no bill is kept" in _shown(first)
    # Footers, errors, and the objects whose answers are checked.
    most = status._FOOTERS + units._LAST_FAILURES + answer_check._OBJECTS
    assert len(opened) <= most
    assert first.exact is False
    assert first.documents == 3000
    for _ in range(5):
        last = watch.look()
    assert last.exact  # by now it has seen them all
    # Once for the footer, once for its errors, and once for its answers.
    assert max(map(opened.count, opened)) <= 3


@pytest.mark.parametrize(("how", "said"), [("running", False), ("complete", True)])
def test_a_run_that_has_just_begun_does_not_say_that_it_has_no_bill(how, said, tmp_path):
    now = time.time()
    root = build(tmp_path / "run", Plan(units=0, ledger=False, how=how, now=now))
    look = planned(root, 40, 1000)
    assert ("no bill is kept" in " ".join(Watch(str(look)).look().notes)) is said


def test_the_status_of_a_folder_without_a_run_says_that_a_job_may_not_have_started(tmp_path):
    with pytest.raises(ConfigError, match="ray job status"):
        Watch(str(tmp_path))


def test_a_unit_that_was_replaced_is_read_again(tmp_path):
    root = build(tmp_path / "run", Plan(units=3, documents=10))
    watch = Watch(str(root))
    assert watch.look().documents == 30
    other = build(tmp_path / "other", Plan(units=1, documents=30))
    next((other / "units").iterdir()).rename(min((root / "units").iterdir()))
    assert watch.look().documents == 50


def test_workers_and_what_they_do(tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=12,
            workers=3,
            how="running",
            missing=1,
            now=time.time(),
        ),
    )

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

    def rows(first, count):
        return [{**row, "row": n} for n in range(first, first + count)]

    text = _shown(build(tmp_path / "run", Plan(units=2, rows=rows)))
    assert "[red]x[/red] \\u001b[NJ [/]" in text
    assert "\x1b" not in text


def test_watching_ends_with_the_run(tmp_path, capsys, monkeypatch):
    root = build(
        tmp_path / "run",
        Plan(
            units=6,
            missing=2,
            how="running",
            now=time.time(),
        ),
    )
    naps = []

    def nap(seconds):
        naps.append(seconds)
        for file in (root / "sessions").iterdir():
            file.write_text(
                json.dumps(
                    {
                        **json.loads(file.read_text()),
                        "how": "interrupted",
                        "ended": time.time(),
                    }
                )
            )

    monkeypatch.setattr(terminal.time, "sleep", nap)
    terminal.show(
        Watch(str(root)),
        interval=3.0,
        as_json=True,
    )
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["running", "interrupted"]
    assert naps == [3.0]


def test_report_and_status_of_a_run_on_s3(connected, bucket, tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=12, sessions=2, config={"storage": {"options": {"endpoint_url": connected.url}}}
        ),
    )
    for file in filter(lambda path: path.is_file(), root.rglob("*")):
        storage.put(f"{bucket}/runs/a/{file.relative_to(root)}", file.read_bytes())
    override = [f"storage.options.endpoint_url={connected.url}"]
    read = data.load(f"{bucket}/runs/a", override)
    assert read.units.total("documents") == 300
    assert page.write(read) == f"{bucket}/runs/a/report.html"
    assert b"</html>" in storage.read(f"{bucket}/runs/a/report.html")
    found = Watch(f"{bucket}/runs/a", override).look()
    assert found.state == "complete"
    assert found.documents == 300
    assert found.usd == read.bill.usd


def test_figures_are_those_of_the_units_and_of_the_sessions_bills(make):
    run = make(units=30, documents=20, sessions=3)
    assert run.state == "complete"
    assert run.units.committed == 30
    assert run.units.total("documents") == 600
    assert run.units.total("ok") + run.units.total("failed") == 600
    assert run.units.tokens("decode_tokens") == 600 * 24
    assert [s.how for s in run.sessions] == ["interrupted", "interrupted", "complete"]
    assert sum(s.documents for s in run.sessions) == 600
    assert sum(run.sample.errors.values()) == run.units.total("failed") > 0
    bill = run.bill
    dollars = [usd for _, usd in run.bill.series]
    assert len(bill.sessions) == 3
    assert bill.cost.documents == 600
    parts = (
        bill.parts.values(),
        (n.usd for n in bill.nodes),
        (s.usd or 0 for s in run.sessions),
        dollars[-1:],
    )
    assert [sum(usd) for usd in parts] == pytest.approx([bill.usd] * 4)
    assert dollars == sorted(dollars)  # a later session goes on where the one before ended


def test_retries_are_on_the_bill(tmp_path):
    root = build(tmp_path / "run", Plan(units=6))
    before = data.load(str(root)).bill
    retry = build(tmp_path / "retry", Plan(units=1, workers=1))
    for file in (*retry.glob("ledger/*.json"), *retry.glob("sessions/*.json")):
        text = file.read_text().replace(file.stem, "retry-1")
        file.unlink()
        file.with_stem("retry-1").write_text(text)
    (root / "retries").mkdir()
    retry.rename(root / "retries/1")
    after = data.load(str(root)).bill
    for part in ("ledger", "sessions"):  # what has ended is copied into the run
        (root / part / "retry-1.json").write_bytes(
            (root / f"retries/1/{part}/retry-1.json").read_bytes()
        )
    copied = data.load(str(root))
    assert copied.bill.usd == pytest.approx(after.usd)
    assert [s.usd for s in copied.sessions if s.id == "retry-1"] == [
        pytest.approx(after.parts["retry"])
    ]
    sums = (
        before.usd + after.parts["retry"],
        sum(after.parts.values()),
        sum(n.usd for n in after.nodes),
    )
    assert [*sums] == pytest.approx([after.usd] * 3)
    assert after.usd > before.usd
    assert after.cost.documents == before.cost.documents  # the documents were there already


def test_a_torn_ledger_file_is_named_and_the_others_count(tmp_path):
    root = build(tmp_path / "run", Plan(units=8, sessions=2))
    (first, second) = sorted((root / "ledger").iterdir())
    whole = json.loads(second.read_text())["usd"]
    first.write_text(first.read_text()[:100])
    bill = data.load(str(root)).bill
    assert bill.torn == [str(first)]
    assert bill.usd == pytest.approx(whole)


def test_the_last_line_of_a_worker_that_died_is_shown_and_bookkeeping_is_not(tmp_path):
    root = build(tmp_path / "run", Plan(units=3))
    (root / "failures").mkdir()
    texts = {
        "u1.txt": "Traceback\nRuntimeError: the device is gone\n",
        "u1.hand.json": "[1]",
        "u2.txt": "",
    }
    for name, text in texts.items():
        (root / "failures" / name).write_text(text)
    expected = [("u1", "RuntimeError: the device is gone"), ("u2", "its worker left no reason")]
    assert data.load(str(root)).failures == expected


def test_the_smallest_ledger_file_that_the_contract_allows():
    bill = RunBill(
        [
            from_json(
                Bill,
                {
                    "session": "s",
                    "began": 1.0,
                    "usd": 2.5,
                },
                "s.json",
            )
        ]
    )
    assert bill.usd == 2.5
    assert bill.newest.budget_usd is None
    assert bill.workers == []
    assert bill.cost.kwh is None


def test_a_damaged_unit_is_named_and_not_counted_and_those_of_a_partition_are(tmp_path):
    root = build(tmp_path / "run", Plan(units=5, documents=10))
    (root / "units/shop=a").mkdir()
    broken, moved, *_ = sorted((root / "units").glob("*.parquet"))
    moved.rename(root / "units/shop=a" / moved.name)
    broken.write_bytes(broken.read_bytes()[:-100])
    run = data.load(str(root))
    assert run.units.damaged == [str(broken)]
    assert run.units.total("documents") == 40


def test_very_many_units_are_read_in_part_and_scaled(make, monkeypatch):
    monkeypatch.setattr(units, "READ_UNITS", 10)
    run = make(units=40, documents=10)
    assert run.units.all_read is False
    assert len(run.units.read) == 10
    assert run.units.total("documents") == 400


@pytest.mark.parametrize(
    ("how", "ago"), [("running", 5), ("killed", 3600), ("interrupted", 5), ("failed", 5)]
)
def test_state_of_a_run_that_is_not_finished(make, how, ago):
    kept = "running" if how == "killed" else how  # of a session that was killed no end is kept
    assert (
        make(
            units=10,
            missing=3,
            how=kept,
            now=time.time() - ago,
        ).state
        == how
    )


def test_a_session_whose_process_is_gone_is_killed_at_once(make, monkeypatch):
    running = make(
        units=10,
        missing=3,
        how="running",
        now=time.time() - 5,
    )
    assert running.state == "running"
    monkeypatch.setattr(data.lease, "killed", lambda root: running.sessions[-1].id)
    assert data.load(running.root).state == "killed"


def test_secrets_do_not_leave():
    engine = {
        "max_num_batched_tokens": 2048,
        "cache_tokens": None,
        "max_value_tokens": 30,
        "password": None,
    }
    tree = {
        "storage": {
            "secret_access_key": "abc",
            "access_key_id": "AKIAABCDEFGHIJKLMNOP",
            "session_token": "t",
        },
        "input": {
            "path": ["https://user:pass@host/a?X-Amz-Signature=deadbeef&x=1", "s3://corpus/a"]
        },
        "model": {
            "name": "m",
            "token": "hf_abcdefghijklmnopqrstuvwx",
            "note": "key AKIAABCDEFGHIJKLMNOP",
        },
        "engine": engine,
    }
    shown = redact(tree)
    assert not re.search("abc|AKIA|pass@|deadbeef|hf_a", json.dumps(shown))
    paths = [f"https://{HIDDEN}@host/a?X-Amz-Signature={HIDDEN}&x=1", "s3://corpus/a"]
    assert shown["engine"] == engine
    assert shown["input"]["path"] == paths


def test_the_clock_stands_between_two_sessions_and_speed_adds_up_to_all_documents(make):
    run = make(units=20, documents=10, sessions=2)
    first, second = run.sessions
    clock = RunningTime(run.sessions)
    assert clock.total == pytest.approx(first.seconds + second.seconds)
    assert clock.at([first.ended, first.ended + 3600, second.began]).tolist() == pytest.approx(
        [first.seconds] * 3
    )
    assert clock.borders == [pytest.approx(first.seconds)]
    edges, values = speeds(run, clock)
    assert float((values * np.diff(edges)).sum()) == pytest.approx(200)


FIGURE = {"value": 400.0, "low": 390.0, "high": 410.0}
HOSTED = {
    "model": "other-model",
    "input": 0.1,
    "output": 0.5,
    "date": "2026-11-01",
    "source": "the vendor's page",
    "usd_per_1000": {"value": 0.012, "low": 0.011, "high": 0.013},
    "usd": {"value": 12.0, "low": 11.0, "high": 13.0},
}
INSTANCES = ("g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge")


def spread(value: float, by: float) -> Array:
    """A quantity whose 95% interval goes from value / by to value * by."""
    return value * np.exp(np.r_[0.0, math.log(by) / 0.95 * np.linspace(-1, 1, 2001)])


def put(root, documents: float = 1000, instances=INSTANCES, method: str = "hyper_parallel", **keys):
    """Puts an estimate into a run's folder, as `raypd estimate` writes it; other keys replace those
    of the file.
    """

    fed = {"prefill_tokens": spread(310, 1.03), "shared_tokens": exact(400)}
    ours, theirs = (
        MethodSpeed(
            of,
            seconds,
            f"measured on NVIDIA L40S, 64 documents, {took} s",
            "L40S",
            "NVIDIA L40S",
            {**fed, "decode_tokens": spread(decoded, 1.05)},
        )
        for of, seconds, took, decoded in (
            (method, spread(1.3, 1.062), 83, 24.3),
            ("autoregressive", exact(6.5), 9, 131),
        )
    )
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


@pytest.mark.parametrize("startup", [48.0, None])
def test_the_page_says_whether_start_up_is_in_the_whole_bill(no_charts, tmp_path, startup):
    """It is not in a bill from data sheets or given throughputs, and a note says so."""
    root = build(tmp_path / "run", Plan(units=40))
    put(root, startup_seconds=startup)
    found = shown(root)
    assert ("With start-up, idle time and head node." in found) is (startup is not None)
    without = "With idle time and head node, without start-up, which was not measured."
    assert (without in found) is (startup is None)


def test_what_was_estimated_stands_on_the_page(no_charts, tmp_path):
    root = build(tmp_path / "run", Plan(units=40))
    assert "<h2>Estimate</h2>" not in page.render(data.load(str(root)))
    tree = put(
        root,
        hosted=[HOSTED],
        hosted_tokens={"input": FIGURE, "output": FIGURE},
    )
    assert "the same as a hosted batch: other-model $0.012 [0.011-0.013] per 1,000" in shown(root)
    whole = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][0]
    found = shown(root)
    says(
        found,
        "Made 2026-09-20 20:00:00 UTC for 1,000 documents with Qwen/Qwen3-1.7B.",
        "hyper_parallel: measured on NVIDIA L40S, 64 documents, 83 s.",
        "hyper_parallel on L40S is 5 [4.71-5.31] times as fast as autoregressive decoding.",
        "0.769 [0.724-0.817]",
        "24.3",
        "GPU-hours",
        "8 nodes",
        "g6e.48xlarge",
        "1.360 [1.281-1.444]",
        "6.800",
        "start-up is as measured here, 48 s",
        f"22 min 28 s ${whole['usd']['value']:.2f} [$",
    )


def test_an_estimate_of_another_model_does_not_pass_for_that_of_the_run(no_charts, tmp_path):
    root = build(tmp_path / "run", Plan(units=40))
    put(root)
    assert "This is not the model of the run" not in shown(root)
    put(root, model="Other/Model", fingerprint="")
    says(shown(root), "with Other/Model.", "This is not the model of the run")
    said, _, rows = compared(root)
    assert "for another configuration" in said
    assert rows == {}


def test_the_bill_is_held_against_the_estimate_for_its_kind_and_number_of_machines(tmp_path):
    root = build(tmp_path / "run", Plan(units=40, workers=4))
    tree = put(root)
    billed = data.load(str(root)).bill.usd
    four = next(one for one in tree["machines"] if one["name"] == "g6e.xlarge")["bills"][2]
    assert four["nodes"] == 4
    said, note, rows = compared(root)
    off = f"{100 * (billed / four['usd']['value'] - 1):+.1f}%"
    assert rows["documents"] == ["1,000", "1,000", "+0.0%", NONE]
    assert rows["the whole bill"][:3] == [f"${four['usd']['value']:.2f}", f"${billed:.2f}", off]
    assert rows["1,000 documents, all costs"] == rows["the whole bill"]
    assert rows["time"][0] == "6 min 13 s"
    says(
        said + note,
        f"The bill is ${billed:.2f}: {off[1:]} above the estimate",
        "outside its 95% interval",
        "for 4 nodes of g6e.xlarge; the run had 4",
        "assumed $1.86 per hour; it was billed at $2.25",
    )
    tree["sample"] = {**(tree["sample"] or {}), "server_usd": 0.01}
    (root / ESTIMATE).write_text(json.dumps(tree))
    assert compared(root)[2]["the whole bill"][0] == f"${four['usd']['value'] + 10:.2f}"
    del tree["sample"]["server_usd"]
    # An interval that is not known is not made up.
    for bill in (bill for one in tree["machines"] for bill in one["bills"]):
        bill["usd"] |= {"low": None, "high": None}
    (root / ESTIMATE).write_text(json.dumps(tree))
    said, _, rows = compared(root)
    assert rows["the whole bill"][3] == "unknown"
    assert "interval" not in said


def test_a_run_that_goes_on_or_has_other_documents_is_compared_by_the_document(tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=40,
            missing=10,
            how="interrupted",
        ),
    )
    put(root)
    said, _, rows = compared(root)
    assert list(rows) == ["documents", "1,000 documents, all costs"]
    assert rows["documents"][1:3] == ["750", "75% of it"]
    assert said.startswith("So far, the bill of 1,000 documents is $")
    # Machines that followed one another are not counted together.
    root = build(
        tmp_path / "other",
        Plan(
            units=40,
            workers=2,
            sessions=3,
        ),
    )
    put(root)
    assert "for 2 nodes of g6e.xlarge; the run had 2" in compared(root)[1]
    put(root, documents=500_000)
    _, note, rows = compared(root)
    assert list(rows) == ["documents", "1,000 documents, all costs"]
    assert "another number of documents" in note


@pytest.mark.parametrize(
    ("keys", "plan", "said"),
    [
        ({"fingerprint": "ba9876543210"}, {}, "made for another configuration"),
        ({"instances": ("g6e.48xlarge",)}, {}, "no figure for the machines that the run had"),
        ({}, {"ledger": False}, "no bill yet"),
        ({}, {"usd_per_hour": 0.0}, "had no price"),
    ],
)
def test_what_cannot_be_compared_is_said_and_why(no_charts, tmp_path, keys, plan, said):
    root = build(tmp_path / "run", Plan(**{"units": 6, **plan}))
    put(root, **keys)
    sentence, _, rows = compared(root)
    assert rows == {}
    assert said in sentence
    assert said in shown(root)


def test_an_estimate_without_a_run_has_a_page_of_its_own(tmp_path):
    root = tmp_path / "run"
    put(root)
    run = data.load(str(root))
    found = shown(root)
    says(
        found,
        "not begun: an estimate",
        "Qwen/Qwen3-1.7B",
        "1,000",
        "0.769",
        "$0.67",
        "22 min 28 s",
        "starts it",
    )
    assert not re.search(
        "Sessions|Against the bill|No unit is committed|None|Made-up figures.", found
    )
    assert run.state == "estimated"
    assert page.write(run) == f"{root}/report.html"
    with pytest.raises(ConfigError, match=r"only an estimate\. Start the run"):
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
    with pytest.raises(RunError, match="repeat `raypd estimate`"):
        data.load(str(tmp_path / "only"))


@pytest.mark.parametrize("only", [False, True])
def test_hostile_words_run_nothing_and_it_fits(browser, tmp_path, only):
    root = tmp_path / "run" if only else build(tmp_path / "run", Plan(units=6, workers=2))
    texts = hostile.TEXTS
    tree = put(
        root,
        model=texts[1],
        task=texts[2],
        method=texts[3],
        notes=texts[:8],
    )
    tree["speeds"][0] |= {"source": texts[2], "gpu": texts[4]}
    tree["machines"][1]["name"] = texts[5]
    (root / ESTIMATE).write_text(json.dumps(tree))
    file = tmp_path / "report.html"
    file.write_text(page.render(data.load(str(root))))
    for size in (PHONE, DESKTOP):
        tab, asked, errors = open_page(browser, file, viewport=size)
        assert tab.evaluate(f"window.{hostile.MARK}") is None
        assert asked == [file.as_uri()]
        assert errors == []
        assert tab.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
