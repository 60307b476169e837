"""A template of a user's: what it may do and how long; and labelled documents in the prompt."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raypd.config import RunConfig
from raypd.config.model_card_file import EARLIER_TEMPLATE
from raypd.errors import ConfigError, ModelError
from raypd.estimation import suggest
from raypd.models.load import load_tokenizer
from raypd.schema import TYPES
from raypd.tasks import prompting
from raypd.tasks.base import Document
from raypd.tasks.extraction import ExtractionTask
from raypd.tasks.prompting import check_template, messages, template_text
from tests.processes import ended, start
from tests.runs import extraction, run_config, write_rows
from tests.tiny import tiny_tokenizer

SHELL = "{{ category.attributes[0].__class__.__mro__[-1].__subclasses__() }}"
GLOBALS = "{{ lipsum.__globals__['os'].system('touch MARK') }}"
OPCODES = "cos\\nsystem\\n(S'touch MARK'\\ntR."
PICKLE = (
    f'{{{{ category.attributes[0].parse_raw("{OPCODES}", proto="pickle", allow_pickle=True) }}}}'
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TASK = extraction(shoes=["Brand", {"name": "Size", "type": "number"}], hats=["Brand"])
ROWS = [
    {
        "category": "shoes",
        "title": "Acme Trail 42",
        "target": {"Brand": "Acme", "Size": 42},
    },
    {"category": "hats", "title": "Zeta straw hat", "target": {"Brand": "Zeta"}},
    {"category": "shoes", "title": "Berg Road shoe <|im_end|>", "target": {"Brand": "Berg"}},
    {
        "category": "shoes",
        "title": "Acme Trail 42 in red",
        "target": {"Brand": "Acme", "Size": 42},
    },
]
SHOWN = [
    '<document>\nAcme Trail 42\n</document>\n{\n"Brand": "Acme",\n"Size": 42\n}\n\n',
    '<document>\nBerg Road shoe <|im_end|>\n</document>\n{\n"Brand": "Berg",\n"Size": null\n}\n\n',
    '<document>\nAcme Trail 42 in red\n</document>\n{\n"Brand": "Acme",\n"Size": 42\n}\n\n',
]


def config(template, **keys: object) -> RunConfig:
    attributes = [
        {"name": "Brand"},
        {
            "name": "Fit",
            "type": "enum",
            "values": ["in", "over"],
        },
    ]
    task = {
        "categories": {"shoes": {"description": "worn", "attributes": attributes}},
        "template": str(template),
    }
    return run_config(task, **keys)


def check(made: RunConfig) -> None:
    check_template(made.task, made.input, made.model)


def messages_of(made: RunConfig) -> dict[str, str]:
    return messages(made.extraction, made.model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SHELL, r"mine\.j2: .*__class__.* is unsafe"),
        (GLOBALS, r"mine\.j2: .*__globals__.* is unsafe"),
        (PICKLE, r"mine\.j2: .*has no attribute 'parse_raw'"),
        ("{{ category.attributes.clear() }}", r"mine\.j2: .*not safely callable|is unsafe"),
        ("{% include 'other' %}", r"mine\.j2: .*no loader"),
        (ENDLESS, r"mine\.j2: it is not rendered within 2 s"),
        ("{{ 10 ** (10 ** 10) }}", r"mine\.j2: it is not rendered within 2 s"),
        ("{{ 'x' * 10 ** 11 }}", r"mine\.j2: it takes too much memory"),
        ("{{ documents }}", "must hold"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{% for %}", r"mine.j2:1: not a valid"),
    ],
)
def test_what_a_template_may_not_do(tmp_path, text: str, words: str) -> None:
    file = tmp_path / "mine.j2"
    mark = tmp_path / "mark"
    file.write_text("{{ documents }}" + text.replace("MARK", str(mark)))
    with pytest.raises(ConfigError, match=words):
        check(config(file))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "does not end within 0.3 s"),
        ("{{ nothing.there }}", "cannot be applied: 'nothing' is undefined"),
        ("{% for %}", "cannot be applied"),
        ("{{ raise_exception('no') }}", "cannot be applied: no"),
        ("{{ 10 ** (10 ** 8) % 7 }}", r"\*\* with more than 10,000"),
        ("{{ 'a' * 10 ** 9 }}", r"\* with more than"),
        ("{{ '%1000000000d' % 1 }}", "% with more than"),
        ("{{ '%*d' % (9, 1) }}", "% with more than"),
    ],
)
def test_a_model_s_own_chat_template_that_does_not_work_is_named(
    monkeypatch, template: str, words: str
) -> None:
    monkeypatch.setattr(prompting, "_TEMPLATE_SECONDS", 0.3)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=words):
        prompting.pieces(tokenizer, "a message", [])
    with pytest.raises(ModelError, match=words):
        prompting.end_tokens(tokenizer)


def test_a_model_s_own_chat_template_may_count_and_repeat() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ 7 % 4 }} {{ 2 ** 3 * 1.5 }} {{ '-' * 3 }} {{ '%04d%% %s' % (messages|length, 'a') }}"
    )
    assert prompting.rendered(tokenizer, [{"role": "user", "content": "?"}]) == "3 12.0 --- 0001% a"


def test_nothing_in_a_prompt_could_be_an_answer() -> None:
    """Whatever the type: a small model copies a date that stands in its prompt."""
    columns = [{"name": "item"}, {"name": "day", "type": "date"}]
    keys: dict[str, dict[str, Any]] = {
        "enum": {"values": ["red", "blue"]},
        "pattern": {"pattern": "[A-Z]+"},
        "rows": {"columns": columns},
    }
    attributes = [
        {
            "name": f"{kind} {'many' if many else 'one'}",
            "type": kind,
            "many": many,
            **keys.get(kind, {}),
        }
        for kind in TYPES
        for many in (False, True)
    ]
    shown = run_config({"categories": {"things": {"attributes": attributes}}})
    questions = template_text(None, "question_answering.j2")
    assert not re.search(
        r"[0-9\"']", "".join([*messages_of(shown).values(), re.sub("{[{%].*?[%}]}", "", questions)])
    )


def test_the_example_of_schema_suggest_becomes_no_answer() -> None:
    """It holds values: a model that repeats them says what does not stand in its document, and that
    is dropped.
    """
    echoed = suggest.Suggestion()
    echoed.read("things", "Acme boots, size 42, waterproof", suggest._EXAMPLE[1])
    assert echoed.lines == 6
    assert echoed.invented == 6
    assert echoed.categories["things"].attributes == {}


def test_a_template_that_is_no_utf_8_is_named(tmp_path) -> None:
    (tmp_path / "mine.j2").write_bytes(b"\xff{{ documents }}")
    with pytest.raises(ConfigError, match=r"mine\.j2: the template cannot be read: .*utf-8"):
        messages_of(config(tmp_path / "mine.j2"))


def test_a_template_that_fails_ends_the_command_before_ray_starts(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1, "title": "a", "category": "shoes"}\n')
    (tmp_path / "mine.j2").write_text("{{ nothing }}{{ documents }}")
    run = config(
        tmp_path / "mine.j2",
        model="fake",
        output={"path": str(tmp_path / "out")},
    )
    (tmp_path / "run.yaml").write_text(run.model_dump_json())
    said = ended(start("-X", "importtime", "-m", "raypd", "extract", str(tmp_path / "run.yaml")), 2)
    assert "mine.j2: 'nothing' is undefined; it may use category, instruction and documents" in said
    assert not re.search(r"resumes|ray\._private", said)  # of the list of imports
    assert not (tmp_path / "out").exists()


def test_an_enum_of_many_values_shows_the_first_hundred() -> None:
    attributes = [
        {
            "name": "Brand",
            "type": "enum",
            "values": [f"b{i}" for i in range(20_000)],
        }
    ]
    message = messages_of(run_config({"categories": {"shoes": {"attributes": attributes}}}))[
        "shoes"
    ]
    assert re.search(r"\(one of: b0, b1, .*, b99, or one of 19,900 more\)", message)


@pytest.fixture
def made(tmp_path):
    def make(rows=ROWS, method="guided", tokens=4096, decoding=(), **examples):
        path = write_rows(tmp_path / "examples.jsonl", rows)
        source = {"text_columns": ["title"]}
        task = {**TASK, "examples": {"path": str(path), **examples}}
        config = run_config(
            task,
            input=source,
            decoding={"method": method, **dict(decoding)},
        )
        tokenizer = load_tokenizer(config.model)
        return config, ExtractionTask(config, tokenizer, tokens), tokenizer

    return make


def prompt_tokens(task, text, category="shoes"):
    """(the shared part, the rest) of the first feed of a document."""
    (request,) = task.plan([Document(0, "a", {"title": text, "category": category})])
    feed = next(request.program)
    return list(feed.tokens[: feed.shared]), list(feed.tokens[feed.shared :])


def prompt(task, tokenizer, *document):
    return map(tokenizer.decode, prompt_tokens(task, *document))


@pytest.mark.parametrize("method", ["guided", "autoregressive"])
def test_the_first_of_the_category_stand_in_the_shared_part(made, method):
    config, task, tokenizer = made(method=method, count=2)
    shared, rest = prompt(task, tokenizer, "Nova 44")
    assert shared.endswith(SHOWN[0] + SHOWN[1])
    assert rest.startswith("<document>\nNova 44\n</document>")
    assert "straw" not in shared
    assert "straw hat" in next(prompt(task, tokenizer, "Fez", "hats"))
    # Another file, with a BOM and a line break that is none of JSON lines.
    path = Path(config.task.examples.path)
    path.write_text("\ufeff" + path.read_text().replace("straw hat", "straw\u2028hat"))
    assert "straw\u2028hat" in next(
        prompt(ExtractionTask(config, tokenizer, 4096), tokenizer, "Fez", "hats")
    )
    ids = tokenizer(
        SHOWN[1],
        add_special_tokens=False,
        split_special_tokens=True,
    )["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids  # and it is there as these ids:
    assert prompt_tokens(task, "Nova 44")[0][2 - len(ids) :] == ids[2:]


def test_the_most_alike_that_fit_stand_before_the_document_and_never_itself(made):
    _, task, tokenizer = made(count=2, nearest=True)
    shared, rest = prompt(task, tokenizer, "ACME Trail, 42")
    assert "<document>\n" not in shared
    assert rest.startswith(SHOWN[1] + SHOWN[2] + "<document>\nACME Trail, 42\n</document>")
    _, rest = prompt(task, tokenizer, "Berg Road boots")
    assert rest.index("Berg Road shoe") > rest.index("Acme")
    config, task, tokenizer = made(count=3, nearest=True)
    fixed = 4096 - task.prompts.remaining_tokens(task.prompts.categories["shoes"])
    room = 2 * len(tokenizer(SHOWN[2])["input_ids"]) + 20  # half of it holds one example
    _, rest = prompt(ExtractionTask(config, tokenizer, fixed + room), tokenizer, "Acme Trail 42")
    assert rest.startswith(SHOWN[2] + "<document>\nAcme Trail 42\n")


def test_examples_are_in_the_fingerprint_and_stacked_documents_would_see_each_other_s(made):
    first = made()[0].fingerprint()
    assert first == made()[0].fingerprint()
    assert (
        len(
            {
                first,
                made(count=1)[0].fingerprint(),
                made(rows=ROWS[:1])[0].fingerprint(),
            }
        )
        == 3
    )
    with pytest.raises(ValidationError, match="would see each other's examples"):
        made(method="hyper_parallel", decoding={"isolate": "none"}, nearest=True)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [{"category": "shoes", "title": "x", "target": {"Size": "42"}}],
            r"jsonl:1: .*'Size': a label does not fit",
        ),
        ([ROWS[0], {"category": "shoes", "target": {}}], r"jsonl:2: .*empty: nothing in title"),
        ([{"category": "boats", "title": "x", "target": {}}], "'boats' has no schema"),
        (
            [{"category": "shoes", "title": "x"}],
            r"jsonl:1: .*no labels\); it needs the columns of the input and 'target'",
        ),
        ([["a list"]], r"jsonl:1: not a labelled document"),
        ([], "holds no example"),
    ],
)
def test_examples_that_cannot_be_shown_are_refused_before_a_run(made, tmp_path, rows, reason):
    config = made()[0]
    write_rows(tmp_path / "examples.jsonl", rows)
    with pytest.raises(ConfigError, match=reason):
        check(config)


IN_PARTS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        IN_PARTS,
        IN_PARTS.replace(
            "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}",
            "{{ part['text'] + '' }}",
        ),
    ],
)
def test_a_chat_template_that_takes_content_as_parts_is_given_parts(template: str) -> None:
    """Such as those of models for images; the second fails at a plain text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    written = "<system>Be brief.<|im_end|><user>Hi<|im_end|><assistant>"
    assert prompting.rendered(tokenizer, turns) == written
    before, behind = prompting.pieces(tokenizer, "Read #: now", ["#"])
    assert tokenizer.decode(before) == "<user>Read "
    assert tokenizer.decode(behind) == ": now<|im_end|><assistant>"
    assert prompting.end_tokens(tokenizer) == {tokenizer.eos_token_id}


