"""The section `task`: what is asked of every document."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import AfterValidator, Field

from raypd.config.data import InputConfig
from raypd.decoding import REGISTRY
from raypd.schema import TYPES, Attribute, Section, bare


class OwnColumn(NamedTuple):
    """A column of every row, whatever the task."""

    # A name of pyarrow.type_for_alias.
    arrow_type: str
    nullable: bool = False


OWN_COLUMNS = {
    "id": OwnColumn("string"),
    # It is ok or error.
    "status": OwnColumn("string"),
    # It is null if the status is ok.
    "error": OwnColumn("string", nullable=True),
    "source": OwnColumn("string"),
    "row": OwnColumn("int64"),
    "attempts": OwnColumn("int32"),
}
# The details of an attribute's value in a table with typed columns, named attribute__detail.
DETAILS = ("confidence", "status", "span", "window", "model")


def _names_differ(attributes: list[Attribute]) -> list[Attribute]:
    names: dict[str, str] = {}
    for attribute in attributes:
        name = attribute.name
        key = bare(name)
        if key not in names:
            names[key] = name
        elif names[key] == name:
            raise ValueError(f"two attributes are named {name!r}")
        else:
            raise ValueError(
                f"two attributes are named {name!r}: {names[key]!r} and {name!r} differ only in "
                "case or punctuation"
            )
    return attributes


class Category(Section, use_attribute_docstrings=True):
    """A kind of document and its attributes."""

    description: str = ""
    attributes: Annotated[list[Attribute], Field(min_length=1), AfterValidator(_names_differ)]
    optional_objects: list[list[str]] = Field([])
    """Paths of nested objects that `record` leaves out if none of their values was found"""


# The key `schema` shadows a method of pydantic 1.
warnings.filterwarnings("ignore", 'Field name "schema" in "ExtractionConfig"')


class TaskSection(Section):
    """One kind of task, with its keys."""

    # The command that runs this task.
    command: ClassVar[str] = "extract"
    # Its decoding methods, if the registry of methods does not know the kind.
    methods: ClassVar[tuple[str, ...]] = ()
    # Configuration keys that change no answer of the task.
    idle_keys: ClassVar[frozenset[str]] = frozenset({"input.category", "output.columns"})
    # Keys of the task that name columns of the input, which must exist. A task without such keys
    # reads input.text_columns.
    column_keys: ClassVar[tuple[str, ...]] = ()
    # Those of `column_keys` whose columns contain text.
    text_keys: ClassVar[tuple[str, ...]] = ()
    kind: str

    def text_columns(self, source: InputConfig) -> list[str]:
        """Return the columns that must contain text; no document may have all of them empty."""
        if self.column_keys:
            return [getattr(self, key) for key in self.text_keys]
        return list(source.text_columns)

    def wanted_columns(self, source: InputConfig) -> dict[str, str]:
        """Return the columns that the input must have.

        Returns:
            Each column by the configuration key that names it, in the form that messages show.
        """
        if self.column_keys:
            return {f"task.{key}": getattr(self, key) for key in self.column_keys}
        hint = "" if "text_columns" in source.model_fields_set else ", the default"
        return {f"input.text_columns {name!r}{hint}": name for name in source.text_columns}


class ExamplesConfig(Section, use_attribute_docstrings=True):
    """Labelled documents that the prompt shows before the document that is asked about."""

    path: str = Field(description="JSON lines with the columns of the input and the labels")
    count: int = Field(3, ge=1, description="Examples that are shown, of the document's category")
    nearest: bool = False
    """Show each document the examples that are most similar to it; otherwise the first of the
    file, which are computed once for all documents
    """
    labels_column: str = Field(
        "target", description="Column with the correct values, {attribute: value or null}"
    )


class ExtractionConfig(TaskSection, use_attribute_docstrings=True):
    """Attribute value extraction: a record of typed values for every document."""

    idle_keys = frozenset[str]()
    kind: Literal["extraction"] = "extraction"
    categories: dict[str, Category] = Field(
        {},
        description="Category -> {description, attributes}; an attribute is {name, description, "
        f"type: {' | '.join(TYPES)}, values: of an enum, many: a list, columns: of rows, "
        "required}",
    )
    attributes: list[Any] = Field(
        [],
        description="Attributes of all documents, in place of categories: names or mappings",
    )
    categories_file: str | None = Field(
        None, description="YAML file with the mapping of `categories`, for long schemas"
    )
    schema: str | dict | None = Field(  # type: ignore[assignment]
        None,
        description="Schema of all documents, in place of categories: a YAML of attributes (a "
        "file), a pydantic model (package.module:Class), or a JSON Schema (a .json or .yaml file, "
        "or the mapping itself)",
    )
    instruction: str | None = Field(None, description="Beginning of the prompt; null: raypd's own")
    examples: ExamplesConfig | None = None
    """{path, count, nearest, labels_column}: labelled documents that the prompt shows first"""
    template: str | None = None
    """Jinja2 file of the prompt, rendered in a sandbox; null: raypd's own template"""
    long_documents: Literal["split", "head", "reject"] = "head"
    """What happens to a document that is too long. head: its beginning is read; split: it is read
    in overlapping windows, and each value comes from the window that is most certain of it;
    reject: it becomes an error row
    """
    max_document_tokens: int | None = Field(None, ge=1)
    """Tokens above which a document is too long; null: those of the model's context"""

    def wanted_columns(self, source: InputConfig) -> dict[str, str]:
        columns = super().wanted_columns(source)
        if source.category_column is None or source.category is not None:
            return columns
        # Documents of a single category need no such column unless the configuration names one.
        is_default = source.category_column == "category"
        if len(self.categories) != 1 or not is_default:
            columns["input.category_column"] = source.category_column
        return columns


