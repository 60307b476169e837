"""`model: fake`: an engine and a task that take the time and count the tokens of real ones, without
weights. Answers have a length drawn from the document's id. Nothing here imports torch, so that a
machine carries many workers.
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
from raypd.decoding.counts import Finished, TokenCounts
from raypd.decoding.methods.registry import REGISTRY
from raypd.tasks import columns
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.documents import category_of, text_of, unpacked
from raypd.tasks.openai_batch import read_request
from raypd.tasks.prompting import DOCUMENTS, messages


@dataclass
class Program:
    """What one prompt costs, in tokens; in the engine, how far it is."""

    prefix: str  # the instruction, computed once an engine
    shared: int  # tokens of the prefix
    prompt: int  # tokens behind the prefix; in the engine those that are still to be put in
    # Of every value that is decoded in parallel; autoregressive decoding has one lane.
    lanes: list[int]
    tag: Any = None
    depth: int = 0  # tokens of every lane that are decoded
    counts: TokenCounts = field(default_factory=TokenCounts)

    def live(self) -> int:
        return sum(length > self.depth for length in self.lanes)


class FakeEngine:
    """Continuous batching: a step sleeps for a fixed time and for the time of its tokens."""

    patience: float | None = None
    waiting = ""

    def __init__(self, costs: FakeConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.costs, self.max_num_seqs, self.max_num_batched_tokens = (
            costs,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.queue: deque[Program] = deque()
        self.sequences: list[Program] = []
        self._prefixes: set[str] = set()  # that are in the cache
        self._free = 0.0  # when the simulated device is idle again (monotonic)

    @property
    def pending(self) -> int:
        return len(self.queue) + len(self.sequences)

    def submit(self, program: Program, *, tag: Any, sampling: Any = None, seed: int = 0) -> None:
        program.tag = tag
        self.queue.append(program)

    def close(self) -> None:
        """Drop all programs."""
        self.queue.clear()
        self.sequences = []

    def step(self) -> list[Finished]:
        """Simulate one pass and return the programs that finished."""
        began = time.monotonic()
        room, prefill, decode = self.max_num_batched_tokens, 0, 0
        waiting = sum(sequence.prompt or sequence.live() for sequence in self.sequences)
        while self.queue and len(self.sequences) < self.max_num_seqs and waiting < room:
            self.sequences.append(self._admit(self.queue.popleft()))
            waiting += self.sequences[-1].prompt
        # Sequences that decode go before prefills.
        for sequence in sorted(self.sequences, key=lambda s: s.prompt > 0):
            if room <= 0:
                break
            if sequence.prompt:
                tokens = min(room, sequence.prompt)
                sequence.counts.prefill_tokens += tokens
                sequence.prompt -= tokens
                sequence.counts.decode_tokens += 0 if sequence.prompt else sequence.live()
                prefill += tokens
            else:
                tokens = sequence.live()
                sequence.counts.decode_tokens += tokens
                sequence.depth += 1
                decode += tokens
            room -= tokens
        self._spend(began, prefill, decode)
        ended = [
            sequence for sequence in self.sequences if not sequence.prompt and not sequence.live()
        ]
        self.sequences = [
            sequence for sequence in self.sequences if sequence.prompt or sequence.live()
        ]
        for sequence in ended:
            sequence.counts.steps = sequence.depth + 1
        return [Finished(sequence.tag, sequence.lanes, None, sequence.counts) for sequence in ended]

    def _admit(self, program: Program) -> Program:
        if program.prefix in self._prefixes:
            program.counts.shared_tokens = program.shared
        else:
            program.prompt += program.shared
            self._prefixes.add(program.prefix)
        return program

    def _spend(self, began: float, prefill: int, decode: int) -> None:
        costs = self.costs
        seconds = costs.step_seconds + prefill / costs.prefill_tokens_per_second
        seconds += decode / costs.decode_tokens_per_second
        # Every sleep lasts a little too long. Up to 10 ms of that are subtracted from the next, so
        # that many short steps keep the configured rate.
        self._free = max(self._free, began - 0.01) + seconds
        if (remaining := self._free - time.monotonic()) > 2e-4:
            time.sleep(remaining)


class FakeTask:
    """Any kind of task: its columns, the cost of its prompts, and answers that say `fake`."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.task, self.costs = config, config.task, config.model.fake_costs
        self._method = config.decoding.method
        self._prompts: dict[str, tuple[int, int]] = {}
        if isinstance(self.task, ExtractionConfig):
            for name, message in messages(self.task).items():
                form = " {:.4}:" if config.decoding.bare else ',\n"{}":'
                keys = "".join(
                    form.format(attribute.name)
                    for attribute in self.task.categories[name].attributes
                )
                self._prompts[name] = (
                    self._tokens(message.replace(DOCUMENTS, "")),
                    self._tokens(keys),
                )

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        stacks: dict[str, list[tuple[Document, int]]] = {}
        plans: dict[str, Callable[[Document], Iterator[Request]]] = {
            "extraction": partial(self._extract, stacks),
            "question_answering": self._question,
            "generation": self._generate,
        }
        plan = plans.get(self.task.kind, self._any)
        for document in documents:
            try:
                if document.error is not None:
                    raise ValueError(document.error)
                yield from plan(document)
            except ValueError as error:
                yield Record(document.index, error=str(error))
        for name, stack in stacks.items():
            yield self._extraction(name, stack)

    def _any(self, document: Document) -> Iterator[Request]:
        """Of a task that is not known here: one answer a document, whose texts are `fake`."""
        prompt = self._tokens(text_of(document, self.config.text_columns()))
        lanes = self._lengths(
            document.id, 1, self.costs.answer_tokens, self.config.decoding.max_new_tokens
        )
        row = {f.name: "fake" for f in columns.SHAPES[self.task.kind].schema if f.type == "string"}
        yield self._request(document.index, prompt, lanes, [row])

    def _tokens(self, text: str) -> int:
        return max(1, math.ceil(len(text) / self.costs.characters_per_token))

    def _lengths(self, id: str, count: int, mean: int, longest: int) -> list[int]:
        """`count` lengths around a mean, the same for a document in every run."""
        draw = random.Random(zlib.crc32(id.encode()))
        return [min(longest, 1 + int(draw.random() * (2 * mean - 1))) for _ in range(count)]

    def _extract(
        self, stacks: dict[str, list[tuple[Document, int]]], document: Document
    ) -> Iterator[Request]:
        """The request of a stack that the document fills; `stacks`: by category, with the lengths
        of documents.
        """
        task = self.config.extraction
        name = category_of(document, self.config.input, task.categories)
        length = self._tokens(text_of(document, list(self.config.input.text_columns)))
        stack = stacks.setdefault(name, [])
        stack.append((document, min(length, task.max_document_tokens or length)))
        if len(stack) == self.config.decoding.documents_per_prompt:
            yield self._extraction(name, stacks.pop(name))

    def _extraction(self, name: str, stack: list[tuple[Document, int]]) -> Request:
        category = self.config.extraction.categories[name]
        shared, keys = self._prompts[name]
        count, decoding = len(category.attributes), self.config.decoding
        tokens, lanes = sum(length for _, length in stack), []
        for document, _ in stack:
            lanes += self._lengths(
                document.id, count, self.costs.value_tokens, decoding.max_value_tokens
            )
        if REGISTRY[self._method].whole_record:  # it writes the keys, too
            lanes = [min(keys + sum(lanes), decoding.max_new_tokens)]
        else:
            tokens += keys * len(stack)
            lanes = [sum(lanes)] if self._method == "guided" else lanes
        documents = [document.index for document, _ in stack]
        program: Any = Program(name, shared, tokens, lanes)
        return Request(
            documents, program, lambda _: [Record(i, _record(name, category)) for i in documents]
        )

    def _question(self, document: Document) -> Iterator[Request]:
        """All questions of a context at once, whatever the method."""
        assert isinstance(self.task, QuestionAnsweringConfig)
        column = unpacked(document.fields.get(self.task.questions_column))
        if not isinstance(column, list) or not column:
            raise ValueError(f"column {self.task.questions_column!r} holds no list of questions")
        rows = []
        for number, question in enumerate(column):
            fields = question if isinstance(question, dict) else {"question": question}
            name = str(number if fields.get("id") is None else fields["id"])
            answer = {"answer": "fake", "answer_status": "ok", "truncated": False}
            rows.append({"question_id": name, "question": str(fields.get("question")), **answer})
        texts = [
            self.task.instruction or "x" * 200,
            text_of(document, [self.task.context_column]),
            *map(str, column),
        ]
        lanes = self._lengths(
            document.id, len(rows), self.costs.value_tokens, self.task.max_answer_tokens
        )
        yield self._request(document.index, sum(map(self._tokens, texts)), lanes, rows)

    def _generate(self, document: Document) -> Iterator[Request]:
        """All turns at once."""
        assert isinstance(self.task, GenerationConfig)
        request = read_request(document, self.config)
        turns, longest = (
            [turn["content"] for turn in request.turns],
            request.parameters.max_new_tokens,
        )
        for sample in range(request.parameters.samples):
            id = f"{document.id}/{sample}"
            lengths = self._lengths(id, len(request.unanswered), self.costs.answer_tokens, longest)
            prompt = sum(map(self._tokens, turns))
            for turn, (text, length) in enumerate(zip(request.unanswered, lengths, strict=True)):
                prompt += self._tokens(text)
                row = {
                    "sample": sample,
                    "turn": turn,
                    "text": "fake",
                    "finish_reason": "stop",
                    "tokens": length,
                }
                row |= {"counters": json.dumps({"prompt_tokens": prompt}), "warnings": []}
                yield self._request(document.index, prompt, [length], [row])
                prompt += length

    def _request(
        self, index: int, prompt: int, lanes: list[int], rows: list[dict[str, Any]]
    ) -> Request:
        program: Any = Program("", 0, prompt, lanes)
        return Request([index], program, lambda _: [Record(index, row) for row in rows])


def _record(name: str, category: Category) -> dict[str, Any]:
    texts = {a.name: "fake" if a.fits("fake") else None for a in category.attributes}
    values = [columns.value_row(n, v, "ok" if v else "null", None) for n, v in texts.items()]
    record = json.dumps(columns.record_of(category, texts), ensure_ascii=False)
    return {"category": name, "record": record, "values": values, "truncated": False}


def make(config: RunConfig) -> tuple[FakeEngine, FakeTask]:
    """Engine and task of `model: fake`, after the seconds that a model would take to load."""
    time.sleep(config.model.fake_costs.load_seconds)
    sizes = config.engine
    return FakeEngine(
        config.model.fake_costs, sizes.most_seqs, sizes.batched_tokens(gpu=False)
    ), FakeTask(config)
