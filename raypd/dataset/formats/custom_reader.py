"""Files that a user's own function reads (`input.reader`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from raypd import storage
from raypd.config import InputConfig, imported
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.object_rows import ObjectFormat
from raypd.errors import InputError
from raypd.run import Part
from raypd.tasks import kind_of, plain_value


class CustomReader(ObjectFormat):
    """Rows that `input.reader` yields; it takes every file, whatever its name."""

    name = "reader"
    setting = "reader"
    compressible = False

    def rows(self, part: Part, source: InputConfig) -> Iterator[Any]:
        """Yield what the function yields.

        Raises:
            ConfigError: There is no such function.
            InputError: The function fails.
        """
        read = imported("input.reader", str(source.reader))
        with storage.open_read(part.path, version=part.version) as file:
            try:
                yield from read(part.name, file)
            except Exception as error:
                if isinstance(error, OSError):
                    outage = storage.outage(error, part.path)
                    if outage is not None:
                        raise outage from None
                raise InputError(
                    f"input.reader {source.reader}: {type(error).__name__}: {error}"
                ) from None

    def fields(self, row: Any) -> Fields:
        if not isinstance(row, Mapping):
            raise ValueError(f"input.reader gave {kind_of(row)}, not a dict")
        fields: Fields = plain_value(row)
        return fields

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        # The user's function is called only by the run itself.
        raise InputError("only input.reader knows the columns of its rows")
