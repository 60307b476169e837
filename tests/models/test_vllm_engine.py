"""`engine.kind: vllm`: how programs are driven, without vLLM; its own answers where it is installed
(`make vllm`).
"""

import importlib.util
import json
import re
import sys
from collections import deque
from types import ModuleType, SimpleNamespace

import pytest

from raypd import LLM
from raypd.config.load import make_config
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import ANY_OBJECT
from raypd.decoding.sampling import GREEDY, AllowedTokens, Sampling
from raypd.decoding.text import Prompt
from raypd.errors import ConfigError, ModelError
from raypd.models.vllm_engine import VLLMEngine
from raypd.schema import Attribute, record_pattern
from tests.decoding.drivers import finished
from tests.runs import config_tree, extraction

EXTRACTION = config_tree(extraction(c=["Brand"]))
VLLM = ["engine.kind=vllm", "decoding.method=guided"]
FIELDS = [  # with a value of the type and one of another
    (Attribute(name="Model (EU)"), 'X "1"\\é', 1),
    (
        Attribute(
            name="Fit",
            type="enum",
            values=["on-ear", "a.b"],
        ),
        "a.b",
        "acb",
    ),
    (Attribute(name="Weight", type="number"), -1.5, "1"),
    (
        Attribute(
            name="Count",
            type="integer",
            required=True,
        ),
        3,
        None,
    ),
    (Attribute(name="Wireless", type="boolean"), True, "true"),
    (
        Attribute(
            name="Colors",
            many=True,
            max_items=2,
        ),
        ["red", "blue"],
        ["a", "b", "c"],
    ),
    (Attribute(name="Since", type="date"), "2024-02-29", "2024-02-30"),
    (
        Attribute(
            name="SKU",
            type="pattern",
            pattern="^[A-Z]{2}-[0-9]+$",
        ),
        "AB-12",
        "AB",
    ),
]
TITLES = [
    "Acme X100 wireless headphones, black, 250 g, over-ear",
    "Bolt sport earbuds in red",
    "Sennheiser HD 560S open-back headphones, black, 240 g",
    "JBL Tune 510BT white on-ear Bluetooth headset",
]
ATTRIBUTES_OF_TITLES = [
    {"name": "Brand"},
    {
        "name": "Color",
        "type": "enum",
        "values": ["black", "red", "white"],
    },
    {"name": "Weight in g", "type": "number"},
    {"name": "Wireless", "type": "boolean", "required": True},
]


class Replay:
    """In place of vLLM's LLMEngine: answers every request with the tokens that its prompt ends
    with, then stops.
    """

    model_config = SimpleNamespace(max_model_len=100)

    def __init__(self, cached=0, limit=99):
        self.cached = cached
        self.limit = limit
        self.asked = {}
        self.left = {}
        self.aborted = []
        self.is_shut_down = False
        self.engine_core = SimpleNamespace(shutdown=self.shut_down)

    def shut_down(self):
        self.is_shut_down = True

    def add_request(self, number, prompt, parameters):
        if len(prompt["prompt_token_ids"]) >= 100:
            raise ValueError("the prompt is longer than the context")
        self.asked[number] = parameters
        self.left[number] = deque(prompt["prompt_token_ids"][1 : self.limit + 1])

    def abort_request(self, numbers):
        self.aborted += numbers
        for number in numbers:
            del self.left[number]

    def step(self):
        outputs = []
        for number, tokens in list(self.left.items()):
            token = tokens.popleft()
            reason = None if tokens else "length"
            logprobs = [{token: SimpleNamespace(logprob=-0.5)}]
            completion = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=reason)
            outputs.append(
                SimpleNamespace(
                    request_id=number,
                    outputs=[completion],
                    finished=not tokens,
                    num_cached_tokens=self.cached,
                )
            )
            if not tokens:
                del self.left[number]
        return outputs


