"""A disk that takes no more in the middle of a write: the error says where, and nothing half-written stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from raypd import storage
from tests.processes import ROOT

# The system refuses a write in its middle, as on a full disk, and needs no right to mount one.
CODE = """
import errno, os, resource, sys
from raypd import storage
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
folder = sys.argv[1] + "/units"
assert storage.put_new(folder + "/a", b"a" * 40_000)
for write in (storage.put_new, storage.put):
    try:
        write(folder + "/b", os.urandom(100_000))
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        assert str(error).endswith("File too large: '" + folder + "/b'"), error
    else:
        raise AssertionError("it fitted")
assert os.listdir(folder) == ["a"], os.listdir(folder)
assert storage.put_new(folder + "/c", b"c" * 40_000)
"""


def test_a_write_that_the_disk_refuses_in_its_middle(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert storage.names(str(tmp_path / "units")) == ["a", "c"]
