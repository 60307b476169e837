"""Every family: a training pass computes what decoding computes, and has the model's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from raypd.config import RunConfig
from raypd.decoding.engine import Engine
from raypd.decoding.program import Program
from raypd.errors import ModelError
from raypd.models.load import load_model
from raypd.tasks.base import Document
from raypd.training.example import Example
from raypd.training.extraction import ExtractionExamples
from raypd.training.job import run_training
from raypd.training.layers import experts_per_token, routers_of, use_training_layers
from raypd.training.packing import batches, layout_of, pack
from raypd.training.weights import check_weights, load_for_training, make_trainable
from tests.decoding.test_families import KINDS, type_of
from tests.runs import with_keys
from tests.tiny import HYBRIDS, save_tiny, tiny_model, tiny_tokenizer
from tests.training.data import COLORS, loaded_tiny, tree, write_corpus

_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LAYERS = ["sliding_attention", "full_attention"]
# Families that transformers computes but for attention.
STOCK: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "minicpm3": {key: size for key, size in _LATENT.items() if key not in _EXPERTS},
    "gemma3n_text": {
        "sliding_window": 16,
        "layer_types": _LAYERS * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "sliding_window": 16,
        "layer_types": _LAYERS * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "mimo_v2_flash": {"sliding_window": 16, **_EXPERTS},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "dots1": {**_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "exaone_moe": {
        "sliding_window": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "afmoe": {"sliding_window": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "input_jitter_noise": 0.1},
    "ministral3": {},
    "apertus": {},
    "arcee": {},
    "starcoder2": {},
    "gpt_neox": {},
}
SIZES: dict[str, dict[str, Any]] = {
    **KINDS,
    **STOCK,
    **{kind: {} for kind in HYBRIDS},
}
# Its published configuration drops a tenth in training.
SIZES["seed_oss"] = {"residual_dropout": 0.0}
WINDOWED = sorted(kind for kind, keys in SIZES.items() if "sliding_window" in keys)
# Logits of these families vary in float32 with the size of a pass.
_COARSE = {"nemotron_h": 2e-2}


def model_of(kind: str) -> PreTrainedModel:
    return tiny_model(type_of(kind), **SIZES[kind])


def config_of(tmp_path, method: str, **sections: Any) -> RunConfig:
    decoding = {
        "method": method,
        "isolate": "values",
        **sections.pop("decoding", {}),
    }
    keys = tree(
        tmp_path / "none",
        tmp_path / "out",
        "none",
        decoding=decoding,
        **sections,
    )
    return RunConfig.model_validate(keys)


def document(row: int, title: str, **target: Any) -> Document:
    return Document(
        row,
        str(row),
        {
            "category": "shoes",
            "title": title,
            "target": target,
        },
    )


DOCUMENTS = [
    document(0, "Acme red 7 of the best kind", Brand="Acme Co", Color="red", Size=7),
    document(1, "nothing", Brand=None, Color=None, Size=1200),
    document(
        2,
        "Zeta",
        Brand="Zeta",
        Color=COLORS[2],
        Size=None,
    ),
]


def examples_of(config: RunConfig) -> tuple[list[Example], list[Program[Any]]]:
    """Return the examples of the documents, and the programs that decode them."""
    make = ExtractionExamples(config, tiny_tokenizer(), 4096)
    documents = copy.deepcopy(DOCUMENTS)
    examples = list(make(documents))
    programs = [request.program for request in make.task.plan(documents)]
    assert len(examples) == len(programs) == len(DOCUMENTS)
    return examples, programs


def trained(model: PreTrainedModel) -> PreTrainedModel:
    use_training_layers(model, keeps_routers=True)
    return model.train()


def training_logits(model: Any, group: list[Example], recurrent: bool) -> torch.Tensor:
    """Return the logits of a packed pass at all targets."""
    batch = pack(group, recurrent=recurrent)
    output = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=batch["label_index"],
        layout=layout_of(batch),
    )
    return output.logits[0]


def decoded_logits(
    model: PreTrainedModel, program: Program[Any], example: Example
) -> dict[int, torch.Tensor]:
    """Return the logits of the engine, which answers an example, by the number of the target.

    A record's keys and its end are not asked for, as they are known.
    """
    engine = Engine(model)
    engine.few = None  # so that all tokens come from the model's logits
    gold = {}
    for index, token in example.targets.items():
        gold[int(example.positions[index]), int(example.segments[index])] = token
    rows: dict[tuple[int, int], torch.Tensor] = {}
    forward = engine.model.forward

    def teach(ids: Any, positions: Any, step: Any, *arguments: Any, **named: Any) -> Any:
        logits, hidden = forward(ids, positions, step, *arguments, **named)
        (group,) = step.groups
        (span,) = group.spans
        queries = list(zip(*span.queries[:2].tolist(), strict=True))
        for row, index in enumerate(step.sample_rows.tolist()):
            query = queries[index]
            rows[query] = logits[row].clone()
            logits[row] = -1000.0
            logits[row, gold[query]] = 1000.0
        return logits, hidden

    engine.model.forward = teach
    engine.run([program])
    return {number: rows[query] for number, query in enumerate(gold) if query in rows}


def methods_and_kinds() -> list:
    """Pair each method with each family.

    A text without branches is a slow test of most families: the gradients of such texts are
    compared with the unmodified model's below.
    """
    parameters = []
    for method in ("hyper_parallel", "autoregressive"):
        for kind in SIZES:
            is_slow = method == "autoregressive" and kind not in {"llama", *WINDOWED, *HYBRIDS}
            marks = [pytest.mark.slow] if is_slow else []
            parameters.append(pytest.param(method, kind, marks=marks))
    return parameters


@pytest.mark.parametrize(("method", "kind"), methods_and_kinds())
def test_a_training_pass_computes_what_decoding_computes(kind, method, tmp_path):
    model = model_of(kind)
    packed = trained(copy.deepcopy(model))
    examples, programs = examples_of(config_of(tmp_path, method))
    (group,) = batches(examples, 100, 100_000, 0)
    assert group[0].shared > 16, "the instruction is longer than a window"
    with torch.no_grad():
        found = training_logits(packed, group, kind in HYBRIDS)
    decoded = {}
    for example, program in zip(examples, programs, strict=True):
        decoded[id(example)] = decoded_logits(model, program, example)
    begin = 0
    for example in group:
        asked = decoded[id(example)]
        assert len(asked) >= 8, "the values of the document"
        rows = found[[begin + number for number in asked]]
        expected = torch.stack([*asked.values()])
        torch.testing.assert_close(
            rows,
            expected,
            atol=_COARSE.get(kind, 1e-3),
            rtol=0,
        )
        begin += len(example.targets)


def assert_same_gradients(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        error = float((parameter.grad - gradient).norm() / gradient.norm().clamp_min(1e-6))
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("kind", SIZES)
def test_gradients_of_a_packed_pass_are_those_of_each_text_alone(kind, tmp_path):
    model = model_of(kind)
    packed = trained(copy.deepcopy(model))
    examples, _ = examples_of(config_of(tmp_path, "autoregressive"))
    (group,) = batches(examples, 100, 100_000, 0)
    logits = training_logits(packed, group, kind in HYBRIDS)
    labels = torch.tensor([token for example in group for token in example.targets.values()])
    cross_entropy(logits, labels, reduction="sum").backward()
    model.set_attn_implementation("eager")
    for example in group:
        # The unmodified model, which makes its own masks.
        tokens = torch.from_numpy(example.tokens)[None]
        alone = model(tokens, use_cache=False).logits[0][list(example.targets)]
        gold = torch.tensor(list(example.targets.values()))
        cross_entropy(alone, gold, reduction="sum").backward()
    assert_same_gradients(packed, model)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_gradients_go_through_forked_states(kind, tmp_path):
    """Those of all values together are the sum of those of each value alone."""
    model = model_of(kind)
    packed = trained(copy.deepcopy(model))
    examples, _ = examples_of(config_of(tmp_path, "hyper_parallel"))
    (group,) = batches(examples, 100, 100_000, 0)
    logits = training_logits(packed, group, recurrent=True)
    labels = torch.tensor([token for example in group for token in example.targets.values()])
    cross_entropy(logits, labels, reduction="sum").backward()
    model.set_attn_implementation("eager")
    branches = 0
    for example in group:
        prompt = example.segments == 0
        slots = [index for index in example.targets if prompt[index]]
        for number, slot in enumerate(slots, 1):
            of_prompt = [index for index in range(slot + 1) if prompt[index]]
            of_value = [i for i in range(len(example)) if example.segments[i] == number]
            chain = [*of_prompt, *of_value]
            targets = [index for index in (slot, *of_value) if index in example.targets]
            alone = model(
                torch.from_numpy(example.tokens[chain])[None],
                position_ids=torch.from_numpy(example.positions[chain])[None],
                # Without a mask transformers takes a gap for the beginning of another text.
                attention_mask=torch.ones(1, len(chain), dtype=torch.long),
                use_cache=False,
            ).logits[0][[chain.index(index) for index in targets]]
            gold = torch.tensor([example.targets[index] for index in targets])
            cross_entropy(alone, gold, reduction="sum").backward()
            branches += 1
    assert branches == 3 * len(group)
    assert_same_gradients(packed, model)


def test_a_window_matters():
    """The texts of this file are longer than the windows, so that a wrong one shows."""
    assert {"gemma2", "gpt_oss", "mistral", "gemma4_text"} <= set(WINDOWED)
    assert all(SIZES[kind]["sliding_window"] <= 16 for kind in WINDOWED)


def loss_of(model: Any, config: RunConfig, recurrent: bool = False) -> torch.Tensor:
    examples, _ = examples_of(config)
    (group,) = batches(examples, 100, 100_000, 0)
    labels = torch.tensor([token for example in group for token in example.targets.values()])
    return cross_entropy(training_logits(model, group, recurrent), labels)


def step(model: Any, config: RunConfig, rate: float = 0.1) -> None:
    """Change the trained weights by one step of gradient descent."""
    loss_of(model, config).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad / parameter.grad.norm().clamp_min(1e-9)


def routers_in(model: Any) -> dict[str, torch.Tensor]:
    weights = {}
    for name, router in routers_of(model).items():
        for key, weight in router.named_parameters():
            weights[f"{name}.{key}"] = weight.detach().clone()
    return weights


MIXTURES = ["qwen3_moe", "gpt_oss", "glm4_moe", "phimoe", "lfm2_moe", "deepseek_v3"]


@pytest.mark.parametrize("train_routers", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "phimoe"])
def test_routers_are_trained_only_if_asked(kind, train_routers, tmp_path):
    training = {"weights": "full", "train_routers": train_routers}
    config = config_of(tmp_path, "autoregressive", training=training)
    loaded = loaded_tiny(model_of(kind))
    make_trainable(loaded, config)
    before = copy.deepcopy(loaded.model)
    step(loaded.model.train(), config)
    weights = dict(loaded.model.named_parameters())
    for name, weight in before.named_parameters():
        is_router = name in routers_in(before)
        is_same = torch.equal(weight, weights[name])
        assert is_same == (is_router and not train_routers), name


@pytest.mark.filterwarnings("error:The following .*_pattern keys did not match")
@pytest.mark.parametrize("train_routers", [False, True])
@pytest.mark.parametrize("kind", MIXTURES)
def test_an_adapter_holds_what_experts_learnt(kind, train_routers, tmp_path):
    folder = save_tiny(tmp_path / "base", type_of(kind), **SIZES[kind])
    training = {"weights": "lora", "lora": {"rank": 4}, "train_routers": train_routers}
    config = config_of(tmp_path, "autoregressive", training=training)
    config = with_keys(
        config,
        model={
            "name": str(folder),
            "dtype": "float32",
            "device": "cpu",
        },
    )
    check_weights(config)
    loaded = load_for_training(config)
    untrained = load_model(config.model).model
    recurrent = kind in HYBRIDS
    for _ in range(2):
        loaded.model.zero_grad()
        loss_of(loaded.model.train(), config, recurrent).backward()
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad / parameter.grad.norm().clamp_min(1e-9)
    loaded.model.save_pretrained(tmp_path / "adapter")
    after = with_keys(config, model={"adapter": str(tmp_path / "adapter")})
    reloaded = load_model(after.model).model
    ids = torch.arange(5, 45)[None]
    logits = loaded.model.eval().base_model.model
    logits.set_attn_implementation("eager")
    expected = logits(ids).logits
    reloaded.set_attn_implementation("eager")
    torch.testing.assert_close(
        reloaded(ids).logits,
        expected,
        atol=2e-3,
        rtol=0,
    )
    weights = dict(untrained.named_parameters())
    routers = routers_in(untrained)
    experts = 0
    for name, weight in reloaded.named_parameters():
        is_expert = ".experts." in name and weight.dim() == 3
        experts += is_expert
        if is_expert or (train_routers and name in routers and weight.dim() == 2):
            assert not torch.equal(weight, weights[name]), name
        elif name in routers:
            assert torch.equal(weight, weights[name]), name
    assert experts


def test_an_expert_has_its_share_of_the_rank(tmp_path):
    config = config_of(tmp_path, "autoregressive", training={"lora": {"rank": 8, "alpha": 16}})
    loaded = loaded_tiny(model_of("qwen3_moe"))
    assert experts_per_token(loaded.model) == 2
    make_trainable(loaded, config)
    shapes = {name: weight.shape for name, weight in loaded.model.named_parameters()}
    ranks = [shape[0] for name, shape in shapes.items() if "experts" in name and "lora_A" in name]
    assert set(ranks) == {4 * 4}, "four experts with a rank of 4 each"
    assert loaded.model.peft_config["default"].alpha_pattern["experts.down_proj"] == 8


@pytest.mark.parametrize(
    ("kind", "sections", "words"),
    [
        (
            "lfm2",
            {"decoding": {"method": "hyper_parallel", "isolate": "documents"}},
            r"isolate documents: model .* \(lfm2\) has recurrent layers.*decoding.isolate: values",
        ),
        (
            "qwen3_moe",
            {"training": {"lora": {"dropout": 0.1}}},
            r"dropout 0.1: model .* \(qwen3_moe\) is a mixture .* set training.lora.dropout to 0",
        ),
        (
            "llama",
            {"training": {"weights": "full"}, "model": {"quantization": "nf4"}},
            "quantized weights cannot be trained; use lora, or quantization none",
        ),
    ],
)
def test_what_cannot_be_trained_is_named_before_ray_starts(
    kind, sections, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "raypd.training.job.ray_session.connect", lambda *_: pytest.fail("Ray is started")
    )
    folder = save_tiny(tmp_path / "base", type_of(kind), **SIZES[kind])
    config = config_of(tmp_path, "hyper_parallel")
    write_corpus(tmp_path / "none", 4)
    config = with_keys(config, model={"name": str(folder)})
    config = with_keys(config, **sections)
    with pytest.raises(ModelError, match=words) as error:
        run_training(config)
    assert "\n" not in str(error.value)
