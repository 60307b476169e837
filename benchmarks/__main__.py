"""raypd beside vLLM, OpenVINO and transformers on the same tokens.

python -m benchmarks CONFIG [KEY=VALUE]...
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

from benchmarks.compare import Result, compare
from benchmarks.config import load_benchmark
from benchmarks.table import markdown, save
from raypd.errors import UserError
from raypd.text import clean


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run the works of a configuration; return the exit status.

    A table is written after each work, so that it stays if the next one is interrupted.
    """
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[Result] = []
    written: list[Path] = []
    try:
        run = load_benchmark(sys.argv[1], sys.argv[2:])
        folder = Path(run.benchmark.output)
        with contextlib.closing(compare(run, _print_progress)) as compared:
            for result in compared:
                results.append(result)
                written = save(results, folder, run.model.name)
                print(clean(markdown(result)) + "\n", flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {len(results)} works are done", file=sys.stderr)
        return 130
    print("\n".join(f"written: {file}" for file in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
