"""Documents that say the same are decoded once; documents in windows: no text is left out, the
surest value counts.
"""

import json
import re
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.schema import Attribute
from raypd.tasks import TextBox, build_task
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.columns import columns_of, record_row, typed_row
from raypd.tasks.distinct import Distinct, gives_the_same
from raypd.tasks.extraction_answer import ValueSource
from raypd.tasks.extraction_prompt import DocumentText
from raypd.tasks.values import CheckedValue, span_of
from raypd.tasks.windows import merged, windows
from tests.runs import answer, run_config
from tests.tasks.test_extraction import TREE, answers, document, make
from tests.tiny import tiny_model, tiny_tokenizer

BASE = {
    "input": {"path": "x.jsonl"},
    "output": {"path": "out"},
    "decoding": {"max_new_tokens": 12},
}
ATTRIBUTES = [{"name": "Brand"}, {"name": "Size", "type": "number"}]
CATEGORIES = {"shoes": {"attributes": ATTRIBUTES}, "tea": {"attributes": ATTRIBUTES[:1]}}
QUESTIONS = [{"id": "a", "question": "How cold?"}, {"id": "b", "question": "How far?"}]
EXTRACTION = {"task": {"categories": CATEGORIES}, "decoding": {"method": "hyper_parallel"}}


def configured(**tree) -> RunConfig:
    return RunConfig.model_validate(
        {key: {**BASE.get(key, {}), **tree.get(key, {})} for key in {*BASE, *tree}}
    )


def documents(*fields) -> list[Document]:
    """Documents with these fields; of a text, the error that it says."""
    return [
        Document(i, f"id{i}", {}, one, row=i)
        if isinstance(one, str)
        else Document(i, f"id{i}", {"id": i, **one})
        for i, one in enumerate(fields)
    ]


def offer(title: str, category: str = "shoes", **more):
    return {"title": title, "category": category, "description": None, **more}


CASES = {
    "extraction": (  # both broken ones stay
        6,
        configured(**EXTRACTION),
        documents(
            offer("Boot"),
            offer("Boot", price=3),
            "broken",
            offer("Boot", "tea"),
            "broken",
            offer("Sandal"),
            offer("Boot", price=4),
            offer(""),
            offer("Sandal"),
            offer(""),
        ),
    ),
    "windows": (
        2,
        configured(
            task={"categories": CATEGORIES, "long_documents": "split", "max_document_tokens": 40}
        ),
        documents(offer("Boot " * 30), offer("Clog"), offer("Boot " * 30)),
    ),
    "questions": (
        2,
        configured(task={"kind": "question_answering"}),
        documents(*({"context": "Ice.", "questions": QUESTIONS[:count]} for count in (2, 1, 2))),
    ),
    "conversations": (
        2,
        configured(task={"kind": "generation"}),
        documents(
            *({"prompt": prompt} for prompt in (["Hello", "Again"], "Hello", ["Hello", "Again"]))
        ),
    ),
}


class Counting:
    """A task that counts the documents which it is given."""

    def __init__(self, task) -> None:
        self.task = task
        self.planned = 0

    def plan(self, documents: list[Document]):
        self.planned += len(documents)
        return self.task.plan(documents)


def shown(record: Record) -> str:
    """A record's columns; which of windows that say the same is surest is left out, as passes of
    other sizes round.
    """
    text = re.sub(r'"window": \d', "", json.dumps(record.columns))
    return re.sub(r"0\.\d+", lambda found: f"{float(found[0]):.3f}", text)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_documents_that_are_decoded_each(name: str) -> None:
    distinct, config, given = CASES[name]
    assert gives_the_same(config.task, config.decoding)
    task = build_task(config, tiny_tokenizer(), 2048)
    counting = Counting(task)
    found = []
    for one in (task, Distinct(counting, config.task, config.input)):
        records, ended = answer(one, given, Engine(tiny_model("llama")))
        rows = sorted((record.index, shown(record), record.error) for record in records)
        found.append((rows, sum(done.counts.decode_tokens for done in ended)))
    (expected, most), (rows, fewer) = found
    assert rows == expected
    assert {row for row, *_ in rows} == {document.index for document in given}
    assert counting.planned == distinct
    assert fewer < most


