"""Typed, checked values from decoded text; numbers as documents write them: read whole or flagged,
never cut short.
"""

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from raypd.config import ModelConfig
from raypd.decoding.automata import DEAD
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Grammar
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.value_automata import UNIT_BYTES, Number
from raypd.decoding.vocabulary import Vocabulary
from raypd.errors import ModelError
from raypd.models.load import load_tokenizer
from raypd.models.vocabulary import token_bytes
from raypd.schema import Attribute
from raypd.tasks.values import JsonObjectEnd, check, find_value
from tests.decoding.drivers import changed
from tests.tasks.test_extraction import CONTEXT, document, make
from tests.tiny import EOS, tiny_model, tiny_tokenizer

TEXT = Attribute(name="a")
TEXTS = Attribute(name="a", many=True)
ROWS = Attribute(
    name="a",
    type="rows",
    columns=[{"name": "a"}],
)
PRICES = Attribute(name="a", type="number", many=True)
NUMBER = Attribute(name="a", type="number")
INTEGER = Attribute(name="a", type="integer")
BOOLEAN = Attribute(name="a", type="boolean")
ENUM = Attribute(
    name="a",
    type="enum",
    values=["red", "Red wine", "größe"],
)
WATTS = Attribute(
    name="a",
    type="enum",
    values=["mW", "MW"],
)
NBSP = "\u00a0"
THIN = "\u2009"
NARROW = "\u202f"
COPIED = [
    "1,000",
    "-1,000.5",
    "7/8",
    "1-2",
    "<5",
    ">= 5",
    "~5",
    "≈5",
    "±5",
    "\u22125",
    "12 in",
    "99%",
    "25 °C",
    "1e5",
    "1 000",
    f"1{NARROW}000",
    "3,5",
    "1.000,5",
    "$1,299.00",
    "€5",
    "½",
    "1½",
    "5 x 3",
    "10 W / 12 W",
    '15.6"',
    "2700K",
    "10 кг",
    "1.299,-",
    "1.299,\u2013 €",
]
# what texts are drawn of: pieces that make numbers, near numbers, units and ends
PIECES = [
    *"0123456789",
    "000",
    "25",
    ",",
    ",",
    ".",
    " ",
    "/",
    "-",
    "'",
    '"',
    "\\",
    "<",
    "~",
    "e",
    "E",
    "x",
    "k",
    "½",
    "²",
    "%",
    "€",
    "$",
    "\u2212",
    "\u2013",
    NBSP,
    NARROW,
    " in",
    " kg",
    " million",
    "万",
    "\u0661",
    "}",
    "\n",
    ", ",
    "null",
    "(",
    ":",
]
SIZES = {"shoes": {"attributes": [{"name": "Size", "type": "number"}]}}
SAID = [
    ("1,000,\n", "ok", 1000),
    ("1,000", "ok", 1000),
    ("7,\n", "ok", 7),
    ("1,000 mAh,\n", "ok", 1000),
    ("1.299,-\n", "ok", 1299),
    ("1.299,\u2013}", "ok", 1299),
    ("7/8,\n", "ambiguous", None),
    ("1-2\n", "ambiguous", None),
    ("<5,\n", "ambiguous", None),
    ("12 in\n", "ok", 12),
    ("5 x 3}", "ambiguous", None),
    ("3,5,\n", "ok", 3.5),
    ("1e5,\n", "ok", 100000.0),
    (f"1{NARROW}000,\n", "ok", 1000),
    ("€ 5,\n", "ok", 5),
    ("123456789012345678901234567890", "truncated", None),
    ("null,\n", "null", None),
]


