"""A tiny random model is trained on a few answers, and then writes them by the same method."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.decoding.engine import Engine
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree
from raypd.models.control_tokens import add_control_tokens
from raypd.models.load import load_model
from raypd.models.medusa_heads import save_heads
from raypd.tasks import build_task
from raypd.tasks.base import Document
from raypd.training.example import IGNORED
from raypd.training.generation import GenerationExamples
from raypd.training.packing import batches, layout_of
from raypd.training.trainer import make_trainer
from raypd.training.weights import load_for_training, make_trainable
from tests.runs import answer, with_keys
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.data import generation_tree, loaded_tiny

POINTS = (
    "1. Rise: at seven every single day.\n2. Walk: for half an hour or so.\n3. Read: a "
    "good old paper book."
)
LIST = f"Do:\n\n{POINTS}\n\nBye."
ANSWERS = {
    "How?": LIST,
    "Who?": "It was me, nobody else.",
    "Then?": "A. B.\n\nOne. " + LIST[:9],
}
TARGETS = [
    Document(i, str(i), {"turns": [q], "responses": [a]})
    for i, (q, a) in enumerate(ANSWERS.items())
]


# The learning rate is the same in every step.
CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}


def conversation(method, model, training, quantization="none", **decoding):
    """Return a configuration for the answers above."""
    training = {"evaluations": 1, **training}
    decoding = {"max_new_tokens": 200, **decoding}
    tree = generation_tree(method, training, **decoding)
    tree["model"] = {
        "name": model,
        "dtype": "float32",
        "device": "cpu",
        "quantization": quantization,
    }
    return RunConfig.model_validate(tree)


def ignore(progress):
    pass


def trainer_of(loaded, config, tmp_path, rate, repeat=1):
    """Return a trainer of the answers above, each a pass of its own; repeated, all in one pass."""
    examples = list(GenerationExamples(config, loaded.tokenizer, 4096)(TARGETS))
    examples_per_pass = 1 if repeat == 1 else len(examples)
    passes = list(batches(examples, examples_per_pass, 9999, 0))
    return make_trainer(loaded, config, repeat * passes, passes, tmp_path, rate, ignore)


def ready(training, method="autoregressive", dtype="float32", **decoding):
    """Return a tiny model that is ready to be trained for a method, and its configuration."""
    loaded = loaded_tiny(tiny_model("llama"), method)
    config = conversation(method, "tiny", {"weights": "full", **training}, **decoding)
    config = with_keys(config, model={"dtype": dtype})
    make_trainable(loaded, config)
    return loaded, config


def trained(method, tmp_path, epochs, rate=5e-3, **decoding):
    """Train a model, and return what it decodes for every prompt, as rows."""
    loaded, config = ready({"epochs": epochs}, method, **decoding)
    trainer_of(loaded, config, tmp_path, rate, 8).train()
    return decoded(config, loaded.model, loaded.tokenizer)


def decoded(config, model, tokenizer):
    """Return the answers to all prompts, as rows."""
    records, _ = answer(build_task(config, tokenizer, 4096, model), TARGETS, Engine(model.eval()))
    return [record.columns for record in sorted(records, key=lambda record: record.index)]


def texts_of(rows):
    return [row["text"] for row in rows]


def counters_of(rows):
    return [json.loads(row["counters"]) for row in rows]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_weights_stay_in_float32_when_products_are_in_bfloat16(tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        loaded, config = ready({"epochs": 2}, dtype=dtype)
        trainer = trainer_of(loaded, config, tmp_path / dtype, 2e-3, 8)
        trainer.train()
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
        losses[dtype] = logged(trainer, "eval_loss")[-1]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_every_target_of_a_step_has_the_same_weight_in_any_pass(tmp_path):
    loaded, config = ready({"epochs": 1, "trainer": {**CONSTANT, "gradient_accumulation_steps": 3}})
    trainer = trainer_of(loaded, config, tmp_path, 1e-30)  # at this rate no weight changes
    passes = list(trainer.train_dataset)
    examples = [example for (example,) in passes]
    losses = [trainer.evaluate([group])["eval_loss"] for group in passes]
    counts = [len(example.targets) for example in examples]
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    per_target = total / sum(counts)
    # The examples have no instruction in common, so that one pass can hold them all.
    (together,) = batches(examples, 100, 9999, 0)
    for validation in (passes, [together]):
        assert trainer.evaluate(validation)["eval_loss"] == pytest.approx(per_target, rel=1e-4)
    trainer.train()
    (loss_of_step,) = logged(trainer, "loss")
    assert loss_of_step == pytest.approx(per_target, rel=1e-4)
    assert loss_of_step != pytest.approx(sum(losses) / 3, rel=1e-4)


def test_a_training_ends_when_it_no_longer_improves(tmp_path):
    training = {
        "epochs": 10,
        "evaluations": 10,
        "patience": 2,
        "trainer": CONSTANT,
    }
    loaded, config = ready(training)
    trainer = trainer_of(loaded, config, tmp_path, 1e-30, 2)  # at this rate no weight changes
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 3
    assert trainer.state.global_step < trainer.state.max_steps / 2


def test_apar_forks_where_the_data_forks(tmp_path):
    # One answer has threads, so that APAR's 1:1 trains on one of the two others.
    with_threads, plain, _ = trained("apar", tmp_path, 16)
    assert with_threads["text"] == LIST
    assert plain["text"] == ANSWERS["Who?"]
    counters, plain_counters = counters_of([with_threads, plain])
    assert counters["threads"] == 4
    assert counters["longest_path"] < 0.6 * len(LIST)
    assert plain_counters["threads"] == 1


def test_pasta_keeps_its_promises(tmp_path):
    row = trained("pasta", tmp_path, 16, max_new_tokens=500)[0]
    assert row["text"] == LIST
    assert row["warnings"] == []
    assert row["raw"].count("<promise ") == 3
    assert row["raw"].count("</async>") == 3
    assert json.loads(row["counters"])["longest_path"] < 0.9 * row["tokens"]


def test_space_accepts_what_it_drafts(tmp_path):
    rows = trained("space", tmp_path, 40, 6e-3, mask_tokens=3)
    assert texts_of(rows) == list(ANSWERS.values())
    for counters in counters_of(rows):
        assert counters["average_accepted_tokens"] > 1.4


@pytest.mark.parametrize(
    ("method", "text_method", "learned"),
    [
        ("medusa", "autoregressive", 3),
        # APAR's 1:1 leaves the third answer out of the training.
        ("apar_medusa", "apar", 2),
    ],
)
def test_heads_predict_what_their_model_writes(tmp_path, method, text_method, learned):
    loaded, config = ready({"epochs": 16}, text_method)
    model = loaded.model
    tokenizer = loaded.tokenizer
    trainer_of(loaded, config, tmp_path / "model", 5e-3, 8).train()
    before = [parameter.clone() for parameter in model.parameters()]
    heads = MedusaHeads.for_model(model, 2, 1, tree=cartesian_tree(1, 1))
    save_heads(heads, tmp_path / "untrained")
    config = conversation(method, "tiny", {"epochs": 12}, heads=str(tmp_path / "untrained"))
    make_trainable(loaded, config)
    trainer_of(loaded, config, tmp_path / "heads", 2e-2, 4).train()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    save_heads(loaded.model.heads, tmp_path / "trained")
    texts = texts_of(decoded(conversation(text_method, "tiny", {}), model, tokenizer))
    assert texts[:learned] == list(ANSWERS.values())[:learned]
    accepted = {}
    for name in ("untrained", "trained"):
        config = conversation(method, "tiny", {}, heads=str(tmp_path / name))
        rows = decoded(config, model, tokenizer)
        assert texts_of(rows) == texts
        accepted[name] = counters_of(rows)[0]["average_accepted_tokens"]
    # Tokens of threads that are decoded side by side count together.
    assert accepted["trained"] > max(1.8, 1.3 * accepted["untrained"]), accepted


def test_labels_behind_the_end_of_an_answer_do_not_count_in_a_validation(tmp_path):
    """A head that predicts further ahead has no label at the last tokens."""
    loaded = loaded_tiny(tiny_model("llama"), "medusa")
    heads = MedusaHeads.for_model(loaded.model, 2, 1, tree=cartesian_tree(1, 1))
    save_heads(heads, tmp_path / "heads")
    config = conversation("medusa", "tiny", {}, heads=str(tmp_path / "heads"))
    make_trainable(loaded, config)
    trainer = trainer_of(loaded, config, tmp_path / "out", 1e-3, 2)
    (group,) = trainer.eval_dataset
    batch = trainer.data_collator([group])
    labels = batch["shift_labels"]
    assert (labels == IGNORED).any()
    with torch.no_grad():
        output = loaded.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            logits_to_keep=batch["label_index"],
            use_cache=False,
            layout=layout_of(batch),
        )
    # The mean of torch leaves these labels out.
    expected = cross_entropy(output.logits[0].float(), labels)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.fixture
def fork_model(tmp_path):
    """(the folder of a tiny model with the control tokens of `apar`, the id of [Fork])."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", hidden_size=64)
    fork, _ = add_control_tokens(model, tokenizer, "apar")
    tokenizer.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base"), fork


