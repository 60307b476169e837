"""Many questions on one context, one record a question (IPPD, sections 3 and 4); choices are
answered by a letter. Pieces (instruction, context, question) are tokenized one by one, so that all
methods feed the same ids.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from string import ascii_uppercase
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import QuestionAnsweringConfig, RunConfig
from raypd.decoding import (
    Bounded,
    Choice,
    Context,
    Continuation,
    Grammar,
    Prompt,
    PromptTree,
    Question,
    autoregressive,
    intra_prompt,
)
from raypd.errors import ConfigError
from raypd.models import token_texts
from raypd.tasks.automata import vocabulary_of
from raypd.tasks.base import Document, Record, Request, confidence, seed_of
from raypd.tasks.documents import questions_of, text_of
from raypd.tasks.few_shot import load_examples
from raypd.tasks.prompting import decode_answer, encode, end_tokens, pieces, template_text
from raypd.tasks.sandbox import render

# Stand for them while the template is applied.
_CONTEXT = "\u241econtext\u241e"
_QUESTION = "\u241equestion\u241e"
_LEAST_CONTEXT = 16  # tokens of a context that must fit beside the longest question


def _line_ends(texts: Sequence[str], ends: frozenset[int], tokens: Sequence[int]) -> bool:
    """Whether an answer is complete: at one of the end tokens, or at a newline behind its first
    word.
    """
    last = tokens[-1]
    return last in ends or (
        "\n" in texts[last] and "\n" in "".join(texts[token] for token in tokens).lstrip()
    )


@dataclass
class _PageQuestion:
    """One question of a row: ready to be decoded, or with the reason why it cannot be."""

    id: str
    text: str = ""
    choices: list[str] | None = None
    rules: Bounded | None = None
    program: Question = field(default_factory=lambda: Question([], bool))
    error: str | None = None


@dataclass
class _Page:
    document: Document
    context: list[int]
    truncated: bool
    questions: list[_PageQuestion]

    def good(self) -> list[tuple[int, _PageQuestion]]:
        """(number, question) of what can be decoded."""
        return [
            (n, question) for n, question in enumerate(self.questions) if question.error is None
        ]


class QuestionAnsweringTask:
    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: object = None,
    ) -> None:
        assert isinstance(config.task, QuestionAnsweringConfig)
        self.task = config.task
        self.decoding = config.decoding
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._encode = partial(encode, tokenizer, special=False)
        self._ends = end_tokens(tokenizer)
        self._line_end = partial(_line_ends, token_texts(tokenizer), self._ends)
        self._vocabulary = vocabulary_of(tokenizer)
        self._rules = cache(self._rules_for)
        shown = {
            "instruction": (self.task.instruction or "").strip(),
            "unanswerable": self.task.unanswerable,
            "examples": load_examples(self.task),
            "context": _CONTEXT,
            "question": _QUESTION,
        }
        (message,) = render(template_text(None, "question_answering.j2"), [shown])
        around = pieces(tokenizer, message, [_CONTEXT, _QUESTION], cue="\nAnswer:")
        self._instruction, self._between, self._behind = around
        if self._remaining_tokens([]) < _LEAST_CONTEXT:
            raise ConfigError(
                f"task: instruction and examples ({len(self._instruction)} tokens) and an "
                "answer leave no room for a "
                f"context in the model's {self.context_length} tokens; show fewer examples "
                "(task.few_shot) or lower "
                f"task.max_answer_tokens ({self.task.max_answer_tokens})"
            )

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        stack: list[_Page] = []
        for document in documents:
            try:
                page = self._page(document)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            if not page.good():
                yield from self._records(page, {})
            elif self.decoding.method == "autoregressive":
                yield from self._one_by_one(page)
            else:
                stack.append(page)
                if len(stack) == self.decoding.documents_per_prompt:
                    yield self._stacked(stack)
                    stack = []
        if stack:
            yield self._stacked(stack)

    def _page(self, document: Document) -> _Page:
        """A row's context and questions as ids. Raises ValueError where the row cannot be used."""
        if document.error is not None:
            raise ValueError(document.error)
        context = text_of(document, [self.task.context_column])
        fields = questions_of(document.fields, self.task)
        questions = [self._question(number, question) for number, question in enumerate(fields)]
        tokens = self._encode(context)
        limit = self._remaining_tokens(
            [question for question in questions if question.error is None]
        )
        if len(tokens) > limit and self.task.too_long == "refuse":
            beside = f"at most {limit} fit beside its questions (task.too_long is refuse)"
            raise ValueError(f"too long: {len(tokens)} tokens, {beside}")
        return _Page(document, tokens[:limit] + self._between, len(tokens) > limit, questions)

    def _question(self, number: int, fields: Any) -> _PageQuestion:
        """One question as ids, with the rules of its answer, or with the reason why it cannot be
        used.
        """
        if not isinstance(fields, dict):
            fields = {"question": fields}
        name = fields.get("id")
        question = _PageQuestion(
            str(number) if name is None or not _writable(str(name)) else str(name)
        )
        try:
            self._fill(question, fields)
        except ValueError as error:
            question.error = f"question {number + 1} ({question.id}) {error}"
        return question

    def _fill(self, question: _PageQuestion, fields: dict[str, Any]) -> None:
        """Raises ValueError."""
        text = fields.get("question")
        choices = fields.get("choices")
        if not isinstance(text, str) or not text.strip():
            raise ValueError("is empty" if text is None or isinstance(text, str) else "is no text")
        question.text = text.strip()
        shown = " " + question.text
        if choices is not None:
            if not isinstance(choices, list) or not all(
                isinstance(c, (str, int, float)) for c in choices
            ):
                raise ValueError("has choices that are no list of texts")
            if not 1 <= len(choices) <= len(ascii_uppercase):
                raise ValueError(
                    f"has {len(choices)} choices: 1 to {len(ascii_uppercase)} have letters"
                )
            question.choices = [str(choice).strip() for choice in choices]
            shown += "".join(
                f"\n{a}. {c}" for a, c in zip(ascii_uppercase, question.choices, strict=False)
            )
        if not _writable(shown):
            question.text = question.text.encode("utf-8", "replace").decode()
            raise ValueError("holds half a surrogate pair")
        piece = self._encode(shown) + self._behind
        question.program = Question(piece, self._line_end)
        if question.choices is not None and not fields.get("multi_select"):
            question.rules = self._rules(len(question.choices))
            question.program = Question(
                piece, question.rules.stops, question.rules.allowed_token_ids
            )
        if self._remaining_tokens([question]) < _LEAST_CONTEXT:
            raise ValueError(f"is too long: {len(piece)} tokens leave no room for a context")

    def _rules_for(self, choices: int) -> Bounded:
        """An answer of one letter: one token, where the vocabulary has the letters."""
        grammar = Grammar(Choice(ascii_uppercase[:choices]), self._vocabulary)
        return Bounded(grammar, max(1, grammar.distance()))

    def _remaining_tokens(self, questions: Sequence[_PageQuestion]) -> int:
        longest = max((len(question.program.tokens) for question in questions), default=0)
        fixed = len(self._instruction) + len(self._between) + self.task.max_answer_tokens
        return self.context_length - fixed - longest

    def _stacked(self, stack: list[_Page]) -> Request:
        """One program for all questions of some rows (section 4.1)."""
        contexts = [
            Context(page.context, [question.program for _, question in page.good()])
            for page in stack
        ]
        program = intra_prompt(PromptTree(self._instruction, contexts), self.task.max_answer_tokens)

        def records(answers: Iterator[Continuation | str]) -> list[Record]:
            return [
                r
                for page in stack
                for r in self._records(page, {n: next(answers) for n, _ in page.good()})
            ]

        seed = seed_of(self.decoding.sampling.seed, [page.document.id for page in stack])
        indices = [page.document.index for page in stack]
        return Request(
            indices,
            program,
            lambda a: records(iter(a)),
            seed,
            lambda why: records(itertools.repeat(why)),
        )

    def _one_by_one(self, page: _Page) -> list[Request]:
        """One program a question; the last to end hands over the records of the row, in the order
        of its questions.
        """
        before = [*self._instruction, *page.context]
        answers: dict[int, Continuation | str] = {}

        def ended(n: int, answer: Continuation | str) -> list[Record]:
            answers[n] = answer
            return self._records(page, answers) if len(answers) == len(page.good()) else []

        requests = []
        for n, question in page.good():
            tokens = question.program.tokens
            stops = question.program.stops
            allowed = question.program.allowed_token_ids
            if question.rules is None:
                letters = None
            else:
                letters = rf" ?[A-{ascii_uppercase[len(question.choices or []) - 1]}]"
            prompt = Prompt([*before, *tokens], shared=len(before))
            program = autoregressive(prompt, self.task.max_answer_tokens, stops, allowed, letters)
            seed = seed_of(self.decoding.sampling.seed, [page.document.id, str(n)])
            finish = partial(ended, n)
            requests.append(Request([page.document.index], program, finish, seed, failed=finish))
        return requests

    def _records(self, page: _Page, answers: Mapping[int, Continuation | str]) -> list[Record]:
        """The row's records in the order of its questions; an answer may be the reason why there is
        none.
        """
        records = []
        for n, question in enumerate(page.questions):
            columns: dict[str, Any] = {"question_id": question.id, "question": question.text}
            answer = question.error or answers[n]
            if isinstance(answer, str):
                reason = question.error or f"question {n + 1} ({question.id}): {answer}"
                records.append(Record(page.document.index, columns, reason))
            else:
                columns |= {**self._read(question, answer), "truncated": page.truncated}
                records.append(Record(page.document.index, columns))
        return records

    def _read(self, question: _PageQuestion, answer: Continuation) -> dict[str, Any]:
        rated = confidence(answer.logprobs, choice=question.rules is not None)
        columns: dict[str, Any] = {"answer": None, "choice_index": None, "confidence": rated}
        if question.rules is not None and question.choices is not None:
            letter = question.rules.completion(answer.tokens)
            if letter is None:
                return columns | {"answer_status": "invalid"}
            index = ascii_uppercase.index(letter)
            return columns | {
                "answer": question.choices[index],
                "choice_index": index,
                "answer_status": "ok",
            }
        text = (
            decode_answer(self.tokenizer, self._ends, answer.tokens)
            .strip()
            .partition("\n")[0]
            .rstrip()
        )
        if self.task.unanswerable and text.strip(" \"'.").lower() == "null":
            return columns | {"answer_status": "null"}
        if not text:
            return columns | {"answer_status": "invalid"}
        return columns | {"answer": text, "answer_status": "ok" if answer.stopped else "truncated"}


def _writable(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode()
