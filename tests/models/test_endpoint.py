"""A server in place of weights, over HTTP; and `batch`: files and batches as OpenAI's API keeps
them.
"""

import contextlib
import email
import gzip
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow.dataset as ds
import pytest
import requests
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from raypd import LLM
from raypd.answering.components import build
from raypd.answering.request_queue import answer
from raypd.billing import book
from raypd.billing.meter import Meter
from raypd.cluster import driver
from raypd.cluster.driver import run_extract
from raypd.config import ModelConfig
from raypd.decoding.program import Feed
from raypd.errors import ConfigError
from raypd.models import batch_client, endpoint_batch
from raypd.models.byte_prompt import byte_tokenizer
from raypd.models.chat_completion import NoAnswer, is_answered
from raypd.models.endpoint import EndpointEngine
from raypd.models.endpoint_batch import BatchEngine, BatchRequest
from raypd.models.load import load_model
from raypd.schema import Attribute, record_schema
from raypd.tasks.base import Document
from raypd.tasks.prompting import rendered
from raypd.training import teacher
from raypd.verify import dead_letters
from raypd.verify.retry import retry_errors
from tests.decoding.drivers import finished
from tests.runs import TITLES, extraction, run_config, with_keys, write_jsonl
from tests.servers import Reply, serving

KEY = os.environ["PATH"]  # a variable that Ray's workers have
TURNS = ["Name three colors.", "What is the capital of Norway?", ["Count to five.", "Go on."]]
PARTS = [{"type": "text", "text": "We"}, {"type": "text", "text": "ll."}]
ELSEWHERE = {"Location": "http://other.example/v1"}
BOMB = gzip.compress(b" " * 5_000_000)


