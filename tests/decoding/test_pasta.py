"""PASTA's interpreter by hand and against fuzzed markup, with a model by script."""

import random
import re

import pytest
from hypothesis import given, settings, strategies as st

from raypd.decoding.methods.pasta import PastaAnswer
from raypd.decoding.methods.pasta_lang import LONGEST_TAG, Lexer
from tests.decoding.pasta_script import BYTES, EOS, PROMPT, TAGS, Script, promise

OPTIONS = {
    "promised": st.sampled_from(["predicted", "fixed", "oracle"]),
    "max_async_tokens": st.integers(1, 20),
    "max_threads": st.integers(1, 4),
    "max_position": st.integers(3, 200),
}


@pytest.mark.parametrize(
    "words", [(), TAGS, ("<sync", "/>", "</", "async", "/><", "promise topic=", "b one</asy")]
)
def test_figure_1(words):
    """Two promises, a wait, and text that sees both children; spelled in bytes, tags as tokens,
    tags in odd parts.
    """
    main = f"Hi. {promise('a')}{promise('b')}<sync/>So: done."
    script = Script(main, "one é</async>", "b one</async>", words=words)
    answer = script.run()
    assert answer.warnings == []
    assert answer.cut is None
    assert answer.text == "Hi. one éb oneSo: done."
    assert answer.raw == (
        f"Hi. {promise('a')}<async>one é</async>{promise('b')}<async>b one</async><sync/>So: done."
    )
    threads = [(t.topic, t.promised, t.stopped) for t in answer.threads]
    assert threads == [
        (None, 0, True),
        ("a", 20, True),
        ("b", 20, True),
    ]
    assert answer.tokens == script.decoded == sum(len(t.tokens) for t in answer.threads)
    assert answer.steps == answer.longest_path == len(script.feeds)
    # the child saw the main thread up to its promise alone; the end saw everything
    more = "<" if "/><" in words else ""  # a token that ends a tag and begins another
    assert f"Q?Hi. {promise('a')}{more}<async>" in script.seen
    assert f"Q?Hi. {promise('a')}{promise('b')}{more}<async>" in script.seen
    after = [s for s in script.seen if "</async>" in s]
    assert len(after) == len("So: done.") + 1
    assert all(
        "one é</async>".encode().decode("latin-1") in s and "b one</async>" in s for s in after
    )


def test_steps_of_figure_2():
    """The <async> goes in with the promise; all threads move together; <sync/> is fed when the last
    child has ended.
    """
    script = Script(f"{promise('a')}{promise('b')}<sync/>E", "123</async>", "4</async>", words=TAGS)
    answer = script.run()
    a, b, opens, closes, sync = (
        256 + TAGS.index(t) for t in (promise("a"), promise("b"), *TAGS[:3])
    )
    one, two, three, four, end = (ord(c) for c in "1234E")
    assert [(list(feed.tokens), list(feed.positions)) for feed in script.feeds] == [
        (PROMPT, [0, 1]),
        ([a, opens], [2, 3]),
        ([b, one, opens], [23, 4, 24]),  # each promise skips 20
        ([two, four], [5, 25]),
        ([three], [6]),
        ([closes, closes, sync], [7, 26, 44]),
        ([end], [45]),
    ]
    assert answer.text == "1234E"
    assert answer.longest_path == 1 + 4 + 2
    assert answer.steps == 7
    assert answer.tokens == 1 + 1 + 1 + 4 + 2 + 2
    assert answer.content_tokens == 5
    assert answer.parallelism == pytest.approx(5 / 7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2 + 1 + 20, 2 + 1 + 20 + 1 + 3]),
        ({"promised": "fixed", "fixed_length": 7}, [10, 18]),
        ({"promised": "fixed"}, [43, 84]),
        ({"promised": "oracle"}, [2 + 1 + 4, 2 + 1 + 4 + 1 + 3]),
    ],
)
def test_positions_of_the_main_thread(options, expected):
    words = (promise("a"), promise("b", 3), *TAGS[:3])
    script = Script(
        f"{promise('a')}{promise('b', 3)}<sync/>end", "12</async>", "1</async>", words=words
    )
    assert script.run(**options).text == "121end"
    placed = {row[0]: row[1] for row in script.rows}
    assert [placed[256 + 1], placed[256 + words.index("<sync/>")]] == expected


