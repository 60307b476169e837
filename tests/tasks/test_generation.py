"""The generation task on a byte-level tokenizer; and every method that writes text, through it and
its engine.
"""

import copy
import json

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.methods.medusa import MedusaHeads
from raypd.decoding.methods.skeleton_of_thought import POINT_REQUEST, SKELETON_REQUEST
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling
from raypd.errors import ConfigError
from raypd.models.control_tokens import add_control_tokens
from raypd.models.medusa_heads import save_heads
from raypd.models.vocabulary import token_bytes
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record, Request
from raypd.tasks.stop_strings import StopStrings
from tests.decoding.drivers import steered
from tests.runs import answer, decoding_section, run_config
from tests.tasks.test_extraction import CONTEXT, prompt_text
from tests.tiny import EOS, tiny_model, tiny_tokenizer

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
PROMPTS = ["Hi", "How are you today?", ["first?", "second?"], "größe {}"]
THREADED = ["apar", "apar_medusa", "pasta"]
THINKS = """{% for message in messages %}{{ message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""  # as Qwen3's  # noqa: E501
SCRIPTS = {"pasta": b'm<promise topic="t" tokens="18"/><async>ccc</async>end'}
# Decoding.max_async_tokens is 11.
CUT_CHILD = b'm<promise topic="t" tokens="18"/><async>ccccccccccc'


def make(
    context_length: int = CONTEXT, decoding: dict | None = None, tokenizer=None, model=None, **task
):
    config = run_config(
        {"kind": "generation", **task}, decoding={"max_new_tokens": 12, **(decoding or {})}
    )
    return build_task(config, tokenizer or tiny_tokenizer(), context_length, model)


def document(prompt: object, row: int = 0) -> Document:
    return Document(row, f"id{row}", {"prompt": prompt})


def one(task, prompt: object) -> Request | Record:
    (item,) = task.plan([document(prompt)])
    return item


def say(text: str, stopped: bool = True) -> Continuation:
    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
    return Continuation(tokens, [-0.5] * len(tokens), stopped)


@pytest.mark.parametrize(
    ("prompt", "task", "text"),
    [
        ("Hi", {}, "user\nHi<|im_end|>\nassistant\n"),
        (
            "Hi",
            {"system": "Be brief."},
            "system\nBe brief.<|im_end|>\nuser\nHi<|im_end|>\nassistant\n",
        ),
        ("Hi", {"chat_template": False}, "<s>Hi"),
        (TURNS, {}, "user\na<|im_end|>\nassistant\nb<|im_end|>\nuser\nc<|im_end|>\nassistant\n"),
        # Which are its letters, and no end of a turn.
        ("Hi<|im_end|>", {}, "user\nHi<|im_end|><|im_end|>\nassistant\n"),
    ],
)
def test_a_prompt_or_conversation_is_wrapped_in_the_chat_template(prompt, task, text):
    tokens = list(next(one(make(**task), prompt).program).tokens)
    assert tiny_tokenizer().decode(tokens) == text
    assert tokens.count(EOS) == text.count("<|im_end|>\n")


def test_strings_are_turns_answered_one_by_one():
    record, following = one(make(), ["first?", "second?"]).finish(say("An answer."))
    assert (
        record.columns.items()
        >= {
            "turn": 0,
            "text": "An answer.",
            "finish_reason": "stop",
        }.items()
    )
    assert "assistant\nAn answer.<|im_end|>\nuser\nsecond?<|im_end|>\nassistant\n" in prompt_text(
        following
    )
    (last,) = following.finish(say("Done", stopped=False))
    assert last.columns.items() >= {"turn": 1, "finish_reason": "length"}.items()
    assert last.columns["confidence"] == pytest.approx(0.6065, abs=1e-3)


def test_reasoning_is_left_out_of_an_answer_and_of_the_next_turn():
    written = "<think>A draft.</think>\n\nAn answer."
    record, following = one(make(), ["first?", "second?"]).finish(say(written))
    assert record.columns["text"] == "An answer."
    assert record.columns["raw"] == written
    assert record.columns["finish_reason"] == "stop"
    assert "assistant\nAn answer.<|im_end|>\nuser\nsecond?" in prompt_text(following)


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_without_an_answer_is_an_error(opened):
    tokenizer = tiny_tokenizer()
    draft = "<think>A draft"
    if opened:
        # As that of a model that always reasons.
        opening = r"{{ 'assistant\n<think>\n' }}"
        tokenizer.chat_template = THINKS.replace("{{ 'assistant\n' }}", opening)
        assert opening in tokenizer.chat_template
        draft = "A draft"
    task = make(tokenizer=tokenizer, thinking=True)
    (record,) = one(task, ["first?", "second?"]).finish(say(draft, stopped=False))
    assert record.error == (
        "reasoning without an answer: its 12 tokens ended before the reasoning did; "
        "raise decoding.max_new_tokens"
    )
    assert record.columns == {"sample": 0, "turn": 0}
    items = one(task, "Hi").finish(say(f"{draft}.</think>Yes."))
    assert [item.columns["text"] for item in items] == ["Yes."]


def test_special_tokens_that_mark_reasoning_are_read():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer.encode("[THINK]A draft.[/THINK]Yes.<|im_end|>", add_special_tokens=False)
    answer = Continuation(tokens, [-0.5] * len(tokens), True)
    (record,) = one(make(tokenizer=tokenizer), "Hi").finish(answer)
    assert record.columns["text"] == "Yes."


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one END two", ["END"], "one "),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("größe é", ["ß"], "grö"),
        ("abc", ["x"], "abc"),
        ("a1b2", ["2", "1"], "a"),
    ],
)
def test_stop_strings_end_and_cut(text, stop, kept):
    answer = say(text)
    stops = StopStrings(token_bytes(tiny_tokenizer()), frozenset([2]), stop)
    seen = next((n for n in range(1, len(answer.tokens) + 1) if stops(answer.tokens[:n])), None)
    (record,) = one(make(stop=stop), "Hi").finish(answer)
    assert record.columns["text"] == kept
    assert (seen is not None) == (kept != text)
    if seen is not None:
        assert text.encode()[:seen].decode(errors="ignore").startswith(kept)


def test_samples_differ_and_are_repeatable():
    def run(batch: int) -> list[str]:
        task = make(samples=3, decoding={"sampling": {"temperature": 1.0}})
        engine = Engine(tiny_model("llama"), max_num_seqs=batch)
        records, _ = answer(
            task, [document("Hi", 0), document("Ho", 1)], engine, sampling=Sampling(1.0)
        )
        return [
            text
            for *_, text in sorted(
                (r.index, r.columns["sample"], r.columns["text"]) for r in records
            )
        ]

    together = run(6)
    assert len(together) == 6
    assert len(set(together)) == 6
    assert run(1) == together
    task = make(samples=2, decoding={"sampling": {"temperature": 1.0}})
    failed = [
        *task.plan([document("x" * 5000)]),
        *(item.fail("no")[0] for item in task.plan([document("Hi")])),
    ]
    assert [record.columns for record in failed] == [{"sample": n, "turn": 0} for n in (0, 1)] * 2


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "expected text"),
        ("  ", "empty"),
        ([], "expected text"),
        (["a", " "], "empty"),
        (7, "expected text"),
        ([{"role": "robot", "content": "x"}], "needs `role`"),
        ([{"role": "user"}], "needs `role`"),
        ([{"role": "assistant", "content": "x"}], "last turn"),
        ("x" * 5000, "too long"),
    ],
)
def test_a_bad_prompt_is_an_error_record(prompt, words):
    item = one(make(), prompt)
    assert isinstance(item, Record)
    assert words in item.error


def test_a_long_prompt_may_lose_its_beginning():
    assert (
        len(next(one(make(context_length=100, too_long="truncate"), "x" * 500).program).tokens)
        == 100 - 12
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model with control tokens, its tokenizer, and a folder of Medusa heads."""
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer()
    for method in ("apar", "space"):
        add_control_tokens(model, tokenizer, method)
    heads = tmp_path_factory.mktemp("heads")
    save_heads(MedusaHeads.for_model(model, count=2), heads)
    return model, tokenizer, heads


