"""Files of the input that a run does not read: counted for each reason, with the first names."""

from dataclasses import dataclass, field

from raypd.text import counted

_EXAMPLES = 5  # names for each reason

HIDDEN = "with a hidden name (a file or folder that begins with . or _)"
LINK = "behind links to folders, which are not followed (name such a folder in input.path)"
CACHE = "of the cache of Hugging Face's datasets"
EMPTY = "without a document"


@dataclass
class LeftOutFiles:
    """Files of the input that are not read, all for one reason."""

    reason: str  # completes the sentence "3 files ..."
    files: int
    examples: list[str] = field(default_factory=list)  # the first names


@dataclass
class _FilesOfReason:
    files: int = 0
    notable: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


class LeftOut:
    """Collects the files that are left out, in the order of the input."""

    def __init__(self) -> None:
        self._groups: dict[str, _FilesOfReason] = {}

    def add(self, reason: str, name: str, notable: bool = True) -> None:
        """Count a file.

        Args:
            reason: Completes the sentence "3 files ...", such as `HIDDEN`.
            name: The file's name below the input's folder.
            notable: Whether the file probably contains documents; such names are shown first.
        """
        group = self._groups.setdefault(reason, _FilesOfReason())
        group.files += 1
        examples = group.notable if notable else group.plain
        if len(examples) < _EXAMPLES:
            # A name that is not UTF-8 could not be written into a record.
            examples.append(name.encode("utf-8", "backslashreplace").decode())

    def add_all(self, files: LeftOutFiles) -> None:
        """Count files that an earlier session has counted."""
        group = self._groups.setdefault(files.reason, _FilesOfReason())
        group.files += files.files
        group.notable += files.examples

    def group(self, reason: str) -> LeftOutFiles | None:
        """Return what was counted for one reason, or None."""
        group = self._groups.get(reason)
        if group is None:
            return None
        examples = [*group.notable, *group.plain][:_EXAMPLES]
        return LeftOutFiles(reason, group.files, examples)

    def files(self) -> list[LeftOutFiles]:
        """Return the counts for every reason."""
        return [group for group in map(self.group, self._groups) if group is not None]


def describe(groups: list[LeftOutFiles]) -> str:
    """Return one sentence about the files that were left out; empty if there are none."""
    if not groups:
        return ""
    parts = []
    for group in groups:
        names = ", ".join(group.examples)
        remaining = group.files - len(group.examples)
        if remaining > 0:
            names += f" and {remaining:,} more"
        parts.append(f"{counted(group.files, 'file')} {group.reason}: {names}")
    return f"left out of the input: {'; '.join(parts)}"


def total(groups: list[LeftOutFiles]) -> int:
    """Return the number of files that were left out."""
    return sum(group.files for group in groups)
