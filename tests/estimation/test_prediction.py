"""Models on paper: their sizes against transformers' own count, and what follows from them."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.decoding import AttentionSizes, ModelSizes, model_sizes
from raypd.errors import ConfigError, ModelError
from raypd.estimation.data_sheets import GPUS, gpu_named
from raypd.estimation.prediction import LIMITS, SIZES, sizes_of
from raypd.estimation.roofline import DocumentTokens, seconds_of
from raypd.report.data import load
from tests.decoding.test_families import KINDS
from tests.decoding.test_size_counter import STOCK, model_of
from tests.runs import config_tree, extraction
from tests.tiny import HYBRIDS, save_tiny, tiny_model

QWEN = "Qwen/Qwen3-8B"
CARDS = ("L40S", "A10G", "H100", "H200", "B200")


def parts_of(
    sizes: ModelSizes, gpu: str = "H100", parallel: bool = True, fp8: bool = False, **changes: float
) -> dict[str, float]:
    parts = seconds_of(sizes, GPUS[gpu], DocumentTokens(**changes), parallel, LIMITS, fp8)
    assert parts is not None
    return parts


@pytest.mark.parametrize("name", [name for name in SIZES if "Qwen3" in name])
def test_weights_are_those_of_transformers(name: str) -> None:
    sizes = SIZES[name]
    (attention,) = sizes.attention
    config = Qwen3Config(
        hidden_size=sizes.hidden_size,
        intermediate_size={
            1024: 3072,
            2048: 6144,
            2560: 9728,
            4096: 12288,
        }[sizes.hidden_size],
        num_hidden_layers=sizes.layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.key_dim,
        vocab_size=151_936,
        tie_word_embeddings=sizes.hidden_size < 4096,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM._from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    assert sizes.weights == matrices
    counted = model_sizes(config)
    norms = sum(weight.numel() for weight in model.parameters() if weight.dim() == 1)
    assert counted == replace(sizes, weights=matrices + norms)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", *HYBRIDS])
def test_a_folder_of_any_family_is_predicted(kind: str, tmp_path) -> None:
    folder = save_tiny(tmp_path / "tiny", kind)
    weights = sum(weight.numel() for weight in tiny_model(kind).parameters())
    assert sizes_of(str(folder)).weights == weights
    done = CliRunner().invoke(
        app, ["estimate", "--model", str(folder), "--instance", "g6e.48xlarge"]
    )
    assert done.exit_code == 0
    assert "PREDICTED for L40S, not measured" in done.stdout


def test_a_model_that_cannot_be_counted_is_an_error(tmp_path) -> None:
    folder = save_tiny(tmp_path / "tiny", "qwen3")
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match=r"tiny: .* type vit; measure a sample"):
        sizes_of(str(folder))


def test_a_model_without_a_config_is_named_by_the_option_that_was_given() -> None:
    for name in ("nobody/has-this-model", "a/b/c"):
        with pytest.raises(ModelError) as refused:
            sizes_of(name)
        said = str(refused.value)
        assert said.startswith(f"--model {name}: a prediction needs its config.json")
        assert "Qwen/Qwen3-0.6B" in said
        assert "model.name" not in said


def test_the_products_are_counted() -> None:
    parts = parts_of(SIZES[QWEN], "L40S")
    # 8.19 billion weights; neither embedding nor, of the tokens of prompts, the head takes products
    products = 2 * ((8.19e9 - 2 * 0.622e9) * (300 + 80 + 80) + 0.622e9 * 80) / (0.7 * 362e12)
    assert parts["products"] == pytest.approx(products, rel=2e-3)
    out = (
        CliRunner().invoke(app, ["estimate", "--model", QWEN, "--instance", "g6e.48xlarge"]).stdout
    )
    assert re.search(rf"hyper_parallel on L40S +{1 / sum(parts.values()):.3g}\n", out)
    assert "PREDICTED for L40S, not measured: products 80%" in out
    assert "the HPD paper measured 6.28" in out


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"own": 600}, "products"),
        ({"values": 320}, "products"),
        ({"shared": 8e3}, "attention"),
        ({"passes": 200}, "host"),
    ],
)
def test_more_of_something_takes_more_of_its_part(changes: dict, part: str) -> None:
    before = parts_of(SIZES[QWEN])
    after = parts_of(SIZES[QWEN], **changes)
    assert after[part] > 1.3 * before[part]


@pytest.mark.parametrize("kind", [*KINDS, *STOCK])
def test_a_model_of_any_family_has_a_speed_on_every_card(kind: str) -> None:
    sizes = model_sizes(model_of(kind).config)
    for card in CARDS:
        for parallel in (True, False):
            parts = parts_of(sizes, card, parallel)
            assert all(0 <= seconds < math.inf for seconds in parts.values())
            assert sum(parts.values()) > 0
            assert ("states" in parts) == (kind in HYBRIDS)


WINDOW = AttentionSizes(
    layers=36,
    heads=32,
    kv_heads=8,
    key_dim=128,
    value_dim=128,
    window=350,
)


def test_a_window_bounds_what_is_attended_to() -> None:
    full = parts_of(SIZES[QWEN], shared=8000)
    windowed = parts_of(replace(SIZES[QWEN], attention=(WINDOW,)), shared=8000)
    assert windowed["attention"] < 0.1 * full["attention"]
    del full["attention"], windowed["attention"]
    assert windowed == full
    # A window that no text fills changes nothing.
    unfilled = replace(SIZES[QWEN], attention=(replace(WINDOW, window=10_000),))
    assert parts_of(unfilled) == parts_of(SIZES[QWEN])


def test_experts_are_read_whole_and_multiplied_in_part() -> None:
    experts = replace(
        SIZES[QWEN],
        dense_weights=SIZES[QWEN].dense_weights // 10,
        expert_weights=9 * SIZES[QWEN].dense_weights // 10,
        experts=128,
        experts_per_token=8,
    )
    dense = parts_of(SIZES[QWEN], parallel=False)
    sparse = parts_of(experts, parallel=False)
    # A tenth and a sixteenth of the rest, beside the head, and rows that are filled up.
    assert 0.15 * dense["products"] < sparse["products"] < 0.6 * dense["products"]
    # What is not hidden by products any more is memory traffic.
    assert sparse["memory"] > dense["memory"]
    assert sum(sparse.values()) < sum(dense.values())


def test_states_take_memory_and_traffic() -> None:
    # 51.5 MB for each branch, as Qwen3.5-4B has it.
    hybrid = replace(SIZES[QWEN], state_bytes=51_500_000)
    plain = parts_of(SIZES[QWEN], "H100")
    recurrent = parts_of(hybrid, "H100")
    per_document = 2 * (380 / 64 + 80) * 51.5e6 / (0.85 * 3350e9)
    assert recurrent["states"] == pytest.approx(per_document)
    # Fewer documents share a pass.
    assert recurrent["host"] > plain["host"]


def test_fp8_is_on_the_data_sheet() -> None:
    assert parts_of(SIZES[QWEN], fp8=True)["products"] == pytest.approx(
        989 / 1979 * parts_of(SIZES[QWEN])["products"]
    )
    in_fp8 = seconds_of(SIZES[QWEN], GPUS["A10G"], DocumentTokens(), True, LIMITS, True)
    assert in_fp8 is None


def test_a_cache_in_8_bits_holds_twice_as_much_and_is_read_in_half_the_time(tmp_path) -> None:
    rounded = replace(SIZES[QWEN], kv_cache="fp8")
    assert 2 * rounded.cache_bytes == SIZES[QWEN].cache_bytes == 147_456
    # The cache of 24 GB limits how many long documents decode at once, and their passes wait for
    # the host.
    long = {"own": 6000.0, "passes": 200.0}
    plain = parts_of(SIZES[QWEN], "A10G", **long)
    halved = parts_of(rounded, "A10G", **long)
    assert halved["host"] < 0.6 * plain["host"]
    assert halved["attention"] < plain["attention"]
    assert halved["products"] == plain["products"]


def test_a_configuration_says_what_the_predicted_cache_holds(tmp_path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "title": "Acme X100"}\n')
    folder = save_tiny(tmp_path / "tiny", "qwen3")
    tree = config_tree(
        extraction(c=["Brand"]),
        tmp_path / "in.jsonl",
        tmp_path / "out",
        model={"name": str(folder)},
        input={"text_columns": ["title"]},
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    words = [
        "estimate",
        str(tmp_path / "run.yaml"),
        "--model",
        QWEN,
        "--instance",
        "g6e.48xlarge",
    ]
    assert "model.kv_cache" not in CliRunner().invoke(app, words).stdout
    done = CliRunner().invoke(app, [*words, "model.kv_cache=fp8"])
    assert done.exit_code == 0
    assert "with model.kv_cache fp8: 1 byte for each number" in " ".join(done.stdout.split())


def test_the_estimate_of_another_model_does_not_pass_for_that_of_the_run(tmp_path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "title": "Acme X100"}\n')
    own = str(save_tiny(tmp_path / "tiny", "qwen3"))
    output = tmp_path / "out"
    tree = config_tree(
        extraction(c=["Brand"]),
        tmp_path / "in.jsonl",
        output,
        model={"name": own},
        input={"text_columns": ["title"]},
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    words = ["estimate", str(tmp_path / "run.yaml"), "--instance", "g6e.48xlarge", "--model"]
    done = CliRunner().invoke(app, [*words, QWEN])
    assert done.exit_code == 0
    assert f"1 document with {QWEN}" in done.stdout
    assert "Without training, decoding.method auto runs guided" in done.stdout
    forecast = load(str(output)).forecast
    assert forecast is not None
    assert forecast.model == QWEN
    assert not forecast.fingerprint

    CliRunner().invoke(app, [*words, own])
    own_estimate = (output / "estimate.json").read_bytes()
    assert json.loads(own_estimate)["model"] == own
    refused = CliRunner().invoke(app, [*words, QWEN])
    assert "estimate: not saved, because" in refused.stdout
    assert (output / "estimate.json").read_bytes() == own_estimate


def test_a_model_that_does_not_fit_has_no_speed() -> None:
    large = replace(SIZES[QWEN], weights=60_000_000_000)
    fits = {
        card: seconds_of(large, GPUS[card], DocumentTokens(), True, LIMITS) is not None
        for card in CARDS
    }
    assert fits == {
        "L40S": False,
        "A10G": False,
        "H100": False,
        "H200": True,
        "B200": True,
    }


@pytest.mark.parametrize(
    ("name", "gibibytes", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80GB"),
        ("NVIDIA B200", 178.4, "B200"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_a_card_is_known_by_the_name_that_cuda_gives_it(name, gibibytes, gpu) -> None:
    assert gpu_named(name, gibibytes) == gpu


def test_every_data_sheet_has_a_source() -> None:
    assert set(CARDS) <= GPUS.keys()
    for sheet in GPUS.values():
        assert sheet.source.startswith("https://")


def test_a_configuration_of_a_model_that_reads_images_counts_its_text_part() -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    config = AutoConfig.for_model("gemma3", text_config=text | {"model_type": "gemma3_text"})
    assert model_sizes(config).layers == 2
