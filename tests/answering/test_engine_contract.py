"""One test of the engine contract, run over every engine that raypd can answer with."""

import itertools
import json
import os
import time

import pytest

from raypd.answering.cascade_engine import CascadeEngine
from raypd.config import FakeConfig
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import Feed
from raypd.decoding.sampling import GREEDY
from raypd.decoding.text import Prompt
from raypd.models.byte_prompt import byte_tokenizer
from raypd.models.endpoint import EndpointEngine
from raypd.models.endpoint_batch import BatchEngine
from raypd.tasks.cascade import SecondProgram
from raypd.testing.fake import FakeEngine, Program
from tests.models.test_endpoint import Vendor, completion, configuration
from tests.models.test_vllm_engine import engine as vllm_engine  # noqa: F401
from tests.servers import Reply, serving
from tests.tiny import tiny_model

TAGS = ["first", "second", "third"]
_NUMBERS = itertools.count()


def decoding_program():
    """A program that decodes three tokens."""
    return autoregressive(Prompt([5, 6, 7, 8, 9]), 3, lambda answer: False)


def message_program():
    """A program whose prompt is one message to a server, different each time."""
    message = f"<|user|>Hello {next(_NUMBERS)}<|end|><|assistant|>"
    tokens = byte_tokenizer()(message)["input_ids"]
    yield Feed(tokens, range(len(tokens)))


def fake_program():
    return Program("instruction", 10, 20, [3, 2])


def chat_server(call):
    if call.body == b"{}":
        # The engine probes whether the URL redirects.
        return Reply(400)
    status, tree = completion("Hi")
    return Reply(status, json.dumps(tree).encode())


@pytest.fixture(params=["raypd", "fake", "vllm", "endpoint", "batch", "cascade"])
def engine_and_program(request, tmp_path, monkeypatch, vllm_engine):  # noqa: F811
    """An engine of each kind, and a function that makes a program for it."""
    kind = request.param
    if kind == "raypd":
        yield Engine(tiny_model("llama")), decoding_program
    elif kind == "fake":
        yield FakeEngine(FakeConfig(load_seconds=0), 8, 512), fake_program
    elif kind == "vllm":
        yield vllm_engine()[0], decoding_program
    elif kind == "cascade":
        second = FakeEngine(FakeConfig(load_seconds=0), 8, 512)
        number_of_programs = iter(range(10))

        def program_for_either():
            if next(number_of_programs) % 2:
                return SecondProgram(fake_program())
            return decoding_program()

        yield CascadeEngine(Engine(tiny_model("llama")), second), program_for_either
    else:
        monkeypatch.setenv("OPENAI_API_KEY", os.environ["PATH"])
        is_batch = kind == "batch"
        server = Vendor() if is_batch else chat_server
        with serving(server) as url:
            config = configuration(tmp_path, f"{url}/v1", batch=is_batch)
            sections = (config.model, config.decoding, config.engine, byte_tokenizer())
            engine: EndpointEngine
            if is_batch:
                engine = BatchEngine(*sections, config.fingerprint())
            else:
                engine = EndpointEngine(*sections)
            yield engine, message_program


def test_every_engine_returns_each_program_once_with_its_tag_and_counts(engine_and_program):
    engine, make_program = engine_and_program
    assert engine.pending == 0
    assert list(engine.sequences) == []
    assert engine.waiting == ""
    for tag in TAGS:
        engine.submit(
            make_program(),
            tag=tag,
            sampling=GREEDY,
            seed=1,
        )
    assert engine.pending == len(TAGS)

    finished = []
    deadline = time.monotonic() + 60
    while engine.pending:
        assert time.monotonic() < deadline, "the engine makes no progress"
        finished += engine.step()
        for sequence in engine.sequences:
            assert sequence.counts.prefill_tokens >= 0

    assert sorted(item.tag for item in finished) == sorted(TAGS)
    for item in finished:
        assert item.error is None
        assert item.answer is not None
        assert item.counts.prefill_tokens + item.counts.shared_tokens > 0
        assert item.counts.decode_tokens > 0
    assert engine.waiting == ""


def test_a_step_waits_no_longer_than_the_patience_of_the_engine(engine_and_program):
    engine, make_program = engine_and_program
    if engine.patience is None:
        pytest.skip("the engine computes during a step")
    engine.patience = 0.0
    engine.submit(
        make_program(),
        tag="one",
        sampling=None,
        seed=1,
    )
    began = time.monotonic()
    engine.step()
    assert time.monotonic() - began < 0.5


def test_closing_an_engine_drops_what_is_pending(engine_and_program):
    engine, make_program = engine_and_program
    engine.submit(
        make_program(),
        tag="one",
        sampling=GREEDY,
        seed=1,
    )
    engine.close()
    assert engine.pending == 0