@pytest.mark.parametrize(
    ("attribute", "text", "status", "value"),
    [
        (TEXT, ' "Florsheim",\n', "ok", "Florsheim"),
        (TEXT, ' "15.6\\" screen"', "ok", '15.6" screen'),
        (TEXT, ' "C:\\dir"', "ok", "C:\\dir"),  # \d is no JSON escape: kept as it is written
        (TEXT, ' "caf\\u00e9"', "ok", "café"),
        (TEXT, ' "cut by the line\n', "ok", "cut by the line"),
        (TEXT, ' "ends with a \\"', "ok", 'ends with a "'),
        # An escape that JSON does not know disables no other.
        (TEXT, ' "say \\"hi\\" in C:\\dir\\u00e9"', "ok", 'say "hi" in C:\\diré'),
        (TEXT, ' "$\\frac{1}{2}$ \\alpha \\beta\\n"', "ok", "$\\frac{1}{2}$ \\alpha \\beta"),
        (TEXT, ' "a\\/b\\\\n \\u12 \\uzzzz"', "ok", "a/b\\n \\u12 \\uzzzz"),
        # Half of a surrogate pair is no text; a whole pair is.
        (TEXT, ' "emoji \\ud83d"', "ok", "emoji"),
        (TEXT, ' "\\ude00 a\\ud83db"', "ok", "ab"),
        (TEXT, ' "\\ud83d\\ude00!"', "ok", "\U0001f600!"),
        (TEXT, ' "cut by the line: \\u00e9\\u00\n', "ok", "cut by the line: é"),
        (TEXTS, ' ["C:\\dir", "b\\u00e9", "x\\ud83d"]', "ok", ["C:\\dir", "bé", "x"]),
        (TEXTS, ' ["C:\\dir", "b"', "truncated", ["C:\\dir", "b"]),
        (TEXTS, ' ["a]", 1.50, true, null, "b"] and', "ok", ["a]", "1.50", "true", "b"]),
        (TEXTS, " [red]", "invalid", None),
        (PRICES, " [1.5, -2, 3 kg]", "ok", [1.5, -2, 3]),
        (PRICES, " [192.168.100.200]", "invalid", None),
        (PRICES, " [192.168.100.200", "truncated", []),
        (PRICES, " [7, 1.299,- EUR, 5]", "ok", [7, 1299, 5]),
        (PRICES, " [7, 1.299,-", "truncated", [7]),
        (ROWS, ' [{"a": "C:\\dir \\u00e9"}, {"a": "cut', "truncated", [{"a": "C:\\dir é"}]),
        (TEXT, " null", "null", None),
        (TEXT, ' "null"', "null", None),
        (TEXT, ' ""', "null", None),
        (TEXT, ' "N/A"', "null", None),
        (TEXT, " 42", "ok", "42"),
        (TEXT, " true,", "ok", "true"),
        (TEXT, " oops", "invalid", None),
        (TEXT, ' ["a"]', "invalid", None),
        (TEXT, "", "invalid", None),
        (TEXT, " 7/8,\n", "ok", "7/8"),
        (TEXT, " 1,000,\n", "ok", "1,000"),
        (TEXT, " 1.50,\n", "ok", "1.50"),
        (TEXT, " 12 in,\n", "ok", "12 in"),
        (NUMBER, ' "7.5"', "ok", 7.5),
        (NUMBER, " true", "invalid", None),
        (NUMBER, " null", "null", None),
        (BOOLEAN, " false", "ok", False),
        (BOOLEAN, ' "Yes"', "ok", True),
        (BOOLEAN, ' "maybe"', "invalid", None),
        (ENUM, ' "RED"', "ok", "red"),
        (ENUM, ' "red wine"', "ok", "Red wine"),
        (ENUM, ' "größe"', "ok", "größe"),
        (ENUM, ' "blue"', "invalid", None),
        (WATTS, ' "MW"', "ok", "MW"),
        (WATTS, ' "mw"', "invalid", None),
    ],
)
def test_check(attribute, text, status, value):
    checked = check(attribute, text)
    assert checked.status == status
    assert checked.value == value
    assert type(checked.value) is type(value)


