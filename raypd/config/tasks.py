"""What is asked of every document."""

from __future__ import annotations

import json
import math
import re
import warnings
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, get_args

import regex
from pydantic import AfterValidator, Field, model_validator

from raypd.config.data import InputConfig
from raypd.config.patterns import ANYTHING
from raypd.config.section import Section
from raypd.decoding.methods.registry import REGISTRY

OWN_COLUMNS = {  # of every row, whatever the task: name -> Arrow's type
    "id": "string",
    "status": "string",  # ok | error
    "error": "string",  # null where it is ok
    "source": "string",
    "row": "int64",
    "attempts": "int32",
}

_PLAIN = "printable text without quotes and backslashes, and without blanks at"


def _fits_json(text: str) -> bool:
    return text.isprintable() and '"' not in text and "\\" not in text and text == text.strip()


def bare(key: str) -> str:
    """A key without its case and what stands between its words: as it is found in what a model
    writes.
    """
    return re.sub(r'[ _./"-]+', "", key).casefold()


_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_LEAP = r"[12][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|2[048])00"
_DAYS = r"(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31"
_DATE = rf"([12][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAYS})|({_LEAP})-02-29)"
FORMATS = {  # RFC 3339, years 1000 to 2999; a time of day alone has no offset
    "date": _DATE,
    "time": rf"{_HOUR}:[0-5][0-9]",
    "date-time": rf"{_DATE}T{_HOUR}:[0-5][0-9](Z|[+-]{_HOUR})",
}
_LONGEST_VALUE = 1000  # characters of an enum's
_MOST_CHARACTERS = 400_000  # of an enum's values together: each is a state of its automaton
NUMBERS = {"integer": "-?(0|[1-9][0-9]{0,17})", "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"}
_HINTS = {
    "integer": "a whole number",
    "date": "a date, as YYYY-MM-DD",
    "time": "a time of day, as hh:mm:ss",
    "date-time": "a date and time with its offset, as YYYY-MM-DDThh:mm:ssZ",
}


def ascii_digits(pattern: str) -> str:
    r"""A regular expression whose \d is 0 to 9, as in JSON Schema; one that begins with (?u) stays
    as it is.
    """
    inside = False  # a class of characters

    def replaced(match: re.Match[str]) -> str:
        nonlocal inside
        if match[0] in "[]":
            inside = match[0] == "["
        return ("0-9" if inside else "[0-9]") if match[0] == r"\d" else match[0]

    return pattern if pattern.startswith("(?u)") else re.sub(r"\\.|[\[\]]", replaced, pattern)


def _matches(pattern: str, text: str) -> bool:
    r"""Whether the whole text matches: `re` tries (a+)+ without end, and its \w is not the
    decoder's.
    """
    try:
        return regex.fullmatch(pattern, text, timeout=1.0) is not None  # seconds of the processor
    except TimeoutError:
        return False


def _plain_name(name: str) -> str:
    if not _fits_json(name):
        raise ValueError(f"{name!r}: a name is {_PLAIN} its ends")
    return name