def run(
    main: str, *children: str, words: tuple[str, ...] = (), most: int = 400, **options
) -> PastaAnswer:
    return Script(main, *children, words=words).run(most, **options)


def warned(answer: PastaAnswer, *parts: str) -> None:
    """One warning for each of the parts, in this order, and no other."""
    assert len(answer.warnings) == len(parts), answer.warnings
    for warning, part in zip(answer.warnings, parts, strict=True):
        assert part in warning, answer.warnings


@pytest.mark.parametrize(
    ("attribute", "length", "flaw"),
    [
        ("", 40, "no tokens attribute"),
        *(
            (f'tokens="{said}"', 40, f"promises '{said}' tokens")
            for said in ("", "many", "-5", "0", "²", "1.5")
        ),
        ('tokens="100000"', 256 + 7, "promises 100000 tokens"),
        (f'tokens="{"9" * 200}"', 256 + 7, "promises 9999"),
        *(
            (attribute, 30, None)
            for attribute in ('tokens=" 30 "', "tokens='30'", "tokens=30", 'tokens = "30"')
        ),
    ],
)
def test_lengths(attribute, length, flaw):
    answer = run(f'a<promise topic="t" {attribute}/>b', "X</async>", most=500)
    assert answer.text == "aXb"
    assert [t.promised for t in answer.threads] == [0, length]
    warned(answer, *([flaw] if flaw else []))


@pytest.mark.parametrize(
    ("written", "topic"),
    [
        *(
            (f'"{topic}"', topic)
            for topic in ("a > b", "a /> b", "a < b", 'the "best" one', '5" pipe', "", "<sync/>")
        ),
        ("'it is'", "it is"),
        ('"it\'s"', "it's"),
        ("it's", "it's"),
        ('"R&amp;D &gt; é"', "R&D > é"),
    ],
)
def test_topics(written, topic):
    for attributes in (f'topic={written} tokens="10"', f'tokens="10" topic={written}'):
        answer = run(f"a<promise {attributes}/>b", "X</async>")
        assert [(t.topic, t.promised) for t in answer.threads[1:]] == [(topic, 10)]
        assert answer.text == "aXb"
        assert answer.warnings == []


@pytest.mark.parametrize(
    ("main", "text", "flaws"),
    [
        ("a<b>c</b> x < y <3 <", "a<b>c</b> x < y <3 <", ["<b> is not a tag", "</b> is not a tag"]),
        ("a<foo/>b", "a<foo/>b", ["<foo/> is not a tag"]),
        ("a<promises topic='x'/>b", "a<promises topic='x'/>b", ["is not a tag"]),
        ("a<sync/>b", "ab", ["without a promise to wait for"]),
        ("a</async>b", "ab", ["</async> in the main thread"]),
        (
            "a<async>b</async>c",
            "abc",
            ["<async> in the main thread", "</async> in the main thread"],
        ),
        ("a</promise>b</sync>c", "abc", ["</promise> means nothing", "</sync> means nothing"]),
        *(
            (text, text, ["not closed"])
            for text in ("a<sync/", "a<sy", 'a<promise topic="x', 'a<promise topic="x\nb')
        ),
        ('<promise topic="' + "x" * 300, '<promise topic="' + "x" * 300, ["not closed"]),
        ("a<sync<sync/>b", "a<syncb", ["not closed", "without a promise"]),
        # what is taken as well as can be; Y is the first child, Z the second
        (
            'a<promise topic="x" tokens="10">b<sync>c',
            "aYbc",
            ["is taken as <promise/>", "is taken as <sync/>"],
        ),
        (f'a{promise("x")}b<promise topic="y" tokens="10" so/>c', "aYbZc", ["is malformed"]),
        # an attribute that is not closed swallows nothing behind the next tag
        (
            f'a<promise topic="x" tokens="10" {promise("y")}b',
            'a<promise topic="x" tokens="10" Yb',
            ["not closed"],
        ),
    ],
)
def test_tags_of_no_use_and_tags_that_are_malformed(main, text, flaws):
    answer = run(main, "Y</async>", "Z</async>")
    assert answer.text == text
    assert answer.cut is None
    assert len(answer.threads) == 1 + text.count("Y") + text.count("Z")
    warned(answer, *flaws)


