"""Formats of checkpoints: each is written here by its definition, and read as its formula says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raypd.config import ModelConfig
from raypd.decoding import native
from raypd.decoding.quantized import Fp8Linear, Int8Linear
from raypd.errors import ModelError
from raypd.models import load
from raypd.models.checkpoints import registry
from raypd.models.checkpoints.format import CheckpointFormat
from raypd.models.checkpoints.mxfp4 import MxFp4
from raypd.models.checkpoints.registry import FORMATS, find_format
from raypd.models.checkpoints.tensors import Tensor, Tensors
from raypd.models.load import check_model_config, load_model, quantization_notice
from raypd.models.source import find_source, read_config
from tests.tiny import save_tiny

FP8 = torch.float8_e4m3fn
TOKENS = torch.arange(3, 27)[None]
GROUP = 32
# How a format stores a weight [outputs, inputs]: tensors by suffix, and the weight that they mean.
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
# The places of eight outputs in an integer of AWQ, as its authors' packing code has them.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

needs_native = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)


def packed(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Packs unsigned codes [rows, n] into int32 [rows, n * bits / 32], the first in low bits.

    Written as a loop over single numbers, unlike the code that unpacks.
    """
    per_integer = 32 // bits
    places = order or list(range(per_integer))
    out = torch.zeros(codes.shape[0], codes.shape[1] // per_integer, dtype=torch.int64)
    for column in range(out.shape[1]):
        for place, offset in enumerate(places):
            number = codes[:, column * per_integer + offset].long()
            out[:, column] |= number << (bits * place)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int = 4, size: int = GROUP) -> tuple[torch.Tensor, ...]:
    """Rounds a weight [outputs, inputs] to unsigned codes with scales and zero points of groups.

    A size of -1 stands for one group.
    """
    inputs = weight.shape[1]
    groups = weight.view(weight.shape[0], -1, inputs if size == -1 else min(size, inputs))
    low = groups.amin(2)
    scales = ((groups.amax(2) - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    dequantized = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).int(), scales, zeros.int(), dequantized.flatten(1)


def awq(size: int = GROUP) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        codes, scales, zeros, dequantized = grouped(weight, size=size)
        stored = {
            ".qweight": packed(codes.t(), 4, AWQ_ORDER),
            ".qzeros": packed(zeros.t(), 4, AWQ_ORDER),
            ".scales": scales.t().contiguous(),
        }
        return stored, dequantized

    return store


def gptq(
    bits: int, offset: int, act_order: bool, size: int = GROUP
) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        generator = torch.Generator().manual_seed(0)
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=generator)
        codes, scales, zeros, dequantized = grouped(weight[:, order], bits, size)
        unordered = torch.empty_like(order)
        unordered[order] = torch.arange(inputs)
        stored = {
            ".qweight": packed(codes[:, unordered], bits).t().contiguous(),
            ".qzeros": packed(zeros.t() - offset, bits),
            ".scales": scales.t().contiguous(),
        }
        # Without an order some files do not list the groups.
        if act_order or size == GROUP:
            whole = inputs if size == -1 else size
            stored[".g_idx"] = (unordered // whole).int()
        return stored, dequantized[:, unordered]

    return store


def w4a16(symmetric: bool, size: int = GROUP) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        codes, scales, zeros, dequantized = grouped(weight, size=size)
        stored = {
            ".weight_packed": packed(codes, 4),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored[".weight_zero_point"] = packed(zeros.t(), 4).t().contiguous()
            return stored, dequantized
        by_input = scales.float().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        return stored, (codes - 8) * by_input

    return store


def w4a16_in_order(listed: bool) -> Callable[[torch.Tensor], Stored]:
    """Groups of inputs that are listed; or not, which the file says by -1."""

    def store(weight: torch.Tensor) -> Stored:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if listed:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
        codes, scales, _, _ = grouped(weight[:, order])
        unordered = torch.empty_like(order)
        unordered[order] = torch.arange(inputs)
        group = unordered // GROUP
        stored = {
            ".weight_packed": packed(codes[:, unordered], 4),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
            ".weight_g_idx": group.int() if listed else torch.full_like(group, -1).int(),
        }
        return stored, (codes[:, unordered] - 8) * scales.float()[:, group]

    return store


def w8a16(weight: torch.Tensor) -> Stored:
    """Eight bits that are packed, with zero points."""
    codes, scales, zeros, dequantized = grouped(weight, bits=8)
    stored = {
        ".weight_packed": packed(codes, 8),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
        ".weight_zero_point": packed(zeros.t(), 8).t().contiguous(),
    }
    return stored, dequantized


def w4_or_w8(weight: torch.Tensor) -> Stored:
    """Eight bits where a layer has more outputs than inputs, and four elsewhere."""
    outputs, inputs = weight.shape
    store = w8a16 if outputs > inputs else w4a16(symmetric=False)
    return store(weight)


def int8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def int8_with_zeros(weight: torch.Tensor) -> Stored:
    low = weight.amin(1, keepdim=True)
    scale = (weight.amax(1, keepdim=True) - low) / 255
    zeros = (-128 - low / scale).round().clamp(-128, 127).to(torch.int8)
    codes = (weight / scale + zeros.float()).round().clamp(-128, 127).to(torch.int8)
    stored = {".weight": codes, ".weight_scale": scale, ".weight_zero_point": zeros}
    return stored, (codes.float() - zeros.float()) * scale


def fp8_with_zeros(weight: torch.Tensor) -> Stored:
    """Zero points that are zero, which some files have beside codes in FP8."""
    stored, dequantized = row_fp8(weight)
    zeros = torch.zeros_like(stored[".weight_scale"]).to(FP8)
    return {**stored, ".weight_zero_point": zeros}, dequantized


def row_fp8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(FP8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def block_fp8(weight: torch.Tensor) -> Stored:
    """Blocks of 48 x 48, so that the last ones are smaller."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // 48), -(-inputs // 48)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) / 50 + 0.01
    whole = torch.empty_like(weight)
    for row in range(outputs):
        for column in range(inputs):
            whole[row, column] = scales[row // 48, column // 48]
    codes = (weight / whole).clamp(-448, 448).to(FP8)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * whole


def one_fp8(weight: torch.Tensor) -> Stored:
    """As Mistral publishes Ministral 3."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(FP8)
    stored = {
        ".weight": codes,
        ".weight_scale_inv": scale,
        ".activation_scale": torch.tensor(0.1),
    }
    return stored, codes.float() * scale


def mxfp8(weight: torch.Tensor) -> Stored:
    exponents = torch.randint(118, 122, (weight.shape[0], weight.shape[1] // 32))
    scales = 2.0 ** (exponents - 127)
    codes = (weight / scales.repeat_interleave(32, 1)).clamp(-448, 448).to(FP8)
    stored = {".weight": codes, ".weight_scale_inv": exponents.to(torch.uint8)}
    return stored, codes.float() * scales.repeat_interleave(32, 1)


def fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds numbers to E2M1: packed codes, and the numbers that they mean."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = (weight[..., None] - numbers).abs().argmin(-1)
    pairs = codes.view(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), numbers[codes]


def nvfp4(weight: torch.Tensor) -> Stored:
    whole = torch.tensor(0.003)
    scales = (weight.view(weight.shape[0], -1, 16).abs().amax(2) / 6 / whole).to(FP8)
    by_number = (scales.float() * whole).repeat_interleave(16, 1)
    codes, numbers = fp4(weight / by_number)
    stored = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": whole}
    return {**stored, ".input_scale": torch.tensor(0.5)}, numbers * by_number


def nvfp4_compressed(weight: torch.Tensor) -> Stored:
    stored, dequantized = nvfp4(weight)
    renamed = {
        ".weight_packed": stored[".weight"],
        ".weight_scale": stored[".weight_scale"],
        ".weight_global_scale": 1 / stored[".weight_scale_2"].reshape(1),
        ".input_global_scale": torch.tensor([2.0]),
    }
    return renamed, dequantized


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    inputs = None
    if weights.get("num_bits") == 8:
        inputs = {
            "num_bits": 8,
            "dynamic": True,
            "strategy": "token",
            "type": weights["type"],
        }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def with_group(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Settings with the group of layers of others as a second one."""
    groups = {**settings["config_groups"], "group_1": others["config_groups"]["group_0"]}
    return settings | {"config_groups": groups}


GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "group_size": GROUP}
CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "awq": (AWQ | {"version": "gemm"}, awq()),
    "awq 64": (AWQ | {"group_size": 64}, awq(64)),
    "awq -1": (AWQ | {"group_size": -1}, awq(-1)),
    "gptq": (GPTQ | {"bits": 4}, gptq(4, 1, False)),
    "gptq 8 bits, act order": (GPTQ | {"bits": 8, "desc_act": True}, gptq(8, 1, True)),
    "gptq -1": (GPTQ | {"bits": 4, "group_size": -1}, gptq(4, 1, False, -1)),
    "gptq -1, act order": (
        GPTQ | {"bits": 4, "group_size": -1, "desc_act": True},
        gptq(4, 1, True, -1),
    ),
    "gptq 64, groups not listed": (GPTQ | {"bits": 4, "group_size": 64}, gptq(4, 1, False, 64)),
    "gptq 2 bits": (GPTQ | {"bits": 2}, gptq(2, 1, False)),
    "gptq v2": (GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0, True)),
    "w4a16": (
        compressed(
            "pack-quantized",
            **GROUPS,
            symmetric=True,
        ),
        w4a16(True),
    ),
    "w4a16 with zeros": (
        compressed(
            "pack-quantized",
            **GROUPS,
            symmetric=False,
        ),
        w4a16(False),
    ),
    "w4a16 of rows": (
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="channel",
            symmetric=True,
        ),
        w4a16(True, -1),
    ),
    "w4a16, act order": (
        compressed("pack-quantized", **GROUPS, symmetric=True, actorder="group"),
        w4a16_in_order(True),
    ),
    "w4a16, groups not listed": (
        compressed("pack-quantized", **GROUPS, symmetric=True),
        w4a16_in_order(False),
    ),
    "w8a16 with zeros": (
        compressed(
            "pack-quantized",
            **(GROUPS | {"num_bits": 8}),
            symmetric=False,
        ),
        w8a16,
    ),
    "w4a16 and w8a16": (
        with_group(
            compressed("pack-quantized", **GROUPS, symmetric=False),
            compressed(
                "pack-quantized",
                **(GROUPS | {"num_bits": 8}),
                symmetric=False,
            ),
        ),
        w4_or_w8,
    ),
    "w8a8 with zeros": (
        compressed(
            "int-quantized",
            type="int",
            **(ROWS | {"symmetric": False}),
        ),
        int8_with_zeros,
    ),
    "compressed FP8 with zeros": (
        compressed("float-quantized", type="float", **ROWS),
        fp8_with_zeros,
    ),
    "w8a8": (compressed("int-quantized", type="int", **ROWS), int8),
    "compressed FP8": (compressed("float-quantized", type="float", **ROWS), row_fp8),
    "compressed NVFP4": (compressed("nvfp4-pack-quantized", **GROUPS), nvfp4_compressed),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, row_fp8),
    "block FP8": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, block_fp8),
    "FP8 of Mistral": ({"quant_method": "fp8", "activation_scheme": "static"}, one_fp8),
    "MXFP8": ({"quant_method": "mxfp8"}, mxfp8),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
}


def rewrite(folder: Path, **settings: object) -> None:
    """Changes a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def save_quantized(folder: Path, case: str, kind: str = "qwen3", prefix: str = "") -> Any:
    """Saves a tiny model in a format, and returns the logits of the weights that it means."""
    settings, store = CASES[case]
    torch.manual_seed(0)
    save_tiny(folder, kind)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        stored, plain[name] = store(tensors.pop(name))
        for suffix, tensor in stored.items():
            tensors[name.removesuffix(".weight") + suffix] = tensor.contiguous()
        assert (plain[name] - weight).norm() < 0.8 * weight.norm()
    save_file(plain, file, metadata={"format": "pt"})
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    save_file(tensors, file, metadata={"format": "pt"})
    rewrite(folder, quantization_config=settings)
    return logits


def config_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "name": str(folder),
            "device": "cpu",
            "dtype": "float32",
            **settings,
        }
    )


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(config_of(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_formula_of_their_format_says(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    logits = save_quantized(tmp_path, case)
    loaded = load_model(config_of(tmp_path))
    assert torch.allclose(loaded.model(TOKENS).logits, logits, atol=1e-4)
    assert "are dequantized to float32 on cpu" in caplog.text
    assert quantization_notice(config_of(tmp_path)) in caplog.messages
    weights = {
        weight.dtype
        for weight in load_model(config_of(tmp_path, dtype="bfloat16")).model.parameters()
    }
    assert weights <= {torch.bfloat16, torch.int8}


@torch.no_grad()
@pytest.mark.parametrize("case", ["awq", "gptq", "w4a16", "block FP8"])
def test_experts_are_read_one_by_one_and_joined(tmp_path: Path, case: str) -> None:
    logits = save_quantized(tmp_path, case, "qwen3_moe")
    assert torch.allclose(load_model(config_of(tmp_path)).model(TOKENS).logits, logits, atol=1e-4)


@torch.no_grad()
def test_a_dequantized_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    logits = save_quantized(tmp_path / "awq", "awq")
    load_model(config_of(tmp_path / "awq")).model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(again(TOKENS).logits, logits, atol=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


@torch.no_grad()
def test_output_embeddings_of_their_own_are_kept_where_config_json_ties_them(
    tmp_path: Path,
) -> None:
    save_quantized(tmp_path / "awq", "awq")
    load_model(config_of(tmp_path / "awq")).model.save_pretrained(tmp_path / "plain")
    for folder in (tmp_path / "awq", tmp_path / "plain"):
        rewrite(folder, tie_word_embeddings=True)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(TOKENS).logits
    assert torch.allclose(load_model(config_of(tmp_path / "awq")).model(TOKENS).logits, expected)


@needs_native
@torch.no_grad()
def test_w8a8_is_kept_on_a_cpu_with_the_codes_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits = save_quantized(tmp_path, "w8a8")
    config = config_of(tmp_path, dtype="bfloat16")
    assert quantization_notice(config) is None
    model = load_model(config).model
    assert "dequantized" not in caplog.text
    in_file = load_file(tmp_path / "model.safetensors")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Int8Linear)}
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        assert torch.equal(layer.weight, in_file[f"{name}.weight"])
        assert torch.equal(layer.scale, in_file[f"{name}.weight_scale"].flatten())
    error = (model(TOKENS).logits.float() - logits).norm() / logits.norm()
    assert 0 < error < 0.1
    # LoRA needs weights with gradients, so training gets them dequantized.
    trained = load_model(config, purpose="train").model
    assert not any(isinstance(module, Int8Linear) for module in trained.modules())


@torch.no_grad()
def test_fp8_with_scales_of_rows_is_kept_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has the product for CPUs, too, so that the path of a GPU can be taken here."""
    logits = save_quantized(tmp_path, "compressed FP8")
    monkeypatch.setattr(load, "_fp8_refusal", lambda *_: None)
    model = load_model(config_of(tmp_path, dtype="bfloat16")).model
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 2 * 7
    assert (model(TOKENS).logits.float() - logits).norm() < 0.1 * logits.norm()


@torch.no_grad()
def test_dequantized_weights_are_quantized_where_the_user_says_so(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    logits = save_quantized(tmp_path, "gptq")
    model = load_model(config_of(tmp_path, quantization="nf4")).model
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert (model(TOKENS).logits - logits).norm() < 0.5 * logits.norm()


@torch.no_grad()
def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        256,
        (3, 8, 2, 16),
        dtype=torch.uint8,
        generator=generator,
    )
    scales = torch.randint(
        120,
        130,
        (3, 8, 2),
        dtype=torch.uint8,
        generator=generator,
    )
    stored = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    tensors: Tensors = {
        name: Tensor(name, tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)
        for name, tensor in stored.items()
    }
    found = MxFp4({"quant_method": "mxfp4"}, "config.json").plain_weights(tensors)
    assert list(found) == ["experts.gate_up_proj"]
    experts = found["experts.gate_up_proj"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(experts[...], expected)
    assert experts.shape == expected.shape == (3, 64, 8)


@torch.no_grad()
def test_gpt_oss_in_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        rows = tensors.pop(name).transpose(1, 2)  # [experts, outputs, inputs]
        groups = rows.unflatten(2, (-1, 32))
        exponents = (groups.abs().amax(3, keepdim=True) / 6).log2().ceil()
        tensors[f"{name}_blocks"] = fp4(groups / 2**exponents)[0]
        tensors[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    rewrite(tmp_path, quantization_config={"quant_method": "mxfp4"})
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    logits = load_model(config_of(tmp_path)).model(TOKENS).logits
    assert torch.allclose(logits, expected(TOKENS).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (AWQ | {"version": "gemv"}, "does not read version gemv"),
        (AWQ | {"bits": 3}, "does not read 3 bits"),
        (GPTQ | {"bits": 3}, "does not read 3 bits"),
        (GPTQ | {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "layers with other bits"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (compressed("marlin-24", **GROUPS), "does not read format marlin-24"),
        (compressed("pack-quantized", **(GROUPS | {"num_bits": 3})), "does not read 3 bits"),
        (
            compressed("int-quantized", type="int", **ROWS) | {"transform_config": {"a": 1}},
            "weights that are rotated",
        ),
        (
            compressed("dense", type="int", **ROWS)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights",
        ),
    ],
)
def test_a_variant_that_is_not_read_is_named_before_weights_are_read(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path, quantization_config=settings)
    with pytest.raises(ModelError, match=reason) as error:
        check_model_config(config_of(tmp_path))
    assert "engine.kind=vllm reads it" in str(error.value)


def test_the_formats_that_are_read_are_named_where_one_is_not(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(ModelError) as error:
        check_model_config(config_of(tmp_path))
    for kind in FORMATS:
        assert kind.name in str(error.value)


class Halved(CheckpointFormat):
    """A format of our own, which stores half of each weight."""

    name = "Halved"
    description = "half of each weight; doubled"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "halved"

    def plain_weights(self, tensors: Tensors) -> Tensors:
        plain: Tensors = {}
        for name, tensor in tensors.items():
            weight = name.removesuffix(".half")
            plain[weight] = self._doubled(tensor) if weight != name else tensor
        return plain

    def _doubled(self, half: Tensor) -> Tensor:
        return Tensor(half.name, half.shape, torch.float32, lambda: 2 * half.read())


@torch.no_grad()
def test_a_new_format_is_one_class_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FORMATS", (*FORMATS, Halved))
    save_tiny(tmp_path)
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[f"{name}.half"] = tensors.pop(name) / 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rewrite(tmp_path, quantization_config={"quant_method": "halved"})
    assert torch.equal(load_model(config_of(tmp_path)).model(TOKENS).logits, logits)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_describes_itself_in_one_line(kind: type[CheckpointFormat]) -> None:
    assert kind.name
    assert kind.description
    assert "\n" not in kind.description


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("awq", lambda t: t.pop(f"{QUERY}.scales"), f"{QUERY}.qweight has no scales"),
        ("awq", lambda t: t.update({f"{QUERY}.scales": torch.ones(2, 8)}), "shape [2, 8] in place"),
        ("gptq", lambda t: t.pop(f"{QUERY}.qzeros"), "has no qzeros"),
        ("gptq", lambda t: t.update({f"{QUERY}.g_idx": torch.ones(3)}), "shape [3] in place of"),
        (
            "gptq 64, groups not listed",
            lambda t: t.update(
                {
                    f"{QUERY}.scales": torch.ones(3, 64),
                    f"{QUERY}.qzeros": torch.ones(3, 8, dtype=torch.int32),
                }
            ),
            "has 3 groups of 64 inputs, which is not what the group_size of the settings (64)",
        ),
        ("w4a16", lambda t: t.pop(f"{QUERY}.weight_shape"), "has no shape"),
        ("w8a8", lambda t: t.pop(f"{QUERY}.weight_scale"), "is int8 and has no weight_scale"),
        (
            "block FP8",
            lambda t: t.update({f"{QUERY}.weight_scale_inv": torch.ones(3, 9)}),
            "has the shape [3, 9] in place of [2, 2]",
        ),
        ("ModelOpt NVFP4", lambda t: t.pop(f"{QUERY}.weight_scale_2"), "has no weight_scale_2"),
    ],
)
def test_tensors_that_are_not_as_the_format_says_are_named(
    tmp_path: Path, case: str, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    save_quantized(tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refused(tmp_path)
    assert words in message
    assert f"not {_label(tmp_path)}" in message


def _label(folder: Path) -> str:
    source = find_source(config_of(folder))
    found = find_format(source, read_config(source))
    assert found is not None
    return found.label


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_quantized(tmp_path, "awq")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refused(tmp_path)
    assert "has a file of weights that is cut short or damaged (" in message
    assert message.endswith("fetch it again")
