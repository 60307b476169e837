"""Loading: folders, dtype, device, quantization, what is refused; a small Hub of our own; and S3,
copied once.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from raypd import storage
from raypd.answering.components import warm_up
from raypd.config import ModelConfig
from raypd.decoding import QuantizedExperts, native
from raypd.decoding.engine import Engine
from raypd.decoding.layers import in_torch
from raypd.decoding.models.experts import MixtralLayer
from raypd.decoding.models.llama import PreNormLayer
from raypd.decoding.models.registry import find_family
from raypd.errors import ModelError
from raypd.models import load
from raypd.models.device import resolve_device, resolve_dtype
from raypd.models.guard import check_decodable, reason_in_rope
from raypd.models.load import _quantization, check_model_config, load_model, load_tokenizer
from raypd.models.source import find_source
from raypd.models.staging import staged
from tests.runs import says
from tests.servers import Reply, serving
from tests.tiny import save_tiny, tiny_model

TOKENS = torch.arange(3, 27)[None]
needs_native = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSED = dict.fromkeys(("falcon", "bloom", "mpt", "stablelm"), "AttentionInterface")
REFUSED |= {
    "mamba": "layers of type linear_attention",
    "llama4_text": "layers of type chunked_attention",
}
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi",
    "phi3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "phimoe",
    "helium",
    "starcoder2",
    "cohere",
    "cohere2",
    "glm4",
    "gpt_neox",
    "ernie4_5",
    "exaone4",
    "seed_oss",
    "arcee",
    "gpt2",
    "gpt_oss",
    "mimo_v2_flash",
    "granite_swa",
    "opt",
]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def refused(**settings: object) -> str:
    """The message with which check_model_config, and so load_model, refuses a model."""
    for refuses in (load_model, check_model_config):
        with pytest.raises(ModelError) as error:
            refuses(ModelConfig(**settings))
    return str(error.value)


def rewrite(folder: Path, **settings: object) -> None:
    """Changes a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_local_folder(folder: Path, dtype: str) -> None:
    config = ModelConfig(name=str(folder), dtype=dtype, device="cpu")
    loaded = load_model(config)
    expected = getattr(torch, dtype)
    saved = tiny_model("llama")
    for weight in saved.parameters():
        weight.data = weight.to(expected)
    assert torch.equal(loaded.model(TOKENS).logits, saved(TOKENS).logits)
    assert not any(
        (loaded.model.training, *(weight.requires_grad for weight in loaded.model.parameters()))
    )
    told = (loaded.name, loaded.dtype, loaded.device, loaded.context_length)
    assert told == (str(folder), expected, torch.device("cpu"), 4096)
    assert load_tokenizer(config).encode("ab\n") == loaded.tokenizer.encode("ab\n") == [97, 98, 10]


def test_dtype_auto_is_bfloat16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ({"avx2"}, {"avx512_f"}, {"avx512_bf16"}, {"amx_bf16"}, {"neon", "bf16"}):
        there = {"avx512_bf16": False, **dict.fromkeys(names, True)}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda there=there: there)
        dtype = torch.bfloat16 if any("bf16" in name for name in names) else torch.float32
        assert [resolve_dtype(key, torch.device("cpu")) for key in ("auto", "float32")] == [
            dtype,
            torch.float32,
        ]


def test_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert "model.dtype float16" in refused(
        name=str(folder),
        dtype="float16",
        device="cpu",
    )
    check_model_config(
        ModelConfig(
            name=str(folder),
            dtype="float16",
            device="cpu",
        ),
        machine=False,
    )
    assert "is not a device" in refused(name=str(folder), device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")
    assert "cpu and cuda, not on mps" in refused(name=str(folder), quantization="int8")
    assert resolve_dtype("auto", torch.device("mps")) == torch.float32
    assert "no CUDA device" in refused(name=str(folder), device="cuda:0")
    check_model_config(ModelConfig(name=str(folder), device="cuda"), machine=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "2 CUDA devices" in refused(name=str(folder), device="cuda:2")
    assert resolve_device("auto") == torch.device("cuda")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "dtype", "layer", "most"),
    [
        ("nf4", "float32", "Linear4bit", 0.5),
        ("int8", "float32", "Linear8bitLt", 0.1),
        pytest.param("w8a8", "auto", "Int8Linear", 0.1, marks=needs_native),
    ],
)
def test_quantization(folder: Path, kind: str, dtype: str, layer: str, most: float, capfd) -> None:
    loaded = load_model(
        ModelConfig(
            name=str(folder),
            dtype=dtype,
            device="cpu",
            quantization=kind,
        )
    )
    kinds = [type(module).__name__ for module in loaded.model.modules()]
    # All linear layers but the head are quantized.
    assert kinds.count(layer) == 2 * 7
    assert kinds.count("Linear") == 1
    exact = tiny_model("llama")(TOKENS).logits
    assert 0.001 < (loaded.model(TOKENS).logits - exact).norm() / exact.norm() < most
    assert "inputs will be cast" not in capfd.readouterr().err


