"""Find the cheapest model that reaches an F1 on your documents.

    python jobs/fit.py CONFIG [key=value ...]

It also runs as a job of a cluster:

    ray job submit --working-dir . -- python jobs/fit.py CONFIG [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

# The job works from a clone, without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raypd.__main__ import main

if __name__ == "__main__":
    main(Path(__file__).stem)
