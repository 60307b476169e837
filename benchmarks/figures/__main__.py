"""Write the figures: python -m benchmarks.figures docs/figures."""

import sys
from pathlib import Path

from benchmarks.figures.pictures import FIGURES


def main(folder: Path) -> None:
    """Write every figure into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        path = folder / f"{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
