"""What a random model is held to validates, by jsonschema and pydantic; forced tokens: the same
answers.
"""

import datetime
import json
import random
import resource
from functools import cache, reduce
from itertools import accumulate, chain
from typing import Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from hypothesis import given, strategies as st
from outlines_core.json_schema import build_regex_from_schema

from raypd.config import Category
from raypd.config.schema import categories_of
from raypd.decoding.automata import DEAD, OneOf, one_of
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Bounded, Grammar
from raypd.decoding.methods.autoregressive import Continuation, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.text import Prompt
from raypd.decoding.vocabulary import Vocabulary
from raypd.errors import ConfigError
from raypd.schema import Attribute
from raypd.tasks import build_task
from raypd.tasks.automata import automaton_of, json_object, vocabulary_of
from raypd.tasks.record import record_of, value_in
from raypd.tasks.values import check, find_span, span_of
from raypd.training.example import Skip
from raypd.training.extraction import value_text
from tests.decoding import reference
from tests.decoding.cases import agree, pair
from tests.decoding.drivers import tokens_of
from tests.runs import answer, extraction, run_config
from tests.tasks.test_extraction import CONTEXT, document
from tests.tiny import tiny_model, tiny_tokenizer

BYTES = [chr(i) for i in range(256)]
MERGED = [
    *BYTES,
    '",',
    '", "',
    '"]',
    '"],\n',
    "[]",
    "null",
    "20",
    "2024",
    "-0",
    "02-29",
    "000",
    ",\n",
    " re",
    'd"',
    "AB",
]
LINES = {"type": "rows", "columns": [{"name": "Item"}, {"name": "No", "type": "integer"}]}
TEXTS = ["a", "b", "c", "ab", "abc", "bc", "bcd", "d", "ba", '"', '"a', "\xc3", "\xa9", " "]
AUTOMATON = json_object(None)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
WOOD = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "wood": {"enum": ["oak", "oak root", "ash"]}},
    "required": ["size", "wood"],
    "additionalProperties": False,
}
FORCED = [
    Attribute(name="code", type="pattern", pattern=r"[A-C]{2}-\d{2}/[xy]", required=True),
    Attribute(
        name="steel", type="enum", values=["stainless hard", "stainless soft"], required=True
    ),
    Attribute(
        name="dates",
        type="date",
        many=True,
        max_items=2,
        required=True,
    ),
]


class Line(pydantic.BaseModel):
    item: str | None
    count: int
    price: float | None = None
    unit: Literal["kg", "l"] | None
    paid: bool
    day: datetime.date


class Product(pydantic.BaseModel):
    """Every type that a slot is held to, and lists of them."""

    count: int
    lit: bool
    color: Literal["red", "red wine", "größer"]
    one: Literal["null"]
    day: datetime.date
    at: datetime.datetime
    hour: datetime.time
    sku: str = pydantic.Field(pattern=r"^[A-Z]{2}[0-9]{3,5}(ä|-ß+)?$")
    any: str = pydantic.Field(pattern=r"^a.*b$")
    colors: list[Literal["red", "blue"]] = pydantic.Field(max_length=2)
    numbers: list[float]
    counts: list[int]
    days: list[datetime.date] = pydantic.Field(max_length=3)
    tags: list[str] = pydantic.Field(max_length=4)
    maybe: list[bool] | None = None
    lines: list[Line] = pydantic.Field(max_length=2)
    size: int | None = None
    grade: Literal[1, 2, 10]
    step: Literal[0, 0.5, -1.5] | None
    grades: list[Literal[1, 2, 10]] = pydantic.Field(min_length=2, max_length=3)
    twice: list[Literal["none", "b"]] = pydantic.Field(min_length=2)


SCHEMA = Product.model_json_schema()
ATTRIBUTES = [
    Attribute.model_validate(a) for a in categories_of(SCHEMA, None)["Product"]["attributes"]
]  # type: ignore[arg-type]


@cache
def grammar(name: str, merged: bool) -> Grammar:
    return Grammar(
        automaton_of(next(a for a in ATTRIBUTES if a.name == name)),
        Vocabulary(MERGED if merged else BYTES),
    )


