"""A model that writes given PASTA-LANG, thread by thread, in place of a real one."""

from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.methods.pasta import Interpreter, PastaAnswer
from raypd.decoding.program import Feed
from tests.decoding.drivers import drive

EOS = 2
ENDS = frozenset([EOS])
BYTES = [b"" if id < 3 else bytes([id]) for id in range(256)]
PROMPT = [ord(c) for c in "Q?"]


class Script:
    """A model that writes given texts: `main`, and for the n-th promise the n-th of `children`.

    It looks at what a token may see alone, by the feeds' own reach. `words` are tokens beyond the single bytes; the
    longest that fits is written. A text that ends in "..." goes on with dots for ever; \\udcff stands for the byte ff.
    """

    def __init__(self, main: str, *children: str, words: tuple[str, ...] = ()) -> None:
        self.main, self.children, self.words = main, children, words
        self.texts = [*BYTES, *(word.encode() for word in words)]
        self.rows: list[tuple[int, int, int]] = []  # token, position, segment
        self.reach = {(0, 0): 2}
        self.born: list[int] = []  # segments of children, in order
        self.feeds: list[Feed] = []
        self.seen: list[str] = []  # what each asked token saw, in the order of their segments
        self.decoded = 0

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
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
        return [k for k, (_, p, _) in enumerate(self.rows) if kinds[k] == 1 or (kinds[k] == 2 and p <= position)]

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
        own = "".join(text for s, text in parts.items() if s not in self.born)
        return self.say(self.main, own[len(PROMPT) :])

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