def test_a_text_that_was_cut_is_kept_and_a_number_is_no_value():
    checked = check(TEXT, ' "a very long', closed=False)
    assert checked.status == "truncated"
    assert checked.value == "a very long"
    for text in (" 12", ' "1,0', ' "12 k', " 1,", " 7"):
        checked = check(NUMBER, text, closed=False)
        assert checked.status == "truncated"
        assert checked.value is None
        assert checked.raw == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('He said \\"matte bl', 'He said "matte bl'),
        ("mat\\u00e9 and ver\\u00", "maté and ver"),
        ("ver\\u", "ver"),
        ("ver\\", "ver"),
        ("C:\\\\", "C:\\"),
        ("C:\\\\\\u0", "C:\\"),
        ("smile \\ud83d\\ude0", "smile"),
        ("smile \\ud83d", "smile"),
        ("C:\\dir \\u00e9\\t|", "C:\\dir é\t|"),
        # Half a character of UTF-8.
        ("caf\ufffd", "caf"),
    ],
)
def test_a_text_that_was_cut_is_decoded_and_half_an_escape_dropped(text, value):
    checked = check(TEXT, f'"{text}', closed=False)
    assert checked.status == "truncated"
    assert checked.value == value


@pytest.mark.parametrize(
    ("text", "closed", "read"),
    [
        (" Nike\n", True, ("ok", "Nike")),
        ("\n", True, ("null", None)),
        (" null\n", True, ("null", None)),
        (' 15" {x}, \\d\n', True, ("ok", '15" {x}, \\d')),
        (" one\n two", True, ("ok", "one")),
        (" one\x02two\x1f\n", True, ("ok", "one two")),
        ("\x02\n", True, ("null", None)),
        (' "Nike', False, ("truncated", '"Nike')),
        ("", False, ("null", None)),
    ],
)
def test_a_text_without_quotes(text, closed, read):
    checked = check(TEXT, text, closed, bare=True)
    assert (checked.status, checked.value) == read
    # As `raypd review` reads what was unsure.
    assert check(TEXT, checked.raw, closed).value == checked.value


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ('"a": "x, y", "b": 2}', "a", ('"x, y"', True)),
        ('"a": "x", "b": 2}', "b", ("2", True)),
        ('"a" : null\n}', "a", ("null", True)),
        ('"A": 1,', "a", ("1", True)),
        ('"a": 1,000,\n"b": 2', "a", ("1,000", True)),
        ('"a": 12, 15}', "a", ("12, 15", True)),
        ('"a": 1, "b": 2}', "a", ("1", True)),
        ('"a": "cut', "a", ('"cut', False)),
        ('"a": 12', "a", ("12", False)),
        ('"b": 1', "a", None),
        ('"größe": "xl"', "größe", ('"xl"', True)),
        (r'"gr\u00f6\u00dfe": "xl"', "größe", ('"xl"', True)),
        ('"a": ["x]", [1], "y"] , "b": 2', "a", ('["x]", [1], "y"]', True)),
        ('"a": ["x]", "y', "a", ('["x]", "y', False)),
        ('"a": 1.299,- EUR}', "a", ("1.299,- EUR", True)),
        ('"a": 1.299,\u2013}', "a", ("1.299,\u2013", True)),
        ('"a.c": 1', "abc", None),
        ('"n": "[", "rows": [{"total": 3}, {"total": 4}], "total": 7}', "total", ("7", True)),
        ('{"rows": [{"total": 3}]}', "total", None),
        ('{"a": {"b": 1}, "b": 2}', "b", ("2", True)),
        ('"model_name": "x"', "Model name", ('"x"', True)),
        ('"a", "b": 1', "a b", None),
        ('"C": 1', "C++", None),
    ],
)
def test_find_value_in_an_autoregressive_answer(text, name, found):
    place = find_value(text, name)
    assert (place if place is None else (text[place[0] : place[1]], place[2])) == found


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('"a": 1}', -1),
        ('"a": "}"', None),
        ('"a": "\\"}"', None),
        ('"a": {"b": 1}', None),
        ('"a": {"b": 1}}', -1),
        ('"a": "not closed\n}', -1),
        ('"x": "not closed\n"x": 1', '"x":'),
        ('"a": {"b": 1, "b": 2}', None),  # a key of an inner object is none of ours
        ('"a": 1, "x": "a:b", "c": 3, "a": 4, "y": 5', '"a":'),
        ('"a": 1,\n"B": 2,\n"c": 3', "2,\n"),  # the number could go on behind its comma
        ('"b": "x", "a": 2, "c": 3', "2, "),
        ('"b": "x", "a": 1,000, "c": 3', "1,000, "),
        ('"b": "x", "a": 1,000}', -1),
        ('"b": "x", "a": 1.299,-, "c": 3', "1.299,-,"),
        ('"a": 1,000,"b": 3,"c": 4', '3,"'),
        ('"b": 1, "A": "x", "more": 2', '"x",'),
        ('"b_": 1, "A": "x", "more": 2', '"x",'),
        ('"c": 1, "c++": 2, "d": 3', None),
        ('"b": 1, "A": "x, y", "more": 2', '"x, y",'),
        ("\x00", -1),
    ],
)
def test_the_end_of_a_json_object(text, end):
    """`end` is what the answer ends with, the last time it stands there; -1 is its last character,
    and None means that the answer goes on.
    """
    stops = JsonObjectEnd([chr(i) for i in range(128)], frozenset([0]), ["a", "b"])
    tokens = [*map(ord, text)]
    stopped = next((n for n in range(1, len(tokens) + 1) if stops(tokens[:n])), None)
    if end is None:
        assert stopped is None
    elif end == -1:
        assert stopped == len(text)
    else:
        assert stopped == text.rindex(end) + len(end)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-15.60", -15.6),
        ("0" * 5000 + "12 kg", 12),
        ("5\u200b", 5),
        ("\ufeff1\u00ad000", 1000),
        ("+5", 5),
        ("\u22125", -5),
        ("007", 7),
        ("-00.5", -0.5),
        (".5", 0.5),
        ("3.", 3.0),
        ("12345678901234567", 12345678901234567),
        # thousands
        ("1,000", 1000),
        ("1,234", 1234),
        ("1,000,000", 1000000),
        ("1,000.50", 1000.5),
        ("1.000.000", 1000000),
        ("1.000,50", 1000.5),
        ("12,34,567", 1234567),
        ("1 000", 1000),
        (f"1{NBSP}000", 1000),
        (f"12{NARROW}500{NARROW}000", 12500000),
        (f"1{THIN}000,5", 1000.5),
        ("1'000", 1000),
        ("-1,000", -1000),
        # decimal commas
        ("3,5", 3.5),
        ("1,00", 1.0),
        ("0,125", 0.125),
        ("3,1416", 3.1416),
        ("1.000", 1.0),
        # exponents
        ("1e5", 100000.0),
        ("1.5E-3", 0.0015),
        # units and currencies
        ("12 in", 12),
        ("5 kg", 5),
        ("1,000 mAh", 1000),
        ("2700K", 2700),
        ("99%", 99),
        ("25 °C", 25),
        ('15.6"', 15.6),
        ("40-inch", 40),
        ("12 km/h", 12),
        ("5 m²", 5),
        ("12 V DC", 12),
        ("$1,299.00", 1299.0),
        ("€ 5", 5),
        ("5 €", 5),
        ("~20 l", 20),
        ("USD 5", 5),
        ("CHF 1'299.00", 1299.0),
        ("CHF 1\u2019299.00", 1299.0),
        ("1\u00b4299.00", 1299.0),
        ("US$ 1,299", 1299),
        ("R$ 1.299,90", 1299.9),
        ("zł 1 299,99", 1299.99),
        ("1.299,00 kr", 1299.0),
        ("3,50 Kč", 3.5),
        ("1.000.000.000", 1000000000),
        ("1.100.200.250 EUR", 1100200250),
        ("+12 500 000 €", 12500000),
        # a dash in place of cents
        ("1.299,-", 1299),
        ("1.299,--", 1299),
        ("1.299,\u2013 €", 1299),
        ("1.299,\u2014", 1299),
        ("€ 1.299,-", 1299),
        ("EUR 1.299,-", 1299),
        ("1.299,- EUR", 1299),
        ("1.299.-", 1299),
        ("1'299.--", 1299),
        ("Fr. 1299.-", 1299),
        ("1 299,-", 1299),
        (f"1{NBSP}299:-", 1299),
        ("Rs. 1,299/-", 1299),
        ("₹1,29,999/-", 129999),
        ("kr 5,-", 5),
        ("1.299.000,-", 1299000),
        ("ca. 340 g", 340),
        # other scripts
        ("١٢٣", 123),
        ("\uff11\uff12", 12),
    ],
)
def test_a_number_is_read_whole(text, value):
    for written in (json.dumps(text), f" {json.dumps(text, ensure_ascii=False)},\n"):
        checked = check(NUMBER, written)
        assert checked.status == "ok"
        assert checked.value == value
        assert type(checked.value) is type(value)
    # The page of a review says nothing against a label that is read.
    assert re.fullmatch(NUMBER.value_type.label_pattern(), text)
    if value == int(value):
        assert check(INTEGER, json.dumps(text)).status == "ok"
        assert re.fullmatch(INTEGER.value_type.label_pattern(), text)
    # A word begins no number where quotes are left out, but for a currency's code.
    if not re.match(r"ca\.|US\$|R\$|zł|Fr|Rs|kr", text):
        for written in (text, f" {text},\n", f" {text}}}", f'{text}, "b": 2'):
            checked = check(NUMBER, written)
            assert checked.status == "ok"
            assert checked.value == value


