"""What the engines are given: the same tokens for all, as JSON, so that processes that share no
code can do it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from raypd.tasks import build_task
from raypd.tasks.automata import record_pattern
from raypd.tasks.base import Document, Record
from raypd.tasks.extraction import shortest_keys
from raypd.tasks.prompting import encode, end_tokens


@dataclass
class Work:
    """One work, in the shapes that engines take it in.

    Attributes:
        unit, count: what is counted, documents or questions, and how many there are.
        unavoidable: tokens of prompts that any engine must put through the model: what prompts
            share, once.
        values: answers that are decoded, of which the last token of each is not fed.
        decoded: tokens of all of them; None: the model's own.
        attended: pairs (token of a prompt, key that it sees) that no engine can do without.
        keys: that a decoded token sees when it is fed, on average.
        raypd: prompts of `hyper_parallel` or `intra_prompt`, or the configuration and the rows of a
            task.
        whole, each: requests of other engines, one for a document's whole answer or one for a value
            or question:
            {tokens, max_tokens, ignore_eos, stop_ids}, and `json` or `regex` to hold the answer to.
        names: attributes of each document, for `whole` and `each`.
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
    most_documents: int,
) -> Work:
    """A work's token streams.

    Args:
        config: of the work.
        data: folder of its data.
        tokenizer: of the model.
        context: most tokens of a sequence.
        most_documents: a work of more is refused.

    Raises:
        InputError: its data is not there, or it cannot be done with this model.
        ConfigError: its task cannot be used.
    """
    if (wanted := getattr(config, "documents", 0)) > most_documents:
        raise InputError(
            f"{wanted:,} documents are more than benchmark.most_documents ({most_documents:,})"
        )
    if isinstance(config, RandomSlots):
        work = _random_slots(config, tokenizer)
    elif isinstance(config, RandomQuestions):
        work = _random_questions(config, tokenizer)
    elif isinstance(config, Extraction):
        work = _extraction(config, _rows(data, config.data, config.documents), tokenizer, context)
    else:
        assert isinstance(config, Questions)
        work = _questions(config, _rows(data, config.data, config.contexts), tokenizer, context)
    longest = max(len(one["tokens"]) + one["max_tokens"] for one in (*work.whole, *work.each))
    if longest > context:
        raise InputError(
            f"its prompts and answers take {longest:,} tokens, and the model's context is "
            f"{context:,}"
        )
    return work


def _rows(data: str | None, name: str, count: int) -> list[dict[str, Any]]:
    if data is None:
        raise InputError(f"needs {name}: set benchmark.data to the folder that holds it")
    file = Path(data) / name
    try:
        with open(file, encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: cannot be read ({getattr(error, 'strerror', None) or error}); see "
            "benchmark.data"
        ) from None