@pytest.fixture
def slept(monkeypatch):
    """What the engine slept; its key is there."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    slept = []
    monkeypatch.setattr("raypd.models.endpoint_client.time.sleep", slept.append)
    return slept


@contextlib.contextmanager
def server(reply):
    """One that answers with `reply(body, how many came before)`: (status, tree). Its URL, and what
    it was asked.
    """
    received = []

    def answer(call):
        if call.body == b"{}":  # whether it redirects
            return Reply(400)
        body = json.loads(call.body)
        received.append((call.path, call.headers["Authorization"], body))
        status, tree = reply(body, len(received) - 1)
        return Reply(status, json.dumps(tree).encode())

    with serving(answer) as url:
        yield f"{url}/v1", received


def completion(text, reason="stop"):
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    return 200, {
        "choices": [{"message": {"content": text}, "finish_reason": reason}],
        "usage": usage,
    }


def configuration(tmp_path, url, **endpoint):
    write_jsonl(tmp_path / "in.jsonl", [f"Acme shoe {i} <|end|>" for i in range(6)])
    task = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
    model = {
        "name": "gpt",
        "endpoint": {"url": url, "usd_per_million_answer_tokens": 5e4, **endpoint},
    }
    sections = {
        "decoding": {"method": "autoregressive"},
        "cluster": {"address": "local"},
        "input": TITLES,
    }
    sections["cost"] = {"prices": {"local": 0.0}}
    return run_config(
        task,
        tmp_path / "in.jsonl",
        tmp_path / "out",
        model=model,
        **sections,
    )


def engine_of(config):
    return EndpointEngine(config.model, config.decoding, config.engine, byte_tokenizer())


def batch_engine_of(config):
    return BatchEngine(
        config.model, config.decoding, config.engine, byte_tokenizer(), config.fingerprint()
    )


def test_a_run_whose_answers_become_labels(tmp_path, ray_here):
    """The first request is refused for now; one answer is cut, one document is refused."""

    def reply(body, before):
        text = body["messages"][-1]["content"]
        if before == 0 or "shoe 3" in text:
            return (400, {"error": "not that one"}) if before else (429, {})
        cut = "shoe 4" in text
        return completion(
            '{"Brand": "Acme", "Size"' + ": 7}" * (not cut), "length" if cut else "stop"
        )

    with server(reply) as (url, received):
        summary = run_extract(configuration(tmp_path, url, key_variable="PATH"))
    assert summary.ok == 5
    assert summary.failed == 1
    path, key, body = received[1]
    assert path == "/v1/chat/completions"
    assert key == f"Bearer {KEY}"
    assert body["model"] == "gpt"
    assert body["temperature"] == 0.0
    (message,) = body["messages"]
    assert message["role"] == "user"
    # Text of a document: it ends no message.
    assert re.search(r"<document>\nAcme shoe . <\|end\|>", message["content"])
    rows = {
        row["id"]: row
        for row in ds.dataset(tmp_path / "out/units", format="parquet").to_table().to_pylist()
    }
    assert json.loads(rows["0"]["record"]) == {"Brand": "Acme", "Size": 7}
    assert "400" in rows["3"]["error"]
    assert KEY not in "".join(
        file.read_text(errors="replace") for file in (tmp_path / "out").rglob("*.json")
    )
    (bill,) = book.bills(str(tmp_path / "out"))
    assert bill.parts["endpoint"] == pytest.approx(bill.totals["decode_tokens"] * 5e4 / 1e6)
    assert bill.totals["shared_tokens"] > 0
    documents = [
        Document(
            i,
            str(i),
            {},
            source=rows[str(i)]["source"],
            row=rows[str(i)]["row"],
        )
        for i in range(6)
    ]
    teacher.label_documents(documents, str(tmp_path / "out"), run_config())
    assert [document.id for document in documents if "target" in document.fields] == [
        "0",
        "1",
        "2",
        "5",
    ]


def test_a_schema_parameters_and_probabilities(tmp_path, slept):
    """The server gives the tokens of its answer; a value's confidence is the mean over its
    bytes.
    """
    text = '{"Brand": "Ac\u00e9", "Size": 42}'
    parts = [
        ('{"Brand": "', 0.0),
        ("Ac", -0.5),
        ("é", -2.0),
        ('", "Size":', -0.1),
        (" 42", -0.3),
        ("}", 0.0),
    ]
    assert "".join(part for part, _ in parts) == text
    status, tree = completion(text)
    tokens = [
        {
            "token": part,
            "logprob": value,
            "bytes": list(part.encode()),
        }
        for part, value in parts
    ]
    tree["choices"][0]["logprobs"] = {"content": tokens}
    # More than the prompt alone, and max_new_tokens.
    tree["usage"] = {"prompt_tokens": 6000, "completion_tokens": 600}
    sent = {
        "temperature": None,
        "effort": "low",
        "tools": "x" * 5000,
        "max_completion_tokens": 4000,
    }
    settings = {"logprobs": True, "parameters": sent}
    with server(lambda *_: (status, tree)) as (url, received):
        parts = build(
            configuration(
                tmp_path,
                url,
                response_format="json_schema",
                **settings,
            ),
            None,
        )
        ((record,),) = answer(
            parts, [Document(0, "a", {"title": "shoe"})], Meter("", "autoregressive")
        )
    body = received[0][2]
    assert body["effort"] == "low"
    assert body["logprobs"] is True
    assert body.keys() & {"temperature", "seed", "top_p"} == set()
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["Brand", "Size"]
    values = {value["name"]: value for value in record.columns["values"]}
    assert values["Brand"]["value"] == "Acé"
    assert values["Size"]["number"] == 42
    quotes = [0.0, -0.1]  # of tokens that reach into the value
    assert values["Brand"]["confidence"] == pytest.approx(
        math.exp((sum(quotes) - 2 * 0.5 - 2 * 2.0) / 6)
    )
    assert values["Size"]["confidence"] == pytest.approx(math.exp(-0.3))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"type": "number", "required": True},
        {"type": "boolean", "required": True},
        {"type": "enum", "values": ["x", "y"]},
        {"type": "date"},
        {"type": "pattern", "pattern": r"\d{3}"},
        {"type": "integer", "many": True, "max_items": 2},
        {"type": "rows", "columns": [{"name": "x", "type": "integer"}]},
    ],
)
def test_the_schema_takes_what_the_attribute_takes(keys):
    attribute = Attribute(name="a", **keys)
    formats = Draft202012Validator.FORMAT_CHECKER
    check = Draft202012Validator(record_schema([attribute]), format_checker=formats).is_valid
    null = not (attribute.required and attribute.type == "boolean")
    values = [
        "x",
        "z",
        "123",
        "1234",
        "2026-02-28",
        "2026-02-30",
        1,
        1.5,
        True,
        [1],
        [1, 2],
        [1, 2, 3],
        ["x"],
    ]
    values += [
        [{"x": 1}],
        [{"x": "1"}],
        [{"x": None}],
    ]
    assert check({"a": None}) == null
    for value in values:
        assert check({"a": value}) == attribute.fits(value), value


def test_tokens_a_minute_are_those_of_the_answers_so_far(tmp_path, slept):
    with server(lambda *_: completion("Well.")) as (url, received):
        config = with_keys(
            configuration(tmp_path, url, tokens_per_minute=60), engine={"max_num_seqs": 1}
        )
        engine = engine_of(config)
        for n in range(3):
            engine.submit((feed for feed in [Feed([1], [0])]), tag=n, sampling=None, seed=n)
        finished(engine)
    # Of which the server has told nothing.
    first = len(json.dumps(received[0][2])) / 4 + config.decoding.max_new_tokens
    assert sum(slept) == pytest.approx(0 + first + (first + 110), abs=1)  # an answer has 110 tokens


@pytest.mark.slow
def test_vllm_s_server_answers_as_the_engine_does(tmp_path):
    python = os.environ.get("RAYPD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM: RAYPD_VLLM_PYTHON=/its/environment/bin/python (docs/benchmark.md)")
    loaded = load_model(ModelConfig(dtype="float32"))
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = {
        "model": tmp_path / "model",
        "dtype": "float32",
        "served-model-name": "small",
        "max-model-len": 1024,
        "host": "127.0.0.1",
        "port": port,
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with (tmp_path / "log").open("w") as log:
        how = {
            "env": os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            "stdout": log,
            "stderr": log,
        }
        process = subprocess.Popen(command, start_new_session=True, **how)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None and not _is_up(f"{url}/health"):
            time.sleep(1)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        settings = {"model.dtype": "float32", "decoding.max_new_tokens": 32}
        endpoint = {"model.endpoint.url": f"{url}/v1", "model.endpoint.key_variable": None}
        llms = LLM(settings=settings), LLM("small", settings=settings | endpoint)
        local, remote = (llm.generate(TURNS) for llm in llms)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    assert [result.error for result in remote] == [None] * len(TURNS)
    assert [result.value for result in remote] == [result.value for result in local]


def _is_up(url):
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=5).ok
    return False


@pytest.mark.parametrize(("content", "key"), [("Well.", "l"), (PARTS, "Well."), ("Well.", KEY)])
def test_conversations_and_a_limit_of_requests(tmp_path, slept, monkeypatch, content, key):
    """key: also one that a local server takes, and that an answer may hold."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with server(lambda body, before: completion(content)) as (url, received):
        tokenizer = byte_tokenizer()
        engine = engine_of(configuration(tmp_path, url, requests_per_minute=60))
        spoken = [
            ("system", "Be brief."),
            ("user", "ü?"),
            ("assistant", "ä"),
            ("user", "So?"),
        ]
        turns = [{"role": role, "content": content} for role, content in spoken]
        prompt = tokenizer(rendered(tokenizer, turns))["input_ids"]
        for n in range(3):
            engine.submit((feed for feed in [Feed(prompt, [0])]), tag=n, sampling=None, seed=n)
        done = finished(engine).values()
    assert [body["messages"] for _, _, body in received] == [turns] * 3
    assert {tokenizer.decode(one.answer.tokens, skip_special_tokens=True) for one in done} == {
        "Well."
    }
    assert sum(slept) == pytest.approx(1 + 2, abs=0.3)