def drawn(rules: Grammar, most: int, draw: random.Random) -> tuple[str, int, bool]:
    """(text, tokens, whether it ended) of a value under random choices, in which no character is
    rarer than it is.
    """
    bounded = Bounded(rules, most)
    tokens = []
    while len(tokens) < most and not bounded.stops(tokens):
        allowed = bounded.allowed_token_ids(tokens)
        ids = np.arange(len(rules.vocabulary.texts)) if allowed is None else allowed.ids
        if draw.random() < 0.2:
            closing = [i for i in ids if rules.vocabulary.texts[i][:1] in '"],\n']
        else:
            closing = []
        tokens.append(int(draw.choice(closing or list(ids))))
    text = bounded.completion(tokens) or "".join(rules.vocabulary.texts[token] for token in tokens)
    return text.encode("latin-1").decode(errors="replace"), len(tokens), bounded.stops(tokens)


@pytest.mark.parametrize("merged", [False, True], ids=["bytes", "merged"])
@pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda a: a.name)
def test_what_is_decoded_under_random_choices_is_valid(attribute: Attribute, merged: bool) -> None:
    draw = random.Random(attribute.name)
    rules = grammar(attribute.name, merged)
    place = {**SCHEMA["properties"][attribute.name], "$defs": SCHEMA.get("$defs", {})}
    validator = jsonschema.Draft202012Validator(place, format_checker=jsonschema.FormatChecker())
    typed = pydantic.TypeAdapter(Product.model_fields[attribute.name].rebuild_annotation())
    found = set()
    for most in [
        rules.needed(),
        rules.needed() + 1,
        40,
    ] * 60:
        text, tokens, closed = drawn(rules, most, draw)
        assert tokens <= most
        value = check(attribute, text, closed)
        found.add(text)
        if value.status == "null":
            assert not attribute.required
        elif attribute.name in ("count", "size", "grade", "step") and not closed:
            # Digits that are missing make another number.
            assert value.status == "truncated"
            assert value.value is None
        else:
            assert value.status == "ok" or attribute.name in ("tags", "lines")
            assert attribute.fits(value.value)
            validator.validate(value.value)
            typed.validate_json(json.dumps(value.value))
    assert len(found) > 1 or attribute.name == "one"


def test_whole_records_of_a_random_model_are_valid() -> None:
    """Through the engine, with all methods that hold a model to its schema: the table's record
    against the model.
    """

    class Maker(pydantic.BaseModel):
        founded: datetime.date
        country: Literal["de", "fr"] | None = None

    class Size(pydantic.BaseModel):
        n: int | None = None
        unit: Literal["cm"] | None

    class Thing(pydantic.BaseModel):
        colors: list[Literal["red", "blue"]] = []
        sku: str = pydantic.Field(pattern="^[A-Z]{2}[0-9]{2}$")
        lit: bool | None
        maker: Maker
        seller: Maker | None = None
        tags: list[str] = pydantic.Field([], max_length=3)
        sizes: list[Size] = []
        parts: list[Literal["none", "N/A"]] = pydantic.Field(min_length=2)
        grade: Literal[1, 2, 10]

    schema = Thing.model_json_schema()
    seen = set()
    for method in ("hyper_parallel", "guided"):
        decoding = {"method": method, "max_value_tokens": 60}
        categories = {"categories": categories_of(schema, None)}
        config = run_config(categories, input={"category_column": None}, decoding=decoding)
        task = build_task(config, tiny_tokenizer(), CONTEXT)
        model = tiny_model("llama", max_position_embeddings=CONTEXT)
        records, _ = answer(
            task, [document(i, f"title {i} " * (i + 1)) for i in range(8)], Engine(model)
        )
        for record in records:
            assert record.error is None
            tree = record.columns["record"]
            values = {value["name"]: value for value in record.columns["values"]}
            if (
                values["seller.founded"]["status"] == "null"
                and values["seller.country"]["status"] == "ok"
            ):
                continue  # slots do not know of each other: docs/values.md
            Thing.model_validate(tree)
            jsonschema.validate(tree, schema)
            assert tree["maker"]["founded"] == values["maker.founded"]["value"]
            seen |= {value["status"] for value in values.values()}
    assert {"ok", "null"} <= seen


