"""GGUF files of disks, buckets and the Hub, read as the package of llama.cpp reads them."""

import itertools
import json
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from raypd import storage
from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.pack import pack_model
from raypd.errors import ModelError
from raypd.models import model_end_tokens
from raypd.models.gguf_file import choose_file
from raypd.models.gguf_metadata import complete
from raypd.models.load import check_model_config, load_model, load_tokenizer, quantization_notice
from raypd.models.source import _hub_files, find_source
from tests.gguf_files import write_gguf
from tests.models.test_load import hub_of, point_client
from tests.servers import Reply, serving
from tests.tiny import tiny_model, tiny_tokenizer

TOKENS = torch.arange(3, 27)[None]
Q4_0 = gguf.GGMLQuantizationType.Q4_0
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


def config_of(name: object) -> ModelConfig:
    return ModelConfig(name=str(name), device="cpu", dtype="float32")


def refused(name: object) -> str:
    with pytest.raises(ModelError) as error:
        check_model_config(config_of(name))
    assert "\n" not in str(error.value)
    return str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("quantization", [Q4_0, Q8_0, gguf.GGMLQuantizationType.F16])
def test_a_file_has_the_weights_that_the_package_of_llama_cpp_reads(
    tmp_path: Path,
    kind: str,
    quantization: gguf.GGMLQuantizationType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", kind, quantization)
    config = config_of(tmp_path / "tiny.gguf")
    check_model_config(config)
    loaded = load_model(config)
    # transformers multiplies Q4_0 in another order.
    assert torch.allclose(loaded.model(TOKENS).logits, model(TOKENS).logits, atol=1e-4)
    assert "quantized by GGUF, are dequantized to float32 on cpu" in caplog.text
    assert quantization_notice(config) in caplog.messages
    assert loaded.context_length == 4096
    assert isinstance(Engine(pack_model(loaded.model)).model, DecoderModel)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
# What models of other kinds have that no file says by default of transformers: windows that are
# filled, factors of scores, and sizes of experts.
KINDS: dict[str, dict[str, object]] = {
    # Its tokenizer has a token of its own.
    "qwen2": {"vocab_size": 264},
    # llama.cpp always divides the weights of experts by their sum.
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {"shared_expert_intermediate_size": 96},
    "gemma2": {"sliding_window": 7, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 7, "num_hidden_layers": 6},
    "phi3": {
        "sliding_window": 7,
        "rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
    },
    "starcoder2": {"sliding_window": 4096},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"vocab_size": 264},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models_are_what_llama_cpp_stores(tmp_path: Path, kind: str) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", kind, **KINDS[kind])
    loaded = load_model(config_of(tmp_path / "tiny.gguf"))
    assert torch.allclose(loaded.model(TOKENS).logits, model(TOKENS).logits, atol=1e-4)


@torch.no_grad()
def test_a_scaled_rotation_of_gemma_3_is_for_layers_without_a_window(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = write_gguf(
        tmp_path / "tiny.gguf",
        "gemma3_text",
        texts={"gemma3.rope.scaling.type": "linear"},
        numbers={"gemma3.rope.scaling.factor": 8.0},
        num_hidden_layers=6,
        rope_parameters=rope,
    )
    loaded = load_model(config_of(tmp_path / "tiny.gguf"))
    positions = torch.arange(0, 24 * 20, 20)[None]
    expected = model(TOKENS, position_ids=positions).logits
    found = loaded.model(TOKENS, position_ids=positions).logits
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "layers", "hidden_size", "expected"),
    # As google/gemma-2-27b, gemma-2-9b, gemma-3-27b-it and gemma-3-4b-it have it in config.json.
    [
        ("gemma2", 46, 4608, 144),
        ("gemma2", 42, 3584, 256),
        ("gemma3", 62, 5376, 168),
        ("gemma3", 34, 2560, 256),
    ],
)
def test_the_scale_of_scores_is_that_of_each_gemma(
    kind: str, layers: int, hidden_size: int, expected: int
) -> None:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden_size, "num_attention_heads": 32}
    config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(kind, kind), **sizes)
    head_dim = 128 if layers in (46, 62) else 256
    complete(config, kind, {"attention.key_length": head_dim})
    assert config.query_pre_attn_scalar == expected


