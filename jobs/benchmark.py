"""Compare raypd with other engines on the same tokens: python jobs/benchmark.py CONFIG [key=value ...]

It measures on the machine that it runs on, which should do nothing else meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without an installation

import typer

from raypd.cli.main import benchmark, report_errors

if __name__ == "__main__":
    with report_errors():
        typer.run(benchmark)
