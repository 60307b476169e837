"""The entry point of `raypd`, `python -m raypd` and jobs/."""

import os
import signal
import sys


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main(command: str | None = None) -> None:
    """Runs the command line. command: the one that a job stands for; None: as it is typed."""
    if command is not None:
        sys.argv.insert(1, command)
    signal.signal(signal.SIGINT, _interrupted)  # the import takes a second, in which an exception would be a traceback
    from raypd.cli.main import app, report_errors

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with report_errors():
        app(prog_name="raypd")


if __name__ == "__main__":
    main()
