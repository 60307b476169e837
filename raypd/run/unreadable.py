"""Input that cannot be read: counted in units, listed by file."""

from collections.abc import Collection
from dataclasses import dataclass, field

from raypd.run.unit import Unit
from raypd.storage import SINCE_PLANNED
from raypd.text import counted

_LISTED_FILES = 100  # in the manifest
_SHOWN_FILES = 10  # in a message
_NAMED_FILES = 3  # in a sentence


@dataclass
class UnreadableUnit:
    """A file of the input with units that cannot be read."""

    source: str
    bytes: int  # size of these units
    error: str  # why the first of them cannot be read
    units: int = 1


@dataclass
class Unreadable:
    """The units that cannot be read: their number, and the first files by name."""

    units: int = 0
    files: dict[str, UnreadableUnit] = field(default_factory=dict)

    def add(self, unit: Unit, error: str) -> bool:
        """Count a unit, and list its file while the list is short.

        Returns:
            Whether the file was added to the list.
        """
        self.units += 1
        entry = self.files.get(unit.name)
        if entry is not None:
            entry.units += 1
            entry.bytes += unit.bytes
            return False
        if len(self.files) >= _LISTED_FILES:
            return False
        self.files[unit.name] = UnreadableUnit(unit.name, unit.bytes, error)
        return True

    def shown(self) -> str:
        """Describe the first files, one per line, for a message."""
        entries = [*self.files.values()][:_SHOWN_FILES]
        lines = []
        for entry in entries:
            suffix = f" ({counted(entry.units, 'unit')} of it)" if entry.units > 1 else ""
            lines.append(f"{entry.error}{suffix}")
        hidden_units = self.units - sum(entry.units for entry in entries)
        if hidden_units:
            lines.append(f"and {hidden_units:,} more")
        return "".join(f"  {line}\n" for line in lines)

    def advice(self, begun: Collection[str]) -> str:
        """Return what the user can do, in sentences.

        Args:
            begun: Sources that have committed units. Once such a file is repaired, it no longer
                matches them.
        """
        begun_files = [entry for entry in self.files.values() if entry.source in begun]
        changed = [entry.source for entry in begun_files if SINCE_PLANNED in entry.error]
        damaged = [entry.source for entry in begun_files if SINCE_PLANNED not in entry.error]
        sentences = []
        if changed:
            sentences.append(
                f"Units of {_names(changed)} were committed before the content changed. Restore "
                "the old content and run the same command again, or process the new content into "
                "a new output.path."
            )
        if damaged:
            sentences.append(
                f"Some units of {_names(damaged)} are committed. Once repaired, it counts as a new "
                "file and needs a new output.path."
            )
        if len(begun_files) < len(self.files):
            pronoun = "the others" if begun_files else "them"
            sentences.append(
                f"Repair or remove the files, then run the same command to retry {pronoun}."
            )
        if not changed:
            sentences.append("With input.on_damaged=skip the run leaves them out and succeeds.")
        return " ".join(sentences)


def _names(sources: list[str]) -> str:
    names = ", ".join(sources[:_NAMED_FILES])
    hidden = len(sources) - _NAMED_FILES
    return f"{names} and {hidden:,} more" if hidden > 0 else names
