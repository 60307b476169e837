"""Draw what a command printed as a picture of a terminal.

COMMAND | python -m benchmarks.terminal FILE.svg
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

COLUMNS = 120


def picture(printed: str) -> str:
    """Return an SVG of a terminal that shows a text.

    Args:
        printed: The text, with the escape sequences of colors if the command wrote them.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(printed), no_wrap=True, overflow="ellipsis")
    return console.export_svg(title="raypd")


def main(file: Annotated[Path, typer.Argument(help="SVG file to write")]) -> None:
    """Write the picture of the text on stdin."""
    file.write_text(picture(sys.stdin.read()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
