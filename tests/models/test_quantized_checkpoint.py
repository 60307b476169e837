"""Quantized checkpoints: ModelOpt's FP8 is read exactly, and what is not understood is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raypd.config import ModelConfig
from raypd.decoding.quantized import Fp8Linear, quantize
from raypd.errors import ModelError
from raypd.models import load
from raypd.models.load import check_model_config, load_model, quantization_notice
from raypd.models.unexpected_keys import important_keys
from tests.tiny import save_tiny, tiny_model

FP8 = torch.float8_e4m3fn
TOKENS = torch.arange(3, 27)[None]
IN_CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
IN_FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def rewrite(folder: Path, **settings: object) -> None:
    """Changes a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_weights(folder: Path, change: Any) -> None:
    """Applies a function to the tensors of a model, a dictionary that it changes."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_fp8(tensors: dict[str, torch.Tensor]) -> None:
    """Makes the weights of a checkpoint what ModelOpt exports: codes and a scale for each tensor.

    A layer whose cache is in FP8, too, has scales of its keys and values.
    """
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            weight = tensors[name]
            scale = weight.abs().max() / torch.finfo(FP8).max
            tensors[name] = (weight / scale).to(FP8)
            tensors[f"{name}_scale"] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.02)
        if name.endswith("k_proj.weight"):
            tensors[name.replace("weight", "k_scale")] = torch.tensor(0.5)
            tensors[name.replace("k_proj.weight", "v_proj.v_scale")] = torch.tensor(0.5)


def dequantize(tensors: dict[str, torch.Tensor]) -> None:
    """Makes an FP8 checkpoint a plain one, by the formula of the format."""
    for name in list(tensors):
        if name.endswith("_scale"):
            continue
        if f"{name}_scale" in tensors:
            tensors[name] = tensors[name].float() * tensors[f"{name}_scale"]
    for name in list(tensors):
        if name.endswith("_scale"):
            del tensors[name]


def save_fp8(folder: Path, kind: str = "qwen3", in_config: bool = True) -> Path:
    save_tiny(folder, kind)
    change_weights(folder, in_fp8)
    if in_config:
        rewrite(folder, quantization_config=IN_CONFIG)
    else:
        (folder / "hf_quant_config.json").write_text(json.dumps(IN_FILE))
    return folder


@torch.no_grad()
def logits_of_formula(folder: Path, tmp_path: Path, kind: str) -> torch.Tensor:
    """Logits of transformers for the weights that the formula gives."""
    save_tiny(tmp_path / "plain", kind)
    tensors = load_file(folder / "model.safetensors")
    dequantize(tensors)
    save_file(tensors, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(TOKENS).logits


def refused(**settings: object) -> str:
    """The message of check_model_config, which comes before any weights are read."""
    with pytest.raises(ModelError) as error:
        check_model_config(ModelConfig(device="cpu", **settings))
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_when_loaded(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(
            ModelConfig(
                name=str(folder),
                device="cpu",
                dtype="float32",
            )
        )
    assert "\n" not in str(error.value)
    return str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
def test_fp8_of_modelopt_is_dequantized_exactly_with_a_notice(
    tmp_path: Path, kind: str, in_config: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_fp8(tmp_path / "fp8", kind, in_config)
    config = ModelConfig(name=str(folder), device="cpu", dtype="float32")
    loaded = load_model(config)
    assert torch.equal(loaded.model(TOKENS).logits, logits_of_formula(folder, tmp_path, kind))
    assert "modelopt FP8" in caplog.text
    assert "dequantized to float32" in caplog.text
    assert quantization_notice(config) in caplog.messages
    in_bfloat16 = load_model(config.model_copy(update={"dtype": "bfloat16"}))
    assert {weight.dtype for weight in in_bfloat16.model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_a_dequantized_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path / "fp8")
    loaded = load_model(
        ModelConfig(
            name=str(folder),
            device="cpu",
            dtype="float32",
        )
    )
    loaded.model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(TOKENS).logits, loaded.model(TOKENS).logits)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


@torch.no_grad()
def test_a_gpu_with_fp8_computes_with_the_codes_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch has the product for CPUs, too, so that the path of a GPU can be taken here."""
    folder = save_fp8(tmp_path / "fp8")
    change_weights(folder, lambda tensors: tensors.update(unquantized(tensors)))
    config = ModelConfig(name=str(folder), device="cpu", dtype="bfloat16")
    plain = load_model(config).model(TOKENS).logits
    caplog.clear()
    monkeypatch.setattr(load, "_fp8_refusal", lambda *_: None)
    assert quantization_notice(config) is None
    model = load_model(config).model
    assert "dequantized" not in caplog.text
    in_file = load_file(folder / "model.safetensors")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert len(layers) == 2 * 7 - 1
    for name, layer in layers.items():
        codes = in_file[f"{name}.weight"]
        assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
        assert set(layer.scale.flatten().tolist()) == {float(in_file[f"{name}.weight_scale"])}
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    error = (model(TOKENS).logits - plain).norm() / plain.norm()
    assert 0 < error < 0.1
    # LoRA needs weights with gradients, so training gets them dequantized.
    trained = load_model(config, purpose="train").model
    assert not any(isinstance(module, Fp8Linear) for module in trained.modules())


def unquantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One layer that ModelOpt left as it was (`exclude_modules`)."""
    name = "model.layers.0.mlp.down_proj.weight"
    weight = tensors[name].float() * tensors.pop(f"{name}_scale")
    tensors.pop(name.replace("weight", "input_scale"))
    return {name: weight}


def test_layers_without_codes_are_left_alone() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    quantize(model, "fp8", codes=lambda linear: None)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


@torch.no_grad()
def test_blocks_in_fp8_compute_in_the_dtype_that_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek's format, which transformers reads, leaving weights in the dtype of the scales."""

    def in_blocks(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("_proj.weight"):
                scale = tensors[name].abs().max() / torch.finfo(FP8).max
                tensors[name] = (tensors[name] / scale).to(FP8)
                tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)

    folder = save_tiny(tmp_path / "blocks", "qwen3")
    change_weights(folder, in_blocks)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rewrite(folder, quantization_config={**method, "activation_scheme": "dynamic"})
    loaded = load_model(
        ModelConfig(
            name=str(folder),
            device="cpu",
            dtype="bfloat16",
        )
    )
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert "quantized by fp8, are dequantized to bfloat16 on cpu, 2 bytes each" in caplog.text


@pytest.mark.parametrize("prequantized", ["float32", "bfloat16"])
def test_weights_that_bitsandbytes_quantized_in_advance_say_their_dtype(
    tmp_path: Path, prequantized: str
) -> None:
    from transformers import BitsAndBytesConfig

    folder = save_tiny(tmp_path / "base")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    dtype = getattr(torch, prequantized)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, dtype=dtype)
    model.save_pretrained(save_tiny(tmp_path / "nf4"))
    for asked in ("float32", "bfloat16"):
        loaded = load_model(
            ModelConfig(
                name=str(tmp_path / "nf4"),
                device="cpu",
                dtype=asked,
            )
        )
        assert loaded.dtype == loaded.model.model.norm.weight.dtype == dtype


