"""Labelled documents in the prompt of an extraction: where they stand, which they are, and what is refused."""

import json

import pytest
from pydantic import ValidationError

from raypd.errors import ConfigError
from raypd.models.load import load_tokenizer
from raypd.tasks.base import Document
from raypd.tasks.extraction import ExtractionTask
from raypd.tasks.prompting import check_template
from tests.runs import extraction, run_config

TASK = extraction(shoes=["Brand", {"name": "Size", "type": "number"}], hats=["Brand"])
ROWS = [
    {"category": "shoes", "title": "Acme Trail 42", "target": {"Brand": "Acme", "Size": 42}},
    {"category": "hats", "title": "Zeta straw hat", "target": {"Brand": "Zeta"}},
    {"category": "shoes", "title": "Berg Road shoe <|im_end|>", "target": {"Brand": "Berg"}},
    {"category": "shoes", "title": "Acme Trail 42 in red", "target": {"Brand": "Acme", "Size": 42}},
]
SHOWN = [
    '<document>\nAcme Trail 42\n</document>\n{\n"Brand": "Acme",\n"Size": 42\n}\n\n',
    '<document>\nBerg Road shoe <|im_end|>\n</document>\n{\n"Brand": "Berg",\n"Size": null\n}\n\n',
    '<document>\nAcme Trail 42 in red\n</document>\n{\n"Brand": "Acme",\n"Size": 42\n}\n\n',
]


@pytest.fixture
def made(tmp_path):
    def make(rows=ROWS, method="guided", tokens=4096, decoding=(), **examples):
        path = tmp_path / "examples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"text_columns": ["title"]}
        task = {**TASK, "examples": {"path": str(path), **examples}}
        config = run_config(task, input=source, decoding={"method": method, **dict(decoding)})
        tokenizer = load_tokenizer(config.model)
        return config, ExtractionTask(config, tokenizer, tokens), tokenizer

    return make


def prompt(task, tokenizer, text, category="shoes"):
    """(the shared part, the rest) of the first feed of a document."""
    (request,) = task.plan([Document(0, "a", {"title": text, "category": category})])
    feed = next(request.program)
    tokens = list(feed.tokens)
    return tokenizer.decode(tokens[: feed.shared]), tokenizer.decode(tokens[feed.shared :])


@pytest.mark.parametrize("method", ["guided", "autoregressive"])
def test_the_first_of_the_category_stand_in_the_shared_part(made, method):
    _, task, tokenizer = made(method=method, count=2)
    shared, rest = prompt(task, tokenizer, "Nova 44")
    assert shared.endswith(SHOWN[0] + SHOWN[1])
    assert rest.startswith("<document>\nNova 44\n</document>")
    assert "straw" not in shared
    assert "straw hat" in prompt(task, tokenizer, "Fez", "hats")[0]
    ids = tokenizer(SHOWN[1], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids  # and it is there as these ids:
    (request,) = task.plan([Document(0, "a", {"title": "Nova 44", "category": "shoes"})])
    feed = next(request.program)
    assert list(feed.tokens[feed.shared - 8 : feed.shared]) == ids[-8:]


def test_the_most_alike_stand_before_the_document_and_never_itself(made):
    _, task, tokenizer = made(count=2, nearest=True)
    shared, rest = prompt(task, tokenizer, "Acme Trail 42")
    assert "<document>\n" not in shared
    assert rest.startswith(SHOWN[1] + SHOWN[2] + "<document>\nAcme Trail 42\n</document>")
    _, rest = prompt(task, tokenizer, "Berg Road boots")
    assert rest.index("Berg Road shoe") > rest.index("Acme")


def test_what_does_not_fit_beside_the_document_is_left_out(made):
    config, task, tokenizer = made(count=3, nearest=True)
    fixed = 4096 - task._remaining_tokens(task._categories["shoes"])
    room = 2 * len(tokenizer(SHOWN[2])["input_ids"]) + 20  # half of it holds one example
    small = ExtractionTask(config, tokenizer, fixed + room)
    _, rest = prompt(small, tokenizer, "Acme Trail 42")
    assert rest.startswith(SHOWN[2] + "<document>\nAcme Trail 42\n")


def test_the_content_is_in_the_fingerprint(made):
    first = made()[0].fingerprint()
    assert first == made()[0].fingerprint()
    assert len({first, made(count=1)[0].fingerprint(), made(rows=ROWS[:1])[0].fingerprint()}) == 3


@pytest.mark.parametrize(("rows", "reason"), [
    ([{"category": "shoes", "title": "x", "target": {"Size": "42"}}], r"jsonl:1: .*'Size': a label does not fit"),
    ([ROWS[0], {"category": "shoes", "target": {}}], r"jsonl:2: .*empty: nothing in title"),
    ([{"category": "boats", "title": "x", "target": {}}], "'boats' has no schema"),
    ([{"category": "shoes", "title": "x"}], r"jsonl:1: .*KeyError: .*needs the columns of the input and 'target'"),
    ([["a list"]], r"jsonl:1: not a labelled document"), ([], "holds no example")])  # fmt: skip
def test_examples_that_cannot_be_shown_are_refused_before_a_run(made, tmp_path, rows, reason):
    config = made()[0]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=reason):
        check_template(config)


def test_stacked_documents_would_see_each_other_s_examples(made):
    with pytest.raises(ValidationError, match="would see each other's examples"):
        made(method="hyper_parallel", decoding={"isolate": "none"}, nearest=True)
