"""The section `Training` of the page: losses, data, what was left out, and every learning rate that was tried."""

from __future__ import annotations

from raypd.report import charts
from raypd.report.charts import Chart
from raypd.report.sections import Table, Tile
from raypd.run import text
from raypd.run.training import TrainingRecord

_SKIPPED = 15


def tiles(found: TrainingRecord) -> list[Tile]:
    """The headline figures."""
    data, best = found.data, found.best
    rate = found.tokens / found.seconds if found.seconds else 0.0
    return [
        Tile("Documents", text.count(data.documents), "", [f"and {text.count(data.validation_documents)} to validate"]),
        Tile("Validation loss", f"{best.validation_loss:.4f}", "", [f"learning rate {best.learning_rate:g}"]),
        Tile("Tokens", text.compact(found.tokens), "", [f"{text.number(rate)} a second"]),
        Tile("Time", text.duration(found.seconds)),
        Tile("Cost", text.cost(found.usd)),
    ]


def losses(found: TrainingRecord) -> Chart:
    """The chart of the losses."""
    curves = {f"{attempt.learning_rate:g}": attempt.curve for attempt in found.attempts}
    return charts.losses(curves, f"{found.best.learning_rate:g}")


def tables(found: TrainingRecord) -> list[tuple[str, Table]]:
    """(title, table)"""
    rates = [
        [f"{one.learning_rate:g}", f"{one.validation_loss:.4f}", text.count(one.steps), text.compact(one.tokens)]
        for one in sorted(found.attempts, key=lambda attempt: attempt.validation_loss)
    ]
    shown = [("Learning rates", Table(["rate", "lowest validation loss", "steps", "tokens"], rates))]
    if found.data.skipped:
        left = [[reason, text.count(count)] for reason, count in list(found.data.skipped.items())[:_SKIPPED]]
        shown.append(("Left out", Table(["reason", "times"], left)))
    return shown
