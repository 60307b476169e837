"""training.json: the outcome of a training."""

import time
from dataclasses import dataclass, field
from typing import Any

# (step, loss of the latest steps, validation loss); a loss that was not measured is None.
Curve = list[tuple[int, float | None, float | None]]


@dataclass
class TrainingData:
    """The documents of a training and what was left out of them."""

    documents: int
    validation_documents: int
    tokens: int  # per epoch; a shared instruction counts once per pass
    targets: int  # per epoch
    skipped: dict[str, int]  # how often something was left out, by reason
    digest: str  # of the documents and their labels


@dataclass
class TrainingAttempt:
    """A training with one learning rate."""

    learning_rate: float
    validation_loss: float  # the lowest, which is that of the saved weights
    steps: int
    tokens: int  # tokens that went through the model
    curve: Curve


@dataclass
class TrainingRecord:
    """A training: its data, attempts, weights and cost."""

    method: str
    data: TrainingData
    attempts: list[TrainingAttempt]
    weights: str  # folder of the adapter, heads or model
    seconds: float  # of all sessions so far
    usd: float  # of all sessions so far
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ended: float = field(default_factory=time.time)

    @property
    def best(self) -> TrainingAttempt:
        """The attempt with the lowest validation loss, whose weights were saved."""
        return min(self.attempts, key=lambda attempt: attempt.validation_loss)

    @property
    def tokens(self) -> int:
        """The tokens that went through the model in all attempts."""
        return sum(attempt.tokens for attempt in self.attempts)

    @property
    def weights_key(self) -> str:
        """The configuration key that makes raypd decode with the weights."""
        name = self.weights.rpartition("/")[2]
        return {"adapter": "model.adapter", "heads": "decoding.options.heads"}.get(
            name, "model.name"
        )

    def describe(self) -> str:
        """Describe the training and what to do next, in several lines."""
        data = self.data
        best = self.best
        lines = [
            f"{data.documents:,} documents, {data.targets:,} targets per epoch; {best.steps:,} "
            f"steps at {best.learning_rate:g}: validation loss {best.validation_loss:.4f} on "
            f"{data.validation_documents:,} documents"
        ]
        for reason, count in data.skipped.items():
            lines.append(f"left out: {count:,} x {reason}")
        lines.append(f"{self.tokens:,} tokens in {self.seconds:,.0f} s, ${self.usd:.4f}")
        lines.append(f"to decode with it: {self.weights_key}={self.weights}")
        losses = [(step, loss) for step, _, loss in best.curve if loss is not None]
        if len(losses) > 1 and best.validation_loss >= losses[0][1]:
            lines.append(
                f"validation loss never fell below that of step {losses[0][0]:,}. Try more labels "
                "or a lower learning rate"
            )
        # Heads change the speed of decoding but no answers, so there is nothing to score.
        if self.weights_key != "decoding.options.heads":
            lines.append(
                "answers were not scored. Extract labelled documents that were not used for "
                "training, and run `raypd evaluate RUN LABELS`;"
            )
            lines.append(
                "for an extraction, `raypd fit` also measures F1 and estimates how much more "
                "labels would help"
            )
        return "\n".join(lines)


@dataclass
class TrainingProgress:
    """How far a training has come."""

    step: int
    steps: int
    loss: float | None  # of the latest steps
    validation_loss: float | None
    done: int  # steps of this session
    tokens: int  # tokens that went through the model in `seconds`
    seconds: float
    # (loss, validation loss), if this step measured them.
    measured: tuple[float | None, float | None] = (None, None)

    def describe(self) -> str:
        """Describe the progress in one line."""
        parts = [f"step {self.step:,} of {self.steps:,}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.validation_loss is not None:
            parts.append(f"validation loss {self.validation_loss:.4f}")
        rate = self.tokens / self.seconds if self.seconds else 0.0
        parts.append(f"{rate:,.0f} tokens/s")
        if self.done:
            remaining = int(self.seconds / self.done * (self.steps - self.step))
            parts.append(f"{remaining // 60}:{remaining % 60:02d} left")
        return ", ".join(parts)