@pytest.mark.parametrize(
    "text",
    [
        "7/8",
        "1 1/2",
        "½",
        "1½",
        "1-2",
        "1\u20132",
        "10 to 12",
        "±5",
        "<5",
        "≥ 5",
        "5+",
        "up to 5",
        "5 x 3",
        "2x",
        "5'10\"",
        '12" x 15"',
        "10 W / 12 W",
        "40 h, 20 h",
        "12, 15",
        "10:30",
        "- 5",
        "--5",
        "2024-01-05",
        "12.05.2024",
        "1,000,5",
        "1,0,0",
        "1234,567",
        "0 123",
        "1 00",
        "1_000",
        "5-",
        "10²",
        "5e",
        "54k to 60k",
        "54k-60k",
        "54,000 to 60,000",
        "54 bis 60",
        "54 000 \u2013 60 000",
        "between 3 and 5",
        "zwischen 3 und 5",
        "10\u201312 %",
        "10 %\u201312 %",
        "5 to ten",
        "5 or more",
        "5 max",
        "10 W maximum",
        "5 million",
        "5 Mio.",
        "5k",
        "5M",
        "5万",
        "2 dozen",
        "1 and a half",
        "1st",
        # prices that may have thousands or decimals
        "1.299 €",
        "$1.299",
        "1.299 kr",
        "1.5,-",
        "1e5,-",
        "5.-3",
        # addresses
        "192.168.100.200",
        "10.0.0.1",
        "1.100.200.250",
        "192.168.100.200:8080",
        "192.168.100.0/24",
        # versions
        "1.2.3",
        "120.0.6099.109",
        "2.0-beta",
        "2.0rc1",
        "20.04 LTS",
        # dates and times
        "12.05.",
        "01.02",
        "05.2024",
        "5 May",
        "5. Mai 2024",
        "3 März",
        "5 pm",
        "17 Uhr",
        "500 BC",
        # phone numbers
        "+49 171 123 456",
        "+491711234567",
        "01711234567",
        "0171 123 456",
        "+1 555 123 4567",
        "555-1234",
        "Pack of 4",
        "40 " + "h" * UNIT_BYTES,
    ],
)
def test_what_is_not_surely_one_number_is_flagged(text):
    checked = check(NUMBER, json.dumps(text, ensure_ascii=False))
    assert checked.status == "ambiguous"
    assert checked.value is None
    assert json.loads(checked.raw) == text
    if text in ("7/8", "1-2", "<5", "½", "5 x 3", "12, 15"):  # quotes may be left out
        checked = check(NUMBER, f" {text}}}")
        assert checked.status == "ambiguous"
        assert checked.value is None
        assert text in checked.raw


