"""The works: the same tokens for all engines.

They are JSON, because the processes of the engines have no code in common.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.config import Extraction, Questions, RandomQuestions, RandomSlots, WorkConfig
from raypd.config import RunConfig
from raypd.config.load import load_config, make_config
from raypd.decoding.program import Feed
from raypd.decoding.visibility import Reach, visible
from raypd.errors import InputError
from raypd.schema import record_pattern
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record
from raypd.tasks.extraction_prompt import shortest_keys
from raypd.tasks.prompting import encode, end_tokens


@dataclass
class Work:
    """One work, in the shapes that engines take it in.

    Attributes:
        unit: What is counted, "documents" or "questions".
        count: How many there are.
        unavoidable: The tokens of prompts that any engine has to put through the model. What
            prompts share is counted once.
        values: The answers that are decoded. The last token of each is not fed.
        decoded: The tokens of all answers; None if the model ends them itself.
        attended: The pairs (token of a prompt, key that it sees) that no engine can avoid.
        keys: The number of keys that a decoded token sees when it is fed, on average.
        raypd: Prompts of `hyper_parallel` or `intra_prompt`, or the configuration and the rows of a
            task.
        whole: Requests of other engines, one per document: {tokens, max_tokens, ignore_eos,
            stop_ids}, and `json` or `regex` if the answer has to match it.
        each: The same, one per value or question.
        names: The attributes of each document, for `whole` and `each`.
    """

    unit: str
    count: int
    unavoidable: int
    values: int
    decoded: int | None
    raypd: dict[str, Any]
    attended: int = 0
    keys: float = 0.0
    whole: list[dict[str, Any]] = field(default_factory=list)
    each: list[dict[str, Any]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)


def make_work(
    config: WorkConfig,
    data: str | None,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    max_documents: int,
) -> Work:
    """Make the token streams of a work.

    Args:
        config: The work in the configuration.
        data: The folder of its data; None if there is none.
        tokenizer: The tokenizer of the model.
        context: The number of positions of the model.
        max_documents: A work of more documents is refused.

    Raises:
        InputError: If its data does not exist, or the model cannot do it.
        ConfigError: If its task cannot be used.
    """
    documents = getattr(config, "documents", 0)
    if documents > max_documents:
        raise InputError(
            f"{documents:,} documents are more than benchmark.most_documents ({max_documents:,})"
        )
    if isinstance(config, RandomSlots):
        work = _random_slots(config, tokenizer)
    elif isinstance(config, RandomQuestions):
        work = _random_questions(config, tokenizer)
    elif isinstance(config, Extraction):
        rows = _rows(data, config.data, config.documents)
        work = _extraction(config, rows, tokenizer, context)
    else:
        assert isinstance(config, Questions)
        rows = _rows(data, config.data, config.contexts)
        work = _questions(config, rows, tokenizer, context)
    requests = [*work.whole, *work.each]
    longest = max(len(request["tokens"]) + request["max_tokens"] for request in requests)
    if longest > context:
        raise InputError(
            f"its prompts and answers take {longest:,} tokens, and the model's context is "
            f"{context:,}"
        )
    return work


def _rows(data: str | None, name: str, count: int) -> list[dict[str, Any]]:
    """Read the first rows of a file of JSON lines."""
    if data is None:
        raise InputError(f"needs {name}: set benchmark.data to the folder that holds it")
    file = Path(data) / name
    try:
        with open(file, encoding="utf-8") as lines:
            return [json.loads(line) for line in islice(lines, count)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file}: cannot be read ({reason}); see benchmark.data") from None


class _Draw:
    """Draws random token ids, the same in every run, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self._ids = sorted(set(tokenizer.get_vocab().values()) - special)
        self._random = random.Random(0)

    def __call__(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)


def _fixed(tokens: Sequence[int], length: int) -> dict[str, Any]:
    """Return a request whose answer has exactly `length` tokens."""
    return {"tokens": list(tokens), "max_tokens": length, "ignore_eos": True, "stop_ids": []}


def _pairs(before: int, tokens: int) -> int:
    """Return the number of pairs (token, key that it sees) of a causal sequence.

    All of its tokens also see the `before` keys that come before it.
    """
    return tokens * before + tokens * (tokens + 1) // 2


