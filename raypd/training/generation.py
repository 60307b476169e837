"""Training examples of conversations: every answer of the assistant is one, behind the turns before it.

`autoregressive` learns to write it token by token, `space` also to draft (SAR-SFT, section 3.1), `apar` to fork where
its structure can be told by rules (appendix B), `pasta` to promise the same parts. Medusa heads learn the same texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.pasta import pasta
from raypd.decoding.methods.registry import CHILD, CLOSE, FORK, MASK, OPEN, PROMISE, SYNC
from raypd.decoding.program import Feed
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import Reach, grown
from raypd.models.control_tokens import control_token, markup_bytes
from raypd.tasks.base import Document
from raypd.tasks.generation import GenerationTask
from raypd.tasks.prompting import encode
from raypd.training import annotate
from raypd.training.example import Example, Skip, check_usable, trace
from raypd.training.labels import text_teacher
from raypd.training.structure import AnswerTree, Promise, Sync, answer_tree, promises

AR_SHARE = 0.5  # p_ar of SAR-SFT
Kind = Literal["text", "promise", "sync"]


class GenerationExamples:
    """Makes examples of documents with `turns` (of the user) and `responses`, for the task and decoding of a run.

    `skipped` counts what was left out by its reason, `lost` counts documents.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        self.config, self.tokenizer, self.context_length = config, tokenizer, context_length
        method, self.column = config.decoding.method, config.training.labels_column
        self.method = {"medusa": "autoregressive", "apar_medusa": "apar"}.get(method, method)  # whose text heads learn
        self.task = GenerationTask(config, tokenizer, context_length, None)
        self.random = np.random.default_rng(config.training.seed)
        self.skipped: Counter[str] = Counter()
        self.lost = self.labels = self.lost_labels = 0
        names = {"apar": (FORK, CHILD), "space": (MASK,)}.get(self.method, ())
        self.texts = markup_bytes(tokenizer) if self.method == "pasta" else []
        self.control = [control_token(tokenizer, name, config.model.name) for name in names]

    def __call__(self, documents: Sequence[Document]) -> Iterator[Example]:
        """Examples of the documents, in their order; for `apar` as many of structured answers as of others."""
        plain: list[Example] = []
        structured: list[Example] = []
        for document in documents:
            try:
                for prompt, answer, tagged in self._answers(document):
                    example, forks = self._example(prompt, answer, tagged)
                    if len(example) > self.context_length:
                        raise Skip(f"conversations of more than {self.context_length} tokens, the model's context")
                    (structured if forks else plain).append(example)
            except Skip as reason:
                self.skipped[str(reason)] += 1
                self.lost += 1
        if self.method == "apar" and structured:
            order = self.random.permutation(len(plain))
            if len(plain) > len(structured):
                self.skipped["unstructured answers beyond the 1:1 of APAR"] += len(plain) - len(structured)
            plain = [plain[i] for i in order[: len(structured)]]
        yield from plain
        yield from structured

    def _answers(self, document: Document) -> Iterator[tuple[list[int], str, str | None]]:
        """(the conversation up to an answer, as ids; the answer; with a teacher's tags), for each answer."""
        check_usable(document)
        prompt_column = self.task.task.prompt_column
        turns, responses = document.fields.get(prompt_column), document.fields.get(self.column)
        turns = [turns] if isinstance(turns, str) else turns
        responses = [responses] if isinstance(responses, str) else responses
        for column, value in ((prompt_column, turns), (self.column, responses)):
            if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
                raise Skip(f"column {column!r}: expected text or a list of texts")
        assert turns is not None
        assert responses is not None
        if len(turns) != len(responses):
            raise Skip(f"columns {prompt_column!r} and {self.column!r}: of different lengths")
        system = self.task.task.system
        before = [{"role": "system", "content": system}] if system else []
        tags = document.fields.get(annotate.COLUMN, [None] * len(turns))
        for turn, response, tagged in zip(turns, responses, tags, strict=True):
            if not turn.strip() or not response.strip():
                raise Skip("an empty turn")
            if any(name in response for name in (FORK, CHILD, MASK, PROMISE, OPEN, CLOSE, SYNC)):
                raise Skip("text that holds a control token")
            before.append({"role": "user", "content": turn})
            yield self.task.tokens_of(before), response, tagged
            before.append({"role": "assistant", "content": response})

    def _example(self, prompt: list[int], answer: str, tagged: str | None) -> tuple[Example, bool]:
        """An answer's example, and whether it forks."""
        end = self.task.end
        if self.method == "pasta":
            taught = self.config.training.annotations is not None
            return self._pasta(prompt, annotate.marked(tagged, answer) if taught else promises(answer))
        if self.method == "apar":
            root = answer_tree(answer)
            fork, child = self.control
            teacher = TreeTeacher(self._tree(root, fork, end))
            program = apar(Prompt(prompt), 10**9, fork, child, frozenset([end]), max_threads=10**9)
            return trace(program, teacher)[0], root.detail is not None or root.next is not None
        tokens = [*self._encode(answer), end]
        writer = autoregressive(Prompt(prompt), len(tokens), lambda written: len(written) == len(tokens))
        example = trace(writer, text_teacher(tokens))[0]
        if self.method == "space":
            (mask,) = self.control
            k, groups = self.config.decoding.mask_tokens, self.config.training.mask_groups
            example.draw = partial(masked, mask=mask, k=k, groups=groups)
        return example, False

    def _pasta(self, prompt: list[int], pieces: list[str | Promise | Sync]) -> tuple[Example, bool]:
        """What the interpreter feeds when the main thread writes the pieces.

        A promise names the tokens of its block, tags included, in multiples of ten (Pred-10X).
        """
        steps: list[tuple[list[int], Kind]] = []  # of the main thread
        children: list[list[int]] = []
        for piece in pieces:
            if isinstance(piece, Sync):
                steps.append((self._markup(SYNC), "sync"))
            elif isinstance(piece, Promise):
                block = [*self._encode(piece.text), *self._markup(CLOSE)]
                length = 10 * max(1, round((len(block) + len(self._markup(OPEN))) / 10))
                children.append(block)
                tag = f'{PROMISE} topic="{piece.topic}" tokens="{length}"/>'
                steps.append((self._markup(tag), "promise"))
            elif piece:
                steps.append((self._encode(piece), "text"))
        end = self.task.end
        steps.append(([end], "text"))
        limit = sum(len(tokens) for tokens, _ in steps) + sum(map(len, children))
        program = pasta(
            Prompt(prompt),
            limit,
            self.texts,
            self._markup,
            frozenset([end]),
            max_async_tokens=limit,
            max_threads=len(children) + 1,
        )
        example, answer = trace(program, ThreadsTeacher(steps, children))
        texts = [piece if isinstance(piece, str) else piece.text for piece in pieces if not isinstance(piece, Sync)]
        if answer.text != "".join(texts):
            raise Skip("answers whose text reads as tags of PASTA-LANG")
        return example, bool(children)

    def _markup(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=True)

    def _tree(self, paragraph: AnswerTree, fork: int, end: int) -> Node:
        """The tokens of each paragraph: a [Fork] ends those with children, the end token all others."""
        text = self._encode(paragraph.text) if paragraph.text else []
        if paragraph.detail is None:
            return Node([*text, end])
        following = paragraph.next or AnswerTree("")
        return Node([*text, fork], self._tree(paragraph.detail, fork, end), self._tree(following, fork, end))

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=False)