@needs_native
def test_eight_bits_want_a_processor_and_those_of_bitsandbytes_wait_for_no_gpu(
    folder: Path, monkeypatch
) -> None:
    assert "bfloat16, and these are cpu and float32" in refused(
        name=str(folder), quantization="w8a8", dtype="float32"
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    assert "w8a8: needs a processor with AVX-512 BF16" in refused(
        name=str(folder), quantization="w8a8"
    )
    check_model_config(ModelConfig(name=str(folder), quantization="w8a8"), machine=False)
    thresholds = [
        _quantization("int8", torch.float32, torch.device(d)).llm_int8_threshold
        for d in ("cuda", "cpu")
    ]
    assert thresholds == [0.0, 6.0]


def test_fp8_wants_a_gpu_that_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fp8: needs a GPU of compute capability 8.9 or more" in refused(
        name=str(folder), quantization="fp8"
    )
    check_model_config(ModelConfig(name=str(folder), quantization="fp8"), machine=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "this is NVIDIA A100" in refused(name=str(folder), quantization="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_model_config(ModelConfig(name=str(folder), quantization="fp8"))
    assert "bfloat16, not float16" in refused(
        name=str(folder),
        quantization="fp8",
        dtype="float16",
    )
    for version, message in (
        ("2.11.1+cu130", "install torch 2.12"),
        ("2.13.0+cu130", "bfloat16, not float16"),
    ):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        assert message in refused(
            name=str(folder),
            quantization="fp8",
            dtype="float16",
        )


def test_a_cache_in_8_bits_wants_a_gpu_that_converts_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(name=str(folder), kv_cache="fp8")
    check_model_config(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    message = refused(name=str(folder), kv_cache="fp8")
    says(message, "model.kv_cache fp8: needs a GPU of compute capability 8.9 or more", "A100")
    check_model_config(config, machine=False)
    check_model_config(config, purpose="vllm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_model_config(config)
    config = ModelConfig(name=str(folder), kv_cache="fp8", device="mps")
    with pytest.raises(ModelError, match=r"works on model\.device cpu and cuda, not on mps"):
        check_model_config(config, machine=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_8_bits_cannot_hold_are_refused(folder: Path, tmp_path: Path, dtype: str) -> None:
    load_model(
        ModelConfig(
            name=str(folder),
            dtype=dtype,
            device="cpu",
            kv_cache="fp8",
        )
    )
    model = tiny_model("llama")
    for layer in model.model.layers:
        # The scores stay the same, and the keys are beyond the range.
        layer.self_attn.k_proj.weight.data *= 1e5
        layer.self_attn.q_proj.weight.data /= 1e5
    save_tiny(tmp_path)
    model.save_pretrained(tmp_path)
    settings = {"name": str(tmp_path), "dtype": dtype, "device": "cpu"}
    load_model(ModelConfig(**settings))
    with pytest.raises(ModelError) as error:
        load_model(ModelConfig(**settings, kv_cache="fp8"))
    says(
        str(error.value),
        "model.kv_cache fp8 changes its logits by",
        "8 bits are too few for its keys and values",
        "set model.kv_cache: auto",
    )


def test_quantization_where_it_cannot_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "float64" in refused(
        name=str(folder),
        quantization="nf4",
        dtype="float64",
    )
    assert "cpu and cuda" in refused(
        name=str(folder),
        quantization="nf4",
        device="mps",
    )
    save_tiny(tmp_path / "nf4")
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    rewrite(tmp_path / "nf4", quantization_config=settings)
    assert "already quantized" in refused(name=str(tmp_path / "nf4"), quantization="nf4")
    # A mixture whose experts are no linear layers: bitsandbytes would leave most of it as it is.
    save_tiny(tmp_path / "moe", "qwen3_moe", num_experts=8)
    with pytest.raises(ModelError, match="quantizes only"):
        load_model(
            ModelConfig(
                name=str(tmp_path / "moe"),
                quantization="nf4",
                device="cpu",
            )
        )
    if native.refusal() is None:
        loaded = load_model(
            ModelConfig(
                name=str(tmp_path / "moe"), quantization="w8a8", device="cpu", dtype="bfloat16"
            )
        )
        assert type(loaded.model.model.layers[0].mlp.experts) is QuantizedExperts
    there = load.importlib.util.find_spec
    monkeypatch.setattr(
        load.importlib.util, "find_spec", lambda name: None if "bits" in name else there(name)
    )
    assert "pip install 'raypd[quantize]'" in refused(name=str(folder), quantization="int8")
    check_model_config(ModelConfig(name=str(folder), quantization="int8"), machine=False)


def test_folders_that_hold_no_model(folder: Path, tmp_path: Path) -> None:
    assert "belong to Hub ids" in refused(name=str(folder), revision="main")
    assert "there is no folder" in refused(name=str(tmp_path / "nowhere"))
    assert "neither a folder (local or s3://) nor a Hub id" in refused(name="a/b/c")
    assert "no config.json" in refused(name=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "set model.adapter" in refused(name=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "is a file" in refused(name=str(tmp_path / "config.json"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "no model.safetensors; pickles (.bin) are not read" in refused(name=str(tmp_path))
    (tmp_path / "model.fp16.safetensors").touch()
    assert "rename model.fp16.safetensors to model.safetensors" in refused(name=str(tmp_path))
    (tmp_path / "consolidated.safetensors").touch()
    assert "has Mistral's own names" in refused(name=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(name=str(tmp_path))


def test_a_part_of_the_weights_is_missing(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors").unlink()
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    load_model(ModelConfig(name=str(tmp_path), device="cpu"))
    parts[-1].unlink()
    assert f"1 of {len(parts)} files" in refused(name=str(tmp_path))


def test_a_single_file_is_read_where_there_is_an_index_of_parts_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = load_model(
        ModelConfig(
            name=str(tmp_path),
            device="cpu",
            dtype="float32",
        )
    )
    for name, weight in expected.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weight)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_output_embeddings_are_those_that_transformers_takes(tmp_path: Path, tied: bool) -> None:
    """A configuration may tie them although the file has both."""
    save_tiny(tmp_path)
    rewrite(tmp_path, tie_word_embeddings=tied, torch_dtype="float16", dtype=None)
    tokens = torch.arange(3, 27)[None]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    loaded = load_model(
        ModelConfig(
            name=str(tmp_path),
            device="cpu",
            dtype="float32",
        )
    )
    assert torch.equal(loaded.model(tokens).logits, expected)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if tied:
        load_model(ModelConfig(name=str(tmp_path), device="cpu"))
    else:
        with pytest.raises(ModelError, match=r"1 of its weights are missing .*lm_head"):
            load_model(ModelConfig(name=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        # transformers would fill a third layer with random numbers
        (lambda folder: rewrite(folder, num_hidden_layers=3), r"weights are missing .*layers\.2"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 64),
            r"cut short or damaged \(.*\): fetch it again",
        ),
        (
            lambda folder: tiny_model("llama", vocab_size=200).save_pretrained(folder),
            "tokenizer of another",
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
            "tokenizer cannot be read",
        ),
    ],
)
def test_a_damaged_folder(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(save_tiny(tmp_path))
    with pytest.raises(ModelError, match=reason):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"))


def test_models_that_cannot_be_decoded_are_refused_before_their_weights(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert "AttentionInterface" in refused(name=str(save_tiny(tmp_path / "falcon", "falcon")))
    assert "linear_attention" in refused(name=str(save_tiny(tmp_path / "mamba", "mamba")))
    unequal = {
        **LONG,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    assert "long-rope" in refused(
        name=str(save_tiny(tmp_path / "rope", "phi3", rope_parameters=unequal))
    )
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "clip" / "model.safetensors").write_bytes(b"")
    assert "not a causal language model" in refused(name=str(tmp_path / "clip"))


def hub_of(folder: Path, path: str) -> Reply:
    """A Hub with one repository, owner/tiny, at the revisions main and v1; owner/gated is gated."""
    repository, _, place = path.lstrip("/").partition("/resolve/")
    revision, _, file = place.partition("/")
    # Lists a folder of chat templates, which is not there.
    if path.startswith("/api/models/owner/tiny"):
        return Reply(404, headers={"X-Error-Code": "EntryNotFound"})
    if repository == "owner/gated":
        return Reply(403, headers={"X-Error-Code": "GatedRepo"})
    if repository != "owner/tiny":
        return Reply(404, headers={"X-Error-Code": "RepoNotFound"})
    if revision not in ("main", "v1", COMMIT):
        return Reply(404, headers={"X-Error-Code": "RevisionNotFound"})
    if not (folder / file).is_file():
        return Reply(404, headers={"X-Error-Code": "EntryNotFound"})
    data = (folder / file).read_bytes()
    return Reply(
        200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The Hub's client pointed at our server, with a cache of its own."""
    folder = save_tiny(tmp_path / "served")
    with serving(lambda call: hub_of(folder, call.path)) as address:
        point_client(monkeypatch, address, tmp_path / "cache")
        yield address


def point_client(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    import transformers.utils.hub as hub_utils

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_utils.constants, "HF_HUB_CACHE", str(cache))
    huggingface_hub.close_session()


@torch.no_grad()
def test_a_model_of_the_hub(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(
        ModelConfig(name="owner/tiny", revision="v1", dtype="float32", device="cpu")
    )
    assert torch.equal(loaded.model(TOKENS).logits, tiny_model("llama")(TOKENS).logits)
    assert loaded.name == "owner/tiny"
    assert "no revision 'nope' on the Hub" in refused(name="owner/tiny", revision="nope")
    assert "is not a model on the Hub" in refused(name="owner/absent")
    assert "accept its terms" in refused(name="owner/gated")
    assert "no adapter_config.json" in refused(name="owner/tiny", adapter="owner/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what is in the cache still loads
    load_model(
        ModelConfig(
            name="owner/tiny",
            revision="v1",
            dtype="float32",
            device="cpu",
        )
    )
    says(refused(name="owner/absent"), "HF_HUB_OFFLINE is set", "hf download owner/absent")
    assert "at revision 'v2'" in refused(name="owner/tiny", revision="v2")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_client(monkeypatch, "http://127.0.0.1:9", tmp_path)  # nobody listens there
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)  # between the client's tries
    absent = "'owner/{}': is not in the Hub's cache"
    says(refused(name="owner/tiny"), absent.format("tiny"), "cannot be reached", str(tmp_path))
    # It is said at once: nothing is tried five times.
    assert waits == []
    says(
        refused(name=str(save_tiny(tmp_path / "base")), adapter="owner/adapter"),
        absent.format("adapter"),
    )


@pytest.fixture(params=["s3", "folder", "hub"])
def model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """(name, folder) of a model that is staged."""
    cache = tmp_path / "cache/models--me--tiny"
    folder = save_tiny(cache / "snapshots/0123456789abcdef0123456789abcdef01234567")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(
        "RAYPD_CACHE" if request.param == "s3" else "RAYPD_STAGING", str(tmp_path / "disk")
    )
    if request.param != "s3":
        return "me/tiny" if request.param == "hub" else str(folder), str(folder)
    name = f"{request.getfixturevalue('bucket')}/models/tiny"
    for file in folder.iterdir():
        storage.put(f"{name}/{file.name}", file.read_bytes())
    return name, name


def test_eight_workers_read_one_copy(
    model: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, source = model
    reads = Counter[str]()
    real = storage.open_read
    monkeypatch.setattr(
        storage, "open_read", lambda path, **k: reads.update([Path(path).name]) or real(path, **k)
    )
    config = ModelConfig(name=name, dtype="float32")
    if "://" in name or Path(name).exists():  # else config.json is the Hub client's to find
        check_model_config(config)
        load_tokenizer(config)
    assert "model.safetensors" not in reads  # a head needs no weights
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: staged(source), range(8)))
    (folder,) = folders
    assert find_source(config, weights=True).location == str(folder)
    assert folder.parent == tmp_path / "disk/models"
    assert reads["model.safetensors"] == 1
    assert max(reads.values()) == 1
    if "://" in name:
        loaded = load_model(config).model
        for weight, expected in zip(
            loaded.parameters(), tiny_model("llama").parameters(), strict=True
        ):
            assert torch.equal(weight, expected)
    storage.put(f"{source}/config.json", storage.read(f"{source}/config.json") + b"\n")
    assert staged(source) not in folders


def test_what_cannot_be_staged_is_said(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"there is no config\.json there"):
        check_model_config(ModelConfig(name=f"{bucket}/nothing"))
    storage.put(f"{bucket}/tiny/config.json", b"{}")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPD_STAGING", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="let RAYPD_STAGING name another folder"):
        check_model_config(ModelConfig(name=f"{bucket}/tiny"))


def test_a_warm_engine_is_empty() -> None:
    engine = Engine(tiny_model("llama"), max_num_batched_tokens=64)
    warm_up(engine, 64)
    assert engine.pending == 0
    assert list(engine.sequences) == []
    assert engine.steps >= 3


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(ModelError) as error:
        check_decodable(model, "owner/model")
    assert "'owner/model'" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_pass(kind: str) -> None:
    model = tiny_model(kind)
    before = model.config._attn_implementation
    check_decodable(model)
    check_decodable(model.to(torch.bfloat16))
    assert (
        model.config._attn_implementation == model.base_model.config._attn_implementation == before
    )


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_families_that_are_refused_with_a_way_out(kind: str, reason: str) -> None:
    model = tiny_model(kind)
    before = model.config._attn_implementation
    message = refusal(model)
    assert reason in message
    assert f"raypd's engine does not support {type(model).__name__}" in message
    assert message.endswith("engine.kind=vllm can run this model")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"sliding_window": 3}),  # windows shorter than the rows of the self-test
        ("mistral", {"sliding_window": 3}),
        (
            "phi3",
            {"rope_parameters": {**LONG, "short_factor": [1.5] * 8, "long_factor": [1.5] * 8}},
        ),
        ("llama", {"rope_parameters": {**DYNAMIC, "rope_type": "linear"}}),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("olmo2", {"rope_parameters": DYNAMIC}),
        (
            "qwen3",
            {
                "rope_parameters": {
                    **DYNAMIC,
                    "rope_type": "yarn",
                    "original_max_position_embeddings": 2048,
                }
            },
        ),
    ],
)
def test_settings_that_pass(kind: str, settings: dict[str, Any]) -> None:
    check_decodable(tiny_model(kind, **settings))
    check_decodable(tiny_model(kind, seed=1, **settings).double())


def test_rope_that_depends_on_the_longest_row() -> None:
    unequal = {
        **LONG,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    assert "long-rope" in refusal(tiny_model("phi3", rope_parameters=unequal))
    by_layer: Any = SimpleNamespace(
        rope_parameters={"full_attention": unequal | {"rope_type": "longrope"}, "sliding": {}}
    )
    assert "long-rope" in str(reason_in_rope(by_layer))
    of_phimoe = {
        **LONG,
        "short_factor": [1.0] * 8,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
    }
    message = refusal(tiny_model("phimoe", rope_parameters=of_phimoe | {"long_factor": [1.0] * 8}))
    assert "set `long_mscale` to what `short_mscale` is, and `max_position_embeddings`" in message


def test_a_window_that_only_masks_of_transformers_have_is_refused() -> None:
    """The rows of the self-test are shorter than it."""
    message = refusal(tiny_model("phimoe", sliding_window=100))
    assert "its layers [0, 1] have a sliding window of 100 tokens, which its code does" in message
    check_decodable(tiny_model("phimoe", sliding_window=4096))


@pytest.mark.parametrize("kind", ["olmoe", "llama"])
def test_a_window_that_only_the_cache_of_transformers_has_is_refused(kind: str) -> None:
    model = tiny_model(kind, sliding_window=7)
    # It answers otherwise with a cache than without one.
    texts = [
        model.generate(TOKENS, max_new_tokens=12, do_sample=False, use_cache=use_cache).tolist()
        for use_cache in (True, False)
    ]
    assert texts[0] != texts[1]
    assert "set `sliding_window` to null in a copy of config.json" in refusal(model)
    check_decodable(tiny_model(kind, sliding_window=4096))


def test_a_family_that_loses_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixtralLayer, "attention_source", PreNormLayer.attention_source)
    assert "its layers [0, 1] have a sliding window" in refusal(
        tiny_model("mixtral", sliding_window=100)
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "hunyuan_v1_dense"])
def test_a_dynamic_rope_is_as_transformers_has_it_up_to_the_end_of_the_context(
    tmp_path: Path, kind: str
) -> None:
    rope = {**DYNAMIC, "alpha": 1000.0} if kind == "hunyuan_v1_dense" else DYNAMIC
    sizes = {"max_position_embeddings": 64, "rope_parameters": rope}
    folder = save_tiny(tmp_path / kind, kind, **sizes)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    loaded = load_model(
        ModelConfig(
            name=str(folder),
            device="cpu",
            dtype="float32",
        )
    )
    tokens = torch.randint(3, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    expected = stock(tokens).logits
    assert torch.equal(loaded.model(tokens).logits, expected)
    # A longer row would change the frequencies of transformers' model for good.
    longer = torch.cat([tokens, tokens], 1)
    loaded.model(longer)
    assert torch.equal(loaded.model(tokens).logits, expected)
    assert loaded.context_length == 64


def ignore_positions(model: PreTrainedModel) -> None:
    forward = model.model.forward

    def without(input_ids: torch.Tensor, position_ids: torch.Tensor, **arguments: Any) -> Any:
        return forward(
            input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **arguments
        )

    model.model.forward = without


def mix_neighbours(model: PreTrainedModel) -> None:
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x + 0.1 * x.roll(1, 1))


def drop_arguments(model: PreTrainedModel) -> None:
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, step=None, **arguments: forward(
        *a, **arguments
    )


def store_other_keys(model: PreTrainedModel) -> None:
    """A layer that attends twice: what later passes read are the keys of the second time."""
    forward = model.model.layers[1].self_attn.forward

    def twice(hidden_states: torch.Tensor, **arguments: Any) -> Any:
        attended = forward(hidden_states=hidden_states, **arguments)
        forward(hidden_states=2 * hidden_states, **arguments)
        return attended

    model.model.layers[1].self_attn.forward = twice


def skip_attention(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


SPOILT = [
    (kind, spoil, "other logits than each alone")
    for spoil in (ignore_positions, mix_neighbours, store_other_keys)
    for kind in ("phimoe", "helium", "mimo_v2_flash", "olmo")
]


@pytest.mark.parametrize(
    ("kind", "spoil", "reason"),
    [
        *SPOILT,
        ("olmo", drop_arguments, "must hand unknown keyword arguments on"),
        ("olmo", skip_attention, r"called for the layers [0]"),
        ("olmo", lambda model: model.lm_head.weight.data.mul_(torch.inf), "not finite"),
    ],
)
def test_the_self_test_sees(
    kind: str, spoil: Callable[[PreTrainedModel], None], reason: str
) -> None:
    model = tiny_model(kind)
    assert find_family(model) is None, (
        f"{kind} is in the registry of families now: take another type that runs on transformers' "
        "own layers"
    )
    spoil(model)
    assert reason in refusal(model)
    if reason == "not finite":
        # Nothing else decodes broken weights either.
        assert "can run this model" not in refusal(model)
    if (kind, spoil) == ("olmo", ignore_positions):
        assert reason in refusal(model.to(torch.bfloat16))


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "glm4"]
)
def test_it_holds_the_own_code_of_a_family_to_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_torch, "rotate", lambda x, rope: x)
    assert "other logits than each alone" in refusal(tiny_model(kind))
