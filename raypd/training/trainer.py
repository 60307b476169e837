"""transformers' Trainer over packed passes: weights, LoRA, loss at the targets alone or over pairs, validation and
checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from raypd.config import PreferenceConfig, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS
from raypd.models.load import LoadedModel, load_model, resolve_device, resolve_dtype
from raypd.models.medusa_heads import load_heads
from raypd.run.training import TrainingProgress
from raypd.training import attention
from raypd.training.example import Example
from raypd.training.heads import HeadsOnModel
from raypd.training.packing import Batch, layout, pack


def load_for_training(config: RunConfig) -> LoadedModel:
    """The model with the weights that are trained: all of them in float32, or LoRA matrices beside frozen ones.

    Raises:
        ModelError: as `load_model`, and for models whose attention the training pass does not have.
    """
    set_seed(config.training.seed)  # LoRA matrices are drawn
    full = config.training.weights == "full" and not REGISTRY[config.decoding.method].heads
    if full and config.model.quantization != "none":
        raise ModelError("training.weights full: quantized weights cannot be trained; use lora, or quantization none")
    if config.model.quantization in ("w8a8", "fp8"):
        kind = config.model.quantization
        raise ModelError(f"model.quantization {kind} is for decoding: train with none, or nf4 or int8 and lora")
    device = resolve_device(config.model.device)
    dtype = "float32" if full else str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    loaded = load_model(config.model.model_copy(update={"dtype": dtype, "adapter": None}))
    _check_attention(loaded.model, loaded.name)
    make_trainable(loaded, config)
    return loaded


def make_trainable(loaded: LoadedModel, config: RunConfig) -> None:
    """Gives a loaded model the attention of training passes, in place, and the weights that are trained gradients."""
    AttentionInterface.register(attention.NAME, attention.attention)
    loaded.model.set_attn_implementation(attention.NAME)
    if REGISTRY[config.decoding.method].heads:
        loaded.model = HeadsOnModel(loaded.model, load_heads(str(config.decoding.heads), loaded.model))
        return
    if config.training.weights == "full":
        loaded.model.requires_grad_(True)
    else:
        loaded.model = _with_lora(loaded, config)
    if config.training.gradient_checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.model.enable_input_require_grads()


def _with_lora(loaded: LoadedModel, config: RunConfig) -> Any:
    """LoRA matrices on all linear layers, and trainable embedding rows for the method's control tokens."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    training, model = config.training, loaded.model
    if config.model.quantization != "none":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=training.gradient_checkpointing)
        for module in model.modules():  # what bitsandbytes packs for a CPU, in evaluation, has no gradients
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
                module.state_dict()  # which unpacks the weight
    vocabulary = loaded.tokenizer.get_vocab()
    control = [vocabulary[name] for name in CONTROL_TOKENS.get(config.decoding.method, ()) if name in vocabulary]
    lora = LoraConfig(
        r=training.lora_rank,
        lora_alpha=training.lora_alpha,
        lora_dropout=training.lora_dropout,
        target_modules="all-linear",
        trainable_token_indices=control or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.name,
    )
    return get_peft_model(model, lora)


def _check_attention(model: PreTrainedModel, name: str) -> None:
    text = model.config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    layers = getattr(text, "layer_types", None)
    windows = "sliding_attention" in layers if layers else bool(getattr(text, "sliding_window", None))
    windows &= getattr(text, "use_sliding_window", True)
    if softcap is not None or windows:
        feature = "a soft cap on attention logits" if softcap is not None else "layers with sliding-window attention"
        raise ModelError(f"model {name!r} has {feature}: raypd decodes it, but cannot train it yet")


