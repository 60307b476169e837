"""Training examples of conversations.

Every answer of the assistant becomes one example, whose prompt is the conversation before it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

import raypd.training.annotate as annotate
from raypd.config import RunConfig
from raypd.decoding import (
    CHILD,
    CLOSE,
    FORK,
    MASK,
    OPEN,
    PROMISE,
    SYNC,
    Feed,
    Interpreter,
    Prompt,
    Reach,
    apar,
    grown,
)
from raypd.models import control_token, markup_bytes
from raypd.tasks import Document, GenerationTask, encode
from raypd.training.example import Example, Examples, Skip, check_usable, trace, written
from raypd.training.structure import Piece, Promise, Sync, outline, promises

AR_SHARE = 0.5  # p_ar of SAR-SFT
_CONTROL_TOKENS = (FORK, CHILD, MASK, PROMISE, OPEN, CLOSE, SYNC)
# The method whose text Medusa heads learn.
_TEXT_METHODS = {"medusa": "autoregressive", "apar_medusa": "apar"}
_METHOD_TOKENS = {"apar": (FORK, CHILD), "space": (MASK,)}
_UNLIMITED = 10**9
# Tokens that the main thread of `pasta` writes, and what they are: "text", "promise" or "sync".
TokenPiece = tuple[list[int], str]
Paragraph = tuple[list[int], list[int]]  # the tokens of a root, and those of its detail


class GenerationExamples(Examples):
    """Makes examples from documents with `turns` of the user and `responses` of the assistant."""

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
    ) -> None:
        super().__init__(config, tokenizer)
        self.context_length = context_length
        self.method = _TEXT_METHODS.get(config.decoding.method, config.decoding.method)
        self.task = GenerationTask(config, tokenizer, context_length, None)
        self.texts = markup_bytes(tokenizer) if self.method == "pasta" else []
        self.control = [
            control_token(tokenizer, name, config.model.name)
            for name in _METHOD_TOKENS.get(self.method, ())
        ]

    def __call__(self, documents: Sequence[Document]) -> list[Example]:
        """Return the examples of documents.

        For `apar` there are at most as many unstructured examples as structured ones.
        """
        examples: list[Example] = []
        for document in documents:
            try:
                check_usable(document)
                # The list is completed before it is added, so that a document gives all of its
                # examples or none.
                examples += list(self.examples(document))
            except Skip as reason:
                self.skip(reason)
        if self.method == "apar":
            return self._balanced(examples)
        return examples

    def _balanced(self, examples: list[Example]) -> list[Example]:
        """Drop unstructured examples beyond the number of structured ones (APAR's 1:1)."""
        structured = [example for example in examples if len(example.reach) > 1]
        if not structured:
            return examples
        plain = [example for example in examples if len(example.reach) == 1]
        surplus = len(plain) - len(structured)
        if surplus > 0:
            self.skipped["unstructured answers beyond the 1:1 of APAR"] += surplus
        order = np.random.default_rng(self.config.training.seed).permutation(len(plain))
        return [*(plain[i] for i in order[: len(structured)]), *structured]

    def examples(self, document: Document) -> Iterator[Example]:
        """Yield an example per answer of a document.

        Raises:
            Skip: If the document cannot be trained on.
        """
        for prompt, answer, tagged in self._answers(document):
            example = self._example(prompt, answer, tagged)
            if len(example) > self.context_length:
                raise Skip(
                    f"conversations of more than {self.context_length} tokens, the model's context"
                )
            yield example

    def _answers(self, document: Document) -> Iterator[tuple[list[int], str, str | None]]:
        """Yield per answer: the ids of the conversation before it, the answer, its tagged text."""
        task = self.task.task
        turns = _texts(document, task.prompt_column)
        responses = _texts(document, self.column)
        if len(turns) != len(responses):
            raise Skip(f"columns {task.prompt_column!r} and {self.column!r}: of different lengths")
        messages = []
        if task.system:
            messages.append({"role": "system", "content": task.system})
        tags = document.fields.get(annotate.COLUMN, [None] * len(turns))
        for turn, response, tagged in zip(turns, responses, tags, strict=True):
            if not turn.strip() or not response.strip():
                raise Skip("an empty turn")
            if any(name in response for name in _CONTROL_TOKENS):
                raise Skip("text that holds a control token")
            messages.append({"role": "user", "content": turn})
            yield self.task.tokens_of(messages), response, tagged
            messages.append({"role": "assistant", "content": response})

    def _example(self, prompt: list[int], answer: str, tagged: str | None) -> Example:
        """Return the example of one answer, as the method decodes it."""
        if self.method == "pasta":
            has_teacher = self.config.training.annotations is not None
            pieces = annotate.marked(tagged, answer) if has_teacher else promises(answer)
            return self._pasta(prompt, pieces)
        if self.method == "apar":
            return self._apar(prompt, answer)
        example = written(prompt, [*self.encode(answer), self.task.end])
        if self.method == "space":
            (mask,) = self.control
            k = self.config.decoding.method_options.mask_tokens
            groups = self.config.training.mask_groups
            example.draw = partial(masked, mask=mask, k=k, groups=groups)
        return example

    def _apar(self, prompt: list[int], answer: str) -> Example:
        """Return what `apar` feeds when it writes an answer's paragraphs side by side."""
        fork, child = self.control
        ends = frozenset([self.task.end])
        program = apar(Prompt(prompt), _UNLIMITED, fork, child, ends, max_threads=_UNLIMITED)
        example, _ = trace(program, OutlineTeacher(self._paragraphs(outline(answer))))
        return example

    def _pasta(self, prompt: list[int], pieces: list[Piece]) -> Example:
        """Return what the interpreter feeds when the model writes an answer in pieces."""
        main, children = self._token_pieces(pieces)
        limit = sum(len(tokens) for tokens, _ in main) + sum(map(len, children))
        program = Interpreter(
            Prompt(prompt),
            limit,
            self.texts,
            self._markup,
            frozenset([self.task.end]),
            max_async_tokens=limit,
            max_threads=len(children) + 1,
        )
        example, answer = trace(program.run(), ThreadsTeacher(main, children))
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            elif isinstance(piece, Promise):
                text += piece.text
        if answer.text != text:
            raise Skip("answers whose text reads as tags of PASTA-LANG")
        return example

    def _token_pieces(self, pieces: list[Piece]) -> tuple[list[TokenPiece], list[list[int]]]:
        """Return the tokens of the main thread, and those of each promised block.

        A promise states the number of its block's tokens, tags included, in multiples of ten
        (Pred-10X).
        """
        main: list[TokenPiece] = []
        children: list[list[int]] = []
        for piece in pieces:
            if isinstance(piece, Sync):
                main.append((self._markup(SYNC), "sync"))
            elif isinstance(piece, Promise):
                block = [*self.encode(piece.text), *self._markup(CLOSE)]
                length = 10 * max(1, round((len(block) + len(self._markup(OPEN))) / 10))
                promise = f'{PROMISE} topic="{piece.topic}" tokens="{length}"/>'
                main.append((self._markup(promise), "promise"))
                children.append(block)
            elif piece:
                main.append((self.encode(piece), "text"))
        main.append(([self.task.end], "text"))
        return main, children

    def _markup(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=True)

    def _paragraphs(self, parts: Sequence[tuple[str, str]]) -> list[Paragraph]:
        """Return the tokens of each root and detail.

        A root that has a detail ends with [Fork], and every other thread with the end token.
        """
        fork = self.control[0]
        end = self.task.end
        last = len(parts) - 1
        paragraphs = []
        for number, (root, detail) in enumerate(parts):
            root_end = end if number == last else fork
            paragraphs.append(([*self.encode(root), root_end], [*self.encode(detail), end]))
        return paragraphs


def _texts(document: Document, column: str) -> list[str]:
    """Return the texts in a column, which holds one text or a list; raise Skip for others."""
    texts = document.fields.get(column)
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise Skip(f"column {column!r}: expected text or a list of texts")
    return texts


def masked(
    text: Example, generator: torch.Generator | None, *, mask: int, k: int, groups: int
) -> Example:
    """Return a text with one draw of masks (SAR-SFT, equations 1 to 3).

    With one group, the text stays unchanged with probability p_ar. Otherwise k tokens of the
    answer, from a drawn index on, are masked, and what follows them is cut. The token before the
    masks and each mask predict the next token.

    With several groups, the text stays unchanged, and the masks of as many draws of equation 3 are
    added to it. Each group is a segment that sees the text before it and itself, as when SPACE
    decodes. All groups share one pass over the text.

    Args:
        text: The example without masks.
        generator: The source of randomness; None for torch's default generator.
        mask: The id of the mask token.
        k: The number of masks per group.
        groups: The number of groups.
    """
    first = min(text.targets) + 1  # the index of the answer's first token
    starts = len(text) - first - k + 1  # the number of indices at which a group can start
    if starts < 1:
        return replace(text, draw=None)
    if groups > 1:
        return _with_mask_groups(text, generator, mask, k, groups, first)
    if torch.rand((), generator=generator) < AR_SHARE:
        return replace(text, draw=None)
    start = first + int(torch.randint(starts, (), generator=generator))
    end = start + k
    return Example(
        tokens=np.concatenate([text.tokens[:start], np.full(k, mask)]),
        positions=text.positions[:end],
        segments=text.segments[:end],
        steps=text.steps[:end],
        reach=text.reach,
        targets={index: token for index, token in text.targets.items() if index < end},
    )


def _with_mask_groups(
    text: Example,
    generator: torch.Generator | None,
    mask: int,
    k: int,
    groups: int,
    first: int,
) -> Example:
    """Return a text with added groups of k masks; `first` is the answer's first index."""
    permutation = torch.randperm(len(text) - first - k + 1, generator=generator)
    starts = first + np.sort(permutation[:groups].numpy())  # [groups]
    # The indices of the tokens that masks replace: [groups * k].
    hidden = (starts[:, None] + np.arange(k)).ravel()
    group_numbers = np.arange(1, len(starts) + 1)
    reach: dict[tuple[int, int], Reach] = {}
    for group in range(1, len(starts) + 1):
        reach[group, 0] = Reach.CAUSAL
        reach[group, group] = Reach.CAUSAL
    targets = dict(text.targets)
    for offset, index in enumerate(hidden.tolist()):
        targets[len(text) + offset] = text.targets[index]
    return Example(
        tokens=np.concatenate([text.tokens, np.full(len(hidden), mask)]),
        positions=np.concatenate([text.positions, text.positions[hidden]]),
        segments=np.concatenate([text.segments, np.repeat(group_numbers, k)]),
        steps=np.concatenate([text.steps, np.repeat(text.steps[starts - 1], k)]),
        reach=grown(text.reach, reach),
        targets=targets,
    )


class OutlineTeacher:
    """Gives `apar` the tokens of paragraphs.

    Each thread is known by the segment that it fed last. The token after a [Fork] is the first of
    the next root. When it is fed, the program opens a segment for the next root and then one for
    the detail.
    """

    def __init__(self, paragraphs: Sequence[Paragraph]) -> None:
        self._paragraphs = iter(paragraphs)
        root, self._detail = next(self._paragraphs)
        self._threads = {0: iter(root)}  # segment -> the tokens that are still to be written
        self._segments = 1

    def __call__(self, feed: Feed) -> list[int]:
        gold = []
        for index in feed.sample_at:
            segment = 0 if feed.segments is None else feed.segments[index]
            thread = self._threads.pop(segment)
            token = next(thread, None)
            if token is None:  # the thread's [Fork] was fed
                self._threads[self._segments + 1] = iter(self._detail)
                root, self._detail = next(self._paragraphs)
                segment = self._segments
                thread = iter(root)
                self._segments += 2
                token = next(thread)
            gold.append(token)
            self._threads[segment] = thread
        return gold


class ThreadsTeacher:
    """Gives `pasta` the tokens of its threads, in the order in which the interpreter samples them.

    First comes the main thread, unless it waits or has ended, then the children that have not
    ended. A promise of the main thread opens the next child; at a sync the main thread waits for
    all open children.
    """

    def __init__(self, main: Sequence[TokenPiece], children: Sequence[list[int]]) -> None:
        """Take the pieces of the main thread and the tokens of each block, up to its </async>."""
        self._main: deque[tuple[int, str]] = deque()
        for tokens, kind in main:
            # A tag takes effect at its last token.
            self._main += [(token, "text") for token in tokens[:-1]]
            self._main += [(token, kind) for token in tokens[-1:]]
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
