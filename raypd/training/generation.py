"""Training examples of conversations: every answer of the assistant is one, behind the turns before
it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.pasta import Interpreter
from raypd.decoding.methods.registry import CHILD, CLOSE, FORK, MASK, OPEN, PROMISE, SYNC
from raypd.decoding.program import Feed
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import Reach, grown
from raypd.models.control_tokens import control_token, markup_bytes
from raypd.tasks.base import Document
from raypd.tasks.generation import GenerationTask
from raypd.tasks.prompting import encode
from raypd.training import annotate
from raypd.training.example import Example, Examples, Skip, check_usable, trace, written
from raypd.training.structure import Promise, Sync, outline, promises

AR_SHARE = 0.5  # p_ar of SAR-SFT
# Tokens that the main thread of `pasta` writes, and whether it is promise or sync.
TokenPiece = tuple[list[int], str]
Paragraph = tuple[list[int], list[int]]  # tokens of a root and of its detail


class GenerationExamples(Examples):
    """Makes examples of documents with `turns` (of the user) and `responses`, for the task and
    decoding of a run.
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
    ) -> None:
        super().__init__(config, tokenizer)
        method, self.context_length = config.decoding.method, context_length
        # Whose text heads learn.
        self.method = {"medusa": "autoregressive", "apar_medusa": "apar"}.get(method, method)
        self.task = GenerationTask(config, tokenizer, context_length, None)
        names = {"apar": (FORK, CHILD), "space": (MASK,)}.get(self.method, ())
        self.texts = markup_bytes(tokenizer) if self.method == "pasta" else []
        self.control = [control_token(tokenizer, name, config.model.name) for name in names]

    def __call__(self, documents: Sequence[Document]) -> list[Example]:
        """Examples of the documents; for `apar` as many of structured answers as of others."""
        examples: list[Example] = []
        for document in documents:
            try:
                check_usable(document)
                examples += list(self.examples(document))  # all of a document's, or none
            except Skip as reason:
                self.skip(reason)
        structured = [example for example in examples if len(example.reach) > 1]
        if self.method != "apar" or not structured:
            return examples
        plain = [example for example in examples if len(example.reach) == 1]
        if len(plain) > len(structured):
            self.skipped["unstructured answers beyond the 1:1 of APAR"] += len(plain) - len(
                structured
            )
        order = np.random.default_rng(self.config.training.seed).permutation(len(plain))
        return [*(plain[i] for i in order[: len(structured)]), *structured]

    def examples(self, document: Document) -> Iterator[Example]:
        for prompt, answer, tagged in self._answers(document):
            example = self._example(prompt, answer, tagged)
            if len(example) > self.context_length:
                raise Skip(
                    f"conversations of more than {self.context_length} tokens, the model's context"
                )
            yield example

    def _answers(self, document: Document) -> Iterator[tuple[list[int], str, str | None]]:
        """(the conversation up to an answer, as ids; the answer; with a teacher's tags)."""
        task = self.task.task
        turns, responses = (
            _texts(document, column) for column in (task.prompt_column, self.column)
        )
        if len(turns) != len(responses):
            raise Skip(f"columns {task.prompt_column!r} and {self.column!r}: of different lengths")
        before = [{"role": "system", "content": task.system}] if task.system else []
        tags = document.fields.get(annotate.COLUMN, [None] * len(turns))
        for turn, response, tagged in zip(turns, responses, tags, strict=True):
            if not turn.strip() or not response.strip():
                raise Skip("an empty turn")
            if any(name in response for name in (FORK, CHILD, MASK, PROMISE, OPEN, CLOSE, SYNC)):
                raise Skip("text that holds a control token")
            before.append({"role": "user", "content": turn})
            yield self.task.tokens_of(before), response, tagged
            before.append({"role": "assistant", "content": response})

    def _example(self, prompt: list[int], answer: str, tagged: str | None) -> Example:
        end = self.task.end
        if self.method == "pasta":
            taught = self.config.training.annotations is not None
            return self._pasta(
                prompt, annotate.marked(tagged, answer) if taught else promises(answer)
            )
        if self.method == "apar":
            fork, child = self.control
            program = apar(Prompt(prompt), 10**9, fork, child, frozenset([end]), max_threads=10**9)
            return trace(program, OutlineTeacher(self._paragraphs(outline(answer))))[0]
        example = written(prompt, [*self.encode(answer), end])
        if self.method == "space":
            (mask,) = self.control
            k, groups = self.config.decoding.mask_tokens, self.config.training.mask_groups
            example.draw = partial(masked, mask=mask, k=k, groups=groups)
        return example

    def _pasta(self, prompt: list[int], pieces: list[str | Promise | Sync]) -> Example:
        """What the interpreter feeds; a promise names its block's tokens, tags too, in multiples of
        ten (Pred-10X).
        """
        steps: list[TokenPiece] = []  # of the main thread
        children: list[list[int]] = []
        for piece in pieces:
            if isinstance(piece, Sync):
                steps.append((self._markup(SYNC), "sync"))
            elif isinstance(piece, Promise):
                block = [*self.encode(piece.text), *self._markup(CLOSE)]
                length = 10 * max(1, round((len(block) + len(self._markup(OPEN))) / 10))
                children.append(block)
                steps.append(
                    (
                        self._markup(f'{PROMISE} topic="{piece.topic}" tokens="{length}"/>'),
                        "promise",
                    )
                )
            elif piece:
                steps.append((self.encode(piece), "text"))
        steps.append(([self.task.end], "text"))
        ends, threads = frozenset([self.task.end]), len(children) + 1
        limit = sum(len(tokens) for tokens, _ in steps) + sum(map(len, children))
        program = Interpreter(
            Prompt(prompt),
            limit,
            self.texts,
            self._markup,
            ends,
            max_async_tokens=limit,
            max_threads=threads,
        )
        example, answer = trace(program.run(), ThreadsTeacher(steps, children))
        texts = [
            piece if isinstance(piece, str) else piece.text
            for piece in pieces
            if not isinstance(piece, Sync)
        ]
        if answer.text != "".join(texts):
            raise Skip("answers whose text reads as tags of PASTA-LANG")
        return example

    def _markup(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=True)

    def _paragraphs(self, parts: Sequence[tuple[str, str]]) -> list[Paragraph]:
        """The tokens of roots and details: a [Fork] ends roots with a detail, the end token all
        other threads.
        """
        fork, end = self.control[0], self.task.end
        roots = [[*self.encode(root), fork] for root, _ in parts[:-1]] + [
            [*self.encode(parts[-1][0]), end]
        ]
        return [
            (root, [*self.encode(detail), end])
            for root, (_, detail) in zip(roots, parts, strict=True)
        ]