def _random_slots(config: RandomSlots, tokenizer: PreTrainedTokenizerBase) -> Work:
    draw = _Draw(tokenizer)
    shared = draw(config.shared)
    work = Work(
        unit="documents",
        count=config.documents,
        unavoidable=config.shared,
        values=0,
        decoded=0,
        raypd={"prompts": []},
    )
    for start in range(0, config.documents, config.stack):
        documents = min(config.stack, config.documents - start)
        _add_stack(work, config, draw, shared, documents)
    work.decoded = work.values * config.value_tokens
    alone = config.shared + config.own  # the keys that a value sees besides those of its key
    per_document = _pairs(config.shared, config.own)
    per_document += config.attributes * _pairs(alone, config.key_tokens)
    work.attended = _pairs(0, config.shared) + config.documents * per_document
    work.keys = alone + config.key_tokens + config.value_tokens / 2
    return work


def _add_stack(
    work: Work, config: RandomSlots, draw: _Draw, shared: list[int], documents: int
) -> None:
    """Add the requests of documents that share one prompt."""
    length = config.value_tokens
    prompt = list(shared)
    for _ in range(documents):
        prompt += draw(config.own)
    tokens = list(prompt)
    ends = []
    for _ in range(documents * config.attributes):
        key = draw(config.key_tokens)
        tokens += key
        ends.append(len(tokens) - 1)
        work.each.append(_fixed(prompt + key, length))
    work.raypd["prompts"].append(
        {"tokens": tokens, "ends": ends, "shared": len(shared), "lengths": [length] * len(ends)}
    )
    work.whole.append(_fixed(prompt, len(ends) * (config.key_tokens + length)))
    work.unavoidable += len(tokens) - len(shared)
    work.values += len(ends)


def _random_questions(config: RandomQuestions, tokenizer: PreTrainedTokenizerBase) -> Work:
    draw = _Draw(tokenizer)
    shared = draw(config.shared)
    count = config.contexts * config.questions
    trees: list[dict[str, Any]] = []
    work = Work(
        unit="questions",
        count=count,
        unavoidable=(
            config.shared + config.contexts * config.context_tokens + count * config.question_tokens
        ),
        values=count,
        decoded=count * config.answer_tokens,
        raypd={"trees": trees},
    )
    alone = config.shared + config.context_tokens
    work.attended = (
        _pairs(0, config.shared)
        + config.contexts * _pairs(config.shared, config.context_tokens)
        + count * _pairs(alone, config.question_tokens)
    )
    work.keys = alone + config.question_tokens + config.answer_tokens / 2
    for _ in range(config.contexts):
        context = draw(config.context_tokens)
        questions = [draw(config.question_tokens) for _ in range(config.questions)]
        trees.append(
            {
                "shared": shared,
                "context": context,
                "questions": questions,
                "most": config.answer_tokens,
            }
        )
        for question in questions:
            work.each.append(_fixed(shared + context + question, config.answer_tokens))
    return work


def _extraction(
    config: Extraction, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int
) -> Work:
    task = load_config(config.task).task.model_dump() if config.task else task_of(rows)
    maker = _ExtractionMaker(config, rows, tokenizer, context, task)
    if config.answers == "labels":
        return maker.with_labels()
    return maker.with_own_answers()


