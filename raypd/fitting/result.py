"""fit.json: what was trained, how right it is, what it costs, and which score is recommended."""

from dataclasses import dataclass, field
from typing import Any

from raypd.estimation import Figure
from raypd.evaluation import AttributeScore

# The names of the scores of models that are not trained.
AS_CONFIGURED = "as configured"
TEACHER = "teacher"


# An attribute whose answers have one of these faults (`report.answer_check`) says little.
_SAYS_LITTLE = ("same", "null", "copied")


@dataclass(kw_only=True)
class AttributeResult:
    """How right one attribute of a model is on the test part."""

    score: AttributeScore
    # What is wrong with its answers whatever the labels are, in words, by the kind of the fault.
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def is_worthless(self) -> bool:
        """Whether its answers are one value everywhere, or worse than the most frequent label.

        An attribute that is right everywhere may well have one value everywhere.
        """
        if self.score.right == self.score.values:
            return False
        if self.score.right < self.score.frequent_right:
            return True
        # A value that is mostly right may be the same in most documents.
        says_little = not self.faults.keys().isdisjoint(_SAYS_LITTLE)
        return says_little and self.score.right == self.score.frequent_right


@dataclass(kw_only=True)
class CandidateScore:
    """One model on the test part."""

    name: str
    method: str
    labels: int = 0  # documents that it was trained on
    measure: str = ""  # the name that `raypd evaluate` has for this F1
    f1: Figure | None = None  # None if it could not be measured; `error` says why
    attributes: list[AttributeResult] = field(default_factory=list)  # the lowest F1 first
    documents_per_second: Figure | None = None  # of one worker
    # For decoding and for a server's tokens; None if neither machine nor server has a price.
    usd_per_1000: Figure | None = None
    corpus_hours: Figure | None = None  # on one node
    corpus_usd: Figure | None = None
    training_seconds: float = 0.0
    training_usd: float = 0.0
    # Of the model's own confidences, then of those that were calibrated on validation if that
    # improves them.
    calibration_error: list[float] = field(default_factory=list)
    # (confidence, share right, values) per tenth, in the same order.
    reliability: list[list[list[float]]] = field(default_factory=list)
    # Dotted keys that make the model from the user's configuration.
    changes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def holds(self, floor: float) -> bool:
        """Return whether the low end of the F1's 95% interval is at least the floor."""
        return self.f1 is not None and self.f1.low is not None and self.f1.low >= floor


@dataclass(kw_only=True)
class FitResult:
    """What `raypd fit` found."""

    path: str
    identity: str  # digest of the keys that decide the parts and their labels
    source: str = ""  # the same without the number of documents and the shares
    floor: float
    gold: bool  # whether the labels are others than a model's answers
    task: str
    model: str
    id_column: str | None = None  # of the user's input; that of its runs is `id`
    documents: dict[str, int] = field(default_factory=dict)  # of train, validation, test
    corpus_documents: Figure | None = None
    # The models that are not trained, then the candidates with all labels.
    scores: list[CandidateScore] = field(default_factory=list)
    curve: list[CandidateScore] = field(default_factory=list)  # the candidates with fewer labels
    recommended: str | None = None  # the name of a score
    configuration: str | None = None  # the YAML that was written
    # The score with the best F1 if none is recommended, and the YAML that was written for it.
    best: str | None = None
    best_configuration: str | None = None
    stopped: str | None = None  # why it ended early
    usd: float = 0.0  # of all its runs and trainings

    @property
    def measure(self) -> str:
        """What F1 means here, in words."""
        name = "strict F1"
        for score in self.scores:
            if score.measure:
                name = score.measure
                break
        return name if self.gold else f"{name}, as agreement with the teacher"

    @property
    def choice(self) -> CandidateScore | None:
        """The recommended score."""
        for score in self.scores:
            if score.name == self.recommended:
                return score
        return None

    @property
    def best_score(self) -> CandidateScore | None:
        """The score with the best F1, whatever the floor is; None if none was measured."""
        measured = [score for score in self.scores if score.f1 is not None]
        return max(measured, key=lambda score: score.f1.value if score.f1 else 0.0, default=None)