MOOD = {"type": "enum", "values": ["none", "N/A", "mild"]}
LINES = {"type": "rows", "columns": [{"name": "Item"}, {"name": "No", "type": "integer"}]}


@pytest.mark.parametrize(
    ("keys", "text", "status", "value"),
    [
        ({"type": "integer"}, " 1,000 mAh", "ok", 1000),
        ({"type": "integer"}, "12.5", "invalid", None),
        ({"type": "integer", "maximum": 10}, "11", "invalid", None),
        ({"type": "integer"}, "9" * 30, "invalid", None),
        ({"type": "number", "minimum": 0.5}, "0.4", "invalid", None),
        ({"max_length": 3}, '"abcd"', "invalid", None),
        ({"type": "date"}, '"2024-02-30"', "invalid", None),
        ({"type": "date"}, '"2024-02-29"', "ok", "2024-02-29"),
        ({"type": "pattern", "pattern": "[a-z]+"}, '"ab1"', "invalid", None),
        ({"type": "pattern", "pattern": r"\d[\d-]"}, '"12"', "ok", "12"),
        ({"type": "pattern", "pattern": r"\d[\d-]"}, '"1२"', "invalid", None),
        ({"type": "pattern", "pattern": r"(?u)\d[\d-]"}, '"1२"', "ok", "1२"),
        ({"many": True}, ' ["a", "b,\\" c"]', "ok", ["a", 'b," c']),
        ({"many": True}, ' ["a", "b', "truncated", ["a"]),
        ({"many": True, "type": "number"}, " [1, 23", "truncated", [1]),
        ({"many": True, "type": "enum", "values": ["Red"]}, '["red"]', "ok", ["Red"]),
        (MOOD, '"none"', "ok", "none"),
        (MOOD, '"n/a"', "ok", "N/A"),
        (MOOD, " null", "null", None),
        (MOOD, '"Null"', "null", None),
        ({**MOOD, "many": True}, '["N/A", null, "mild"]', "ok", ["N/A", "mild"]),
        ({"type": "pattern", "pattern": "[A-Za-z]+", "required": True}, '"None"', "ok", "None"),
        ({"type": "pattern", "pattern": "[A-Za-z]+"}, '"None"', "null", None),
        ({"type": "pattern", "pattern": "[0-9]+", "required": True}, '"None"', "null", None),
        (
            {"type": "rows", "columns": [{"name": "No", **MOOD}]},
            '[{"No": "none"}, {"No": null}]',
            "ok",
            [{"No": "none"}],
        ),
        ({"many": True, "type": "enum", "values": ["Red"]}, '["red", "blue"]', "invalid", None),
        ({"many": True, "max_items": 1}, '["a", "b"]', "invalid", None),
        ({"many": True}, '"a"', "ok", ["a"]),
        ({"many": True}, "[]", "ok", []),
        ({"many": True}, " null", "null", None),
        (LINES, '[{"Item": "a", "No": 2}]', "ok", [{"Item": "a", "No": 2}]),
        (LINES, "[]", "ok", []),
        (LINES, ' {"no.": "1,000 pieces"}', "ok", [{"Item": None, "No": 1000}]),
        (
            LINES,
            '[{"Item": "a", "No": 2}, {"Item": "b", "No": 3',
            "truncated",
            [{"Item": "a", "No": 2}],
        ),
        (LINES, json.dumps([{"Item": "a", "No": 1}] * 5000), "ok", [{"Item": "a", "No": 1}] * 5000),
        ({**LINES, "max_items": 20}, json.dumps([{"Item": "a"}] * 5000), "invalid", None),
        (LINES, '[{"Item": "a", "No": "many"}]', "invalid", None),
        (LINES, '["a"]', "invalid", None),
        (LINES, "null", "null", None),
        (LINES, '[{"Item": null}]', "ok", []),
    ],
)
def test_what_any_model_writes_is_checked_by_its_type(
    keys: Any, text: str, status: str, value: Any
) -> None:
    found = check(Attribute(name="a", **keys), text, closed=status != "truncated")
    assert found.status == status
    assert found.value == value


