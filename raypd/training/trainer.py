"""transformers' Trainer over packed passes: the loss over targets or over pairs, validation and
checkpoints.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from raypd.config import PreferenceConfig, RunConfig
from raypd.models.load import LoadedModel, resolve_dtype
from raypd.run.training import TrainingProgress
from raypd.training.example import IGNORED, Example
from raypd.training.packing import Batch, Layout, pack

Passes = Sequence[list[Example]]
Tell = Callable[[TrainingProgress], None]


class PackedTrainer(Trainer):
    """Trainer whose batches are passes that `pack` made; the loss is the mean over their
    targets.
    """

    mean_targets = 1.0  # of a validation pass

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Trainer's call, which counts the targets of all workers in a step; logits are not
        kept.
        """
        loss = self._loss(
            self._losses(model, inputs), inputs, num_items_in_batch if model.training else None
        )
        return (loss, ()) if return_outputs else loss

    def _loss(
        self, losses: torch.Tensor, inputs: Batch, targets: torch.Tensor | float | None
    ) -> torch.Tensor:
        """Cross entropy (HPD, section 4.4) over all targets of the optimizer's step, or of a
        validation (None).
        """
        if targets is None:
            return losses.sum() / self.mean_targets
        # Gradients are averaged over the workers.
        return losses.sum() * self.accelerator.num_processes / targets

    @staticmethod
    def _losses(model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        """The cross entropy of each target: [targets], float32."""
        output = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            logits_to_keep=inputs["label_index"],
            layout=Layout(inputs["visible"]),
        )
        return cross_entropy(output.logits[0].float(), inputs["shift_labels"], reduction="none")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Trainer's; the mean of the losses of its passes will be the mean over all their
        targets.
        """
        passes = self.eval_dataset if eval_dataset is None else eval_dataset
        targets = [
            int((self.data_collator([group])["shift_labels"] != IGNORED).sum()) for group in passes
        ]
        self.mean_targets = sum(targets) / len(targets)
        return super().get_eval_dataloader(eval_dataset)


class PreferenceTrainer(PackedTrainer):
    """PackedTrainer of a preference round: every pass is a pair, the best and the worst answer to a
    prompt.
    """

    preference: PreferenceConfig

    def _loss(
        self, losses: torch.Tensor, inputs: Batch, targets: torch.Tensor | float | None
    ) -> torch.Tensor:
        """BoNBoN's loss of a pair (PASTA, section 4, the one displayed equation):

            - alpha log p(best) + (1 - alpha) (log p(best) / p(worst) - log p0(best) / p0(worst) - 1
              / beta)^2

        log p is the sum over the decoded tokens, not normalised by length; p0 is the model before
        the round.
        """
        alpha, beta = self.preference.alpha, self.preference.beta
        logprobs = self._logprobs(losses, inputs)
        best, worst = logprobs - inputs["initial"]
        return -alpha * logprobs[0] + (1 - alpha) * (best - worst - 1 / beta) ** 2

    @staticmethod
    def _logprobs(losses: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """The log-probability of each answer: [2]."""
        # Targets of the first.
        n = int((inputs["label_index"] < inputs["visible"][0].shape[1]).sum())
        return -torch.stack([losses[:n].sum(), losses[n:].sum()])

    @torch.no_grad()
    def keep_initial(self, pairs: Iterable[list[Example]]) -> None:
        """Stores every answer's log-probability under the model before the round, so that no copy
        of it is kept.
        """
        self.model.eval()
        for pair in pairs:
            inputs = self._prepare_inputs(pack(pair))
            # As in a step.
            with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
                logprobs = self._logprobs(self._losses(self.model, inputs), inputs)
            for example, logprob in zip(pair, logprobs.tolist(), strict=True):
                example.initial = logprob


class _Report(TrainerCallback):
    def __init__(self, tell: Tell) -> None:
        self.tell, self.began = tell, time.monotonic()
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.before = (0, 0)  # steps and tokens of earlier sessions

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before = state.global_step, int(state.num_input_tokens_seen)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        measured = logs.get("loss"), logs.get("eval_loss")
        self.loss, self.validation_loss = (
            logs.get("loss", self.loss),
            logs.get("eval_loss", self.validation_loss),
        )
        done, tokens = (
            state.global_step - self.before[0],
            int(state.num_input_tokens_seen) - self.before[1],
        )
        losses, seconds = (self.loss, self.validation_loss), time.monotonic() - self.began
        self.tell(
            TrainingProgress(
                state.global_step, state.max_steps, *losses, done, tokens, seconds, measured
            )
        )


def make_trainer(
    loaded: LoadedModel,
    config: RunConfig,
    train: Passes,
    validation: Passes,
    folder: Path,
    rate: float,
    tell: Tell,
) -> PackedTrainer:
    """A trainer over groups of examples, each a pass; its checkpoints are under `folder`."""
    training = config.training
    # Less than 1: Trainer takes it as a share of all steps.
    every = math.nextafter(1 / training.evaluations, 0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=training.accumulate,
        num_train_epochs=training.epochs,
        learning_rate=rate,
        lr_scheduler_type=training.schedule,
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        bf16=resolve_dtype(config.model.dtype, loaded.device) == torch.bfloat16,
        use_cpu=loaded.device.type == "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=0.01,
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
        label_names=["shift_labels"],
        prediction_loss_only=True,
        dataloader_pin_memory=False,
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
        data_collator=lambda groups: pack(
            groups[0], getattr(getattr(loaded.model, "heads", None), "count", 0)
        ),
        callbacks=[_Report(tell)],
    )
    trainer.remove_callback(PrinterCallback)
    # compute_loss divides by the targets of the whole step, or is the mean over its passes
    trainer.model_accepts_loss_kwargs = training.preference is None
    if isinstance(trainer, PreferenceTrainer):
        assert training.preference is not None
        trainer.preference = training.preference
        trainer.keep_initial([*train, *validation])
    if training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(training.patience))
    return trainer
