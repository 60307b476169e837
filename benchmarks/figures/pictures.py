"""Draw the figures out of traces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import benchmarks.figures.methods as methods
from benchmarks.figures.canvas import (
    BOX_HEIGHT,
    GAP,
    MARGIN,
    ROW_HEIGHT,
    WIDTH,
    Box,
    Canvas,
    box_width,
)
from benchmarks.figures.methods import HEADPHONES, KETTLE, Offer
from benchmarks.figures.trace import MAX_VALUE_TOKENS, Pass, Prediction, Row, StateRun, Trace

_CELL = 15
_TIMELINE_GAP = 12


def _is_key(row: Row) -> bool:
    return row.word.endswith(":")


def _kind_of(row: Row) -> str:
    """Return the kind of box of a token that was in the prompt of an extraction."""
    return "key" if _is_key(row) else "prompt"


def _line_of_boxes(
    canvas: Canvas,
    x: float,
    y: float,
    words: Sequence[str],
    kinds: Sequence[str],
    widths: Sequence[float] | None = None,
) -> list[Box]:
    """Draw tokens side by side; without widths each is as wide as its text needs."""
    if widths is None:
        widths = [box_width(word) for word in words]
    boxes: list[Box] = []
    for word, kind, width in zip(words, kinds, widths, strict=True):
        box = canvas.box(x, y, word, kind, width)
        boxes.append(box)
        x = box.right + GAP
    return boxes


def _values_of(trace: Trace) -> dict[int, list[tuple[int, str]]]:
    """Return the tokens of each slot of an extraction, with their passes.

    The keys are the numbers of the rows of the slots' keys. A value's next token is predicted
    behind its last one, which stands at the position behind it.
    """
    slot_of_row: dict[int, int] = {}
    values: dict[int, list[tuple[int, str]]] = {}
    ends = {row.position: row.number for row in trace.passes[0].rows if _is_key(row)}
    for row in trace.rows:
        if row.number < len(trace.passes[0].rows):
            slot_of_row[row.number] = row.number
        else:
            # The value's key is the nearest one before its position.
            nearest = max(position for position in ends if position < row.position)
            slot_of_row[row.number] = ends[nearest]
    for number, prediction in trace.predictions:
        slot = slot_of_row[prediction.behind.number]
        values.setdefault(slot, []).append((number, prediction.word))
    return values


def _widest_word(values: dict[int, list[tuple[int, str]]]) -> float:
    """Return the width of the widest box of the values' words."""
    widest = 0.0
    for value in values.values():
        for _, word in value:
            widest = max(widest, box_width(word))
    return widest


def decoding() -> str:
    """Draw one record, decoded token by token and with HPD."""
    canvas = Canvas(
        "Token by token, a record takes one pass per token. Hyper-parallel decoding takes as many "
        "passes as the longest value has tokens."
    )
    single = methods.token_by_token(HEADPHONES)
    (parallel,) = methods.hpd([[HEADPHONES]])
    canvas.heading(MARGIN, 32, "Token by token: one pass per token, keys included")
    words = [prediction.word for _, prediction in single.predictions]
    kinds = ["key" if word.endswith(":") else "value" for word in words]
    boxes = _line_of_boxes(canvas, MARGIN, 46, words, kinds)
    for box, (number, _) in zip(boxes, single.predictions, strict=True):
        canvas.small(box.middle, box.bottom + 15, str(number))
    passes = len(single.passes)
    canvas.label(boxes[-1].right + 14, boxes[-1].bottom - 9, f"{passes} passes, one after another")
    y = 126.0
    canvas.heading(MARGIN, y, "Hyper-parallel: the prompt has the keys, all values grow at once")
    y += 14
    keys = {row.number: row.word for row in parallel.passes[0].rows}
    values = _values_of(parallel)
    column = MARGIN + max(box_width(keys[slot]) for slot in values) + GAP
    width = _widest_word(values)
    for slot, value in values.items():
        canvas.box(MARGIN, y, keys[slot], "key", column - MARGIN - GAP)
        for number, word in value:
            canvas.box(column + (number - 1) * (width + GAP), y, word, "value", width)
        y += ROW_HEIGHT
    count = len(parallel.passes)
    for number in range(1, count + 1):
        middle = column + (number - 1) * (width + GAP) + width / 2
        canvas.small(middle, y + 8, f"pass {number}")
    note = column + count * (width + GAP) + 14
    canvas.label(note, y - 2 * ROW_HEIGHT + 18, f"{count} passes: as many as the longest value")
    canvas.label(note, y - 2 * ROW_HEIGHT + 36, "has tokens")
    return canvas.svg(y + 24)


