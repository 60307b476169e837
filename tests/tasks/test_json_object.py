"""The automaton of any JSON object, against the standard library's parser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.decoding.grammar import DEAD
from raypd.tasks.automata import json_object

AUTOMATON = json_object(None)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def read(text: str) -> int:
    state = 0
    for byte in text.encode():
        state = DEAD if state == DEAD else AUTOMATON.next(state, chr(byte))
    return state


@given(st.dictionaries(st.text(), _values, max_size=4), st.booleans(), st.booleans())
def test_reads_every_object_and_nothing_behind_it(value: dict[str, object], ascii: bool, blanks: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii, separators=None if blanks else (",", ":"))
    state = read(text)
    assert AUTOMATON.ended(state)
    assert all(AUTOMATON.next(state, char) == DEAD for char in '}] ,\n"0')
    assert not any(AUTOMATON.ended(read(text[:end])) for end in range(len(text)))


@pytest.mark.parametrize(
    "text",
    ["[1]", " {}", "{ }", "{,}", '{"a"}', '{"a":}', '{"a":1,}', '{"a":[1,]}', '{"a":01}', '{"a":+1}', '{"a":.5}',
     '{"a":1.}', '{"a":1e}', '{"a":"\\x"}', '{"a":"\n"}', '{"a":nul}', '{"a":[}', '{"a":[1}', '{"a":{]', "{a:1}",
     '{"a":1  ', '{"a":\\u12'],
)  # fmt: skip
def test_reads_nothing_that_is_no_json(text: str) -> None:
    assert read(text) == DEAD
