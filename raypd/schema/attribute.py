"""An attribute to extract: its name, its type and the bounds of its values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from raypd.schema.names import PLAIN, fits_json
from raypd.schema.section import Section
from raypd.schema.types import TYPES, ListType, ValueType

# Keys that only some types support (`ValueType.keys`).
_KEYS_OF_TYPES = (
    "pattern",
    "minimum",
    "maximum",
    "min_length",
    "max_length",
    "values",
    "columns",
)


def _plain_name(name: str) -> str:
    if not fits_json(name):
        raise ValueError(f"{name!r}: a name is {PLAIN}")
    return name


def _known_type(name: Any) -> Any:
    if not isinstance(name, str) or name not in TYPES:
        *names, last = map(repr, TYPES)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
    return name


class Attribute(Section):
    """One attribute to extract."""

    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain_name)]
    description: str = ""
    type: Annotated[str, BeforeValidator(_known_type)] = "text"
    values: list[str] = Field(
        [], description="The values that an enum, a number or an integer may have"
    )
    many: bool = Field(False, description="Whether the value is a list")
    max_items: int | None = Field(None, ge=1, description="Maximum number of values in a list")
    min_items: int | None = Field(None, ge=0, description="A list of fewer values is invalid")
    columns: list[Attribute] = Field(
        [], description="Keys of the objects of type rows, such as the lines of an invoice"
    )
    pattern: str | None = Field(
        None,
        description="Regular expression that the whole value must match, for type pattern and, "
        "beside their format, for dates and times",
    )
    minimum: float | None = Field(None, description="A number below it is invalid")
    maximum: float | None = Field(None, description="A number above it is invalid")
    min_length: int | None = Field(None, ge=0, description="A text of fewer characters is invalid")
    max_length: int | None = Field(None, ge=1, description="A longer text is invalid")
    required: bool = Field(
        False,
        description="The value must not be null. (Text and number slots may still say null.)",
    )
    omit_null: bool = Field(False, description="Leave the key out of `record` if there is no value")
    path: list[str] = Field(
        [], description="Keys of the value in nested objects of `record`; empty: its name"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, tree: Any) -> Any:
        """Turn a bare name into an attribute of type text."""
        if isinstance(tree, str):
            return {"name": tree}
        return tree

    @property
    def value_type(self) -> ValueType:
        """The type, which decodes, reads, checks, stores and describes the values."""
        item = TYPES[self.type](self)
        return ListType(self, item) if self.many else item

    @property
    def key_path(self) -> list[str]:
        """The keys that lead to it in the record, from the outermost."""
        return self.path or [self.name]

    @property
    def hint(self) -> str:
        """The text that the prompt adds to the description."""
        return self.value_type.hint()

    @property
    def nullable(self) -> bool:
        """Whether its slot may contain null."""
        return not self.required or self.value_type.always_nullable

    def fits(self, value: Any) -> bool:
        """Return whether a JSON value is a value of the attribute; null is not."""
        return self.value_type.fits(value)

    @model_validator(mode="before")
    @classmethod
    def _normalized(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        name = keys.get("type")
        if not isinstance(name, str) or name not in TYPES:
            return keys
        return TYPES[name].normalized(keys)

    @model_validator(mode="after")
    def _keys_fit(self) -> Attribute:
        problem = self._misplaced_key() or self.value_type.problem()
        if problem:
            raise ValueError(f"attribute {self.name!r}: {problem}")
        return self

    def _misplaced_key(self) -> str | None:
        for key in _KEYS_OF_TYPES:
            is_set = getattr(self, key) not in (None, [])
            if is_set and key not in TYPES[self.type].keys:
                names = [name for name, value_type in TYPES.items() if key in value_type.keys]
                return f"`{key}` is for type {' and '.join(names)}"
        limits_items = self.max_items is not None or self.min_items is not None
        if limits_items and not self.many:
            return "`max_items` and `min_items` are for a list (`many`)"
        return None