def asked_once(tmp_path, tree, **endpoint):
    """What an engine makes of a chat completion."""
    with serving(lambda call: written(tree)) as url:
        settings = {"key_variable": None, "retries": 0, **endpoint}
        engine = engine_of(configuration(tmp_path, f"{url}/v1", **settings))
        engine.submit((feed for feed in [Feed([65], [0])]), tag=0, sampling=None, seed=0)
        return engine, finished(engine)[0]


def said(content, reason="stop", **message):
    """A chat completion of a message with more than a text."""
    tree = completion(content, reason)[1]
    tree["choices"][0]["message"].update(message)
    return tree


REFUSED = [{"type": "refusal", "refusal": "I can't help."}]
THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": "Sony?"}]}]
CALL = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
]
ONLY_COUNTED = {
    **completion("")[1],
    "usage": {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 9}},
}
NO_ANSWERS = [
    (said(None, "content_filter"), "withheld the answer (finish_reason content_filter)"),
    (said('{"Brand": "Bo', "content_filter"), "withheld the answer"),
    (said("", "SAFETY"), "withheld the answer (finish_reason safety)"),
    (said(None, refusal="I can't help with that."), "refused: I can't help with that."),
    (said(REFUSED), "refused: I can't help."),
    (said(None, "tool_calls", tool_calls=CALL), "called a tool"),
    (said("I look it up.", tool_calls=CALL), "called a tool"),
    (said(None, "function_call", function_call=CALL[0]["function"]), "called a tool"),
    (said("", reasoning_content="Well."), "reasoning without an answer"),
    (said(None, reasoning="Well."), "reasoning without an answer"),
    (said(THOUGHT), "reasoning without an answer"),
    (said("\n", "length", reasoning_content="Well."), "raise decoding.max_new_tokens"),
    (said("<think>Sony?", "length"), "raise decoding.max_new_tokens"),
    (said("<think>Sony?</think>"), "reasoning without an answer"),
    (ONLY_COUNTED, "reasoning without an answer"),
    (said("", "length"), "no text within its 512 tokens"),
    (said(None), "no content (finish_reason stop)"),
    (said('{"Brand"', "error"), "broke the answer off (finish_reason error)"),
]


