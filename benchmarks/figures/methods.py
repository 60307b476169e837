"""The examples of the figures: what each method decodes, and the trace of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.figures.trace import MAX_VALUE_TOKENS, FixedValue, Trace, Words, run
from raypd.decoding import (
    Grammar,
    Interpreter,
    Slot,
    SlottedPrompt,
    apar,
    autoregressive,
    hyper_parallel,
)
from raypd.decoding.methods.space import space
from raypd.decoding.program import Feed
from raypd.decoding.text import Prompt

END = "<end>"
FORK = "[Fork]"
CHILD = "[Child]"
MASK = "[Mask]"
OPEN = "<async>"
CLOSE = "</async>"
SYNC = "<sync/>"


@dataclass(frozen=True)
class Offer:
    """A document and what its slots hold."""

    text: str
    values: dict[str, str]


HEADPHONES = Offer(
    "Bose QC 45 over -ear", {"Brand:": "Bose", "Model:": "QC 45", "Fit:": "over -ear"}
)
KETTLE = Offer("Smeg kettle 1.7 l", {"Brand:": "Smeg", "Model:": "null", "Fit:": "null"})


def _slotted(words: Words, offers: Sequence[Offer]) -> SlottedPrompt:
    """Return the prompt of documents and their skeletons."""
    tokens: list[int] = []
    for offer in offers:
        tokens += words.ids(offer.text)
    slots: list[Slot] = []
    for offer in offers:
        for key, value in offer.values.items():
            tokens.append(words.id(key))
            grammar = cast(Grammar, FixedValue(words, value))
            slots.append(Slot(len(tokens) - 1, grammar))
    return SlottedPrompt(tokens, slots)


def hpd(
    stacks: Sequence[Sequence[Offer]], isolate_values: bool = False, family: str = "llama"
) -> list[Trace]:
    """Decode the values of documents; each stack of them shares a prompt."""
    words = Words()
    programs = []
    for offers in stacks:
        prompt = _slotted(words, offers)
        programs.append(hyper_parallel(prompt, MAX_VALUE_TOKENS, isolate_values))
    return run(words, programs, family=family)


def token_by_token(offer: Offer) -> Trace:
    """Decode the same record one token after the other."""
    words = Words()
    prompt = words.ids(offer.text)
    record = " ".join(f"{key} {value}" for key, value in offer.values.items()).split()

    def next_word(feed: Feed, index: int) -> str:
        return record[feed.positions[index] + 1 - len(prompt)]

    program = autoregressive(Prompt(prompt), len(record), lambda tokens: False)
    (trace,) = run(words, [program], next_word)
    return trace


def _scripted(scripts: dict[int, str]) -> Callable[[Feed, int], str]:
    """Return what gives each segment the words of its script, one after the other."""
    iterators: dict[int, Iterator[str]] = {}
    for segment, script in scripts.items():
        iterators[segment] = iter(script.split())

    def next_word(feed: Feed, index: int) -> str:
        segment = 0 if feed.segments is None else feed.segments[index]
        return next(iterators[segment])

    return next_word


def forks() -> Trace:
    """Decode a list whose points fork (APAR)."""
    words = Words()
    fork = words.id(FORK)
    child = words.id(CHILD)
    end = words.id(END)
    prompt = words.ids("How do I sleep well?")
    # By segment: the root, then for each fork the next paragraph and the detail.
    scripts = {
        0: f"1. Routine {FORK} 2.",
        1: f"Light {FORK} 3.",
        2: f"same time every day {END}",
        3: f"Noise {END}",
        4: f"dark curtains {END}",
    }
    program = apar(Prompt(prompt), 64, fork, child, frozenset([end]))
    (trace,) = run(words, [program], _scripted(scripts))
    return trace


PROMISED = 6


def promises() -> Trace:
    """Decode an answer that promises two parts (PASTA)."""
    words = Words()
    tags: dict[str, str] = {}
    for topic in ("river", "hill"):
        # A tag is one token here, so its text must hold no space.
        tags[topic] = f'<promise_topic="{topic}"_tokens="{PROMISED}"/>'
    texts = [tag.replace("_", " ") for tag in tags.values()]
    river, hill = (words.id(text) for text in texts)
    end = words.id(END)
    names = {tags["river"]: words.word(river), tags["hill"]: words.word(hill)}
    prompt = words.ids("Describe Rome.")
    # By segment: the main thread up to the first promise, its child, the main thread up to the
    # second promise, its child, the main thread up to the <sync/>, and the main thread behind it.
    scripts = {
        0: f"River: {tags['river']} Hill:",
        1: f"The Tiber {CLOSE}",
        2: f"{tags['hill']} {SYNC}",
        3: f"Seven hills {CLOSE}",
        5: f"Go! {END}",
    }
    # The interpreter reads the texts of all ids at the start.
    for script in scripts.values():
        for word in script.split():
            words.id(names.get(word, word))
    words.id(OPEN)
    choose = _scripted(scripts)

    def next_word(feed: Feed, index: int) -> str:
        word = choose(feed, index)
        return names.get(word, word)

    interpreter = Interpreter(
        Prompt(prompt), 64, words.texts(), lambda text: [words.id(text)], frozenset([end])
    )
    (trace,) = run(words, [interpreter.run()], next_word)
    return trace


MASKS = 2


def masks() -> Trace:
    """Decode a sentence with mask tokens, some of whose drafts are wrong (SPACE)."""
    words = Words()
    mask = words.id(MASK)
    prompt = words.ids("Where is it?")
    sentence = f"The Louvre is in Paris , near the Seine . {END}".split()
    # What is drafted in place of the right word.
    wrong = {"Paris": "Rome", "Seine": "river"}

    def next_word(feed: Feed, index: int) -> str:
        number = feed.positions[index] + 1 - len(prompt)
        word = sentence[min(number, len(sentence) - 1)]
        assert feed.segments is not None
        is_draft = feed.segments[index] > MASKS
        if is_draft:
            return wrong.get(word, word)
        return word

    end = words.id(END)
    program = space(
        Prompt(prompt), len(sentence), MASKS, mask, stops=lambda tokens: tokens[-1] == end
    )
    (trace,) = run(words, [program], next_word)
    return trace
