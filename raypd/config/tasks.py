"""What is asked of every document."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from raypd.config.section import Section


def _fits_json(text: str) -> bool:
    return text.isprintable() and '"' not in text and "\\" not in text and text == text.strip()


def bare(key: str) -> str:
    """A key without its case and what stands between its words: as it is found in what a model writes."""
    return re.sub(r'[ _./"-]+', "", key).casefold()


class Attribute(Section):
    """One attribute to extract."""

    name: str = Field(min_length=1)
    description: str = ""
    type: Literal["text", "number", "boolean", "enum"] = "text"
    values: list[str] = Field([], description="The allowed values of an enum")

    @model_validator(mode="after")
    def _enum_has_values(self) -> Attribute:
        if (self.type == "enum") != bool(self.values):
            raise ValueError(f"attribute {self.name!r}: `values` is for type enum, and an enum needs it")
        if len(set(self.values)) != len(self.values):
            raise ValueError(f"attribute {self.name!r}: a value stands twice")
        if not all(value and _fits_json(value) for value in self.values):
            raise ValueError(
                f"attribute {self.name!r}: enum values are printable text without quotes and backslashes, and without "
                "blanks at their ends"
            )
        return self

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _fits_json(name):
            raise ValueError(
                f"{name!r}: a name is printable text without quotes and backslashes, and without blanks at its ends"
            )
        return name


class Category(Section):
    """A kind of document and its attributes."""

    description: str = ""
    attributes: list[Attribute] = Field(min_length=1)

    @field_validator("attributes")
    @classmethod
    def _names_differ(cls, attributes: list[Attribute]) -> list[Attribute]:
        names: dict[str, str] = {}
        for name in (attribute.name for attribute in attributes):
            if (other := names.setdefault(bare(name), name)) is not name:
                alike = f": {other!r} and {name!r} differ in case or punctuation alone" if other != name else ""
                raise ValueError(f"two attributes are named {name!r}{alike}")
        return attributes


class ExtractionConfig(Section):
    """Attribute value extraction: a record of typed values for every document."""

    kind: Literal["extraction"] = "extraction"
    categories: dict[str, Category] = Field(
        {},
        description="Category -> {description, attributes}; an attribute is {name, description, type: text | number | "
        "boolean | enum, values: of an enum}",
    )
    categories_file: str | None = Field(None, description="YAML with the same mapping, for long schemas")
    template: str | None = Field(
        None, description="Jinja2 file in place of the prompt that comes with raypd; rendered in a sandbox"
    )
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate", description="A document that does not fit the context: cut, or an error row"
    )
    max_document_tokens: int | None = Field(None, ge=1, description="Cut or refuse above this; null: the context")


class QuestionAnsweringConfig(Section):
    """Many questions on one context (IPPD); one output row a question."""

    kind: Literal["question_answering"] = "question_answering"
    context_column: str = Field("context", description="Column with the context: text, or a list of texts")
    questions_column: str = Field(
        "questions",
        description="Column with a list of questions (or its JSON text): strings, or records with question and, if "
        "there are, id, choices and multi_select",
    )
    instruction: str | None = Field(None, description="In place of the instruction that comes with raypd")
    few_shot: str | None = Field(None, description="JSONL of solved examples (same columns, with answers) shown first")
    unanswerable: bool = Field(True, description="Tell the model to answer null where the context does not say")
    max_answer_tokens: int = Field(32, ge=1, description="Most tokens of one answer; a letter takes one")
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate", description="A context that does not fit the model's: cut, or error rows"
    )


class GenerationConfig(Section):
    """Prompts or conversations in, text out."""

    kind: Literal["generation"] = "generation"
    prompt_column: str = Field(
        "prompt", description="Column with the prompt: text, or a list of chat turns (strings or role/content records)"
    )
    system: str | None = Field(None, description="System turn before every prompt")
    chat_template: bool = Field(True, description="Wrap the prompt in the model's chat template where it has one")
    thinking: bool = Field(False, description="Thinking mode, where the template knows it")
    stop: list[str] = Field([], description="The answer ends before any of these strings")
    samples: int = Field(1, ge=1, description="Answers a prompt (n); more than one needs a temperature")
    openai: bool = Field(
        False,
        description="The input is a batch file as OpenAI's API takes it, whose lines have parameters of their own "
        "(`raypd generate FILE --openai` sets it and what goes with it)",
    )
    too_long: Literal["truncate", "refuse"] = Field(
        "refuse", description="A prompt that leaves no room for max_new_tokens: its beginning cut, or an error row"
    )


TaskConfig = Annotated[
    ExtractionConfig | QuestionAnsweringConfig | GenerationConfig,
    Field(discriminator="kind", description="What to ask"),
]


KINDS: dict[str, type[Section]] = {
    "extraction": ExtractionConfig,
    "question_answering": QuestionAnsweringConfig,
    "generation": GenerationConfig,
}
