"""Figures over running time: nights between two sessions take no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from raypd.report.data import ReportSession
    from raypd.report.units import CommittedUnit
    from raypd.run.records import WorkerTime

KINDS = ("startup", "busy", "idle", "lost")
_BINS = 120


class RunningTime:
    """Unix seconds to seconds of running time: it stands between two sessions.

    total: of all sessions. borders: where one session follows on another.
    """

    def __init__(self, sessions: Sequence[ReportSession]) -> None:
        self._unix: list[float] = []
        self._elapsed: list[float] = []
        self.borders: list[float] = []
        self.total = 0.0
        for session in sessions:
            began = max([session.began, *self._unix[-1:]])  # sessions do not overlap
            ended = max(began, session.ended)
            if self._unix:
                self.borders.append(self.total)
            self._unix += [began, ended]
            self._elapsed += [self.total, self.total + ended - began]
            self.total += ended - began

    def at(self, unix: Sequence[float] | np.ndarray) -> np.ndarray:
        """Seconds of running time up to a time."""
        times = np.asarray(unix, dtype=float)
        return np.asarray(np.interp(times, self._unix, self._elapsed)) if self._unix else np.zeros_like(times)


@dataclass
class Rate:
    """Documents a second in equal spans of running time; `edges` has one more."""

    edges: np.ndarray
    values: np.ndarray


def rate(units: Sequence[CommittedUnit], clock: RunningTime, scale: float = 1.0) -> Rate | None:
    """Documents/s over running time, each unit's documents spread over the time in which it was worked on.

    None when there is nothing to draw.
    """
    if not units or clock.total <= 0:
        return None
    edges = np.linspace(0, clock.total, min(_BINS, max(12, len(units) // 2)) + 1)
    began = clock.at(np.array([u.began for u in units]))
    ended = np.maximum(clock.at(np.array([u.committed_at for u in units])), began + 1e-3)
    documents = np.array([u.documents for u in units], dtype=float)
    done = np.array([(documents * np.clip((t - began) / (ended - began), 0, 1)).sum() for t in edges])
    return Rate(edges, np.diff(done) * scale / np.diff(edges))


def money(points: Sequence[tuple[float, float]], clock: RunningTime) -> tuple[np.ndarray, np.ndarray]:
    """Running time (seconds) and dollars spent by then, from nothing on."""
    at, usd = np.array(points).T
    return np.concatenate([[0.0], clock.at(at)]), np.concatenate([[0.0], usd])


def spans_of_units(units: Sequence[CommittedUnit]) -> dict[str, list[tuple[float, float]]]:
    """Worker -> the times in which it had a unit in flight, merged, for a run without a bill that has timelines."""
    busy: dict[str, list[tuple[float, float]]] = {}
    for unit in sorted(units, key=lambda u: u.began):
        if not unit.worker:
            continue
        spans = busy.setdefault(unit.worker, [])
        if spans and unit.began <= spans[-1][1] + 0.5:
            spans[-1] = (spans[-1][0], max(spans[-1][1], unit.committed_at))
        else:
            spans.append((unit.began, unit.committed_at))
    return busy


def timeline(workers: Sequence[WorkerTime], clock: RunningTime, bins: int) -> list[list[tuple[float, float, str]]]:
    """Spans of each worker in running time, cut to at most `bins` pieces: the kind that fills most of each."""
    return [_coarse([(*clock.at(s[:2]).tolist(), s[2]) for s in w.spans], clock.total, bins) for w in workers]


def _coarse(spans: list[tuple[float, float, str]], total: float, bins: int) -> list[tuple[float, float, str]]:
    if len(spans) <= bins or total <= 0:
        return spans
    edges = np.linspace(0, total, bins + 1)
    began, ended = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    kinds = np.array([s[2] for s in spans])
    covered = np.clip(edges[:, None] - began, 0, ended - began)  # of each span, seconds up to each edge
    filled = np.array([np.diff(covered[:, kinds == kind].sum(axis=1)) for kind in KINDS])
    out: list[tuple[float, float, str]] = []
    for b in np.flatnonzero(filled.sum(axis=0) > 0):
        kind = KINDS[int(filled[:, b].argmax())]
        if out and out[-1][2] == kind and out[-1][1] == edges[b]:
            out[-1] = (out[-1][0], float(edges[b + 1]), kind)
        else:
            out.append((float(edges[b]), float(edges[b + 1]), kind))
    return out