class Attribute(Section):
    """One attribute to extract."""

    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain_name)]
    description: str = ""
    type: Literal[
        "text",
        "number",
        "integer",
        "boolean",
        "enum",
        "date",
        "time",
        "date-time",
        "pattern",
        "rows",
    ] = "text"
    values: list[str] = Field(
        [], description="The allowed values of an enum, or the only ones of a number or integer"
    )
    many: bool = Field(False, description="A list of such values")
    max_items: int | None = Field(None, ge=1, description="Most values of a list")
    min_items: int | None = Field(None, ge=0, description="A list of fewer values is invalid")
    columns: list[Attribute] = Field(
        [], description="Of type rows, a list of objects like invoice lines: its keys"
    )
    pattern: str | None = Field(
        None,
        description="Regular expression that the whole value matches, of type pattern; of a date "
        "or time beside its format",
    )
    minimum: float | None = Field(None, description="A number below it is invalid")
    maximum: float | None = None
    min_length: int | None = Field(None, ge=0, description="A text of fewer characters is invalid")
    max_length: int | None = Field(None, ge=1)
    required: bool = Field(
        False, description="No null, but of a text and a number, which say null where there is none"
    )
    omit_null: bool = Field(False, description="Without a value its key is not in `record`")
    path: list[str] = Field(
        [], description="Keys under which it stands in nested objects; empty: under its name"
    )

    @property
    def place(self) -> list[str]:
        """Its keys in the record, from the outermost."""
        return self.path or [self.name]

    @property
    def item(self) -> Attribute:
        """The attribute of one value of a list."""
        return self.model_copy(update={"many": False, "max_items": None, "min_items": None})

    @property
    def regex(self) -> str | None:
        """What the whole text of a value matches; None where its type is none of texts with a
        form.
        """
        return (
            ascii_digits(self.pattern or "") if self.type == "pattern" else FORMATS.get(self.type)
        )

    @property
    def hint(self) -> str:
        """What a model is told of the type, beside the template.

        No possible answer: a small model would copy it.
        """
        form = _HINTS.get(self.type, "")
        if self.pattern:
            matches = f"it matches {self.pattern.replace(ANYTHING, '.*')}"
            form = f"{form}; {matches}" if form else matches
        if self.values and self.type != "enum":
            form = f"one of {', '.join(self.values)}"
        limit = f" of {self.max_items} at most" if self.max_items is not None else ""
        if self.type == "rows":
            keys = (
                f"{c.name} ({'; '.join(filter(None, [c.description, c.hint or c.words]))})"
                for c in self.columns
            )
            return f"a JSON list{limit} of objects with the keys {', '.join(keys)}"
        return "; ".join(
            filter(None, [form, f"a JSON list{limit}, in brackets" if self.many else ""])
        )

    def fits(self, value: Any) -> bool:
        """Whether a JSON value is of the type; null is none."""
        if self.many:
            limit = math.inf if self.max_items is None else self.max_items
            within = isinstance(value, list) and (self.min_items or 0) <= len(value) <= limit
            return within and all(map(self.item.fits, value))
        if self.type == "rows":
            cells = (
                [(column, value.get(column.name)) for column in self.columns]
                if isinstance(value, dict)
                else []
            )
            return bool(cells) and all(
                c.nullable if cell is None else c.fits(cell) for c, cell in cells
            )
        if self.type == "boolean" or isinstance(value, bool):
            return self.type == "boolean" and isinstance(value, bool)
        if self.type in ("number", "integer"):
            if not isinstance(value, (int, float) if self.type == "number" else int):
                return False
            if self.values and value not in map(float, self.values):
                return False
            low, high = (
                bound if bound is not None else value for bound in (self.minimum, self.maximum)
            )
            return low <= value <= high and (self.type == "number" or -(2**63) <= value < 2**63)
        if not isinstance(value, str):
            return False
        if self.type == "enum":
            return value in self.values
        if self.regex is not None and not _matches(self.regex, value):
            return False
        if self.pattern and not _matches(ascii_digits(self.pattern), value):
            return False
        return (self.min_length or 0) <= len(value) <= (self.max_length or len(value))

    @property
    def words(self) -> str:
        """Its type as a prompt says it of a column."""
        if self.values:
            return f"one of: {', '.join(self.values)}"
        return {"number": "a number", "boolean": "true or false"}.get(self.type, "text")

    @property
    def nullable(self) -> bool:
        """Whether its slot may say null."""
        return not self.required or (self.type in ("text", "number") and not self.many)

    @model_validator(mode="before")
    @classmethod
    def _as_they_are_kept(cls, tree: Any) -> Any:
        """Rows are a list, and numbers among `values` the text that JSON has for them."""
        if not isinstance(tree, dict):
            return tree
        if tree.get("type") in NUMBERS and isinstance(tree.get("values"), list):
            numbers = [
                json.dumps(value) if type(value) in (int, float) else value
                for value in tree["values"]
            ]
            return {**tree, "values": numbers}
        return {**tree, "many": True} if tree.get("type") == "rows" else tree

    @model_validator(mode="after")
    def _keys_fit(self) -> Attribute:
        if reason := self._misfit():
            raise ValueError(f"attribute {self.name!r}: {reason}")
        return self

    def _misfit(self) -> str | None:
        for key, bounds, types in (
            ("pattern", [self.pattern], ["pattern", *FORMATS]),
            ("minimum", [self.minimum, self.maximum], ["number", "integer"]),
            ("max_length", [self.min_length, self.max_length], ["text", "pattern"]),
        ):
            if any(bound is not None for bound in bounds) and self.type not in types:
                return f"`{key}` is for type {' and '.join(types)}"
        if (self.max_items, self.min_items) != (None, None) and not self.many:
            return "`max_items` and `min_items` are for a list (`many`)"
        if (self.min_items or 0) > (self.max_items or math.inf):
            return "`min_items` is above `max_items`"
        if (self.type == "rows") != bool(self.columns):
            return "`columns` is for type rows, and rows need it"
        if nested := next((column.name for column in self.columns if column.many), None):
            return f"column {nested!r}: a column is a single value"
        if len({bare(column.name) for column in self.columns}) < len(self.columns):
            return "two columns have the same name"
        if reason := self._empty_range():
            return reason
        if self.type == "pattern" and not self.pattern:
            return "type pattern needs `pattern`"
        if self.pattern:
            try:
                re.compile(self.pattern)
                regex.compile(self.pattern)
            except (re.error, regex.error, RecursionError, OverflowError) as error:
                return f"the pattern is no regular expression: {error}"
        form = NUMBERS.get(self.type)
        if (self.type == "enum" and not self.values) or (
            self.values and self.type != "enum" and form is None
        ):
            return "`values` is for type enum, which needs it, number and integer"
        if wrong := next(
            (value for value in self.values if form and not re.fullmatch(form, value)), None
        ):
            return f"value {wrong!r}: write it as JSON has a value of type {self.type}"
        if len(set(self.values)) != len(self.values):
            return "a value stands twice"
        if (longest := max(map(len, self.values), default=0)) > _LONGEST_VALUE:
            return f"an enum value of {longest:,} characters; limit {_LONGEST_VALUE:,}"
        if (characters := sum(map(len, self.values))) > _MOST_CHARACTERS:
            return f"values of {characters:,} characters; limit {_MOST_CHARACTERS:,}"
        if not all(value and _fits_json(value) for value in self.values):
            return f"enum values are {_PLAIN} their ends"
        return None

    def _empty_range(self) -> str | None:
        """Why no value can be within the bounds; None: some can."""
        if self.minimum is not None and self.maximum is not None:
            if self.minimum > self.maximum:
                return f"`minimum` ({self.minimum:g}) is above `maximum` ({self.maximum:g})"
            if self.type == "integer" and math.ceil(self.minimum) > math.floor(self.maximum):
                return f"no integer is from {self.minimum:g} to {self.maximum:g}"
        if (self.min_length or 0) > (self.max_length or math.inf):
            return f"`min_length` ({self.min_length}) is above `max_length` ({self.max_length})"
        return None