@pytest.mark.parametrize(
    "text", ["five", '"five"', "true", "NaN", "Infinity", "1" + "0" * 400, "1e999", "1e-999", "[5]"]
)
def test_what_is_no_number_at_all_is_invalid(text):
    assert check(NUMBER, text).status == "invalid"
    assert check(NUMBER, text).value is None


@cache
def with_grammar(vocabulary: str):
    """(tokenizer, grammar); of the model that comes along, or of bytes."""
    try:
        tokenizer = load_tokenizer(ModelConfig()) if vocabulary == "embedded" else tiny_tokenizer()
    except ModelError as error:
        pytest.skip(str(error))
    return tokenizer, Grammar(
        Number(), Vocabulary([token.decode("latin-1") for token in token_bytes(tokenizer)])
    )


@pytest.mark.parametrize("text", COPIED)
@pytest.mark.parametrize("vocabulary", ["bytes", "embedded"])
def test_what_a_model_copies_can_be_written_whole(text, vocabulary):
    tokenizer, grammar = with_grammar(vocabulary)
    for written in (text, " " + text):
        state = 0
        for n, token in enumerate(tokenizer.encode(written, add_special_tokens=False)):
            allowed = grammar.allowed(state, 30 - n)
            assert allowed is None or token in allowed.ids
            state = grammar.advance(state, token)
            assert not grammar.done(state)
        assert grammar.automaton.accepting(state)
        for end in ["\n", "}"] if text[-1].isnumeric() else ["\n", "}", ","]:
            (token,) = tokenizer.encode(end, add_special_tokens=False)
            assert grammar.done(grammar.advance(state, token))