def skeleton() -> str:
    """Draw the prompt with its skeleton, and the values that each pass adds."""
    canvas = Canvas(
        "The prompt ends in all keys. Every pass decodes the next token of every value."
    )
    (trace,) = methods.hpd([[HEADPHONES]])
    prompt = trace.passes[0].rows
    document = [row for row in prompt if not _is_key(row)]
    canvas.label(MARGIN, 30, "document")
    words = [row.word for row in document]
    _line_of_boxes(canvas, MARGIN + 90, 12, words, ["prompt"] * len(words))
    y = 62.0
    canvas.label(MARGIN, y + 18, "skeleton")
    x = MARGIN + 90.0
    values = _values_of(trace)
    key_boxes: dict[int, Box] = {}
    for slot in values:
        box = canvas.box(x, y, prompt[slot].word, "key")
        key_boxes[slot] = box
        hole = canvas.slot(box.right + GAP, y, 70)
        x = hole.right + 2 * GAP
    y += ROW_HEIGHT + 16
    for number, one_pass in enumerate(trace.passes, 1):
        canvas.label(MARGIN, y + 18, f"pass {number}")
        for slot, value in values.items():
            for pass_number, word in value:
                if pass_number == number:
                    canvas.box(key_boxes[slot].right + GAP, y, word, "value", 70)
        fed = len(one_pass.rows)
        canvas.label(x + 10, y + 18, f"reads {fed} token{'s' if fed > 1 else ''}")
        y += ROW_HEIGHT
    canvas.legend(
        MARGIN, y + 8, [("prompt", "document"), ("key", "key"), ("value", "decoded in this pass")]
    )
    return canvas.svg(y + 36)


def position_gaps() -> str:
    """Draw the positions of prompt and values, and the order in which they enter the cache."""
    canvas = Canvas(
        f"A gap of {MAX_VALUE_TOKENS} positions behind each key keeps room for its value. Values "
        "fill the gaps, whatever their order in the cache is."
    )
    (trace,) = methods.hpd([[HEADPHONES]])
    rows = trace.rows
    last = rows[len(trace.passes[0].rows) - 1].position + MAX_VALUE_TOKENS
    by_position = {row.position: row for row in rows}
    # The last token of a value is predicted and needs no pass of its own.
    predicted: dict[int, str] = {}
    for _, prediction in trace.predictions:
        predicted[prediction.behind.position + 1] = prediction.word
    width = 112.0
    columns = 6
    y = 34.0
    for position in range(last + 1):
        column = position % columns
        if position and column == 0:
            y += 84
        x = MARGIN + 112 + column * (width + GAP)
        row = by_position.get(position)
        if column == 0:
            canvas.label(MARGIN, y + 19, "token")
            canvas.small(MARGIN, y - 7, "position", "start")
            canvas.small(MARGIN, y + BOX_HEIGHT + 14, "row in the cache", "start")
        canvas.small(x + width / 2, y - 7, str(position))
        if row is not None:
            in_prompt = row.number < len(trace.passes[0].rows)
            kind = _kind_of(row) if in_prompt else "value"
            canvas.box(x, y, row.word, kind, width)
            canvas.small(x + width / 2, y + BOX_HEIGHT + 14, str(row.number))
        elif position in predicted:
            canvas.box(x, y, predicted[position], "value", width)
            canvas.small(x + width / 2, y + BOX_HEIGHT + 14, "last, not read")
        else:
            canvas.slot(x, y, width)
    y += BOX_HEIGHT + 32
    canvas.legend(
        MARGIN,
        y,
        [
            ("prompt", "document"),
            ("key", "key"),
            ("value", "value in its gap"),
            ("empty", "rest of the gap"),
        ],
    )
    return canvas.svg(y + 32)


