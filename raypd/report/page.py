"""The report page: one HTML file that loads nothing and works on a phone and on paper.

Texts of documents are not trusted: Jinja escapes them, and the Content-Security-Policy allows only
the page's own style sheet and script, by their hashes.
"""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import raypd.report.charts as charts
import raypd.report.comparison as comparison
from raypd import storage, text
from raypd.config import UNNAMED_CATEGORY, dump
from raypd.dataset import row_in_words
from raypd.errors import RunError, raised_as
from raypd.estimation import tables
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
_BACKTICKS = re.compile(r"`([^`]+)`")
# The maximum number of rows of a table.
_ROWS = 40
# The maximum number of reasons for errors, and for what a training has left out.
_REASONS = 15
# The page of a review marks values of lower confidence.
_UNSURE = 0.5
_SUBTITLE = [("model", "name"), ("decoding", "method"), ("task", "kind")]
# All other states are unfinished.
_STATES = {
    "complete": "complete",
    "running": "unfinished: still running",
    "budget": "unfinished: stopped at the budget",
    "empty": "nothing done yet",
    "estimated": "not begun: an estimate",
    "trained": "complete",
}


def write(run: RunReport, path: str | None = None) -> str:
    """Write the page.

    Args:
        run: The run.
        path: The file to write; None for a file in the run's folder.

    Returns:
        The path of the page.

    Raises:
        RunError: The page cannot be written.
    """
    target = path or storage.join(run.root, layout.REPORT)
    put(target, render(run).encode(), "the report ", "; --output writes it elsewhere")
    return target


def put(path: str, data: bytes, name: str = "", advice: str = "") -> None:
    """Write a file.

    Args:
        path: The file.
        data: Its contents.
        name: A description of the file, for the error message.
        advice: What to do, for the error message.

    Raises:
        RunError: The file cannot be written.
    """
    with raised_as(RunError, f"{path}: {name}cannot be written", advice=advice):
        storage.put(path, data)


def render(run: RunReport) -> str:
    """Return the page of a run."""
    subtitle = []
    for section, key in _SUBTITLE:
        part = (run.config.get(section) or {}).get(key)
        if part:
            subtitle.append(text.clean(part, 120))
    return fill(
        "report.html.j2",
        run=run,
        state=_STATES.get(run.state, f"unfinished: {run.state}"),
        subtitle=subtitle,
        config=text.clean(dump(run.config), _CONFIG_CHARACTERS),
        **_content(run),
    )


def _with_code(line: str) -> Markup:
    """Return a line of a terminal as HTML, with the text between backticks as code."""
    return Markup(_BACKTICKS.sub(r"<code>\1</code>", str(escape(line))))


def fill(
    template: str, script_of: str = "report.js", folders: Sequence[Path] = (), **content: Any
) -> str:
    """Fill a template with its contents and with the style, policy and script that pages share.

    Args:
        template: The name of the template.
        script_of: The name of the script.
        folders: Folders with further templates.
        content: The variables of the template.
    """
    style = Markup((_TEMPLATES / "report.css").read_text())
    script = Markup((_TEMPLATES / script_of).read_text())
    policy = (
        f"default-src 'none'; style-src {_source_hash(style)}; script-src {_source_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment(tuple(folders))
        .get_template(template)
        .render(**content, style=style, script=script, policy=policy, made=time.time())
    )


@cache
def _environment(folders: tuple[Path, ...]) -> Environment:
    """Return the environment of the templates, which caches compiled templates."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("raypd.report"), FileSystemLoader(folders)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in _FILTERS}
    environment.filters["code"] = _with_code
    environment.globals |= {"text": text, "ROWS": _ROWS, "REASONS": _REASONS, "UNSURE": _UNSURE}
    return environment


def _source_hash(source: str) -> str:
    """Return the hash of a style sheet or script for a Content-Security-Policy."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _content(run: RunReport) -> dict[str, Any]:
    """Return the variables of the template, which depend on what the folder contains."""
    if run.training is not None:
        return {"kind": "raypd train", "losses": charts.losses(run.training)}
    content: dict[str, Any] = {
        "about": comparison.about,
        "interval": comparison.interval,
        "tables": tables,
        "comparison": None,
    }
    if run.state == "estimated" and run.forecast is not None:
        cheapest = comparison.cheapest(run.forecast)
        return {**content, "kind": "raypd estimate", "cheapest": cheapest}
    if run.forecast is not None:
        content["comparison"] = comparison.compare(run, run.forecast)
    clock = charts.RunningTime(run.sessions)
    attributes = sorted(
        run.sample.attributes.values(),
        key=lambda attribute: (attribute.category, -attribute.statuses.total()),
    )
    return {
        **content,
        "kind": "raypd run report",
        "money": charts.money(run.bill, clock),
        "rate": charts.rate(run, clock),
        "workers": charts.timeline(run.bill, clock),
        "confidence": charts.confidence(run.sample.confidences),
        "attributes": attributes,
        "categories": named_categories(document.category for document in run.sample.documents),
        "position": position_of(run.config.get("input") or {}),
    }


def named_categories(names: Iterable[str | None]) -> list[str]:
    """Return the categories that people named, sorted.

    Args:
        names: The categories of documents.
    """
    return sorted({name for name in names if name} - {UNNAMED_CATEGORY})


def position_of(source: Mapping[str, Any]) -> Callable[[Any], str]:
    """Return a function that says in words which row of its file a document is.

    Args:
        source: Section `input` of the run.
    """
    setting = "reader" if source.get("reader") else str(source.get("format") or "auto")

    def position(document: Any) -> str:
        return row_in_words(document.source, document.row, setting)

    return position
