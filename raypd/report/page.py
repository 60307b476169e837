"""The report page: one HTML file that loads nothing, runs on a phone and on paper, and trusts no
text of a document: Jinja escapes all, and the Content-Security-Policy allows its own style sheet
and script alone, by their hashes.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup

from raypd import storage, text
from raypd.config.yaml_file import dump
from raypd.errors import RunError, raised_as
from raypd.estimation import tables
from raypd.report import charts, comparison
from raypd.report.data import RunReport
from raypd.run import layout

_TEMPLATES = resources.files("raypd.report") / "templates"
_FILTERS = (
    "clean",
    "compact",
    "cost",
    "count",
    "counted",
    "duration",
    "number",
    "share",
    "usd",
    "when",
)
_CONFIG_CHARACTERS = 60_000
_ROWS = 40  # of a table
_REASONS = 15  # of errors, and of what a training has left out
_SUBTITLE = [("model", "name"), ("decoding", "method"), ("task", "kind")]
_STATES = {  # all others are unfinished
    "complete": "complete",
    "running": "unfinished: still running",
    "budget": "unfinished: stopped at the budget",
    "empty": "nothing done yet",
    "estimated": "not begun: an estimate",
    "trained": "complete",
}


def write(run: RunReport, path: str | None = None) -> str:
    """Writes the page, into the run's folder where no path is given; where it went.

    Raises RunError when it cannot.
    """
    where = path or storage.join(run.root, layout.REPORT)
    put(where, render(run).encode(), "the report ", "; --output writes it elsewhere")
    return where


def put(path: str, data: bytes, name: str = "", advice: str = "") -> None:
    """Writes a file. Raises RunError when it cannot, with its name and advice."""
    with raised_as(RunError, f"{path}: {name}cannot be written", advice=advice):
        storage.put(path, data)


def render(run: RunReport) -> str:
    named = [(run.config.get(key) or {}).get(name) for key, name in _SUBTITLE]
    return fill(
        "report.html.j2",
        run=run,
        state=_STATES.get(run.state, f"unfinished: {run.state}"),
        subtitle=[text.clean(part, 120) for part in named if part],
        config=text.clean(dump(run.config), _CONFIG_CHARACTERS),
        **_content(run),
    )


def fill(
    template: str, script_of: str = "report.js", folders: Sequence[Path] = (), **content: Any
) -> str:
    """A page from one of the templates, or of others in `folders`, with the style, policy and
    script that all have.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("raypd.report"), FileSystemLoader(folders)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in _FILTERS}
    environment.globals |= {"text": text, "ROWS": _ROWS, "REASONS": _REASONS}
    style, script = texts = [
        Markup((_TEMPLATES / name).read_text()) for name in ("report.css", script_of)
    ]
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in texts]
    allowed = "; ".join(
        f"{kind}-src 'sha256-{of}'" for kind, of in zip(("style", "script"), hashes, strict=True)
    )
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    content |= {"style": style, "script": script, "policy": policy, "made": time.time()}
    return environment.get_template(template).render(**content)


def _content(run: RunReport) -> dict[str, Any]:
    if run.training is not None:
        return {"kind": "raypd train", "losses": charts.losses(run.training)}
    content: dict[str, Any] = {
        "about": comparison.about,
        "interval": comparison.interval,
        "tables": tables,
    }
    if run.state == "estimated" and run.forecast is not None:
        cheapest = comparison.cheapest(run.forecast)
        return {**content, "kind": "raypd estimate", "cheapest": cheapest, "comparison": None}
    clock = charts.RunningTime(run.sessions)
    return {
        **content,
        "kind": "raypd run report",
        "comparison": comparison.compare(run, run.forecast) if run.forecast else None,
        "money": charts.money(run.bill, clock),
        "rate": charts.rate(run, clock),
        "workers": charts.timeline(run.bill, clock),
        "confidence": charts.confidence(run.sample.confidences),
        "attributes": sorted(
            run.sample.attributes.values(), key=lambda a: (a.category, -a.statuses.total())
        ),
        "categories": sorted({d.category for d in run.sample.documents if d.category}),
    }
