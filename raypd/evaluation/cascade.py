"""`raypd tune --cascade`: the threshold under which a value goes to the second model.

Thresholds are tried from the safest down, and the first that fails ends the search, so that the
chance that the one taken does not hold the floor is at most that of one test (fixed-sequence
testing), however many are tried.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from raypd import storage
from raypd.answering.check import check_model
from raypd.config import CascadeConfig, RunConfig
from raypd.config.load import with_changes
from raypd.errors import ConfigError, InputError, raised_as
from raypd.estimation import sampling
from raypd.estimation.profile import DocumentCost, RemoteProfiler, check_sample
from raypd.evaluation.score import Answers, Labels, Measure, f1_of, labels_in
from raypd.tasks.base import Document, Record
from raypd.tasks.cascade import doubt, merged
from raypd.tasks.documents import unpacked
from raypd.tasks.labels import label_columns

# What each model took for a document.
_Pairs = Sequence[tuple[Document, DocumentCost, DocumentCost]]
_UNDER = (1.0, *(step / 20 for step in range(19, 0, -1)))  # thresholds, the safest first


@dataclass
class CascadeTrial:
    """A threshold. under 0: the first model alone, inf: the second alone."""

    under: float
    asked: float  # share of the documents that go to the second model
    f1: Measure
    seconds: float  # of a worker, for a document
    server_usd: float  # for the tokens of a document, to a server behind an endpoint


@dataclass
class CascadeTuning:
    """Both models alone, the thresholds that were tried, and the lowest of them that holds the
    floor.
    """

    first: CascadeTrial
    second: CascadeTrial
    trials: list[CascadeTrial]
    best: CascadeTrial | None
    floor: float
    documents: int


def tune_cascade(
    config: RunConfig,
    labels: str,
    floor: float,
    sample: int,
    minutes: float | None = None,
    verbose: bool = False,
) -> CascadeTuning:
    """Answers labelled documents with both models and tries thresholds. labels: JSON lines with the
    input's columns. Raises ConfigError, InputError or ModelError before anything is decoded;
    RunError where nothing could be.
    """
    second = config.second_model()
    if second is None:
        raise ConfigError(
            "cascade.model: name the second model, of which --cascade finds when to ask it"
        )
    storage.configure(config.storage)
    check_model(config)
    alone = with_changes(config, {"cascade": CascadeConfig().model_dump()})
    source = {
        "input.path": labels,
        "input.format": "auto",
        "input.version": None,
        "input.reader": None,
    }
    column = config.training.labels_column
    categories = config.extraction.categories
    columns = (column, *label_columns(categories), "scored", "accepted", "category")
    documents = sampling.draw(with_changes(alone, source), sample, columns=columns).documents
    rows = {
        d.id: {name: unpacked(d.fields[name]) for name in columns if name in d.fields}
        for d in documents
    }
    attributes = [
        attribute for category in categories.values() for attribute in category.attributes
    ]
    with raised_as(InputError, labels, ValueError):
        gold = {
            id: labels_in(row, column, attributes, config.text_columns())
            for id, row in rows.items()
        }
    f1_of({key: [] for key in gold}, gold, config)  # fails before a model is asked
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    costs = []
    with RemoteProfiler(config, verbose) as profiler:
        for name, run, share in (("first", alone, 0.5), ("second", second, 1.0)):
            limit = max(1.0, share * (ends - time.monotonic()))
            profiled = profiler.profile(
                run, documents, limit, f"the {name} model over the labelled documents"
            )
            check_sample(profiled)
            costs.append(profiled.costs)
    pairs = [pair for pair in zip(documents, *costs, strict=True) if None not in pair]
    trial = partial(_trial, config, pairs, gold)
    trials: list[CascadeTrial] = []
    for under in _UNDER:
        trials.append(trial(under))
        if trials[-1].f1.low < floor:
            break
    held = [tried for tried in trials if tried.f1.low >= floor]
    return CascadeTuning(
        trial(0.0), trial(math.inf), trials, held[-1] if held else None, floor, len(pairs)
    )


def _trial(config: RunConfig, pairs: _Pairs, labels: Labels, under: float) -> CascadeTrial:
    answers: Answers = {}
    asked, seconds, usd = 0, 0.0, 0.0
    for document, *costs in pairs:
        first, second = (
            Record(document.index, (cost.rows or [{}])[0], cost.error) for cost in costs
        )
        record, paid = first, costs[:1]
        if under == math.inf:
            record, paid = second, costs[1:]
        elif first.error is None and doubt(first.columns["values"], under):
            record, paid = (
                merged(
                    first, second, config.extraction.categories[first.columns["category"]], under
                ),
                costs,
            )
        answers[document.id] = [record.columns] if record.error is None else []
        asked += costs[1] in paid
        seconds += sum(cost.seconds for cost in paid)
        usd += sum(cost.server_usd for cost in paid)
    f1 = f1_of(answers, labels, config)
    return CascadeTrial(under, asked / len(pairs), f1, seconds / len(pairs), usd / len(pairs))


def describe(tuning: CascadeTuning) -> str:
    dollars = any(trial.server_usd for trial in (tuning.first, tuning.second))
    head = f"{'under':<14}{'asked':>7}{tuning.first.f1.name:>12}  95% interval    documents/s"
    lines = [head + f"{'  server $/1,000' if dollars else ''}"]
    rows = [("first alone", tuning.first), ("second alone", tuning.second)]
    for name, trial in [*rows, *((f"{trial.under:g}", trial) for trial in tuning.trials)]:
        f1 = f"{trial.f1.value:>12.3f}  {trial.f1.low:.3f} to {trial.f1.high:.3f}"
        line = f"{name:<14}{trial.asked:>7.0%}{f1}{1 / trial.seconds:>15.3g}"
        lines.append(line + (f"{1000 * trial.server_usd:>16.3g}" if dollars else ""))
    if tuning.best is None:
        reason = (
            f"no threshold surely holds {tuning.floor:g}: the safest has "
            f"{tuning.trials[0].f1.low:.3f} at least"
        )
        return "\n".join(
            [*lines, "", f"{reason}. Label more, lower --f1-floor, or take a better second model"]
        )
    best, time_share = tuning.best, tuning.best.seconds / tuning.second.seconds
    outcome = (
        f"cascade.under: {best.under:g} holds {tuning.floor:g} with 97.5% confidence, over "
        f"{tuning.documents} "
        f"documents: {best.asked:.0%} of them go to the second model, at {time_share:.0%} "
        "of its time alone"
    )
    return "\n".join([*lines, "", outcome])
