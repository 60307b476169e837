"""Say what a run will take and cost: python jobs/estimate.py [CONFIG] [key=value ...] [--sample N] ...

As a job of a cluster it measures on a worker of it: ray job submit --working-dir . -- python jobs/estimate.py CONFIG
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without an installation

import typer

from raypd.cli.main import estimate, report_errors

if __name__ == "__main__":
    with report_errors():
        typer.run(estimate)