def test_a_list_in_an_answer_that_the_model_writes_whole() -> None:
    attributes = [
        {"name": "Brand"},
        {"name": "Colors", "many": True},
        {"name": "Size", "type": "integer"},
    ]
    config = run_config(
        {"categories": {"shoes": {"attributes": attributes}}}, decoding={"method": "autoregressive"}
    )
    (request,) = build_task(config, tiny_tokenizer(), CONTEXT).plan([document(0)])
    tokens = tiny_tokenizer().encode(
        '"Brand": "B", "Size": 7, "Colors": ["red", "blue"]}', add_special_tokens=False
    )
    next(request.program)
    for token in tokens[:-1]:  # it goes on to the end of the list, though all keys are there
        request.program.send(Predictions([token], [-0.1]))
    with pytest.raises(StopIteration):
        request.program.send(Predictions(tokens[-1:], [-0.1]))
    (record,) = request.finish(Continuation(tokens, [-0.1] * len(tokens), True))
    assert record.columns["record"] == {
        "Brand": "B",
        "Colors": ["red", "blue"],
        "Size": 7,
    }


def test_labels_of_rows_are_written_as_they_are_decoded_and_a_record_leaves_out_what_is_not_required() -> (  # noqa: E501
    None
):
    columns = [
        {"name": "Item"},
        {
            "name": "No",
            "type": "integer",
            "omit_null": True,
        },
    ]
    rows = Attribute(name="Lines", type="rows", columns=columns)
    # Keys in the order of the columns, null for none.
    text = value_text(rows, [{"No": 20, "Item": "a"}, {"Item": "b"}])
    assert text == ' [{"Item": "a", "No": 20}, {"Item": "b", "No": null}]'
    automaton = automaton_of(rows)
    assert automaton.ended(reduce(automaton.next, text, 0))
    for bad in (["a"], [{"Item": "a", "No": "two"}], {"Item": "a"}):
        with pytest.raises(Skip):
            value_text(rows, bad)
    record = record_of(
        Category(attributes=[rows]), {"Lines": [{"Item": None, "No": 2}, {"Item": "b", "No": None}]}
    )
    assert record == {"Lines": [{"Item": None, "No": 2}, {"Item": "b"}]}


def test_an_enum_of_ten_thousand_values() -> None:
    values = [f"kind {i * 7919 % 100000} of things" for i in range(10_000)]
    rules = Grammar(
        automaton_of(
            Attribute(
                name="a",
                type="enum",
                values=values,
            )
        ),
        Vocabulary(BYTES),
    )
    assert rules.needed() <= len(max(values, key=len)) + 2
    text, _, closed = drawn(rules, 30, random.Random(1))
    assert closed
    assert json.loads(text) in [*values, None]


@pytest.mark.parametrize(("pattern", "ascii"), [(r"\d", True), (r"[\d]", True), (r"(?u)\d", False)])
def test_digits_of_a_pattern_are_ascii_unless_it_says_otherwise(pattern: str, ascii: bool) -> None:
    rules = Grammar(
        automaton_of(
            Attribute(
                name="a",
                type="pattern",
                pattern=pattern,
            )
        ),
        Vocabulary(BYTES),
    )
    quote, devanagari, *_ = [BYTES.index(char) for char in '"१'.encode().decode("latin-1")]
    allowed = {*Bounded(rules, 8).allowed_token_ids([quote]).ids}  # type: ignore[union-attr]
    assert (devanagari in allowed) == (not ascii)
    assert (allowed == {*map(ord, "0123456789")}) == ascii