@pytest.fixture
def engine(monkeypatch):
    """An engine over a Replay, as `engine(*settings, **of_the_replay)`; SamplingParams are what
    they were made with.
    """

    def begin(*settings, **how):
        replay = Replay(**how)
        params = {"RequestOutputKind": SimpleNamespace(DELTA="delta")}
        params |= dict.fromkeys(("SamplingParams", "StructuredOutputsParams"), SimpleNamespace)
        made = SimpleNamespace(
            from_engine_args=lambda arguments: vars(replay).update(made=arguments) or replay
        )
        modules = {
            "engine.arg_utils": {"EngineArgs": SimpleNamespace},
            "v1.engine.llm_engine": {"LLMEngine": made},
        }
        modules["distributed"] = {"cleanup_dist_env_and_memory": lambda: None}
        modules |= {
            "sampling_params": params,
            "": {},
            "engine": {},
            "v1": {},
            "v1.engine": {},
        }
        for name, members in modules.items():
            name = f"vllm.{name}".rstrip(".")
            monkeypatch.setitem(sys.modules, name, stub := ModuleType(name))
            vars(stub).update(members)
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setattr("raypd.models.vllm_engine.check_vllm", lambda *_: None)
        config = make_config(EXTRACTION, [*VLLM, *settings])
        return VLLMEngine(config.model, config.engine, None), replay

    return begin


def submit(engine, tokens, stop, limit=20, sampling=GREEDY, **how):
    program = autoregressive(Prompt(tokens), limit, lambda answer: answer[-1] == stop, **how)
    engine.submit(program, tag=stop, sampling=sampling, seed=7)


def test_programs_end_where_they_want_to_and_their_requests_are_aborted(engine):
    vllm, replay = engine(cached=2)
    submit(vllm, [5, 6, 7, 8, 9], stop=8)
    submit(vllm, [1, 2, 3, 4], stop=3)
    done = finished(vllm)
    assert [done[8].answer.tokens, done[3].answer.tokens] == [[6, 7, 8], [2, 3]]
    assert done[8].answer.logprobs == [-0.5] * 3
    assert done[8].answer.stopped is True
    assert replay.aborted == ["1", "0"]
    assert done[8].counts.prefill_tokens == 3
    assert done[8].counts.shared_tokens == 2
    assert done[8].counts.decode_tokens == 3
    assert vllm.sequences == []


def test_arguments_of_its_own_go_over_ours(engine):
    _, replay = engine(
        "engine.vllm={tensor_parallel_size: 2, enable_prefix_caching: false}",
        "engine.max_num_seqs=7",
    )
    made = replay.made
    assert made.tensor_parallel_size == 2
    assert made.enable_prefix_caching is False
    assert made.max_num_seqs == 7
    assert made.kv_cache_dtype == "auto"
    one, two = (
        make_config(EXTRACTION, [*VLLM, f"cluster.gpus_per_worker={number}"]) for number in (1, 2)
    )
    assert one.fingerprint() == two.fingerprint()


def test_the_type_of_the_cache_reaches_vllm(engine):
    _, replay = engine("model.kv_cache=fp8")
    assert replay.made.kv_cache_dtype == "fp8"


def test_an_answer_that_vllm_cuts_is_an_error_and_one_that_the_program_cuts_is_not(engine):
    vllm, replay = engine(limit=2)
    submit(vllm, [5, 6, 7, 8], stop=8)
    submit(
        vllm,
        [1, 2, 3, 4],
        stop=4,
        limit=2,
    )
    done = finished(vllm)
    assert str(done[8].error) == "vLLM ended the answer after 2 tokens (length)"
    assert done[4].answer.tokens == [2, 3]
    assert replay.aborted == []  # both were over


def test_what_vllm_refuses_spoils_that_request_alone(engine):
    vllm, _ = engine()
    with pytest.raises(ValueError, match="longer than the context"):
        submit(vllm, [1] * 120, stop=2)
    submit(vllm, [1, 2, 3], stop=3)
    assert finished(vllm)[3].answer.tokens == [2, 3]


