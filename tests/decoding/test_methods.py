"""Methods driven by a fake model in plain Python: no engine, no tensors; and every method has its
file.
"""

import dataclasses
from pkgutil import resolve_name

import pytest

from raypd.config import METHODS
from raypd.decoding.automata import OneOf
from raypd.decoding.grammar import Grammar
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt
from raypd.decoding.methods.registry import REGISTRY
from raypd.decoding.text import TextMethod
from raypd.decoding.value_automata import JsonString, Number
from raypd.decoding.vocabulary import Vocabulary
from tests.config.test_fingerprint import DECODING_KEYS
from tests.decoding.drivers import drive

TEXTS = [
    "",
    ' "',
    "red",
    " wine",
    '"',
    '",\n',
    "null",
    " null",
    "n",
    "ul",
    "l",
    "-",
    "1",
    "23",
    ".",
    ",",
    "\n",
    "\\",
    "blue",
    " ",
    "true",
    " false",
    " 7",
    "}",
    '"red"',
    "x",
]

ID = {text: i for i, text in enumerate(TEXTS)}
VOCABULARY = Vocabulary(TEXTS)


def say(*texts: str) -> list[int]:
    return [ID[text] for text in texts]


def test_guided_takes_back_the_comma_that_showed_the_end_of_a_number():
    number = Grammar(Number(), Vocabulary(TEXTS, say))
    prompt = SlottedPrompt(
        say("x", "x", ",", "x", ",", "x"), [Slot(end, number) for end in (1, 3, 5)]
    )
    said = say("1", ",", "\n", "1", ",", "23", "\n", "-", "1", "\n")
    left = iter(said)
    values, feeds = drive(guided(prompt, 9), lambda feed: [next(left)])
    cached = {}
    for feed in feeds:
        for index in feed.drop:
            assert cached.pop(index) == (3, ID[","])
        start = 1 + max(cached, default=-1) + len(feed.drop)
        cached |= {
            start + n: pair for n, pair in enumerate(zip(feed.positions, feed.tokens, strict=True))
        }
    assert [position for position, _ in cached.values()] == list(range(len(cached)))
    text = [TEXTS[token] for _, token in cached.values()]
    assert text == ["x", "x", "1", ",", "x", "1", ",", "23", ",", "x", "-", "1"]
    assert [value.tokens for value in values] == [said[:3], said[3:7], said[7:]]


def read(grammar: Grammar, tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        assert not grammar.done(state)
        state = grammar.advance(state, token)
    return state


def allowed(grammar: Grammar, *texts: str, left: int = 30) -> set[str] | None:
    tokens = grammar.allowed(read(grammar, say(*texts)), left)
    return None if tokens is None else {TEXTS[i] for i in tokens.ids}


@pytest.mark.parametrize(
    ("texts", "done", "completion"),
    [
        ([' "', "red"], False, None),
        ([' "', "red", '"'], True, None),
        ([' "', "red", '",\n'], True, None),
        ([' "', "red", "\n"], True, None),
        ([' "', "\\", '"'], False, None),
        (["n"], True, "null"),
        ([" null"], True, "null"),
        (['"red"'], True, None),
    ],
)
def test_text_ends_at_quote_newline_or_null(texts, done, completion):
    grammar = Grammar(JsonString(), VOCABULARY)
    state = read(grammar, say(*texts))
    assert grammar.done(state) == done
    assert grammar.completion(state) == completion


def test_text_is_limited_at_its_start_alone_and_an_enum_done_when_one_choice_is_left():
    grammar = Grammar(JsonString(), VOCABULARY)
    assert allowed(grammar) == {' "', '"', '",\n', "null", " null", "n", '"red"', " "}
    assert allowed(grammar, " ") == {'"', '",\n', "null", "n", '"red"'}  # one blank at the most
    assert allowed(grammar, ' "') is None
    grammar = Grammar(OneOf(['"red"', '"red wine"', '"blue"', "null"]), VOCABULARY)
    assert allowed(grammar) == {' "', '"', "null", " null", "n", '"red"', " "}
    assert allowed(grammar, ' "') == {"red", "blue"}
    state = read(grammar, say(' "', "blue"))
    assert grammar.done(state) is True
    assert grammar.completion(state) == '"blue"'
    # Anything behind the quote.
    assert allowed(grammar, ' "', "red") == {" wine", '"', '",\n', '"red"', " "}
    assert grammar.done(read(grammar, say(' "', "red", '"')))
    # Each leaves one choice.
    assert allowed(grammar, ' "', "red", left=1) == {" wine", '"', '",\n', '"red"', " "}
    assert grammar.distance() == 1


@pytest.mark.parametrize(
    ("automaton", "tokens", "rest"),
    [
        (JsonString(), [' "', "red", '"'], '"'),
        (JsonString(), [' "', "red", '",\n'], '"'),
        (JsonString(), [' "', "red", "\n"], '"'),
        (JsonString(), ['"', "red", " wine"], ' wine"'),  # cut
        (JsonString(), ['"', "\\"], '\\\\"'),  # cut within an escape: the text has a backslash more
        (JsonString(), ['"', "\\", '"', '"'], '"'),
        (JsonString(), ["n"], "null"),
        (JsonString(), [" ", "n"], "null"),
        (OneOf(['"red wine"', '"blue"', "null"]), [' "', "red"], 'red wine"'),
        (OneOf(['"red"', '"red wine"']), ['"', "red", '",\n'], '"'),
    ],
)
def test_what_is_left_to_write_of_a_value(automaton, tokens, rest):
    assert Grammar(automaton, VOCABULARY).remainder(say(*tokens)) == rest


@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_has_its_program_where_its_name_says_and_keys_of_the_configuration(name):
    spec = REGISTRY[name]
    assert spec.text_method or callable(resolve_name(f"raypd.decoding.methods.{name}:{name}"))
    keys = {key for keys in spec.answer_keys.values() for key in keys}
    assert keys <= set(DECODING_KEYS)
    options = {field.name for field in dataclasses.fields(spec.options)}
    assert not spec.tokens_option or spec.tokens_option in options
    assert ("heads" in options) == spec.heads
    assert ("draft_model" in options) == spec.drafts
    assert all(name in METHODS[kind] for kind in spec.answer_keys)
    assert ("generation" in spec.answer_keys) == bool(spec.text_method)
    assert not spec.text_method or issubclass(resolve_name(spec.text_method), TextMethod)
