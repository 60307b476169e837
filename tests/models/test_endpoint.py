"""A server with an OpenAI-compatible API in place of weights: a whole run against one that answers over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import requests

from raypd import LLM
from raypd.billing import book
from raypd.cluster.driver import run_extract
from raypd.config import ModelConfig
from raypd.errors import ConfigError
from raypd.models.endpoint import EndpointEngine, byte_tokenizer
from raypd.models.load import load_model
from raypd.tasks.base import Document
from raypd.tasks.prompting import rendered
from raypd.training import teacher
from tests.runs import TITLES, extraction, run_config, with_keys
from tests.servers import Reply, serving

KEY = os.environ["PATH"]  # a variable that Ray's workers have


@contextlib.contextmanager
def server(reply):
    """One that answers with `reply(body, how many came before)`: (status, tree). Its URL, and what it was asked."""
    received = []

    def answer(call):
        body = json.loads(call.body)
        received.append((call.path, call.headers["Authorization"], body))
        status, tree = reply(body, len(received) - 1)
        return Reply(status, json.dumps(tree).encode())

    with serving(answer) as url:
        yield f"{url}/v1", received


def completion(text, reason="stop"):
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}


def configuration(tmp_path, url, **endpoint):
    documents = [{"id": str(i), "title": f"Acme shoe {i} <|end|>"} for i in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    return run_config(
        extraction(shoes=["Brand", {"name": "Size", "type": "number"}]),
        tmp_path / "in.jsonl",
        tmp_path / "out",
        input=TITLES,
        model={"name": "gpt", "endpoint": {"url": url, "usd_per_million_answer_tokens": 5e4, **endpoint}},
        decoding={"method": "autoregressive"},
        cluster={"address": "local"},
        cost={"prices": {"local": 0.0}},
    )


def test_a_run_whose_answers_become_labels(tmp_path, ray_here):
    """The first request is refused for now; one answer is cut, one document is refused."""

    def reply(body, before):
        text = body["messages"][-1]["content"]
        if before == 0:
            return 429, {}
        if "shoe 3" in text:
            return 400, {"error": "not that one"}
        return completion('{"Brand": "Acme", "Size"' if "shoe 4" in text else '{"Brand": "Acme", "Size": 7}',
                          "length" if "shoe 4" in text else "stop")  # fmt: skip

    with server(reply) as (url, received):
        config = configuration(tmp_path, url, key_variable="PATH")
        summary = run_extract(config)
    assert (summary.ok, summary.failed) == (5, 1)
    path, key, body = received[1]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", f"Bearer {KEY}", "gpt", 0.0)
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert "<product>\nAcme shoe" in message["content"]
    assert "<|end|>" in message["content"]  # text of a document, and no end of a message
    rows = {row["id"]: row for row in ds.dataset(tmp_path / "out/units", format="parquet").to_table().to_pylist()}
    assert json.loads(rows["0"]["record"]) == {"Brand": "Acme", "Size": 7}
    assert "400" in rows["3"]["error"]
    assert KEY not in "".join(file.read_text(errors="replace") for file in (tmp_path / "out").rglob("*.json"))
    (bill,) = book.bills(str(tmp_path / "out"))
    assert bill.parts["endpoint"] == pytest.approx(bill.totals["decode_tokens"] * 5e4 / 1e6)
    assert bill.totals["shared_tokens"] > 0
    documents = [Document(i, str(i), {}, source=rows[str(i)]["source"], place=rows[str(i)]["row"]) for i in range(6)]
    teacher.label(documents, str(tmp_path / "out"), "target")
    assert [document.id for document in documents if "target" in document.fields] == ["0", "1", "2", "5"]


@pytest.mark.slow
def test_vllm_s_server_answers_as_the_engine_does(tmp_path):
    """The same weights behind a server and in the engine, both in float32, write the same texts."""
    python = os.environ.get("RAYPD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM: RAYPD_VLLM_PYTHON=/its/environment/bin/python (docs/benchmark.md)")
    loaded = load_model(ModelConfig(dtype="float32"))
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = {"model": tmp_path / "model", "dtype": "float32", "served-model-name": "small", "max-model-len": 1024,
               "host": "127.0.0.1", "port": port}  # fmt: skip
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None and not _is_up(f"{url}/health"):
            time.sleep(1)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        settings = {"model.dtype": "float32", "decoding.max_new_tokens": 32}
        endpoint = {"model.endpoint.url": f"{url}/v1", "model.endpoint.key_variable": None}
        local, remote = (
            llm.generate(TURNS) for llm in (LLM(settings=settings), LLM("small", settings=settings | endpoint))
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    assert [result.error for result in remote] == [None] * len(TURNS)
    assert [result.value for result in remote] == [result.value for result in local]


TURNS = ["Name three colors.", "What is the capital of Norway?", ["Count to five.", "Go on."]]


def _is_up(url):
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=5).ok
    return False


def test_conversations_and_a_limit_of_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    slept = []
    monkeypatch.setattr("raypd.models.endpoint.time.sleep", slept.append)
    with server(lambda body, before: completion("Well.")) as (url, received):
        config = configuration(tmp_path, url, requests_per_minute=60)
        tokenizer = byte_tokenizer()
        engine = EndpointEngine(config, tokenizer)
        spoken = [("system", "Be brief."), ("user", "ü?"), ("assistant", "ä"), ("user", "So?")]
        turns = [{"role": role, "content": content} for role, content in spoken]
        prompt = tokenizer(rendered(tokenizer, turns))["input_ids"]

        def program():
            yield type("Feed", (), {"tokens": prompt})

        for n in range(3):
            engine.submit(program(), tag=n, sampling=None, seed=n)
        finished = []
        while engine.pending:
            finished += engine.step()
    assert [body["messages"] for _, _, body in received] == [turns] * 3
    assert {tokenizer.decode(done.answer.tokens, skip_special_tokens=True) for done in finished} == {"Well."}
    assert sum(slept) == pytest.approx(1 + 2, abs=0.3)


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = configuration(tmp_path, "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds no key"):
        run_extract(config)
    config = with_keys(config, decoding={"method": "hyper_parallel"})
    with pytest.raises(ConfigError, match=r"decoding\.method: autoregressive"):
        run_extract(config)
    assert not Path(config.output.path).exists()