def test_a_request_that_fails_fails_for_all() -> None:
    _, config, given = CASES["extraction"]
    task = build_task(config, tiny_tokenizer(), 2048)
    plan = Distinct(task, config.task, config.input).plan(given)
    request = next(item for item in plan if isinstance(item, Request))
    assert request.documents == [0, 1, 6]
    assert request.fail("lost") == [Record(row, error="lost") for row in (0, 1, 6)]


def test_equal_texts_of_two_categories_are_decoded_each_also_beside_a_default_category() -> None:
    config = configured(**EXTRACTION, input={"category": "shoes"})
    task = build_task(config, tiny_tokenizer(), 2048)
    offers = documents(offer("Boot"), offer("Boot", "tea"), offer("Boot"))
    plan = Distinct(task, config.task, config.input).plan(offers)
    requests = [item for item in plan if isinstance(item, Request)]
    assert sorted(request.documents for request in requests) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("tree", "same"),
    [
        (EXTRACTION, True),
        ({**EXTRACTION, "decoding": {"method": "guided"}}, True),
        ({**EXTRACTION, "decoding": {"sampling": {"temperature": 0.5}}}, False),
        (
            {
                **EXTRACTION,
                "decoding": {"method": "hyper_parallel", "isolate": "none", "stacked_documents": 4},
            },
            False,
        ),
        ({"task": {"kind": "generation"}}, True),
        ({"task": {"kind": "generation", "openai": True}}, False),
    ],
)
def test_only_where_an_answer_is_the_documents_alone(tree, same: bool) -> None:
    made = configured(**tree)
    assert gives_the_same(made.task, made.decoding) == same


def encode(text: str) -> list[int]:
    """Up to four letters, or white space before one, are a token: a whole may have fewer than its
    parts, or more.
    """
    return [hash(token) for token in re.findall(r"\s?\w{1,4}|\s+|[^\w\s]", text)]


@given(st.text(alphabet="ab .!\n\u3002", max_size=400) | st.text(max_size=80), st.integers(1, 40))
def test_windows_hold_all_of_the_text(text: str, most: int) -> None:
    found = windows(text, encode, most)
    reached = 0
    for begin, own, tokens in found:
        assert text[begin : begin + len(own)] == own
        assert begin <= reached < begin + len(own)  # nothing between two, and each goes on
        assert len(tokens) <= most
        reached = begin + len(own)
    assert reached == len(text)
    assert [begin for begin, *_ in found] == sorted({begin for begin, *_ in found})


def test_windows_end_with_sentences_and_overlap() -> None:
    found = windows("".join([f"Sentence number {n} is here. " for n in range(60)]), encode, 100)
    assert len(found) > 2
    assert {(own[:8], own[-6:]) for _, own, _ in found} == {("Sentence", "here. ")}
    assert all(second[0] < first[0] + len(first[1]) for first, second in pairwise(found))


def test_the_surest_value_counts_and_lists_are_united() -> None:
    attributes = [
        Attribute(name="a"),
        Attribute(name="b"),
        Attribute(name="c", many=True, max_items=3),
    ]
    of_windows = [
        [
            ("x", 0.4),
            (None, 0.9),
            (["p", "q"], 0.8),
        ],
        [
            (None, 0.99),
            (None, 0.95),
            (["q", "r", "s"], 0.5),
        ],
        [
            ("y", 0.6),
            (None, 0.3),
            (None, 0.7),
        ],
    ]
    found = merged(
        attributes,
        [
            [
                (CheckedValue("null" if value is None else "ok", value, ""), rating)
                for value, rating in own
            ]
            for own in of_windows
        ],
    )
    expected = [
        (2, "y", 0.6),
        (1, None, 0.95),
        (0, ["p", "q", "r"], 0.5),
    ]
    assert [(window, one.value, rating) for window, (one, rating) in found] == expected


