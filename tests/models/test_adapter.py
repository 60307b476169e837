"""LoRA adapters: merged they compute what peft computes, and one for another model is refused
before weights load.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.adapter import _contradicts
from raypd.models.load import load_model
from tests.processes import ended, start
from tests.tiny import save_tiny, tiny_model

TOKENS = torch.arange(3, 27)[None]


def save_adapter(
    folder: Path, base: str = "", kind: str = "llama", rank: int = 4, **settings: Any
) -> Path:
    """A random LoRA of `tiny_model(kind)`; `overrides` of the model's sizes go in as
    model={...}.
    """
    model = tiny_model(kind, **settings.pop("model", {}))
    lora = {
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        **settings,
    }
    import peft  # it takes seconds

    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    generator = torch.Generator().manual_seed(1)
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:  # peft starts B at zero: an adapter that does nothing
            weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    wrapped.peft_config["default"].base_model_name_or_path = base
    # "auto" would ask the Hub about the base.
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"bias": "lora_only", "target_modules": "all-linear"},
    ],
    ids=str,
)
def test_merged_as_peft_computes_it(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = save_adapter(tmp_path / "adapter", **settings)
    loaded = load_model(
        ModelConfig(
            name=str(base),
            adapter=str(adapter),
            dtype="float32",
            device="cpu",
        )
    )
    assert not any("lora" in name for name, _ in loaded.model.named_modules())
    import peft

    expected = peft.PeftModel.from_pretrained(tiny_model("llama"), adapter).eval()(TOKENS).logits
    assert (expected - tiny_model("llama")(TOKENS).logits).abs().max() > 0.5
    torch.testing.assert_close(
        loaded.model(TOKENS).logits,
        expected,
        atol=1e-4,
        rtol=1e-4,
    )


@torch.no_grad()
def test_beside_quantized_weights(base: Path, tmp_path: Path) -> None:
    """Merging would round the adapter to 4 bits: it stays beside the weights, and gives peft's own
    answers.
    """
    adapter = save_adapter(tmp_path / "adapter")
    settings = {"dtype": "float32", "device": "cpu", "quantization": "nf4"}
    loaded = load_model(
        ModelConfig(
            name=str(base),
            adapter=str(adapter),
            **settings,
        )
    )
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert any("lora_A" in name for name, _ in loaded.model.named_modules())
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    # Two of them: where the processor has bfloat16, bitsandbytes packs the weights of a model at
    # its first pass.
    how = {
        "quantization_config": nf4,
        "device_map": {"": "cpu"},
        "dtype": torch.float32,
    }
    plain, beneath = (AutoModelForCausalLM.from_pretrained(base, **how) for _ in range(2))
    without = plain(TOKENS).logits
    import peft

    expected = peft.PeftModel.from_pretrained(beneath, adapter).eval()(TOKENS).logits
    assert torch.equal(loaded.model(TOKENS).logits, expected)
    assert (expected - without).abs().max() > 0.5


@pytest.fixture
def refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The message with which an adapter is refused; weights cannot be loaded."""

    def check(adapter: Path | str, name: str | None = None) -> str:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        with pytest.raises(ModelError) as error:
            load_model(
                ModelConfig(
                    name=name or str(base),
                    adapter=str(adapter),
                    device="cpu",
                )
            )
        assert str(adapter) in str(error.value)
        return str(error.value)

    return check


@pytest.mark.parametrize(
    ("made_for", "reason"),
    [
        ({"model": {"hidden_size": 96, "intermediate_size": 128}}, "and the model needs"),
        ({"model": {"num_hidden_layers": 3}}, "the model has nothing that corresponds"),
        ({"model": {"num_hidden_layers": 1}}, "are missing"),
        (
            {"kind": "gpt_neox", "target_modules": ["query_key_value"]},
            "not found in the base model",
        ),
    ],
)
def test_an_adapter_for_another_model(
    refused: Any, tmp_path: Path, made_for: dict[str, Any], reason: str
) -> None:
    message = refused(save_adapter(tmp_path / "adapter", "owner/other", **made_for))
    assert all(words in message for words in (reason, "trained for 'owner/other'"))


def test_settings_that_do_not_go_together(refused: Any, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", "owner/other")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    changes = {"lora_bias": True, "init_lora_weights": "pissa"}
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    assert "adapter_config.json" in refused(adapter)


def test_an_adapter_for_another_model_is_known_by_its_base(
    base: Path, refused: Any, tmp_path: Path
) -> None:
    qwen = "Qwen/Qwen3-8B"
    small = "smollm2-135m-instruct"
    assert [_contradicts(qwen, name) for name in ("Qwen/Qwen3-4B", small, str(base))] == [
        True,
        True,
        False,
    ]
    assert not _contradicts("HuggingFaceTB/SmolLM2-135M-Instruct", small)
    assert [_contradicts(name, qwen) for name in ("unsloth/Qwen3-8B", "/data/checkpoint-500")] == [
        False,
        False,
    ]
    adapter = save_adapter(tmp_path / "adapter", "Qwen/Qwen3-8B")
    assert "was trained for 'Qwen/Qwen3-8B'" in refused(adapter, "smollm2-135m-instruct")


def test_folders_that_hold_no_adapter(refused: Any, tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nowhere")
    assert "no adapter_config.json" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "no adapter_model.safetensors" in refused(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08" * 64)
    for config, words in (
        ('{"peft_type": "PROMPT_TUNING"}', "type PROMPT_TUNING"),
        ("{", "cannot be read"),
        ('{"peft_type": "LORA", "target_modules": ["q_proj"]}', "cannot be read"),
    ):
        (tmp_path / "adapter_config.json").write_text(config)
        assert words in refused(tmp_path)


def test_the_check_of_an_adapter_leaves_torchs_compiler_out_and_the_environment_alone(
    base, tmp_path
):
    adapter = save_adapter(tmp_path / "adapter")
    code = """
import os, sys
from raypd.config import ModelConfig
from raypd.models.load import check_model_config
check_model_config(ModelConfig(name=sys.argv[1], adapter=sys.argv[2], device="cpu"))
assert "peft" in sys.modules and "bitsandbytes" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules
assert "TORCHDYNAMO_DISABLE" not in os.environ
"""
    ended(start("-c", code, str(base), str(adapter)))
