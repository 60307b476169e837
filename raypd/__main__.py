"""The entry point of `raypd`, `python -m raypd` and jobs/."""

import atexit
import os
import signal
import sys


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main(command: str | None = None) -> None:
    """Runs the command line as a process. command: the one that a job stands for; None: as it is
    typed.

    The process ends behind Python's exit functions: in what C++ does after them Ray may abort it,
    all its work done.
    """
    code: object = 1

    def leave() -> None:  # the first to be registered is the last to be called
        os._exit(code if isinstance(code, int) else 1)

    atexit.register(leave)
    try:
        run_command(command)
    except SystemExit as end:
        code = end.code or 0
        raise


def run_command(command: str | None = None) -> None:
    """`main` without the end of the process. Raises SystemExit."""
    if command is not None:
        sys.argv.insert(1, command)
    # The import takes a second, in which an exception would be a traceback.
    signal.signal(signal.SIGINT, _interrupted)
    from raypd.cli import app, report_errors

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with report_errors():
        try:
            app(prog_name="raypd")
        finally:
            sys.stdout.flush()  # where it cannot be written, the command has failed


if __name__ == "__main__":
    main()
