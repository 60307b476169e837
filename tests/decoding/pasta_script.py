"""A model that writes given PASTA-LANG; and PASTA by its definition, its threads read again at each
step.
"""

from dataclasses import dataclass, field

from raypd.decoding.methods.pasta import Interpreter, PastaAnswer
from raypd.decoding.program import Feed
from raypd.decoding.text import Prompt
from tests.decoding import reference
from tests.decoding.drivers import drive

EOS = 2
ENDS = frozenset([EOS])
BYTES = [b"" if id < 3 else bytes([id]) for id in range(256)]
PROMPT = [ord(c) for c in "Q?"]


class Script:
    """A model that writes given texts: `main`, and for the n-th promise the n-th of `children`, by
    the feeds' reach. `words`: tokens beyond bytes. A text that ends in "..." goes on with dots;
    \\udcff stands for the byte ff.
    """

    def __init__(self, main: str, *children: str, words: tuple[str, ...] = ()) -> None:
        self.main = main
        self.children = children
        self.words = words
        self.texts = [*BYTES, *(word.encode() for word in words)]
        self.rows: list[tuple[int, int, int]] = []  # token, position, segment
        self.reach = {(0, 0): 2}
        self.born: list[int] = []  # segments of children, in order
        self.feeds: list[Feed] = []
        self.seen: list[str] = []  # what each asked token saw, in the order of their segments
        self.decoded = 0

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = []
        while data:
            fits = [w for w in self.words if data.startswith(w.encode())]
            word = max(fits, key=len).encode() if fits else data[:1]
            ids.append(256 + self.words.index(word.decode()) if fits else word[0])
            data = data[len(word) :]
        return ids

    def run(self, most: int = 400, **options) -> PastaAnswer:
        program = Interpreter(Prompt(PROMPT), most, self.texts, self.encode, ENDS, **options).run()
        answer, self.feeds = drive(program, self.answer)
        return answer

    def answer(self, feed: Feed) -> list[int]:
        self.reach.update(feed.reach)
        first = len(self.rows)
        self.rows += zip(feed.tokens, feed.positions, feed.segments, strict=True)
        for index in range(first, len(self.rows)):
            assert max(self.visible(index)) <= index, "a token sees a later one of the same feed"
        tokens = [self.next(first + index) for index in feed.sample_at]
        self.decoded += len(tokens)
        return tokens

    def visible(self, q: int) -> list[int]:
        _, position, segment = self.rows[q]
        kinds = [self.reach.get((segment, s), 0) for _, _, s in self.rows]
        return [
            k
            for k, (_, p, _) in enumerate(self.rows)
            if kinds[k] == 1 or (kinds[k] == 2 and p <= position)
        ]

    def next(self, q: int) -> int:
        segment = self.rows[q][2]
        parts: dict[int, str] = {}
        for k in sorted(self.visible(q), key=lambda k: self.rows[k][2]):
            token, _, s = self.rows[k]
            text = self.texts[token].decode("latin-1") if token < len(self.texts) else chr(token)
            parts[s] = parts.get(s, "") + text
        self.seen.append("".join(parts.values()))
        if segment not in self.born and parts[segment].startswith("<async>"):
            self.born.append(segment)
        if segment in self.born:
            number = self.born.index(segment)
            script = self.children[number] if number < len(self.children) else "</async>"
            return self.say(script, parts[segment][len("<async>") :])
        return self.say(
            self.main,
            "".join(text for s, text in parts.items() if s not in self.born)[len(PROMPT) :],
        )

    def say(self, script: str, written: str) -> int:
        rest = script.encode(errors="surrogateescape").decode("latin-1")[len(written) :]
        if rest.startswith("..."[: len(rest)]) and script.endswith("..."):
            return ord(".")
        if not rest:
            return EOS
        fits = [w for w in self.words if rest.startswith(w.encode().decode("latin-1"))]
        return 256 + self.words.index(max(fits, key=len)) if fits else ord(rest[0])


