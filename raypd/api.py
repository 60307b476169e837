"""The Python API: what `import raypd` provides.

`extract`, `answer`, `generate` and others are functions for durable runs; the same call resumes an
interrupted run. `LLM` processes a few texts in the current process, without Ray and without files.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from raypd import storage
from raypd.config import (
    TABLE_ENDINGS,
    TEXT_FILES,
    ModelConfig,
    RunConfig,
    load_config,
    make_config,
    task_of,
    with_changes,
)
from raypd.dataset import MOST_ROWS, batch_rows, look_for_columns
from raypd.errors import ConfigError, InputError
from raypd.estimation import Estimate
from raypd.run import Manifest, RunCost, layout, load_record, load_run, records, say
from raypd.storage import literal
from raypd.text import id_text

if TYPE_CHECKING:
    from raypd.answering import WorkerComponents
    from raypd.estimation import TuneResult
    from raypd.evaluation import Evaluation
    from raypd.fitting import FitResult
    from raypd.models import LoadedModel
    from raypd.nights import Night
    from raypd.report import answer_check
    from raypd.run import TrainingRecord
    from raypd.tasks import Record
    from raypd.verify import Verification

# Extensions of data files.
_DATA = (*TABLE_ENDINGS, ".gz", ".zst")
# A file that is written next to those of a table once all of them are complete.
_COMPLETE = "_SUCCESS"
# Columns that a notebook does not show.
_HIDDEN_COLUMNS = ("values", "source", "row", "attempts")
# Further dotted keys of the configuration.
Settings = Mapping[str, Any] | None
# The origin of such keys, for messages about a wrong one.
_ORIGIN = "in `settings`"
Columns = str | Sequence[str] | None


class Run:
    """A run that has ended.

    Args:
        path: The folder of the run.

    Raises:
        ConfigError: There is no run, or it has not ended yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = storage.absolute(str(path))
        load_record(self.path)
        try:
            self.manifest = records.read(Manifest, storage.join(self.path, layout.MANIFEST))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: this run has not ended; repeat the call or command that started it "
                "to resume"
            ) from None

    @cached_property
    def check(self) -> answer_check.AnswerCheck:
        """What the answers show without labels: the model, warnings, and the next step."""
        from raypd.report import answer_check

        manifest = self.manifest
        progress = answer_check.RunProgress(
            state="complete",
            documents=manifest.documents,
            failed=manifest.failed,
            seconds=manifest.seconds,
            on_gpu=manifest.cost is not None and manifest.cost.gpu_use is not None,
        )
        return answer_check.check_run(self.path, progress)

    @property
    def warnings(self) -> list[str]:
        """Problems with the answers of each attribute that can be seen without labels."""
        return self.check.warnings

    def __repr__(self) -> str:
        documents = f"{self.manifest.documents:,} documents"
        return f"Run({self.path!r}: {documents}, {self.manifest.failed:,} failed)"

    @cached_property
    def _table(self) -> pa.Table:
        from raypd.dataset import unit_rows

        return pa.concat_tables(unit_rows.tables(self.path))

    def to_arrow(self) -> pa.Table:
        """Return all rows, in the order of files and of rows in them. All of them are kept in
        memory.
        """
        return self._table

    def to_pandas(self, typed: bool = False) -> pd.DataFrame:
        """Return all rows.

        Args:
            typed: For an extraction, whether to return a typed column for each attribute and a
                column for its confidence, like `output.columns: typed`. Otherwise a record is a
                JSON text, and `values` is a list of dicts.
        """
        from raypd.dataset import typed_table

        if not typed:
            return self._table.to_pandas()
        config = with_changes(load_run(self.path, []), {"output.columns": "typed"})
        return typed_table(self._table, config).to_pandas()

    @property
    def bill(self) -> RunCost | None:
        """The time and the cost of the run; None if they were not recorded."""
        return self.manifest.cost

    def _repr_html_(self) -> str:
        """Return the first rows, for a notebook."""
        from raypd.report import answer_check

        names = [name for name in self._table.column_names if name not in _HIDDEN_COLUMNS]
        rows = self._table.slice(0, 10).select(names).to_pandas()
        paragraphs = [repr(self), *answer_check.lines(self.check)]
        if self.check.next_step:
            paragraphs.append(f"Next: {self.check.next_step}")
        notes = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
        return f"{rows.to_html(index=False)}{notes}"

    def errors(self) -> pa.Table:
        """Return the documents without an answer: their id, source, row, attempts and reason."""
        from raypd.verify import dead_letters

        empty = dead_letters.SCHEMA.empty_table()
        return pa.concat_tables([empty, *dead_letters.letters(self.path)])

    def retry_errors(self, everything: bool = False) -> Run:
        """Retry the failed documents, like `--retry-errors`.

        Args:
            everything: Whether to also retry documents that could not be read from the input.
        """
        from raypd.verify import retry_errors

        retry_errors(load_run(self.path, []), everything=everything)
        return Run(self.path)

    def verify(self) -> Verification:
        """Check that no document was lost or duplicated, like `raypd verify`.

        This reads the input again.
        """
        from raypd.verify import verify

        return verify(self.path, load_run(self.path, []))

    def evaluate(
        self, labels: str | Path, *, tolerance: float = 0.0, labels_column: str = "target"
    ) -> Evaluation:
        """Score the answers against labels, like `raypd evaluate`.

        Args:
            labels: A file of labels, such as JSON lines.
            tolerance: The share by which a number may differ from its label.
            labels_column: The column of the labelled values.
        """
        from raypd.evaluation import evaluate

        return evaluate(self.path, str(labels), None, tolerance, labels_column)

    def report(self, path: str | None = None) -> str:
        """Write the report page, and return its path.

        Args:
            path: The file to write; None for a page in the run's folder.
        """
        from raypd.report import data, page

        return page.write(data.load(self.path), path)


