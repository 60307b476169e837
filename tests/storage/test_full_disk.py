"""A disk that fills up in the middle of a commit: the error says where, nothing half-written stays, room heals it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raypd import storage
from tests.processes import ROOT

# In a mount namespace of its own, a file system of 256 KiB.
TMPFS = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" -c "$3" "$1"', "-"]  # fmt: skip  # noqa: E501

FILL = """
import errno, os, sys
from raypd import storage
folder = sys.argv[1] + "/units"
assert storage.put_new(folder + "/a", b"a" * 100_000)
for write in (storage.put_new, storage.put):
    try:
        write(folder + "/b", os.urandom(300_000))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert str(error).endswith("No space left on device: '" + folder + "/b'"), error
    else:
        raise AssertionError("it fitted")
assert os.listdir(folder) == ["a"], os.listdir(folder)
assert storage.put_new(folder + "/c", b"c" * 100_000)
print("well")
"""


def run(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, on a folder; `before` may mount something there first."""
    command = [*before, *([str(folder)] if before else []), sys.executable]
    command += [code] if before else ["-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_on_a_full_file_system(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or run("pass", tmp_path, *TMPFS).returncode:
        pytest.skip("needs to mount a file system in a namespace of its own (unshare --user --mount)")
    done = run(FILL, tmp_path, *TMPFS)
    assert done.stdout == "well\n", done.stderr


def test_a_file_larger_than_may_be(tmp_path: Path) -> None:
    """The same where mounting is not allowed: the system refuses the write in its middle."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from raypd import storage\n"
        "try: storage.put_new(sys.argv[1] + '/a', b'a' * 100_000)\n"
        "except OSError as error: print(error)\n"
        "assert storage.put_new(sys.argv[1] + '/b', b'b' * 40_000)"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert f"{tmp_path}/a" in done.stdout
    assert storage.names(str(tmp_path)) == os.listdir(tmp_path) == ["b"]