@pytest.mark.parametrize(("tree", "reason"), NO_ANSWERS)
def test_a_completion_without_an_answer_is_an_error_that_is_paid(tmp_path, tree, reason):
    engine, ended = asked_once(tmp_path, tree)
    assert ended.answer is None
    assert isinstance(ended.error, NoAnswer)
    assert reason in str(ended.error)
    assert ended.counts.decode_tokens == tree["usage"]["completion_tokens"]
    # The server works: such answers make no other request wait.
    assert engine.client.failures_in_a_row == 0
    assert not is_answered(tree)


@pytest.mark.parametrize(
    ("tree", "text", "stopped"),
    [
        (said("Bose", tool_calls=[], refusal=None, reasoning_content=""), "Bose", True),
        (said("Bose", reasoning_content="Sony?"), "Bose", True),
        (said([*THOUGHT, {"type": "text", "text": "Bose"}]), "Bose", True),
        (said("<think>Sony?</think>\n\nBose"), "Bose", True),
        (said("Sony?</think>Bo", "length"), "Bo", False),
        (said("Bose", "eos_token"), "Bose", True),
        (said("Bo", "max_tokens"), "Bo", False),
        (said("", "stop"), "", True),
    ],
)
def test_the_answer_of_a_completion(tmp_path, tree, text, stopped):
    _, ended = asked_once(tmp_path, tree)
    assert ended.error is None
    assert byte_tokenizer().decode(ended.answer.tokens, skip_special_tokens=True) == text
    assert ended.answer.stopped == stopped
    assert is_answered(tree)


def test_prompt_tokens_that_the_server_had_cached_are_counted_once(tmp_path):
    """The server counts them among the tokens of the prompt."""
    _, ended = asked_once(tmp_path, completion("Bose")[1])
    counts = ended.counts
    assert (counts.prefill_tokens, counts.shared_tokens, counts.decode_tokens) == (60, 40, 10)


def test_probabilities_are_those_of_the_answer_and_not_of_the_reasoning(tmp_path):
    tree = said("<think>ab</think>cd")
    tokens = [
        ("<think>", -9.0),
        ("ab", -8.0),
        ("</think>", -7.0),
        ("c", -0.5),
        ("d", -0.25),
    ]
    parts = [{"token": token, "logprob": logprob} for token, logprob in tokens]
    tree["choices"][0]["logprobs"] = {"content": parts}
    _, ended = asked_once(tmp_path, tree, logprobs=True)
    assert ended.answer.logprobs == [-0.5, -0.25, -0.25]


def test_what_a_server_withholds_is_counted_and_retried_and_labels_nothing(tmp_path, in_process):
    """Four of six documents get no answer; later the server answers two of them."""
    trees = {
        "shoe 0": said(None, "content_filter"),
        "shoe 1": said(None, refusal="No."),
        "shoe 2": said(None, "tool_calls", tool_calls=CALL),
        "shoe 3": said("", reasoning_content="Well."),
        "shoe 4": said('<think>{"Brand": "Sony", "Size": 1}</think>{"Brand": "Acme", "Size": 7}'),
        "shoe 5": said(r'{"Brand": "Say \"A\" \u00e9\u00', "length"),
    }

    def reply(body, before):
        text = body["messages"][-1]["content"]
        (tree,) = [tree for name, tree in trees.items() if name in text]
        return 200, tree

    with server(reply) as (url, _):
        config = configuration(tmp_path, url, key_variable=None)
        summary = run_extract(config, build=build)
        assert summary.ok == 2
        assert summary.failed == 4
        reasons = {
            reason.reason for reason in dead_letters.summarize(str(tmp_path / "out")).reasons
        }
        assert reasons == {
            "NoAnswer: the server withheld the answer (finish_reason content_filter)",
            "NoAnswer: the model refused: No.",
            "NoAnswer: the model called a tool and wrote no answer (tool_calls)",
            "NoAnswer: reasoning without an answer",
        }
        good = said('{"Brand": "Acme", "Size": 7}')
        trees.update({"shoe 0": good, "shoe 3": good})
        again = retry_errors(config, build=build)
    assert again.tried == 4
    assert again.ok == 2
    table = ds.dataset(tmp_path / "out/units", format="parquet").to_table()
    rows = {row["id"]: row for row in table.to_pylist()}
    assert json.loads(rows["0"]["record"]) == {"Brand": "Acme", "Size": 7}
    assert json.loads(rows["4"]["record"]) == {"Brand": "Acme", "Size": 7}
    values = {value["name"]: value for value in rows["5"]["values"]}
    assert values["Brand"]["status"] == "truncated"
    assert values["Brand"]["value"] == 'Say "A" é'
    documents = [
        Document(
            i,
            str(i),
            {},
            source=rows[str(i)]["source"],
            row=rows[str(i)]["row"],
        )
        for i in range(6)
    ]
    teacher.label_documents(documents, str(tmp_path / "out"), run_config())
    labelled = {document.id for document in documents if "target" in document.fields}
    assert labelled == {"0", "3", "4"}


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-that-nobody-may-see")


