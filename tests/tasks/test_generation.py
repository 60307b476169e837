"""The generation task on a byte-level tokenizer: prompts, turns, stops, samples, bad prompts."""

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.sampling import Sampling
from raypd.models.vocabulary import token_bytes
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.generation import StopStrings
from tests.runs import answer, run_config
from tests.tasks.test_extraction import CONTEXT, prompt_text
from tests.tiny import EOS, tiny_model, tiny_tokenizer


def make(context_length: int = CONTEXT, decoding: dict | None = None, tokenizer=None, model=None, **task):
    config = run_config({"kind": "generation", **task}, decoding={"max_new_tokens": 12, **(decoding or {})})
    return build_task(config, tokenizer or tiny_tokenizer(), context_length, model)


def document(prompt: object, row: int = 0) -> Document:
    return Document(row, f"id{row}", {"prompt": prompt})


def one(task, prompt: object) -> Request | Record:
    (item,) = task.plan([document(prompt)])
    return item


def say(text: str, stopped: bool = True) -> Continuation:
    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
    return Continuation(tokens, [-0.5] * len(tokens), stopped)


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(("prompt", "task", "text"), [
    ("Hi", {}, "user\nHi<|im_end|>\nassistant\n"),
    ("Hi", {"system": "Be brief."}, "system\nBe brief.<|im_end|>\nuser\nHi<|im_end|>\nassistant\n"),
    ("Hi", {"chat_template": False}, "<s>Hi"),
    (TURNS, {}, "user\na<|im_end|>\nassistant\nb<|im_end|>\nuser\nc<|im_end|>\nassistant\n"),
    ("Hi<|im_end|>", {}, "user\nHi<|im_end|><|im_end|>\nassistant\n"),  # which are its letters, and no end of a turn
])  # fmt: skip
def test_a_prompt_or_conversation_is_wrapped_in_the_chat_template(prompt, task, text):
    tokens = list(next(one(make(**task), prompt).program).tokens)
    assert (tiny_tokenizer().decode(tokens), tokens.count(EOS)) == (text, text.count("<|im_end|>\n"))


def test_strings_are_turns_answered_one_by_one():
    record, following = one(make(), ["first?", "second?"]).finish(say("An answer."))
    assert record.columns.items() >= {"turn": 0, "text": "An answer.", "finish_reason": "stop"}.items()
    assert "assistant\nAn answer.<|im_end|>\nuser\nsecond?<|im_end|>\nassistant\n" in prompt_text(following)
    (last,) = following.finish(say("Done", stopped=False))
    assert last.columns.items() >= {"turn": 1, "finish_reason": "length"}.items()
    assert last.columns["confidence"] == pytest.approx(0.6065, abs=1e-3)


@pytest.mark.parametrize(("text", "stop", "kept"), [
    ("one END two", ["END"], "one "), ("one\n\ntwo", ["\n\n"], "one"), ("größe é", ["ß"], "grö"),
    ("abc", ["x"], "abc"), ("a1b2", ["2", "1"], "a")])  # fmt: skip
def test_stop_strings_end_and_cut(text, stop, kept):
    answer, stops = say(text), StopStrings(token_bytes(tiny_tokenizer()), frozenset([2]), stop)
    seen = next((n for n in range(1, len(answer.tokens) + 1) if stops(answer.tokens[:n])), None)
    (record,) = one(make(stop=stop), "Hi").finish(answer)
    assert (record.columns["text"], seen is not None) == (kept, kept != text)
    if seen is not None:
        assert text.encode()[:seen].decode(errors="ignore").startswith(kept)


def test_samples_differ_and_are_repeatable():
    def run(batch: int) -> list[str]:
        task = make(samples=3, decoding={"sampling": {"temperature": 1.0}})
        engine = Engine(tiny_model("llama"), max_num_seqs=batch)
        records, _ = answer(task, [document("Hi", 0), document("Ho", 1)], engine, sampling=Sampling(1.0))
        return [text for *_, text in sorted((r.index, r.columns["sample"], r.columns["text"]) for r in records)]

    together = run(6)
    assert (len(together), len(set(together)), run(1)) == (6, 6, together)


@pytest.mark.parametrize(("prompt", "words"), [
    (None, "expected text"), ("  ", "empty"), ([], "expected text"), (["a", " "], "empty"), (7, "expected text"),
    ([{"role": "robot", "content": "x"}], "needs `role`"), ([{"role": "user"}], "needs `role`"),
    ([{"role": "assistant", "content": "x"}], "last turn"), ("x" * 5000, "too long")])  # fmt: skip
def test_a_bad_prompt_is_an_error_record(prompt, words):
    item = one(make(), prompt)
    assert isinstance(item, Record)
    assert words in item.error


def test_a_long_prompt_may_lose_its_beginning():
    assert len(next(one(make(context_length=100, too_long="truncate"), "x" * 500).program).tokens) == 100 - 12