@pytest.mark.parametrize(
    ("main", "child", "most", "text", "flaws"),
    [
        (
            f"{promise('a')}.",
            f"x<async>y{promise('n')}z<sync/>w</async>never",
            400,
            "xyzw.",
            ["<async> in a child", "in a child does nothing", "<sync/> in a child"],
        ),
        # The main thread waits.
        (f"{promise('a')}m", "takes much longer</async>", 400, "takes much longerm", []),
        (f"m {promise('a')}", "late</async>", 400, "m late", ["ended with a promise"]),
        (
            f"m {promise('a')}",
            "late</async>",
            3,
            "m ",
            ["has no content", "main thread: cut", "ended with a promise"],
        ),
        (f"{promise('a')}m<sync/>end", "no end tag", 400, "no end tagmend", ["without </async>"]),
    ],
)
def test_children(main, child, most, text, flaws):
    script = Script(main, child, words=TAGS)
    answer = script.run(most)
    assert answer.text == text
    assert answer.steps == answer.longest_path
    assert (answer.cut is None) == (most == 400)
    assert [t.stopped for t in answer.threads] == [most == 400] * 2
    warned(answer, *flaws)
    if "without </async>" in flaws:
        assert any("no end tag</async>" in s for s in script.seen)


def test_a_runaway_child_is_closed_and_joined_or_cuts_the_answer():
    script = Script(f"{promise('a')}m<sync/>end", "for ever...", words=TAGS)
    answer = script.run(max_async_tokens=30)
    written = "for ever" + "." * 22
    assert answer.text == written + "mend"
    assert answer.raw.count("</async>") == 1
    warned(answer, "closed after 30 tokens")
    assert [t.stopped for t in answer.threads] == [True, False]
    assert (answer.cut is None, answer.text[: answer.cut]) == (False, written), (
        "the main thread alone stopped"
    )
    assert any("...</async>" in s for s in script.seen), "the main thread sees it closed"
    main = f"{promise('a')}{promise('b')}m"
    children = ("one</async>", "is longer</async>")
    whole = run(main, *children, words=TAGS)
    assert whole.text == "oneis longerm"
    assert whole.cut is None
    answer = run(
        main,
        *children,
        words=TAGS,
        most=whole.tokens - 1,
    )
    assert [t.stopped for t in answer.threads] == [True, True, False]
    assert answer.tokens == whole.tokens - 1
    # Its </async> alone is missing.
    assert answer.text == "oneis longerm"
    assert answer.cut is not None
    assert answer.text[: answer.cut] == "oneis longer"
    warned(answer, "async 2 (b): cut")


def test_tokens_that_hold_more_than_a_tag_and_several():
    words = ('"/>The', "</async>\n", "<async>", "<sync/>After")
    script = Script(
        '<promise topic="a" tokens="10"/>The end<sync/>After all', "X</async>\n", words=words
    )
    answer = script.run()
    assert answer.text == "XThe endAfter all"
    assert answer.warnings == []
    assert answer.raw == '<promise topic="a" tokens="10"/><async>X</async>The end<sync/>After all'
    assert any(s.endswith('"/>The<async>') for s in script.seen), (
        "a token is never cut: the child sees it whole"
    )
    assert any(s.endswith("<sync/>After") and "X</async>" in s for s in script.seen)
    answer = run(f"{promise('a')}m", "X</async>rest", words=("</async>rest",))
    assert answer.text == "Xm"
    warned(answer, "'rest' behind </async>")
    both = f"{promise('a')}{promise('b')}"
    answer = run(f"1{both}2", "A</async>", "B</async>", words=(both,))
    assert answer.text == "1AB2"
    assert [t.topic for t in answer.threads] == [None, "a", "b"]
    waits = f"{promise('a')}mid<sync/>"
    script = Script(f"1{waits}2", "A</async>", words=(waits, "<sync/>"))
    script.main = f"1{waits}<sync/>2"  # the interpreter writes the <sync/> behind the wait itself
    answer = script.run()
    assert answer.text == "1Amid2"
    assert answer.warnings == []
    assert any(s.endswith("<sync/>") and "A</async>" in s for s in script.seen)
    oracle = {
        "promised": "oracle",
        "max_position": 16,
        "words": (promise("a"), f"{promise('b')}<sync/>", *TAGS[:3]),
    }
    answer = run(
        f"1{promise('a')}2{promise('b')}{'<sync/>' * 2}3", "A</async>", "B</async>", **oracle
    )
    assert answer.text == "1A2B3"
    assert answer.warnings == []
    waits = f"<sync/>mid{promise('b')}"
    answer = (
        script := Script(f"1{promise('a')}{waits}2", "A</async>", "B</async>", words=(waits,))
    ).run()
    assert answer.text == "1AmidB2"
    assert answer.warnings == []
    assert any(s.endswith("<async>") and "A</async>" in s for s in script.seen), (
        "b begins behind the wait"
    )