def test_patterns_that_cannot_be_decoded_say_why() -> None:
    for pattern, words in (
        ("(?=a)b", "cannot be decoded"),
        ('a"b', "cannot be decoded"),
        (r"\w{1,64}", "takes too long to compile"),
    ):
        with pytest.raises(ValueError, match=words):
            automaton_of(Attribute(name="a", type="pattern", pattern=pattern))
    optional = Attribute(name="a", type="pattern", pattern="a(bcdefgh)?")
    assert Grammar(automaton_of(optional), Vocabulary(BYTES)).needed() == len('"abcdefgh"')


@pytest.mark.parametrize(
    "pattern",
    [
        "(((a{1,100}){1,100}){1,100}){1,100}",
        pytest.param("(.*a.{20,30}){5}", marks=pytest.mark.slow),
    ],
)
def test_a_pattern_that_explodes_is_refused_in_seconds_and_takes_no_memory_here(
    pattern: str,
) -> None:
    """Its index takes 6.6 GB, or 40 s in which no signal is heard."""
    config = run_config(
        extraction(
            c=[
                {
                    "name": "a",
                    "type": "pattern",
                    "pattern": pattern,
                }
            ]
        )
    )
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError, match=r"^task\.categories\.c: 'a': .* takes too long to compile"
    ):
        build_task(config, tiny_tokenizer(), CONTEXT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200_000  # KiB


@pytest.mark.parametrize("name", ["count", "sku", "day", "colors", "tags", "numbers", "maybe"])
def test_a_label_is_learned_as_it_is_decoded(name: str) -> None:
    attribute = next(a for a in ATTRIBUTES if a.name == name)
    good = {
        "count": 1200,
        "sku": "AB123ä",
        "day": "2024-02-29",
        "colors": ["red"],
        "tags": ['a "b"', "c"],
        "numbers": [1.5, 2],
        "maybe": None,
    }[name]
    rules = Bounded(grammar(name, merged=True), 40)
    tokens: list[int] = []
    for byte in value_text(attribute, good).encode():
        assert not rules.stops(tokens)
        allowed = rules.allowed_token_ids(tokens)
        assert allowed is None or byte in allowed.ids
        tokens.append(byte)
        if good is None and rules.stops(tokens):
            return
    assert rules.stops(tokens)
    assert check(attribute, bytes(tokens).decode()).value == good
    for bad in ("?" if not attribute.many else ["?", 1], {"a": 1}, *[None] * attribute.required):
        with pytest.raises(Skip):
            value_text(attribute, bad)


def test_labels_are_found_by_path_and_flat_name_and_values_where_they_stand() -> None:
    attribute = Attribute(name="a.b", path=["a", "b"])
    assert value_in({"a": {"b": "x"}}, attribute) == value_in({"a.b": "x"}, attribute) == "x"
    assert value_in({"a": None}, attribute) is None
    wanted = {
        "red wine": (18, 26, True),
        "Red Wine": (8, 16, False),
        "acme": (36, 40, False),
        "blue": None,
        "red": (18, 21, True),
    }  # the word, not the end of "Shared"
    assert {
        value: find_span("Shared  RED\nWine, red wine and red. ACME x", value) for value in wanted
    } == wanted
    assert find_span("a+b", "a+b") == (0, 3, True)


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (24, "Battery: 24 h", ("24", True)),
        (1299, "for $1,299.00 only", ("1,299.00", False)),
        (1299.5, "1.299,50 €", ("1.299,50", False)),
        (54000, "54k to 60k", ("54k", False)),
        (54, "54k", ("54", True)),
        (-5, "down to \u22125 degrees", ("5", False)),
        (72.1, "72.10 dollars", ("72.10", False)),
        (7, "17 or 27, then 7", ("7", True)),
        (2, "two of them", None),
        (2000, "Competitive pay", None),
        (9, "90", None),
    ],
)
def test_the_span_of_a_number_is_where_the_text_has_it_in_any_notation(number, text, expected):
    columns = span_of(number, text, 100, "")
    span = columns["span"]
    if expected is None:
        assert columns == {"span": None, "span_exact": None}
        return
    assert (text[span["begin"] - 100 : span["end"] - 100], columns["span_exact"]) == expected


