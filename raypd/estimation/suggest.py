"""`raypd schema suggest`: attributes that documents have, found by asking a model about a sample of
them. A line `attribute: value` counts only if its value stands in the document; what many documents
have is proposed.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd.answering.check import check_model
from raypd.answering.components import build
from raypd.answering.request_queue import answer
from raypd.billing.meter import Meter
from raypd.config import Attribute, RunConfig, bare
from raypd.config.load import make_config, with_changes
from raypd.config.yaml_file import dump
from raypd.errors import RunError
from raypd.estimation import sampling
from raypd.run.console import say
from raypd.schema.numbers import read_number
from raypd.tasks.base import Document
from raypd.tasks.documents import text_of
from raypd.text import count, counted, one_line, share

MOST = 16  # attributes of a category, as the paper has (appendix E)
_UNNAMED = "documents"  # the category of documents that name none
_CHARACTERS = 3000  # of a document that are shown: what it is about stands there
_LONGEST = 60  # characters of a value: a small model likes to copy a title whole
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
    "is a general name of one to "
    "three words that other documents of this kind have, too; a value is copied from the "
    "document. Write nothing else."
)
_EXAMPLE = (  # none of its values becomes an answer: what does not stand in the document is dropped
    "Oakline desk lamp, 45 cm high, brushed steel, E27 socket, 2 year warranty",
    (
        "brand: Oakline\nproduct type: desk lamp\nheight: 45 cm\nmaterial: brushed "
        "steel\nsocket: E27\nwarranty: 2 year"
    ),
)


@dataclass
class _NamedAttribute:
    names: Counter[str] = field(default_factory=Counter)  # spellings
    values: list[str] = field(default_factory=list)  # of every document that has it

    def attribute(self) -> Attribute:
        """It with a type that its values show: number and enum where most do, boolean where all
        do.
        """
        name = self.names.most_common(1)[0][0]
        spellings: dict[str, Counter[str]] = {}
        for value in self.values:
            spellings.setdefault(bare(value), Counter())[value] += 1
        common = sorted(spellings.values(), key=lambda spelling: (-spelling.total(), min(spelling)))
        shown = [spelling.most_common(1)[0][0] for spelling in common]
        if all(bare(value) in _BOOLEAN for value in self.values):
            return Attribute(name=name, type="boolean")
        described = f"such as {', '.join(shown[:3])}"
        if 5 * sum(read_number(value) is not None for value in self.values) >= 4 * len(self.values):
            return Attribute(name=name, description=described, type="number")
        if 2 <= len(shown) <= 8 and len(self.values) >= 3 * len(shown):
            with contextlib.suppress(ValueError):  # a value that JSON would have to escape
                return Attribute(name=name, type="enum", values=shown)
        return Attribute(name=name, description=described)


@dataclass
class _CategoryCounts:
    documents: int = 0
    attributes: dict[str, _NamedAttribute] = field(default_factory=dict)  # by the bare name

    def proposed(self) -> list[_NamedAttribute]:
        """The most frequent, and none that one document of several alone has."""
        least = 2 if self.documents >= 4 else 1
        by_frequency = sorted(
            self.attributes.items(), key=lambda item: (-len(item[1].values), item[0])
        )
        return [named for _, named in by_frequency if len(named.values) >= least][:MOST]


@dataclass
class Suggestion:
    categories: dict[str, _CategoryCounts] = field(default_factory=dict)
    lines: int = 0  # that the model wrote
    unreadable: int = 0  # of them: no `attribute: value`
    invented: int = 0  # of them: the value does not stand in the document
    failed: int = 0  # documents that could not be asked about

    def read(self, category: str, document: str, answer: str) -> None:
        """Takes the lines of an answer about a document."""
        counts = self.categories.setdefault(category, _CategoryCounts())
        counts.documents += 1
        there = bare(document)
        stated_keys = set()
        for line in filter(None, map(str.strip, answer.splitlines())):
            self.lines += 1
            match = _LINE.fullmatch(line)
            name, value = match.groups() if match else ("", "")
            value = value.strip("\"'`.;, ")
            if not _is_name(name) or len(value) > _LONGEST:
                self.unreadable += 1
                continue
            key = bare(name)
            stated = bare(value) in there or (bare(value) in _BOOLEAN and key in there)
            if bare(value) in _MISSING or not stated:
                self.invented += 1
            elif key not in stated_keys:
                stated_keys.add(key)
                named = counts.attributes.setdefault(key, _NamedAttribute())
                named.names[name] += 1
                named.values.append(value)

    def dropped(self) -> str:
        """What does not count, in words."""
        of = (
            f"of {counted(self.lines, 'line')} that it wrote, {count(self.unreadable)} are no "
            "`attribute: value` and "
        )
        return (
            f"{of}{count(self.invented)} name a value that is not in the document; "
            f"{self.failed} documents failed"
        )

    def as_yaml(self, about: str) -> str:
        """The categories as `task.categories_file` takes them. about: what it was made of."""
        text = [
            f"# proposed by `raypd schema suggest` from {one_line(about)}",
            f"# {self.dropped()}",
            "# edit it, then: raypd extract CONFIG task.categories_file=THIS_FILE",
        ]
        for name, category in sorted(self.categories.items()):
            if proposed := category.proposed():
                text += [f"{json.dumps(name, ensure_ascii=False)}:", "  attributes:"]
            else:
                text.append(f"# {one_line(name)}: nothing that several of its documents state")
            for named in proposed:
                tree = named.attribute().model_dump(exclude_defaults=True)
                attribute = dump(tree, flow=True, width=10**9).rstrip("\n")
                part = share(len(named.values), category.documents)
                text.append(
                    f"    - {attribute}  # in {len(named.values)} of {category.documents} "
                    f"documents, {part}"
                )
        return "\n".join(text) + "\n"


def suggest(
    source: str, category: str | None, size: int, overrides: list[str]
) -> tuple[Suggestion, str]:
    """Asks the model about `size` documents; also what the suggestion was made of, in words.
    category: of the documents (None: all), or their name where they have none. Raises ConfigError,
    InputError, ModelError; RunError: no result.
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
    shown = [
        text_of(document, config.text_columns())[:_CHARACTERS] for document in sample.documents
    ]
    result = Suggestion()
    say(f"asking {config.model.name} about {counted(len(shown), 'document')}")
    for text, document, answer_text in zip(
        shown, sample.documents, _answers(asking, shown), strict=True
    ):
        if answer_text is None:
            result.failed += 1
        else:
            result.read(sampling.kind_of(document, config)[0], text, answer_text)
    if not any(category.proposed() for category in result.categories.values()):
        advice = "try a larger --sample or another model.name"
        raise RunError(
            f"{config.model.name} named nothing that several documents state: "
            f"{result.dropped()}; {advice}"
        )
    return result, f"{counted(len(shown), 'document')} of {source}, by {config.model.name}"


def _answers(config: RunConfig, documents: Sequence[str]) -> list[str | None]:
    """What the model lists about each document, in this process; None where it could not be
    asked.
    """
    parts = build(config, config.engine.threads)
    example, listed = _EXAMPLE
    head = f"{_INSTRUCTION}\n\nDocument:\n"
    asked, *turns = ({"role": "user", "content": head + text} for text in (example, *documents))
    prompts = [[asked, {"role": "assistant", "content": listed}, turn] for turn in turns]
    questions = [Document(n, str(n), {"prompt": prompt}) for n, prompt in enumerate(prompts)]
    return [
        turns[-1].columns.get("text")
        for turns in answer(parts, questions, Meter("", config.decoding.method))
    ]


def _is_name(name: str) -> bool:
    """Whether it may be an attribute's: one to four words with a letter in them, which JSON takes
    as they are.
    """
    with contextlib.suppress(ValueError):
        Attribute(name=name)
        return (
            1 <= len(name.split()) <= 4
            and len(name) <= 40
            and re.search(r"[^\W\d_]", name) is not None
        )
    return False