def _offer_rows(canvas: Canvas, trace: Trace, offers: Sequence[Offer], x: float, y: float) -> float:
    """Draw a prompt of several documents and what its passes decode; return the y below it."""
    prompt = trace.passes[0].rows
    values = _values_of(trace)
    kinds = ["prompt", "second"]
    left = x
    line = [row for row in prompt if not _is_key(row)]
    number = 0
    for offer, kind in zip(offers, kinds, strict=False):
        count = len(offer.text.split())
        words = [row.word for row in line[number : number + count]]
        boxes = _line_of_boxes(canvas, left, y, words, [kind] * count)
        left = boxes[-1].right + 3 * GAP
        number += count
    y += ROW_HEIGHT + 12
    slots = list(values)
    key_width = max(box_width(prompt[slot].word) for slot in slots)
    width = _widest_word(values)
    column_width = key_width + GAP + len(trace.passes) * (width + GAP) + 8 * GAP
    first = 0
    top = y
    for number, offer in enumerate(offers):
        column = x + number * column_width
        y = top
        for slot in slots[first : first + len(offer.values)]:
            canvas.box(column, y, prompt[slot].word, "key", key_width)
            for pass_number, word in values[slot]:
                value_x = column + key_width + GAP + (pass_number - 1) * (width + GAP)
                canvas.box(value_x, y, word, "value", width)
            y += ROW_HEIGHT
        for pass_number in range(1, len(trace.passes) + 1):
            middle = column + key_width + GAP + (pass_number - 1) * (width + GAP) + width / 2
            canvas.small(middle, y + 8, f"pass {pass_number}")
        first += len(offer.values)
    return y + 20


def stacking() -> str:
    """Draw two documents that share a prompt."""
    canvas = Canvas("Two documents share one prompt, and all their values are decoded at once.")
    offers = [HEADPHONES, KETTLE]
    (stacked,) = methods.hpd([offers])
    canvas.heading(MARGIN, 32, "One prompt: document 1, document 2, skeleton 1, skeleton 2")
    y = _offer_rows(canvas, stacked, offers, MARGIN, 46)
    count = len(stacked.passes)
    decoded = len(stacked.predictions)
    canvas.label(MARGIN, y + 14, f"{count} passes decode {decoded} tokens of two documents.")
    return canvas.svg(y + 34)


@dataclass(frozen=True)
class _MatrixRow:
    """A token in a matrix of what tokens see.

    Attributes:
        word: Its text.
        kind: Its kind of cell.
        sees: The indices of the rows that it sees.
    """

    word: str
    kind: str
    sees: set[int]


def _matrix(canvas: Canvas, x: float, y: float, rows: Sequence[_MatrixRow]) -> float:
    """Draw which rows see which, from the upper left corner (x, y); return the y below."""
    for index, row in enumerate(rows):
        top = y + index * _CELL
        canvas.small(x + 44, top + 11, row.word, "end")
        for column in range(len(rows)):
            kind = "hidden"
            if column in row.sees:
                kind = row.kind
            canvas.cell(x + 50 + column * _CELL, top, _CELL - 2, kind)
    return y + len(rows) * _CELL


