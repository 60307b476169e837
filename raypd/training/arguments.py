"""The settings of transformers' Trainer: raypd's own, and those of `training.trainer`."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from raypd.config import RunConfig
from raypd.errors import ConfigError, did_you_mean
from raypd.models import LoadedModel, resolve_dtype

# What `training.trainer` changes.
_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # below 1 it is a share of all steps
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
# Fields that other keys set.
_OTHER_KEYS = {
    "num_train_epochs": "training.epochs",
    "learning_rate": "training.learning_rates",
    "per_device_train_batch_size": "training.batch_size",
    "eval_steps": "training.evaluations",
    "save_steps": "training.evaluations",
    "seed": "training.seed",
    "fsdp": "training.sharding",
    "bf16": "model.dtype",
    "output_dir": "output.path",
}
# Fields on which the batches, the loss, the checkpoints or the workers depend.
_FIXED = {
    "data_seed",
    "deepspeed",
    "do_eval",
    "do_predict",
    "do_train",
    "eval_strategy",
    "fp16",
    "fsdp_config",
    "gradient_checkpointing_kwargs",
    "hub_token",
    "include_num_input_tokens_seen",
    "label_names",
    "load_best_model_at_end",
    "local_rank",
    "max_steps",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "push_to_hub",
    "remove_unused_columns",
    "resume_from_checkpoint",
    "save_strategy",
    "use_cpu",
}


def check_arguments(options: dict[str, Any]) -> None:
    """Check the fields of `training.trainer`.

    Args:
        options: The fields of TrainingArguments that the configuration sets.

    Raises:
        ConfigError: If one does not exist, is set by another key, or has a wrong value.
    """
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    for name in options:
        if name in _OTHER_KEYS:
            raise ConfigError(f"training.trainer.{name}: set {_OTHER_KEYS[name]} instead")
        if name in _FIXED:
            raise ConfigError(f"training.trainer.{name}: raypd sets this field itself: remove it")
        if name not in names:
            hint = did_you_mean(name, names - _FIXED - _OTHER_KEYS.keys())
            raise ConfigError(
                f"training.trainer.{name}: transformers' TrainingArguments has no such field; "
                f"{hint or 'docs/training.md lists the usual ones'}"
            )
    try:
        # With `use_cpu`, the values can be checked on a machine without a GPU, too.
        TrainingArguments(use_cpu=True, **{**_DEFAULTS, **options})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.trainer: {error}") from None


def training_arguments(
    loaded: LoadedModel, config: RunConfig, folder: Path, rate: float
) -> TrainingArguments:
    """Return transformers' settings of a training.

    Args:
        loaded: The model that is trained.
        config: The configuration.
        folder: Where checkpoints are kept.
        rate: The learning rate.
    """
    training = config.training
    options = {**_DEFAULTS, **training.trainer}
    # `make_trainable` has enabled it, on the model inside Medusa heads or an adapter.
    options.pop("gradient_checkpointing", None)
    # Trainer takes only a number below 1 as a share of all steps.
    interval = math.nextafter(1 / training.evaluations, 0)
    own: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "num_train_epochs": training.epochs,
        "learning_rate": rate,
        "bf16": resolve_dtype(config.model.dtype, loaded.device) == torch.bfloat16,
        "use_cpu": loaded.device.type == "cpu",
        "eval_strategy": "steps",
        "eval_steps": interval,
        "save_steps": interval,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "logging_steps": 0.01,
        "include_num_input_tokens_seen": "all",
        "remove_unused_columns": False,
        "label_names": ["shift_labels"],
        "prediction_loss_only": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": training.seed,
        "fsdp": training.sharding == "fsdp",
    }
    return TrainingArguments(**{**own, **options})
