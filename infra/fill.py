"""Fill a file of this folder with the values of a settings file.

    python infra/fill.py SETTINGS FILE > FILLED

`${RAYPD_NAME}` is replaced. Everything else stays as it is, for example shell variables and IAM's
own `${aws:...}`. `--keep NAME` leaves a placeholder for later. If a value is unset or empty,
nothing is printed and the exit code is 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{(RAYPD_[A-Z_]+)\}")


def read_settings(path: Path) -> dict[str, str]:
    """Read lines of the form NAME=value; blank lines and comments are skipped.

    Raises:
        ValueError: If a line has another form; the message contains it.
    """
    settings: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"RAYPD_[A-Z_]+", name):
            raise ValueError(f"{path}:{number}: {line!r} is not RAYPD_NAME=value")
        settings[name] = value.strip()
    return settings


def fill(text: str, settings: dict[str, str], keep: frozenset[str] = frozenset()) -> str:
    """Replace the placeholders of a text, except those to keep.

    Raises:
        ValueError: If placeholders have no value; the message names all of them.
    """
    missing = set()
    for name in PLACEHOLDER.findall(text):
        if not settings.get(name) and name not in keep:
            missing.add(name)
    if missing:
        raise ValueError(f"no value for {', '.join(sorted(missing))}: set it in the settings file")

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in keep:
            return match[0]
        return settings[name]

    return PLACEHOLDER.sub(value, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill a file of infra/ with settings.")
    parser.add_argument("settings", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    try:
        settings = read_settings(arguments.settings)
        text = fill(arguments.file.read_text(), settings, frozenset(arguments.keep))
    except (OSError, ValueError) as error:
        print(f"fill.py: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