def _matrix_rows(traces: Sequence[Trace]) -> list[_MatrixRow]:
    """Put the rows of programs below one another, with the indices of the rows that each sees."""
    rows: list[_MatrixRow] = []
    for trace in traces:
        base = len(rows)
        prompt = len(trace.passes[0].rows)
        for row in trace.rows:
            kind = "value"
            if row.number < prompt and _is_key(row):
                kind = "key"
            elif row.number < prompt:
                kind = "second"
            sees = {base + number for number in row.sees}
            rows.append(_MatrixRow(row.word, kind, sees))
    return rows


def isolation() -> str:
    """Draw what each token sees under the three kinds of isolation."""
    canvas = Canvas(
        "What each token sees: with isolate none all of the prompt, with documents its own "
        "document, with values no other value."
    )
    first = Offer("Bose QC 45", {"Brand:": "Bose x", "Model:": "QC 45"})
    second = Offer("Smeg 1.7 l", {"Brand:": "Smeg x", "Size:": "1.7 l"})
    panels = [
        ("none", "one prompt, the paper's mask", methods.hpd([[first, second]])),
        ("documents", "the default", methods.hpd([[first], [second]])),
        ("values", "each value by itself", methods.hpd([[first], [second]], isolate_values=True)),
    ]
    panel_width = (WIDTH - 2 * MARGIN) / len(panels)
    bottom = 0.0
    for number, (name, note, traces) in enumerate(panels):
        x = MARGIN + number * panel_width
        canvas.heading(x, 32, f"isolate: {name}")
        canvas.label(x, 52, note)
        bottom = max(bottom, _matrix(canvas, x, 66, _matrix_rows(traces)))
    canvas.label(
        MARGIN, bottom + 22, "A row is a token; its filled cells are the tokens that it attends to."
    )
    canvas.legend(
        MARGIN,
        bottom + 36,
        [
            ("second", "document"),
            ("key", "key"),
            ("value", "token of a value"),
            ("hidden", "hidden"),
        ],
    )
    return canvas.svg(bottom + 66)


@dataclass(frozen=True)
class _Cell:
    """A token on a timeline.

    Attributes:
        thread: The key of its thread.
        column: The pass that predicted it, or before whose prediction it was inserted.
        word: Its text.
        kind: Its kind of box.
        note: What stands below it.
    """

    thread: int
    column: int
    word: str
    kind: str
    note: str = ""


class _Timeline:
    """Threads as lines of boxes, whose columns are the passes."""

    def __init__(self, canvas: Canvas, names: dict[int, str], y: float) -> None:
        """
        Args:
            canvas: The canvas.
            names: The names of the threads by their keys, from top to bottom.
            y: The top edge of the first thread.
        """
        self.canvas = canvas
        self._x = MARGIN + 66
        self._tops: dict[int, float] = {}
        for number, (thread, name) in enumerate(names.items()):
            self._tops[thread] = y + number * (ROW_HEIGHT + 14)
            canvas.label(MARGIN, self._tops[thread] + 18, name)
        self.bottom = y + len(names) * (ROW_HEIGHT + 14)

    def draw(self, cells: Sequence[_Cell]) -> dict[tuple[int, int], Box]:
        """Draw tokens; return the box of each by its thread and column."""
        columns: dict[int, list[_Cell]] = {}
        for cell in cells:
            columns.setdefault(cell.column, []).append(cell)
        boxes: dict[tuple[int, int], Box] = {}
        x = float(self._x)
        for column in sorted(columns):
            width = max(box_width(cell.word) for cell in columns[column])
            for cell in columns[column]:
                top = self._tops[cell.thread]
                box = self.canvas.box(x, top, cell.word, cell.kind, width)
                self.canvas.small(box.middle, box.bottom + 12, cell.note)
                boxes[cell.thread, column] = box
            self.canvas.small(x + width / 2, self.bottom + 6, f"pass {column}")
            x += width + _TIMELINE_GAP
        return boxes