class PackedTrainer(Trainer):
    """Trainer whose batches are passes that `pack` made; the loss is the mean over their targets."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Trainer's call; the loss itself is `_loss`."""
        loss, output = self._loss(model, inputs, num_items_in_batch)
        return (loss, output) if return_outputs else loss

    def _loss(self, model: torch.nn.Module, inputs: Batch, targets: torch.Tensor | int | None) -> tuple[Any, Any]:
        """Cross entropy (HPD, section 4.4) over all targets of the optimizer's step, and the model's output."""
        output, losses = self._losses(model, inputs)
        if targets is None:
            return losses.mean(), output
        # `targets` counts those of all workers, over which gradients are then averaged.
        return losses.sum() * self.accelerator.num_processes / targets, output

    @staticmethod
    def _losses(model: torch.nn.Module, inputs: Batch) -> tuple[Any, torch.Tensor]:
        """The model's output, and the cross entropy of each target: [targets], float32."""
        output = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            logits_to_keep=inputs["label_index"],
            layout=layout(inputs),
        )
        labels = inputs["shift_labels"]  # the name by which Trainer counts each of them as one item
        return output, cross_entropy(output.logits[0].float(), labels, reduction="none")

    def prediction_step(
        self, model: torch.nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of a validation pass; logits are not kept."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None


class PreferenceTrainer(PackedTrainer):
    """PackedTrainer of a preference round: every pass is a pair, the best and the worst answer to a prompt."""

    preference: PreferenceConfig

    def _loss(self, model: torch.nn.Module, inputs: Batch, targets: torch.Tensor | int | None) -> tuple[Any, Any]:
        """BoNBoN's loss of a pair (PASTA, section 4, the one displayed equation):

            - alpha log p(best) + (1 - alpha) (log p(best) / p(worst) - log p0(best) / p0(worst) - 1 / beta)^2

        log p is the sum over the decoded tokens, not their mean: neither term is normalised by length. p0 is the model
        before the round.
        """
        alpha, beta = self.preference.alpha, self.preference.beta
        output, logprobs = self._logprobs(model, inputs)
        best, worst = logprobs - inputs["initial"]
        return -alpha * logprobs[0] + (1 - alpha) * (best - worst - 1 / beta) ** 2, output

    def _logprobs(self, model: torch.nn.Module, inputs: Batch) -> tuple[Any, torch.Tensor]:
        """The model's output, and the log-probability of each answer: [2]."""
        output, losses = self._losses(model, inputs)
        places = inputs["label_index"] - inputs["shared"]
        answer = torch.bucketize(places, inputs["lengths"].cumsum(0), right=True)
        return output, losses.new_zeros(2).index_add(0, answer, -losses)

    @torch.no_grad()
    def keep_initial(self, pairs: Iterable[list[Example]]) -> None:
        """Stores every answer's log-probability under the model before the round, so that no copy of it is kept."""
        self.model.eval()
        for pair in pairs:
            inputs = self._prepare_inputs(pack(pair))
            with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):  # as in a step
                _, logprobs = self._logprobs(self.model, inputs)
            for example, logprob in zip(pair, logprobs.tolist(), strict=True):
                example.initial = logprob


class _Report(TrainerCallback):
    def __init__(self, tell: Callable[[TrainingProgress], None]) -> None:
        self.tell, self.began = tell, time.monotonic()
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.before = (0, 0)  # steps and tokens of earlier sessions

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.before = state.global_step, int(state.num_input_tokens_seen)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any
    ) -> None:
        self.loss = logs.get("loss", self.loss)
        self.validation_loss = logs.get("eval_loss", self.validation_loss)
        seconds = time.monotonic() - self.began
        step, steps = state.global_step, state.max_steps
        tokens = int(state.num_input_tokens_seen) - self.before[1]
        measured = logs.get("loss"), logs.get("eval_loss")
        done = step - self.before[0]
        self.tell(TrainingProgress(step, steps, self.loss, self.validation_loss, done, tokens, seconds, measured))


def make_trainer(
    loaded: LoadedModel,
    config: RunConfig,
    train: Sequence[list[Example]],
    validation: Sequence[list[Example]],
    folder: Path,
    learning_rate: float,
    tell: Callable[[TrainingProgress], None],
) -> PackedTrainer:
    """A trainer over groups of examples; its checkpoints are under `folder`."""
    training = config.training
    steps = max(1, math.ceil(math.ceil(len(train) / training.accumulate) * training.epochs))
    every = max(1, math.ceil(steps / training.evaluations))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=training.accumulate,
        num_train_epochs=training.epochs,
        learning_rate=learning_rate,
        lr_scheduler_type=training.schedule,
        warmup_steps=math.ceil(steps * training.warmup),
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        optim="adamw_torch_fused",
        bf16=resolve_dtype(config.model.dtype, loaded.device) == torch.bfloat16,
        use_cpu=loaded.device.type == "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, min(10, steps // 50)),
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
        label_names=["shift_labels"],
        prediction_loss_only=True,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        seed=training.seed,
        fsdp=training.sharding == "fsdp",
    )
    kind = PackedTrainer if training.preference is None else PreferenceTrainer
    trainer = kind(
        model=loaded.model,
        args=arguments,
        train_dataset=list(train),
        eval_dataset=list(validation),
        data_collator=lambda groups: pack(groups[0], getattr(getattr(loaded.model, "heads", None), "count", 0)),
        callbacks=[_Report(tell)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = True  # compute_loss divides by the targets of the whole step
    if training.preference is not None:
        assert isinstance(trainer, PreferenceTrainer)
        trainer.model_accepts_loss_kwargs = False  # the mean over the passes of the step
        trainer.preference = training.preference
        trainer.keep_initial([*train, *validation])
    if training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(training.patience))
    return trainer