# Columns that accompany a column with the text of one question.
QUESTION_FIELDS = ("question_id", "choices", "multi_select")


class QuestionAnsweringConfig(TaskSection, use_attribute_docstrings=True):
    """Many questions on one context (IPPD); one output row per question."""

    command = "answer"
    column_keys = ("context_column", "questions_column")
    text_keys = ("context_column",)
    idle_keys = TaskSection.idle_keys | {"input.text_columns"}
    kind: Literal["question_answering"] = "question_answering"
    context_column: str = Field(
        "context", description="Column with the context: text, or a list of texts"
    )
    questions_column: str = "questions"
    """Column with a list of questions (or its JSON text): strings, or records with question and
    optionally id, choices and multi_select. It may also hold the text of one question, whose
    choices are in the column `choices`
    """
    questions: list[Any] = Field(
        [], description="Questions that are asked about every context, in place of a column"
    )
    instruction: str | None = Field(None, description="Beginning of the prompt; null: raypd's own")
    few_shot: str | None = Field(
        None, description="JSON Lines of examples with answers that the prompt shows first"
    )
    unanswerable: bool = Field(
        True, description="Tell the model to answer null if the context does not state the answer"
    )
    max_answer_tokens: int = Field(
        32, ge=1, description="Maximum tokens of an answer; the letter of a choice takes one"
    )
    long_documents: Literal["head", "reject"] = "head"
    """What happens to a context that is too long for the model. head: its beginning is read;
    reject: its questions become error rows
    """

    @property
    def asked_columns(self) -> tuple[str, ...]:
        """The columns from which a row's questions are read."""
        if self.questions:
            return ()
        return (self.questions_column, *QUESTION_FIELDS)

    def wanted_columns(self, source: InputConfig) -> dict[str, str]:
        columns = super().wanted_columns(source)
        if self.questions:
            del columns["task.questions_column"]
        return columns


class GenerationConfig(TaskSection, use_attribute_docstrings=True):
    """Prompts or conversations in, text out."""

    command = "generate"
    column_keys = ("prompt_column",)
    idle_keys = TaskSection.idle_keys | {"input.text_columns"}
    kind: Literal["generation"] = "generation"
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat turns (strings or role/content records)"""
    system: str | None = Field(None, description="System message before every prompt")
    chat_template: bool = Field(
        True, description="Put the model's chat template around the prompt, if it has one"
    )
    thinking: bool = Field(
        False, description="Let the model reason first, if its chat template has such a mode"
    )
    stop: list[str] = Field([], description="Strings before which an answer ends")
    samples: int = Field(
        1, ge=1, description="Answers per prompt (n); more than one needs a temperature"
    )
    openai: bool = False
    """The input is a batch file of OpenAI's API, whose lines have their own parameters; `raypd
    generate FILE --openai` sets this and the keys that belong to it
    """
    too_long: Literal["truncate", "refuse"] = "refuse"
    """What happens to a prompt that leaves no room for max_new_tokens. truncate: its beginning is
    cut off; refuse: it becomes an error row
    """


TaskConfig = Annotated[
    ExtractionConfig | QuestionAnsweringConfig | GenerationConfig,
    Field(discriminator="kind", description="What to ask about each document"),
]
_SECTIONS = get_args(get_args(TaskConfig)[0])
KINDS: dict[str, type[TaskSection]] = {
    section.model_fields["kind"].default: section for section in _SECTIONS
}


def _answer_keys(kind: str, section: type[TaskSection]) -> dict[str, tuple[str, ...]]:
    """Return the methods of a kind of task, each with the keys that change its answers.

    If the registry does not know the kind, all keys of a method count.
    """
    keys = {}
    for name, spec in REGISTRY.items():
        if kind in spec.answer_keys:
            keys[name] = spec.answer_keys[kind]
        elif name in section.methods:
            keys[name] = tuple(dict.fromkeys(chain(*spec.answer_keys.values())))
    return keys


# The methods that can decode each kind of task, the default first. Each has the keys of `decoding`
# that count in a run's fingerprint in addition to the method and SAMPLING_KEYS. A key that no
# method lists counts with all of them.
ANSWER_KEYS = {kind: _answer_keys(kind, section) for kind, section in KINDS.items()}
METHODS = {kind: tuple(methods) for kind, methods in ANSWER_KEYS.items()}
