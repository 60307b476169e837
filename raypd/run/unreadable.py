"""What of the input cannot be read: counted in units, listed by file."""

from collections.abc import Collection
from dataclasses import dataclass, field

from raypd.run.records import UnreadableUnit
from raypd.run.text import counted
from raypd.run.unit import Unit
from raypd.storage import SINCE_PLANNED

_LISTED = 100
_SHOWN = 10
_NAMED = 3


@dataclass
class Unreadable:
    """Units of the input that cannot be read: how many, and the first files of them, by name."""

    units: int = 0
    files: dict[str, UnreadableUnit] = field(default_factory=dict)

    def add(self, unit: Unit, error: str) -> bool:
        """Counts a unit, and keeps its file and the error while there are few; whether the file is
        newly kept.
        """
        self.units += 1
        if (entry := self.files.get(unit.name)) is not None:
            entry.units += 1
            entry.bytes += unit.bytes
        elif len(self.files) < _LISTED:
            self.files[unit.name] = UnreadableUnit(unit.name, unit.bytes, error)
            return True
        return False

    def shown(self) -> str:
        """The first files with their reasons on lines of their own, for a message."""
        first = [*self.files.values()][:_SHOWN]
        lines = [
            f"{e.error} ({counted(e.units, 'unit')} of it)" if e.units > 1 else e.error
            for e in first
        ]
        if remaining := self.units - sum(entry.units for entry in first):
            lines.append(f"and {remaining:,} more")
        return "".join(f"  {line}\n" for line in lines)

    def advice(self, begun: Collection[str]) -> str:
        """What can be done, in sentences. begun: sources of committed units, which would be refused
        once put right.
        """
        partly = [entry for entry in self.files.values() if entry.source in begun]
        changed = [entry.source for entry in partly if SINCE_PLANNED in entry.error]
        damaged = [entry.source for entry in partly if SINCE_PLANNED not in entry.error]
        sentences = []
        if changed:
            sentences.append(
                f"Units of {_names(changed)} are done with what it held: put that back, "
                "and the same command does the "
                "rest; as it is now it needs a new output.path."
            )
        if damaged:
            sentences.append(
                f"Units of {_names(damaged)} are done: put right it is a new file, for a new "
                "output.path."
            )
        if len(partly) < len(self.files):
            pronoun = "the others" if partly else "them"
            sentences.append(
                f"The same command tries {pronoun} again, when the objects are put right or "
                "removed."
            )
        if not changed:
            sentences.append("With input.on_damaged=skip it leaves them out and ends well.")
        return " ".join(sentences)


def _names(sources: list[str]) -> str:
    remaining = len(sources) - _NAMED
    return ", ".join(sources[:_NAMED]) + (f" and {remaining:,} more" if remaining > 0 else "")
