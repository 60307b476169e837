"""Patterns of the user's: the same texts match as by `re`, and none holds a run up."""

import re
from itertools import product
from pathlib import Path

import pytest

from raypd.config import Attribute
from raypd.config.schema import categories_of
from raypd.errors import ConfigError
from raypd.tasks.values import check

PATTERNS = (
    r"^(a|b)*$", "a$|^b", "a^b", "(|a)+", "x*?y", "[^a]", "[]a]+", r"\Aab\Z", r"\bfoo\b.*", ".*\n?", "(?s:.)+",
    "(?i)ab+c", "(?i:ab)c", "(?i)a(?-i:b)", "(?i)k", "(?x) a b # c", "(?m)^a$\n^b$", "(?<!a)b|ab", r"\d+", r"(?u)\d+",
    r"(?a:\w)+", r"\w+\s?", "(ab){2}", "(a?){3}b", "((a|b){1,2}){2}", "(?P<n>a)(b)?", "a{,2}", "(a+)+b|a*", "[b-]+",
)  # fmt: skip
TEXTS = ("", "a\n", "a\nb", "12", "1٣", "foo b", " foo", "xxy", "é", "\u017f", "\u212a", "ABC", "abC", "aB", "]a", "b-")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_texts_match_as_by_re(pattern: str) -> None:
    attribute = Attribute(name="a", type="pattern", pattern=pattern)
    for text in (*TEXTS, *("".join(chars) for length in (1, 2, 3, 4) for chars in product("ab", repeat=length))):
        assert attribute.fits(text) == bool(re.fullmatch(str(attribute.regex), text)), text


@pytest.mark.parametrize(("pattern", "text"), [("^(a+)+$", "a" * 2000 + "!"), ("(a|aa)+$", "a" * 5000 + "b")])
def test_a_text_that_holds_re_up_does_not_match(pattern: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.properties\.a\.default: .* is not of its type"):
        categories_of({"properties": {"a": {"type": "string", "pattern": pattern, "default": text}}}, Path())
    assert check(Attribute(name="a", type="pattern", pattern=pattern, many=True), f'["{text}"]').status == "invalid"


@pytest.mark.parametrize("pattern", ["(" * 3000 + "a" + ")" * 3000, "a{99999999999999}"])
def test_a_pattern_that_python_cannot_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="'a': the pattern is no regular expression: "):
        Attribute(name="a", type="pattern", pattern=pattern)
