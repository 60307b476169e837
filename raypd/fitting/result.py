"""fit.json: what was trained, how right it is and what it costs, and which one is recommended."""

from __future__ import annotations

from dataclasses import dataclass, field

from raypd.run.records import Figure

AS_CONFIGURED, TEACHER = "as configured", "teacher"  # names of rows that are not trained


@dataclass(kw_only=True)
class Score:
    """One model on the test part. changes: keys, dotted, that make the user's configuration this one.

    labels: documents that it was trained on. measure: what f1 is, as `raypd evaluate` names it. f1: None where it could
    not be made, `error` says why. usd_per_1000: of decoding, None where the machine has no price. corpus_hours, corpus_usd: on one node.
    training_seconds, training_usd: of its training alone.
    """

    name: str
    method: str
    labels: int = 0
    measure: str = ""
    f1: Figure | None = None
    documents_per_second: Figure | None = None
    usd_per_1000: Figure | None = None
    corpus_hours: Figure | None = None
    corpus_usd: Figure | None = None
    training_seconds: float = 0.0
    training_usd: float = 0.0
    changes: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None

    @property
    def trained(self) -> bool:
        return self.name not in (AS_CONFIGURED, TEACHER)

    def holds(self, floor: float) -> bool:
        """Whether its F1 is surely (the low end of the 95% interval) at the floor or above."""
        return self.f1 is not None and self.f1.low is not None and self.f1.low >= floor


@dataclass(kw_only=True)
class FitResult:
    """A fit. gold: labels are not the teacher's answers. scores:
    every candidate with all labels, then what was not trained. curve: the candidates with fewer labels. stopped: why
    it ended early. usd: of all that it ran."""

    path: str
    identity: str  # digest of what decides which documents are in which part
    floor: float
    gold: bool = True
    documents: dict[str, int] = field(default_factory=dict)  # of train, validation, test
    corpus_documents: Figure | None = None
    scores: list[Score] = field(default_factory=list)
    curve: list[Score] = field(default_factory=list)
    recommended: str | None = None
    configuration: str | None = None
    stopped: str | None = None
    usd: float = 0.0
    seconds: float = 0.0
    task: str = ""
    model: str = ""

    @property
    def measure(self) -> str:
        """What F1 means here, in words."""
        name = next((score.measure for score in self.scores if score.measure), "strict F1")
        return name if self.gold else f"{name}, as agreement with the teacher"

    @property
    def choice(self) -> Score | None:
        """The score that is recommended."""
        return next((score for score in self.scores if score.name == self.recommended), None)
