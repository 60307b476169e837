"""`model: fake`: an engine and a task that take the time and count the tokens of real ones.

They need no weights. The length of an answer is drawn from the document's id. Nothing here imports
torch, so that one machine can run many workers.
"""

import json
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raypd.config import (
    Category,
    ExtractionConfig,
    FakeConfig,
    GenerationConfig,
    QuestionAnsweringConfig,
    RunConfig,
)
from raypd.decoding import REGISTRY, Finished, TokenCounts
from raypd.tasks import (
    DOCUMENTS,
    Document,
    Record,
    Request,
    category_of,
    columns,
    messages,
    questions_of,
    read_request,
    record_of,
    text_of,
)


@dataclass
class Program:
    """What one prompt costs in tokens, and how far the engine has come with it.

    Attributes:
        prefix: Identifies the instruction, which an engine prefills only once.
        shared: Tokens of the prefix.
        prompt: Tokens after the prefix; in the engine, those that are not prefilled yet.
        lanes: The length of each value that is decoded in parallel. Autoregressive decoding has a
            single lane.
        tag: The tag of the request.
        depth: Tokens decoded so far in every lane.
        counts: Tokens counted so far.
    """

    prefix: str
    shared: int
    prompt: int
    lanes: list[int]
    tag: Any = None
    depth: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)

    def live(self) -> int:
        """Return the number of lanes that are not complete."""
        return sum(length > self.depth for length in self.lanes)