@pytest.mark.parametrize(
    ("texts", "done"),
    [
        (["1", ","], False),
        (["1", ",", "0"], False),
        (["1", ",", "\n"], True),
        (["1", ",", '"'], True),
        (["1", ",", " "], True),
        (["1", ",\n"], True),
        (["1", ',"'], True),
        (["1", ", "], True),
        (["1", ",0"], False),
        (["1", " in", ","], True),
        (["1", ""], True),
        (["1", ",", ""], True),  # "" is an end token
        (["1", " in" * 8], False),  # 24 bytes behind the last digit
        (["1", " in" * 8, " "], True),
        (["1", " in" * 8, "0"], False),
    ],
)
def test_where_a_number_ends(texts, done):
    vocabulary = sorted(set(texts) | {"0"})
    grammar = Grammar(Number(), Vocabulary(vocabulary))
    state = 0
    for text in texts:
        assert not grammar.done(state)
        state = grammar.advance(state, vocabulary.index(text))
    assert state != DEAD
    assert grammar.done(state) == done


def test_before_its_first_digit_a_number_is_held_to_its_beginning():
    _, grammar = with_grammar("bytes")

    def allowed(said: str, left: int) -> set[str]:
        return {
            chr(i) for i in grammar.allowed(grammar.advance(0, ord(said)) if said else 0, left).ids
        }

    assert allowed("", 30) == allowed("", 2) == set("0123456789+-.<>=~$n \xc2\xe2")
    assert allowed("", 1) == set("0123456789n")
    assert allowed("-", 1) == set("0123456789")
    assert allowed(" ", 30) == allowed("", 30) - {" "}  # one at the most
    assert not grammar.automaton.accepting(grammar.advance(0, ord("<")))
    assert grammar.allowed(grammar.advance(0, ord("7")), 1) is None
    assert grammar.needed() == with_grammar("embedded")[1].needed() == 2  # a digit and what ends it


@pytest.mark.parametrize(
    ("tokens", "behind", "rest"),
    [
        (["7", ",\n"], 0, ""),
        (["7", ",", "\n"], 1, ""),
        (["1", ",", "0", ",", '"'], 1, ""),
        (["7,", '"'], 1, "7"),
        (["7", " in", ","], 0, ""),
        (["7", "/", "8"], 0, "8"),
        (["7", ""], 0, ""),
        (["n"], 0, "null"),
        ([" ", "n"], 0, "null"),
        (["7", " in"], 0, " in"),
        ([" 7", ".", "25", "\n"], 0, ""),
    ],
)
def test_what_is_left_of_a_number_for_the_text_behind_it(tokens, behind, rest):
    vocabulary = sorted(set(tokens))
    grammar = Grammar(Number(), Vocabulary(vocabulary))
    ids = [vocabulary.index(token) for token in tokens]
    assert grammar.behind(ids) == behind
    assert grammar.remainder(ids) == rest