def test_the_window_of_starcoder2_is_that_of_its_makers() -> None:
    """As bigcode/starcoder2-3b, 7b and 15b have it in config.json; files leave it out."""
    config = AutoConfig.for_model("starcoder2")
    assert config.sliding_window is None
    complete(config, "starcoder2", {})
    assert config.sliding_window == 4096


# All that the package of llama.cpp dequantizes.
TYPES = (
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL"),
    *("IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)


@torch.no_grad()
# transformers reads them in two ways.
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_all_types_of_numbers(tmp_path: Path, kind: str) -> None:
    types = [gguf.GGMLQuantizationType[name] for name in TYPES]
    settings = {**WIDE, **KINDS.get(kind, {}), "num_hidden_layers": 4}
    model = write_gguf(tmp_path / "tiny.gguf", kind, itertools.cycle(types), **settings)
    stored = {tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert stored >= set(types)
    loaded = load_model(config_of(tmp_path / "tiny.gguf"))
    logits = model(TOKENS).logits
    assert logits.isfinite().all()
    assert float(logits.std()) > 0
    assert torch.allclose(loaded.model(TOKENS).logits, logits, atol=1e-4 * float(logits.std()))
    weights = dict(model.named_parameters())
    for name, weight in loaded.model.named_parameters():
        assert torch.allclose(weight, weights[name], atol=1e-6), name


@pytest.mark.parametrize("quantization", ["Q8_1", "Q8_K", "Q1_0", "I32"])
def test_a_type_of_numbers_that_is_not_read_is_refused_by_name(
    tmp_path: Path, quantization: str
) -> None:
    number_type = gguf.GGMLQuantizationType[quantization]
    numbers, size = gguf.GGML_QUANT_SIZES[number_type]
    blocks = np.zeros((4, 256 // numbers * size), dtype=np.uint8)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, raw_tensors={"blk.0.ffn_extra.weight": (blocks, number_type)})
    message = refused(file)
    assert f"its tensor blk.0.ffn_extra.weight has the type {quantization}" in message
    assert "a server of llama.cpp may answer in its place (model.endpoint)" in message


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("llama", "llama.logit_scale", 0.5, "its llama.logit_scale is 0.5, and transformers makes"),
        ("llama", "llama.attention.scale", 0.5, "llama.attention.scale is 0.5, and transformers"),
        ("qwen3_moe", "qwen3moe.expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale is 2.5"),
    ],
)
def test_a_key_that_transformers_leaves_out_is_refused(
    tmp_path: Path, kind: str, key: str, value: float, words: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind, numbers={key: value})
    message = refused(tmp_path / "tiny.gguf")
    assert words in message
    assert "a server of llama.cpp may answer in its place" in message


def test_the_tokenizer_and_all_its_end_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(config_of(tmp_path / "tiny.gguf"))
    expected = tiny_tokenizer()
    text = "Bose QC45: 24 h\n"
    assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.chat_template == expected.chat_template
    assert model_end_tokens(tokenizer) == (2, 10)


def test_a_check_writes_no_weights_and_a_second_worker_finds_them(
    tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    config = config_of(tmp_path / "tiny.gguf")
    check_model_config(config)
    load_tokenizer(config)
    assert not list(cache.rglob("*.safetensors"))
    source = find_source(config, weights=True)
    (weights,) = cache.rglob("*.safetensors")
    written = weights.stat().st_mtime_ns
    assert find_source(config, weights=True) == source
    assert weights.stat().st_mtime_ns == written
    # A file that has changed is converted anew.
    write_gguf(tmp_path / "tiny.gguf", tie_word_embeddings=True)
    assert find_source(config, weights=True).location != source.location


@torch.no_grad()
def test_names_of_one_file_of_a_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-Q8_0.gguf")
    (tmp_path / "mmproj-F16.gguf").touch()
    logits = load_model(config_of(tmp_path)).model(TOKENS).logits
    smaller = write_gguf(tmp_path / "tiny-Q4_0.gguf", quantization=Q4_0)
    message = refused(tmp_path)
    assert "there are 2 GGUF files (tiny-Q4_0.gguf, tiny-Q8_0.gguf)" in message
    assert torch.equal(load_model(config_of(f"{tmp_path}:q8_0")).model(TOKENS).logits, logits)
    loaded = load_model(config_of(f"{tmp_path}:Q4_0"))
    assert torch.allclose(loaded.model(TOKENS).logits, smaller(TOKENS).logits, atol=1e-4)
    assert "there is no GGUF file of type Q5_K_M there" in refused(f"{tmp_path}:Q5_K_M")


def test_a_folder_with_safetensors_beside_is_no_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert find_source(config_of(tmp_path)).gguf is None


@pytest.mark.parametrize(
    ("files", "kind", "chosen"),
    [
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf"], "Q4_K_M", "a-Q4_K_M.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (["BF16/a-BF16.gguf", "a-Q8_0.gguf"], "bf16", "BF16/a-BF16.gguf"),
        (["a.gguf", "README.md", "mmproj-a.gguf"], None, "a.gguf"),
        (["a.Q4_0.gguf", "a.IQ4_XS.gguf"], "IQ4_XS", "a.IQ4_XS.gguf"),
    ],
)
def test_the_file_of_a_type(files: list[str], kind: str | None, chosen: str) -> None:
    assert choose_file(files, kind, "name") == chosen


def test_a_file_in_parts_is_refused() -> None:
    files = [f"a-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    with pytest.raises(ModelError, match="one of 2 parts; join them with"):
        choose_file(files, "Q4_K_M", "name")


@torch.no_grad()
def test_a_file_of_a_bucket(tmp_path: Path, bucket: str) -> None:
    model = write_gguf(tmp_path / "tiny-Q8_0.gguf")
    storage.put(f"{bucket}/models/tiny-Q8_0.gguf", (tmp_path / "tiny-Q8_0.gguf").read_bytes())
    for name in (f"{bucket}/models/tiny-Q8_0.gguf", f"{bucket}/models", f"{bucket}/models:Q8_0"):
        loaded = load_model(config_of(name))
        assert torch.allclose(loaded.model(TOKENS).logits, model(TOKENS).logits, atol=1e-4)
    assert "there is no such file" in refused(f"{bucket}/models/other.gguf")


def test_a_repository_of_gguf_files_needs_a_type() -> None:
    assert "as in owner/tiny-GGUF:Q4_K_M" in refused("owner/tiny-GGUF")


@torch.no_grad()
def test_a_file_of_the_hub_is_fetched_by_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    model = write_gguf(served / "tiny-Q8_0.gguf")
    write_gguf(served / "tiny-Q4_0.gguf", quantization=Q4_0)
    files = [
        {
            "type": "file",
            "path": file.name,
            "size": file.stat().st_size,
            "oid": "0" * 40,
        }
        for file in served.iterdir()
    ]

    def answer(path: str) -> Reply:
        if path.startswith("/api/models/owner/tiny/tree/main"):
            return Reply(200, json.dumps(files).encode())
        return hub_of(served, path)

    with serving(lambda call: answer(call.path)) as address:
        point_client(monkeypatch, address, tmp_path / "hub")
        logits = load_model(config_of("owner/tiny:Q8_0")).model(TOKENS).logits
        assert torch.allclose(logits, model(TOKENS).logits, atol=1e-4)
        assert "there is no GGUF file of type Q6_K there" in refused("owner/tiny:Q6_K")
        assert "on the Hub" in refused("owner/absent:Q8_0")
    fetched = [file.name for file in (tmp_path / "hub").rglob("*.gguf")]
    assert fetched == ["tiny-Q8_0.gguf"]
    # What was fetched is found without a network.
    _hub_files.cache_clear()
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's tries
    load_model(config_of("owner/tiny:Q8_0"))


@torch.no_grad()
def test_the_rotation_of_llama_3_is_that_of_its_configuration(tmp_path: Path) -> None:
    """llama.cpp stores what frequencies are divided by, and transformers drops these numbers."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_model("llama", rope_parameters=rope).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)
    assert divisors.max() == pytest.approx(8)
    file = tmp_path / "tiny.gguf"
    model = write_gguf(file, tensors={"rope_freqs.weight": divisors}, rope_parameters=rope)
    # Far apart, the positions show low frequencies.
    positions = torch.arange(0, 24 * 150, 150)[None]
    logits = load_model(config_of(file)).model(TOKENS, position_ids=positions).logits
    assert torch.allclose(logits, model(TOKENS, position_ids=positions).logits, atol=1e-3)
    odd = tmp_path / "odd.gguf"
    write_gguf(odd, tensors={"rope_freqs.weight": divisors + 1}, rope_parameters=rope)
    assert "are not those of Llama 3" in refused(odd)


@torch.no_grad()
def test_a_rotation_that_is_scaled_by_keys(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    file = tmp_path / "tiny.gguf"
    model = write_gguf(
        file,
        texts={"llama.rope.scaling.type": "linear"},
        numbers={"llama.rope.scaling.factor": 4.0},
        rope_parameters=rope,
    )
    loaded = load_model(config_of(file))
    assert torch.allclose(loaded.model(TOKENS).logits, model(TOKENS).logits, atol=1e-3)
    write_gguf(tmp_path / "odd.gguf", texts={"llama.rope.scaling.type": "twisted"})
    assert "scaled by 'twisted', which is not known" in refused(tmp_path / "odd.gguf")


def test_a_tensor_that_transformers_drops_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tensors={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelError, match="numbers, but transformers takes"):
        load_model(config_of(file))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"noise" * 100)
    assert "transformers cannot read this GGUF file" in refused(tmp_path / "noise.gguf")
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    assert "cannot read this GGUF file" in refused(tmp_path / "short.gguf")
    other = data.replace(
        b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00llama",
        b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00other",
    )
    assert other != data
    (tmp_path / "other.gguf").write_bytes(other)
    message = refused(tmp_path / "other.gguf")
    assert "architecture other is not read from GGUF files (llama, qwen2, " in message
    assert "a server of llama.cpp may answer in its place (model.endpoint)" in message


def test_an_unknown_way_to_split_text_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "tiny.gguf", texts={"tokenizer.ggml.pre": "esperanto"})
    load_tokenizer(config_of(tmp_path / "tiny.gguf"))
    assert "splits text into words as 'esperanto' does" in caplog.text
    caplog.clear()
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "tiny.gguf", texts={"tokenizer.ggml.pre": "esperanto"})
    tiny_tokenizer().save_pretrained(other)
    load_tokenizer(config_of(other))
    assert "splits text" not in caplog.text


@torch.no_grad()
def test_a_converted_file_is_saved_as_a_plain_model(tmp_path: Path, cache: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    location = Path(find_source(config_of(tmp_path / "tiny.gguf"), weights=True).location)
    assert location.parent == cache
    assert location.name.endswith("-float32")
    again = AutoModelForCausalLM.from_pretrained(location)
    assert torch.allclose(again(TOKENS).logits, model(TOKENS).logits, atol=1e-4)
    assert "quantization_config" not in json.loads((location / "config.json").read_text())