def _names_differ(attributes: list[Attribute]) -> list[Attribute]:
    names: dict[str, str] = {}
    for name in (attribute.name for attribute in attributes):
        if (first := names.setdefault(bare(name), name)) is not name:
            alike = (
                f": {first!r} and {name!r} differ in case or punctuation alone"
                if first != name
                else ""
            )
            raise ValueError(f"two attributes are named {name!r}{alike}")
    return attributes


class Category(Section, use_attribute_docstrings=True):
    """A kind of document and its attributes."""

    description: str = ""
    attributes: Annotated[list[Attribute], Field(min_length=1), AfterValidator(_names_differ)]
    optional_objects: list[list[str]] = Field([])
    """Paths of nested objects that are not in `record` where nothing in them was found"""


# It hides what pydantic 1 had.
warnings.filterwarnings("ignore", 'Field name "schema" in "ExtractionConfig"')


class TaskSection(Section):
    """What every kind of task says of itself, beside its keys."""

    command: ClassVar[str] = "extract"  # that runs it
    # Of decoding, where the registry of methods does not know the kind.
    methods: ClassVar[tuple[str, ...]] = ()
    # That change no answer of it.
    idle_keys: ClassVar[frozenset[str]] = frozenset({"input.category", "output.columns"})
    # Its keys that name columns which must be there, and which of them hold text; (): it reads
    # input.text_columns.
    column_keys: ClassVar[tuple[str, ...]] = ()
    text_keys: ClassVar[tuple[str, ...]] = ()
    kind: str

    def text_columns(self, source: InputConfig) -> list[str]:
        """Columns that must hold text, and together at least some."""
        return (
            [getattr(self, key) for key in self.text_keys]
            if self.column_keys
            else list(source.text_columns)
        )

    def wanted_columns(self, source: InputConfig) -> dict[str, str]:
        """Configuration key -> the column of the input that it names, for every column that must be
        there.
        """
        own = {f"task.{key}": getattr(self, key) for key in self.column_keys}
        hint = "" if "text_columns" in source.model_fields_set else ", the default"
        return own or {f"input.text_columns {name!r}{hint}": name for name in source.text_columns}


class ExamplesConfig(Section, use_attribute_docstrings=True):
    """Labelled documents that the prompt shows before the document that is asked about."""

    path: str = Field(description="JSON lines with the columns of the input and the labels")
    count: int = Field(3, ge=1, description="Of the document's category")
    nearest: bool = False
    """The most alike ones of each document; else the first of the file, which are computed once for
    all documents
    """
    labels_column: str = Field("target", description="An object of attribute: value")