def _fork_arrow(canvas: Canvas, source: Box, target: Box) -> None:
    """Draw an arrow from a box to a lower one, in the gap to the left of the lower one's column."""
    start = source.right
    if source.x >= target.x:
        start = source.x
    x = target.x - _TIMELINE_GAP / 2 - 2
    y = source.y + source.height / 2
    target_y = target.y + target.height / 2
    canvas.arrow([(start, y), (x, y), (x, target_y), (target.x, target_y)])


def forks() -> str:
    """Draw APAR's threads over the passes."""
    canvas = Canvas("Behind [Fork] a thread continues with its next paragraph, and a child begins.")
    trace = methods.forks()
    # Segments 0, 1 and 3 are the paragraphs of the first thread, 2 and 4 the details.
    thread_of = {0: 0, 1: 0, 3: 0, 2: 2, 4: 4}
    timeline = _Timeline(canvas, {0: "thread 1", 2: "thread 2", 4: "thread 3"}, 20)
    cells: list[_Cell] = []
    text_tokens = 0
    for number, prediction in trace.predictions:
        thread = thread_of[prediction.behind.segment]
        kind = "control"
        if prediction.word not in (methods.FORK, methods.END):
            kind = "value"
            text_tokens += 1
        cells.append(_Cell(thread, number, prediction.word, kind))
    for number, one_pass in enumerate(trace.passes, 1):
        for row in one_pass.rows:
            if row.word == methods.CHILD:
                # It was fed in this pass, so it stands before what this pass predicted.
                thread = thread_of[row.segment]
                cells.append(_Cell(thread, number - 1, row.word, "control"))
    boxes = timeline.draw(cells)
    forked = [number for number, prediction in trace.predictions if prediction.word == methods.FORK]
    for thread, number in zip((2, 4), forked, strict=True):
        child = min(column for key, column in boxes if key == thread)
        _fork_arrow(canvas, boxes[0, number], boxes[thread, child])
    y = timeline.bottom + 22
    canvas.label(
        MARGIN,
        y + 14,
        f"{len(trace.passes)} passes for {len(trace.predictions)} tokens; "
        f"{text_tokens} of them are text.",
    )
    return canvas.svg(y + 32)


def promises() -> str:
    """Draw PASTA's threads over the passes, with the positions of their tokens."""
    canvas = Canvas(
        "The main thread skips the promised positions and continues; children fill them in. At "
        "<sync/> it waits for them."
    )
    trace = methods.promises()
    # The main thread opens a segment behind each promise and behind the <sync/>.
    thread_of = {0: 0, 2: 0, 4: 0, 5: 0, 1: 1, 3: 3}
    timeline = _Timeline(canvas, {0: "main", 1: "child 1", 3: "child 2"}, 20)
    cells: list[_Cell] = []
    promised: list[int] = []
    for number, prediction in trace.predictions:
        thread = thread_of[prediction.behind.segment]
        word = prediction.word
        kind = "value"
        if word.startswith("<"):
            kind = "control"
        if word.startswith("<promise"):
            promised.append(number)
            word = f"<promise {methods.PROMISED}/>"
        position = _position_of(trace, prediction)
        cells.append(_Cell(thread, number, word, kind, position))
    for number, one_pass in enumerate(trace.passes, 1):
        for row in one_pass.rows:
            if row.word == methods.OPEN:
                thread = thread_of[row.segment]
                cells.append(_Cell(thread, number - 1, row.word, "control", str(row.position)))
    boxes = timeline.draw(cells)
    for thread, number in zip((1, 3), promised, strict=True):
        child = min(column for key, column in boxes if key == thread)
        _fork_arrow(canvas, boxes[0, number], boxes[thread, child])
    y = timeline.bottom + 22
    canvas.label(
        MARGIN,
        y + 14,
        "The numbers below tokens are positions: behind a promise of "
        f"{methods.PROMISED} the main thread continues {methods.PROMISED} positions later.",
    )
    return canvas.svg(y + 32)