class _ExtractionMaker:
    """Makes the work of an extraction."""

    def __init__(
        self,
        config: Extraction,
        rows: list[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        context: int,
        task: dict[str, Any],
    ) -> None:
        self.config = config
        self.rows = rows
        self.tokenizer = tokenizer
        self.tree = {"input": {"path": "-"}, "output": {"path": "-"}, "task": task}
        # Given values in slots are written as short lines by the other engines, too.
        self.in_slots = config.skeleton == "slots" and config.answers == "labels"
        self.decoding = {
            "skeleton": config.skeleton,
            "max_value_tokens": config.value_tokens,
            "max_new_tokens": config.max_new_tokens,
        }
        self.slotted = feeds(self._run("hyper_parallel"), tokenizer, context, rows)
        self.written = feeds(self._run("autoregressive"), tokenizer, context, rows)
        categories = self._run("guided").extraction.categories
        self.attributes = [categories[row["category"]].attributes for row in rows]
        pairs, keys = attended(self.slotted)
        self.work = Work(
            unit="documents",
            count=len(rows),
            unavoidable=unavoidable(self.slotted),
            values=0,
            decoded=None,
            raypd={},
            attended=pairs,
            keys=keys,
        )
        for attributes in self.attributes:
            self.work.names.append([attribute.name for attribute in attributes])
            self.work.values += len(attributes)

    def _run(self, method: str) -> RunConfig:
        return make_config({**self.tree, "decoding": {"method": method, **self.decoding}})

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=False)

    def _prompt_and_keys(self, number: int) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a document's prompt, and those of each key after it."""
        names = self.work.names[number]
        feed = self.slotted[number]
        if self.in_slots:
            colon = self._encode(":")
            keys = shortest_keys([self._encode(f" {name}") for name in names])
            keys = [key + colon for key in keys]
            return list(feed.tokens[: feed.sample_at[0] + 1 - len(keys[0])]), keys
        keys = []
        for name in names:
            keys.append(self._encode("{\n" + json.dumps(name, ensure_ascii=False) + ":"))
        opening = self._opening()
        prompt = list(self.written[number].tokens[: -len(opening)])
        if self.config.skeleton == "keys" and list(feed.tokens[: len(prompt)]) != prompt:
            raise InputError(
                f"document {self.rows[number]['id']}: too long for the model's context; leave it "
                "out"
            )
        return prompt, keys

    def _opening(self) -> list[int]:
        """Return the tokens with which `autoregressive` begins an answer."""
        return self._encode("{\n")

    def with_labels(self) -> Work:
        """Return the work in which every engine decodes the tokens of the labels."""
        prompts = []
        decoded = 0
        for number, (row, feed) in enumerate(zip(self.rows, self.slotted, strict=True)):
            prompt, keys = self._prompt_and_keys(number)
            values = []
            for name in self.work.names[number]:
                text = self._gold_text(row["target"].get(name))
                values.append(self._encode(text)[: self.config.value_tokens])
            prompts.append(
                {
                    "tokens": list(feed.tokens),
                    "ends": list(feed.sample_at),
                    "shared": feed.shared,
                    "values": values,
                }
            )
            value_tokens = sum(map(len, values))
            decoded += value_tokens
            closing = 0 if self.in_slots else 1
            length = len(feed.tokens) - len(prompt) + value_tokens + closing
            self.work.whole.append(_fixed(prompt, length))
            for key, value in zip(keys, values, strict=True):
                self.work.each.append(_fixed(prompt + key, len(value)))
        self.work.raypd = {"prompts": prompts}
        self.work.decoded = decoded
        return self.work

    def _gold_text(self, value: Any) -> str:
        """Return a label as it is decoded after its key."""
        if not self.in_slots:
            return f" {json.dumps(value, ensure_ascii=False)}"
        if value is None:
            return "\n"
        return f" {' '.join(str(value).split())}\n"

    def with_own_answers(self) -> Work:
        """Return the work in which the model decides its answers."""
        request = {
            "max_tokens": self.config.max_new_tokens,
            "ignore_eos": False,
            "stop_ids": sorted(end_tokens(self.tokenizer)),
        }
        # About as many characters as the tokens of a value can hold.
        characters = 4 * self.config.value_tokens
        regex = f' (null|"[^"\\\\\\n]{{0,{characters}}}")'
        for number in range(len(self.rows)):
            prompt, keys = self._prompt_and_keys(number)
            self.work.whole.append({**request, **self._whole(number, prompt, characters)})
            for key in keys:
                self.work.each.append(
                    {
                        **request,
                        "tokens": prompt + key,
                        "max_tokens": self.config.value_tokens,
                        "regex": regex,
                    }
                )
        self.work.raypd = {"run": {**self.tree, "decoding": self.decoding}, "rows": self.rows}
        return self.work

    def _whole(self, number: int, prompt: list[int], characters: int) -> dict[str, Any]:
        """Return the prompt of a whole answer, and what the answer has to match."""
        if self.config.layout == "lines":
            return {
                "tokens": prompt + self._opening(),
                "regex": record_pattern(self.attributes[number]),
                "opened": True,
            }
        names = self.work.names[number]
        value = {"anyOf": [{"type": "string", "maxLength": characters}, {"type": "null"}]}
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, value),
            "required": names,
            "additionalProperties": False,
        }
        return {"tokens": prompt, "json": schema}


