"""Ids and texts on a terminal steer nothing and look like no line of raypd's own; no cell of a CSV
is a formula.
"""

import csv
import io
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from raypd.answering import progress
from raypd.cli.main import app, report_errors
from raypd.cli.summary import print_summary
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import planner
from raypd.errors import ConfigError
from raypd.run import console
from tests.runs import run_here, says, write_rows

FAKED = "ok: every document of the input is in the output exactly once"
IDS = [
    "\x1b]0;another title\x07",
    "\x1b[31mred",
    "\x9b31mred, too",
    "[bold red]loud[/bold red]",
    "\u202eback to front",
    f"one\n{FAKED}",
    "a\r\tb",
    '=HYPERLINK("http://x")',
    "+1+1",
    "-cmd|' /C calc'!A0",
    "@SUM(A1)",
    "-5",
]


def steers(text: str) -> list[str]:
    """Characters that a terminal does something with, beside the end of a line and the tab."""
    return [
        c for c in text if (unicodedata.category(c) == "Cc" and c not in "\n\t") or c == "\u202e"
    ]


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """Each id once with an answer and once without, then once more in input that is not in the
    output.
    """
    lines = [{"id": id, "title": title} for id in IDS for title in ("a", "")]
    made = config(str(write_rows(tmp_path / "\x1b[32min.jsonl", lines)), unit_documents=100)
    run_here(made)
    return made


def outputs(run: RunConfig) -> Iterator[tuple[str, str]]:
    """(what a person looks at, all of it)."""
    for words in (["errors"], ["errors", "--json"], ["verify"], ["verify", "--json"]):
        yield (
            " ".join(words),
            CliRunner().invoke(app, [words[0], run.output.path, *words[1:]]).output,
        )
    for terminal in (False, True):
        printed = io.StringIO()
        console = Console(
            file=printed, width=160, force_terminal=terminal, color_system=None, highlight=False
        )
        print_summary(driver.finish(run, run.output.path, planner.plan(run)), console)
        yield "summary", printed.getvalue()


def test_ids_are_shown_and_steer_nothing(run: RunConfig) -> None:
    for name, text in outputs(run):
        assert steers(text) == [], name
        # `verify` ends with its verdict and the next step.
        assert FAKED not in [line.strip() for line in text.splitlines()[:-2]], name
        assert "31mred" in text, name
    assert "\\u001b]0;another title\\u0007 (" in dict(outputs(run))["errors"]


def test_markup_in_ids_and_paths_is_text(run: RunConfig, capsys) -> None:
    path = run.output.path + "[bold]"
    Path(run.output.path).rename(path)
    moved = run.model_copy(update={"output": run.output.model_copy(update={"path": path})})
    print_summary(driver.finish(moved, path, planner.plan(moved)))
    says(capsys.readouterr().out, f"manifest: {path}/manifest.json", "[bold red]loud")


def test_lines_beside_the_progress_and_errors_steer_nothing(capsys, monkeypatch) -> None:
    console.say(IDS[0])
    progress.RunDisplay(1, 0).say(IDS[1])
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with report_errors():
        raise ConfigError(IDS[2])
    assert codes == [2]
    assert steers(capsys.readouterr().err) == []
    with report_errors():
        raise OSError(28, "No space left on device", "out/lease.json")  # bare, as of a local disk
    assert codes == [2, 1]
    assert (
        capsys.readouterr().err == "error: [Errno 28] No space left on device: 'out/lease.json'\n"
    )


def test_no_cell_of_a_csv_is_a_formula(run: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    assert (
        CliRunner()
        .invoke(
            app,
            [
                "errors",
                run.output.path,
                "-o",
                str(path),
            ],
        )
        .exit_code
        == 0
    )
    text = path.read_text()
    assert steers(text) == []
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(IDS)
    assert not [cell for row in rows for cell in row.values() if cell[0] in "=+-@" and cell != "-5"]
    assert {row["id"] for row in rows} >= {"'+1+1", "'@SUM(A1)", "-5", "a\\u000d\tb"}
    # A program gets them as they are.
    path = tmp_path / "errors.jsonl"
    CliRunner().invoke(
        app,
        [
            "errors",
            run.output.path,
            "-o",
            str(path),
        ],
    )
    assert {json.loads(line)["id"] for line in path.read_text().splitlines()} == set(IDS)