def _position_of(trace: Trace, prediction: Prediction) -> str:
    """Return the position at which a predicted word was read; "" if it was the last one."""
    for row in trace.rows:
        if row.word == prediction.word and row.position > prediction.behind.position:
            return str(row.position)
    return ""


def masks() -> str:
    """Draw SPACE's passes: what is verified, and what the mask tokens draft."""
    canvas = Canvas(
        "Each pass verifies the drafts of the last one and drafts the next tokens behind every "
        "place where the text may end."
    )
    trace = methods.masks()
    x = MARGIN + 124.0
    y = 20.0
    for number, one_pass in enumerate(trace.passes, 1):
        canvas.label(MARGIN, y + 18, f"pass {number}")
        canvas.small(x - 10, y + 18, "reads", "end")
        canvas.small(x - 10, y + BOX_HEIGHT + 22, "predicts", "end")
        _draw_verification(canvas, one_pass, x, y)
        y += 2 * ROW_HEIGHT + 10
    canvas.legend(
        MARGIN,
        y,
        [
            ("prompt", "text"),
            ("second", "draft"),
            ("control", "mask token"),
            ("value", "next word of the text"),
            ("third", "new draft"),
            ("rejected", "not used"),
        ],
    )
    return canvas.svg(y + 30)


def _draw_verification(canvas: Canvas, one_pass: Pass, x: float, y: float) -> None:
    """Draw the tokens that a pass reads, and below each one the word that it predicts."""
    words = [row.word for row in one_pass.rows]
    kinds = []
    for row in one_pass.rows:
        kind = "second"
        if row.word == methods.MASK:
            kind = "control"
        elif row.segment == 0:
            kind = "prompt"
        kinds.append(kind)
    predicted = {prediction.behind.number: prediction.word for prediction in one_pass.predictions}
    widths = []
    for row in one_pass.rows:
        widths.append(max(box_width(row.word), box_width(predicted.get(row.number, ""))))
    boxes = _line_of_boxes(canvas, x, y, words, kinds, widths)
    # The drafts that are right, by their segments; segment 0 is the text itself.
    accepted = _accepted_drafts(one_pass, predicted)
    # Mask group g stands behind draft g; only that of the last accepted draft is used.
    used_group = methods.MASKS + 1 + len(accepted) - 1
    for box, row in zip(boxes, one_pass.rows, strict=True):
        word = predicted.get(row.number)
        if word is None:
            continue
        kind = "rejected"
        if row.segment in accepted:
            kind = "value"
        elif row.segment == used_group:
            kind = "third"
        canvas.box(box.x, box.bottom + 4, word, kind, box.width)


def _accepted_drafts(one_pass: Pass, predicted: dict[int, str]) -> set[int]:
    """Return segment 0 and the segments of the drafts that the pass accepted."""
    accepted = {0}
    expected = ""
    for row in one_pass.rows:
        if row.word == methods.MASK:
            continue
        if row.segment > 0:
            if row.word != expected:
                break
            accepted.add(row.segment)
        expected = predicted.get(row.number, "")
    return accepted