@pytest.mark.parametrize("value", [True, None, [24], {"a": 24}])
def test_values_that_are_neither_texts_nor_numbers_have_no_span(value):
    assert span_of(value, "24 True", 0, "") == {"span": None, "span_exact": None}


def next_state(state: int, byte: int) -> int:
    return DEAD if state == DEAD else AUTOMATON.next(state, chr(byte))


def state_behind(text: str) -> int:
    return reduce(next_state, text.encode(), 0)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans(), st.booleans())
def test_reads_every_object_and_nothing_behind_it(
    value: dict[str, object], ascii: bool, blanks: bool
) -> None:
    text = json.dumps(
        value,
        ensure_ascii=ascii,
        separators=None if blanks else (",", ":"),
    )
    *before, state = accumulate(text.encode(), next_state, initial=0)
    assert AUTOMATON.ended(state)
    assert all(AUTOMATON.next(state, char) == DEAD for char in '}] ,\n"0')
    assert not any(AUTOMATON.ended(earlier) for earlier in before)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        " {}",
        "{ }",
        "{,}",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a":[1,]}',
        '{"a":01}',
        '{"a":+1}',
        '{"a":.5}',
        '{"a":1.}',
        '{"a":1e}',
        '{"a":"\\x"}',
        '{"a":"\n"}',
        '{"a":nul}',
        '{"a":[}',
        '{"a":[1}',
        '{"a":{]',
        "{a:1}",
        '{"a":1  ',
        '{"a":\\u12',
    ],
)
def test_reads_nothing_that_is_no_json(text: str) -> None:
    assert state_behind(text) == DEAD


def counted_passes(engine: Engine, programs):
    """Answers, and how many passes each took."""
    for number, program in enumerate(programs):
        engine.submit(program, tag=number)
    done = []
    while engine.pending:
        done += engine.step()
    done.sort(key=lambda one: one.tag)
    return [one.answer for one in done], [one.counts.steps for one in done]


def test_json_of_a_schema_is_what_the_unmodified_model_writes_token_by_token() -> None:
    model, stock = pair("llama")
    tokenizer = tiny_tokenizer()
    pattern = build_regex_from_schema(json.dumps(WOOD), "[ ]?")
    rules = Bounded(Grammar(json_object(pattern), vocabulary_of(tokenizer)), 60)

    def allowed(tokens):
        return AllowedTokens(rules.allowed_token_ids(tokens).ids)

    prompts = [tokens_of(random.Random(seed), 5, 20) for seed in range(4)]
    programs = [
        autoregressive(
            Prompt(prompt), 60, rules.stops, rules.allowed_token_ids, forced=rules.forced
        )
        for prompt in prompts
    ]
    answers, passes = counted_passes(Engine(model, max_num_seqs=2), programs)
    for prompt, found, steps in zip(prompts, answers, passes, strict=True):
        agree(
            reference.autoregressive(stock, prompt, 60, rules.stops, allowed),
            found.tokens,
            found.logprobs,
        )
        assert json.loads(tokenizer.decode(found.tokens)).keys() == {"size", "wood"}
        assert steps < len(found.tokens) - 6  # at least the keys' letters


class Unforced(Grammar):
    def forced(self, state: int, remaining: int | None) -> list[int]:
        return []


def test_guided_values_are_the_same_with_and_without() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer())
    found = []
    for kind in (Unforced, Grammar):
        grammars = [kind(automaton_of(one), vocabulary) for one in FORCED]
        rng = random.Random(7)
        prompts = []
        for _ in range(5):
            tokens = tokens_of(rng, 20, 40)
            ends = sorted(rng.sample(range(10, len(tokens)), len(grammars)))
            prompts.append(
                SlottedPrompt(tokens, [Slot(*one) for one in zip(ends, grammars, strict=True)])
            )
        found.append(
            counted_passes(Engine(pair("llama")[0]), [guided(prompt, 40) for prompt in prompts])
        )
    (without, most), (forced, fewer) = found
    for mine, theirs in zip(chain(*without), chain(*forced), strict=True):
        assert theirs.tokens == mine.tokens
        assert theirs.closed
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-3)
    # "-", "/", `"`; "tainless ".
    assert all(less <= more - 12 for less, more in zip(fewer, most, strict=True))