def masked(text: Example, generator: torch.Generator | None, *, mask: int, k: int, groups: int) -> Example:
    """A text with one draw of masks (SAR-SFT, equations 1 to 3).

    One group: the text as it is with probability p_ar; else k tokens of the answer from a drawn place on are masked,
    and what is behind them is cut. The token in front of the masks and each mask predict what comes next.

    Several: the text as it is, and beside it the masks of as many draws of equation 3, each group a segment that sees
    the text in front of it and itself, as when SPACE decodes. They share one pass over the text.

    Args:
        mask: the id of [Mask]. k: masks of a group. groups: how many places of the answer are masked at once.
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
        return Example(tokens, text.positions[:end], text.segments[:end], text.steps[:end], text.reach, targets)
    starts = first + np.sort(torch.randperm(places, generator=generator)[:groups].numpy())  # [groups]
    hidden = (starts[:, None] + np.arange(k)).ravel()  # [groups * k] the tokens that masks stand for
    segments = np.repeat(np.arange(1, len(starts) + 1), k)
    reach = {(group, segment): Reach.CAUSAL for group in range(1, len(starts) + 1) for segment in (0, group)}
    return Example(
        np.concatenate([text.tokens, np.full(len(hidden), mask)]),
        np.concatenate([text.positions, text.positions[hidden]]),
        np.concatenate([text.segments, segments]),
        np.concatenate([text.steps, np.repeat(text.steps[starts - 1], k)]),
        grown(text.reach, reach),
        text.targets | {len(text) + i: text.targets[index] for i, index in enumerate(hidden.tolist())},
    )


@dataclass
class Node:
    """A paragraph's tokens as they are written, and those of its detail and of the next one."""

    tokens: list[int]
    child: Node | None = None
    sibling: Node | None = None