class ExtractionConfig(TaskSection, use_attribute_docstrings=True):
    """Attribute value extraction: a record of typed values for every document."""

    idle_keys = frozenset[str]()
    kind: Literal["extraction"] = "extraction"
    categories: dict[str, Category] = Field({})
    """Category -> {description, attributes}; an attribute is {name, description, type: text |
    number | integer | boolean | enum | date | time | date-time | pattern | rows, values: of an
    enum, many: a list, columns: of rows, required}
    """
    attributes: list[Any] = Field(
        [], description="In place of categories, of all documents: names, or as above"
    )
    categories_file: str | None = Field(
        None, description="YAML with the same mapping, for long schemas"
    )
    schema: str | dict | None = Field(  # type: ignore[assignment]
        None,
        description="In place of categories, one for all documents: a pydantic model "
        "(package.module:Class), or a JSON "
        "Schema (a .json or .yaml file, or written here)",
    )
    instruction: str | None = Field(
        None, description="First words of the prompt, in place of those of raypd"
    )
    examples: ExamplesConfig | None = None
    """{path, count, nearest, labels_column}: labelled documents that the prompt shows first"""
    template: str | None = None
    """Jinja2 file in place of the prompt that comes with raypd, rendered in a sandbox"""
    too_long: Literal["truncate", "windows", "refuse"] = "truncate"
    """A document too long for the context: cut; in windows that overlap (a value from the surest);
    or an error row
    """
    max_document_tokens: int | None = Field(None, ge=1)
    """Cut, divide or refuse above this; null: the context"""

    def wanted_columns(self, source: InputConfig) -> dict[str, str]:
        columns = super().wanted_columns(source)
        # With a category for all the column may be missing; with one category it may, unless it was
        # named.
        unnamed = len(self.categories) == 1 and source.category_column == "category"
        if source.category_column is not None and source.category is None and not unnamed:
            columns["input.category_column"] = source.category_column
        return columns


class QuestionAnsweringConfig(TaskSection, use_attribute_docstrings=True):
    """Many questions on one context (IPPD); one output row a question."""

    command = "answer"
    column_keys = ("context_column", "questions_column")
    text_keys = ("context_column",)
    idle_keys = TaskSection.idle_keys | {"input.text_columns"}
    kind: Literal["question_answering"] = "question_answering"
    context_column: str = Field(
        "context", description="Column with the context: text, or a list of texts"
    )
    questions_column: str = "questions"
    """Column with a list of questions (or its JSON text): strings, or records with question and, if
    there are, id, choices and multi_select
    """
    instruction: str | None = Field(
        None, description="In place of the instruction that comes with raypd"
    )
    few_shot: str | None = Field(
        None, description="JSONL of solved examples (same columns, with answers) shown first"
    )
    unanswerable: bool = Field(
        True, description="Tell the model to answer null where the context does not say"
    )
    max_answer_tokens: int = Field(
        32, ge=1, description="Most tokens of one answer; a letter takes one"
    )
    too_long: Literal["truncate", "refuse"] = "truncate"
    """A context that does not fit the model's: cut, or error rows"""


class GenerationConfig(TaskSection, use_attribute_docstrings=True):
    """Prompts or conversations in, text out."""

    command = "generate"
    column_keys = ("prompt_column",)
    idle_keys = TaskSection.idle_keys | {"input.text_columns"}
    kind: Literal["generation"] = "generation"
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat turns (strings or role/content records)"""
    system: str | None = Field(None, description="System turn before every prompt")
    chat_template: bool = Field(
        True, description="Wrap the prompt in the model's chat template where it has one"
    )
    thinking: bool = Field(False, description="Thinking mode, where the template knows it")
    stop: list[str] = Field([], description="The answer ends before any of these strings")
    samples: int = Field(
        1, ge=1, description="Answers a prompt (n); more than one needs a temperature"
    )
    openai: bool = False
    """The input is a batch file as OpenAI's API takes it, whose lines have parameters of their own
    (`raypd generate FILE --openai` sets it and what goes with it)
    """
    too_long: Literal["truncate", "refuse"] = "refuse"
    """A prompt that leaves no room for max_new_tokens: its beginning cut, or an error row"""


TaskConfig = Annotated[
    ExtractionConfig | QuestionAnsweringConfig | GenerationConfig,
    Field(discriminator="kind", description="What to ask"),
]
_SECTIONS = get_args(get_args(TaskConfig)[0])
KINDS: dict[str, type[TaskSection]] = {
    section.model_fields["kind"].default: section for section in _SECTIONS
}


def _answer_keys(kind: str, section: type[TaskSection]) -> dict[str, tuple[str, ...]]:
    """Of a kind that the registry does not know every key of a method counts."""
    return {
        name: spec.answer_keys.get(kind, tuple(dict.fromkeys(chain(*spec.answer_keys.values()))))
        for name, spec in REGISTRY.items()
        if kind in spec.answer_keys or name in section.methods
    }


# What each kind of task can be decoded with, the default first, and for each method the keys of
# `decoding` that count in a run's fingerprint, beside the method and SAMPLING_KEYS. A key that no
# method lists is in all of them.
ANSWER_KEYS = {kind: _answer_keys(kind, section) for kind, section in KINDS.items()}
METHODS = {kind: tuple(methods) for kind, methods in ANSWER_KEYS.items()}
