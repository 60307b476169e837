"""The files from which other programs read the table of nightly runs.

raypd keeps one object per unit, so that a night rewrites only those whose documents have changed.
Other programs would have to open each of them. If the table is larger than a table file
(output.target_file_mb), they get copies: table files with the rows of many objects, in the order of
the input. A night keeps every table file whose objects are all still in the table, and copies all
other objects into new ones. published.json names the table files, and is replaced in one write.
"""

import contextlib
from dataclasses import dataclass, field

import pyarrow as pa

from raypd import storage
from raypd.dataset import DigestSet, TableFile, TableWriter, compacted, digest
from raypd.run import TemporaryFolder, layout, records
from raypd.verify import read_object

_MEBIBYTE = 1 << 20
_THREADS = 8
# A night copies smaller table files together with its new objects, so that they do not accumulate.
_SMALL_SHARE = 0.5


@dataclass
class Publication:
    """published.json: what other programs read after a night.

    Attributes:
        night: The name of the night.
        files: The table files, whose names are relative to the folder of table files; empty if the
            objects themselves are listed.
    """

    night: str
    files: list[TableFile] = field(default_factory=list)

    def paths(self, root: str) -> list[str]:
        """Return the paths of the table files."""
        folder = storage.join(root, layout.TABLE)
        return [storage.join(folder, *file.name.split("/")) for file in self.files]


def publish(root: str, night: str, target_mb: int | None) -> list[str]:
    """Return the files from which other programs read the table of a night, and write new ones.

    Args:
        root: The nightly root.
        night: The name of the last successful night.
        target_mb: The size of a table file, in MiB; None publishes the objects themselves.

    Raises:
        OSError: The files cannot be written.
        RunError: An object is damaged, or storage is out of reach.
    """
    path = storage.join(root, layout.PUBLISHED)
    earlier = None
    with contextlib.suppress(FileNotFoundError):
        earlier = records.read(Publication, path)
    if earlier is not None and earlier.night == night:
        if earlier.files:
            return earlier.paths(root)
        return _objects(root, night)
    objects = _objects(root, night)
    if target_mb is None:
        return objects
    publishing = _Publishing(root, night, target_mb * _MEBIBYTE, objects)
    if (earlier is None or not earlier.files) and not publishing.is_large():
        records.write(path, Publication(night))
        return objects
    files = publishing.write(earlier.files if earlier is not None else [])
    publication = Publication(night, files)
    records.write(path, publication)
    return publication.paths(root)


def _objects(root: str, night: str) -> list[str]:
    """Return the objects of the table of a night, in the order of the input."""
    path = storage.join(root, layout.NIGHTS, night, layout.FILES)
    return storage.read(path).decode().splitlines()


class _Publishing:
    """Writes the table files of a night."""

    def __init__(self, root: str, night: str, target_bytes: int, objects: list[str]) -> None:
        self._root = root
        self._night = night
        self._target_bytes = target_bytes
        self._objects = objects
        self._listed = DigestSet(digest(self._name(path)) for path in objects)

    def _name(self, path: str) -> str:
        """Return the name of an object relative to the nightly root."""
        return f"{layout.NIGHTS}/{path.rpartition(f'/{layout.NIGHTS}/')[2]}"

    def is_large(self) -> bool:
        """Return whether all objects together are at least as large as a table file."""
        total = 0
        for item in storage.walk(storage.join(self._root, layout.NIGHTS)):
            if digest(f"{layout.NIGHTS}/{item.name}") in self._listed:
                total += item.size
        return total >= self._target_bytes

    def write(self, earlier: list[TableFile]) -> list[TableFile]:
        """Write the objects that no earlier table file has, and return all table files."""
        for part in (layout.TABLE, layout.TABLE_UNITS):
            storage.clean_temporary(storage.join(self._root, part))
        kept, held = self._kept(earlier)
        with TemporaryFolder("night") as folder:
            table_writer = TableWriter(self._root, self._night, self._target_bytes, folder)
            new = (path for path in self._objects if digest(self._name(path)) not in held)
            for name, rows in storage.in_threads(self._read, new, _THREADS):
                table_writer.add("", {"name": name, "id_digest": digest(name)}, rows)
            table_writer.end_file()
        files = list(kept)
        for file in table_writer.files:
            name = f"{self._night}/{file.name}"
            files.append(TableFile(name, file.units, file.rows, file.bytes))
        return files

    def _read(self, path: str) -> tuple[str, pa.Table]:
        return self._name(path), read_object(path).replace_schema_metadata(None)

    def _kept(self, earlier: list[TableFile]) -> tuple[list[TableFile], DigestSet]:
        """Return the table files that stay, and digests of the objects that they contain."""
        kept: list[TableFile] = []
        held: list[int] = []
        for file in earlier:
            if file.bytes < _SMALL_SHARE * self._target_bytes:
                continue
            night, _, name = file.name.rpartition("/")
            number = int(name.removesuffix(".parquet"))
            path = compacted.unit_rows_path(self._root, night, number)
            digests = compacted.read_unit_rows(path, ["id_digest"])["id_digest"].to_numpy()
            if (self._listed.positions(digests) >= 0).all():
                kept.append(file)
                held += digests.tolist()
        return kept, DigestSet(held)
