"""Puts the values of a settings file into a file of this folder: python infra/fill.py SETTINGS FILE
> FILLED

`${RAYPD_NAME}` is replaced; everything else, shell variables and IAM's own `${aws:...}` among it,
stays as it is. `--keep NAME` leaves a placeholder for later. An unset or empty value is an error,
and nothing is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{(RAYPD_[A-Z_]+)\}")


def read_settings(path: Path) -> dict[str, str]:
    """NAME=value lines; blank lines and comments are skipped.

    Raises ValueError with the line that is neither.
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
    """The text with its placeholders replaced.

    Raises ValueError that names all those without a value.
    """
    missing = sorted({n for n in PLACEHOLDER.findall(text) if not settings.get(n)} - keep)
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}: set it in the settings file")
    return PLACEHOLDER.sub(lambda m: m[0] if m[1] in keep else settings[m[1]], text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts settings into a file of infra/.")
    parser.add_argument("settings", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    try:
        text = fill(
            arguments.file.read_text(), read_settings(arguments.settings), frozenset(arguments.keep)
        )
    except (OSError, ValueError) as error:
        print(f"fill.py: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