def promise(topic: str, tokens: int | str = 20) -> str:
    return f'<promise topic="{topic}" tokens="{tokens}"/>'


TAGS = ("<async>", "</async>", "<sync/>", promise("a"), promise("b"), promise("c"))


A, B, SYNC, CLOSE, OPEN, BEHIND, LT, WORD, GT = range(240, 249)
TEXTS = [
    *BYTES[:240],
    b'<promise topic="a" tokens="10"/>',
    b'<promise topic="b" tokens="3"/>',
    b"<sync/>",
    b"</async>",
    b"<async>",
    b'<promise topic="c" tokens="20"/>The',
    b"<",
    b"sync",
    b"/>",
    *BYTES[249:],
]
for plain in (60, 62):  # no other way to begin or end a tag
    TEXTS[plain] = b"?"


def encode(text: str) -> list[int]:
    return {
        "<async>": [OPEN],
        "</async>": [CLOSE],
        "<sync/>": [LT, WORD, GT],
    }.get(text, list(text.encode()))


def steer(token: int, position: int, predicted: int) -> int:
    """What a trained model would do now and then, as a function of what the model sees last."""
    if token == LT:
        return WORD
    if token == WORD:
        return GT
    draw = (predicted * 31 + position * 17 + token * 7) % 29
    marks = {
        0: A,
        1: B,
        2: SYNC,
        3: CLOSE,
        4: CLOSE,
        5: BEHIND,
        6: LT,
        7: CLOSE,
        8: SYNC,
    }
    if position > 60 and draw == 9:
        return EOS
    return marks.get(draw, predicted if 10 < predicted < 240 else 40 + draw)


@dataclass(eq=False)
class View:
    """A thread as a list of the tokens (indices into `text`) that it sees, in its own order of
    reading.
    """

    sees: list[int]
    position: int
    last: int = -1
    picked: list[tuple[int, float]] = field(default_factory=list)
    live: bool = True


def from_scratch(stock, prompt: list[int], most: int, most_async: int) -> list[View]:
    """PASTA by its definition: every thread carries the list of what it sees, which a promise
    copies and a wait joins. No segments, no rules: what a token saw is the list as it was when it
    was read.
    """
    text: list[tuple[int, int, list[int]]] = []  # token, position, what it sees (itself too)

    def read(view: View, token: int) -> None:
        index = len(text)
        view.sees = [*view.sees, index]
        text.append((token, view.position, view.sees))
        view.last = index
        view.position = view.position + 1

    main = View([], 0)
    for token in prompt:
        read(main, token)
    threads = [main]
    children = []
    used = 0
    wait = None
    while used < most and any(t.live for t in threads):
        live = [t for t in threads if t.live][: most - used]
        tokens, positions, seen = zip(*text, strict=True)
        logits = reference.dense_output(stock, tokens, positions, reference.mask_of(seen))[0]
        for view in live:
            used += 1
            predicted, logprob, _ = reference.greedy(logits[view.last], None)
            x = steer(text[view.last][0], text[view.last][1], predicted)
            before = text[view.last][0]
            view.picked.append((x, logprob))
            ended_sync = x == SYNC or (x == GT and before == WORD)
            if x == EOS:
                view.live = False
                if view is not main:
                    read(view, CLOSE)
            elif view is main and ended_sync and children:
                main.live = False
                wait = x
            else:
                read(view, x)
                if view is main and x in (A, B, BEHIND):
                    child = View(list(main.sees), main.position)
                    read(child, OPEN)
                    threads.append(child)
                    children.append(child)
                    main.position += {
                        A: 10,
                        B: 3,
                        BEHIND: 1 + most_async,
                    }[x]
                elif view is not main and x == CLOSE:
                    view.live = False
                elif view is not main and len(view.picked) == most_async:
                    view.live = False
                    read(view, CLOSE)
        if wait is not None and not any(child.live for child in children):
            main.sees = [
                *main.sees,
                *sorted({i for c in children for i in c.sees} - set(main.sees)),
            ]
            read(main, wait)
            main.live = True
            wait = None
            children = []
    return threads
