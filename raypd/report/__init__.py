"""Shows a run to people: its report page, its review page, and its status on the terminal.

Everything is read from the run's folder, without Ray.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.report import (
        answer_check as answer_check,
        charts as charts,
        data as data,
        page as page,
        review as review,
        terminal as terminal,
        texts as texts,
    )
    from raypd.report.advice import (
        fit_step as fit_step,
        known_labels as known_labels,
        labels_of_page as labels_of_page,
    )
    from raypd.report.charts import FULL as FULL, Chart as Chart, Table as Table
    from raypd.report.status import Watch as Watch
    from raypd.report.svg import ROLES as ROLES
    from raypd.report.texts import marked as marked, text_in as text_in

__getattr__ = LazyExports(
    __name__,
    {
        "advice": ("fit_step", "known_labels", "labels_of_page"),
        "charts": ("Chart", "FULL", "Table"),
        "status": ("Watch",),
        "svg": ("ROLES",),
        "texts": ("marked", "text_in"),
    },
    modules=("answer_check", "charts", "data", "page", "review", "terminal", "texts"),
)
