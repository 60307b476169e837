"""`raypd schema suggest`: ask a model about a sample of documents, and propose their attributes.

The model lists lines `attribute: value`. A line counts only if its value occurs in the document.
Attributes that many documents have are proposed.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import raypd.estimation.sampling as sampling
from raypd.answering import build, check_model, request_queue
from raypd.billing import Meter
from raypd.config import RunConfig, dump, make_config, with_changes
from raypd.errors import RunError
from raypd.run import say
from raypd.schema import Attribute, bare, read_number
from raypd.tasks import Document, text_of
from raypd.text import count, counted, one_line, share

# Attributes per category, as in the paper (appendix E).
MAX_ATTRIBUTES = 16
# The category of documents that do not name one.
_UNNAMED = "documents"
# Characters of a document that the model sees: its subject is usually at the beginning.
_SHOWN_CHARACTERS = 3000
# Characters of a value: small models tend to copy a whole title.
_MAX_VALUE_CHARACTERS = 60
_LINE = re.compile(r"(?:[-*\u2022]|\d+[.)])?[\s*]*([^:*]+?)[\s*]*:[\s*]*(.+?)[\s*]*")
_MISSING = {
    "",
    "na",
    "none",
    "null",
    "unknown",
    "notspecified",
    "notmentioned",
    "notstated",
    "notavailable",
}
_BOOLEAN = {"yes", "no", "true", "false"}
_INSTRUCTION = (
    "List what this document states, one fact a line, as `attribute: value`. An attribute "
    "is a general name of one to three words that other documents of this kind have, too; a value "
    "is copied from the document. Write nothing else."
)
# None of its values can become an answer, because values that are not in the document are dropped.
_EXAMPLE = (
    "Oakline desk lamp, 45 cm high, brushed steel, E27 socket, 2 year warranty",
    (
        "brand: Oakline\nproduct type: desk lamp\nheight: 45 cm\nmaterial: brushed "
        "steel\nsocket: E27\nwarranty: 2 year"
    ),
)


@dataclass
class _NamedAttribute:
    """An attribute that documents state."""

    names: Counter[str] = field(default_factory=Counter)  # its spellings
    values: list[str] = field(default_factory=list)  # one per document that has it

    def attribute(self) -> Attribute:
        """Choose a type based on the values.

        It is boolean if all values are, number or enum if most values are, and text otherwise.
        """
        name = self.names.most_common(1)[0][0]
        if all(bare(value) in _BOOLEAN for value in self.values):
            return Attribute(name=name, type="boolean")
        values = self._distinct_values()
        description = f"such as {', '.join(values[:3])}"
        numbers = sum(read_number(value) is not None for value in self.values)
        if 5 * numbers >= 4 * len(self.values):
            return Attribute(name=name, description=description, type="number")
        if 2 <= len(values) <= 8 and len(self.values) >= 3 * len(values):
            # A value that JSON would have to escape is not allowed in an enum.
            with contextlib.suppress(ValueError):
                return Attribute(name=name, type="enum", values=values)
        return Attribute(name=name, description=description)

    def _distinct_values(self) -> list[str]:
        """Return distinct values, the most frequent first, each in its most frequent spelling."""
        spellings: dict[str, Counter[str]] = {}
        for value in self.values:
            spellings.setdefault(bare(value), Counter())[value] += 1
        by_frequency = sorted(spellings.values(), key=lambda counts: (-counts.total(), min(counts)))
        return [counts.most_common(1)[0][0] for counts in by_frequency]


@dataclass
class _CategoryCounts:
    """What the documents of a category state."""

    documents: int = 0
    attributes: dict[str, _NamedAttribute] = field(default_factory=dict)  # by the bare name

    def proposed(self) -> list[_NamedAttribute]:
        """Return the most frequent attributes.

        With four documents or more, an attribute of a single document is left out.
        """
        minimum = 1
        if self.documents >= 4:
            minimum = 2
        by_frequency = sorted(
            self.attributes.items(), key=lambda item: (-len(item[1].values), item[0])
        )
        frequent = [named for _, named in by_frequency if len(named.values) >= minimum]
        return frequent[:MAX_ATTRIBUTES]


@dataclass
class Suggestion:
    """The attributes that a model named, by category."""

    categories: dict[str, _CategoryCounts] = field(default_factory=dict)
    lines: int = 0  # lines that the model wrote
    unreadable: int = 0  # of these, lines that are not `attribute: value`
    invented: int = 0  # of these, lines whose value is not in the document
    failed: int = 0  # documents that the model could not be asked about

    def read(self, category: str, document: str, reply: str) -> None:
        """Count the lines of an answer about a document.

        Args:
            category: The document's category.
            document: Its text.
            reply: What the model wrote.
        """
        counts = self.categories.setdefault(category, _CategoryCounts())
        counts.documents += 1
        document_keys = bare(document)
        stated_keys = set()
        for line in filter(None, map(str.strip, reply.splitlines())):
            self.lines += 1
            name, value = _name_and_value(line)
            if not _is_name(name) or len(value) > _MAX_VALUE_CHARACTERS:
                self.unreadable += 1
                continue
            key = bare(name)
            bare_value = bare(value)
            stated = bare_value in document_keys
            if bare_value in _BOOLEAN and key in document_keys:
                stated = True
            if bare_value in _MISSING or not stated:
                self.invented += 1
            elif key not in stated_keys:
                stated_keys.add(key)
                named = counts.attributes.setdefault(key, _NamedAttribute())
                named.names[name] += 1
                named.values.append(value)

    def dropped(self) -> str:
        """Describe the lines that do not count."""
        return (
            f"of {counted(self.lines, 'line')} that it wrote, {count(self.unreadable)} are not of "
            f"the form `attribute: value`, and {count(self.invented)} name a value that is not in "
            f"the document; {self.failed} documents failed"
        )

    def as_yaml(self, about: str) -> str:
        """Return the categories in the format of `task.categories_file`.

        Args:
            about: What the suggestion was made from, in words.
        """
        lines = [
            f"# proposed by `raypd schema suggest` from {one_line(about)}",
            f"# {self.dropped()}",
            "# edit it, then: raypd extract CONFIG task.categories_file=THIS_FILE",
        ]
        for name, category in sorted(self.categories.items()):
            proposed = category.proposed()
            if not proposed:
                lines.append(f"# {one_line(name)}: nothing that several of its documents state")
                continue
            lines += [f"{json.dumps(name, ensure_ascii=False)}:", "  attributes:"]
            for named in proposed:
                tree = named.attribute().model_dump(exclude_defaults=True)
                attribute = dump(tree, flow=True, width=10**9).rstrip("\n")
                part = share(len(named.values), category.documents)
                lines.append(
                    f"    - {attribute}  # in {len(named.values)} of {category.documents} "
                    f"documents, {part}"
                )
        return "\n".join(lines) + "\n"


def _name_and_value(line: str) -> tuple[str, str]:
    """Read a line `attribute: value`; both are empty if it has another form."""
    match = _LINE.fullmatch(line)
    if not match:
        return "", ""
    name, value = match.groups()
    return name, value.strip("\"'`.;, ")


def suggest(
    source: str, category: str | None, size: int, overrides: list[str]
) -> tuple[Suggestion, str]:
    """Ask the model about a sample of documents.

    Args:
        source: The data: a file, a folder or a glob.
        category: The documents' category. If the documents name categories, only documents of this
            category are drawn (None: all); otherwise it is the name of their category.
        size: Documents to ask about.
        overrides: Keys of the configuration, as key=value.

    Returns:
        The suggestion, and what it was made from, in words.

    Raises:
        ConfigError, InputError, ModelError: If the overrides, the data or the model are at fault.
        RunError: If the model named nothing that several documents state.
    """
    name = category or _UNNAMED
    tree = {
        "input": {"path": source, "id_column": None, "category": name},
        "output": {"path": "runs/unused"},
        # Documents are read as for an extraction.
        "task": {"categories": {name: {"attributes": [{"name": "any"}]}}},
        "decoding": {"method": "autoregressive", "max_new_tokens": 128},
    }
    config = make_config(tree, overrides)
    asking = with_changes(config, {"task": {"kind": "generation", "prompt_column": "prompt"}})
    check_model(asking)
    sample = sampling.draw(config, size, category)
    texts = [
        text_of(document, config.text_columns())[:_SHOWN_CHARACTERS]
        for document in sample.documents
    ]
    suggestion = Suggestion()
    say(f"asking {config.model.name} about {counted(len(texts), 'document')}")
    answers = _answers(asking, texts)
    for text, document, answer_text in zip(texts, sample.documents, answers, strict=True):
        if answer_text is None:
            suggestion.failed += 1
        else:
            document_category, _ = sampling.kind_of(document, config)
            suggestion.read(document_category, text, answer_text)
    if not any(counts.proposed() for counts in suggestion.categories.values()):
        raise RunError(
            f"{config.model.name} named nothing that several documents state: "
            f"{suggestion.dropped()}; try a larger --sample or another model.name"
        )
    return suggestion, f"{counted(len(texts), 'document')} of {source}, by {config.model.name}"


def _answers(config: RunConfig, documents: Sequence[str]) -> list[str | None]:
    """Ask the model in this process about each document.

    Returns:
        What it lists, one per document; None if it could not be asked.
    """
    components = build(config, config.engine.threads)
    example_document, example_list = _EXAMPLE
    heading = f"{_INSTRUCTION}\n\nDocument:\n"
    prompt_start = [
        {"role": "user", "content": heading + example_document},
        {"role": "assistant", "content": example_list},
    ]
    questions = []
    for index, text in enumerate(documents):
        prompt = [*prompt_start, {"role": "user", "content": heading + text}]
        questions.append(Document(index, str(index), {"prompt": prompt}))
    meter = Meter("", config.decoding.method)
    return [
        records[-1].columns.get("text")
        for records in request_queue.answer(components, questions, meter)
    ]


def _is_name(name: str) -> bool:
    """Return whether a text may be an attribute's name.

    It has one to four words and a letter, and needs no escapes in JSON.
    """
    try:
        Attribute(name=name)
    except ValueError:
        return False
    if not 1 <= len(name.split()) <= 4 or len(name) > 40:
        return False
    return re.search(r"[^\W\d_]", name) is not None
