"""A tiny random model that is trained on a few answers writes them, decoded by the method that it
was trained for.
"""

import json

import pytest
import torch

from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.decoding.engine import Engine
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree
from raypd.errors import ModelError
from raypd.models.control_tokens import add_control_tokens
from raypd.models.load import load_model
from raypd.models.medusa_heads import save_heads
from raypd.tasks import build_task
from raypd.tasks.base import Document
from raypd.training.generation import GenerationExamples
from raypd.training.packing import batches
from raypd.training.trainer import make_trainer
from raypd.training.weights import _check_attention, load_for_training, make_trainable
from tests.runs import answer, with_keys
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.data import generation_tree, loaded_tiny

POINTS = (
    "1. Rise: at seven every single day.\n2. Walk: for half an hour or so.\n3. Read: a "
    "good old paper book."
)
LIST = f"Do:\n\n{POINTS}\n\nBye."
ANSWERS = {"How?": LIST, "Who?": "It was me, nobody else.", "Then?": "A. B.\n\nOne. " + LIST[:9]}
TARGETS = [
    Document(i, str(i), {"turns": [q], "responses": [a]})
    for i, (q, a) in enumerate(ANSWERS.items())
]


def conversation(method, model, training, quantization="none", **decoding):
    """A configuration for the answers above."""
    tree = generation_tree(
        method, {"evaluations": 1, **training}, **{"max_new_tokens": 200, **decoding}
    )
    tree["model"] = {
        "name": model,
        "dtype": "float32",
        "device": "cpu",
        "quantization": quantization,
    }
    return RunConfig.model_validate(tree)


def trainer_of(loaded, config, tmp_path, rate, repeat=1):
    """A trainer of the answers above, each a pass of its own; repeated, all in one."""
    examples = list(GenerationExamples(config, loaded.tokenizer, 4096)(TARGETS))
    passes = list(batches(examples, 1 if repeat == 1 else len(examples), 9999, 0))
    return make_trainer(loaded, config, repeat * passes, passes, tmp_path, rate, lambda _: None)


def ready(training, method="autoregressive", dtype="float32", **decoding):
    """A tiny model with the control tokens of a method, ready to be trained for it, and its
    configuration.
    """
    loaded = loaded_tiny(tiny_model("llama"), method)
    config = conversation(method, "tiny", {"weights": "full", **training}, **decoding)
    config = with_keys(config, model={"dtype": dtype})
    make_trainable(loaded, config)
    return loaded, config


def trained(method, tmp_path, epochs, rate=5e-3, **decoding):
    """What was decoded for every prompt, as rows."""
    loaded, config = ready({"epochs": epochs}, method, **decoding)
    trainer_of(loaded, config, tmp_path, rate, 8).train()
    return decoded(config, loaded.model, loaded.tokenizer)