class FakeEngine:
    """Simulates continuous batching: a step sleeps a fixed time plus the time of its tokens."""

    patience: float | None = None
    waiting = ""

    def __init__(self, costs: FakeConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Create an engine.

        Args:
            costs: The simulated speed.
            max_num_seqs: Sequences that are decoded at a time.
            max_num_batched_tokens: Tokens of one pass.
        """
        self.costs = costs
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.queue: deque[Program] = deque()
        self.sequences: list[Program] = []
        # Prefixes in the cache.
        self._prefixes: set[str] = set()
        # When the simulated device is idle again (monotonic).
        self._free = 0.0

    @property
    def pending(self) -> int:
        """The number of programs that have not finished yet."""
        return len(self.queue) + len(self.sequences)

    def submit(self, program: Program, *, tag: Any, sampling: Any = None, seed: int = 0) -> None:
        """Queue a program."""
        program.tag = tag
        self.queue.append(program)

    def close(self) -> None:
        """Drop all programs."""
        self.queue.clear()
        self.sequences = []

    def step(self) -> list[Finished]:
        """Simulate one pass and return the programs that finished."""
        began = time.monotonic()
        self._admit_waiting()
        room = self.max_num_batched_tokens
        prefill = 0
        decode = 0
        # Decoding sequences come before prefills.
        for sequence in sorted(self.sequences, key=lambda sequence: sequence.prompt > 0):
            if room <= 0:
                break
            if sequence.prompt:
                tokens = min(room, sequence.prompt)
                sequence.counts.prefill_tokens += tokens
                sequence.prompt -= tokens
                if sequence.prompt == 0:
                    # The last part of a prefill also samples the first token of each lane.
                    sequence.counts.decode_tokens += sequence.live()
                prefill += tokens
            else:
                tokens = sequence.live()
                sequence.counts.decode_tokens += tokens
                sequence.depth += 1
                decode += tokens
            room -= tokens
        self._spend(began, prefill, decode)
        return self._take_finished()

    def _admit_waiting(self) -> None:
        """Move queued programs into the batch until the next pass is full."""
        tokens = sum(sequence.prompt or sequence.live() for sequence in self.sequences)
        while self.queue and len(self.sequences) < self.max_num_seqs:
            if tokens >= self.max_num_batched_tokens:
                break
            program = self._admit(self.queue.popleft())
            self.sequences.append(program)
            tokens += program.prompt

    def _admit(self, program: Program) -> Program:
        if program.prefix in self._prefixes:
            program.counts.shared_tokens = program.shared
        else:
            program.prompt += program.shared
            self._prefixes.add(program.prefix)
        return program

    def _take_finished(self) -> list[Finished]:
        finished = []
        running = []
        for sequence in self.sequences:
            if sequence.prompt or sequence.live():
                running.append(sequence)
                continue
            sequence.counts.steps = sequence.depth + 1
            finished.append(Finished(sequence.tag, sequence.lanes, None, sequence.counts))
        self.sequences = running
        return finished

    def _spend(self, began: float, prefill: int, decode: int) -> None:
        """Sleep for as long as a pass takes.

        Args:
            began: When the pass began (monotonic).
            prefill: Prompt tokens of the pass.
            decode: Tokens that the pass decoded.
        """
        costs = self.costs
        seconds = costs.step_seconds + prefill / costs.prefill_tokens_per_second
        seconds += decode / costs.decode_tokens_per_second
        # Every sleep lasts a little too long. Up to 10 ms of the excess are subtracted from the
        # next sleep, so that many short steps keep the configured rate.
        self._free = max(self._free, began - 0.01) + seconds
        remaining = self._free - time.monotonic()
        if remaining > 2e-4:
            time.sleep(remaining)


class FakeTask:
    """Plans any kind of task: real columns, real prompt lengths, and the answer `fake`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = config.task
        self.costs = config.model.fake_costs
        self._method = config.decoding.method
        # By category: tokens of the instruction, and of the keys of an answer.
        self._prompts: dict[str, tuple[int, int]] = {}
        if isinstance(self.task, ExtractionConfig):
            key_format = ',\n"{}":'
            if config.decoding.bare:
                key_format = " {:.4}:"
            for name, message in messages(self.task, config.model).items():
                instruction = self._tokens(message.replace(DOCUMENTS, ""))
                attributes = self.task.categories[name].attributes
                keys = [key_format.format(attribute.name) for attribute in attributes]
                self._prompts[name] = (instruction, self._tokens("".join(keys)))

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield requests that together answer all documents."""
        stacks: dict[str, list[tuple[Document, int]]] = {}
        plans: dict[str, Callable[[Document], Iterator[Request]]] = {
            "extraction": partial(self._extract, stacks),
            "question_answering": self._question,
            "generation": self._generate,
        }
        plan = plans.get(self.task.kind, self._unknown_kind)
        for document in documents:
            try:
                if document.error is not None:
                    raise ValueError(document.error)
                yield from plan(document)
            except ValueError as error:
                yield Record(document.index, error=str(error))
        for name, stack in stacks.items():
            yield self._extraction(name, stack)

    def key_tokens(self, program: Program) -> int:
        """Return the tokens of the keys in the prompt of an extraction; 0 for another task."""
        if REGISTRY[self._method].whole_record:
            return 0
        _, keys = self._prompts.get(program.prefix, (0, 0))
        return keys

    def _unknown_kind(self, document: Document) -> Iterator[Request]:
        """Yield one answer per document, with `fake` in every text column."""
        prompt = self._tokens(text_of(document, self.config.text_columns()))
        longest = self.config.decoding.max_new_tokens
        lanes = self._lengths(document.id, 1, self.costs.answer_tokens, longest)
        schema = columns.SHAPES[self.task.kind].schema
        row = {column.name: "fake" for column in schema if column.type == "string"}
        yield self._request(document.index, prompt, lanes, [row])

    def _tokens(self, text: str) -> int:
        return max(1, math.ceil(len(text) / self.costs.characters_per_token))

    def _lengths(self, id: str, count: int, mean: int, longest: int) -> list[int]:
        """Draw `count` lengths around a mean; a document gets the same ones in every run."""
        generator = random.Random(zlib.crc32(id.encode()))
        lengths = []
        for _ in range(count):
            length = 1 + int(generator.random() * (2 * mean - 1))
            lengths.append(min(longest, length))
        return lengths

    def _extract(
        self, stacks: dict[str, list[tuple[Document, int]]], document: Document
    ) -> Iterator[Request]:
        """Yield the request of a stack that the document fills.

        Args:
            stacks: By category, the documents that wait for a full stack, with their tokens.
            document: The document to add.
        """
        task = self.config.extraction
        name = category_of(document, self.config.input, task.categories)
        length = self._tokens(text_of(document, list(self.config.input.text_columns)))
        stack = stacks.setdefault(name, [])
        stack.append((document, min(length, task.max_document_tokens or length)))
        if len(stack) == self.config.decoding.documents_per_prompt:
            yield self._extraction(name, stacks.pop(name))

    def _extraction(self, name: str, stack: list[tuple[Document, int]]) -> Request:
        """Return the request of a stack of documents of one category."""
        category = self.config.extraction.categories[name]
        decoding = self.config.decoding
        shared, keys = self._prompts[name]
        tokens = sum(length for _, length in stack)
        lanes: list[int] = []
        for document, _ in stack:
            lanes += self._lengths(
                document.id,
                len(category.attributes),
                self.costs.value_tokens,
                decoding.max_value_tokens,
            )
        if REGISTRY[self._method].whole_record:
            # The model writes the keys, too.
            lanes = [min(keys + sum(lanes), decoding.max_new_tokens)]
        else:
            tokens += keys * len(stack)
            if self._method == "guided":
                lanes = [sum(lanes)]
        documents = [document.index for document, _ in stack]
        program: Any = Program(name, shared, tokens, lanes)

        def finish(answer: Any) -> list[Record]:
            return [Record(index, _record(name, category)) for index in documents]

        return Request(documents, program, finish)

    def _question(self, document: Document) -> Iterator[Request]:
        """Yield one request for all questions of a context, whatever the method."""
        assert isinstance(self.task, QuestionAnsweringConfig)
        questions = questions_of(document.fields, self.task)
        rows = []
        for number, question in enumerate(questions):
            fields = question if isinstance(question, dict) else {"question": question}
            name = str(number if fields.get("id") is None else fields["id"])
            row = {
                "question_id": name,
                "question": str(fields.get("question")),
                "answer": "fake",
                "answer_status": "ok",
                "truncated": False,
            }
            rows.append(row)
        prompt = self._tokens(self.task.instruction or "x" * 200)
        prompt += self._tokens(text_of(document, [self.task.context_column]))
        prompt += sum(self._tokens(str(question)) for question in questions)
        lanes = self._lengths(
            document.id, len(rows), self.costs.value_tokens, self.task.max_answer_tokens
        )
        yield self._request(document.index, prompt, lanes, rows)

    def _generate(self, document: Document) -> Iterator[Request]:
        """Yield the requests of all turns together."""
        assert isinstance(self.task, GenerationConfig)
        request = read_request(document, self.task, self.config.decoding)
        first_prompt = sum(self._tokens(turn["content"]) for turn in request.turns)
        for sample in range(request.parameters.samples):
            lengths = self._lengths(
                f"{document.id}/{sample}",
                len(request.unanswered),
                self.costs.answer_tokens,
                request.parameters.max_new_tokens,
            )
            prompt = first_prompt
            for turn, (text, length) in enumerate(zip(request.unanswered, lengths, strict=True)):
                prompt += self._tokens(text)
                row = {
                    "sample": sample,
                    "turn": turn,
                    "text": "fake",
                    "finish_reason": "stop",
                    "tokens": length,
                    "counters": json.dumps({"prompt_tokens": prompt}),
                    "warnings": [],
                }
                yield self._request(document.index, prompt, [length], [row])
                prompt += length

    def _request(
        self, index: int, prompt: int, lanes: list[int], rows: list[dict[str, Any]]
    ) -> Request:
        program: Any = Program("", 0, prompt, lanes)

        def finish(answer: Any) -> list[Record]:
            return [Record(index, row) for row in rows]

        return Request([index], program, finish)


def _record(name: str, category: Category) -> dict[str, Any]:
    """Return the columns of an extraction in which every text is `fake` and all else is null."""
    value_of: dict[str, str | None] = {}
    values = []
    for attribute in category.attributes:
        value = None
        status = "null"
        if attribute.fits("fake"):
            value = "fake"
            status = "ok"
        value_of[attribute.name] = value
        values.append(columns.value_row(attribute.name, value, status, None))
    record = record_of(category, value_of)
    return {"category": name, "record": record, "values": values, "truncated": False}


def make(config: RunConfig) -> tuple[FakeEngine, FakeTask]:
    """Return the engine and task of `model: fake`, after the time that a model takes to load."""
    time.sleep(config.model.fake_costs.load_seconds)
    sizes = config.engine
    engine = FakeEngine(config.model.fake_costs, sizes.most_seqs, sizes.batched_tokens(gpu=False))
    return engine, FakeTask(config)