@dataclass
class Answer:
    """The answer of an `LLM` to one document, question or prompt.

    Attributes:
        value: The record as {attribute: value or None}, or the answer or text; None if there is
            none.
        confidence: A number from 0 to 1 (see docs/values.md); for a record, {attribute:
            confidence}.
        status: ok, null, truncated, invalid, ambiguous or unsure, by attribute; for a text, stop or
            length.
        error: The reason why there is no answer.
        span: For a record, {attribute: [begin, end] of a text in its document}.
        raw: For a record, {attribute: the decoded text, if it could not become a value}.
        parsed: For a schema that is a pydantic model, an instance of it; None if it does not
            validate.
    """

    value: Any = None
    confidence: Any = None
    status: Any = None
    error: str | None = None
    span: Any = None
    raw: Any = None
    parsed: Any = None

    def _repr_html_(self) -> str:
        columns = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                columns[name] = value
            elif value is not None:
                columns[name] = {"": value}
        return str(pd.DataFrame(columns).to_html())


class LLM:
    """A model in the current process, without Ray and without files.

    The first call of a method loads the model, and raises ConfigError or ModelError if that fails.

    Args:
        model: A Hub id, a folder, or smollm2-135m-instruct.
        settings: Further dotted keys of the configuration: {"model.adapter": ...,
            "engine.max_num_seqs": 64}. decoding.method applies to the calls that support it.
    """

    def __init__(self, model: str = "smollm2-135m-instruct", *, settings: Settings = None) -> None:
        self.settings = {"model.name": model, **(settings or {})}
        # The loaded models, by their section of the configuration.
        self._models: dict[str, LoadedModel] = {}
        # The last engine and task, by the whole configuration.
        self._parts: dict[str, WorkerComponents] = {}

    def extract(
        self,
        documents: str | Iterable[str | Mapping[str, Any]],
        schema: Any,
        *,
        id: str | None = None,
        text: Columns = None,
    ) -> list[Answer]:
        """Extract the attributes of a schema.

        Args:
            documents: Texts, or records (also as a DataFrame) with title, description or text, and
                category.
            schema: See `raypd.extract`.
            id: The column of the records' ids, which seed sampling; None numbers the documents.
            text: The column or columns of the records' documents; None for those named above.

        Returns:
            One answer per document.
        """
        rows = []
        for document in _listed(documents):
            rows.append(dict(document) if isinstance(document, Mapping) else {"text": document})
        if text is not None:
            columns = [text] if isinstance(text, str) else [*text]
            # Texts that are mixed with records are put into the first of these columns.
            rows = [_under(row, columns[0]) for row in rows]
            tree = {"input": {"path": "-", "text_columns": columns}, "task": task_of(schema)}
            results = self._rows("extraction", tree, rows, id)
            return [_extracted(document_records[0], schema) for document_records in results]
        text_indices = []
        record_indices = []
        for index, row in enumerate(rows):
            if "text" in row and not {"title", "description"} & row.keys():
                text_indices.append(index)
            else:
                record_indices.append(index)
        # Texts and records are processed separately, so each is prompted as if it came alone.
        groups: list[tuple[list[int], dict[str, Any]]] = []
        if record_indices:
            groups.append((record_indices, {"path": "-"}))
        if text_indices or not rows:
            # A call without documents still checks the schema.
            groups.append((text_indices, {"path": "-", "text_columns": ["text"]}))
        answers: dict[int, Answer] = {}
        for indices, source in groups:
            tree = {"input": source, "task": task_of(schema)}
            results = self._rows("extraction", tree, [rows[index] for index in indices], id)
            for index, document_records in zip(indices, results, strict=True):
                answers[index] = _extracted(document_records[0], schema)
        return [answers[index] for index in range(len(rows))]

    def answer(
        self, context: str, questions: str | Sequence[str | Mapping[str, Any]]
    ) -> list[Answer]:
        """Answer questions about one context.

        Args:
            context: The text.
            questions: One question or several: texts, or records with question, choices and
                multi_select.
        """
        row = {"context": _listed([context])[0], "questions": _listed(questions)}
        results = self._rows("question_answering", {}, [row])
        return [_answered(record, "question_answering") for record in results[0]]

    def generate(self, prompts: str | Sequence[str | list[Any]]) -> list[Answer]:
        """Write an answer to each prompt.

        Args:
            prompts: Texts, or conversations as lists of turns; for a conversation, only the last
                answer is returned.
        """
        rows = [{"prompt": prompt} for prompt in _listed(prompts)]
        results = self._rows("generation", {}, rows)
        return [_answered(turns[-1], "generation") for turns in results]

    def _rows(
        self,
        kind: str,
        tree: dict[str, Any],
        rows: Sequence[dict[str, Any]],
        id_column: str | None = None,
    ) -> list[list[Record]]:
        """Answer input rows.

        Args:
            kind: The kind of the task.
            tree: Sections of the configuration.
            rows: The columns of the input, one dict per document.
            id_column: The column of the documents' ids; None numbers the documents.

        Returns:
            The records of each document.
        """
        from raypd.answering import build, request_queue
        from raypd.billing import Meter
        from raypd.config import METHODS
        from raypd.dataset import filled
        from raypd.tasks import Document

        settings = dict(self.settings)
        if settings.get("decoding.method") not in METHODS[kind]:
            settings.pop("decoding.method", None)
        defaults = {"input": {"path": "-"}, "output": {"path": "-"}}
        task = {"kind": kind, **tree.get("task", {})}
        config = make_config({**defaults, **tree, "task": task}, _overrides(settings), _ORIGIN)
        key = config.model_dump_json()
        if key not in self._parts:
            # The cache of the last engine occupies all of a GPU's memory, so it is released first.
            self._parts = {}
            self._parts = {key: build(config, None, self._load)}
        documents = []
        for index, row in enumerate(rows):
            document_id = str(index)
            if id_column is not None:
                if id_column not in row:
                    raise ConfigError(f"document {index}: no column {id_column!r} (id=)")
                document_id = id_text(row[id_column])
            documents.append(filled(Document(index, document_id), config, row))
        try:
            return request_queue.answer(
                self._parts[key], documents, Meter("", config.decoding.method)
            )
        except BaseException:
            # The programs of this call are still in the engine.
            self._parts = {}
            raise

    def _load(self, model: ModelConfig) -> LoadedModel:
        """Load a model unless it has already been loaded."""
        from raypd.models import load_model

        key = model.model_dump_json()
        if key not in self._models:
            self._models[key] = load_model(model)
        return self._models[key]