def task_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a task with the attributes that the targets of each category name."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        names.setdefault(row["category"], {}).update(dict.fromkeys(row["target"]))
    categories = {}
    for category, attributes in names.items():
        categories[category] = {"attributes": [{"name": name} for name in attributes]}
    return {"categories": categories}


def _questions(
    config: Questions, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int
) -> Work:
    rows = [
        {**row, "questions": [question["question"] for question in row["questions"]]}
        for row in rows
    ]
    task = {"kind": "question_answering", "max_answer_tokens": config.answer_tokens}
    tree = {"input": {"path": "-"}, "output": {"path": "-"}, "task": task}
    together = feeds(make_config(tree, ["decoding.method=intra_prompt"]), tokenizer, context, rows)
    alone = feeds(make_config(tree, ["decoding.method=autoregressive"]), tokenizer, context, rows)
    line_ends = {id for id in tokenizer.get_vocab().values() if "\n" in tokenizer.decode([id])}
    stop_ids = sorted(end_tokens(tokenizer) | line_ends)
    pairs, keys = attended(together)
    work = Work(
        unit="questions",
        count=len(alone),
        unavoidable=unavoidable(together),
        values=len(alone),
        decoded=None,
        raypd={"run": tree, "rows": rows},
        attended=pairs,
        keys=keys,
    )
    for feed in alone:
        work.each.append(
            {
                "tokens": list(feed.tokens),
                "max_tokens": config.answer_tokens,
                "ignore_eos": False,
                "stop_ids": stop_ids,
            }
        )
    return work


def documents_of(rows: Sequence[dict[str, Any]]) -> list[Document]:
    """Return rows as documents of a task."""
    return [Document(index, str(row.get("id", index)), row) for index, row in enumerate(rows)]


def feeds(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    rows: Sequence[dict[str, Any]],
) -> list[Feed]:
    """Return the first feed of every program of a task.

    Args:
        config: The configuration of the task.
        tokenizer: The tokenizer of the model.
        context: The number of positions of the model.
        rows: The documents.

    Raises:
        InputError: If a row cannot be decoded.
    """
    first_feeds = []
    for request in build_task(config, tokenizer, context).plan(documents_of(rows)):
        if isinstance(request, Record):
            id = rows[request.index].get("id", request.index)
            raise InputError(f"document {id}: {request.error}")
        first_feeds.append(next(request.program))
    return first_feeds


def unavoidable(first_feeds: Sequence[Feed]) -> int:
    """Return the tokens of first feeds; those that they share are counted once."""
    shared = {tuple(feed.tokens[: feed.shared]) for feed in first_feeds}
    own = sum(len(feed.tokens) - feed.shared for feed in first_feeds)
    return own + sum(map(len, shared))


def attended(first_feeds: Sequence[Feed]) -> tuple[int, float]:
    """Return `attended` and `keys` of a work with these first feeds."""
    shared = {tuple(feed.tokens[: feed.shared]) for feed in first_feeds}
    pairs = sum(_pairs(0, len(tokens)) for tokens in shared)
    keys: list[int] = []
    for feed in first_feeds:
        zeros = [0] * len(feed.tokens)
        segments = np.array(feed.segments or zeros)
        positions = np.array(feed.positions or zeros)
        reach = np.full([int(segments.max()) + 1] * 2, Reach.HIDDEN)
        reach[0, 0] = Reach.CAUSAL
        for (query, key), kind in feed.reach.items():
            if max(query, key) < len(reach):
                reach[query, key] = kind
        keys_per_token = visible(reach, segments, positions, segments, positions).sum(1)
        pairs += int(keys_per_token[feed.shared :].sum())
        keys += keys_per_token[list(feed.sample_at)].tolist()
    return pairs, fmean(keys)
