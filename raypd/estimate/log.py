"""The file of what a tuning measured: a measurement that stands there is not made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raypd.errors import RunError
from raypd.estimate.agreement import Answers, Said


class Log:
    """The file of measurements, one JSON object a line. about: sample and machine; lines of others are left alone."""

    def __init__(self, path: Path, about: str, fresh: bool) -> None:
        self.path, self.about, self.taken = path, about, 0
        self._known: dict[str, list[dict[str, Any]]] = {}
        if fresh:
            path.unlink(missing_ok=True)
        for line in self._lines():
            if line.get("about") == about:
                self._known.setdefault(line["key"], []).append(line)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # it was being written when the process died
                continue
        return [line for line in found if isinstance(line, dict) and "key" in line]

    def take(self, key: str) -> dict[str, Any] | None:
        """A measurement that was made before, each once."""
        known = self._known.get(key)
        if not known:
            return None
        self.taken += 1
        return known.pop(0)

    def add(self, line: dict[str, Any]) -> None:
        """Raises RunError when it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b"")
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps({**line, "about": self.about}) + "\n")
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error}; --output names another place") from None


def write_answers(answers: Answers) -> list[Any]:
    return [None if one is None else {name: asdict(said) for name, said in one.items()} for one in answers]


def read_answers(lines: Sequence[Any]) -> Answers:
    return [None if one is None else {name: Said(**said) for name, said in one.items()} for one in lines]