def carries(text: str, number: float) -> bool:
    """Whether a number has all digits of a text, leading zeros aside, in their order."""
    mantissa, _, power = re.sub(r"[eE]([-+]?\d+)", r"@\1", text).partition("@")
    digits = "".join(re.findall(r"\d", mantissa))
    power = int(re.match(r"[-+]?\d+", power).group()) if power else 0
    return any(float(f"{digits}e{power - k}") == abs(number) for k in range(len(digits) + 1))


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=14))
def test_no_digit_is_dropped_of_what_the_automaton_reads(pieces):
    """Bytes that it does not read at the beginning are left out, as by the constraint; reading ends
    where it does.
    """
    number = Number()
    state = 0
    read = bytearray()
    for byte in "".join([*pieces, "\n"]).encode():
        after = number.next(state, chr(byte))
        if after == DEAD or number.ended(state) or number.completion(state):
            continue
        state = after
        read.append(byte)
    text = number.completion(state) or read.decode(errors="replace")
    checked = check(NUMBER, text, number.ended(state) or number.completion(state) is not None)
    if checked.status == "ok":
        assert number.ended(state)
        assert carries(text, checked.value)
    elif number.ended(state):
        # 1e999.
        assert checked.status == "ambiguous" or (
            checked.status == "invalid" and "e" in text.lower()
        )
        assert checked.raw == text


def says(program, text: str, heard: list[int]):
    """The program of one slot behind a model that wants to write `text` and then an end token,
    where it is let.
    """
    wanted = [*tiny_tokenizer().encode(text, add_special_tokens=False), EOS]

    def say(feed, predictions) -> None:
        assert len(feed.sample_at) == 1
        (allowed,) = feed.allowed_token_ids or [None]
        token = wanted[min(len(heard), len(wanted) - 1)]
        if allowed is None or token in allowed.ids:
            predictions.tokens[0] = token
        heard.extend(predictions.tokens)

    return changed(program, say)


@pytest.mark.parametrize("method", ["hyper_parallel", "guided", "autoregressive"])
@pytest.mark.parametrize(("text", "status", "value"), SAID)
def test_a_model_that_copies_is_let_and_read(method, text, status, value):
    task = make(
        task={"categories": SIZES},
        decoding={"method": method, "max_value_tokens": 20, "max_new_tokens": 28},
    )
    (request,) = task.plan([document(0)])
    written = '"Size": ' + text if method == "autoregressive" else " " + text
    heard = []
    engine = Engine(tiny_model("llama", max_position_embeddings=CONTEXT))
    (answer,) = engine.run([says(request.program, written, heard)])
    (record,) = request.finish(answer)
    (found,) = record.columns["values"]
    assert found["status"] == status
    assert record.columns["record"]["Size"] == value
    assert (found["raw"] is None) == (status not in ("ambiguous", "truncated"))
    if found["raw"] is not None:
        assert text.strip(",}\n")[:19] in found["raw"]
        assert found["value"] is found["number"] is None
    # Nothing was forced.
    assert written.startswith(tiny_tokenizer().decode(heard, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("text", "stopped", "status", "value"),
    [
        ('"Size": 12', True, "ok", 12),  # an end token stands behind it
        ('"Size": 12', False, "truncated", None),
        ('"Size": 12,', False, "truncated", None),
        ('"Size": 12, ', False, "truncated", None),
        ('"Size": 12\n', False, "ok", 12),
        ('"Size": 1,000}', True, "ok", 1000),
        ('"Size": "1,000', False, "truncated", None),
    ],
)
def test_an_answer_that_was_cut_cuts_no_number_short(text, stopped, status, value):
    (request,) = make(task={"categories": SIZES}, decoding={"method": "autoregressive"}).plan(
        [document(0)]
    )
    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
    (record,) = request.finish(Continuation(tokens, [-0.1] * len(tokens), stopped))
    (found,) = record.columns["values"]
    assert found["status"] == status
    assert found["number"] == value