@pytest.mark.parametrize(
    ("settings", "method", "way_out"),
    [
        ({"quant_method": "foo"}, "foo", "model.endpoint"),
        ({"bits": 8}, "without a name", "model.endpoint"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt MXFP8", "engine.kind=vllm"),
        ({"quant_method": "torchao"}, "torchao", "engine.kind=vllm"),
        ({"quant_algo": "W4A16_AWQ"}, "modelopt W4A16_AWQ", "engine.kind=vllm"),
        ({"quant_method": "experts_int8"}, "experts_int8", "engine.kind=vllm"),
    ],
)
def test_a_method_that_is_not_known_is_named_with_what_reads_it(
    tmp_path: Path, settings: dict[str, Any], method: str, way_out: str
) -> None:
    folder = save_tiny(tmp_path / "model")
    rewrite(folder, quantization_config=settings)
    message = refused(name=str(folder))
    assert f"quantized by {method} (config.json)" in message
    assert way_out in message
    # vLLM reads weights itself.
    check_model_config(ModelConfig(name=str(folder), device="cpu"), purpose="vllm")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"quantization": {"quant_algo": "MXFP8"}}', "modelopt MXFP8 (hf_quant_config.json)"),
        ('{"quantization": {}}', "hf_quant_config.json does not say how"),
        ("[]", "hf_quant_config.json does not say how"),
        ("{", "its hf_quant_config.json cannot be read"),
    ],
)
def test_a_file_of_modelopt_that_is_not_understood_is_named(
    tmp_path: Path, content: str, words: str
) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "hf_quant_config.json").write_text(content)
    assert words in refused(name=str(folder))


def test_a_cache_in_fp8_alone_is_no_quantization_of_weights(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    load_model(ModelConfig(name=str(folder), device="cpu"))


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{QUERY}_scale"), "is FP8 and has no weight_scale"),
        (
            lambda tensors: tensors.update({f"{QUERY}_scale": torch.ones(64)}),
            "has scales of shape [64] in place of one",
        ),
        (
            lambda tensors: tensors.update({QUERY: tensors[QUERY].float()}),
            "has a scale, and is torch.float32 in place of FP8",
        ),
    ],
)
def test_tensors_that_are_not_as_the_format_says(tmp_path: Path, change: Any, words: str) -> None:
    folder = save_fp8(tmp_path / "fp8")
    change_weights(folder, change)
    message = refused_when_loaded(folder)
    assert words in message
    assert QUERY in message


def test_scales_that_no_file_explains_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    change_weights(folder, in_fp8)
    message = refused_when_loaded(folder)
    assert "has 28 tensors that its model does not have" in message
    assert "input_scale" in message
    assert "quantized in a way that config.json does not name" in message


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.sinks",
        "score.weight",
    ],
)
def test_a_tensor_that_changes_answers_is_refused(tmp_path: Path, key: str) -> None:
    folder = save_tiny(tmp_path / "model")
    change_weights(folder, lambda tensors: tensors.update({key: torch.ones(64)}))
    assert f"1 tensors that its model does not have ({key})" in refused_when_loaded(folder)


@torch.no_grad()
@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.k_proj.k_scale",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp_layers.0.enorm.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.bias",
        "multi_modal_projector.linear_1.weight",
        "audio_tower.conv1.weight",
        "v_head.summary.weight",
    ],
)
def test_a_tensor_that_the_text_model_can_do_without_is_left_out(tmp_path: Path, key: str) -> None:
    folder = save_tiny(tmp_path / "model")
    change_weights(folder, lambda tensors: tensors.update({key: torch.ones(64)}))
    loaded = load_model(
        ModelConfig(
            name=str(folder),
            device="cpu",
            dtype="float32",
        )
    )
    assert torch.equal(loaded.model(TOKENS).logits, tiny_model("llama")(TOKENS).logits)


def test_layers_that_draft_tokens_are_left_out_where_the_configuration_names_them() -> None:
    config = tiny_model("llama").config
    keys = ["model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"]
    assert important_keys(keys, config) == keys
    config.num_nextn_predict_layers = 1
    assert important_keys(keys, config) == keys[1:]


def test_a_tied_head_that_was_saved_is_no_unexpected_tensor(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tie_word_embeddings=True)
    change_weights(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    load_model(ModelConfig(name=str(folder), device="cpu"))


def test_scales_are_named_before_other_tensors() -> None:
    config = tiny_model("llama").config
    keys = ["a.bias", "z.weight_scale", "model.rotary_emb.inv_freq"]
    assert important_keys(keys, config) == ["z.weight_scale", "a.bias"]
