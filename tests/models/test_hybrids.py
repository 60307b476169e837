"""Models with recurrent layers: which are loaded, and which methods decode them."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from raypd.answering.check import check_method
from raypd.answering.components import build
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.load import check_model_config, load_model
from tests.runs import run_config
from tests.tiny import HYBRIDS, save_tiny, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "lfm2")


def model_config(folder: Path) -> ModelConfig:
    return ModelConfig(name=str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_families_are_loaded(tmp_path: Path, kind: str) -> None:
    config = model_config(save_tiny(tmp_path, kind, vocab_size=272))
    check_model_config(config)
    loaded = load_model(config)
    # Outside of an engine the model is what it was.
    assert type(loaded.model).__module__.startswith("transformers.models.")


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        # Of a family without them.
        ("llama", {"layer_types": ["linear_attention"] * 2}, "has layers of type linear_attention"),
        # Of another family.
        ("qwen3_5_text", {"layer_types": ["conv"] * 4}, "has layers of type conv"),
        # Of no family.
        ("lfm2", {"layer_types": ["conv", "warp", "conv", "conv"]}, "config.json cannot be read"),
        # Fewer than there are layers.
        ("lfm2", {"layer_types": ["conv"]}, r"num_hidden_layers` \(4\) must be equal"),
    ],
)
def test_layers_that_the_family_does_not_have_are_named(
    tmp_path: Path, kind: str, keys: dict, words: str
) -> None:
    folder = _with_keys(save_tiny(tmp_path, kind), keys)
    for refuses in (check_model_config, load_model):
        with pytest.raises(ModelError, match=words) as error:
            refuses(model_config(folder))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("lfm2", {"layer_types": ["full_attention", "conv", "conv", "full_attention"]}),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}),
    ],
)
def test_layers_that_are_not_those_of_the_weights_are_named(
    tmp_path: Path, kind: str, keys: dict
) -> None:
    folder = _with_keys(save_tiny(tmp_path, kind), keys)
    with pytest.raises(ModelError, match=r"weights are missing .*config\.json is another") as error:
        load_model(model_config(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_another_number_of_layers_than_the_weights_have_is_named(
    tmp_path: Path, kind: str, layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, kind)
    settings = json.loads((folder / "config.json").read_text())
    types = (settings["layer_types"] * 2)[:layers]
    _with_keys(folder, {"num_hidden_layers": layers, "layer_types": types})
    with pytest.raises(ModelError, match=r"config\.json is another model's") as error:
        load_model(model_config(folder))
    assert "\n" not in str(error.value)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("left", [0.5, 0.01, 0])
def test_weights_that_are_cut_short_are_named(tmp_path: Path, left: float) -> None:
    folder = save_tiny(tmp_path, "qwen3_5_text")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(ModelError, match=r"is cut short or damaged \(.*fetch it again$") as error:
        load_model(model_config(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_5_text"])
def test_an_adapter_of_another_family_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(tiny_model(kind), settings).save_pretrained(tmp_path)
    config = model_config(folder).model_copy(update={"adapter": str(tmp_path)})
    with pytest.raises(ModelError, match=r"does not fit model\.name .* nothing that") as error:
        check_model_config(config)
    assert "\n" not in str(error.value)


def test_states_that_do_not_fit_into_memory_are_named(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("raypd.decoding.recurrence.states.free_memory", lambda device: 2000)
    model = {"name": str(folder), "device": "cpu", "dtype": "float32"}
    config = run_config(None, model=model, decoding={"method": "autoregressive"})
    with pytest.raises(
        ModelError, match=r"^engine: the memory of cpu holds . states .*or use a smaller model$"
    ):
        build(config, None)


def _with_keys(folder: Path, keys: dict) -> Path:
    """Change a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("task", "decoding"),
    [
        (None, {"method": "autoregressive"}),
        (None, {"method": "guided"}),
        (None, {"method": "hyper_parallel", "isolate": "values"}),
        (None, {"method": "hyper_parallel", "isolate": "values", "skeleton": "slots"}),
        ("question_answering", {"method": "intra_prompt"}),
        ("generation", {"method": "autoregressive"}),
    ],
)
def test_methods_that_recurrent_layers_can_follow(
    folder: Path, task: str | None, decoding: dict
) -> None:
    check_method(
        run_config(
            task,
            model={"name": str(folder)},
            decoding=decoding,
        )
    )


@pytest.mark.parametrize(
    ("task", "decoding", "words"),
    [
        (None, {"method": "hyper_parallel"}, "set decoding.isolate: values"),
        (
            None,
            {"method": "hyper_parallel", "isolate": "none"},
            "decoding.isolate none: .* set decoding.isolate: values",
        ),
        (
            None,
            {"method": "speculative"},
            "speculative: .* set decoding.method: hyper_parallel or autoregressive or guided",
        ),
        ("generation", {"method": "pasta"}, "pasta: .* set decoding.method: autoregressive$"),
        ("generation", {"method": "skeleton_of_thought"}, "set decoding.method: autoregressive$"),
    ],
)
def test_methods_that_they_cannot_follow_are_named(
    folder: Path, task: str | None, decoding: dict, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        check_method(
            run_config(
                task,
                model={"name": str(folder)},
                decoding=decoding,
            )
        )


def test_a_draft_model_with_recurrent_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    options = {"draft_model": str(folder)}
    decoding = {"method": "speculative", "options": options}
    main = save_tiny(tmp_path)
    with pytest.raises(ModelError, match="has recurrent layers, which cannot undo rejected drafts"):
        check_method(
            run_config(
                "generation",
                model={"name": str(main)},
                decoding=decoding,
            )
        )