def usage(**counts):
    return written({**completion("Acme")[1], "usage": counts})


def written(tree):
    return Reply(200, json.dumps(tree).encode())


def dripping():
    for _ in range(1000):
        time.sleep(0.1)
        yield b" "


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            usage(prompt_tokens=10**27, completion_tokens=1),
            "usage says that 1,000,000,000,000,000,000,000,",
        ),
        (usage(prompt_tokens=5, completion_tokens=-3), "-3 written"),
        (usage(prompt_tokens=5, completion_tokens=513), "513 written, but"),
        (usage(prompt_tokens="many"), "expected a chat completion"),
        (Reply(200, b"[" * 100_000), "expected a chat completion"),
        (written({"choices": []}), 'expected a chat completion, found {"choices": []}'),
        (
            Reply(200, b"<html>sign in</html>"),
            "expected a chat completion, found <html>sign in</html>",
        ),
        (lambda key: Reply(401, key.encode()), "401: Bearer (hidden)"),
        (lambda key: Reply(403, key[7:].encode()), "403: (hidden)"),
        (
            Reply(400, b'{"error": {"code": "context_length_exceeded"}}'),
            "task.max_document_tokens (bytes, for a server) with task.long_documents=split",
        ),
        (Reply(307, headers=ELSEWHERE), "redirects to http://other.example/v1"),
        (Reply(429, headers={"Retry-After": "3600"}), "asks to wait 3,600 s"),
        (
            Reply(429, headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}),
            "asks to wait 25",
        ),
        (Reply(200, BOMB, {"Content-Encoding": "gzip"}), "the answer has more than"),
        (
            Reply(200, dripping(), {"Content-Length": "1000"}),
            "model.endpoint.timeout_seconds (1 s)",
        ),
        (
            Reply(200, headers={"X-Slow": "x" * 100}, pause=0.1),
            "model.endpoint.timeout_seconds (1 s)",
        ),
    ],
)
def test_a_server_that_lies_makes_an_error_row_with_the_reason(tmp_path, key, reply, reason):
    """reply: of one that quotes the key that it was sent, a function of it."""

    def answer(call):
        made = Reply(400) if call.body == b"{}" else reply
        return made(call.headers["Authorization"]) if callable(made) else made

    with serving(answer) as url:
        config = configuration(tmp_path, f"{url}/v1", retries=0, timeout_seconds=1)
        engine = engine_of(config)
        engine.submit((feed for feed in [Feed([65], [0])]), tag=0, sampling=None, seed=0)
        error = str(finished(engine)[0].error)
    assert (reason in error, "nobody" in error) == (True, False), error


def test_many_failures_in_a_row_make_all_wait(tmp_path, slept):
    with server(lambda body, before: (503, {"error": "down"})) as (url, received):
        engine = engine_of(configuration(tmp_path, url, retries=24))
        with pytest.raises(RuntimeError, match="503"):
            engine.client.reply(f"{url}/chat/completions", 1000, json={"n": 1})
    assert len(received) == 25
    # The engine's own waits are at most ten minutes.
    assert max(slept) == 600.0
    # And after 20 in a row no request is sent for half a minute.
    assert engine.client.next_turn > time.monotonic() + 20


SHAPELESS = (200, {"choices": []})
BOUNDLESS = (200, {**completion("Well.")[1], "usage": {"prompt_tokens": 10**27}})


@pytest.mark.parametrize(
    ("reply", "failures"),
    [
        ((302, {}), 20),
        (SHAPELESS, 20),
        (BOUNDLESS, 20),
        ((400, {}), 0),
        ((401, {}), 0),
        (completion("Well."), 0),
    ],
)
def test_answers_that_are_the_servers_failure_count_and_refused_prompts_do_not(
    tmp_path, slept, reply, failures
):
    """A good answer among them, before the last 20, begins the count anew."""
    with server(lambda body, before: completion("Well.") if before == 5 else reply) as (
        url,
        received,
    ):
        config = with_keys(configuration(tmp_path, url, retries=0), engine={"max_num_seqs": 1})
        engine = engine_of(config)
        for n in range(26):
            engine.submit((feed for feed in [Feed([65], [0])]), tag=n, sampling=None, seed=n)
        finished(engine)
    assert len(received) == 26
    assert engine.client.failures_in_a_row == failures
    assert (engine.client.next_turn > time.monotonic() + 20) == (failures > 0)
    assert ("20 requests failed in a row; all requests pause for 30 s: " in engine.waiting) == (
        failures > 0
    )