def longest(text: str) -> list[int]:
    """The longest tokens from the left; of a text that ends within a character, up to it."""
    text = text.encode("latin-1").decode(errors="ignore").encode().decode("latin-1")
    tokens: list[int] = []
    while text:
        tokens.append(
            max(
                (i for i, one in enumerate(TEXTS) if text.startswith(one)),
                key=lambda i: len(TEXTS[i]),
            )
        )
        text = text[len(TEXTS[tokens[-1]]) :]
    return tokens


VOCABULARY = Vocabulary(TEXTS, longest)


CHOICE = Grammar(OneOf(['"dabca"', '"dabcd"', '"bd"']), VOCABULARY)
DADB = Grammar(one_of(["dadb", "dadc"]), VOCABULARY)
MAY_END = Grammar(
    automaton_of(
        Attribute(
            name="a",
            type="pattern",
            pattern="da(da)?",
            required=True,
        )
    ),
    VOCABULARY,
)


@pytest.mark.parametrize(
    ("grammar", "said", "left", "forced"),
    [
        (Grammar(one_of(["dabcd", "dabca"]), VOCABULARY), [], 20, ["d", "abc"]),
        # The last token is the model's where a longer one may stand: "abc" in place of "ab".
        (Grammar(one_of(["dabcd", "dabba"]), VOCABULARY), [], 20, ["d"]),
        (Grammar(one_of(["dab"]), VOCABULARY), [], 20, ["d", "ab"]),  # behind its end nothing comes
        (Grammar(one_of(["dab"]), Vocabulary(TEXTS)), [], 20, []),  # nothing that writes it
        # Up to a cut within a character.
        (Grammar(one_of(["d\xc3\xa9", "d\xc3\xa8"]), VOCABULARY), [], 20, ["d"]),
        # A value is forced up to where two part, or one is clear; a blank may stand before it.
        (CHOICE, [], 20, []),
        (CHOICE, ['"'], 20, []),
        (CHOICE, ['"', "d"], 20, ["abc"]),
        (CHOICE, ['"', "d", "abc"], 20, []),
        (CHOICE, ['"', "b"], 20, []),
        # It leaves room for the rest, and a value that may end is not forced on.
        (DADB, [], 4, ["d", "a", "d"]),
        (DADB, [], 3, []),
        (MAY_END, ['"'], 20, ["d", "a"]),
        (MAY_END, ['"', "d", "a"], 20, []),
    ],
)
def test_what_is_forced(grammar: Grammar, said: list[str], left: int, forced: list[str]) -> None:
    state = 0
    for text in said:
        state = grammar.advance(state, TEXTS.index(text))
    assert [TEXTS[token] for token in grammar.forced(state, left)] == forced


@pytest.mark.parametrize(
    ("keys", "fitting", "others"),
    [
        (
            {"type": "date", "pattern": "2024-.*|.*-01"},
            ["2024-02-29", "2023-05-01"],
            ["2023-05-02", "2024-13-01", "2023-02-29"],
        ),
        ({"type": "pattern", "pattern": "^S$|^M$"}, ["S", "M"], ["SM", "S$", "^M"]),
        ({"type": "pattern", "pattern": "SKU-(?s:.*)"}, ["SKU-", "SKU-88213"], ["SK", "x SKU-1"]),
    ],
)
def test_a_slot_takes_what_its_pattern_and_its_format_permit(
    keys: dict, fitting: list[str], others: list[str]
) -> None:
    automaton = automaton_of(Attribute(name="a", required=True, **keys))
    for value in fitting + others:
        state = 0
        for char in f'"{value}"':
            if state != DEAD:
                state = automaton.next(state, char)
        assert (state != DEAD and automaton.ended(state)) == (value in fitting), value


def test_a_pattern_that_no_date_matches_is_refused() -> None:
    attribute = Attribute(name="a", type="date", pattern="SKU-.*")
    with pytest.raises(ValueError, match="no text matches both the format and the pattern"):
        automaton_of(attribute)
