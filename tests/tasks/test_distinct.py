"""Documents that say the same are decoded once, and get the rows that they would get alone."""

import json
import re

import pytest

from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.distinct import Distinct, gives_the_same
from tests.runs import answer
from tests.tiny import tiny_model, tiny_tokenizer

BASE = {"input": {"path": "x.jsonl"}, "output": {"path": "out"}, "decoding": {"max_new_tokens": 12}}
ATTRIBUTES = [{"name": "Brand"}, {"name": "Size", "type": "number"}]
CATEGORIES = {"shoes": {"attributes": ATTRIBUTES}, "tea": {"attributes": ATTRIBUTES[:1]}}
QUESTIONS = [{"id": "a", "question": "How cold?"}, {"id": "b", "question": "How far?"}]
EXTRACTION = {"task": {"categories": CATEGORIES}, "decoding": {"method": "hyper_parallel"}}


def configured(**tree) -> RunConfig:
    return RunConfig.model_validate({key: {**BASE.get(key, {}), **tree.get(key, {})} for key in {*BASE, *tree}})


def documents(*fields) -> list[Document]:
    """Documents with these fields; of a text, the error that it says."""
    return [Document(i, f"id{i}", {}, one, place=i) if isinstance(one, str) else Document(i, f"id{i}", {"id": i, **one})
            for i, one in enumerate(fields)]  # fmt: skip


def offer(title: str, category: str = "shoes", **more):
    return {"title": title, "category": category, "description": None, **more}


CASES = {
    "extraction": (  # both broken ones stay
        6, configured(**EXTRACTION),
        documents(offer("Boot"), offer("Boot", price=3), "broken", offer("Boot", "tea"), "broken", offer("Sandal"),
                  offer("Boot", price=4), offer(""), offer("Sandal"), offer("")),
    ),
    "windows": (
        2, configured(task={"categories": CATEGORIES, "too_long": "windows", "max_document_tokens": 40}),
        documents(offer("Boot " * 30), offer("Clog"), offer("Boot " * 30)),
    ),
    "questions": (
        2, configured(task={"kind": "question_answering"}),
        documents(*({"context": "Ice.", "questions": QUESTIONS[:count]} for count in (2, 1, 2))),
    ),
    "conversations": (
        2, configured(task={"kind": "generation"}),
        documents(*({"prompt": prompt} for prompt in (["Hello", "Again"], "Hello", ["Hello", "Again"]))),
    )}  # fmt: skip


class Counting:
    """A task that counts the documents which it is given."""

    def __init__(self, task) -> None:
        self.task, self.planned = task, 0

    def plan(self, documents: list[Document]):
        self.planned += len(documents)
        return self.task.plan(documents)


def shown(record: Record) -> str:
    """A record's columns; what passes of other sizes round otherwise is left out: also which of windows that say the
    same is surest."""
    text = re.sub(r'"window": \d', "", json.dumps(record.columns))
    return re.sub(r"0\.\d+", lambda found: f"{float(found[0]):.3f}", text)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_documents_that_are_decoded_each(name: str) -> None:
    distinct, config, given = CASES[name]
    assert gives_the_same(config)
    task = build_task(config, tiny_tokenizer(), 2048)
    counting, found = Counting(task), []
    for one in (task, Distinct(counting, config)):
        records, ended = answer(one, given, Engine(tiny_model("llama")))
        rows = sorted((record.index, shown(record), record.error) for record in records)
        found.append((rows, sum(done.counts.decode_tokens for done in ended)))
    (expected, most), (rows, fewer) = found
    assert (rows, {row for row, *_ in rows}) == (expected, {document.index for document in given})
    assert (counting.planned, fewer < most) == (distinct, True)


def test_a_request_that_fails_fails_for_all() -> None:
    _, config, given = CASES["extraction"]
    plan = Distinct(build_task(config, tiny_tokenizer(), 2048), config).plan(given)
    request = next(item for item in plan if isinstance(item, Request))
    assert (request.documents, request.fail("lost")) == ([0, 1, 6], [Record(row, error="lost") for row in (0, 1, 6)])


@pytest.mark.parametrize(("tree", "same"), [
    (EXTRACTION, True), ({**EXTRACTION, "decoding": {"method": "guided"}}, True),
    ({**EXTRACTION, "decoding": {"sampling": {"temperature": 0.5}}}, False),
    ({**EXTRACTION, "decoding": {"method": "hyper_parallel", "isolate": "none", "stacked_documents": 4}}, False),
    ({"task": {"kind": "generation"}}, True), ({"task": {"kind": "generation", "openai": True}}, False)])  # fmt: skip
def test_only_where_an_answer_is_the_documents_alone(tree, same: bool) -> None:
    assert gives_the_same(configured(**tree)) == same