def _listed(items: Any) -> list[Any]:
    """Return one item, several items or the rows of a DataFrame as a list."""
    if isinstance(items, pd.DataFrame):
        items = items.astype(object).where(items.notna(), None).to_dict("records")
    if isinstance(items, (str, bytes, Mapping)):
        items = [items]
    listed = list(items)
    if any(isinstance(item, bytes) for item in listed):
        raise TypeError("bytes are not text: decode them, for example with .decode()")
    return listed


def _under(row: dict[str, Any], column: str) -> dict[str, Any]:
    """Return a row with its text moved to a column, if the row was a plain text."""
    if row.keys() == {"text"}:
        return {column: row["text"]}
    return row


def _answered(record: Record, kind: str) -> Answer:
    """Turn a record of question answering or generation into an answer."""
    from raypd.tasks import SHAPES

    shape = SHAPES[kind]
    return Answer(
        value=record.columns.get(shape.answer),
        confidence=record.columns.get("confidence"),
        status=record.columns.get(str(shape.status)),
        error=record.error,
    )


def _extracted(record: Record, schema: Any) -> Answer:
    """Turn a record of an extraction into an answer."""
    if record.error is not None:
        return Answer(error=record.error)
    # Documents with the same content share one record.
    value = copy.deepcopy(record.columns["record"])
    values = record.columns["values"]
    parsed = None
    # An AttributeError means that the schema is not a pydantic model.
    with suppress(ValidationError, AttributeError):
        parsed = schema.model_validate_json(json.dumps(value))
    return Answer(
        value=value,
        confidence={value["name"]: value.get("confidence") for value in values},
        status={value["name"]: value.get("status") for value in values},
        span={value["name"]: value.get("span") for value in values},
        raw={value["name"]: value.get("raw") for value in values},
        parsed=parsed,
    )


