"""A model on paper: its weights are transformers' own count, and its parts are what counts and data sheets say."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.errors import ConfigError
from raypd.estimation.prediction import SHAPES, DocumentTokens, seconds_of, shape_of
from tests.tiny import save_tiny, tiny_model

QWEN = "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", [name for name in SHAPES if "Qwen3" in name])
def test_weights_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**vars(SHAPES[name])))
    assert SHAPES[name].weights == sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)


def test_a_folder(tmp_path) -> None:
    folder, model = save_tiny(tmp_path / "tiny", "qwen3"), tiny_model("qwen3")
    assert shape_of(str(folder)).weights == sum(w.numel() for w in model.parameters() if w.dim() > 1)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ConfigError, match="predicted are dense models"):
        shape_of(str(folder))


def test_the_products_are_counted() -> None:
    parts = seconds_of(SHAPES[QWEN], "L40S", DocumentTokens(), True)
    assert parts is not None
    # 8.19 billion weights; neither embedding nor, of the tokens of prompts, the head takes products
    products = 2 * ((8.19e9 - 2 * 0.622e9) * (300 + 80 + 80) + 0.622e9 * 80) / (0.7 * 362e12)
    assert parts["products"] == pytest.approx(products, rel=2e-3)
    out = CliRunner().invoke(app, ["estimate", "--model", QWEN, "--instance", "g6e.48xlarge"]).stdout
    assert f"hyper_parallel on L40S                {1 / sum(parts.values()):.3g}\n" in out
    assert "PREDICTED for L40S, not measured: products 80%" in out
    assert "6.28 of others in the" in out


@pytest.mark.parametrize(("changes", "part"), [
    ({"own": 600}, "products"), ({"values": 320}, "products"), ({"shared": 8e3}, "attention"),
    ({"passes": 200}, "host")])  # fmt: skip
def test_more_of_something_takes_more_of_its_part(changes: dict, part: str) -> None:
    before, after = (seconds_of(SHAPES[QWEN], "H100", tokens, True)
                     for tokens in (DocumentTokens(), DocumentTokens(**changes)))  # fmt: skip
    assert after[part] > 1.3 * before[part]
