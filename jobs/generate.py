"""Write an answer to every prompt: python jobs/generate.py CONFIG [key=value ...]

Also as a job of a cluster: ray job submit --working-dir . -- python jobs/generate.py CONFIG [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without an installation

import typer

from raypd.cli.main import generate, report_errors

if __name__ == "__main__":
    with report_errors():
        typer.run(generate)