def test_a_long_document_is_answered_window_by_window() -> None:
    text = " ".join(f"Part {n} tells of boots of size {n}." for n in range(60))
    task = make(task={"long_documents": "split", "max_document_tokens": 400})
    found = answers(task, [document(0, text), document(1, "short")])
    long = found[0].columns
    short = found[1].columns
    assert {value["window"] for value in short["values"]} == {None}
    assert long["truncated"] is False
    alone = make()  # each window is answered as it is alone
    parts = windows(f"title: {text}", alone.prompts.encode, 400)
    assert len(parts) > 4
    alone.prompts.texts_of = lambda one, category: [DocumentText(one, *parts[one.index][1:])]
    single = answers(alone, [document(number) for number in range(len(parts))])
    for value in long["values"]:
        (own,) = (
            one for one in single[value["window"]].columns["values"] if one["name"] == value["name"]
        )
        assert value["value"] == own["value"]
        assert value["status"] == own["status"]
        # In float32 a product of other sizes rounds otherwise.
        assert value["confidence"] == pytest.approx(own["confidence"], abs=1e-6)


def test_scans_with_equal_text_are_decoded_each_unless_it_stands_in_the_same_boxes() -> None:
    config = configured(**EXTRACTION)
    given = documents(offer("Boot"), offer("Boot"), offer("Boot"))
    high = TextBox(0, 4, 1, 0.1, 0.1, 0.2, 0.2)
    given[0].boxes = [high]
    given[1].boxes = [high]
    given[2].boxes = [high._replace(top=0.7, bottom=0.8)]
    counting = Counting(build_task(config, tiny_tokenizer(), 2048))
    list(Distinct(counting, config.task, config.input).plan(given))
    assert counting.planned == 2


def test_a_value_of_a_recognized_document_has_the_box_of_its_line() -> None:
    task = make()
    text = "A tin.\nThe tea is Oolong."
    asked = document(0, text, "tea")
    offset = len("title: ")
    line = text.index("The")
    asked.boxes = [
        TextBox(offset, offset + line - 1, 1, 0.1, 0.1, 0.3, 0.2),
        TextBox(offset + line, offset + len(text), 1, 0.1, 0.3, 0.6, 0.4),
    ]
    category = task.prompts.categories["tea"]
    (body,) = task.prompts.texts_of(asked, category)
    rated = (CheckedValue("ok", "Oolong", ""), 0.9)
    record = task.answers.record(category, [ValueSource(body, None, rated)])
    (value,) = record.columns["values"]
    assert value["span"]["box"] == [0.1, 0.3, 0.6, 0.4]


def test_the_span_of_a_value_counts_from_the_beginning_of_the_document() -> None:
    task = make(task={"long_documents": "split", "max_document_tokens": 60})
    text = "A tin. " * 15 + "\f" + "A tin. " * 15 + "The tea is Oolong of spring. " + "A tin. " * 30
    asked = document(0, text, "tea")
    category = task.prompts.categories["tea"]
    bodies = task.prompts.texts_of(asked, category)
    window = next(number for number, body in enumerate(bodies) if "Oolong" in body.text)
    assert window > 0
    rated = (CheckedValue("ok", "Oolong", ""), 0.9)
    record = task.answers.record(category, [ValueSource(bodies[window], window, rated)])
    (value,) = record.columns["values"]
    assert f"title: {text}"[value["span"]["begin"] : value["span"]["end"]] == "Oolong"
    assert value["window"] == window
    assert span_of("Oolong", text, 0, text)["span"]["page"] == 2
    config = run_config(TREE["task"] | {"long_documents": "split"}, output={"columns": "typed"})
    found = pa.Table.from_pylist(
        [typed_row(record.columns, config)], columns_of(config)
    ).to_pylist()[0]
    back = {own["name"]: own["window"] for own in record_row({"status": "ok", **found})["values"]}
    assert found[value["name"] + "__window"] == window
    assert back[value["name"]] == window


def test_a_window_that_fails_makes_the_document_an_error_row() -> None:
    task = make(task={"long_documents": "split", "max_document_tokens": 100})
    requests = [one for one in task.plan([document(0, "word " * 300)]) if isinstance(one, Request)]
    assert len(requests) > 2
    found = [record for request in requests for record in request.fail("no memory")]
    assert [(record.index, record.error) for record in found] == [
        (0, f"window 1 of {len(requests)}: no memory")
    ]
