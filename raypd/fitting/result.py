"""fit.json: what was trained, how right it is and what it costs, and which one is recommended."""

from dataclasses import dataclass, field
from typing import Any

from raypd.run.records import Figure

AS_CONFIGURED, TEACHER = "as configured", "teacher"  # names of scores of what is not trained


@dataclass(kw_only=True)
class CandidateScore:
    """One model on the test part."""

    name: str
    method: str
    labels: int = 0  # documents that it was trained on
    measure: str = ""  # what f1 is, as `raypd evaluate` names it
    f1: Figure | None = None  # None where it could not be made; `error` says why
    documents_per_second: Figure | None = None  # of one worker
    # Of decoding and a server's tokens; None where machine and server have no price.
    usd_per_1000: Figure | None = None
    corpus_hours: Figure | None = None  # on one node
    corpus_usd: Figure | None = None
    training_seconds: float = 0.0
    training_usd: float = 0.0
    # As the model has it, calibrated on validation.
    calibration_error: list[float] = field(default_factory=list)
    # Of both: (confidence, share right, values)
    reliability: list[list[list[float]]] = field(default_factory=list)
    # Keys, dotted, of the user's configuration.
    changes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def holds(self, floor: float) -> bool:
        """Whether its F1 is surely (the low end of the 95% interval) at the floor or above."""
        return self.f1 is not None and self.f1.low is not None and self.f1.low >= floor


@dataclass(kw_only=True)
class FitResult:
    path: str
    identity: str  # digest of what decides which documents are in which part, and their labels
    source: str = ""  # the same without how many documents and which shares
    floor: float
    gold: bool  # labels are not the teacher's answers
    task: str
    model: str
    documents: dict[str, int] = field(default_factory=dict)  # of train, validation, test
    corpus_documents: Figure | None = None
    # First of what is not trained; with all labels.
    scores: list[CandidateScore] = field(default_factory=list)
    curve: list[CandidateScore] = field(default_factory=list)  # the candidates with fewer labels
    recommended: str | None = None  # a score's name
    configuration: str | None = None  # the YAML that was written
    stopped: str | None = None  # why it ended early
    usd: float = 0.0  # of all its runs and trainings

    @property
    def measure(self) -> str:
        """What F1 means here, in words."""
        name = next((score.measure for score in self.scores if score.measure), "strict F1")
        return name if self.gold else f"{name}, as agreement with the teacher"

    @property
    def choice(self) -> CandidateScore | None:
        return next((score for score in self.scores if score.name == self.recommended), None)