def test_a_server_that_redirects_gets_no_document(tmp_path, key):
    for target in (ELSEWHERE["Location"], "/v2"):  # of the same host, too

        def moved(call, to=target):
            return Reply(302 if call.path.endswith("s") else 200, headers={"Location": to})

        with serving(moved) as url:
            named = target if "//" in target else f"{url}{target}"
            words = f"{url}/v1/chat/completions redirects to {named}; documents are not sent there"
            with pytest.raises(ConfigError, match=re.escape(words)):
                run_extract(configuration(tmp_path, f"{url}/v1"))
    with pytest.raises(ValidationError, match=r"model\.endpoint\.url"):
        configuration(tmp_path, "file:///etc/passwd")


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = configuration(tmp_path, "http://127.0.0.1:9/v1")
    for keys, words in (
        ({}, "OPENAI_API_KEY holds no key"),
        ({"method": "hyper_parallel"}, "method: autoregressive"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_extract(with_keys(config, decoding=keys))
    assert not Path(config.output.path).exists()


class Vendor:
    def __init__(self) -> None:
        self.files = {}
        self.batches = {}
        self.answered = {}
        self.down = False
        self.lost = False  # whether nobody hears of the next batch that is made
        # Of batches made from now on; words whose prompts get an error.
        self.status, self.refused = "completed", set()

    def __call__(self, call) -> Reply:
        if self.down:
            return Reply(503)
        path = call.path.removeprefix("/v1").split("?")[0]
        if path == "/files" and call.method == "GET":
            return Reply(200)
        if path == "/files":
            head = f"Content-Type: {call.headers['Content-Type']}\n\n".encode()
            form = {
                part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
                for part in email.message_from_bytes(head + call.body).get_payload()
            }
            assert form["purpose"] == b"batch"
            return self.put(self.files, form["file"].decode())
        if path == "/batches" and call.method == "POST":
            batch = json.loads(call.body)
            assert batch["endpoint"] == "/v1/chat/completions"
            assert batch["completion_window"] == "24h"
            made = self.put(
                self.batches,
                {
                    **batch,
                    "created_at": time.time(),
                    "status": self.status,
                },
            )
            lost = self.lost
            self.lost = False
            return Reply(504) if lost else made
        if path == "/batches":
            return self.told(self.page(parse_qs(urlsplit(call.path).query)))
        if path.startswith("/batches/"):
            return self.told(self.shown(path.rpartition("/")[2]))
        kind, _, name = path.split("/")[2].partition("-of-")
        return Reply(
            200, (self.answers(name)[kind == "errors"] if name else self.files[kind]).encode()
        )

    def page(self, query):
        names = [*reversed(self.batches)]
        if "after" in query:
            names = names[names.index(query["after"][0]) + 1 :]
        limit = int(query.get("limit", ["20"])[0])
        batches = [self.shown(name) for name in names[:limit]]
        return {"data": batches, "has_more": len(names) > limit}

    def put(self, store, value) -> Reply:
        name = f"{'f' if store is self.files else 'b'}{len(store)}"
        store[name] = value
        return self.told({"id": name})

    def told(self, tree) -> Reply:
        return Reply(200, json.dumps(tree).encode())

    def shown(self, name):
        over = {"output_file_id": f"answers-of-{name}", "error_file_id": f"errors-of-{name}"}
        batch = self.batches[name]
        return {
            "id": name,
            **batch,
            **(over if batch["status"] in ("completed", "expired") else {}),
        }

    def answers(self, name):
        if name in self.answered:
            return self.answered[name]
        good = ""
        bad = ""
        for line in map(json.loads, self.files[self.batches[name]["input_file_id"]].splitlines()):
            text = line["body"]["messages"][-1]["content"]
            if any(word in text for word in self.refused):
                bad += (
                    json.dumps(
                        {
                            "custom_id": line["custom_id"],
                            "error": {"message": f"not that one, {KEY}"},
                        }
                    )
                    + "\n"
                )
            elif self.batches[name]["status"] == "completed" or "0" in text:
                reply = {"status_code": 200, "body": completion('{"Brand": "Acme", "Size": 7}')[1]}
                good += json.dumps({"custom_id": line["custom_id"], "response": reply}) + "\n"
        self.answered[name] = (good, bad)
        return good, bad


@pytest.fixture
def vendor(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    vendor = Vendor()
    with serving(vendor) as url:
        vendor.url = f"{url}/v1"
        yield vendor


def engine_with(vendor, tmp_path, texts, **endpoint):
    config = configuration(
        tmp_path,
        vendor.url,
        **{
            "batch": True,
            "retries": 0,
            **endpoint,
        },
    )
    engine = asked(batch_engine_of(config), texts)
    engine.patience = 0.01
    engine._submitted = 0.0
    return engine


def asked(engine, texts, first=0):
    for number, text in enumerate(texts, first):
        tokens = engine.tokenizer(f"<|user|>{text}<|end|><|assistant|>")["input_ids"]
        engine.submit(
            (feed for feed in [Feed(tokens, range(len(tokens)))]), tag=number, sampling=None, seed=0
        )
    return engine


def test_a_run_is_answered_by_a_batch_and_a_document_that_is_refused_is_an_error_row(
    tmp_path, vendor, in_process
):
    vendor.refused = {"shoe 3"}
    config = configuration(tmp_path, vendor.url, batch=True, key_variable="PATH")
    summary = driver.run_extract(config, build=build)
    assert summary.ok == 5
    assert summary.failed == 1
    assert len(vendor.batches) == 1
    rows = {
        row["id"]: row
        for row in ds.dataset(tmp_path / "out/units", format="parquet").to_table().to_pylist()
    }
    assert json.loads(rows["0"]["record"]) == {"Brand": "Acme", "Size": 7}
    assert "not that one" in rows["3"]["error"]
    assert KEY not in rows["3"]["error"]
    vendor.refused = set()
    again = retry_errors(config, build=build)  # what failed is asked again, and nothing else
    assert again.tried == 1
    assert again.ok == 1
    assert [len(vendor.files[name].splitlines()) for name in vendor.files] == [6, 1]


def test_an_answer_that_a_batch_withheld_is_paid_and_asked_again(tmp_path, vendor):
    """The vendor still shows the batch of the first try, whose line has status 200."""
    withheld = said(None, "content_filter")
    vendor.status = "in_progress"
    first = engine_with(vendor, tmp_path, ["0"])
    while not first._sent:
        first.step()
    (line,) = map(json.loads, vendor.files["f0"].splitlines())
    response = {"status_code": 200, "body": withheld}
    answers = json.dumps({"custom_id": line["custom_id"], "response": response})
    vendor.answered["b0"] = (answers, "")
    vendor.batches["b0"]["status"] = "completed"
    first._next_look = 0.0
    (ended,) = finished(first).values()
    assert isinstance(ended.error, NoAnswer)
    assert ended.counts.decode_tokens == 10
    vendor.status = "completed"
    # Another worker, as in a retry.
    (ended,) = finished(engine_with(vendor, tmp_path, ["0"])).values()
    assert ended.error is None
    assert len(vendor.batches) == 2


def test_what_an_engine_sent_before_it_was_killed_is_not_sent_again(tmp_path, vendor):
    vendor.status = "in_progress"
    killed = engine_with(vendor, tmp_path, ["0", "1"])
    while not killed._sent:
        killed.step()
    engine = engine_with(vendor, tmp_path, ["1", "2", "0"])
    while engine._collected:
        engine.step()
    # The third request alone.
    assert len(vendor.batches) == 2
    assert len(vendor.files["f1"].splitlines()) == 1
    vendor.down = True
    engine._next_look = 0.0
    # An outage does not end the batch.
    assert engine.step() == []
    assert engine.pending == 3
    vendor.down = False
    for batch in vendor.batches.values():
        batch["status"] = "completed"
    assert all(ended.error is None for ended in finished(engine).values())


def test_batches_beyond_the_first_page_are_found_and_older_ones_are_not_asked_for(
    tmp_path, vendor, monkeypatch
):
    monkeypatch.setattr(batch_client, "_PAGE", 1)
    vendor.status = "in_progress"
    for text in "0123":
        engine = engine_with(vendor, tmp_path, [text])
        while not engine._sent:
            engine.step()
    engine = engine_with(vendor, tmp_path, ["0", "3"])
    while engine._collected:
        engine.step()
    # Both are in batches of the killed engines.
    assert len(vendor.batches) == 4
    # Batches of the day before have ended, so the search ends with the first of them.
    vendor.batches["b1"]["created_at"] = vendor.batches["b0"]["created_at"] = 0
    names = [batch["id"] for batch in engine.client.recent_batches(1 << 20)]
    assert names == ["b3", "b2"]


def test_nothing_is_paid_twice(tmp_path, vendor):
    """Texts that are the same, also later; a unit that is tried again; a batch of which the server
    does not tell.
    """
    vendor.status = "in_progress"
    vendor.lost = True
    engine = engine_with(vendor, tmp_path, ["0", "0", "1"], retries=1)
    while engine._collected:
        engine.step()
    asked(engine, ["1", "2"], 3)
    while engine._collected:
        engine.step()
    for batch in vendor.batches.values():
        batch["status"] = vendor.status = "completed"
    engine._next_look = 0.0
    ended = finished(engine)
    assert [ended[tag].counts.decode_tokens for tag in range(5)] == [10, 0, 10, 0, 10]
    assert finished(asked(engine, ["0", "2"])).keys() == {0, 1}
    assert [
        len(vendor.files[batch["input_file_id"]].splitlines()) for batch in vendor.batches.values()
    ] == [2, 1]


@pytest.mark.parametrize(("status", "answered"), [("expired", ["0"]), ("failed", [])])
def test_a_batch_that_ends_without_all_answers_fails_the_rest_alone(
    tmp_path, vendor, status, answered
):
    vendor.status = status
    ended = finished(engine_with(vendor, tmp_path, ["0", "1", "1"]))
    assert [str(tag) for tag, result in ended.items() if result.error is None] == answered
    assert f"batch b0 is {status}" in str(ended[1].error)
    assert len(vendor.files["f0"].splitlines()) == 2  # two that are the same are sent once
    vendor.status = "completed"
    assert all(
        result.error is None
        for result in finished(engine_with(vendor, tmp_path, ["0", "1"])).values()
    )
    assert len(vendor.files["f1"].splitlines()) == 2 - len(answered)


def test_a_batch_holds_no_more_than_the_server_takes(tmp_path, vendor, monkeypatch):
    engine = engine_with(vendor, tmp_path, [])
    started = time.process_time()
    engine._collected = {str(n): [BatchRequest(n, {"x": "x" * 2000}, "")] for n in range(8000)}
    engine.client.reply = lambda url, max_bytes, **content: {"id": "a file, or a batch"}
    engine._send_batch()
    assert time.process_time() - started < 3  # a copy of all for each line takes minutes
    monkeypatch.setattr(endpoint_batch, "MOST_REQUESTS", 2)
    engine = engine_with(vendor, tmp_path, [])
    # 0: a cascade's first model works, and brings more.
    for n, patience in enumerate((0.0, 0.0, 0.0, 0.0, 0.01)):
        engine.patience = patience
        asked(engine, str(n), n)
        assert engine.step() == engine.step() == []
    assert len(finished(engine)) == 5
    assert len(vendor.files) == 3
    assert [len(file.splitlines()) for file in vendor.files.values()] == [2, 2, 1]


def test_answers_of_another_shape_are_error_rows_that_say_what_came(tmp_path, vendor, monkeypatch):
    engine = engine_with(vendor, tmp_path, "0")
    words = "expected an answer of the batch API, found"
    vendor.answered["b0"] = ('{"custom_id": "x"}\n[7]', "")
    place = f"{vendor.url}/files/answers-of-b0/content"
    assert str(finished(engine)[0].error) == f'{place}: {words} {{"custom_id": "x"}} [7]'
    engine = engine_with(vendor, tmp_path, "1")
    monkeypatch.setattr(Vendor, "told", lambda self, tree: Reply(200, b'{"data": [7], "id": 3}'))
    place = f"{vendor.url}/batches?limit=100"
    assert str(finished(engine)[0].error) == f'{place}: {words} {{"data": [7], "id": 3}}'


def test_a_file_of_many_megabytes_takes_as_long_as_its_bytes_come(tmp_path, vendor):
    """More time than timeout_seconds: bytes that come give it more."""

    def slowly(parts):
        for part in parts:
            time.sleep(0.1)
            yield part

    engine = engine_with(vendor, tmp_path, "0", timeout_seconds=1)
    part = b" " * (1 << 20)
    with serving(
        lambda call: Reply(200, slowly([part] * 20), {"Content-Length": str(20 << 20)})
    ) as url:
        assert len(engine.client.data(url, 1 << 30)) == 20 << 20
    engine.client.endpoint = engine.client.endpoint.model_copy(update={"timeout_seconds": 30})
    started = time.process_time()
    with serving(lambda call: Reply(200, part * 60)) as url:
        assert len(engine.client.data(url, 1 << 30)) == 60 << 20
    assert time.process_time() - started < 3  # a copy of all for each 16 kB takes seconds


def test_a_batch_whose_file_cannot_be_fetched_for_a_day_ends_as_error_rows(
    tmp_path, vendor, monkeypatch
):
    engine = engine_with(vendor, tmp_path, "0")
    monkeypatch.setattr(Vendor, "answers", lambda self, name: 1 / 0)
    while not engine._unreachable_since:
        engine.step()
    assert engine.pending == 1
    monkeypatch.setattr(endpoint_batch, "BATCH_SECONDS", 0)
    engine._next_look = 0.0
    assert "/files/answers-of-b0/content" in str(finished(engine)[0].error)


def test_a_server_without_a_batch_api_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda call: Reply(404)) as url, pytest.raises(ConfigError, match="no batch API"):
        driver.run_extract(configuration(tmp_path, f"{url}/v1", batch=True))
