"""What a method lacks of its model is found before any work; in one call every document comes
out.
"""

import json
import threading

import pytest
import torch
from typer.testing import CliRunner

from raypd.answering.check import check_method, check_model, path_of
from raypd.answering.components import build
from raypd.answering.request_queue import answer
from raypd.billing.meter import Meter
from raypd.cli.main import app
from raypd.cluster import ray_session
from raypd.decoding import native
from raypd.errors import ConfigError, ModelError, RunError
from raypd.models.prepare import add_heads, add_tokens
from raypd.tasks.base import Document, Record
from tests.runs import FAKE, config_tree, run_config
from tests.tiny import save_tiny

MANY = {"attributes": [{"name": f"Attribute {number}"} for number in range(200)]}
VISION = {
    "model_type": "glm4v",
    "architectures": ["Glm4vForConditionalGeneration"],
    "text_config": {
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "vision_config": {"depth": 1, "hidden_size": 32},
}
LONG = {
    "attributes": [
        {
            "name": "Fit",
            "type": "enum",
            "values": [f"{'very ' * 9}{end}" for end in ("wide", "slim")],
        }
    ]
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, the same with control tokens, and heads for the first."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "plain")
    add_tokens(str(folder / "plain"), str(folder / "control"), ["apar", "space"])
    add_heads(str(folder / "plain"), str(folder / "heads"), 2, 1)
    return folder


def check(folders, method, model="plain", **options):
    decoding = {"method": method, "options": options}
    check_method(
        run_config(
            "generation",
            model={"name": str(folders / model)},
            decoding=decoding,
        )
    )


def test_what_fits_passes(folders):
    for method in ("autoregressive", "pasta", "apar", "space"):
        check(folders, method, "control" if method in ("apar", "space") else "plain")
    check(folders, "space", mask_tokens=0)
    check(folders, "medusa", heads=str(folders / "heads"))
    check(folders, "speculative")
    check(folders, "speculative", draft_model=str(folders / "plain"))


def test_a_draft_model_must_be_there_and_share_the_tokenizer(folders):
    for name, words in (("control", "its tokenizer differs"), ("nowhere", "nowhere")):
        with pytest.raises(ModelError, match=words):
            check(folders, "speculative", draft_model=str(folders / name))


@pytest.mark.parametrize(
    ("method", "decoding", "words"),
    [
        ("apar", {}, r"no control token \[Fork\].*raypd model add-tokens .* --for apar"),
        ("space", {}, r"no control token \[Mask\].*raypd model add-tokens .* --for space"),
        ("medusa", {"heads": "nowhere"}, "decoding.options.heads nowhere: no Medusa heads there"),
        (
            "medusa",
            {"heads": "plain"},
            "no Medusa heads there: config.json describes something else",
        ),
        (
            "medusa",
            {"heads": "heads", "model": "control"},
            r"hidden size 64 and vocabulary 256, .* vocabulary 259",
        ),
    ],
)
def test_what_is_missing_is_named(folders, method, decoding, words):
    names = {"model": "plain", **decoding}
    model = names.pop("model")
    places = {
        key: str(folders / name) if (folders / name).exists() else name
        for key, name in names.items()
    }
    with pytest.raises(ModelError, match=words):
        check(folders, method, model, **places)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray_session, "connect", lambda *_: pytest.fail("Ray was started"))


@pytest.mark.parametrize(
    ("more", "error", "reason"),
    [
        (["--method", "apar"], ModelError, "add-tokens"),
        (
            ["output.partition={status: x}"],
            ConfigError,
            "output.partition: 'status' is a column of the output",
        ),
    ],
)
def test_the_command_refuses_before_it_starts_anything(folders, tmp_path, more, error, reason):
    (tmp_path / "in.jsonl").write_text('{"id": "1", "prompt": "Hi"}\n')
    words = [
        "generate",
        str(tmp_path / "in.jsonl"),
        "-m",
        str(folders / "plain"),
        "-o",
        str(tmp_path / "out"),
    ]
    with pytest.raises(error, match=reason):
        CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["falcon", "llama4_text"])
def test_what_the_own_engine_does_not_support_is_left_to_vllm_and_servers(tmp_path, kind):
    model = {"name": str(save_tiny(tmp_path / kind, kind)), "device": "auto"}
    method = {"decoding": {"method": "autoregressive"}}
    with pytest.raises(ModelError, match=r"engine\.kind=vllm can run this model"):
        check_model(run_config("generation", model=model, **method))
    check_model(
        run_config(
            "generation",
            model=model,
            engine={"kind": "vllm"},
            **method,
        )
    )
    server = {"endpoint": {"url": "http://127.0.0.1:9/v1", "key_variable": None}}
    check_model(run_config("generation", model=model | server, **method))