def test_threads_beyond_the_most_wait_for_a_place_and_ids_without_text_are_none():
    main = "".join(promise(t) for t in "abc") + "<sync/>end"
    narrow = Script(main, *["xyz</async>"] * 3, words=TAGS)
    wide = Script(main, *["xyz</async>"] * 3, words=TAGS)
    one = narrow.run(max_threads=1)
    four = wide.run()
    assert one.text == four.text == "xyz" * 3 + "end"
    assert one.longest_path == four.longest_path == four.steps
    assert one.steps == one.tokens
    assert max(len(feed.sample_at) for feed in narrow.feeds) == 1
    script = Script("ab")
    script.texts = BYTES[:98]  # "b" has none
    assert script.run().text == "a"


FRAGMENTS = [
    *(
        "<",
        ">",
        "/",
        "/>",
        '"',
        "'",
        "=",
        " ",
        "\n",
        "x",
        "é",
        "<<",
        "topic=",
        "tokens=",
        "10",
        "<promise",
        "promise",
    ),
    *("<async>", "</async>", "<sync/>", "<sync", "sync/>", "<promise/>", "</promise>", "<b>", "</"),
    *(
        promise("a"),
        promise("b", "lots"),
        promise("c", 9**40),
        '<promise topic="x" tokens="20">',
        "</async>tail",
    ),
    *('"/><', f"{promise('a')}<sync/>", f"<sync/>{promise('b')}<sync/>"),
]
MARKUP = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


class Wild(Script):
    """Random text, thread by thread, whatever it sees."""

    def __init__(self, seed: int, words: tuple[str, ...]) -> None:
        super().__init__("", words=words)
        self.random = random.Random(seed)

    def next(self, q: int) -> int:
        if self.random.random() < 0.02:
            return EOS
        word = self.random.random() < 0.9
        return 256 + self.random.randrange(len(self.words)) if word else self.random.randrange(256)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    words=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12, unique=True),
    most=st.integers(0, 120),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_random_tokens_never_break_it(seed, words, most, options):
    wild = Wild(seed, tuple(words))
    answer = wild.run(most, **options)
    assert wild.decoded == answer.tokens <= most
    assert max(answer.content_tokens, answer.longest_path) <= answer.tokens
    assert answer.longest_path <= answer.steps <= answer.tokens
    assert all(len(t.tokens) <= options.get("max_async_tokens", 256) for t in answer.threads[1:])
    if "max_position" in options:
        assert all(row[1] < options["max_position"] for row in wild.rows)
    if most and answer.cut is not None:
        assert answer.warnings
    assert (answer.cut is None) == all(t.stopped for t in answer.threads)
    assert (answer.cut or 0) <= len(answer.text) <= len(answer.raw)


@settings(max_examples=100, deadline=None)
@given(main=MARKUP, cut=st.lists(st.sampled_from(FRAGMENTS), max_size=5, unique=True))
def test_how_a_text_is_cut_into_tokens_changes_nothing(main, cut):
    found = []
    for parts in (
        [main],
        re.split("(" + "|".join(map(re.escape, cut)) + ")", main) if cut else list(main),
    ):
        warnings: list[str] = []
        lexer = Lexer(warnings.append)
        pieces = [p for part in parts for p in lexer.feed(part)] + lexer.close()
        assert "".join(p.text for p in pieces) == main
        found.append((warnings, [(p.text, p.tag) for p in pieces if p.tag]))
    assert found[0] == found[1]


def test_a_hostile_text_takes_no_time():
    for text in (
        '<promise a="' * 4000,
        "<promise " + 'a="' * 20000,
        "<" * 50000,
        '<promise a="b" ' + "'=" * 20000,
    ):
        lexer = Lexer(lambda flaw: None)
        assert "".join(p.text for p in [*lexer.feed(text), *lexer.close()]) == text
        assert len(lexer.begun) <= LONGEST_TAG