def _texts(document: Document, column: str) -> list[str]:
    value = document.fields.get(column)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise Skip(f"column {column!r}: expected text or a list of texts")
    return texts


def masked(
    text: Example, generator: torch.Generator | None, *, mask: int, k: int, groups: int
) -> Example:
    """A text with one draw of masks, the token `mask`, `k` in a group (SAR-SFT, equations 1 to 3).

    One group: the text as it is with probability p_ar; else k tokens of the answer from a drawn
    place on are masked, and what is behind them is cut. The token in front of the masks and each
    mask predict what comes next. Several: the text as it is, and beside it the masks of as many
    draws of equation 3, each group a segment that sees the text in front of it and itself, as when
    SPACE decodes. They share one pass over the text.
    """
    first = min(text.targets) + 1  # of the answer
    places = len(text) - first - k + 1
    if places < 1 or (groups == 1 and torch.rand((), generator=generator) < AR_SHARE):
        return replace(text, draw=None)
    if groups == 1:
        m = first + int(torch.randint(places, (), generator=generator))
        end = m + k
        tokens = np.concatenate([text.tokens[:m], np.full(k, mask)])
        targets = {index: token for index, token in text.targets.items() if index < end}
        return Example(
            tokens, text.positions[:end], text.segments[:end], text.steps[:end], text.reach, targets
        )
    # [groups].
    starts = first + np.sort(torch.randperm(places, generator=generator)[:groups].numpy())
    # [groups * k] the tokens that masks stand for.
    hidden = (starts[:, None] + np.arange(k)).ravel()
    segments = np.repeat(np.arange(1, len(starts) + 1), k)
    reach = {
        (group, segment): Reach.CAUSAL
        for group in range(1, len(starts) + 1)
        for segment in (0, group)
    }
    return Example(
        np.concatenate([text.tokens, np.full(len(hidden), mask)]),
        np.concatenate([text.positions, text.positions[hidden]]),
        np.concatenate([text.segments, segments]),
        np.concatenate([text.steps, np.repeat(text.steps[starts - 1], k)]),
        grown(text.reach, reach),
        text.targets
        | {len(text) + i: text.targets[index] for i, index in enumerate(hidden.tolist())},
    )


class OutlineTeacher:
    """Answers `apar` so that it writes paragraphs: to each thread, known by the segment it feeds
    last, its next token. The token behind a [Fork] is the first of the next root; with it the
    program gives the next root and the detail a segment each, in this order.
    """

    def __init__(self, paragraphs: Sequence[Paragraph]) -> None:
        self._paragraphs = iter(paragraphs)
        root, self._detail = next(self._paragraphs)
        self._threads = {0: iter(root)}  # segment -> tokens still to be written
        self._segments = 1

    def __call__(self, feed: Feed) -> list[int]:
        gold = []
        for index in feed.sample_at:
            segment = 0 if feed.segments is None else feed.segments[index]
            thread = self._threads.pop(segment)
            token = next(thread, None)
            if token is None:  # its [Fork] was fed
                self._threads[self._segments + 1] = iter(self._detail)
                root, self._detail = next(self._paragraphs)
                segment, thread = self._segments, iter(root)
                self._segments += 2
                token = next(thread)
            gold.append(token)
            self._threads[segment] = thread
        return gold


class ThreadsTeacher:
    """Answers `pasta` in the order in which the interpreter asks: the main thread, unless it waits
    or has ended, then the children that have not ended. A promise of `main` opens the next child,
    at a sync it waits for all of them; `children` are the tokens of each block, up to its </async>.
    """

    def __init__(self, main: Sequence[TokenPiece], children: Sequence[list[int]]) -> None:
        self._main = deque(
            (t, kind if n == len(ts) - 1 else "text") for ts, kind in main for n, t in enumerate(ts)
        )
        self._blocks = [deque(block) for block in children]
        self._opened = 0
        self._waits = False

    def __call__(self, feed: Feed) -> list[int]:
        gold: list[int] = []
        running = [block for block in self._blocks[: self._opened] if block]
        if self._main and not self._waits:
            token, kind = self._main.popleft()
            gold.append(token)
            self._opened += kind == "promise"
            self._waits = kind == "sync"
        gold += [block.popleft() for block in running]
        self._waits = self._waits and any(self._blocks[: self._opened])
        return gold
