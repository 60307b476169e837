"""Phrases that were replaced stay out of what users read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from raypd.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
REPLACED = {
    "is there already": "already exists",
    "goes on": "resumes, continues",
    "going away": "is being preempted",
    "where there is none": "if there is none, if it is absent",
    "of which": "a sentence of its own",
    "put right": "repair",
    "stands twice": "occurs twice",
    "held to": "must match, must be, is compared with",
    "called as": "named like",
    "tried again": "retried",
    "anew": "again",
    "this is a fault of raypd": "internal error, please report this",
    "best all the same": "best nevertheless",
    "surely at": "certain to reach",
    "surely agree": "are certain to agree",
    "and the like": "and similar",
    "counts as right": "counts as correct",
    "holds the floor": "reaches the floor",
    "is no measurement": "is not a measurement",
    "says of itself": "say what it contains",
    "may stand": "may be",
    "leave away": "omit",
    "is looked for": "raypd looks for",
    "ends of their names": "file extensions",
    "surely holds": "is certain to reach",
    "stand nowhere": "do not occur in",
    "stands nowhere": "does not occur in",
    "complete already": "already complete",
    "calibrated already": "already calibrated",
    "quantized already": "already quantized",
    "woken for": "alerted to",
    "not certainly": "but its interval begins at",
    "leave the answers alone": "do not affect the answers",
    "by turns": "alternately, take turns",
    "without a word": "silently",
    "held against": "must match, is compared with",
    "not looked at": "ignored",
    "not surely": "may not be, could also be",
    "cannot be had": "is not available",
    "takes up the run": "resumes the run",
    "is no part of": "is not part of",
    "are no part of": "are not part of",
    "model wants a": "model needs a",
    "whom to blame": "the cause",
}
PATTERN = re.compile(r"\b(" + "|".join(REPLACED).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "infra/README.md",
    "configs/**/*.yaml",
)


def replaced_phrases(text: str) -> list[str]:
    """Return the replaced phrases in a text, each with what to write instead."""
    phrases = []
    for match in PATTERN.finditer(text):
        phrase = " ".join(match.group().lower().split())
        phrases.append(f"{phrase!r}: write {REPLACED[phrase]!r}")
    return phrases


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes that are docstrings, which users do not read."""
    ids = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                ids.add(id(statement.value))
    return ids


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of a module but for docstrings.

    A part of an f-string is a string too; a phrase that a placeholder interrupts is not seen.
    """
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value


def commands(command: typer.main.TyperCommand | typer.main.TyperGroup, name: str) -> Iterator:
    """Yield each command below a command, with its name."""
    yield name, command
    for part, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {part}")


def test_pages_have_none() -> None:
    problems = []
    for pattern in PAGES:
        files = sorted(ROOT.glob(pattern))
        assert files, pattern
        for file in files:
            for phrase in replaced_phrases(file.read_text()):
                problems.append(f"{file.relative_to(ROOT)}: {phrase}")
    assert not problems, "\n".join(problems)


def test_messages_and_descriptions_of_keys_have_none() -> None:
    problems = []
    for file in sorted((ROOT / "raypd").rglob("*.py")):
        for line, value in texts(ast.parse(file.read_text())):
            for phrase in replaced_phrases(value):
                problems.append(f"{file.relative_to(ROOT)}:{line}: {phrase}")
    assert not problems, "\n".join(problems)


def test_help_has_none() -> None:
    problems = []
    names = []
    for name, command in commands(typer.main.get_command(app), "raypd"):
        names.append(name)
        for phrase in replaced_phrases(command.help or ""):
            problems.append(f"{name} --help: {phrase}")
    assert "raypd extract" in names
    assert not problems, "\n".join(problems)


def test_a_phrase_is_seen_across_a_line_break_and_not_within_a_word() -> None:
    assert replaced_phrases("configs is there\nalready") == [
        "'is there already': write 'already exists'"
    ]
    assert replaced_phrases("which of whichever") == []