def extract(
    source: Any,
    schema: Any = None,
    *,
    model: str | None = None,
    output: str | None = None,
    id: str | None = None,
    text: Columns = None,
    settings: Settings = None,
) -> Run:
    """Extract the attributes of a schema from every document, like `raypd extract`.

    The same call resumes an interrupted run.

    Args:
        source: A path (file, folder, glob, S3) or a list of paths; or texts, dicts, a pandas
            DataFrame, an Arrow table or a Ray Dataset (which is read twice), which are first
            written into the run's folder, so that the run can resume; or the YAML of a run.
        schema: A pydantic model; a JSON Schema; attributes (names, or {name, type, ...});
            {category: {attributes}}; or the path of a file with one of the last three. None if
            `source` is a YAML.
        model: The value of model.name.
        output: The folder of the run; None for a folder inside `runs` that is named after the
            configuration and the documents.
        id: The column of the documents' ids; None for `id` if there is one, and otherwise the
            choice of `raypd init`.
        text: The column or columns of the document; None for title and description if both exist,
            and otherwise the choice of `raypd init`.
        settings: Further dotted keys of the configuration: {"cluster.max_workers": 8}.

    Raises:
        ConfigError, InputError, ModelError: Something is wrong before anything runs.
        RunError: The run fails.
    """
    return _run(_config("extraction", source, schema, model, output, text, settings, id))