def decoded(config, model, tokenizer):
    """The answers to the documents, as rows."""
    records, _ = answer(build_task(config, tokenizer, 4096, model), TARGETS, Engine(model.eval()))
    return [record.columns for record in sorted(records, key=lambda record: record.index)]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_all_weights_in_float32_with_products_in_bfloat16(tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        loaded, config = ready({"epochs": 2}, dtype=dtype)
        trainer = trainer_of(loaded, config, tmp_path / dtype, 2e-3, 8)
        trainer.train()
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
        losses[dtype] = logged(trainer, "eval_loss")[-1]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_every_target_of_a_step_counts_alike_in_whichever_pass_it_is(tmp_path):
    loaded, config = ready({"epochs": 1, "accumulate": 3, "warmup": 0, "schedule": "constant"})
    trainer = trainer_of(loaded, config, tmp_path, 1e-30)  # at this rate no weight changes
    passes = list(trainer.train_dataset)
    # The mean over the targets of a pass.
    alone = [trainer.evaluate([group])["eval_loss"] for group in passes]
    counts = [len(example.targets) for (example,) in passes]
    want = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    # They share no instruction.
    (together,) = batches([example for (example,) in passes], 100, 9999, 0)
    for validation in (passes, [together]):
        assert trainer.evaluate(validation)["eval_loss"] == pytest.approx(want, rel=1e-4)
    trainer.train()
    (loss_of_step,) = logged(trainer, "loss")
    assert loss_of_step == pytest.approx(want, rel=1e-4)
    assert loss_of_step != pytest.approx(sum(alone) / 3, rel=1e-4)


def test_a_training_that_gets_no_better_ends(tmp_path):
    loaded, config = ready(
        {"epochs": 10, "evaluations": 10, "patience": 2, "schedule": "constant", "warmup": 0}
    )
    trainer = trainer_of(loaded, config, tmp_path, 1e-30, 2)  # at this rate no weight changes
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 3
    assert trainer.state.global_step < trainer.state.max_steps / 2


def test_apar_forks_where_the_data_forks(tmp_path):
    rows = trained("apar", tmp_path, 16)
    first, *others = (json.loads(row["counters"]) for row in rows)
    assert (rows[0]["text"], first["threads"]) == (LIST, 4)
    assert first["longest_path"] < 0.6 * len(LIST)
    assert [counters["threads"] for counters in others] == [1, 1] or rows[2]["text"] == ANSWERS[
        "Then?"
    ]


def test_pasta_keeps_its_promises(tmp_path):
    row = trained("pasta", tmp_path, 16, max_new_tokens=500)[0]
    assert (row["text"], row["warnings"]) == (LIST, [])
    assert row["raw"].count("<promise ") == row["raw"].count("</async>") == 3
    assert json.loads(row["counters"])["longest_path"] < 0.9 * row["tokens"]


def test_space_accepts_what_it_drafts(tmp_path):
    rows = trained("space", tmp_path, 40, 6e-3, mask_tokens=3)
    assert [row["text"] for row in rows] == list(ANSWERS.values())
    assert min(json.loads(row["counters"])["average_accepted_tokens"] for row in rows) > 1.4


@pytest.mark.parametrize("method", ["medusa", "apar_medusa"])
def test_heads_guess_what_their_model_writes(tmp_path, method):
    text_method = {"medusa": "autoregressive", "apar_medusa": "apar"}[method]
    loaded, config = ready({"epochs": 16}, text_method)
    model, tokenizer = loaded.model, loaded.tokenizer
    trainer_of(loaded, config, tmp_path / "model", 5e-3, 8).train()
    before = [parameter.clone() for parameter in model.parameters()]
    save_heads(
        MedusaHeads.for_model(model, 2, 1, tree=cartesian_tree(1, 1)), tmp_path / "untrained"
    )
    config = conversation(method, "tiny", {"epochs": 12}, heads=str(tmp_path / "untrained"))
    make_trainable(loaded, config)
    trainer_of(loaded, config, tmp_path / "heads", 2e-2, 4).train()
    assert all(
        torch.equal(old, parameter)
        for old, parameter in zip(before, model.parameters(), strict=True)
    )
    save_heads(loaded.model.heads, tmp_path / "trained")
    alone, learned = (
        decoded(conversation(text_method, "tiny", {}), model, tokenizer),
        3 - (method == "apar_medusa"),
    )
    assert [row["text"] for row in alone[:learned]] == list(ANSWERS.values())[:learned]
    accepted = {}
    for name in ("untrained", "trained"):
        rows = decoded(
            conversation(method, "tiny", {}, heads=str(tmp_path / name)), model, tokenizer
        )
        assert [row["text"] for row in rows] == [row["text"] for row in alone]
        accepted[name] = json.loads(rows[0]["counters"])["average_accepted_tokens"]
    # Threads count side by side.
    assert accepted["trained"] > max(1.8, 1.3 * accepted["untrained"]), accepted


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_model_that_cannot_be_trained_is_refused(kind):
    with pytest.raises(ModelError, match="cannot train it yet"):
        _check_attention(tiny_model(kind, sliding_window=8), kind)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_is_all_that_was_trained(tmp_path, quantization):
    """LoRA and QLoRA: linear layers, and the rows of [Fork] and [Child]; loaded as `model.adapter`
    it decodes alike.
    """
    tokenizer, model = tiny_tokenizer(), tiny_model("llama", hidden_size=64)
    fork, _ = add_control_tokens(model, tokenizer, "apar")
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "base")
    config = conversation(
        "apar", str(tmp_path / "base"), {"weights": "lora", "epochs": 2}, quantization
    )
    loaded = load_for_training(config)
    trainer_of(loaded, config, tmp_path / "out", 1e-2).train()
    loaded.model.save_pretrained(tmp_path / "adapter")
    settings = ({"adapter": str(tmp_path / "adapter")}, {})
    decoded, untrained = (
        load_model(config.model.model_copy(update=keys)).model for keys in settings
    )
    ids = torch.tensor([[5, fork, 9, 8]])
    loaded.model.eval().set_attn_implementation("sdpa")
    for module in (*decoded.modules(), *untrained.modules()):
        # Bitsandbytes' packed weights compute in bfloat16.
        module.support_avx512bf16_for_cpu = False
        module.state_dict()  # which unpacks them
    logits, want, before = (network(ids).logits for network in (decoded, loaded.model, untrained))
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert (want - before).abs().max() > 1e-2
    rows = [network.get_input_embeddings().weight for network in (decoded, untrained)]
    if quantization == "none":
        assert not torch.equal(rows[0][fork], rows[1][fork])
        torch.testing.assert_close(rows[0][:fork], rows[1][:fork], rtol=0, atol=0)
        full = {"training": {**config.training.model_dump(), "weights": "full"}}
        begun = load_for_training(
            with_changes(config, {**full, "model.adapter": settings[0]["adapter"]})
        ).model
        # All weights are trained on from it.
        torch.testing.assert_close(begun.state_dict(), decoded.state_dict())
