"""Temporary folders: those of killed processes are removed by the next start, and no others."""

import os
import tempfile
from pathlib import Path

import pytest

from raypd.errors import RunError
from raypd.run.temporary import TemporaryFolder, remove_orphans, temporary_space
from tests.processes import start

HOLD = """
import sys
from raypd.dataset.plan import PlanWriter
from raypd.verify.scratch import Scratch
held = [PlanWriter(), Scratch()]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmpdir(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "tmpdir"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir())


def test_folders_of_a_killed_process_are_removed_and_those_of_a_live_one_stay(tmpdir) -> None:
    processes = [start("-c", HOLD, TMPDIR=str(tmpdir)) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "held\n"
    held = ["raypd-plan", "raypd-plan", "raypd-scratch", "raypd-scratch"]
    assert names(tmpdir) == held
    assert remove_orphans() == 0
    processes[0].kill()
    processes[0].wait()
    assert names(tmpdir) == held
    with TemporaryFolder("test"):
        assert names(tmpdir) == ["raypd-plan", "raypd-scratch", "raypd-test"]
    processes[1].communicate("")  # it ends by itself, and removes its own
    assert names(tmpdir) == []


def test_what_is_not_clearly_an_orphan_stays(tmpdir, tmp_path) -> None:
    (tmpdir / "raypd-unlocked").mkdir()
    (tmpdir / "other-program").mkdir()
    (tmpdir / "other-program/.lock").touch()
    (tmpdir / "raypd-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/.lock").touch()
    (tmpdir / "raypd-link").symlink_to(tmp_path / "elsewhere")
    assert remove_orphans() == 0
    assert len(os.listdir(tmpdir)) == 4
    assert (tmp_path / "elsewhere/.lock").exists()
    (tmpdir / "raypd-unlocked/.lock").touch()
    assert remove_orphans() == 1
    assert not (tmpdir / "raypd-unlocked").exists()


def test_an_unusable_tmpdir_is_named(tmpdir) -> None:
    tmpdir.rmdir()
    with pytest.raises(RunError, match=f"cannot be written to {tmpdir} .*Set TMPDIR to a folder"):
        TemporaryFolder("test")
    with pytest.raises(KeyError), temporary_space(OSError):
        raise KeyError("not about files")
