"""A run on a file system of 1 MB, and again once it has room: python -m tests.faults.small_disk D

Prints what the first run said, and copies the output to where the outside can see it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.faults.apart import own_ray
from tests.faults.trial import Trial
from tests.processes import ended


def mount(folder: str, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder], check=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    own_ray()
    inner = folder / "disk"
    inner.mkdir()
    mount(str(inner), "size=1m")
    trial = Trial(inner, ["a"] * 300)
    (inner / "ballast").write_bytes(b"x" * 920_000)
    said = ended(trial.start(), 1)
    assert trial.committed() < 30
    print(said)
    mount(str(inner), "remount", "size=64m")
    trial.finish()
    shutil.copytree(trial.output, folder / "out")
