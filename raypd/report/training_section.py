"""The section `Training` of the page: losses, data, what was left out, and every learning rate that was tried."""

from __future__ import annotations

from raypd.report import charts
from raypd.report.charts import Chart
from raypd.report.sections import Table, Tile
from raypd.run import text
from raypd.run.training import TrainingRecord

_SKIPPED = 15


def tiles(record: TrainingRecord) -> list[Tile]:
    """The headline figures."""
    data, best = record.data, record.best
    rate = record.tokens / record.seconds if record.seconds else 0.0
    return [
        Tile("Documents", text.count(data.documents), "", [f"and {text.count(data.validation_documents)} to validate"]),
        Tile("Validation loss", f"{best.validation_loss:.4f}", "", [f"learning rate {best.learning_rate:g}"]),
        Tile("Tokens", text.compact(record.tokens), "", [f"{text.number(rate)} a second"]),
        Tile("Time", text.duration(record.seconds)),
        Tile("Cost", text.cost(record.usd)),
    ]


def losses(record: TrainingRecord) -> Chart:
    """The chart of the losses."""
    curves = {f"{attempt.learning_rate:g}": attempt.curve for attempt in record.attempts}
    return charts.losses(curves, f"{record.best.learning_rate:g}")


def tables(record: TrainingRecord) -> list[tuple[str, Table]]:
    """(title, table)"""
    rates = [
        [
            f"{attempt.learning_rate:g}",
            f"{attempt.validation_loss:.4f}",
            text.count(attempt.steps),
            text.compact(attempt.tokens),
        ]
        for attempt in sorted(record.attempts, key=lambda attempt: attempt.validation_loss)
    ]
    shown = [("Learning rates", Table(["rate", "lowest validation loss", "steps", "tokens"], rates))]
    if record.data.skipped:
        reasons = [[reason, text.count(count)] for reason, count in list(record.data.skipped.items())[:_SKIPPED]]
        shown.append(("Left out", Table(["reason", "times"], reasons)))
    return shown
