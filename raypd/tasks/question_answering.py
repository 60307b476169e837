"""Question answering: many questions on one context, one record per question.

IPPD describes the task in sections 3 and 4. A question with choices is answered with a letter. The
instruction, the context and each question are tokenized separately, so that all decoding methods
use the same ids.
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
    Program,
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

# Placeholders for the context and the question while the template is applied.
_CONTEXT = "\u241econtext\u241e"
_QUESTION = "\u241equestion\u241e"
# The minimum number of tokens of a context that must fit in addition to the longest question.
_MIN_CONTEXT = 16


def _line_ends(texts: Sequence[str], ends: frozenset[int], tokens: Sequence[int]) -> bool:
    """Return whether an answer is complete: at an end token, or at a newline after a word.

    Args:
        texts: The text of each token of the vocabulary.
        ends: Ids that end an answer.
        tokens: The ids of the answer so far.
    """
    last = tokens[-1]
    if last in ends:
        return True
    if "\n" not in texts[last]:
        return False
    answer = "".join(texts[token] for token in tokens)
    return "\n" in answer.lstrip()


@dataclass
class _PageQuestion:
    """A question of a row.

    Attributes:
        id: Its id, or its number in the row.
        text: Its text, without its choices.
        choices: Its choices; None for an open question.
        rules: Restricts the answer to a letter; None for an open question.
        program: The ids of the question, and when its answer is complete.
        error: Why it cannot be decoded, or None.
    """

    id: str
    text: str = ""
    choices: list[str] | None = None
    rules: Bounded | None = None
    program: Question = field(default_factory=lambda: Question([], bool))
    error: str | None = None


@dataclass
class _Page:
    """A row of the input that is ready for a prompt.

    Attributes:
        document: The row.
        context: The ids of its context, and of the text between it and a question.
        truncated: Whether the context was cut.
        questions: Its questions.
    """

    document: Document
    context: list[int]
    truncated: bool
    questions: list[_PageQuestion]

    def usable_questions(self) -> list[tuple[int, _PageQuestion]]:
        """Return the questions that can be decoded, with their numbers."""
        usable = []
        for number, question in enumerate(self.questions):
            if question.error is None:
                usable.append((number, question))
        return usable


class QuestionAnsweringTask:
    """The task `question_answering`."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        model: object = None,
    ) -> None:
        """Tokenize the instruction.

        Args:
            config: The run's configuration.
            tokenizer: The tokenizer of the model.
            context_length: The number of positions of the model.
            model: Not used.

        Raises:
            ConfigError: The instruction and the examples leave no room for a context, or an example
                cannot be used.
        """
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
        values = {
            "instruction": (self.task.instruction or "").strip(),
            "unanswerable": self.task.unanswerable,
            "examples": load_examples(self.task),
            "context": _CONTEXT,
            "question": _QUESTION,
        }
        (message,) = render(template_text(None, "question_answering.j2"), [values])
        around = pieces(tokenizer, message, [_CONTEXT, _QUESTION], cue="\nAnswer:")
        # The ids before the context, between context and question, and after the question.
        self._instruction, self._between, self._behind = around
        if self._remaining_tokens([]) < _MIN_CONTEXT:
            raise ConfigError(
                f"task: instruction and examples ({len(self._instruction)} tokens) and an answer "
                f"leave no room for a context in the model's {self.context_length} tokens; show "
                "fewer examples (task.few_shot) or lower task.max_answer_tokens "
                f"({self.task.max_answer_tokens})"
            )

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield a request per question with `autoregressive`; otherwise yield one request for all
        questions of several rows.
        """
        stack: list[_Page] = []
        for document in documents:
            try:
                page = self._page(document)
            except ValueError as error:
                yield Record(index=document.index, error=str(error))
                continue
            if not page.usable_questions():
                yield from self._records(page, {})
            elif self.decoding.method == "autoregressive":
                yield from self._question_requests(page)
            else:
                stack.append(page)
                if len(stack) == self.decoding.documents_per_prompt:
                    yield self._stack_request(stack)
                    stack = []
        if stack:
            yield self._stack_request(stack)

    def _page(self, document: Document) -> _Page:
        """Return a row's context and questions as ids.

        Raises:
            ValueError: The row cannot be used.
        """
        if document.error is not None:
            raise ValueError(document.error)
        context = text_of(document, [self.task.context_column])
        items = questions_of(document.fields, self.task)
        questions = [self._question(number, item) for number, item in enumerate(items)]
        tokens = self._encode(context)
        usable = [question for question in questions if question.error is None]
        limit = self._remaining_tokens(usable)
        if len(tokens) > limit and self.task.long_documents == "reject":
            raise ValueError(
                f"too long: {len(tokens)} tokens, at most {limit} fit beside its questions "
                "(task.long_documents is reject)"
            )
        return _Page(document, tokens[:limit] + self._between, len(tokens) > limit, questions)

    def _question(self, number: int, item: Any) -> _PageQuestion:
        """Return a question as ids, with the rules of its answer or why it cannot be used.

        Args:
            number: The number of the question in its row, from 0.
            item: The question: a text, or an object with `question` and optionally `id` and
                `choices`.
        """
        if not isinstance(item, dict):
            item = {"question": item}
        question_id = str(number)
        if item.get("id") is not None and _is_encodable(str(item["id"])):
            question_id = str(item["id"])
        question = _PageQuestion(question_id)
        try:
            self._fill(question, item)
        except ValueError as error:
            question.error = f"question {number + 1} ({question.id}) {error}"
        return question

    def _fill(self, question: _PageQuestion, item: dict[str, Any]) -> None:
        """Set a question's text, choices, program and rules.

        Raises:
            ValueError: It cannot be used; the text so far remains for the error record.
        """
        question.text = _question_text(item.get("question"))
        shown = f" {question.text}"
        if item.get("choices") is not None:
            question.choices = _choices(item["choices"])
            for letter, choice in zip(ascii_uppercase, question.choices, strict=False):
                shown += f"\n{letter}. {choice}"
        if not _is_encodable(shown):
            question.text = question.text.encode("utf-8", "replace").decode()
            raise ValueError("contains half a surrogate pair")
        tokens = self._encode(shown) + self._behind
        question.program = Question(tokens, self._line_end)
        if question.choices is not None and not item.get("multi_select"):
            rules = self._rules(len(question.choices))
            question.rules = rules
            question.program = Question(tokens, rules.stops, rules.allowed_token_ids)
        if self._remaining_tokens([question]) < _MIN_CONTEXT:
            raise ValueError(f"is too long: {len(tokens)} tokens leave no room for a context")

    def _rules_for(self, choices: int) -> Bounded:
        """Return what restricts an answer to the letter of a choice.

        It is one token if the vocabulary contains the letters.
        """
        grammar = Grammar(Choice(ascii_uppercase[:choices]), self._vocabulary)
        return Bounded(grammar, max(1, grammar.distance()))

    def _remaining_tokens(self, questions: Sequence[_PageQuestion]) -> int:
        """Return how many tokens a context may have in addition to the longest of its questions."""
        longest = max((len(question.program.tokens) for question in questions), default=0)
        fixed = len(self._instruction) + len(self._between) + self.task.max_answer_tokens
        return self.context_length - fixed - longest

    def _stack_request(self, stack: list[_Page]) -> Request:
        """Return one request for all questions of some rows (IPPD, section 4.1)."""
        contexts = []
        for page in stack:
            questions = [question.program for _, question in page.usable_questions()]
            contexts.append(Context(page.context, questions))
        tree = PromptTree(self._instruction, contexts)
        program = intra_prompt(tree, self.task.max_answer_tokens)

        def records(answers: Iterator[Continuation | str]) -> list[Record]:
            """Return the records of all rows, whose answers come in the order of the questions."""
            output = []
            for page in stack:
                answer_of = {number: next(answers) for number, _ in page.usable_questions()}
                output += self._records(page, answer_of)
            return output

        def finish(answers: Sequence[Continuation]) -> list[Record]:
            return records(iter(answers))

        def failed(reason: str) -> list[Record]:
            return records(itertools.repeat(reason))

        seed = seed_of(self.decoding.sampling.seed, [page.document.id for page in stack])
        indices = [page.document.index for page in stack]
        return Request(indices, program, finish, seed, failed)

    def _question_requests(self, page: _Page) -> list[Request]:
        """Return a request per question of a row.

        The last one to finish returns the records of the row, in the order of its questions.
        """
        answers: dict[int, Continuation | str] = {}
        usable = page.usable_questions()

        def take(number: int, answer: Continuation | str) -> list[Record]:
            answers[number] = answer
            if len(answers) < len(usable):
                return []
            return self._records(page, answers)

        requests = []
        for number, question in usable:
            seed = seed_of(self.decoding.sampling.seed, [page.document.id, str(number)])
            program = self._question_program(page, question)
            finish = partial(take, number)
            requests.append(Request([page.document.index], program, finish, seed, failed=finish))
        return requests

    def _question_program(self, page: _Page, question: _PageQuestion) -> Program[Continuation]:
        """Return the program that answers one question alone."""
        shared = [*self._instruction, *page.context]
        pattern = None
        if question.rules is not None and question.choices is not None:
            # The pattern is for engines that restrict an answer by themselves.
            last_letter = ascii_uppercase[len(question.choices) - 1]
            pattern = rf" ?[A-{last_letter}]"
        return autoregressive(
            Prompt([*shared, *question.program.tokens], shared=len(shared)),
            self.task.max_answer_tokens,
            question.program.stops,
            question.program.allowed_token_ids,
            pattern,
        )

    def _records(self, page: _Page, answers: Mapping[int, Continuation | str]) -> list[Record]:
        """Return the records of a row, in the order of its questions.

        Args:
            page: The row.
            answers: For each question's number, its answer, or the reason why it has none.
        """
        records = []
        for number, question in enumerate(page.questions):
            columns: dict[str, Any] = {"question_id": question.id, "question": question.text}
            error = question.error
            if error is None:
                answer = answers[number]
                if isinstance(answer, str):
                    error = f"question {number + 1} ({question.id}): {answer}"
                else:
                    columns.update(self._read(question, answer))
                    columns["truncated"] = page.truncated
            records.append(Record(page.document.index, columns, error))
        return records

    def _read(self, question: _PageQuestion, answer: Continuation) -> dict[str, Any]:
        """Return the columns of an answer."""
        is_choice = question.rules is not None
        columns: dict[str, Any] = {
            "answer": None,
            "choice_index": None,
            "confidence": confidence(answer.logprobs, choice=is_choice),
        }
        if question.rules is not None and question.choices is not None:
            letter = question.rules.completion(answer.tokens)
            if letter is None:
                columns["answer_status"] = "invalid"
                return columns
            index = ascii_uppercase.index(letter)
            columns["answer"] = question.choices[index]
            columns["choice_index"] = index
            columns["answer_status"] = "ok"
            return columns
        text = decode_answer(self.tokenizer, self._ends, answer.tokens)
        first_line = text.strip().partition("\n")[0].rstrip()
        if self.task.unanswerable and first_line.strip(" \"'.").lower() == "null":
            columns["answer_status"] = "null"
        elif not first_line:
            columns["answer_status"] = "invalid"
        else:
            columns["answer"] = first_line
            columns["answer_status"] = "ok" if answer.stopped else "truncated"
        return columns


def _question_text(value: Any) -> str:
    """Return the text of a question; raise ValueError if it has none."""
    if value is None:
        raise ValueError("is empty")
    if not isinstance(value, str):
        raise ValueError("is not text")
    if not value.strip():
        raise ValueError("is empty")
    return value.strip()


def _choices(value: Any) -> list[str]:
    """Return the choices of a question as texts; raise ValueError if they cannot be used."""
    is_list = isinstance(value, list) and all(isinstance(c, (str, int, float)) for c in value)
    if not is_list:
        raise ValueError("has choices that are not a list of texts")
    if not 1 <= len(value) <= len(ascii_uppercase):
        raise ValueError(
            f"has {len(value)} choices, but only 1 to {len(ascii_uppercase)} have letters"
        )
    return [str(choice).strip() for choice in value]


def _is_encodable(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which UTF-8 cannot encode."""
    return text == text.encode("utf-8", "replace").decode()