def test_a_vision_language_model_is_left_to_vllm(tmp_path):
    """Its configuration alone is read: there is a class for it, which is no causal one."""
    folder = save_tiny(tmp_path / "vision")
    (folder / "config.json").write_text(json.dumps(VISION))
    model = {"name": str(folder)}
    method = {"decoding": {"method": "autoregressive"}}
    with pytest.raises(ModelError, match=r"not a causal .*; engine\.kind=vllm can run this model"):
        check_model(run_config("generation", model=model, **method))
    check_model(
        run_config(
            "generation",
            model=model,
            engine={"kind": "vllm"},
            **method,
        )
    )


def test_weights_that_are_dequantized_here_are_announced(tmp_path, capsys):
    folder = save_tiny(tmp_path / "fp8")
    file = folder / "config.json"
    method = {"quant_method": "modelopt", "quant_algo": "FP8"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": method}))
    config = run_config("generation", model={"name": str(folder), "device": "cpu"})
    check_model(config, machine=True)
    assert "quantized by modelopt FP8, are dequantized to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("category", "words"),
    [
        (
            MANY,
            "task.categories.shoes: .*200 attributes.*leave no room.*lower "
            "decoding.max_value_tokens .30.",
        ),
        (LONG, "task.categories.shoes: 'Fit' needs 47 tokens.*decoding.max_value_tokens is 30"),
    ],
)
@pytest.mark.parametrize("command", ["extract", "estimate", "train"])
def test_answers_that_cannot_fit_are_refused_before_ray(
    folders, tmp_path, command, category, words
):
    (tmp_path / "in.jsonl").write_text(
        '{"id": "1", "category": "shoes", "title": "Acme", "target": {}}\n'
    )
    places = (tmp_path / "in.jsonl", tmp_path / "out")
    sections = {
        "input": {"text_columns": ["title"]},
        "model": {"name": str(folders / "plain"), "device": "cpu"},
    }
    sections["decoding"] = {"method": "hyper_parallel"}
    tree = config_tree({"categories": {"shoes": category}}, *places, **sections)
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=words) as caught:  # exit code 2
        CliRunner().invoke(app, [command, str(tmp_path / "run.yaml")], catch_exceptions=False)
    assert "to resume" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("refusal", "capabilities", "dtype", "words"),
    [
        (None, {"avx512_bf16"}, "bfloat16", "in bfloat16, with AVX-512 BF16"),
        (None, {"avx512_bf16", "amx_bf16"}, "bfloat16", "in bfloat16, with oneDNN and AMX"),
        (
            None,
            {"avx512_bf16"},
            "float32",
            "in float32, with torch alone: the fast path is for bfloat16",
        ),
        (
            "cannot be compiled (x)",
            {"avx512_bf16"},
            "bfloat16",
            "torch alone: the fast path cannot be compiled (x)",
        ),
        (
            "needs a processor with AVX-512 BF16",
            set(),
            "float32",
            "the fast path needs a processor with AVX-512 BF16",
        ),
    ],
)
def test_it_says_why_the_fast_path_is_not_taken(refusal, capabilities, dtype, words, monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda: refusal)
    monkeypatch.setattr(native, "has", lambda capability: capability in capabilities)
    if torch.cuda.is_available():
        pytest.skip("a GPU decodes here")
    assert path_of(run_config(model={"dtype": dtype})).endswith(words)


def test_it_says_that_attention_is_slower_where_the_cache_has_8_bits(monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda: None)
    monkeypatch.setattr(native, "has", lambda capability: capability == "avx512_bf16")
    if torch.cuda.is_available():
        pytest.skip("a GPU decodes here")
    model = {"dtype": "bfloat16", "kv_cache": "fp8"}
    assert path_of(run_config(model=model)).endswith(
        "with AVX-512 BF16, but attention by torch, which is slower: model.kv_cache is fp8"
    )


class LosingTask:
    """Answers the first and the last document."""

    def plan(self, documents):
        yield from (
            Record(document.index, {"text": document.id})
            for document in (documents[0], documents[-1])
        )


def test_a_document_without_a_record_is_named():
    parts = build(run_config("generation", model=FAKE), None)
    parts.task = LosingTask()
    before = {*threading.enumerate()}
    with pytest.raises(RunError, match="1 documents got no answer, for example 'lost'"):
        answer(
            parts,
            [Document(i, name, {}) for i, name in enumerate(("a", "lost", "c"))],
            Meter("", "autoregressive"),
        )
    # At the end of Python a thread in a pass would crash.
    assert "engine" not in {thread.name for thread in {*threading.enumerate()} - before}
