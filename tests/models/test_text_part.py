"""Vision-language checkpoints serve as text models: the same logits, without their encoders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tests.tiny as tiny
from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.pack import pack_model
from raypd.errors import ModelError
from raypd.models.load import check_model_config, load_model
from raypd.models.source import find_source, read_config

# Tokens of text: those of images have ids above.
TOKENS = torch.arange(3, 90)[None]
IMAGE = 250
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
THREE_AXES = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [2, 3, 3],
}
WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSTACK = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
# The type, keys of the text part, keys beside it, and the class that decodes the text part.
Case = tuple[str, dict[str, Any], dict[str, Any], str]
CASES: dict[str, Case] = {
    "Qwen2-VL": (
        "qwen2_vl",
        {"rope_parameters": THREE_AXES},
        {
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
            }
        },
        "Qwen2ForCausalLM",
    ),
    "Qwen2.5-VL": (
        "qwen2_5_vl",
        {"rope_parameters": THREE_AXES},
        {"vision_config": QWEN_VISION},
        "Qwen2ForCausalLM",
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        {"rope_parameters": THREE_AXES},
        {"vision_config": DEEPSTACK},
        "Qwen3ForCausalLM",
    ),
    "Qwen3-VL with experts": (
        "qwen3_vl_moe",
        {"rope_parameters": THREE_AXES, **EXPERTS},
        {"vision_config": DEEPSTACK},
        "Qwen3MoeForCausalLM",
    ),
    "Mistral Small 3.2": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": {"model_type": "pixtral", **VISION}},
        "MistralForCausalLM",
    ),
    "Ministral 3": (
        "mistral3",
        {"model_type": "ministral3"},
        {"vision_config": {"model_type": "pixtral", **VISION}},
        "Ministral3ForCausalLM",
    ),
    "Mistral Small 4": (
        "mistral3",
        {
            "model_type": "mistral4",
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        {"vision_config": {"model_type": "pixtral", **VISION}},
        "Mistral4ForCausalLM",
    ),
    "InternVL": (
        "internvl",
        {"model_type": "qwen3"},
        {"vision_config": VISION, "image_token_id": IMAGE},
        "Qwen3ForCausalLM",
    ),
    "Gemma 3": (
        "gemma3",
        {"sliding_window": 16, "query_pre_attn_scalar": 16, "layer_types": WINDOWS},
        {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": IMAGE},
        "Gemma3ForCausalLM",
    ),
    "Gemma 4": (
        "gemma4",
        {
            "sliding_window": 16,
            "layer_types": WINDOWS,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
        },
        {"vision_config": GEMMA4_VISION, "audio_config": None, "image_token_id": IMAGE},
        "Gemma4ForCausalLM",
    ),
    "LLaVA": (
        "llava",
        {"model_type": "llama"},
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": IMAGE,
        },
        "LlamaForCausalLM",
    ),
    "SmolVLM": (
        "smolvlm",
        {"model_type": "llama"},
        {"vision_config": VISION, "image_token_id": IMAGE},
        "LlamaForCausalLM",
    ),
}


def build(case: str, **overrides: Any) -> PreTrainedModel:
    kind, text, beside, _ = CASES[case]
    torch.manual_seed(0)
    settings = {"tie_word_embeddings": False, **beside, **overrides}
    config = AutoConfig.for_model(
        kind,
        text_config={**TEXT, **text},
        **settings,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tiny._draw_weights(model, 0)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    return folder


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """Changes the names of the tensors of a checkpoint; None leaves one out."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        new_name = change(name)
        if new_name is not None:
            renamed[new_name] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(name=str(folder), device="cpu", dtype="float32")


