"""Stretches of files that have to be read from their beginning: one process reads each of them.

Such a stretch is a whole compressed file, JSON array or workbook, or a large row group of
Parquet. If several processes shared its units, each of them would read the stretch from its
beginning.
"""

import raypd.dataset.cursors as cursors
from raypd.dataset.formats import FORMATS
from raypd.run import Unit


def stretch_of(unit: Unit) -> tuple[str, int] | None:
    """Return what identifies the stretch that a unit is a part of.

    Args:
        unit: A unit of a plan.

    Returns:
        The path of the file, and the first row of the stretch; None if the unit can be read
        without reading much else.
    """
    part = unit.parts[0]
    if len(unit.parts) > 1 or not cursors.applies(part):
        return None
    if not FORMATS[part.format].enters_groups:
        return part.path, 0
    if part.group is None:
        return None
    return part.path, part.group
