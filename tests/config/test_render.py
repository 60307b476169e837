"""`raypd config show`: every key stands there with what it takes, in words that a writer of YAML knows."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from raypd.config import KINDS, RunConfig
from raypd.config.render import render
from tests.runs import extraction, run_config

WORDS = {"text", "integer", "number", "true", "false", "null", "list", "mapping", "value"}
TASKS: dict[str, dict[str, Any]] = {"extraction": extraction(c=["a"]), "question_answering": {}, "generation": {}}


def keys(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, str]]:
    """All keys, dotted, as the classes have them, and how Python writes what they take."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from keys(info.annotation, f"{at}{name}.")
        elif name != "task":
            yield f"{at}{name}", str(info.annotation)


def notes(shown: str) -> dict[str, str]:
    """Key, dotted -> what it takes; of several tasks, all keys, and of one that several have all that it takes."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in shown.splitlines():
        match = re.match(r"( *)(\w+):.*?  # (.*)", line.removeprefix("# "))
        if match:
            above = [*above[: len(match[1]) // 2], match[2]]
            key, takes = ".".join(above), match[3].partition(". ")[0]
            parts = [*found[key].split(" | ")] if key in found else []
            found[key] = " | ".join(dict.fromkeys([*parts, *takes.split(" | ")]))
    return found


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_every_key_tells_what_it_takes_in_words_of_yaml(kind: str | None) -> None:
    config = run_config({"kind": kind, **TASKS[kind]}) if kind else None
    found = notes(render(config))
    tasks = [key for one in ([kind] if kind else KINDS) for key in keys(KINDS[one], "task.")]
    every = [*keys(RunConfig), *tasks]
    for key in dict(every):
        written = " ".join(own for name, own in every if name == key and "Literal" in own)  # of each task that has it
        choices = set(re.findall(r"'([^']+)'", written))
        choices = set(KINDS) if key == "task.kind" else choices
        parts = set(re.split(r" \| | of | to ", found[key]))
        assert choices <= parts <= choices | WORDS, f"{key}: {found[key]}"


@pytest.mark.parametrize(("key", "takes"), [
    ("cost.market", "on-demand | spot | null"), ("input.path", "text | list of text"),
    ("output.partition", "mapping of text to text"), ("task.kind", "extraction | question_answering | generation"),
    ("task.categories", "mapping of text to mapping"), ("task.max_document_tokens", "integer | null"),
    ("model.trust_remote_code", "true | false"), ("decoding.sampling.top_p", "number")])  # fmt: skip
def test_some_of_them(key: str, takes: str) -> None:
    assert notes(render(run_config()))[key] == takes


def test_what_is_shown_reads_back() -> None:
    for kind, task in TASKS.items():
        config = run_config({"kind": kind, **task})
        assert RunConfig.model_validate(yaml.safe_load(render(config))) == config