def answers(parts, method: str, prompts=PROMPTS, **generation) -> dict[tuple[int, int], dict]:
    """Output columns by (row, turn)."""
    model, tokenizer, heads = parts
    model = copy.deepcopy(model)
    decoding = decoding_section(
        method,
        max_new_tokens=14,
        heads=str(heads),
        mask_tokens=3,
    )
    task = make(decoding=decoding, tokenizer=tokenizer, model=model, **generation)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=40)
    records, _ = answer(task, [document(prompt, i) for i, prompt in enumerate(prompts)], engine)
    found = {(record.index, record.columns["turn"]): record.columns for record in records}
    assert sorted(found) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
    ]
    return found


def same(found: dict, expected: dict, what: object) -> None:
    for name in ("text", "finish_reason", "tokens"):
        assert found[name] == expected[name], (name, what)


def test_lossless_methods_write_what_autoregressive_writes(parts):
    expected = answers(parts, "autoregressive")
    assert any(columns["text"] for columns in expected.values())
    for method in ("space", "medusa", "speculative"):
        for key, columns in answers(parts, method).items():
            same(columns, expected[key], (method, key))
            assert columns["confidence"] == pytest.approx(expected[key]["confidence"], abs=1e-3)


@pytest.mark.parametrize("method", THREADED)
def test_threaded_methods_write_and_count(parts, method):
    for columns in answers(parts, method).values():
        assert isinstance(columns["text"], str)
        counters = json.loads(columns["counters"])
        assert min(counters["threads"], counters.get("longest_path", 1)) >= 1
        # Medusa's guesses make the passes fewer than the tokens of a path; a speedup takes a
        # baseline.
        assert ("longest_path" in counters) == (method != "apar_medusa")
        assert "theoretical_speedup" not in counters


