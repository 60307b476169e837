"""`raypd` as it is typed, in this process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from raypd.__main__ import run_command


class Ended(NamedTuple):
    """What a shell gets of a command."""

    code: int | str | None
    out: str
    err: str


@pytest.fixture
def raypd(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """raypd("extract", "run.yaml", ...)."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("os._exit", sys.exit)

    def typed(*words: str) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["raypd", *words])
        with pytest.raises(SystemExit) as end:
            run_command()
        return Ended(end.value.code, *capsys.readouterr())

    return typed