class TreeTeacher:
    """Answers `apar` so that it writes a tree: each thread its paragraph's next token.

    A thread is identified by the segment of the token that it feeds last. The token behind a [Fork] is the first of the
    next paragraph; with it the program gives the next paragraph and the detail a segment each, in this order.
    """

    def __init__(self, root: Node) -> None:
        self._threads: dict[int, tuple[Node, int]] = {0: (root, 0)}  # segment -> node, how much of it is written
        self._segments = 1

    def __call__(self, feed: Feed) -> list[int]:
        gold = []
        for index in feed.sample_at:
            segment = 0 if feed.segments is None else feed.segments[index]
            node, written = self._threads.pop(segment)
            if written == len(node.tokens):  # its [Fork] was fed
                assert node.child is not None
                assert node.sibling is not None
                self._threads[self._segments + 1] = node.child, 0
                segment, node, written = self._segments, node.sibling, 0
                self._segments += 2
            gold.append(node.tokens[written])
            self._threads[segment] = node, written + 1
        return gold


class ThreadsTeacher:
    """Answers `pasta` so that the main thread writes its pieces and every child its block, in the order in which the
    interpreter asks: the main thread, unless it waits or has ended, then the children that have not ended.

    Args:
        main: pieces of the main thread; a promise opens the next child, at a sync it waits until all have ended.
        children: the tokens of each block, up to its </async>.
    """

    def __init__(self, main: Sequence[tuple[list[int], Kind]], children: Sequence[list[int]]) -> None:
        self._main = [(t, kind if n == len(ts) - 1 else "text") for ts, kind in main for n, t in enumerate(ts)]
        self._blocks = [iter(block) for block in children]
        self._left = [len(block) for block in children]
        self._written = self._opened = 0
        self._waits = False

    def __call__(self, feed: Feed) -> list[int]:
        gold: list[int] = []
        opened = self._opened
        running = [n for n in range(opened) if self._left[n]]
        if self._written < len(self._main) and not self._waits:
            token, kind = self._main[self._written]
            self._written += 1
            gold.append(token)
            self._opened += kind == "promise"
            self._waits = kind == "sync"
        for number in running:
            gold.append(next(self._blocks[number]))
            self._left[number] -= 1
        if self._waits and not any(self._left[: self._opened]):
            self._waits = False
        return gold