@torch.no_grad()
def test_the_text_part_of_gemma_3n_is_loaded(tmp_path: Path) -> None:
    """Its encoders need packages that are not here, so the checkpoint is made from its parts."""
    model = tiny.tiny_model("gemma3n_text")
    save(model, tmp_path)
    rename(tmp_path, lambda name: name.replace("model.", "model.language_model.", 1))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.vision_tower.timm_model.blocks.0.weight"] = torch.ones(2, 2)
    tensors["model.audio_tower.conformer.0.weight"] = torch.ones(2, 2)
    tensors["model.embed_vision.embedding.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "model_type": "gemma3n",
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(config_of(tmp_path))
    assert torch.allclose(loaded.model(TOKENS).logits, model(TOKENS).logits, atol=2e-5)
    assert isinstance(Engine(pack_model(loaded.model)).model, DecoderModel)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_text_part_gives_the_logits_of_the_whole_model(tmp_path: Path, case: str) -> None:
    model = build(case)
    save(model, tmp_path)
    loaded = load_model(config_of(tmp_path))
    kind = CASES[case][3]
    assert type(loaded.model).__name__ == kind
    expected = model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
    assert torch.allclose(loaded.model(TOKENS).logits, expected, atol=2e-5)
    assert loaded.context_length == 4096
    assert isinstance(Engine(pack_model(loaded.model)).model, DecoderModel)


@torch.no_grad()
@pytest.mark.parametrize("case", ["Qwen3-VL", "Gemma 3"])
def test_a_tied_head_is_that_of_the_whole_model(tmp_path: Path, case: str) -> None:
    model = build(case, tie_word_embeddings=True)
    save(model, tmp_path)
    loaded = load_model(config_of(tmp_path)).model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.allclose(loaded(TOKENS).logits, model(input_ids=TOKENS).logits, atol=2e-5)


def _as_published(name: str) -> str | None:
    """Names of files of Mistral Small 3.2, Gemma 3 and LLaVA, which are older than today's."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.")


def _as_qwen_published(name: str) -> str | None:
    """Names of files of Qwen2-VL and Qwen2.5-VL."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("Mistral Small 3.2", _as_published),
        ("Gemma 3", _as_published),
        ("LLaVA", _as_published),
        ("InternVL", _as_published),
        ("Qwen2.5-VL", _as_qwen_published),
    ],
)
def test_names_of_older_files_are_known(
    tmp_path: Path, case: str, change: Callable[[str], str | None]
) -> None:
    model = build(case)
    rename(save(model, tmp_path), change)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not any(name.startswith("model.language_model.") for name in names)
    logits = load_model(config_of(tmp_path)).model(TOKENS).logits
    assert torch.allclose(logits, model(input_ids=TOKENS).logits, atol=2e-5)


@torch.no_grad()
def test_experts_are_read_as_qwen_publishes_them(tmp_path: Path) -> None:
    model = build("Qwen3-VL with experts")
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            first, second = tensors[name].shape[1:]
            stored_as_published = {(64, 96), (48, 64)}
            if (first, second) not in stored_as_published:
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
            assert tuple(tensors[name].shape[1:]) in stored_as_published
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logits = load_model(config_of(tmp_path)).model(TOKENS).logits
    assert torch.allclose(logits, model(input_ids=TOKENS).logits, atol=2e-5)


def test_weights_of_the_encoder_are_not_read(tmp_path: Path) -> None:
    """Without them the file is as good."""
    save(build("Qwen3-VL"), tmp_path)
    rename(tmp_path, lambda name: None if "visual" in name else name)
    load_model(config_of(tmp_path))


def test_a_missing_weight_of_the_text_part_is_named(tmp_path: Path) -> None:
    save(build("Qwen3-VL"), tmp_path)
    rename(tmp_path, lambda name: None if "layers.1.mlp.up_proj" in name else name)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(config_of(tmp_path))


@torch.no_grad()
def test_a_copy_is_a_plain_text_model(tmp_path: Path) -> None:
    save(build("Qwen3-VL"), tmp_path / "whole")
    loaded = load_model(config_of(tmp_path / "whole"))
    loaded.model.save_pretrained(tmp_path / "copy")
    assert json.loads((tmp_path / "copy/config.json").read_text())["model_type"] == "qwen3"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert torch.equal(again(TOKENS).logits, loaded.model(TOKENS).logits)
    loaded.tokenizer.save_pretrained(tmp_path / "copy")
    copied = load_model(config_of(tmp_path / "copy"))
    assert torch.equal(copied.model(TOKENS).logits, loaded.model(TOKENS).logits)


@torch.no_grad()
def test_a_quantized_text_part(tmp_path: Path) -> None:
    """FP8 of the text part alone, as Mistral publishes Ministral 3."""
    model = build("Ministral 3")
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in list(tensors):
        if "language_model" in name and name.endswith("_proj.weight"):
            scale = tensors[name].abs().max() / 448
            codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
            in_model = name.replace("language_model.model.", "model.language_model.")
            parameters[in_model].copy_(codes.float() * scale)
            tensors[name] = codes
            tensors[f"{name}_scale_inv"] = scale
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    logits = load_model(config_of(tmp_path)).model(TOKENS).logits
    assert torch.allclose(logits, model(input_ids=TOKENS).logits, atol=2e-5)


def test_qwen3_5_is_known_by_its_text_part(tmp_path: Path) -> None:
    """Its recurrent layers are another matter."""
    AutoConfig.for_model(
        "qwen3_5", text_config={**TEXT, "linear_num_key_heads": 2}
    ).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    config = read_config(find_source(config_of(tmp_path)))
    assert config.model_type == "qwen3_5_text"
    assert config.hidden_size == 64


def test_a_model_that_reads_prompts_in_both_directions_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("paligemma").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="does not support paligemma"):
        check_model_config(config_of(tmp_path))
