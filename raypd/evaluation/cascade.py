"""`raypd tune --cascade`: finds the confidence below which a value goes to the second model.

Thresholds are tried from the safest down, and the first that misses the F1 floor ends the search.
This is fixed-sequence testing: the chance that the chosen threshold misses the floor is at most
that of a single test, however many thresholds are tried.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raypd import storage
from raypd.answering import check_model
from raypd.config import CascadeConfig, RunConfig, with_changes
from raypd.errors import ConfigError, InputError, raised_as
from raypd.estimation import DocumentCost, RemoteProfiler, check_sample, sampling
from raypd.evaluation.labels import Answers, Labels, labels_in
from raypd.evaluation.score import Measure, f1_of
from raypd.tasks import (
    Document,
    Record,
    doubt,
    label_columns,
    merged,
    trained_on_of,
    unpacked,
)
from raypd.text import counted

# The thresholds, with the safest first.
_THRESHOLDS = (1.0, *(step / 20 for step in range(19, 0, -1)))


@dataclass
class CascadeTrial:
    """The result of one threshold. If `under` is 0, only the first model answers; if inf, the
    second.
    """

    under: float
    # The share of the documents that go to the second model.
    asked: float
    f1: Measure
    # Seconds of a worker per document.
    seconds: float
    # USD per document for the tokens of a server behind an endpoint.
    server_usd: float


@dataclass
class CascadeTuning:
    """The two models alone, the thresholds that were tried, and the lowest that reaches the
    floor.
    """

    first: CascadeTrial
    second: CascadeTrial
    trials: list[CascadeTrial]
    best: CascadeTrial | None
    floor: float
    documents: int
    # The number of documents that a model was trained or validated on.
    left_out: int = 0


@dataclass
class _AnsweredDocument:
    """A document, and the cost of its answer by each model."""

    document: Document
    first: DocumentCost
    second: DocumentCost


def tune_cascade(
    config: RunConfig,
    labels: str,
    floor: float,
    sample: int,
    minutes: float | None = None,
    verbose: bool = False,
) -> CascadeTuning:
    """Answer labelled documents with both models, and find the lowest threshold that reaches an F1.

    Args:
        config: The configuration, whose section `cascade` names the second model.
        labels: JSON lines with the columns of the input and labels.
        floor: The F1 that must be reached.
        sample: The number of documents.
        minutes: The time limit of decoding; None for no limit.
        verbose: Whether to show Ray's own messages.

    Raises:
        ConfigError, InputError, ModelError: Something is wrong before anything is decoded.
        RunError: No document could be answered.
    """
    second = config.second_model()
    if second is None:
        raise ConfigError(
            "cascade.model: name the second model; --cascade finds the threshold below which it is "
            "asked"
        )
    storage.configure(config.storage)
    check_model(config)
    first = with_changes(config, {"cascade": CascadeConfig().model_dump()})
    documents, left_out = _unseen(_labelled_documents(first, labels, sample), config)
    if left_out and not documents:
        raise InputError(
            f"{labels}: a model of the cascade was trained on all of these documents; label others"
        )
    gold = _labels_of(documents, config, labels)
    # A missing label is an error, which should be raised before a model is used.
    f1_of({key: [] for key in gold}, gold, config)
    answered = _answer(config, first, second, documents, minutes, verbose)

    def trial(under: float) -> CascadeTrial:
        return _trial(config, answered, gold, under)

    trials: list[CascadeTrial] = []
    best = None
    for under in _THRESHOLDS:
        trials.append(trial(under))
        if trials[-1].f1.low < floor:
            break
        best = trials[-1]
    return CascadeTuning(
        first=trial(0.0),
        second=trial(math.inf),
        trials=trials,
        best=best,
        floor=floor,
        documents=len(answered),
        left_out=left_out,
    )


def _label_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the columns of the labels' file that hold labels."""
    named = label_columns(config.extraction.categories)
    return (config.training.labels_column, *named, "scored", "accepted", "category")


def _labelled_documents(config: RunConfig, labels: str, sample: int) -> list[Document]:
    """Draw documents from the file of labels."""
    source = {
        "input.path": labels,
        "input.format": "auto",
        "input.version": None,
        "input.reader": None,
    }
    reading = with_changes(config, source)
    return sampling.draw(reading, sample, columns=_label_columns(config)).documents


def _unseen(documents: list[Document], config: RunConfig) -> tuple[list[Document], int]:
    """Return the documents that neither model was trained on, and the number of the others."""
    rows = {document.id: document.fields for document in documents}
    seen: set[str] = set()
    for model in (config.model, config.cascade.model):
        known = trained_on_of(model.model_dump() if model is not None else {})
        if known.ids:
            seen |= known.among(rows, config.text_columns())
    unseen = [document for document in documents if document.id not in seen]
    return unseen, len(documents) - len(unseen)


