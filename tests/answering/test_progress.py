"""The time left of a measurement, as its progress shows it."""

import pytest

from raypd.answering import TimeLeft, progress


def test_the_time_left_follows_the_pass_and_never_exceeds_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    left = TimeLeft(120.0)
    assert left.update(0, 100) == ""
    now = 110.0
    # Too few documents to tell.
    assert left.update(5, 100) == ""
    assert left.update(20, 100) == "40 s left"
    now = 120.0
    # Another pass over the sample starts again.
    assert left.update(0, 100) == ""
    now = 130.0
    assert left.update(10, 1000) == "1 min 50 s left"
