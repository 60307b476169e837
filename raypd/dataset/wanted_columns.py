"""Checks that the files of the input have the columns that a configuration names."""

from collections.abc import Sequence

from raypd.config import InputConfig
from raypd.dataset.formats import SeenColumns
from raypd.dataset.formats.nested_names import with_outer
from raypd.errors import did_you_mean

_MAX_SHOWN = 20  # columns in a message
# What to do about a missing column, by the key that names it.
_ADVICE = {
    "input.id_column": "; set input.id_column=null to number the documents instead",
    "input.category_column": (
        "; to give all documents one, set input.category_column=null and input.category"
    ),
    "input.text_columns": (
        "; set input.text_columns=[NAME] to the columns with text (`raypd init` finds them)"
    ),
}


class WantedColumns:
    """Finds out which columns of a configuration are missing, in one file and in all files.

    Args:
        wanted: The columns that the input must have, by the key that names each.
        source: Section `input`.
        optional: Columns that a table's schema has, and that some of its files may lack.
    """

    def __init__(self, wanted: dict[str, str], source: InputConfig, optional: set[str]) -> None:
        self._wanted = wanted
        # All columns that a run reads; a category may be missing.
        self.read = with_outer([*wanted.values(), source.id_column, source.category_column])
        self._optional = optional
        # A file without any of these contains nothing to read.
        self._content = dict(self._wanted)
        self._content.pop("input.id_column", None)
        self._content.pop("input.category_column", None)
        # What was seen in files whose rows may have different columns.
        self._seen: set[str] = set()
        self._objects = 0
        self._first_file: str | None = None
        self._first_names: list[str] = []

    def lacks(self, columns: SeenColumns) -> str | None:
        """Return why a file cannot be read, or None.

        A file with a schema needs every wanted column. In a file whose rows may differ, at
        least one row needs a column of text.
        """
        if columns.is_schema:
            present = self._optional.union(columns.names)
            for key, name in self._wanted.items():
                if name not in present:
                    return _missing(key, name, columns.names)
            return None
        if columns.objects and not set(columns.names).intersection(self._content.values()):
            for key, name in self._content.items():
                return _missing(key, name, columns.names)
        return None

    def note(self, path: str, columns: SeenColumns) -> None:
        """Remember the columns of a file whose rows may have different ones."""
        if not columns.rows:
            return
        if self._first_file is None:
            self._first_file = path
            self._first_names = columns.names[: 4 * _MAX_SHOWN]
        self._objects += columns.objects
        self._seen |= set(self._wanted.values()).intersection(columns.names)

    def missing_everywhere(self) -> str | None:
        """Return a message about a column that no noted file has; None if there is none."""
        if self._first_file is None:
            return None
        if not self._objects:
            return (
                f"{self._first_file}: none of its first rows is a JSON object; a file with "
                "objects of several lines needs a name that ends in .json"
            )
        for key, name in self._wanted.items():
            if name not in self._seen:
                return f"{self._first_file}: {_missing(key, name, self._first_names)}"
        return None


def _missing(key: str, name: str, present: Sequence[str]) -> str:
    """Return the message about a missing column.

    Args:
        key: The key of the configuration that names it.
        name: The column.
        present: The columns that the file has.
    """
    shown = ", ".join(present[:_MAX_SHOWN])
    if len(present) > _MAX_SHOWN:
        shown += ", ..."
    advice = _ADVICE.get(key.partition(" ")[0], "")
    reason = f"it has {shown}{advice}"
    hint = did_you_mean(name, present)
    if hint:
        reason = f"{hint} {reason}"
    return f"no column {name!r} ({key}): {reason}"
