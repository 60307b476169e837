"""Figures over running time: nights between two sessions take no room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypd.report.data import ReportSession
from raypd.report.units import CommittedUnit

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


def rate(units: Sequence[CommittedUnit], clock: RunningTime, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Documents/s over running time, each unit's documents spread over the time in which it was worked on.

    Returns the edges of equal spans of time, and the value in each.
    """
    edges = np.linspace(0, clock.total, min(_BINS, max(12, len(units) // 2)) + 1)
    began = clock.at(np.array([u.began for u in units]))
    ended = np.maximum(clock.at(np.array([u.committed_at for u in units])), began + 1e-3)
    documents = np.array([u.documents for u in units], dtype=float)
    done = np.array([(documents * np.clip((t - began) / (ended - began), 0, 1)).sum() for t in edges])
    return edges, np.diff(done) * scale / np.diff(edges)


def money(points: Sequence[tuple[float, float]], clock: RunningTime) -> tuple[np.ndarray, np.ndarray]:
    """Running time (seconds) and dollars spent by then, from nothing on."""
    times, usd = np.array(points).T
    return np.concatenate([[0.0], clock.at(times)]), np.concatenate([[0.0], usd])
