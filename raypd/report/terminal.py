"""`raypd status` on the terminal: one look, or a view that is drawn anew every few seconds."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypd.errors import RunError
from raypd.report.status import Status, Watch, WorkerState
from raypd.run import text

_WORKERS = 12  # shown one by one
_COLORS = {"complete": "green", "running": "cyan", "busy": "green", "idle": "yellow", "startup": "yellow"}


def show(watch: Watch, *, again: float | None = None, as_json: bool = False, console: Console | None = None) -> None:
    """Prints how a run stands.

    Args:
        watch: what looks at it.
        again: seconds between two looks, until the run has ended or Ctrl-C; None: one look.
        as_json: print each look as a line of JSON.
        console: in place of stdout, of which it takes the width.

    Raises:
        RunError: storage does not answer at the first look; a later look that fails is a note.
    """
    console = console or Console(highlight=False, markup=False)

    def show_look(look: Status) -> None:
        if as_json:
            print(json.dumps(asdict(look)), flush=True)
        else:
            console.print(render(look, console.width))

    try:
        status = watch.look()
    except OSError as error:
        raise RunError(f"{watch.root}: cannot be read: {error}") from None
    if again is None:
        show_look(status)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        if as_json or not console.is_terminal:
            _follow(watch, status, again, show_look)
            return
        with Live(console=console, auto_refresh=False) as live:
            _follow(watch, status, again, lambda look: live.update(render(look, console.width), refresh=True))


def _follow(watch: Watch, status: Status, again: float, show_look: Callable[[Status], None]) -> None:
    show_look(status)
    while status.state == "running":
        time.sleep(again)
        try:
            status = watch.look()
        except OSError as error:
            status.notes = [f"the last look failed, these are the figures of before: {error}"]
        show_look(status)


def render(status: Status, width: int = 100) -> RenderableType:
    """The look as rich draws it. Texts of documents are shown as they are, never as rich's markup."""
    parts: list[RenderableType] = []
    if status.fake:
        parts.append(Text("model: fake. THESE ANSWERS ARE MADE UP: no model read the documents.", style="bold red"))
    head = Text(text.clean(status.run), style="bold")
    head.append(f"  {status.state}", style=_COLORS.get(status.state, "red"))
    parts.append(head)
    if status.documents_planned:
        done = min(status.documents, status.documents_planned)
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(ProgressBar(status.documents_planned, done, width=min(width, 60)))
        parts.append(bar)
    parts.append(_figures(status))
    if status.workers:
        parts.append(_workers(status.workers))
    if status.errors:
        parts.append(Text("last errors", style="bold"))
        parts += [Text(f"  {error}", overflow="ellipsis", no_wrap=True) for error in status.errors]
    parts += [Text(f"note: {text.clean(note, 300)}", style="yellow") for note in status.notes]
    return Group(*parts)


def _grid() -> Table:
    """Names beside their values; the names of all grids are as wide as the widest."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=10)
    table.add_column()
    return table


def _figures(status: Status) -> Table:
    table = _grid()
    about = "" if status.exact else "about "
    done, planned = f"{about}{text.count(status.documents)}", status.documents_planned
    if planned:
        nearly = "" if status.planned_exact else "about "
        done += f" of {nearly}{text.count(planned)}, {text.share(status.documents, planned)}"
    if status.failed:
        done += f"; {about}{text.count(status.failed)} failed"
    table.add_row("documents", done)
    units = text.count(status.units) + (f" of {text.count(status.units_planned)}" if status.units_planned else "")
    table.add_row("units", f"{units} committed")
    if status.documents_per_second is not None:
        table.add_row("speed", f"{text.number(status.documents_per_second)} documents/s")
    if status.eta_seconds is not None:
        table.add_row("left", f"{text.duration(status.eta_seconds)}, until {text.when(status.at + status.eta_seconds)}")
    table.add_row("ran", f"{text.duration(status.running_seconds)} in {text.counted(status.sessions, 'session')}")
    if status.heard is not None and status.state != "complete":
        table.add_row("heard", f"{text.duration(max(0.0, status.at - status.heard))} ago")
    if status.usd is not None:
        table.add_row("cost", _cost(status, status.usd))
    if status.deadline:
        table.add_row("deadline", text.clean(status.deadline))
    return table


def _cost(status: Status, usd: float) -> str:
    if not usd and not status.usd_per_hour:
        return text.cost(usd)
    line = text.usd(usd)
    if status.budget_usd:
        line += f" of {text.usd(status.budget_usd)}, {text.share(usd, status.budget_usd)}"
    documents = status.documents if status.extracted is None else status.extracted
    if documents:
        line += f"; {text.usd(1000 * usd / documents)} per 1,000 documents"
    if status.usd_per_hour:
        line += f"; {text.usd(status.usd_per_hour)} an hour"
    if status.usd_at_end is not None:
        line += f"; about {text.usd(status.usd_at_end)} at the end"
    return line


def _workers(workers: list[WorkerState]) -> Table:
    table = _grid()
    counts = Counter(worker.state for worker in workers)
    table.add_row(Text("workers", style="bold"), ", ".join(f"{n} {state}" for state, n in counts.items()))
    live = [w for w in workers if w.state != "ended"]
    for worker in live[:_WORKERS]:
        state = Text(worker.state, style=_COLORS.get(worker.state, ""))
        table.add_row(f"  {worker.worker}", Text.assemble(state, f"  busy {text.share(worker.busy, 1)}"))
    if len(live) > _WORKERS:
        table.add_row("", f"and {len(live) - _WORKERS} more")
    return table
