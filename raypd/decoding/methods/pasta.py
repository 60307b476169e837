"""PASTA: the interpreter of PASTA-LANG ("Learning to Keep a Promise", section 3 and figure 2;
positions: section 6.2).

The main thread writes <promise topic= tokens=/> for content that nothing else needs, and goes on as
if it stood there already, its positions moved on by the promised length. A child thread sees the
main thread up to the promise, is given an <async>, and decodes beside it until </async>. At <sync/>
the main thread waits for its children; from then on it sees them. Children see neither each other
nor what the main thread writes behind their promise.

What happens where the markup is not as the paper has it stands in the warnings of the answer
(`warn`). When the main thread ends, its children go on to their end; when tokens run out, all end
where they stand, cut. A token is never cut: one that ends a promise and has text behind it is part
of what the child sees; its text stands behind the child's content. One that ends a <sync/> waits
with the main thread; if a promise ended in the same token, it does not, and the interpreter writes
a <sync/> after the wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from raypd.decoding.methods.pasta_lang import (
    CUT,
    Lexer,
    PastaAnswer,
    PastaThread,
    Piece,
    Tag,
    Written,
    readable,
)
from raypd.decoding.methods.registry import CLOSE, OPEN, SYNC
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.text import Prompt, Stops, TextMethod, TextModel
from raypd.decoding.visibility import Reach


@dataclass(eq=False)
class _RunningThread:
    record: PastaThread
    segment: int  # open
    position: int  # of its next token
    path: list[int]  # the closed segments that it sees
    lexer: Lexer
    depth: int = 0  # tokens decoded one after the other to get here
    # Waiting: for its children, at a <sync/>.
    state: Literal["running", "waiting", "ended"] = "running"
    # (token, position, segment) not yet fed.
    queue: list[tuple[int, int, int]] = field(default_factory=list)
    written: Written = field(default_factory=Written)

    def place(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.queue.append((token, self.position, self.segment))
            self.position += 1


@dataclass
class Interpreter:
    """Decodes until main thread and children have ended.

    A step: `feed` gives all their tokens, `take` the decoded.
    """

    prompt: Prompt
    max_new_tokens: int  # decoded, of all threads together
    texts: Sequence[bytes]  # the bytes that every token id adds to a text
    encode: Callable[[str], Sequence[int]]  # ids of the tags that the interpreter writes itself
    ends: frozenset[int]  # ids that end a thread
    _: KW_ONLY
    # Predicted: Pred-10X and Pred-1X.
    promised: Literal["predicted", "fixed", "oracle"] = "predicted"
    fixed_length: int = 40  # positions of a fixed promise, and of one that names no number
    max_async_tokens: int = 256  # decoded, of one child
    max_threads: int = 32  # of more, the youngest wait for a place
    max_position: int | None = None  # no token stands at or behind it (the model's context length)

    def run(self) -> Program[PastaAnswer]:
        while (feed := self.feed()) is not None:
            self.take((yield feed))
        return self.answer()

    def __post_init__(self) -> None:
        self.open, self.close, self.sync = (list(self.encode(tag)) for tag in (OPEN, CLOSE, SYNC))
        if not (self.open and self.close and self.sync):
            raise ValueError("encode gives no tokens for the tags of PASTA-LANG")
        self.warnings: list[str] = []
        self.decoded, self.steps, self.segments = 0, 0, 1
        self.reach: dict[tuple[int, int], Reach] = {}
        self.main = _RunningThread(PastaThread(), 0, 0, [], Lexer(self._warner("main thread")))
        self.main.place(self.prompt.tokens)
        self.children: list[_RunningThread] = []
        self.unjoined: list[_RunningThread] = []  # children that the main thread does not see yet
        # The last tokens of joined children, to be fed before the main's.
        self.closing: list[tuple[int, int, int]] = []
        self.events: deque[Piece] = deque()  # pieces of the main thread that are not acted on yet
        # (token, position) that ended the <sync/> waited at.
        self.held: tuple[int, int] | None = None
        self.asked: list[_RunningThread] = []
        # Oracle: the child whose length the main thread waits for.
        self.measured: _RunningThread | None = None
        # Of the main thread, which does not depend on that length.
        self.next_token: int | None = None

    def feed(self) -> Feed | None:
        """The next tokens of all threads, or None when all have ended or no token is left."""
        running = [thread for thread in (self.main, *self.children) if thread.state == "running"]
        self.asked = running[: min(self.max_threads, self.max_new_tokens - self.decoded)]
        if not self.asked:
            return None
        placed, sample_at = self.closing, []
        self.closing = []
        # The main thread first, even when it does not ask: a promise must be there before its
        # child.
        for thread in dict.fromkeys((self.main, *self.asked)):
            placed += thread.queue
            thread.queue = []
            if thread in self.asked:
                sample_at.append(len(placed) - 1)
        tokens, positions, segments = zip(*placed, strict=True)
        reach, self.reach = self.reach, {}
        shared = self.prompt.shared if self.steps == 0 else 0
        self.steps += 1
        return Feed(tokens, positions, segments, reach=reach, sample_at=sample_at, shared=shared)

    def take(self, predictions: Predictions) -> None:
        """Every thread that asked has a token more."""
        for thread, token, logprob in zip(
            self.asked, predictions.tokens, predictions.logprobs, strict=True
        ):
            thread.record.tokens.append(token)
            thread.record.logprobs.append(logprob)
            thread.depth += 1
            self.decoded += 1
            if thread is self.main:
                self._main_token(token)
            else:
                self._child_token(thread, token)
        if self.measured is not None and self.measured.state == "ended":
            self._measure(self.measured)
        while self.main.state == "waiting" and all(
            child.state == "ended" for child in self.unjoined
        ):
            self._join()

    def _measure(self, child: _RunningThread) -> None:
        """The oracle's length of a promise: what its child took, which does not depend on it."""
        main, self.measured = self.main, None
        child.record.promised, main.position = child.position - main.position, child.position
        if self.next_token is not None:
            main.place([self.next_token])
            main.state, self.next_token = "running", None
            self._act()

    def _main_token(self, token: int) -> None:
        main = self.main
        if token in self.ends:
            self._end_main()
            main.record.stopped = True
            return
        self.events += main.lexer.feed(self._text(token))
        if self.measured is not None:
            main.state, self.next_token = "waiting", token
            return
        main.place([token])
        self._act()

    def _act(self) -> None:
        """Acts on what the main thread wrote, up to a <sync/> that has to wait."""
        main = self.main
        while self.events:
            piece = self.events.popleft()
            main.written.pieces.append(piece)
            match piece.tag:
                case Tag("promise"):
                    self._promise(piece.tag)
                case Tag("sync") if self.unjoined:
                    return self._wait()
                case Tag("sync"):
                    main.lexer.warn(f"{SYNC} without a promise to wait for does nothing")
                case Tag("open" | "close"):
                    main.lexer.warn(f"{readable(piece.text)} in the main thread is left out")
        if self._remaining_tokens(main) <= 0 and main.state == "running":
            main.lexer.warn("cut where the positions end")
            self._end_main()

    def _promise(self, tag: Tag) -> None:
        """Opens a child, and closes the main thread's segment: it goes on in another, behind the
        promised length.
        """
        main, number = self.main, 1 + len(self.children)
        lexer = Lexer(self._warner(f"async {number} ({tag.topic})"))
        length, room = (
            0 if self.promised == "oracle" else self.fixed_length,
            self._remaining_tokens(main),
        )
        if self.promised == "predicted":
            limit = self.max_async_tokens + len(self.open)  # more than that a child cannot take
            length = tag.promised_length(number, length, limit, main.lexer.warn)
        if length >= room:
            main.lexer.warn(
                f"promise {number} passes the last position: it takes half of the {room} left"
            )
            length = max(0, int(room) // 2)
        path = [*main.path, main.segment]
        child = _RunningThread(
            PastaThread(tag.topic, length),
            self._segment(path),
            main.position,
            path,
            lexer,
            main.depth,
        )
        if self._remaining_tokens(child) > len(self.open) + len(self.close):
            child.written = Written([Piece(OPEN, Tag("open"))], undecoded=len(OPEN))
            child.place(self.open)
            self.measured = child if self.promised == "oracle" else None
        else:
            child.state = "ended"
            child.lexer.warn("has no content: the positions end here")
        self.children.append(child)
        self.unjoined.append(child)
        main.written.pieces.append(child.written)
        main.path, main.segment, main.position = path, self._segment(path), main.position + length

    def _wait(self) -> None:
        """At a <sync/>: the token that ended it is fed after the wait, so that it sees the
        children.
        """
        self.main.state = "waiting"
        token, position, segment = self.main.queue[-1]
        self.held = None
        # Else a promise ended in this token too, and its child needs it at once.
        if segment == self.main.segment:
            self.main.queue.pop()
            self.held = token, position

    def _join(self) -> None:
        """The wait is over: a segment opens that sees what the main thread saw and all its
        children.
        """
        main = self.main
        for child in self.unjoined:
            self.closing += child.queue
            child.queue = []
        main.path = [*main.path, main.segment, *(child.segment for child in self.unjoined)]
        main.segment = self._segment(main.path)
        main.depth = max(main.depth, *(child.depth for child in self.unjoined))
        main.state, self.unjoined = "running", []
        if self.held is not None:
            main.queue.append((*self.held, main.segment))
        elif self._remaining_tokens(main) >= len(self.sync):
            main.place(self.sync)
        else:
            main.lexer.warn("cut where the positions end")
            self._end_main()
            return
        self._act()

    def _end_main(self) -> None:
        main = self.main
        main.state = "ended"
        for piece in main.lexer.close():
            main.written.pieces.append(piece)
            if piece.tag is not None:
                main.lexer.warn(f"{readable(piece.text)} at the very end is left out")
        if main.written.ends_with_promise():
            main.lexer.warn("ended with a promise, beside which nothing was decoded")

    def _child_token(self, child: _RunningThread, token: int) -> None:
        if token in self.ends:
            child.lexer.warn(f"ended its text without {CLOSE}, which was put there")
            child.record.stopped = True
            self._end_child(child, put=True)
            return
        pieces = child.lexer.feed(self._text(token))
        child.place([token])
        for number, piece in enumerate(pieces):
            child.written.pieces.append(piece)
            if piece.tag is not None and piece.tag.kind == "close":
                trailing = "".join(p.text for p in pieces[number + 1 :]) + child.lexer.begun
                if trailing.strip():
                    child.lexer.warn(
                        f"{readable(trailing)!r} behind {CLOSE} in the same token is left out"
                    )
                child.lexer.begun = ""
                child.record.stopped = True
                self._end_child(child)
                return
            if piece.tag is not None and piece.tag.kind != "stray":
                child.lexer.warn(f"{readable(piece.text)} in a child does nothing and is left out")
        if len(child.record.tokens) >= self.max_async_tokens or self._remaining_tokens(
            child
        ) <= len(self.close):
            child.lexer.warn(
                f"closed after {len(child.record.tokens)} tokens, the most it may have"
            )
            self._end_child(child, put=True)

    def _end_child(self, child: _RunningThread, put: bool = False) -> None:
        child.state = "ended"
        child.written.pieces += child.lexer.close()
        if put:
            child.place(self.close)
            child.written.pieces.append(Piece(CLOSE, Tag("close")))

    def _remaining_tokens(self, thread: _RunningThread) -> float:
        return float("inf") if self.max_position is None else self.max_position - thread.position

    def _segment(self, path: Sequence[int]) -> int:
        """A segment that sees all of the segments `path`, which are closed."""
        new, self.segments = self.segments, self.segments + 1
        self.reach.update({(new, closed): Reach.ALL for closed in path})
        self.reach[new, new] = Reach.CAUSAL
        return new

    def _text(self, token: int) -> str:
        return self.texts[token].decode("latin-1") if token < len(self.texts) else ""

    def _warner(self, name: str) -> Callable[[str], None]:
        return lambda flaw: self.warnings.append(f"{name}: {flaw}")

    def answer(self) -> PastaAnswer:
        """Puts the text together; what has not ended is cut where it stands."""
        for child in self.children:
            if child.state != "ended":
                cut = (
                    "cut, for no tokens are left"
                    if child.record.tokens
                    else "has no content: no tokens are left"
                )
                child.lexer.warn(cut)
                self._end_child(child)
        if self.main.state != "ended":
            self.main.lexer.warn("cut, for no tokens are left")
            self.main.written.pieces += self.events
            self._end_main()
        threads = [self.main, *self.children]
        for thread in threads:
            if not thread.record.stopped:
                thread.written.pieces.append(CUT)
        return PastaAnswer(
            text=self.main.written.text(),
            raw=self.main.written.raw(),
            warnings=self.warnings,
            threads=[thread.record for thread in threads],
            cut=self.main.written.cut(),
            tokens=self.decoded,
            steps=self.steps,
            longest_path=max(thread.depth for thread in threads),
            content_tokens=sum(
                t.written.content_tokens(t.record.tokens, self.texts, self.ends) for t in threads
            ),
        )


class PastaText(TextMethod):
    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self.texts = model.token_bytes()

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        model, options = self.model, self.options
        return Interpreter(
            prompt,
            options.max_new_tokens,
            self.texts,
            model.encode,
            model.ends,
            promised=options.promised_length,
            fixed_length=options.fixed_length,
            max_async_tokens=options.max_async_tokens,
            max_threads=options.max_threads,
            max_position=model.context_length,
        ).run()
