"""PASTA by its definition: threads that are read again from scratch at each step, by the stock model."""

from dataclasses import dataclass, field

from tests.decoding import reference
from tests.decoding.pasta_script import BYTES, EOS

A, B, SYNC, CLOSE, OPEN, BEHIND, LT, WORD, GT = range(240, 249)
TEXTS = [*BYTES[:240], b'<promise topic="a" tokens="10"/>', b'<promise topic="b" tokens="3"/>', b"<sync/>", b"</async>",
         b"<async>", b'<promise topic="c" tokens="20"/>The', b"<", b"sync", b"/>", *BYTES[249:]]  # fmt: skip
for plain in (60, 62):  # no other way to begin or end a tag
    TEXTS[plain] = b"?"


def encode(text: str) -> list[int]:
    return {"<async>": [OPEN], "</async>": [CLOSE], "<sync/>": [LT, WORD, GT]}.get(text, list(text.encode()))


def steer(token: int, position: int, predicted: int) -> int:
    """What a trained model would do now and then, as a function of what the model sees last."""
    if token == LT:
        return WORD
    if token == WORD:
        return GT
    draw = (predicted * 31 + position * 17 + token * 7) % 29
    marks = {0: A, 1: B, 2: SYNC, 3: CLOSE, 4: CLOSE, 5: BEHIND, 6: LT, 7: CLOSE, 8: SYNC}
    if position > 60 and draw == 9:
        return EOS
    return marks.get(draw, predicted if 10 < predicted < 240 else 40 + draw)


@dataclass(eq=False)
class View:
    """A thread as a list of the tokens (indices into `text`) that it sees, in its own order of reading."""

    sees: list[int]
    position: int
    last: int = -1
    picked: list[tuple[int, float]] = field(default_factory=list)
    live: bool = True


def from_scratch(stock, prompt: list[int], most: int, most_async: int) -> list[View]:
    """PASTA by its definition: every thread carries the list of what it sees, which a promise copies and a wait joins.

    No segments, no rules: what a token saw is the list as it was when it was read.
    """
    text: list[tuple[int, int, list[int]]] = []  # token, position, what it sees (itself too)

    def read(view: View, token: int) -> None:
        index = len(text)
        view.sees = [*view.sees, index]
        text.append((token, view.position, view.sees))
        view.last, view.position = index, view.position + 1

    main = View([], 0)
    for token in prompt:
        read(main, token)
    threads, children, used, wait = [main], [], 0, None
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
                main.live, wait = False, x
            else:
                read(view, x)
                if view is main and x in (A, B, BEHIND):
                    child = View(list(main.sees), main.position)
                    read(child, OPEN)
                    threads.append(child)
                    children.append(child)
                    main.position += {A: 10, B: 3, BEHIND: 1 + most_async}[x]
                elif view is not main and x == CLOSE:
                    view.live = False
                elif view is not main and len(view.picked) == most_async:
                    view.live = False
                    read(view, CLOSE)
        if wait is not None and not any(child.live for child in children):
            main.sees = [*main.sees, *sorted({i for c in children for i in c.sees} - set(main.sees))]
            read(main, wait)
            main.live, wait, children = True, None, []
    return threads
