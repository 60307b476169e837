"""The commands, their options, and what they print and return."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.cli.main import app as app, report_errors as report_errors

__getattr__ = LazyExports(
    __name__,
    {
        "main": ("app", "report_errors"),
    },
)