def answer(
    source: Any, *, model: str | None = None, output: str | None = None, settings: Settings = None
) -> Run:
    """Answer the questions of every context (columns `context` and `questions`).

    The arguments are those of `extract`.
    """
    return _run(_config("question_answering", source, None, model, output, None, settings))


def generate(
    source: Any, *, model: str | None = None, output: str | None = None, settings: Settings = None
) -> Run:
    """Write an answer to every prompt (column `prompt`). The arguments are those of `extract`."""
    return _run(_config("generation", source, None, model, output, None, settings))


def estimate(
    source: Any,
    schema: Any = None,
    *,
    model: str | None = None,
    output: str | None = None,
    id: str | None = None,
    text: Columns = None,
    settings: Settings = None,
    sample: int = 64,
) -> Estimate:
    """Estimate the time and cost of `extract` with the same arguments.

    Args:
        source: See `extract`, like all arguments except `sample`.
        schema: See `extract`.
        model: See `extract`.
        output: See `extract`.
        id: See `extract`.
        text: See `extract`.
        settings: See `extract`.
        sample: The number of documents to decode.
    """
    from raypd.estimation import EstimateOptions, estimate

    config = _config("extraction", source, schema, model, output, text, settings, id)
    return estimate.estimate(config, EstimateOptions(sample=sample, sample_option="sample"))


def tune(config: str | Path, *, settings: Settings = None, **options: Any) -> TuneResult:
    """Find the cheapest settings, like `raypd tune`.

    Args:
        config: The YAML of a run.
        settings: Further dotted keys of the configuration.
        options: The fields of TuneOptions.
    """
    from raypd.estimation import TuneOptions, tune

    measurements = Path(config).with_suffix(".tuned.jsonl")
    loaded = load_config(config, _overrides(settings), origin=_ORIGIN)
    return tune.tune(loaded, TuneOptions(**options), measurements)


def nightly(config: str | Path, *, settings: Settings = None, full: bool = False) -> Night:
    """Update the table of a YAML to tonight's input, like `raypd nightly`.

    Args:
        config: The YAML of the nightly run.
        settings: Further dotted keys of the configuration.
        full: Whether to extract every document again.
    """
    from raypd.nights import run_night

    return run_night(load_config(config, _overrides(settings), origin=_ORIGIN), full=full)


def train(config: str | Path, *, settings: Settings = None) -> TrainingRecord:
    """Fine-tune a model, like `raypd train`. The same call resumes an interrupted training.

    Args:
        config: A YAML with the section `training`.
        settings: Further dotted keys of the configuration.
    """
    from raypd import training

    return training.train(load_config(config, _overrides(settings), trains=True, origin=_ORIGIN))


def fit(config: str | Path, *, settings: Settings = None) -> FitResult:
    """Find the cheapest model that reaches an F1 on your documents, like `raypd fit`.

    Args:
        config: A YAML with the section `fit`.
        settings: Further dotted keys of the configuration.
    """
    from raypd.fitting import run_fit

    return run_fit(str(config), _overrides(settings))


def _run(config: RunConfig) -> Run:
    from raypd.cluster import run_extract

    return Run(run_extract(config).output)


def _overrides(settings: Settings) -> list[str]:
    """Return settings as key=value texts, for a YAML parser.

    JSON escapes an emoji as two characters, and YAML would read both. So characters beyond ASCII
    are escaped in YAML's notation.
    """
    overrides = []
    for key, value in (settings or {}).items():
        text = json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", r"\x7f")
        overrides.append(f"{key}={text.encode('ascii', 'backslashreplace').decode()}")
    return overrides


