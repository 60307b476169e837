"""The labelled documents of a fit: drawn evenly, labelled by a column, a run or a teacher, and
split.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.billing import book
from raypd.billing.budget import BudgetReached
from raypd.cluster.driver import run_extract
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.dataset.label_file import label_rows, without_documents
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.dataset.tables import kind_of
from raypd.errors import InputError, RunError
from raypd.estimation import sampling
from raypd.evaluation.score import flat_values
from raypd.run import layout
from raypd.run.records import Manifest
from raypd.run.text import Say, counted, share
from raypd.tasks.base import Document
from raypd.tasks.documents import category_of, input_fields, text_of, words_of
from raypd.tasks.few_shot import LabelledExamples
from raypd.tasks.labels import label_columns, labels_of
from raypd.training import teacher
from raypd.verify import dead_letters
from raypd.verify.retry import retry_errors

Row = dict[str, Any]
PARTS = ("train", "validation", "test")
UNLABELLED = "unlabelled-"  # begins the names of what the teacher is asked about, by fit.documents
LEAST = {"train": 16, "validation": 4, "test": 30}  # documents, for figures that mean something
# To label, or be scored.
UNCALIBRATED: dict[str, Any] = {"output.min_confidence": 0.0, "model.calibration": "none"}
# Of what is no table, and needs no reader.
_FILE: dict[str, Any] = {"input.version": None, "input.reader": None}
_GOLDEN = 0.6180339887498949  # its multiples, less their whole part, lie evenly in 0 to 1


@dataclass(frozen=True)
class FitContext:
    config: RunConfig
    folder: str  # of the fit
    verbose: bool
    say: Say
    ends: float | None = None  # unix second of the deadline

    def part(self, name: str) -> str:
        return storage.join(self.folder, f"{name}.jsonl")

    def spent(self) -> float:
        """USD of all sessions of all runs and trainings below the folder."""
        outputs = {
            str(ledger.parent)
            for ledger in Path(self.folder).rglob(layout.LEDGER)
            if ledger.is_dir()
        }
        bills = [bill for output in outputs for bill in book.bills(output)]
        # Those of a retry are the run's, too.
        return sum({bill.session: bill.usd for bill in bills}.values())

    def limited(self, config: RunConfig, *, more: bool = False) -> RunConfig:
        """With what is left of the budget; a run or training counts its own earlier sessions, a
        retry (more) none.
        """
        budget = self.config.cost.budget_usd
        if budget is None:
            return config
        own = [] if more else book.bills(storage.absolute(config.output.path))
        left = budget - self.spent() + sum(bill.usd for bill in own)
        return with_changes(config, {"cost.budget_usd": max(left, 1e-6)})


def answered(context: FitContext, config: RunConfig) -> Manifest:
    """Runs a model over documents.

    What a server did not answer is asked again, now and by every later same command.
    """
    manifest = run_extract(context.limited(config), verbose=context.verbose)
    if manifest.failed and config.model.endpoint is not None:
        try:
            retry_errors(context.limited(config, more=True), verbose=context.verbose)
        except BudgetReached:
            raise
        except RunError as error:  # too many have failed again
            context.say(str(error))
        manifest = run_extract(config, verbose=context.verbose)  # which adds up
    return manifest


def parts_of(context: FitContext) -> dict[str, list[Row]]:
    """The documents of train, validation and test; they are kept in the folder, and read from there
    later. Raises ConfigError, InputError: too few labelled documents, or no label has a value;
    RunError: the teacher's run ended.
    """
    config, paths = context.config, {part: context.part(part) for part in PARTS}
    if not all(map(storage.exists, paths.values())):
        documents = _labelled(context)
        if repeated := len(documents) - len({document.id for document in documents}):
            context.say(f"{counted(repeated, 'document')} with the id of another: left out")
        rows = _rows(config, documents)
        for warning in _warnings(rows, config):
            context.say(warning)
        for part, members in split(rows, config).items():
            _write(paths[part], members)
    parts = {
        part: [json.loads(line) for line in storage.read(path).splitlines()]
        for part, path in paths.items()
    }
    for part, members in parts.items():
        if len(members) < LEAST[part]:
            for path in paths.values():
                storage.delete(path)
            total = sum(map(len, parts.values()))
            why = (
                f"of which {len(members)} are for {part}, which needs {LEAST[part]}: label "
                "more documents, raise"
            )
            shares = "fit.test_share and fit.validation_share"
            raise InputError(
                f"{counted(total, 'labelled document')}, {why} fit.documents, or change {shares}"
            )
    return parts


def split(
    rows: list[Row], config: RunConfig, test_share: float | None = None
) -> dict[str, list[Row]]:
    """Rows by part: categories in proportion, equal texts in one, the prompt's examples in train;
    enough to test.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        text = " ".join(str(row.get(column) or "") for column in config.text_columns())
        groups.setdefault(words_of(text), []).append(row)
    column = config.input.category_column
    test_share = config.fit.test_share if test_share is None else test_share

    def drawn(key: str) -> bytes:
        return hashlib.sha256(f"{config.training.seed}/{key}".encode()).digest()

    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    held_out = test_share + config.fit.validation_share
    examples = LabelledExamples(config)
    shown = {
        words_of(text)
        for name in config.extraction.categories
        for text, _ in examples.in_common(name)
    }
    ordered = sorted(
        groups,
        key=lambda words: (str(groups[words][0].get(column) if column else ""), drawn(words)),
    )
    for number, words in enumerate(ordered):
        place = (number * _GOLDEN) % 1
        part = "test" if place < test_share else "validation" if place < held_out else "train"
        text = text_of(Document(0, "", groups[words][0]), config.text_columns()) if shown else ""
        parts["train" if words_of(text) in shown else part] += groups[words]
    if len(parts["test"]) < LEAST["test"] and test_share < 0.6:
        return split(rows, config, test_share + 0.02)
    parts["train"].sort(key=lambda row: drawn(row["id"]))
    return parts


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run, and not labelled documents."""
    return storage.exists(storage.join(storage.absolute(path), layout.RUN))


def teacher_keys(config: RunConfig) -> dict[str, Any]:
    """The teacher's keys over those of the configuration: as any weights, or a server, can be
    asked, unless it says.
    """
    keys = config.fit.teacher or {}
    by_server = any(key.startswith("model.endpoint") for key in keys)
    method = (
        "autoregressive"
        if by_server
        else "hyper_parallel"
        if keys.get("model.name") == "fake"
        else "guided"
    )
    unsaid = {"decoding.method": method, **dict.fromkeys(("model.adapter", "model.revision"))}
    return (unsaid if "model.name" in keys else {}) | keys


def teacher_config(config: RunConfig, documents: str, output: str) -> RunConfig:
    """The configuration of the teacher's run over some documents: no value is unsure by what holds
    for the student.
    """
    keys = UNCALIBRATED | teacher_keys(config) | input_keys(documents)
    return with_changes(config, {**keys, "output.path": output})


def input_keys(documents: str) -> dict[str, Any]:
    """The keys that read a file of `parts_of` in place of the corpus."""
    keys = {
        "input.path": documents,
        "input.format": "jsonl",
        "input.encoding": "utf-8",
        "input.id_column": "id",
    }
    return keys | _FILE | {"input.html_columns": []}  # it holds what was read of them


def _labelled(context: FitContext) -> list[Document]:
    """Documents with their labels in training.labels_column; those without have an error."""
    config, folder = context.config, context.folder
    fit, column = config.fit, config.training.labels_column
    from_run = fit.labels is not None and is_run(fit.labels)
    texts, id_column = config.text_columns(), config.input.id_column
    joined = (
        fit.labels is not None and not from_run and without_documents(fit.labels, texts, id_column)
    )
    table = (
        kind_of(fit.labels) if fit.labels is not None and storage.is_folder(fit.labels) else None
    )
    # Whatever the corpus is.
    of_labels = {"input.path": fit.labels, "input.format": table or "auto", **_FILE}
    source = config if fit.labels is None or from_run or joined else with_changes(config, of_labels)
    columns = (column, *label_columns(config.extraction.categories), "scored", "accepted")
    if joined:
        ids = {key for _, key, _ in label_rows(str(fit.labels), id_column)}
        documents = [d for unit in plan(config) for d in read_unit(unit, config) if d.id in ids]
        if not documents:
            raise InputError(
                f"fit.labels {fit.labels}: no document of the input has its ids, such as "
                f"{min(ids)!r}"
            )
        count = min(len(documents), fit.documents)
        # Evenly.
        documents = [documents[number * len(documents) // count] for number in range(count)]
    else:
        documents = [
            d
            for d in sampling.draw(source, fit.documents, columns=columns).documents
            if d.error is None
        ]
    if from_run or joined:
        teacher.label(documents, str(fit.labels), config)
    elif fit.labels is None and fit.teacher is not None:
        unlabelled = storage.join(folder, f"{UNLABELLED}{fit.documents}.jsonl")
        rows = [{**input_fields(d, config), "id": d.id} for d in documents]
        if not storage.exists(unlabelled):
            _write(unlabelled, rows)
        asked = teacher_config(config, unlabelled, storage.join(folder, f"teacher-{fit.documents}"))
        manifest = answered(context, asked)
        if not manifest.ok:
            reason = dead_letters.most_frequent(manifest.output) or "no reason is known"
            raise InputError(
                f"fit.teacher answered none of {counted(manifest.documents, 'document')}: {reason}"
            )
        documents = [document for unit in plan(asked) for document in read_unit(unit, asked)]
        teacher.label(documents, manifest.output, config)
    return documents


def _rows(config: RunConfig, documents: list[Document]) -> list[Row]:
    """What is kept of labelled documents.

    Raises InputError: there are none; no label has a value, or an attribute.
    """
    column = config.training.labels_column
    rows: dict[str, Row] = {}
    unusable: list[str] = []
    categories = config.extraction.categories
    for document in documents:
        try:
            category = categories[category_of(document, config.input, categories)]
            labels = labels_of(document.fields, column, category.attributes, config.text_columns())
        except ValueError as error:
            labels, document.error = None, document.error or str(error)
        if document.error is not None or not isinstance(labels, dict):
            unusable.append(
                document.error
                or f"column {column!r} holds no labels ({{attribute: value or null}})"
            )
        else:
            extra = input_fields(document, config, ("scored", "accepted"))
            rows.setdefault(document.id, {**extra, "id": document.id, column: labels})
    if not rows:
        reason = unusable[0] if unusable else "there are no documents"
        places = f"column training.labels_column ({column!r}), from fit.labels or from fit.teacher"
        raise InputError(f"no labelled document: {reason}. Labels come from {places}")
    asked = {
        ".".join(a.place)
        for category in config.extraction.categories.values()
        for a in category.attributes
    }
    if not asked.intersection(
        named := sorted({name for row in rows.values() for name in flat_values(row[column])})
    ):
        words = (
            f"the labels are of {', '.join(named[:8])}, the attributes are "
            f"{', '.join(sorted(asked)[:8])}"
        )
        raise InputError(f"no label is of an attribute: {words}")
    if all(value is None for row in rows.values() for value in row[column].values()):
        raise InputError(
            f"every label of {counted(len(rows), 'document')} is null: there is nothing to learn"
        )
    return list(rows.values())


def _write(path: str, rows: list[Row]) -> None:
    """As ASCII, in which half a surrogate pair can stand; dates of Parquet as text."""
    storage.put(path, "".join(json.dumps(row, default=str) + "\n" for row in rows).encode())


def _warnings(rows: list[Row], config: RunConfig) -> list[str]:
    """Says which attributes have one and the same label everywhere: an F1 over these means
    little.
    """
    column = config.training.labels_column
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row[column].items():
            values.setdefault(name, set()).add(json.dumps(value))
    same = sorted(name for name, kinds in values.items() if len(kinds) == 1)
    attributes = (
        f"{len(same)} of {counted(len(values), 'attribute')}, {share(len(same), len(values))}"
    )
    words = (
        "the label is the same in every document, so little can be learned: "
        f"{', '.join(same[:8])} ({attributes})"
    )
    return [words] if same else []