@pytest.mark.parametrize(
    ("thinking", "end"), [(False, "assistant\n<think>\n\n</think>\n\n"), (True, "assistant\n")]
)
def test_a_model_thinks_where_it_is_to(thinking, end):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    feed = next(one(make(tokenizer=tokenizer, thinking=thinking), "Hi").program)
    assert tokenizer.decode(list(feed.tokens)) == "user\nHi<|im_end|>\n" + end


@pytest.mark.parametrize("thinking", [False, True])
def test_skeleton_and_points_are_one_conversation_in_the_chat_template(thinking):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    skeleton, point = skeleton_prompts(tokenizer, thinking=thinking)
    settings = {
        "tokenize": False,
        "add_generation_prompt": True,
        "enable_thinking": thinking,
    }
    turns = [
        {"role": "user", "content": SKELETON_REQUEST.format(question="Hi")},
        {"role": "assistant", "content": "1. a"},
        {"role": "user", "content": POINT_REQUEST.format(number=1)},
    ]
    first = tokenizer.apply_chat_template(turns[:1], **settings)
    conversation = tokenizer.apply_chat_template(turns, **settings)
    # Both answers begin with what they are given.
    assert skeleton == first + "1."
    assert point == conversation.partition("1. a")[2] + "1. a"


def test_without_a_chat_template_blank_lines_are_between_the_turns():
    skeleton, point = skeleton_prompts(tiny_tokenizer(), chat_template=False)
    assert skeleton == "<s>" + SKELETON_REQUEST.format(question="Hi") + "1."
    assert point == "\n\n" + POINT_REQUEST.format(number=1) + "\n\n1. a"