def recurrent_forks() -> str:
    """Draw the states of recurrent layers along the skeleton and its values."""
    canvas = Canvas(
        "On recurrent layers, a state follows the prompt, and a copy of it follows each value."
    )
    (trace,) = methods.hpd([[HEADPHONES]], isolate_values=True, family="lfm2")
    rows = {row.position: row for row in trace.rows}
    # The state that each run leaves behind, by the run's last token.
    states: dict[int, StateRun] = {}
    for one_pass in trace.passes:
        for run in one_pass.runs:
            states[run.rows[-1].number] = run
    canvas.label(MARGIN, 38, "prompt")
    x = MARGIN + 70.0
    key_states: dict[int, Box] = {}
    for run in trace.passes[0].runs:
        words = [row.word for row in run.rows]
        kinds = [_kind_of(row) for row in run.rows]
        boxes = _line_of_boxes(canvas, x, 20, words, kinds)
        key = run.rows[-1].number
        key_states[key] = canvas.state(boxes[-1].right + GAP, 20, run.end)
        x = key_states[key].right + GAP
    y = 20 + ROW_HEIGHT + 18.0
    # The last key comes first, so that no arrow crosses a value.
    for key, value in reversed(_values_of(trace).items()):
        position = trace.rows[key].position
        x = key_states[key].middle + 26
        y_middle = y + BOX_HEIGHT / 2
        canvas.arrow(
            [
                (key_states[key].middle, key_states[key].bottom),
                (key_states[key].middle, y_middle),
                (x, y_middle),
            ]
        )
        for offset, (number, word) in enumerate(value, 1):
            box = canvas.box(x, y, word, "value")
            canvas.small(box.middle, box.bottom + 12, f"pass {number}")
            x = box.right + GAP
            row = rows.get(position + offset)
            if row is not None:
                x = canvas.state(x, y, states[row.number].end).right + GAP
        y += ROW_HEIGHT + 14
    canvas.legend(
        MARGIN,
        y,
        [
            ("prompt", "document"),
            ("key", "key"),
            ("value", "value"),
            ("control", "state behind these tokens, by its number in memory"),
        ],
    )
    return canvas.svg(y + 30)


def cluster() -> str:
    """Draw where the parts of a run are on a cluster. No trace is needed."""
    canvas = Canvas(
        "Readers on a node's CPUs read documents from storage into the object store. Workers, one "
        "for each GPU, take them and commit units to storage. The driver on the head node plans "
        "and schedules."
    )
    source = Box(MARGIN, 96, 150, 112)
    canvas.panel(
        source,
        "prompt",
        "input",
        ["JSON, CSV, Parquet,", "PDF, mail, HTML, ...", "S3, GCS, Azure, disk"],
    )
    node = Box(208, 40, 444, 224)
    canvas.rectangle(node, "empty", dashed=True, radius=8)
    canvas.label(node.x + 12, node.y + 22, "each node")
    readers = canvas.panel(
        Box(226, 82, 182, 66), "key", "readers", ["read and parse,", "a CPU each"]
    )
    store = canvas.panel(Box(226, 180, 182, 66), "second", "object store", ["blocks of documents"])
    workers = canvas.panel(
        Box(452, 82, 182, 164),
        "value",
        "workers",
        ["a GPU each", "", "prompts", "continuous batching", "HPD, IPPD, ...", "typed values"],
    )
    output = Box(WIDTH - MARGIN - 150, 96, 150, 112)
    canvas.panel(
        output, "prompt", "output", ["units/*.parquet", "manifest, ledger", "one commit per unit"]
    )
    head = canvas.panel(
        Box(226, 306, 408, 66),
        "control",
        "head node: driver",
        ["plan, scheduling, lease, bill, budget, deadline"],
    )
    canvas.arrow([(source.right, 115), (readers.x, 115)])
    canvas.arrow([(readers.middle, readers.bottom), (store.middle, store.y)])
    canvas.arrow([(store.right, 213), (workers.x, 213)])
    canvas.arrow([(workers.right, 152), (output.x, 152)])
    canvas.line(readers.x + 60, node.bottom, readers.x + 60, head.y, dashed=True)
    canvas.line(workers.middle, node.bottom, workers.middle, head.y, dashed=True)
    canvas.label(readers.x + 70, 290, "units to read")
    canvas.label(workers.middle + 10, 290, "units to answer, usage")
    return canvas.svg(head.bottom + 22)


FIGURES: dict[str, Callable[[], str]] = {
    "cluster": cluster,
    "decoding": decoding,
    "skeleton": skeleton,
    "position-gaps": position_gaps,
    "stacking": stacking,
    "isolation": isolation,
    "forks": forks,
    "promises": promises,
    "mask-tokens": masks,
    "recurrent-forks": recurrent_forks,
}