def _labels_of(documents: Sequence[Document], config: RunConfig, path: str) -> Labels:
    """Return the labels of documents by id; `path` is the file that they come from."""
    column = config.training.labels_column
    names = _label_columns(config)
    attributes = [
        attribute
        for category in config.extraction.categories.values()
        for attribute in category.attributes
    ]
    rows = {}
    for document in documents:
        fields = document.fields
        rows[document.id] = {name: unpacked(fields[name]) for name in names if name in fields}
    with raised_as(InputError, path, ValueError):
        return {
            key: labels_in(row, column, attributes, config.text_columns())
            for key, row in rows.items()
        }


def _answer(
    config: RunConfig,
    first: RunConfig,
    second: RunConfig,
    documents: list[Document],
    minutes: float | None,
    verbose: bool,
) -> list[_AnsweredDocument]:
    """Answer the documents with both models; return those that both had enough time for."""
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with RemoteProfiler(config, verbose) as profiler:

        def profile(name: str, run: RunConfig, time_share: float) -> list[DocumentCost | None]:
            limit = max(1.0, time_share * (ends - time.monotonic()))
            title = f"the {name} model over the labelled documents"
            profiled = profiler.profile(run, documents, limit, title)
            check_sample(profiled)
            return profiled.costs

        first_costs = profile("first", first, 0.5)
        second_costs = profile("second", second, 1.0)
    answered = []
    for document, first_cost, second_cost in zip(documents, first_costs, second_costs, strict=True):
        if first_cost is not None and second_cost is not None:
            answered.append(_AnsweredDocument(document, first_cost, second_cost))
    return answered


def _trial(
    config: RunConfig, answered: Sequence[_AnsweredDocument], labels: Labels, under: float
) -> CascadeTrial:
    """Compute the result of a threshold from the answers of both models."""
    answers: Answers = {}
    second_answers = 0
    seconds = 0.0
    usd = 0.0
    for item in answered:
        record, costs = _cascaded(config, item, under)
        answers[item.document.id] = []
        if record.error is None:
            # Scores are computed from the rows of a table, where the record is text.
            text = json.dumps(record.columns["record"], ensure_ascii=False)
            answers[item.document.id].append({**record.columns, "record": text})
        # Dataclasses with equal numbers are equal, so the second model's is recognized by identity.
        second_answers += any(cost is item.second for cost in costs)
        seconds += sum(cost.seconds for cost in costs)
        usd += sum(cost.server_usd for cost in costs)
    count = len(answered)
    f1 = f1_of(answers, labels, config)
    return CascadeTrial(
        under=under,
        asked=second_answers / count,
        f1=f1,
        seconds=seconds / count,
        server_usd=usd / count,
    )


def _cascaded(
    config: RunConfig, item: _AnsweredDocument, under: float
) -> tuple[Record, list[DocumentCost]]:
    """Return the record that a cascade produces for a document, and its costs."""
    first = _record(item.document, item.first)
    second = _record(item.document, item.second)
    if under == math.inf:
        return second, [item.second]
    if first.error is None and doubt(first.columns["values"], under):
        category = config.extraction.categories[first.columns["category"]]
        return merged(first, second, category, under), [item.first, item.second]
    return first, [item.first]


def _record(document: Document, cost: DocumentCost) -> Record:
    row = cost.rows[0] if cost.rows else {}
    return Record(document.index, row, cost.error)


def describe_cascade(tuning: CascadeTuning) -> str:
    """Return a tuning as a table for the terminal; the last line is its outcome."""
    has_server = any(trial.server_usd for trial in (tuning.first, tuning.second))
    head = f"{'under':<14}{'asked':>7}{tuning.first.f1.name:>12}  95% interval    documents/s"
    if has_server:
        head += "  server $/1,000"
    lines = [head]
    rows = [("first alone", tuning.first), ("second alone", tuning.second)]
    rows += [(f"{trial.under:g}", trial) for trial in tuning.trials]
    for name, trial in rows:
        f1 = f"{trial.f1.value:>12.3f}  {trial.f1.low:.3f} to {trial.f1.high:.3f}"
        line = f"{name:<14}{trial.asked:>7.0%}{f1}{1 / trial.seconds:>15.3g}"
        if has_server:
            line += f"{1000 * trial.server_usd:>16.3g}"
        lines.append(line)
    lines.append("")
    if tuning.left_out:
        lines.append(
            f"{counted(tuning.left_out, 'document')} trained or validated a model: left out, "
            "because the model has seen their labels"
        )
    best = tuning.best
    if best is None:
        lines.append(
            f"no threshold is certain to reach {tuning.floor:g}: with the safest, the 95% interval "
            f"begins at {tuning.trials[0].f1.low:.3f}. Label more, lower --f1-floor, or use a "
            "better second model"
        )
    else:
        time_share = best.seconds / tuning.second.seconds
        lines.append(
            f"cascade.under: {best.under:g} holds {tuning.floor:g} with 97.5% confidence, over "
            f"{tuning.documents} documents: {best.asked:.0%} of them go to the second model, at "
            f"{time_share:.0%} of the time that it takes alone"
        )
    return "\n".join(lines)
