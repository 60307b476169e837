"""Figures over time. The clock of a report runs while a session runs: nights between two sessions take no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from raypd.report.data import Session, Unit
    from raypd.report.ledger import Point, Worker

KINDS = ("startup", "busy", "idle", "lost")
_BINS = 120


class Clock:
    """Unix seconds <-> seconds of running time."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        starts: list[float] = []
        ends: list[float] = []
        self.borders: list[float] = []  # where one session follows on another
        total = 0.0
        for session in sessions:
            began = max(session.began, ends[-1] if ends else session.began)  # sessions do not overlap
            ended = max(began, session.ended)
            if starts:
                self.borders.append(total)
            starts.append(began)
            ends.append(ended)
            total += ended - began
        self.total = total
        # Between two sessions the clock stands.
        self._wall = [t for pair in zip(starts, ends, strict=True) for t in pair]
        elapsed, at = [], 0.0
        for began, ended in zip(starts, ends, strict=True):
            elapsed += [at, at + ended - began]
            at += ended - began
        self._elapsed = elapsed

    def at(self, unix: Sequence[float] | np.ndarray) -> np.ndarray:
        """Seconds of running time up to a time."""
        times = np.asarray(unix, dtype=float)
        return np.asarray(np.interp(times, self._wall, self._elapsed)) if self._wall else np.zeros_like(times)


@dataclass
class Rate:
    """Documents a second in equal spans of running time; `edges` has one more."""

    edges: np.ndarray
    values: np.ndarray


def rate(units: Sequence[Unit], clock: Clock, scale: float = 1.0) -> Rate | None:
    """Documents/s over running time, each unit's documents spread over the time in which it was worked on.

    None when there is nothing to draw.
    """
    if not units or clock.total <= 0:
        return None
    edges = np.linspace(0, clock.total, min(_BINS, max(12, len(units) // 2)) + 1)
    began = clock.at(np.array([u.began for u in units]))
    ended = np.maximum(clock.at(np.array([u.committed for u in units])), began + 1e-3)
    documents = np.array([u.documents for u in units], dtype=float)
    done = np.array([(documents * np.clip((t - began) / (ended - began), 0, 1)).sum() for t in edges])
    return Rate(edges, np.diff(done) * scale / np.diff(edges))


def money(points: Sequence[Point], clock: Clock) -> tuple[np.ndarray, np.ndarray]:
    """Running time (seconds) and dollars spent by then, from nothing on."""
    times = clock.at(np.array([p.at for p in points]))
    dollars = np.array([p.usd for p in points])
    return np.concatenate([[0.0], times]), np.concatenate([[0.0], dollars])


def spans_of_units(units: Sequence[Unit]) -> dict[str, list[tuple[float, float]]]:
    """Worker -> the times in which it had a unit in hand, merged, for a run without a bill that has timelines."""
    busy: dict[str, list[tuple[float, float]]] = {}
    for unit in sorted(units, key=lambda u: u.began):
        if unit.worker is None:
            continue
        spans = busy.setdefault(unit.worker, [])
        if spans and unit.began <= spans[-1][1] + 0.5:
            spans[-1] = (spans[-1][0], max(spans[-1][1], unit.committed))
        else:
            spans.append((unit.began, unit.committed))
    return busy


def timeline(workers: Sequence[Worker], clock: Clock, bins: int) -> list[list[tuple[float, float, str]]]:
    """Spans of each worker in running time, cut to at most `bins` pieces: the kind that fills most of each."""
    return [_coarse([(*clock.at(s[:2]).tolist(), s[2]) for s in w.spans], clock.total, bins) for w in workers]


def _coarse(spans: list[tuple[float, float, str]], total: float, bins: int) -> list[tuple[float, float, str]]:
    if len(spans) <= bins or total <= 0:
        return spans
    edges = np.linspace(0, total, bins + 1)
    began, ended = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    kinds = np.array([s[2] for s in spans])
    filled = np.zeros((len(KINDS), bins))
    for i, kind in enumerate(KINDS):
        mine = kinds == kind
        covered = np.array([np.clip(t - began[mine], 0, (ended - began)[mine]).sum() for t in edges])
        filled[i] = np.diff(covered)
    out: list[tuple[float, float, str]] = []
    for b in range(bins):
        if filled[:, b].sum() <= 0:
            continue
        kind = KINDS[int(filled[:, b].argmax())]
        if out and out[-1][2] == kind and abs(out[-1][1] - edges[b]) < 1e-9:
            out[-1] = (out[-1][0], float(edges[b + 1]), kind)
        else:
            out.append((float(edges[b]), float(edges[b + 1]), kind))
    return out