class _Draw:
    """Random ids, the same in every run, without those that mean something."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self._ids = sorted(set(tokenizer.get_vocab().values()) - special)
        self._random = random.Random(0)

    def __call__(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)


def _fixed(tokens: Sequence[int], most: int) -> dict[str, Any]:
    """A request whose answer has exactly so many tokens."""
    return {"tokens": list(tokens), "max_tokens": most, "ignore_eos": True, "stop_ids": []}


def _pairs(before: int, tokens: int) -> int:
    """Pairs (token, key that it sees) of so many tokens in order, behind so many keys that all of
    them see.
    """
    return tokens * before + tokens * (tokens + 1) // 2


def _random_slots(config: RandomSlots, tokenizer: PreTrainedTokenizerBase) -> Work:
    draw, per_value = _Draw(tokenizer), config.value_tokens
    shared = draw(config.shared)
    alone = config.shared + config.own  # keys that a value sees beside its own
    work = Work("documents", config.documents, config.shared, 0, 0, {"prompts": []})
    attributes = config.attributes * _pairs(alone, config.key_tokens)
    work.attended = _pairs(0, config.shared) + config.documents * (
        _pairs(config.shared, config.own) + attributes
    )
    work.keys = alone + config.key_tokens + per_value / 2
    for begin in range(0, config.documents, config.stack):
        stack = range(begin, min(begin + config.stack, config.documents))
        prompt = shared + [token for _ in stack for token in draw(config.own)]
        tokens, ends = list(prompt), []
        for _ in range(len(stack) * config.attributes):
            key = draw(config.key_tokens)
            tokens += key
            ends.append(len(tokens) - 1)
            work.each.append(_fixed(prompt + key, per_value))
        slotted = {
            "tokens": tokens,
            "ends": ends,
            "shared": len(shared),
            "lengths": [per_value] * len(ends),
        }
        work.raypd["prompts"].append(slotted)
        work.whole.append(_fixed(prompt, len(ends) * (config.key_tokens + per_value)))
        work.unavoidable += len(tokens) - len(shared)
        work.values += len(ends)
    work.decoded = work.values * per_value
    return work


def _random_questions(config: RandomQuestions, tokenizer: PreTrainedTokenizerBase) -> Work:
    draw = _Draw(tokenizer)
    shared = draw(config.shared)
    count = config.contexts * config.questions
    fed = config.shared + config.contexts * config.context_tokens + count * config.question_tokens
    trees: list[dict[str, Any]] = []
    work = Work("questions", count, fed, count, count * config.answer_tokens, {"trees": trees})
    alone = config.shared + config.context_tokens
    contexts = _pairs(0, config.shared) + config.contexts * _pairs(
        config.shared, config.context_tokens
    )
    work.attended = contexts + count * _pairs(alone, config.question_tokens)
    work.keys = alone + config.question_tokens + config.answer_tokens / 2
    for _ in range(config.contexts):
        context, questions = (
            draw(config.context_tokens),
            [draw(config.question_tokens) for _ in range(config.questions)],
        )
        trees.append(
            {
                "shared": shared,
                "context": context,
                "questions": questions,
                "most": config.answer_tokens,
            }
        )
        work.each += [
            _fixed(shared + context + question, config.answer_tokens) for question in questions
        ]
    return work


def _extraction(
    config: Extraction, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int
) -> Work:
    task = load_config(config.task).task.model_dump() if config.task else _task_of(rows)
    tree = {"input": {"path": "-"}, "output": {"path": "-"}, "task": task}
    sizes = {"max_value_tokens": config.value_tokens, "max_new_tokens": config.max_new_tokens}
    in_slots = config.skeleton == "slots" and config.answers == "labels"
    encoded = partial(encode, tokenizer, special=False)

    def run(method: str) -> RunConfig:
        return make_config(
            {**tree, "decoding": {"method": method, "skeleton": config.skeleton, **sizes}}
        )

    slotted = feeds(run("hyper_parallel"), tokenizer, context, rows)
    written = feeds(run("autoregressive"), tokenizer, context, rows)
    opening = encode(tokenizer, "{\n", special=False)
    categories = run("guided").task.categories  # type: ignore[union-attr]
    work = Work("documents", len(rows), unavoidable(slotted), 0, None, {}, *attended(slotted))
    ends, prompts, decoded = sorted(end_tokens(tokenizer)), [], 0
    for row, feed, other in zip(rows, slotted, written, strict=True):
        prompt = list(other.tokens[: -len(opening)])
        names = [attribute.name for attribute in categories[row["category"]].attributes]
        written_keys = [
            encoded("{\n" + json.dumps(name, ensure_ascii=False) + ":") for name in names
        ]
        if in_slots:
            written_keys = [
                key + encoded(":") for key in shortest_keys([encoded(f" {name}") for name in names])
            ]
            prompt = list(feed.tokens[: feed.sample_at[0] + 1 - len(written_keys[0])])
        elif config.skeleton == "keys" and list(feed.tokens[: len(prompt)]) != prompt:
            raise InputError(
                f"document {row['id']}: too long for the model's context; leave it out"
            )
        keys = [prompt + key for key in written_keys]
        work.names.append(names)
        work.values += len(names)
        if config.answers == "labels":
            gold = [row["target"].get(name) for name in names]
            texts = (f" {json.dumps(value, ensure_ascii=False)}" for value in gold)
            if in_slots:
                texts = (
                    f" {' '.join(str(value).split())}\n" if value is not None else "\n"
                    for value in gold
                )
            values = [encoded(text)[: config.value_tokens] for text in texts]
            prompts.append(
                {
                    "tokens": list(feed.tokens),
                    "ends": list(feed.sample_at),
                    "shared": feed.shared,
                    "values": values,
                }
            )
            decoded += sum(map(len, values))
            closing = 0 if in_slots else 1
            work.whole.append(
                _fixed(prompt, len(feed.tokens) - len(prompt) + sum(map(len, values)) + closing)
            )
            work.each += [_fixed(key, len(value)) for key, value in zip(keys, values, strict=True)]
            continue
        most = 4 * config.value_tokens  # characters of a value that about as many tokens can hold
        text = {"anyOf": [{"type": "string", "maxLength": most}, {"type": "null"}]}
        schema = {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
        own = {"max_tokens": config.max_new_tokens, "ignore_eos": False, "stop_ids": ends}
        if config.layout == "lines":
            lines = record_pattern(categories[row["category"]].attributes)
            work.whole.append({"tokens": prompt + opening, **own, "regex": lines, "opened": True})
        else:
            work.whole.append(
                {"tokens": prompt, **own, "json": {**schema, "additionalProperties": False}}
            )
        regex = f' (null|"[^"\\\\\\n]{{0,{most}}}")'
        work.each += [
            {"tokens": k, **own, "max_tokens": config.value_tokens, "regex": regex} for k in keys
        ]
    if config.answers == "labels":
        work.raypd, work.decoded = {"prompts": prompts}, decoded
    else:
        work.raypd = {
            "run": {**tree, "decoding": {"skeleton": config.skeleton, **sizes}},
            "rows": rows,
        }
    return work


def _task_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A task that asks for the attributes that the targets of each category name."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        names.setdefault(row["category"], {}).update(dict.fromkeys(row["target"]))
    return {
        "categories": {
            name: {"attributes": [{"name": n} for n in found]} for name, found in names.items()
        }
    }


def _questions(
    config: Questions, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int
) -> Work:
    rows = [{**row, "questions": [one["question"] for one in row["questions"]]} for row in rows]
    task = {"kind": "question_answering", "max_answer_tokens": config.answer_tokens}
    tree = {"input": {"path": "-"}, "output": {"path": "-"}, "task": task}
    together = feeds(make_config(tree, ["decoding.method=intra_prompt"]), tokenizer, context, rows)
    alone = feeds(make_config(tree, ["decoding.method=autoregressive"]), tokenizer, context, rows)
    ends = end_tokens(tokenizer)
    lines = {n for n in tokenizer.get_vocab().values() if "\n" in tokenizer.decode([n])}
    stops = {
        "max_tokens": config.answer_tokens,
        "ignore_eos": False,
        "stop_ids": sorted(ends | lines),
    }
    given = {"run": tree, "rows": rows}
    work = Work(
        "questions", len(alone), unavoidable(together), len(alone), None, given, *attended(together)
    )
    work.each = [{"tokens": list(feed.tokens), **stops} for feed in alone]
    return work


def documents_of(rows: Sequence[dict[str, Any]]) -> list[Document]:
    """Rows as documents of a task."""
    return [Document(index, str(row.get("id", index)), row) for index, row in enumerate(rows)]


def feeds(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    rows: Sequence[dict[str, Any]],
) -> list[Feed]:
    """The first feed of every program of a task.

    Raises InputError for a row that cannot be asked about.
    """
    found = []
    for request in build_task(config, tokenizer, context).plan(documents_of(rows)):
        if isinstance(request, Record):
            raise InputError(
                f"document {rows[request.index].get('id', request.index)}: {request.error}"
            )
        found.append(next(request.program))
    return found


def unavoidable(given: Sequence[Feed]) -> int:
    """Tokens of first feeds, with those that they share counted once."""
    shared = {tuple(feed.tokens[: feed.shared]) for feed in given}
    return sum(len(feed.tokens) - feed.shared for feed in given) + sum(map(len, shared))


def attended(given: Sequence[Feed]) -> tuple[int, float]:
    """`attended` and `keys` of a work with these first feeds."""
    pairs = sum(
        _pairs(0, length)
        for length in {tuple(feed.tokens[: feed.shared]): feed.shared for feed in given}.values()
    )
    keys: list[int] = []
    for feed in given:
        segments, positions = (
            np.array(x or [0] * len(feed.tokens)) for x in (feed.segments, feed.positions)
        )
        reach = np.full([int(segments.max()) + 1] * 2, Reach.HIDDEN)
        reach[0, 0] = Reach.CAUSAL
        for (query, key), kind in feed.reach.items():
            if max(query, key) < len(reach):
                reach[query, key] = kind
        seen = visible(reach, segments, positions, segments, positions).sum(1)
        pairs += int(seen[feed.shared :].sum())
        keys += seen[list(feed.sample_at)].tolist()
    return pairs, fmean(keys)
