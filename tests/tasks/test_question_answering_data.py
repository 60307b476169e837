"""The question answering task on public data: every row is understood, and real text is answered as by itself."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.decoding.program import Predictions
from raypd.models.load import load_model
from raypd.tasks.base import Document, Request
from tests.decoding.cases import agree
from tests.decoding.reference import greedy
from tests.tasks.test_question_answering import make
from tests.tiny import EOS, tiny_tokenizer

DATA = Path(os.environ.get("RAYPD_TEST_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


def rows_of(name: str, contexts: int, questions: int) -> list[Document]:
    path = DATA / "ccqa" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path.parent}, public data: RAYPD_TEST_DATA names its folder")
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, contexts)]
    return [Document(n, r["id"], {**r, "questions": r["questions"][:questions]}) for n, r in enumerate(rows)]


@pytest.mark.parametrize("name", ["squad2.dev", "race.dev", "dream.dev", "leval.dev"])
def test_every_row_of_the_real_data_has_its_records(name):
    """A fake model that answers at once; what counts is that each row is understood as it stands."""
    documents = rows_of(name, 60, 99)
    tokenizer = tiny_tokenizer()
    task = make(context_length=10**6, tokenizer=tokenizer, decoding={"contexts_per_prompt": 4})
    for work in task.plan(documents):
        feed = next(work.program)
        allowed_token_ids = feed.allowed_token_ids or [None] * len(feed.sample_at)
        picked = [EOS if ids is None else int(ids[-1]) for ids in allowed_token_ids]
        with pytest.raises(StopIteration) as end:
            work.program.send(Predictions(picked, [0.0] * len(picked)))
        records = work.finish(end.value.value)
        asked = [(row, q) for row in work.rows for q in documents[row].fields["questions"]]
        assert [(r.row, r.columns["question_id"]) for r in records] == [(row, q["id"]) for row, q in asked]
        for record, (_, q) in zip(records, asked, strict=True):
            free = not q.get("choices") or q.get("multi_select")
            assert record.columns["choice_index"] == (None if free else len(q["choices"]) - 1)


@pytest.mark.slow
def test_smollm2_answers_as_in_one_prompt_a_question():
    """Real text in float32: IPPD in the engine against the unmodified model with transformers' own cache."""
    documents = [*rows_of("squad2.dev", 1, 3), *rows_of("dream.dev", 1, 2)]
    documents = [Document(n, d.id, d.fields) for n, d in enumerate(documents)]
    loaded = load_model(ModelConfig(device="cpu", dtype="float32"))
    stock = copy.deepcopy(loaded.model)
    (stacked,) = make(loaded.context_length, loaded.tokenizer, {"contexts_per_prompt": 3}).plan(documents)
    alone = make(loaded.context_length, loaded.tokenizer, {"method": "autoregressive"}).plan(documents)
    (answers,) = Engine(loaded.model, max_num_batched_tokens=300).run([stacked.program])
    assert len(answers) == 5
    for answer, work in zip(answers, alone, strict=True):
        agree(one_by_one(stock, work), answer.tokens, answer.logprobs)


@torch.no_grad()
def one_by_one(stock, work: Request) -> list[tuple[int, float, float]]:
    """(token, log-probability, gap) of each token of a prompt's answer."""
    feed, cache, answer = next(work.program), None, []
    while True:
        output = stock(input_ids=torch.tensor([list(feed.tokens)]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        allowed_token_ids = feed.allowed_token_ids[0] if feed.allowed_token_ids is not None else None
        answer.append(greedy(output.logits[0, -1], None if allowed_token_ids is None else allowed_token_ids.tolist()))
        try:
            feed = work.program.send(Predictions([answer[-1][0]], [answer[-1][1]]))
        except StopIteration:
            return answer