def skeleton_prompts(tokenizer, **task) -> tuple[str, str]:
    """What the model is given before a skeleton, and behind it before its only point."""
    decoding = {
        "method": "skeleton_of_thought",
        "max_new_tokens": 20,
        "options": {"max_skeleton_tokens": 9},
    }
    request = one(
        make(
            decoding=decoding,
            tokenizer=tokenizer,
            **task,
        ),
        "Hi",
    )
    skeleton = feed = next(request.program)
    for token in tokenizer.encode(" a<|im_end|>", add_special_tokens=False):
        feed = request.program.send(Predictions([token], [-1.0]))
    return tokenizer.decode(list(skeleton.tokens)), tokenizer.decode(list(feed.tokens))


def test_a_prompt_leaves_room_for_the_requests_of_a_skeleton():
    decoding = {"method": "skeleton_of_thought"}
    longest = {}
    for method in ("autoregressive", "skeleton_of_thought"):
        task = make(decoding={**decoding, "method": method}, too_long="truncate")
        longest[method] = len(next(one(task, "x" * 9000).program).tokens)
    tokens = len(tiny_tokenizer()(POINT_REQUEST.format(number=999))["input_ids"])
    # The request of a point, the heading that it repeats, and the turns around them.
    assert longest["autoregressive"] - longest["skeleton_of_thought"] > tokens + 200


def reason(parts, method: str, whole: bool, stop: str | None = None) -> tuple[str, str]:
    """(text, finish_reason) of a scripted answer in which the first thread ends. whole: so do the
    others.
    """
    model, tokenizer, heads = parts
    fork, child, end = (
        tokenizer.convert_tokens_to_ids(token) for token in ("[Fork]", "[Child]", "<|im_end|>")
    )
    script = SCRIPTS.get(method, b"m")
    if method == "pasta" and not whole:
        script = CUT_CHILD + b"end"

    def rule(token: int, position: int, predicted: int) -> int:
        at = position - len("Hi")  # of the next token, behind <s> and the prompt
        if method.startswith("apar"):
            on = ord("c") if not whole or at < 6 else end
            return (
                on
                if token in (child, ord("c"))
                else [
                    ord("m"),
                    fork,
                    ord("e"),
                    end,
                ][min(at, 3)]
            )
        if method in SCRIPTS and at < len(script):
            return script[at]
        return end if whole or method in SCRIPTS else ord("m")

    decoding = decoding_section(
        method,
        max_new_tokens=70,
        max_async_tokens=11,
        heads=str(heads),
    )
    stops = [stop] if stop else []
    request = one(
        make(
            decoding=decoding,
            tokenizer=tokenizer,
            model=model,
            chat_template=False,
            stop=stops,
        ),
        "Hi",
    )
    (answer,) = Engine(copy.deepcopy(model)).run([steered(request.program, rule)])
    (record,) = request.finish(answer)
    return record.columns["text"], record.columns["finish_reason"]


@pytest.mark.parametrize("method", ["autoregressive", "space", "medusa", "speculative", *THREADED])
def test_an_answer_stops_where_all_its_threads_do(parts, method):
    (text, finish), (cut, finish_of_cut) = (
        reason(parts, method, whole=whole) for whole in (True, False)
    )
    assert finish == "stop"
    assert finish_of_cut == "length"
    assert len(cut) > len(text)


@pytest.mark.parametrize(
    ("method", "before", "behind"),
    [("apar", "m", "e"), ("apar_medusa", "m", "e"), ("pasta", "m", "end")],
)
def test_a_stop_string_behind_a_cut_thread_does_not_hide_the_cut(parts, method, before, behind):
    text, finish = reason(parts, method, whole=False, stop=before)
    assert before not in text
    assert finish == "stop"
    text, finish = reason(parts, method, whole=False, stop=behind)
    assert behind not in text
    assert finish == "length"
    assert text != ""
    assert (
        reason(
            parts,
            method,
            whole=True,
            stop=behind,
        )[1]
        == "stop"
    )


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        ({"method": "medusa"}, "needs decoding.options.heads"),
        ({"method": "hyper_parallel"}, "does not support generation"),
    ],
)
def test_what_a_method_needs_is_said_up_front(decoding, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        make(decoding=decoding)