def with_adapter(config, adapter):
    model = load_model(config.model.model_copy(update={"adapter": adapter})).model
    for module in model.modules():
        # Packed weights of bitsandbytes compute in bfloat16.
        module.support_avx512bf16_for_cpu = False
        module.state_dict()  # unpacks them
    return model


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_holds_all_that_was_trained(tmp_path, fork_model, quantization):
    """LoRA trains linear layers and the rows of control tokens.

    Loaded as `model.adapter`, it computes the logits of the trained model.
    """
    base, fork = fork_model
    training = {"weights": "lora", "epochs": 2}
    config = conversation("apar", base, training, quantization)
    loaded = load_for_training(config)
    trainer_of(loaded, config, tmp_path / "out", 1e-2).train()
    loaded.model.save_pretrained(tmp_path / "adapter")
    loaded.model.eval().set_attn_implementation("sdpa")
    adapter = str(tmp_path / "adapter")
    reloaded = with_adapter(config, adapter)
    untrained = with_adapter(config, None)
    ids = torch.tensor([[5, fork, 9, 8]])
    logits = loaded.model(ids).logits
    torch.testing.assert_close(
        reloaded(ids).logits,
        logits,
        rtol=1e-4,
        atol=1e-4,
    )
    assert (logits - untrained(ids).logits).abs().max() > 1e-2
    if quantization == "none":
        rows = reloaded.get_input_embeddings().weight
        untrained_rows = untrained.get_input_embeddings().weight
        assert not torch.equal(rows[fork], untrained_rows[fork])
        torch.testing.assert_close(
            rows[:fork],
            untrained_rows[:fork],
            rtol=0,
            atol=0,
        )
        full = {**config.training.model_dump(), "weights": "full"}
        changes = {"training": full, "model.adapter": adapter}
        # A training of all weights starts from the adapter's.
        started = load_for_training(with_changes(config, changes)).model
        torch.testing.assert_close(started.state_dict(), reloaded.state_dict())
