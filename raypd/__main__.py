"""The entry point of `raypd`, `python -m raypd` and jobs/."""

import atexit
import os
import signal
import sys


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main(command: str | None = None) -> None:
    """Run the command line as a process.

    The process ends after Python's exit functions. In the C++ cleanup that would follow, Ray may
    abort a process that has done all of its work.

    Args:
        command: The command of a job, which is added to the typed arguments; None for a command
            line as it was typed.
    """
    code: object = 1

    # The first function to be registered is the last to be called.
    def leave() -> None:
        os._exit(code if isinstance(code, int) else 1)

    atexit.register(leave)
    try:
        run_command(command)
    except SystemExit as end:
        code = end.code or 0
        raise


def run_command(command: str | None = None) -> None:
    """Do the same as `main` without ending the process, and raise SystemExit."""
    if command is not None:
        sys.argv.insert(1, command)
    # The import takes a second, and an interrupt during it would show a traceback.
    signal.signal(signal.SIGINT, _interrupted)
    from raypd.cli import app, report_errors

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with report_errors():
        try:
            app(prog_name="raypd")
        finally:
            # If the output cannot be written, the command has failed.
            sys.stdout.flush()


if __name__ == "__main__":
    main()
