"""`raypd status` on the terminal, which is printed once or redrawn every few seconds."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from raypd import text
from raypd.errors import RunError, raised_as
from raypd.report.status import Status, Watch, WorkerState

# The maximum number of workers that are shown individually.
_WORKERS = 12
_COLORS = {
    "complete": "green",
    "running": "cyan",
    "busy": "green",
    "idle": "yellow",
    "startup": "yellow",
}


def show(
    watch: Watch,
    *,
    interval: float | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print the status of a run.

    Args:
        watch: Reads the status.
        interval: Seconds between two looks; None to look once.
        interval: Seconds between two readings; None to read once.
        console: Where to print; None for stdout.

    Raises:
        RunError: The first reading fails.
    """
    console = console or Console(highlight=False, markup=False)
    with raised_as(RunError, f"{watch.root}: cannot be read"):
        status = watch.look()
    if as_json:
        _follow(watch, status, interval, _print_json)
    elif interval is None or not console.is_terminal:
        _follow(watch, status, interval, lambda look: console.print(render(look, console.width)))
    else:
        with Live(console=console, auto_refresh=False) as live:

            def redraw(look: Status) -> None:
                live.update(render(look, console.width), refresh=True)

            _follow(watch, status, interval, redraw)


def _print_json(status: Status) -> None:
    print(json.dumps(asdict(status)), flush=True)


def _follow(
    watch: Watch, status: Status, interval: float | None, show_look: Callable[[Status], None]
) -> None:
    """Show a status, and update it until the run has ended."""
    show_look(status)
    # The user stops it with Ctrl-C.
    with contextlib.suppress(KeyboardInterrupt):
        while interval is not None and status.state == "running":
            time.sleep(interval)
            try:
                status = watch.look()
            except OSError as error:
                status.notes = [f"the last update failed; these figures are older: {error}"]
            show_look(status)


def render(status: Status, width: int = 100) -> RenderableType:
    """Return a status in the form that rich draws.

    Texts of documents are shown literally and never interpreted as markup.

    Args:
        status: The status.
        width: The number of columns of the terminal.
    """
    parts: list[RenderableType] = []
    if status.fake:
        warning = "model: fake. THESE ANSWERS ARE MADE UP: no model read the documents."
        parts.append(Text(warning, style="bold red"))
    state = (f"  {status.state}", _COLORS.get(status.state, "red"))
    parts.append(Text.assemble(text.clean(status.run), state, style="bold"))
    if status.documents_planned:
        answered = min(status.documents, status.documents_planned)
        # A progress bar does not end its own line.
        bar = Table.grid()
        bar.add_row(ProgressBar(status.documents_planned, answered, width=min(width, 60)))
        parts.append(bar)
    parts.append(_grid(_figures(status)))
    if status.workers:
        parts.append(_grid(_workers(status.workers)))
    if status.errors:
        parts.append(Text("last errors", style="bold"))
        for error in status.errors:
            parts.append(Text(f"  {error}", overflow="ellipsis", no_wrap=True))
    for warning in status.warnings:
        parts.append(Text(f"warning: {text.clean(warning, 300)}", style="yellow"))
    for note in status.notes:
        parts.append(Text(f"note: {text.clean(note, 300)}", style="yellow"))
    if status.next_step:
        parts.append(Text(f"Next: {text.clean(status.next_step, 500)}"))
    return Group(*parts)


def _grid(rows: Iterable[tuple[RenderableType, RenderableType]]) -> Table:
    """Return names next to their values; all grids have names of the same width."""
    table = Table.grid(Column(min_width=10), Column(), padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _figures(status: Status) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each figure."""
    yield "documents", _documents(status)
    units = text.count(status.units)
    if status.units_planned:
        units += f" of {text.count(status.units_planned)}"
    yield "units", f"{units} committed"
    if status.documents_per_second is not None:
        yield "speed", f"{text.number(status.documents_per_second)} documents/s"
    if status.eta_seconds is not None:
        end = text.when(status.at + status.eta_seconds)
        yield "left", f"{text.duration(status.eta_seconds)}, until {end}"
    sessions = text.counted(status.sessions, "session")
    yield "ran", f"{text.duration(status.running_seconds)} in {sessions}"
    if status.heard is not None and status.state != "complete":
        yield "heard", f"{text.duration(max(0.0, status.at - status.heard))} ago"
    if status.usd is not None:
        yield "cost", _cost(status, status.usd)
    if status.deadline:
        yield "deadline", text.clean(status.deadline)
    if status.model and not status.fake:
        yield "model", text.clean(status.model, 300)
    if status.confidence:
        yield "confidence", status.confidence


def _documents(status: Status) -> str:
    """Return how many documents are answered, out of how many, and how many failed."""
    about = ""
    if not status.exact:
        about = "about "
    about_planned = ""
    if not status.planned_exact:
        about_planned = "about "
    answered = f"{about}{text.count(status.documents)}"
    planned = status.documents_planned
    if planned:
        share = text.share(status.documents, planned)
        answered += f" of {about_planned}{text.count(planned)}, {share}"
    if status.failed:
        answered += f"; {about}{text.count(status.failed)} failed"
    return answered


def _cost(status: Status, usd: float) -> str:
    """Return the cost so far, per document, per hour and at the end."""
    if not usd and not status.usd_per_hour:
        return text.cost(usd)
    spent = text.usd(usd)
    if status.budget_usd:
        spent += f" of {text.usd(status.budget_usd)}, {text.share(usd, status.budget_usd)}"
    parts = [spent]
    if status.answered:
        parts.append(f"{text.usd(1000 * usd / status.answered)} per 1,000 documents")
    if status.usd_per_hour:
        parts.append(f"{text.usd(status.usd_per_hour)} per hour")
    if status.usd_at_end is not None:
        parts.append(f"about {text.usd(status.usd_at_end)} at the end")
    return "; ".join(parts)


def _workers(workers: list[WorkerState]) -> Iterator[tuple[RenderableType, RenderableType]]:
    """Yield the workers by state, and the first of those that have not ended."""
    counts = Counter(worker.state for worker in workers)
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    yield Text("workers", style="bold"), summary
    live = [worker for worker in workers if worker.state != "ended"]
    for worker in live[:_WORKERS]:
        state = Text(worker.state, style=_COLORS.get(worker.state, ""))
        yield f"  {worker.worker}", Text.assemble(state, f"  busy {text.share(worker.busy, 1)}")
    if len(live) > _WORKERS:
        yield "", f"and {len(live) - _WORKERS} more"
