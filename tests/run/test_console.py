"""Ctrl-C and SIGTERM: the first ends a run in order, and what comes after the run hears them as before."""

import signal

import pytest

from raypd.run.console import signals

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("first", BOTH)
def test_a_second_signal_does_not_tear_the_way_out_and_a_later_one_is_heard(first) -> None:
    before, closed = [signal.getsignal(number) for number in BOTH], []

    def run() -> None:
        with signals(), signals():  # of a fit, and of a run within
            try:
                signal.raise_signal(first)
            finally:
                signal.raise_signal(signal.SIGINT)
                closed.append("ledger")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert closed == ["ledger"]
    assert [signal.getsignal(number) for number in BOTH] == before