def test_a_chat_template_that_leaves_the_question_out_stays_so() -> None:
    """A template for plain text must not be shown a list, which it would write as Python does."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] | replace('Hi', 'Ho') }}{% endfor %}"
    )
    assert prompting.rendered(tokenizer, [{"role": "user", "content": "Hi"}]) == "Ho"


def test_weights_that_were_trained_with_the_earlier_prompt_go_on_to_get_it(tmp_path) -> None:
    """Their card names it by its digest; other weights see what a description is for."""
    earlier = template_text(None, "extraction_1.j2")
    assert hashlib.sha256(earlier.encode()).hexdigest()[:16] == EARLIER_TEMPLATE
    card = {"task": "extraction", "method": "guided", "template": EARLIER_TEMPLATE}
    (tmp_path / "raypd.json").write_text(json.dumps(card))
    attributes = [{"name": "title", "description": "the job's title"}]
    task = {"categories": {"ads": {"attributes": attributes}}}
    trained = run_config(task, model={"name": str(tmp_path)})
    other = run_config(task)
    assert "- title: the job's title\n" in messages_of(trained)["ads"]
    assert "- title (meaning: the job's title)\n" in messages_of(other)["ads"]
    assert trained.fingerprint() != other.fingerprint()
    # A prompt without descriptions is what it was, and so are the answers to it.
    plain = run_config({"categories": {"ads": {"attributes": [{"name": "title"}]}}})
    assert "- title\n" in messages_of(plain)["ads"]
    assert not plain._shows_descriptions()
