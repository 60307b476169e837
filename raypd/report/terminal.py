"""`raypd status` on the terminal: one look, or a view that is drawn anew every few seconds."""

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

_WORKERS = 12  # shown one by one
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
    again: float | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Prints how a run stands. again: seconds between looks, None: one.

    Raises RunError where the first look fails.
    """
    console = console or Console(highlight=False, markup=False)
    with raised_as(RunError, f"{watch.root}: cannot be read"):
        status = watch.look()
    if as_json:
        _follow(watch, status, again, lambda look: print(json.dumps(asdict(look)), flush=True))
    elif again is None or not console.is_terminal:
        _follow(watch, status, again, lambda look: console.print(render(look, console.width)))
    else:
        with Live(console=console, auto_refresh=False) as live:
            _follow(
                watch,
                status,
                again,
                lambda look: live.update(render(look, console.width), refresh=True),
            )


def _follow(
    watch: Watch, status: Status, again: float | None, show_look: Callable[[Status], None]
) -> None:
    show_look(status)
    with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        while again is not None and status.state == "running":
            time.sleep(again)
            try:
                status = watch.look()
            except OSError as error:
                status.notes = [f"the last look failed, these are the figures of before: {error}"]
            show_look(status)


def render(status: Status, width: int = 100) -> RenderableType:
    """The look as rich draws it.

    Texts of documents are shown as they are, never as rich's markup.
    """
    parts: list[RenderableType] = []
    if status.fake:
        parts.append(
            Text(
                "model: fake. THESE ANSWERS ARE MADE UP: no model read the documents.",
                style="bold red",
            )
        )
    state = (f"  {status.state}", _COLORS.get(status.state, "red"))
    parts.append(Text.assemble(text.clean(status.run), state, style="bold"))
    if status.documents_planned:
        done = min(status.documents, status.documents_planned)
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(ProgressBar(status.documents_planned, done, width=min(width, 60)))
        parts.append(bar)
    parts.append(_grid(_figures(status)))
    if status.workers:
        parts.append(_grid(_workers(status.workers)))
    if status.errors:
        parts.append(Text("last errors", style="bold"))
        parts += [Text(f"  {error}", overflow="ellipsis", no_wrap=True) for error in status.errors]
    parts += [Text(f"note: {text.clean(note, 300)}", style="yellow") for note in status.notes]
    return Group(*parts)


def _grid(rows: Iterable[tuple[RenderableType, RenderableType]]) -> Table:
    """Names beside their values; the names of all grids are as wide as the widest."""
    table = Table.grid(Column(min_width=10), Column(), padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _figures(status: Status) -> Iterator[tuple[str, str]]:
    about, about_planned = (
        "" if exact else "about " for exact in (status.exact, status.planned_exact)
    )
    done = f"{about}{text.count(status.documents)}"
    planned = status.documents_planned
    if planned:
        done += f" of {about_planned}{text.count(planned)}, {text.share(status.documents, planned)}"
    if status.failed:
        done += f"; {about}{text.count(status.failed)} failed"
    yield "documents", done
    of_planned = f" of {text.count(status.units_planned)}" if status.units_planned else ""
    yield "units", f"{text.count(status.units)}{of_planned} committed"
    if status.documents_per_second is not None:
        yield "speed", f"{text.number(status.documents_per_second)} documents/s"
    if status.eta_seconds is not None:
        yield (
            "left",
            (
                f"{text.duration(status.eta_seconds)}, until "
                f"{text.when(status.at + status.eta_seconds)}"
            ),
        )
    yield (
        "ran",
        f"{text.duration(status.running_seconds)} in {text.counted(status.sessions, 'session')}",
    )
    if status.heard is not None and status.state != "complete":
        yield "heard", f"{text.duration(max(0.0, status.at - status.heard))} ago"
    if status.usd is not None:
        yield "cost", _cost(status, status.usd)
    if status.deadline:
        yield "deadline", text.clean(status.deadline)


def _cost(status: Status, usd: float) -> str:
    if not usd and not status.usd_per_hour:
        return text.cost(usd)
    parts = [text.usd(usd)]
    if status.budget_usd:
        parts[0] += f" of {text.usd(status.budget_usd)}, {text.share(usd, status.budget_usd)}"
    if documents := status.documents if status.extracted is None else status.extracted:
        parts.append(f"{text.usd(1000 * usd / documents)} per 1,000 documents")
    if status.usd_per_hour:
        parts.append(f"{text.usd(status.usd_per_hour)} an hour")
    if status.usd_at_end is not None:
        parts.append(f"about {text.usd(status.usd_at_end)} at the end")
    return "; ".join(parts)


def _workers(workers: list[WorkerState]) -> Iterator[tuple[RenderableType, RenderableType]]:
    counts = Counter(worker.state for worker in workers)
    yield Text("workers", style="bold"), ", ".join(f"{n} {state}" for state, n in counts.items())
    live = [w for w in workers if w.state != "ended"]
    for worker in live[:_WORKERS]:
        state = Text(worker.state, style=_COLORS.get(worker.state, ""))
        yield f"  {worker.worker}", Text.assemble(state, f"  busy {text.share(worker.busy, 1)}")
    if len(live) > _WORKERS:
        yield "", f"and {len(live) - _WORKERS} more"
