"""transformers' Trainer over packed passes.

This module adds the loss over targets or over pairs, validation, and reports of the progress.
"""

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
)

from raypd.config import PreferenceConfig, RunConfig
from raypd.decoding import is_hybrid
from raypd.models import LoadedModel
from raypd.run import TrainingProgress
from raypd.training.arguments import training_arguments
from raypd.training.example import IGNORED, Example
from raypd.training.packing import Batch, layout_of, pack

Passes = Sequence[list[Example]]
Notify = Callable[[TrainingProgress], None]


class PackedTrainer(Trainer):
    """A Trainer whose batches are passes that `pack` made; the loss is the mean over targets."""

    # The average number of targets per validation pass; the loss of such a pass is divided by it.
    mean_targets = 1.0

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a pass; Trainer calls this.

        Args:
            model: The model, as Trainer wrapped it.
            inputs: What `pack` returned.
            return_outputs: Whether Trainer expects outputs, too. Logits are not kept.
            num_items_in_batch: Targets of all workers in the optimizer's step.

        Returns:
            A scalar, or (scalar, ()).
        """
        targets = num_items_in_batch if model.training else None
        loss = self._loss(self._losses(model, inputs), inputs, targets)
        return (loss, ()) if return_outputs else loss

    def _loss(
        self, losses: torch.Tensor, inputs: Batch, targets: torch.Tensor | float | None
    ) -> torch.Tensor:
        """Return the cross entropy (HPD, section 4.4) per target of the optimizer's step.

        In a validation `targets` is None, and the loss is per average target of a pass.
        """
        if targets is None:
            return losses.sum() / self.mean_targets
        # Gradients are averaged over the workers, and `targets` counts those of all workers.
        return losses.sum() * self.accelerator.num_processes / targets

    @staticmethod
    def _losses(model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        """Return the cross entropy of each target: [targets], float32."""
        output = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            logits_to_keep=inputs["label_index"],
            layout=layout_of(inputs),
        )
        return cross_entropy(output.logits[0].float(), inputs["shift_labels"], reduction="none")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return Trainer's loader of validation passes.

        It also sets `mean_targets`, so that the mean over the losses of the passes, which Trainer
        computes, is the mean over all their targets.
        """
        passes = self.eval_dataset if eval_dataset is None else eval_dataset
        total = 0
        for group in passes:
            labels = self.data_collator([group])["shift_labels"]
            total += int((labels != IGNORED).sum())
        self.mean_targets = total / len(passes)
        return super().get_eval_dataloader(eval_dataset)


class PreferenceTrainer(PackedTrainer):
    """A PackedTrainer whose passes are pairs: the best and the worst answer to a prompt."""

    preference: PreferenceConfig

    def _loss(
        self, losses: torch.Tensor, inputs: Batch, targets: torch.Tensor | float | None
    ) -> torch.Tensor:
        """Return BoNBoN's loss of a pair (PASTA, section 4, the one displayed equation).

            - alpha log p(best) + (1 - alpha) (log p(best) / p(worst) - log p0(best) / p0(worst) - 1
              / beta)^2

        log p is the sum over the decoded tokens, not normalised by length; p0 is the model before
        the round.
        """
        alpha = self.preference.alpha
        beta = self.preference.beta
        logprobs = self._logprobs(losses, inputs)
        best, worst = logprobs - inputs["initial"]
        return -alpha * logprobs[0] + (1 - alpha) * (best - worst - 1 / beta) ** 2

    @staticmethod
    def _logprobs(losses: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """Return the log-probability of each answer: [2]."""
        first_answer_end = inputs["visible"][0].shape[1]
        first_targets = int((inputs["label_index"] < first_answer_end).sum())
        return -torch.stack([losses[:first_targets].sum(), losses[first_targets:].sum()])

    @torch.no_grad()
    def keep_initial(self, pairs: Iterable[list[Example]]) -> None:
        """Store the log-probability of every answer under the model before the round.

        The round then needs no copy of that model.
        """
        self.model.eval()
        for pair in pairs:
            inputs = self._prepare_inputs(pack(pair))
            # The precision has to be that of a training step.
            with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
                logprobs = self._logprobs(self._losses(self.model, inputs), inputs)
            for example, logprob in zip(pair, logprobs.tolist(), strict=True):
                example.initial = logprob


class _Report(TrainerCallback):
    """Reports the progress whenever Trainer logs losses."""

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.began = time.monotonic()
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.earlier_steps = 0  # of earlier sessions
        self.earlier_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.earlier_steps = state.global_step
        self.earlier_tokens = int(state.num_input_tokens_seen)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.loss = logs.get("loss", self.loss)
        self.validation_loss = logs.get("eval_loss", self.validation_loss)
        progress = TrainingProgress(
            step=state.global_step,
            steps=state.max_steps,
            loss=self.loss,
            validation_loss=self.validation_loss,
            done=state.global_step - self.earlier_steps,
            tokens=int(state.num_input_tokens_seen) - self.earlier_tokens,
            seconds=time.monotonic() - self.began,
            measured=(logs.get("loss"), logs.get("eval_loss")),
        )
        self.notify(progress)


def make_trainer(
    loaded: LoadedModel,
    config: RunConfig,
    train: Passes,
    validation: Passes,
    folder: Path,
    rate: float,
    notify: Notify,
) -> PackedTrainer:
    """Build the trainer of a model.

    Args:
        loaded: The model, as `make_trainable` left it.
        config: The configuration, whose section `training` has the settings.
        train: The passes of an epoch, as groups of examples.
        validation: The passes of a validation.
        folder: Where the checkpoints are written.
        rate: The learning rate.
        notify: Called with the progress.
    """
    training = config.training
    has_pairs = training.preference is not None
    arguments = training_arguments(loaded, config, folder, rate)
    heads = getattr(getattr(loaded.model, "heads", None), "count", 0)
    recurrent = is_hybrid(loaded.model)

    def collate(groups: list[list[Example]]) -> Batch:
        (group,) = groups  # a batch is one pass
        return pack(group, heads, recurrent)

    trainer_class = PreferenceTrainer if has_pairs else PackedTrainer
    trainer = trainer_class(
        model=loaded.model,
        args=arguments,
        train_dataset=list(train),
        eval_dataset=list(validation),
        data_collator=collate,
        callbacks=[_Report(notify)],
    )
    trainer.remove_callback(PrinterCallback)
    # True: `compute_loss` divides by the targets of the whole step. False: Trainer takes the mean
    # over the passes of the step.
    trainer.model_accepts_loss_kwargs = not has_pairs
    if isinstance(trainer, PreferenceTrainer):
        assert training.preference is not None
        trainer.preference = training.preference
        trainer.keep_initial([*train, *validation])
    if training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(training.patience))
    return trainer
