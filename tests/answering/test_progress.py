"""The time left of a measurement, as its progress shows it."""

import pytest

from raypd.answering import TimeLeft, progress


def test_the_time_left_follows_the_pass_and_a_limit_that_ends_it_is_named(
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
    assert left.update(10, 1000) == "at most 1 min 50 s left"
    now = 239.5
    assert left.update(320, 1000) == ""


def test_no_time_is_left_once_all_documents_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    left = TimeLeft(120.0)
    left.update(0, 20)
    now = 120.0
    assert left.update(19, 20) == "1.1 s left"
    assert left.update(20, 20) == ""
