"""`training.trainer`: fields of transformers' TrainingArguments over raypd's own."""

import pytest

from raypd.errors import ConfigError
from raypd.training.arguments import check_arguments, training_arguments
from tests.runs import run_config
from tests.tiny import tiny_model
from tests.training.data import loaded_tiny


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("weight_decays", 0.1, "no such field; did you mean 'weight_decay'"),
        ("learning_rate", 0.1, "set training.learning_rates instead"),
        ("label_names", [], "raypd sets this field itself"),
        ("lr_scheduler_type", "cosin", "cosin"),
    ],
)
def test_a_field_that_cannot_be_set_is_named(field, value, words):
    with pytest.raises(ConfigError, match=words) as error:
        check_arguments({field: value})
    assert str(error.value).startswith("training.trainer")


LOADED = loaded_tiny(tiny_model("llama"))


def arguments(tmp_path, **trainer):
    config = run_config(
        training={
            "trainer": trainer,
            "evaluations": 2,
            "seed": 3,
        }
    )
    return training_arguments(LOADED, config, tmp_path, 0.5)


def test_fields_are_passed_over_the_defaults(tmp_path):
    default = arguments(tmp_path)
    changed = arguments(tmp_path, weight_decay=0.1, warmup_steps=0.2, optim="sgd")
    assert default.lr_scheduler_type == changed.lr_scheduler_type == "cosine"
    assert default.warmup_steps == 0.03
    assert changed.warmup_steps == 0.2
    assert default.weight_decay == 0.0
    assert changed.weight_decay == 0.1
    assert changed.optim == "sgd"
    assert changed.learning_rate == 0.5
    assert changed.seed == 3


def test_a_model_s_own_checkpointing_is_not_enabled_twice(tmp_path):
    assert not arguments(tmp_path, gradient_checkpointing=True).gradient_checkpointing
