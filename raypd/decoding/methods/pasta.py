"""PASTA: the interpreter of PASTA-LANG ("Learning to Keep a Promise", section 3 and figure 2;
positions: section 6.2).

The main thread writes <promise topic= tokens=/> for content that nothing else needs, and continues
as if it were already there, with its positions advanced by the promised length. A child thread sees
the main thread up to the promise, is given an <async>, and decodes in parallel until </async>. At
<sync/> the main thread waits for its children; from then on it sees them. Children see neither each
other nor what the main thread writes after their promise.

If the markup deviates from the paper, the answer has a warning. When the main thread ends, its
children continue to their end; when tokens run out, all threads are cut where they are. A token is
never split. A token that ends a promise and has text after it is part of what the child sees; its
text comes after the child's content. A token that ends a <sync/> waits with the main thread. If a
promise ended in the same token, the token does not wait, and the interpreter writes a <sync/> after
the wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from raypd.decoding.methods.pasta_lang import (
    CUT,
    Lexer,
    MarkupPiece,
    PastaAnswer,
    PastaThread,
    Tag,
    Written,
    readable,
)
from raypd.decoding.methods.registry import CLOSE, OPEN, SYNC
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.text import Prompt, Stops, TextMethod, TextModel
from raypd.decoding.visibility import Reach


class _Row(NamedTuple):
    """A token that is to be fed."""

    token: int
    position: int
    segment: int


@dataclass(eq=False)
class _RunningThread:
    """A thread while it is being decoded.

    Attributes:
        record: What the answer reports about it.
        segment: The segment of its next token.
        position: The position of its next token.
        path: The closed segments that it sees.
        lexer: Finds the tags in what it writes.
        depth: The number of tokens that had to be decoded one after the other up to here.
        state: "waiting" is the main thread at a <sync/>.
        queue: Its tokens that have not been fed yet.
        written: What it wrote.
    """

    record: PastaThread
    segment: int
    position: int
    path: list[int]
    lexer: Lexer
    depth: int = 0
    state: Literal["running", "waiting", "ended"] = "running"
    queue: list[_Row] = field(default_factory=list)
    written: Written = field(default_factory=Written)

    def enqueue(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.queue.append(_Row(token, self.position, self.segment))
            self.position += 1


@dataclass
class Interpreter:
    """Decodes until the main thread and its children have ended.

    In each step `feed` returns the next tokens of all threads, and `take` the predicted ones.

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The largest number of tokens to decode, in all threads together.
        texts: The bytes that every token id adds to a text.
        encode: Turns a tag that the interpreter writes itself into token ids.
        ends: The ids that end a thread.
        promised: Where the length of a promise comes from: its `tokens` attribute (Pred-10X and
            Pred-1X), `fixed_length`, or, as an upper bound on what is possible, the length that the
            child turns out to have.
        fixed_length: The positions of a fixed promise, and of one that gives no number.
        max_async_tokens: The largest number of tokens to decode for one child.
        max_threads: The largest number of threads that decode in one step; if there are more, the
            youngest wait.
        max_position: The model's context length: no token has this position or a higher one.
    """

    prompt: Prompt
    max_new_tokens: int
    texts: Sequence[bytes]
    encode: Callable[[str], Sequence[int]]
    ends: frozenset[int]
    _: KW_ONLY
    promised: Literal["predicted", "fixed", "oracle"] = "predicted"
    fixed_length: int = 40
    max_async_tokens: int = 256
    max_threads: int = 32
    max_position: int | None = None

    def __post_init__(self) -> None:
        self.open = list(self.encode(OPEN))
        self.close = list(self.encode(CLOSE))
        self.sync = list(self.encode(SYNC))
        if not (self.open and self.close and self.sync):
            raise ValueError("encode gives no tokens for the tags of PASTA-LANG")
        self.warnings: list[str] = []
        self.decoded = 0
        self.steps = 0
        self.segments = 1
        # Pairs of segments that the next feed adds.
        self.reach: dict[tuple[int, int], Reach] = {}
        self.main = _RunningThread(PastaThread(), 0, 0, [], Lexer(self._warner("main thread")))
        self.main.enqueue(self.prompt.tokens)
        self.children: list[_RunningThread] = []
        # Children that the main thread does not see yet.
        self.unjoined: list[_RunningThread] = []
        # The last tokens of joined children, which are fed before the main thread's.
        self.closing: list[_Row] = []
        # Pieces of the main thread that have not been acted on yet.
        self.unread: deque[MarkupPiece] = deque()
        # The token that ended the <sync/> at which the main thread waits, and its position.
        self.sync_token: tuple[int, int] | None = None
        # The threads that decode in this step.
        self.decoding: list[_RunningThread] = []
        # Oracle: the child whose length the main thread waits for, and the main thread's next
        # token, which does not depend on that length.
        self.measured: _RunningThread | None = None
        self.next_token: int | None = None

    def run(self) -> Program[PastaAnswer]:
        feed = self.feed()
        while feed is not None:
            predictions = yield feed
            self.take(predictions)
            feed = self.feed()
        return self.answer()

    def feed(self) -> Feed | None:
        """Return the next tokens of all threads; None if all have ended or no token is left."""
        running = [thread for thread in (self.main, *self.children) if thread.state == "running"]
        self.decoding = running[: min(self.max_threads, self.max_new_tokens - self.decoded)]
        if not self.decoding:
            return None
        rows = self.closing
        self.closing = []
        sample_at: list[int] = []
        # The main thread comes first, even when it does not decode: a promise must be fed before
        # its child.
        for thread in dict.fromkeys((self.main, *self.decoding)):
            rows += thread.queue
            thread.queue = []
            if thread in self.decoding:
                sample_at.append(len(rows) - 1)
        feed = Feed(
            [row.token for row in rows],
            [row.position for row in rows],
            [row.segment for row in rows],
            reach=self.reach,
            sample_at=sample_at,
            shared=self.prompt.shared if self.steps == 0 else 0,
        )
        self.reach = {}
        self.steps += 1
        return feed

    def take(self, predictions: Predictions) -> None:
        """Give every thread that decoded its token, and let the main thread join its children."""
        for thread, token, logprob in zip(
            self.decoding, predictions.tokens, predictions.logprobs, strict=True
        ):
            thread.record.tokens.append(token)
            thread.record.logprobs.append(logprob)
            thread.depth += 1
            self.decoded += 1
            if thread is self.main:
                self._take_main(token)
            else:
                self._take_child(thread, token)
        if self.measured is not None and self.measured.state == "ended":
            self._measure(self.measured)
        while self.main.state == "waiting" and self._children_ended():
            self._join()

    def _children_ended(self) -> bool:
        return all(child.state == "ended" for child in self.unjoined)

    # -------------------------------------------------------------------------- the main thread

    def _take_main(self, token: int) -> None:
        if token in self.ends:
            self._end_main()
            self.main.record.stopped = True
            return
        self.unread += self.main.lexer.feed(self._text(token))
        if self.measured is not None:
            self.main.state = "waiting"
            self.next_token = token
            return
        self.main.enqueue([token])
        self._act()

    def _act(self) -> None:
        """Act on the tags that the main thread wrote, up to a <sync/> that has to wait."""
        main = self.main
        while self.unread:
            piece = self.unread.popleft()
            main.written.pieces.append(piece)
            match piece.tag:
                case Tag("promise"):
                    self._promise(piece.tag)
                case Tag("sync") if self.unjoined:
                    self._wait()
                    return
                case Tag("sync"):
                    main.lexer.warn(f"{SYNC} has no effect without a promise to wait for")
                case Tag("open" | "close"):
                    main.lexer.warn(f"{readable(piece.text)} in the main thread is left out")
        if self._remaining_positions(main) <= 0 and main.state == "running":
            main.lexer.warn("cut where the positions end")
            self._end_main()

    def _promise(self, tag: Tag) -> None:
        """Open a child, and continue in another segment, after the promised length."""
        main = self.main
        number = 1 + len(self.children)
        lexer = Lexer(self._warner(f"async {number} ({tag.topic})"))
        length = self._promised_length(tag, number)
        path = [*main.path, main.segment]
        child = _RunningThread(
            PastaThread(tag.topic, length),
            self._new_segment(path),
            main.position,
            path,
            lexer,
            main.depth,
        )
        if self._remaining_positions(child) > len(self.open) + len(self.close):
            child.written = Written([MarkupPiece(OPEN, Tag("open"))], undecoded=len(OPEN))
            child.enqueue(self.open)
            if self.promised == "oracle":
                self.measured = child
        else:
            child.state = "ended"
            child.lexer.warn("has no content: the positions end here")
        self.children.append(child)
        self.unjoined.append(child)
        main.written.pieces.append(child.written)
        main.path = path
        main.segment = self._new_segment(path)
        main.position += length

    def _promised_length(self, tag: Tag, number: int) -> int:
        """Return the positions that the main thread skips for a promise (section 6.2)."""
        main = self.main
        if self.promised == "oracle":
            length = 0  # until the child has ended
        elif self.promised == "fixed":
            length = self.fixed_length
        else:
            # A child cannot take more than this.
            limit = self.max_async_tokens + len(self.open)
            length = tag.promised_length(number, self.fixed_length, limit, main.lexer.warn)
        remaining = self._remaining_positions(main)
        if length < remaining:
            return length
        main.lexer.warn(
            f"promise {number} passes the last position: it takes half of the {remaining} left"
        )
        return max(0, int(remaining) // 2)

    def _measure(self, child: _RunningThread) -> None:
        """Set the oracle's length of a promise to the length that its child took."""
        main = self.main
        self.measured = None
        child.record.promised = child.position - main.position
        main.position = child.position
        if self.next_token is not None:
            main.enqueue([self.next_token])
            main.state = "running"
            self.next_token = None
            self._act()

    def _wait(self) -> None:
        """Wait at a <sync/>.

        The token that ended it is fed after the wait, so that it sees the children.
        """
        main = self.main
        main.state = "waiting"
        last = main.queue[-1]
        self.sync_token = None
        # If the segment differs, a promise ended in this token too, and its child needs it
        # immediately.
        if last.segment == main.segment:
            main.queue.pop()
            self.sync_token = (last.token, last.position)

    def _join(self) -> None:
        """End the wait: open a segment that sees what the main thread saw and all its children."""
        main = self.main
        for child in self.unjoined:
            self.closing += child.queue
            child.queue = []
            main.depth = max(main.depth, child.depth)
        main.path = [*main.path, main.segment, *(child.segment for child in self.unjoined)]
        main.segment = self._new_segment(main.path)
        main.state = "running"
        self.unjoined = []
        if self.sync_token is not None:
            token, position = self.sync_token
            main.queue.append(_Row(token, position, main.segment))
        elif self._remaining_positions(main) >= len(self.sync):
            main.enqueue(self.sync)
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

    # -------------------------------------------------------------------------- its children

    def _take_child(self, child: _RunningThread, token: int) -> None:
        if token in self.ends:
            child.lexer.warn(f"ended its text without {CLOSE}, which was added")
            child.record.stopped = True
            self._close_child(child)
            return
        pieces = child.lexer.feed(self._text(token))
        child.enqueue([token])
        for index, piece in enumerate(pieces):
            child.written.pieces.append(piece)
            if piece.tag is None:
                continue
            if piece.tag.kind == "close":
                self._drop_trailing(child, pieces[index + 1 :])
                child.record.stopped = True
                self._end_child(child)
                return
            if piece.tag.kind != "stray":
                child.lexer.warn(f"{readable(piece.text)} in a child does nothing and is left out")
        decoded = len(child.record.tokens)
        is_full = self._remaining_positions(child) <= len(self.close)
        if decoded >= self.max_async_tokens or is_full:
            child.lexer.warn(f"closed after {decoded} tokens, the most it may have")
            self._close_child(child)

    def _drop_trailing(self, child: _RunningThread, pieces: Sequence[MarkupPiece]) -> None:
        """Drop what comes after </async> in the same token."""
        trailing = "".join(piece.text for piece in pieces) + child.lexer.begun
        child.lexer.begun = ""
        if trailing.strip():
            child.lexer.warn(f"{readable(trailing)!r} behind {CLOSE} in the same token is left out")

    def _end_child(self, child: _RunningThread) -> None:
        child.state = "ended"
        child.written.pieces += child.lexer.close()

    def _close_child(self, child: _RunningThread) -> None:
        """End a child that wrote no </async>, and write the tag for it."""
        self._end_child(child)
        child.enqueue(self.close)
        child.written.pieces.append(MarkupPiece(CLOSE, Tag("close")))

    # -------------------------------------------------------------------------- all threads

    def _remaining_positions(self, thread: _RunningThread) -> float:
        if self.max_position is None:
            return float("inf")
        return self.max_position - thread.position

    def _new_segment(self, path: Sequence[int]) -> int:
        """Open a segment that sees all of the closed segments `path`."""
        segment = self.segments
        self.segments += 1
        for closed in path:
            self.reach[segment, closed] = Reach.ALL
        self.reach[segment, segment] = Reach.CAUSAL
        return segment

    def _text(self, token: int) -> str:
        if token >= len(self.texts):
            return ""
        return self.texts[token].decode("latin-1")

    def _warner(self, thread: str) -> Callable[[str], None]:
        def warn(flaw: str) -> None:
            self.warnings.append(f"{thread}: {flaw}")

        return warn

    def answer(self) -> PastaAnswer:
        """Put the text together. Threads that have not ended are cut at this point."""
        for child in self.children:
            if child.state != "ended":
                if child.record.tokens:
                    child.lexer.warn("cut, for no tokens are left")
                else:
                    child.lexer.warn("has no content: no tokens are left")
                self._end_child(child)
        if self.main.state != "ended":
            self.main.lexer.warn("cut, for no tokens are left")
            self.main.written.pieces += self.unread
            self._end_main()
        threads = [self.main, *self.children]
        content_tokens = 0
        for thread in threads:
            if not thread.record.stopped:
                thread.written.pieces.append(CUT)
            content_tokens += thread.written.content_tokens(
                thread.record.tokens, self.texts, self.ends
            )
        return PastaAnswer(
            text=self.main.written.text(),
            raw=self.main.written.raw(),
            warnings=self.warnings,
            threads=[thread.record for thread in threads],
            cut=self.main.written.cut(),
            tokens=self.decoded,
            steps=self.steps,
            longest_path=max(thread.depth for thread in threads),
            content_tokens=content_tokens,
        )


class PastaText(TextMethod):
    """PASTA for text."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self.texts = model.token_bytes()

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return Interpreter(
            prompt,
            self.options.max_new_tokens,
            self.texts,
            self.model.encode,
            self.model.ends,
            promised=self.method_options.promised_length,
            fixed_length=self.method_options.fixed_length,
            max_async_tokens=self.method_options.max_async_tokens,
            max_threads=self.method_options.max_threads,
            max_position=self.model.context_length,
        ).run()
