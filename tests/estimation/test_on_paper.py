"""A model on paper: its weights are transformers' own count, and its parts are what counts and data sheets say."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from raypd.errors import ConfigError
from raypd.estimation import on_paper
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from raypd.estimation.on_paper import SHAPES, DocumentTokens, seconds_of, shape_of
from raypd.estimation.views import show_estimate
from tests.tiny import save_tiny, tiny_model

QWEN = "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", [name for name in SHAPES if "Qwen3" in name])
def test_weights_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**vars(SHAPES[name])))
    assert SHAPES[name].weights == sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_a_folder_needs_its_config_alone(tmp_path, kind: str) -> None:
    folder, model = save_tiny(tmp_path / kind, kind), tiny_model(kind)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert shape_of(str(folder)).weights == sum(w.numel() for w in model.parameters() if w.dim() > 1)


def test_the_parts_add_up_and_the_papers_card_has_room_for_more(capsys: pytest.CaptureFixture[str]) -> None:
    options = EstimateOptions(model=QWEN, instances=["g6e.48xlarge", "g6.xlarge"], baseline=True)
    result = estimate(None, options)
    for speed in result.speeds + result.baseline:
        assert sum(speed.parts.values()) == pytest.approx(1 / speed.documents_per_second.value)
        assert speed.documents_per_second.low is None  # nothing tells how far it holds
    (l40s,) = (speed for speed in result.speeds if speed.gpu == "L40S")
    # 8.19 billion weights; neither embedding nor, of the tokens of prompts, the head takes products
    products = 2 * ((8.19e9 - 2 * 0.622e9) * (300 + 80 + 80) + 0.622e9 * 80) / (0.7 * 362e12)
    assert l40s.parts["products"] == pytest.approx(products, rel=2e-3)
    assert 6.28 < l40s.documents_per_second.value < 1 / products
    show_estimate(result)
    text = capsys.readouterr().out
    assert [word for word in ("PREDICTION", "products 8", "g6.xlarge") if word not in text] == []


@pytest.mark.parametrize(("changes", "part"), [
    ({"own": 600}, "products"), ({"values": 320}, "products"), ({"shared": 8e3}, "attention"),
    ({"passes": 200}, "host")])  # fmt: skip
def test_more_of_something_takes_more_of_its_part(changes: dict, part: str) -> None:
    before, after = (seconds_of(SHAPES[QWEN], "H100", tokens, True)
                     for tokens in (DocumentTokens(), DocumentTokens(**changes)))  # fmt: skip
    assert after[part] > 1.3 * before[part]


@pytest.mark.parametrize(("given", "message"), [
    ({"model": QWEN, "throughput": ["6"]}, "leave one out"), ({"tokens": "1,2,3,4,5"}, "--tokens goes with --model"),
    ({"model": QWEN, "tokens": "1,2,3"}, "give SHARED,OWN"), ({"model": QWEN, "tokens": "1,2,3,4,nan"}, "SHARED,OWN"),
    ({"model": QWEN, "instances": ["m7i.large"]}, "fits into none of these GPUs .none"),
    ({"model": "microsoft/phi-4", "instances": ["g6.xlarge"]}, "fits into none of these GPUs .L4.")])  # fmt: skip
def test_mistakes_are_told(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(None, EstimateOptions(**given))


def test_a_mixture_of_experts_is_not_predicted(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ConfigError, match="predicted are dense models"):
        on_paper.shape_of(str(tmp_path))