def _config(
    kind: str,
    source: Any,
    schema: Any,
    model: str | None,
    output: str | None,
    text: Columns,
    settings: Settings,
    id_column: str | None = None,
) -> RunConfig:
    """Return the configuration of a call.

    Documents in memory are written into the run's folder.

    Args:
        kind: The kind of the task.
        source: See `extract`, like the other arguments.
        schema: See `extract`.
        model: See `extract`.
        output: See `extract`.
        text: See `extract`.
        settings: See `extract`.
        id_column: The argument `id` of `extract`.
    """
    settings = dict(settings or {})
    if model is not None:
        settings["model.name"] = model
    if output is not None:
        settings["output.path"] = output
    if isinstance(source, (str, Path)) and str(source).endswith((".yaml", ".yml")):
        if schema is not None or text is not None or id_column is not None:
            raise ConfigError(
                f"{source} has its own task and columns: leave out `schema`, `id` and `text`, or "
                "change keys with `settings`"
            )
        return load_config(source, _overrides(settings), origin=_ORIGIN)
    paths = _paths(source)
    documents = None
    if paths is None:
        documents = _in_memory(source)
    tree = _tree(kind, schema, text)
    if documents is not None:
        digest = documents.digest
        names = [name.strip() for name in documents.schema.names]
        for key in ("id", "category"):
            tree["input"][f"{key}_column"] = key if key in names else None
    elif isinstance(paths, str):
        digest = paths
    else:
        digest = json.dumps(paths)
    if id_column is not None:
        tree["input"]["id_column"] = id_column
    if kind == "extraction" and documents is not None:
        first_batch = next(iter(documents.batches()))
        rows = batch_rows(first_batch.slice(0, MOST_ROWS))
        look_for_columns("the table", tree, _overrides(settings), say, rows, _ORIGIN)
    elif kind == "extraction" and isinstance(paths, str):
        look_for_columns(paths, tree, _overrides(settings), say, None, _ORIGIN)
    config = make_config(tree, _overrides(settings), _ORIGIN)
    if config.output.path == "-":
        name = hashlib.sha256(f"{config.fingerprint()} {digest}".encode()).hexdigest()[:12]
        settings["output.path"] = f"runs/{kind}-{name}"
        config = make_config(tree, _overrides(settings), _ORIGIN)
    storage.configure(config.storage)
    settings["output.path"] = config.output.path
    settings["input.path"] = paths
    if documents is not None:
        settings["input.path"] = _stored(config, documents)
    return make_config(tree, _overrides(settings), _ORIGIN)


def _paths(source: Any) -> str | list[str] | None:
    """Return a source that is a path or a list of paths; None for documents in memory."""
    if isinstance(source, (str, Path)):
        return str(source)
    if not isinstance(source, (list, tuple)):
        return None
    if all(map(_may_be_path, source)) and any(map(_is_path, source)):
        return [str(path) for path in source]
    return None


def _tree(kind: str, schema: Any, text: Columns) -> dict[str, Any]:
    """Return the sections of a configuration, without paths."""
    source: dict[str, Any] = {"path": "-"}
    if isinstance(text, str):
        source["text_columns"] = [text]
    elif text is not None:
        source["text_columns"] = [*text]
    task: dict[str, Any] = {"kind": kind}
    if kind == "extraction":
        task |= task_of(schema)
    return {"input": source, "output": {"path": "-"}, "task": task}


@dataclass
class _Documents:
    """Documents in memory."""

    # A digest of their contents.
    digest: str
    schema: pa.Schema
    batches: Callable[[], Iterable[pa.Table]]


def _in_memory(source: Any) -> _Documents:
    """Return the documents of a source that is in memory.

    Raises:
        ConfigError: A source of this type is not supported.
        InputError: There are no rows, or they cannot be stored.
    """
    if isinstance(source, (list, tuple)):
        source = _table_of_rows(source)
    if hasattr(source, "iter_batches"):
        schema = source.schema()
        if schema is None:
            raise InputError("the dataset has no rows")
        batches = partial(source.iter_batches, batch_format="pyarrow")
        return _Documents(_digest(batches()), schema.base_schema, batches)
    table = source
    if not isinstance(source, pa.Table):
        table = _table_of(source)
    if not len(table):
        raise InputError("the table has no rows")
    digest = hashlib.sha256(_parquet(table)).hexdigest()
    return _Documents(digest, table.schema, lambda: [table])


