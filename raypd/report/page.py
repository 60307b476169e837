"""The report page: one HTML file that loads nothing, runs on a phone and on paper, and trusts no text of a document.

Every text goes through Jinja's escaping; the page's Content-Security-Policy allows the one style sheet and the one
script that are in it, by their hashes, and nothing else, so that what should slip through still could not run.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raypd import storage
from raypd.config.yaml_file import dump
from raypd.errors import RunError
from raypd.report import charts, estimate_section, sections, series, training_section
from raypd.report.charts import Chart
from raypd.report.data import RunReport
from raypd.report.sections import Table, Tile
from raypd.report.series import RunningTime
from raypd.run import layout, text

_TEMPLATES = resources.files("raypd.report") / "templates"
_CONFIG_CHARACTERS = 60_000
_TIMELINE_ROWS = 600
_SUBTITLE = [("model", "name"), ("decoding", "method"), ("task", "kind")]
_STATES = {
    "complete": "complete",
    "running": "unfinished: still running",
    "interrupted": "unfinished: interrupted",
    "failed": "unfinished: failed",
    "killed": "unfinished: killed",
    "budget": "unfinished: stopped at the budget",
    "empty": "nothing done yet",
    "estimated": "not begun: an estimate",
    "trained": "complete",
}


def write(run: RunReport, path: str | None = None) -> str:
    """Writes the page of a run; where it went. path: None: report.html in the run's folder.

    Raises:
        RunError: it cannot be written there.
    """
    where = path or storage.join(run.root, layout.REPORT)
    try:
        storage.put(where, render(run).encode())
    except OSError as error:
        raise RunError(f"{where}: the report cannot be written: {error}; --output writes it elsewhere") from None
    return where


def render(run: RunReport) -> str:
    """The page of a run."""
    environment = Environment(
        loader=PackageLoader("raypd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(text, name)
        for name in ("clean", "compact", "count", "duration", "number", "share", "usd", "when")
    }
    style, script = ((_TEMPLATES / name).read_text() for name in ("report.css", "report.js"))
    return environment.get_template("report.html.j2").render(
        run=run,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        made=time.time(),
        **_content(run),
    )


def _policy(style: str, script: str) -> str:
    def allowed(content: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; base-uri 'none'; "
        "form-action 'none'"
    )


def _content(run: RunReport) -> dict[str, Any]:
    """What the template shows, made ready: figures are figures and nothing is computed in HTML."""
    clock, bill = RunningTime(run.sessions), run.bill
    named = [(run.config.get(key) or {}).get(name) for key, name in _SUBTITLE]
    trained = run.training
    return {
        "state": _STATES.get(run.state, f"unfinished: {run.state}"),
        "subtitle": [text.clean(part, 120) for part in named if part],
        "warnings": _warnings(run),
        "tiles": _tiles(run),
        "training": training_section.tables(trained) if trained else [],
        "losses": training_section.losses(trained) if trained else None,
        "estimate": estimate_section.section(run),
        "money": _money(run, clock),
        "money_tables": sections.money_tables(bill) if bill and bill.sessions else [],
        "rate": _rate(run, clock),
        "workers": _workers(run, clock),
        "confidence": _confidence(run),
        "tokens": sections.token_bars(run),
        "machines": sections.machine_table(bill) if bill and bill.nodes else None,
        "answers": sections.answer_tables(run.sample),
        "categories": sorted({d.category for d in run.sample.documents if d.category}),
        "errors": sections.error_bars(run.sample),
        "sessions": sections.session_table(run),
        "config": text.clean(dump(run.config), _CONFIG_CHARACTERS),
    }


def _tiles(run: RunReport) -> list[Tile]:
    if run.training is not None:
        return training_section.tiles(run.training)
    if run.state == "estimated" and run.forecast is not None:
        return estimate_section.tiles(run.forecast)
    return sections.tiles(run)


def _warnings(run: RunReport) -> list[str]:
    if run.state in ("estimated", "trained"):
        return []
    warnings = [
        f"The estimate cannot be read: {text.clean(path, 300)}. `raypd estimate` makes it anew." for path in run.torn
    ]
    committed, planned = run.units.committed, run.units_planned
    if run.state != "complete":
        done = f"{text.counted(committed, 'unit')} committed"
        if planned:
            share = text.share(committed, planned)
            done = f"{text.count(committed)} of {text.counted(planned, 'unit')} committed ({share})"
        warnings.append(f"This run is not finished: {done}. All figures are as of {text.when(run.read_at)}.")
    if run.unreadable:
        units = text.counted(run.unreadable, "unit")
        warnings.append(f"{units} of the input cannot be read: their documents are not in these figures.")
    if not run.units.whole:
        warnings.append(
            f"Of {text.counted(committed, 'unit')}, {text.count(len(run.units.read))} evenly spread ones were "
            "read for this page. Totals of documents and tokens are scaled up from them."
        )
    if run.units.damaged:
        warnings.append(
            f"{text.counted(len(run.units.damaged), 'unit')} cannot be read and not counted, for instance "
            f"{text.clean(run.units.damaged[0], 300)}. `raypd verify` says more."
        )
    if run.bill and run.bill.torn:
        warnings.append(f"A part of the bill cannot be read and is missing: {text.clean(run.bill.torn[0], 300)}.")
    return warnings


def _thinned(count: int) -> Sequence[int]:
    """About twelve of so many indices, for a table."""
    return range(0, count, max(1, count // 12))


def _money(run: RunReport, clock: RunningTime) -> Chart:
    bill = run.bill
    if bill is None or not bill.sessions:
        return Chart(missing="No bill was kept for this run.")
    if not bill.usd:
        return Chart(missing="No machine of this run has a price. cost.prices (USD per hour) gives the next run one.")
    if len(bill.series) < 2 or clock.total <= 0:
        return Chart(missing=f"{text.usd(bill.usd)} in all; how it grew was not kept.")
    times, dollars = series.money(bill.series, clock)
    rows = [[text.duration(times[i]), text.usd(dollars[i])] for i in _thinned(len(times))]
    budget = bill.newest.budget_usd
    chart, fits = charts.money(times, dollars, budget, clock)
    note = f"The budget of {text.usd(budget)} lies far above this scale." if budget and not fits else ""
    return replace(chart, table=Table(["running time", "spent"], rows), note=note)


def _rate(run: RunReport, clock: RunningTime) -> Chart:
    if not run.units.read or clock.total <= 0:
        return Chart(missing="No unit is committed yet.")
    edges, values = series.rate(run.units.read, clock, run.units.scale)
    mean = run.units.total("documents") / clock.total
    rows = [[text.duration(edges[i]), text.number(values[i])] for i in _thinned(len(values))]
    unit = f"documents a second; the dashed line is the mean, {text.number(mean)}"
    table = Table(["running time, from", "documents/s"], rows)
    return replace(charts.rate(edges, values, clock, mean), table=table, unit=unit)


def _workers(run: RunReport, clock: RunningTime) -> Chart:
    workers = [w for w in run.bill.workers if w.spans] if run.bill else []
    if not workers or clock.total <= 0:
        return Chart(missing="Which worker did what was not kept for this run.")
    by_share = sorted(workers, key=lambda w: -w.spent("busy") / w.lived())
    workers = sorted(by_share, key=lambda w: w.began)
    shown = workers[:: -(-len(workers) // _TIMELINE_ROWS)]
    who = "The one worker was" if len(workers) == 1 else f"{text.count(len(workers))} workers were"
    busy = sum(w.spent("busy") for w in workers) / sum(w.lived() for w in workers)
    note = f"{who} busy {text.share(busy, 1)} of the time."
    names = [text.clean(w.worker, 12) for w in shown]
    spans = [[(*clock.at([began, ended]).tolist(), kind) for began, ended, kind, _ in w.spans] for w in shown]
    chart = charts.timeline(spans, names, clock, note)
    return replace(chart, table=sections.worker_table(by_share), legend=charts.KINDS, note=note)


def _confidence(run: RunReport) -> Chart:
    values = run.sample.confidences
    if not values:
        return Chart(missing="The sampled answers carry no confidence.")
    tenths = Counter(min(9, int(10 * value)) for value in values)
    rows = [[f"{low / 10:.1f} to {low / 10 + 0.1:.1f}", text.count(tenths[low])] for low in range(10)]
    return replace(charts.confidence(values), table=Table(["confidence", "answers"], rows))
