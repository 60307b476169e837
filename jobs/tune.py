"""Find the cheapest settings of a run.

    python jobs/tune.py CONFIG [key=value ...] [--minutes N] ...

As a job of a cluster it measures on a worker of the cluster:

    ray job submit --working-dir . -- python jobs/tune.py CONFIG --output /shared/tuned.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

# The job works from a clone, without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raypd.__main__ import main

if __name__ == "__main__":
    main(Path(__file__).stem)