def _digest(batches: Iterable[pa.Table]) -> str:
    """Return a digest of rows that does not depend on their order.

    A Dataset that is read a second time may return its rows in a different order.
    """
    total = 0
    for batch in batches:
        for row in batch.to_pylist():
            total += int.from_bytes(hashlib.sha256(repr(row).encode()).digest(), "big")
    return f"{total % 2**256:064x}"


def _stored(config: RunConfig, documents: _Documents) -> str:
    """Write documents from memory into the run's folder unless they are already there, and return
    their path.
    """
    output = layout.output_folder(config)
    folder = storage.join(output, "input", documents.digest[:16])
    if not storage.exists(storage.join(folder, _COMPLETE)):
        # The run's folder is created first, because only its owner may read it.
        storage.make_folder(output)
        storage.make_folder(folder)
        for number, batch in enumerate(documents.batches()):
            storage.put(storage.join(folder, f"{number:06d}.parquet"), _parquet(batch))
        storage.put(storage.join(folder, _COMPLETE), b"")
    return storage.join(glob.escape(folder), "*.parquet")


def _may_be_path(item: Any) -> bool:
    """Return whether an item of a list may be a path, such as a text with a slash and no spaces."""
    if not isinstance(item, str):
        return isinstance(item, Path)
    has_spaces = any(map(str.isspace, item))
    has_name = item.lower().endswith(_DATA) or "/" in item
    return os.path.exists(item) or (has_name and not has_spaces)


def _is_path(item: Any) -> bool:
    """Return whether an item is certain to be a path.

    It exists, or its scheme, its extension or the wildcards of a glob mark it as one.
    """
    if not _may_be_path(item):
        return False
    if not isinstance(item, str) or os.path.exists(item) or item.lower().endswith(_DATA):
        return True
    return "://" in item or literal(item) != item or item.lower().endswith((*TEXT_FILES,))


def _table_of_rows(rows: Sequence[Any]) -> pa.Table:
    """Turn a list of texts or dicts into a table.

    Raises:
        ConfigError: The list has other items.
        InputError: The items cannot be stored.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, (str, Mapping)):
            raise ConfigError(
                f"source[{index}]: a list must contain paths, texts or dicts, not "
                f"{type(row).__name__}"
            )
        if isinstance(row, str) != isinstance(rows[0], str):
            raise ConfigError(
                f"source[{index}]: a list must contain either texts or dicts, not both; this one "
                f"is a {type(row).__name__}"
            )
    named = [{"text": row} if isinstance(row, str) else row for row in rows]
    names = dict.fromkeys(name for row in named for name in row)
    columns = {}
    try:
        for name in names:
            # NaN and NaT are missing values, as in pandas.
            columns[name] = pa.array([row.get(name) for row in named], from_pandas=True)
        return pa.table(columns)
    except (pa.ArrowException, UnicodeError) as error:
        raise InputError(f"the list cannot be stored: {error}") from None


def _parquet(table: pa.Table) -> bytes:
    """Return a table as a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _table_of(frame: Any) -> pa.Table:
    """Turn a DataFrame into a table.

    Raises:
        ConfigError: It is not a DataFrame.
        InputError: Two of its columns have the same name, or it cannot be stored.
    """
    if not hasattr(frame, "columns"):
        kinds = (
            "a path, a list of paths, texts or dicts, a DataFrame, an Arrow table or a Ray Dataset"
        )
        raise ConfigError(f"source: give {kinds}, not {type(frame).__name__}")
    counts = Counter(str(name) for name in frame.columns)
    for name, count in counts.items():
        if count > 1:
            raise InputError(f"the table has two columns {name!r}; rename one of them")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    except pa.ArrowException as error:
        # For example, a column has both texts and numbers.
        raise InputError(f"the table cannot be stored: {'; '.join(map(str, error.args))}") from None
