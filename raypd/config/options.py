"""Mappings of rarely set options: a single key of the tree that a separate class checks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    create_model,
)
from pydantic.fields import FieldInfo

from raypd.config.secrets import check_secrets, redact
from raypd.errors import did_you_mean
from raypd.schema import Section


class OptionsError(ValueError):
    """Options that are unknown or have a wrong value.

    Attributes:
        problems: The name of each such option, and what is wrong with it.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class OptionsOf:
    """Annotates a mapping in the tree with the class that checks its contents.

    The checked mapping has only the options that differ from their defaults, so an option that is
    written out with its default value changes no fingerprint.

    Attributes:
        sections: The class that checks the options, for each value of the key `chosen_by`.
        chosen_by: A key of the same section, declared before the mapping. If it is empty, the only
            class is the one for "".
    """

    sections: Mapping[str, type[Section]]
    chosen_by: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Check the options after the mapping itself."""
        return AfterValidator(self._checked).__get_pydantic_core_schema__(source, handler)

    def _checked(self, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        choice = info.data.get(self.chosen_by, "")
        # The key itself is wrong, and its error is reported.
        if choice not in self.sections:
            return options
        section = self.sections[choice]
        for name, value in options.items():
            try:
                check_secrets(value)
            except ValueError as error:
                raise OptionsError([(name, str(error))]) from None
        unknown = [name for name in options if name not in section.model_fields]
        if unknown:
            raise OptionsError([(name, self._unknown(name, choice)) for name in unknown])
        try:
            checked = section.model_validate(options)
        except ValidationError as error:
            raise OptionsError([_problem(item) for item in error.errors()]) from None
        return checked.model_dump(exclude_defaults=True)

    def complete(self, section: Section, options: dict[str, Any]) -> Section:
        """Return the options of a section with the defaults of those that are not set."""
        choice = getattr(section, self.chosen_by) if self.chosen_by else ""
        return self.sections[choice].model_validate(options)

    def _unknown(self, name: str, choice: str) -> str:
        """Say which option an unknown one was probably meant to be."""
        names = list(self.sections[choice].model_fields)
        hint = did_you_mean(name, names)
        if not hint and names:
            hint = f"choose from {', '.join(names)}"
        if not self.chosen_by:
            return f"unknown option; {hint}"
        owners = [owner for owner, section in self.sections.items() if name in section.model_fields]
        if owners:
            hint = f"it is an option of {', '.join(owners)}"
        return f"{self.chosen_by} {choice} has no such option; {hint or 'it has none'}"


def options_in(info: FieldInfo) -> list[OptionsOf]:
    """Return the annotation of the options that a key contains, as a list of at most one item."""
    return [part for part in info.metadata if isinstance(part, OptionsOf)]


def read(section: Section, name: str) -> Any:
    """Return the value of a key; options that are not set have their defaults."""
    value = getattr(section, name)
    for options in options_in(type(section).model_fields[name]):
        return options.complete(section, value)
    return value


def _problem(item: Any) -> tuple[str, str]:
    """Return the option that an error of pydantic is about, and its message."""
    name = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "value_error" and name and not isinstance(item["input"], (dict, list)):
        message = f"{message} (it is {redact(item['input'])!r})"
    return name, message


def section_of(options: type[Any]) -> type[Section]:
    """Return the class that checks the options that a dataclass declares.

    Rooms below the configuration cannot use pydantic. They declare options as dataclasses, whose
    fields have a description and limits, such as {"ge": 1}, in their metadata.

    Args:
        options: The dataclass. All of its fields have defaults.
    """
    hints = get_type_hints(options)
    keys: dict[str, Any] = {
        field.name: (hints[field.name], Field(field.default, **field.metadata))
        for field in fields(options)
    }
    return create_model(options.__name__, __base__=Section, **keys)