def test_a_program_that_fails_ends_with_its_error(engine):
    vllm, replay = engine()

    def stops(tokens):
        raise KeyError("no such token")

    vllm.submit(
        autoregressive(Prompt([1, 2, 3]), 9, stops),
        tag="a",
        sampling=GREEDY,
        seed=0,
    )
    (done,) = vllm.step()
    assert repr(done.error) == "KeyError('no such token')"
    assert replay.aborted == ["0"]


def test_sampling_and_patterns_reach_vllm(engine):
    vllm, replay = engine()
    submit(
        vllm,
        [1, 2, 3],
        stop=3,
        sampling=Sampling(0.7, 5, 0.9),
        pattern="[ab]",
    )
    submit(
        vllm,
        [1, 2, 3],
        stop=2,
        pattern=ANY_OBJECT,
    )
    sampled, held = replay.asked.values()
    assert sampled.temperature == 0.7
    assert sampled.top_k == 5
    assert sampled.top_p == 0.9
    assert sampled.seed == 7
    assert sampled.structured_outputs.regex == "[ab]"
    assert sampled.max_tokens == 97
    assert held.structured_outputs.json_object is True
    assert held.seed is None
    with pytest.raises(ValueError, match="cannot restrict this answer"):
        submit(
            vllm,
            [1, 2, 3],
            stop=2,
            allowed_token_ids=lambda tokens: AllowedTokens([1]),
        )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            ["engine.kind=vllm", "decoding.method=hyper_parallel"],
            "does not support hyper_parallel: set decoding.method to autoregressive or guided",
        ),
        ([*VLLM, "model.quantization=nf4"], "model.quantization must be left at none"),
        ([*VLLM, "engine.cache_tokens=4096"], "engine.cache_tokens must be left at null"),
        ([*VLLM, "model=fake"], "needs weights"),
        (["engine.vllm={max_model_len: 9}"], "engine: vllm: these are arguments of vLLM"),
        (
            [*VLLM, "engine.vllm={hf_token_password: x}"],
            "hf_token_password: a configuration must not hold secrets",
        ),
        (
            ["cluster.gpus_per_worker=2"],
            "cluster.gpus_per_worker 2: raypd's engine holds a model on one GPU",
        ),
    ],
)
def test_what_vllm_does_not_do_is_refused(keys, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        make_config(EXTRACTION, keys)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named():
    config = make_config(EXTRACTION, VLLM)
    with pytest.raises(ModelError, match=re.escape("pip install 'raypd[vllm]'")):
        VLLMEngine(config.model, config.engine, None)


def written(record):
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in record.items()
    )
    return ",\n".join(lines) + "\n}"


def test_the_pattern_of_a_record_is_that_of_its_types():
    pattern = record_pattern([attribute for attribute, _, _ in FIELDS])
    good = {attribute.name: value for attribute, value, _ in FIELDS}
    for record in (good, dict.fromkeys(good) | {"Count": 0, "Colors": []}):
        assert re.fullmatch(pattern, written(record))
    for attribute, _, bad in FIELDS:
        assert not re.fullmatch(pattern, written({**good, attribute.name: bad})), attribute.name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoregressive", "guided"])
def test_vllm_answers_as_raypd_does(method):
    """In float32: autoregressive token for token, structured output by its types.

    One process has one vLLM.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    settings = {"model.dtype": "float32", "decoding.method": method, "decoding.max_new_tokens": 64}
    llm = LLM(settings=settings | {"engine.kind": "vllm", "engine.max_num_seqs": 4})
    native, answers = (
        answer.extract(TITLES, ATTRIBUTES_OF_TITLES) for answer in (LLM(settings=settings), llm)
    )
    (parts,) = llm._parts.values()
    parts.engine.close()
    if method == "autoregressive":
        assert [answer.value for answer in answers] == [answer.value for answer in native]
        assert [answer.status for answer in answers] == [answer.status for answer in native]
        for a, b in zip(native, answers, strict=True):
            assert b.confidence == pytest.approx(a.confidence, abs=1e-3)
    else:
        for answer in answers:
            assert set(answer.status.values()) <= {"ok", "null", "truncated"}, answer
            assert isinstance(answer.value["Wireless"], bool)
