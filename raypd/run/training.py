"""training.json: what a training did."""

import time
from dataclasses import dataclass, field
from typing import Any

# (step, loss of the latest steps, validation loss)
Curve = list[tuple[int, float | None, float | None]]


@dataclass
class TrainingData:
    documents: int
    validation_documents: int
    tokens: int  # of one epoch, an instruction counted once a pass
    targets: int  # of one epoch
    skipped: dict[str, int]  # reason -> how often something was left out
    digest: str  # of the documents and their labels


@dataclass
class TrainingAttempt:
    """One learning rate."""

    learning_rate: float
    validation_loss: float  # the lowest, of the weights that were kept
    steps: int
    tokens: int  # that went through the model
    curve: Curve  # None where a loss was not measured


@dataclass
class TrainingRecord:
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
        """The learning rate whose weights were kept."""
        return min(self.attempts, key=lambda attempt: attempt.validation_loss)

    @property
    def tokens(self) -> int:
        return sum(attempt.tokens for attempt in self.attempts)

    def describe(self) -> str:
        data = self.data
        best = self.best
        lines = [
            f"{data.documents:,} documents, {data.targets:,} targets an epoch; "
            f"{best.steps:,} steps at "
            f"{best.learning_rate:g}: validation loss {best.validation_loss:.4f} on "
            f"{data.validation_documents:,} "
            "documents"
        ]
        lines += [f"left out: {count:,} x {reason}" for reason, count in data.skipped.items()]
        lines.append(f"{self.tokens:,} tokens in {self.seconds:,.0f} s, ${self.usd:.4f}")
        key = {"adapter": "model.adapter", "heads": "decoding.heads"}.get(
            self.weights.rpartition("/")[2], "model.name"
        )
        lines.append(f"to decode with it: {key}={self.weights}")
        losses = [(step, loss) for step, _, loss in best.curve if loss is not None]
        if len(losses) > 1 and best.validation_loss >= losses[0][1]:
            lines.append(
                f"validation loss never fell below that of step {losses[0][0]:,}: more labels, "
                "a lower rate?"
            )
        if key != "decoding.heads":  # which change no answer
            lines.append(
                "answers were not scored: decode labelled documents kept apart, `raypd "
                "evaluate RUN LABELS`;"
            )
            lines.append(
                "of an extraction `raypd fit` measures F1, too, and what more labels would do"
            )
        return "\n".join(lines)


@dataclass
class TrainingProgress:
    step: int
    steps: int
    loss: float | None  # of the latest steps
    validation_loss: float | None
    done: int  # steps of this session
    tokens: int  # that went through the model in `seconds`
    seconds: float
    # Losses, where this step measured them.
    measured: tuple[float | None, float | None] = (None, None)

    def describe(self) -> str:
        parts = [f"step {self.step:,} of {self.steps:,}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += (
            [f"validation loss {self.validation_loss:.4f}"]
            if self.validation_loss is not None
            else []
        )
        remaining = self.seconds / self.done * (self.steps - self.step) if self.done else 0.0
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return ", ".join(
            [
                *parts,
                f"{rate:,.0f} tokens/s",
                f"{int(remaining) // 60}:{int(remaining) % 60:02d} left",
            ]
        )
