"""A template of a user's: what it may do, how long it may take, and that this is found before Ray starts."""

import re
from typing import Any, get_args

import pytest

from raypd.config import Attribute, ExtractionConfig, RunConfig
from raypd.errors import ConfigError, ModelError
from raypd.tasks import prompting
from raypd.tasks.prompting import check_template, messages, template_text
from tests.processes import ended, start
from tests.runs import run_config
from tests.tiny import tiny_tokenizer

SHELL = "{{ category.attributes[0].__class__.__mro__[-1].__subclasses__() }}"
GLOBALS = "{{ lipsum.__globals__['os'].system('touch MARK') }}"
OPCODES = "cos\\nsystem\\n(S'touch MARK'\\ntR."
PICKLE = f'{{{{ category.attributes[0].parse_raw("{OPCODES}", proto="pickle", allow_pickle=True) }}}}'
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def config(template, **keys: object) -> RunConfig:
    attributes = [{"name": "Brand"}, {"name": "Fit", "type": "enum", "values": ["in", "over"]}]
    task = {"categories": {"shoes": {"description": "worn", "attributes": attributes}}, "template": str(template)}
    return run_config(task, **keys)


@pytest.mark.parametrize(("text", "words"), [
    (SHELL, r"mine\.j2: .*__class__.* is unsafe"), (GLOBALS, r"mine\.j2: .*__globals__.* is unsafe"),
    (PICKLE, r"mine\.j2: .*has no attribute 'parse_raw'"),
    ("{{ category.attributes.clear() }}", r"mine\.j2: .*not safely callable|is unsafe"),
    ("{% include 'other' %}", r"mine\.j2: .*no loader"), (ENDLESS, r"mine\.j2: it is not rendered within 2 s"),
    ("{{ 10 ** (10 ** 10) }}", r"mine\.j2: it is not rendered within 2 s"),
    ("{{ 'x' * 10 ** 11 }}", r"mine\.j2: it takes too much memory"), ("{{ products }}", "must hold"),
    ("{{ nothing }}", "'nothing' is undefined"), ("{% for %}", r"mine.j2:1: not a valid")])  # fmt: skip
def test_what_a_template_may_not_do(tmp_path, text: str, words: str) -> None:
    file, mark = tmp_path / "mine.j2", tmp_path / "mark"
    file.write_text("{{ products }}" + text.replace("MARK", str(mark)))
    with pytest.raises(ConfigError, match=words):
        check_template(config(file))
    assert not mark.exists()


@pytest.mark.parametrize(("template", "words"), [
    (ENDLESS, "does not end within 0.3 s"), ("{{ nothing.there }}", "cannot be applied: 'nothing' is undefined"),
    ("{% for %}", "cannot be applied"), ("{{ raise_exception('no') }}", "cannot be applied: no")])  # fmt: skip
def test_a_model_s_own_chat_template_that_does_not_work_is_named(monkeypatch, template: str, words: str) -> None:
    monkeypatch.setattr(prompting, "_TEMPLATE_SECONDS", 0.3)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=words):
        prompting.pieces(tokenizer, "a message", [])
    with pytest.raises(ModelError, match=words):
        prompting.end_tokens(tokenizer)


def test_nothing_in_a_prompt_could_be_an_answer() -> None:
    """Whatever the type: a small model copies a date that stands in its prompt."""
    types = get_args(Attribute.model_fields["type"].annotation)
    keys: dict[str, dict[str, Any]] = {
        "enum": {"values": ["red", "blue"]},
        "pattern": {"pattern": "[A-Z]+"},
        "rows": {"columns": [{"name": "item"}, {"name": "day", "type": "date"}]},
    }
    attributes = [{"name": f"{kind} {'many' if many else 'one'}", "type": kind, "many": many, **keys.get(kind, {})}
                  for kind in types for many in (False, True)]  # fmt: skip
    task = ExtractionConfig.model_validate({"categories": {"things": {"attributes": attributes}}})
    questions = template_text(None, "question_answering.j2")
    assert not re.search(r"[0-9\"']", "".join([*messages(task).values(), re.sub("{[{%].*?[%}]}", "", questions)]))


def test_a_template_that_is_no_utf_8_is_named(tmp_path) -> None:
    (tmp_path / "mine.j2").write_bytes(b"\xff{{ products }}")
    with pytest.raises(ConfigError, match=r"mine\.j2: the template cannot be read: .*utf-8"):
        messages(config(tmp_path / "mine.j2").task)


def test_a_template_that_fails_ends_the_command_before_ray_starts(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1, "title": "a", "category": "shoes"}\n')
    (tmp_path / "mine.j2").write_text("{{ nothing }}{{ products }}")
    run = config(tmp_path / "mine.j2", model="fake", output={"path": str(tmp_path / "out")})
    (tmp_path / "run.yaml").write_text(run.model_dump_json())
    said = ended(start("-X", "importtime", "-m", "raypd", "extract", str(tmp_path / "run.yaml")), 2)
    assert "mine.j2: 'nothing' is undefined; it may use category, instruction and documents" in said
    assert not re.search(r"resumes|ray\._private", said)  # of the list of imports
    assert not (tmp_path / "out").exists()


def test_an_enum_of_many_values_shows_the_first_hundred() -> None:
    attributes = [{"name": "Brand", "type": "enum", "values": [f"b{i}" for i in range(20_000)]}]
    message = messages(run_config({"categories": {"shoes": {"attributes": attributes}}}).task)["shoes"]
    assert re.search(r"\(one of: b0, b1, .*, b99, or one of 19,900 more\)", message)
