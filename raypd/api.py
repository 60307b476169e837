"""What `import raypd` gives: durable runs as functions, which the same call goes on with where it
was cut off, and LLM for a few texts in this process, which needs no Ray and writes no file.
"""

from __future__ import annotations

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
from raypd.config import TEXT_FILES, ModelConfig, RunConfig
from raypd.config.data import EXCEL
from raypd.config.load import load_config, make_config, with_changes
from raypd.config.schema import task_of
from raypd.dataset import MOST_ROWS, batch_rows, look_for_columns
from raypd.errors import ConfigError, InputError
from raypd.estimation.records import Estimate
from raypd.run import layout, records
from raypd.run.console import say
from raypd.run.load import load_record, load_run
from raypd.run.manifest import Manifest
from raypd.run.usage import RunCost
from raypd.storage import literal

if TYPE_CHECKING:
    from raypd.answering.components import WorkerComponents
    from raypd.estimation.tune import TuneResult
    from raypd.evaluation import Evaluation
    from raypd.fitting import FitResult
    from raypd.models.load import LoadedModel
    from raypd.nights.nightly import Night
    from raypd.run.training import TrainingRecord
    from raypd.tasks.base import Record
    from raypd.verify.verification import Verification

# Ends of names.
_DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", *EXCEL)
_WHOLE = "_SUCCESS"  # beside the files of a table that was written whole
Settings = Mapping[str, Any] | None  # other keys of the configuration, dotted
Columns = str | Sequence[str] | None


class Run:
    """A run that has ended, by its folder.

    Raises ConfigError where there is none, or it has not ended yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = storage.absolute(str(path))
        load_record(self.path)
        try:
            self.manifest = records.read(Manifest, storage.join(self.path, layout.MANIFEST))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: this run has not ended; what began it goes on with it"
            ) from None

    def __repr__(self) -> str:
        return (
            f"Run({self.path!r}: {self.manifest.documents:,} documents, "
            f"{self.manifest.failed:,} failed)"
        )

    @cached_property
    def _table(self) -> pa.Table:
        from raypd.dataset import writer

        parts = [
            writer.read_table(self.path, unit, path=path)[1]
            for unit, path in sorted(writer.objects(self.path))
        ]
        return pa.concat_tables([part.replace_schema_metadata(None) for part in parts])

    def to_arrow(self) -> pa.Table:
        """All rows, units in the order of their ids: by file, and place in it.

        It is held in memory whole.
        """
        return self._table

    def to_pandas(self, typed: bool = False) -> pd.DataFrame:
        """All rows; a record is a JSON text, `values` a list of dicts. typed: of an extraction a
        column for each attribute in their place, of its own type, and one for its confidence, as of
        `output.columns: typed`.
        """
        from raypd.dataset import typed_table

        if not typed:
            return self._table.to_pandas()
        config = with_changes(load_run(self.path, []), {"output.columns": "typed"})
        return typed_table(self._table, config).to_pandas()

    @property
    def bill(self) -> RunCost | None:
        """What it took and cost; None where no ledger ran."""
        return self.manifest.cost

    def _repr_html_(self) -> str:
        """Its first rows, for a notebook."""
        shown = [
            name
            for name in self._table.column_names
            if name not in ("values", "source", "row", "attempts")
        ]
        return (
            self._table.slice(0, 10).select(shown).to_pandas().to_html(index=False)
            + f"<p>{escape(repr(self))}</p>"
        )

    def errors(self) -> pa.Table:
        """Every document without an answer: its id, source, row, attempts and reason."""
        from raypd.verify import dead_letters

        return pa.concat_tables(
            [dead_letters.SCHEMA.empty_table(), *dead_letters.letters(self.path)]
        )

    def retry_errors(self, everything: bool = False) -> Run:
        """Tries the failed documents again, as `--retry-errors`; everything: also what cannot be
        read in the input.
        """
        from raypd.verify.retry import retry_errors

        retry_errors(load_run(self.path, []), everything=everything)
        return Run(self.path)

    def verify(self) -> Verification:
        """Reads the input again: whether the run lost or doubled a document, as `raypd verify`."""
        from raypd.verify.verification import verify

        return verify(self.path, load_run(self.path, []))

    def evaluate(
        self, labels: str | Path, *, tolerance: float = 0.0, labels_column: str = "target"
    ) -> Evaluation:
        """Scores the answers against labels, JSON lines, as `raypd evaluate`."""
        from raypd.evaluation import evaluate

        return evaluate(self.path, str(labels), None, tolerance, labels_column)

    def report(self, path: str | None = None) -> str:
        """Writes the report page, into the run's folder unless told where; returns its path."""
        from raypd.report import data, page

        return page.write(data.load(self.path), path)


@dataclass
class Answer:
    """What `LLM` makes of one document, question or prompt."""

    # The record, {attribute: value or None}; the answer or text. None where there is none.
    value: Any = None
    confidence: Any = None  # 0 to 1 (docs/values.md), of a record {attribute: confidence}
    # Ok, null, truncated, invalid, ambiguous or unsure, by attribute; of a text stop or length.
    status: Any = None
    error: str | None = None  # why there is nothing
    span: Any = None  # of a record {attribute: [begin, end] of a text in its document}
    raw: Any = None  # of a record {attribute: what was decoded, where no value could be made of it}
    # Of a record asked for by a pydantic model: an instance, None where it does not validate.
    parsed: Any = None

    def _repr_html_(self) -> str:
        shown = {
            k: v if isinstance(v, dict) else {"": v} for k, v in vars(self).items() if v is not None
        }
        return str(pd.DataFrame(shown).to_html())


class LLM:
    """A model in this process, without Ray and files.

    Its first call raises ConfigError, ModelError.

    settings: other keys of the configuration, dotted: {"model.adapter": ..., "engine.max_num_seqs":
    64}. A method (decoding.method) counts where it does what is asked.
    """

    def __init__(self, model: str = "smollm2-135m-instruct", *, settings: Settings = None) -> None:
        self.settings = {"model.name": model, **(settings or {})}
        self._models: dict[str, LoadedModel] = {}  # by their section of the configuration
        self._parts: dict[str, WorkerComponents] = {}  # the last one, by the whole configuration

    def extract(
        self, documents: str | Iterable[str | Mapping[str, Any]], schema: Any
    ) -> list[Answer]:
        """A schema's attributes of texts, or of records (a DataFrame too): title, description or
        text, category.
        """
        fields = [
            dict(one) if isinstance(one, Mapping) else {"text": one} for one in _listed(documents)
        ]
        texts = [
            "text" in record and not {"title", "description"} & record.keys() for record in fields
        ]
        answers: dict[int, Answer] = {}
        for is_text in {*texts} or {True}:  # a text is asked about as if it came alone
            numbers = [number for number, kind in enumerate(texts) if kind == is_text]
            source = {"path": "-", **({"text_columns": ["text"]} if is_text else {})}
            rows = self._rows(
                "extraction",
                {"input": source, "task": task_of(schema)},
                [fields[n] for n in numbers],
            )
            answers |= {
                n: _extracted(records[0], schema) for n, records in zip(numbers, rows, strict=True)
            }
        return [answers[number] for number in range(len(fields))]

    def answer(
        self, context: str, questions: str | Sequence[str | Mapping[str, Any]]
    ) -> list[Answer]:
        """Answers questions on one context: texts (or one), or records of question, choices,
        multi_select.
        """
        fields = {"context": _listed([context])[0], "questions": _listed(questions)}
        rows = self._rows("question_answering", {}, [fields])[0]
        return [_answered(record, "question_answering") for record in rows]

    def generate(self, prompts: str | Sequence[str | list[Any]]) -> list[Answer]:
        """Writes an answer to each prompt: texts, or conversations as lists of turns; of these the
        last answer.
        """
        rows = self._rows("generation", {}, [{"prompt": prompt} for prompt in _listed(prompts)])
        return [_answered(turns[-1], "generation") for turns in rows]

    def _rows(
        self, kind: str, tree: dict[str, Any], fields: Sequence[dict[str, Any]]
    ) -> list[list[Record]]:
        from raypd.answering.components import build
        from raypd.answering.request_queue import answer
        from raypd.billing.meter import Meter
        from raypd.config import METHODS
        from raypd.dataset import filled
        from raypd.tasks.base import Document

        unsaid = {"input": {"path": "-"}, "output": {"path": "-"}}
        settings = dict(self.settings)
        if settings.get("decoding.method") not in METHODS[kind]:
            settings.pop("decoding.method", None)
        config = make_config(
            {**unsaid, **tree, "task": {"kind": kind, **tree.get("task", {})}}, _overrides(settings)
        )
        key = config.model_dump_json()
        if key not in self._parts:
            self._parts = {}  # a cache holds all of a GPU's memory
            self._parts = {key: build(config, None, self._load)}
        documents = [filled(Document(n, str(n)), config, row) for n, row in enumerate(fields)]
        try:
            return answer(self._parts[key], documents, Meter("", config.decoding.method))
        except BaseException:  # programs of this call are still in the engine
            self._parts = {}
            raise

    def _load(self, model: ModelConfig) -> LoadedModel:
        from raypd.models.load import load_model

        key = model.model_dump_json()
        if key not in self._models:
            self._models[key] = load_model(model)
        return self._models[key]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, pd.DataFrame):
        given = given.astype(object).where(given.notna(), None).to_dict("records")
    listed = [given] if isinstance(given, (str, bytes, Mapping)) else [*given]
    if any(isinstance(item, bytes) for item in listed):
        raise TypeError("bytes are no text: decode them, as by .decode()")
    return listed


def _answered(row: Record, kind: str) -> Answer:
    from raypd.tasks.columns import SHAPES

    shape = SHAPES[kind]
    columns = row.columns
    return Answer(
        columns.get(shape.answer),
        columns.get("confidence"),
        columns.get(str(shape.status)),
        row.error,
    )


def _extracted(row: Record, schema: Any) -> Answer:
    if row.error is not None:
        return Answer(error=row.error)
    values = row.columns["values"]
    keys = ("confidence", "status", "span", "raw")
    confidence, status, span, raw = (
        {value["name"]: value.get(key) for value in values} for key in keys
    )
    parsed = None
    with suppress(ValidationError, AttributeError):  # the latter: it is no pydantic model
        parsed = schema.model_validate_json(row.columns["record"])
    return Answer(
        json.loads(row.columns["record"]), confidence, status, span=span, raw=raw, parsed=parsed
    )


def extract(
    source: Any,
    schema: Any = None,
    *,
    model: str | None = None,
    output: str | None = None,
    text: Columns = None,
    settings: Settings = None,
) -> Run:
    """Extracts the attributes of a schema from every document: `raypd extract` as a function.

    Args:
        source: a path (file, folder, glob, S3) or a list of them; texts, dicts, a pandas DataFrame,
            an Arrow table or a
            Ray Dataset (read twice), written into the run's folder first, so that the run can go
                on; or a run's YAML.
        schema: a pydantic model; a JSON Schema or the path of one; attributes (names, or {name,
            type, ...}); or
            {category: {attributes}}, or the path of a YAML with that. None where `source` is a
                YAML.
        output: folder of the run; None: below `runs`, by what is asked of which documents.
        text: column or columns of the document; None: title and description where both are there,
            else as `raypd init`.
        settings: other keys of the configuration, dotted: {"cluster.max_workers": 8}.

    Raises ConfigError, InputError, ModelError before anything runs, RunError later; the same call
    goes on.
    """
    return _run(_config("extraction", source, schema, model, output, text, settings))


def answer(
    source: Any, *, model: str | None = None, output: str | None = None, settings: Settings = None
) -> Run:
    """Answers the questions of every context (columns `context` and `questions`): arguments as
    those of `extract`.
    """
    return _run(_config("question_answering", source, None, model, output, None, settings))


def generate(
    source: Any, *, model: str | None = None, output: str | None = None, settings: Settings = None
) -> Run:
    """Writes an answer to every prompt (column `prompt`): arguments as those of `extract`."""
    return _run(_config("generation", source, None, model, output, None, settings))


def estimate(
    source: Any,
    schema: Any = None,
    *,
    model: str | None = None,
    output: str | None = None,
    text: Columns = None,
    settings: Settings = None,
    sample: int = 64,
) -> Estimate:
    """What `extract` over the same arguments would take and cost, from `sample` decoded
    documents.
    """
    from raypd.estimation.estimate import estimate as make
    from raypd.estimation.machines import EstimateOptions

    return make(
        _config("extraction", source, schema, model, output, text, settings),
        EstimateOptions(sample=sample),
    )


def tune(config: str | Path, *, settings: Settings = None, **options: Any) -> TuneResult:
    """The cheapest settings for the corpus of a YAML, as `raypd tune`; options: the fields of
    TuneOptions.
    """
    from raypd.estimation.tune import TuneOptions
    from raypd.estimation.tune import tune as search

    measurements = Path(config).with_suffix(".tuned.jsonl")
    return search(load_config(config, _overrides(settings)), TuneOptions(**options), measurements)


def nightly(config: str | Path, *, settings: Settings = None, full: bool = False) -> Night:
    """Brings the table of a YAML up to tonight's input, as `raypd nightly`."""
    from raypd.nights.nightly import run_night

    return run_night(load_config(config, _overrides(settings)), full=full)


def train(config: str | Path, *, settings: Settings = None) -> TrainingRecord:
    """Fine-tunes a model as a YAML's section `training` says, as `raypd train`; the same call goes
    on.
    """
    from raypd import training

    return training.train(load_config(config, _overrides(settings), trains=True))


def fit(config: str | Path, *, settings: Settings = None) -> FitResult:
    """The cheapest model that holds an F1 on the documents of a YAML, trained and measured, as
    `raypd fit`.
    """
    from raypd.fitting import run_fit

    return run_fit(str(config), _overrides(settings))


def _run(config: RunConfig) -> Run:
    from raypd.cluster.driver import run_extract

    return Run(run_extract(config).output)


def _overrides(settings: Settings) -> list[str]:
    """As YAML reads them, to which JSON's own escape of an emoji is two characters."""
    texts = {
        key: json.dumps(value, ensure_ascii=False, default=str)
        for key, value in (settings or {}).items()
    }
    plain = {
        key: text.replace("\x7f", r"\x7f").encode("ascii", "backslashreplace")
        for key, text in texts.items()
    }
    return [f"{key}={text.decode()}" for key, text in plain.items()]


def _config(
    kind: str,
    source: Any,
    schema: Any,
    model: str | None,
    output: str | None,
    text: Columns,
    settings: Settings,
) -> RunConfig:
    """The configuration of a call. A source that is no path is written into the run's folder."""
    settings = dict(settings or {})
    settings |= {
        key: value
        for key, value in (("model.name", model), ("output.path", output))
        if value is not None
    }
    if isinstance(source, (str, Path)) and str(source).endswith((".yaml", ".yml")):
        if schema is not None or text is not None:
            raise ConfigError(
                f"{source} has its own task and columns: leave `schema` and `text` out; or "
                "`settings`"
            )
        return load_config(source, _overrides(settings))
    paths: str | list[str] | None = str(source) if isinstance(source, (str, Path)) else None
    if (
        isinstance(source, (list, tuple))
        and all(map(_is_path, source))
        and any(_is_path(s, True) for s in source)
    ):
        paths = [str(path) for path in source]
    if paths is None:
        digest, columns, batches = _in_memory(source)
    else:
        digest = paths if isinstance(paths, str) else json.dumps(paths)
        columns = None
        batches = tuple
    named: dict[str, Any]
    if text is None:
        named = {}
    else:
        named = {"text_columns": [text] if isinstance(text, str) else [*text]}
    if columns is not None:
        named |= {
            f"{key}_column": key if key in map(str.strip, columns.names) else None
            for key in ("id", "category")
        }
    tree: dict[str, Any] = {
        "input": {"path": "-", **named},
        "output": {"path": "-"},
        "task": {"kind": kind, **(task_of(schema) if kind == "extraction" else {})},
    }
    if kind == "extraction" and not isinstance(paths, list):
        rows = batch_rows(next(iter(batches())).slice(0, MOST_ROWS)) if paths is None else None
        look_for_columns(paths or "the table", tree, _overrides(settings), say, rows)
    config = make_config(tree, _overrides(settings))
    if config.output.path == "-":
        name = hashlib.sha256(f"{config.fingerprint()} {digest}".encode()).hexdigest()[:12]
        config = make_config(tree, _overrides({**settings, "output.path": f"runs/{kind}-{name}"}))
    storage.configure(config.storage)
    paths = _stored(config, digest, batches) if paths is None else paths
    return make_config(
        tree, _overrides({**settings, "output.path": config.output.path, "input.path": paths})
    )


def _in_memory(source: Any) -> tuple[str, pa.Schema, Callable[[], Iterable[pa.Table]]]:
    """(digest of what documents in memory hold; their columns; what gives them)"""
    if isinstance(source, (list, tuple)):
        source = _table_of_rows(source)
    if hasattr(source, "iter_batches"):
        schema = source.schema()
        if schema is None:
            raise InputError("the dataset has no rows")
        batches = partial(source.iter_batches, batch_format="pyarrow")
        return _digest(batches()), schema.base_schema, batches
    table = source if isinstance(source, pa.Table) else _table_of(source)
    if not len(table):
        raise InputError("the table has no rows")
    return hashlib.sha256(_parquet(table)).hexdigest(), table.schema, lambda: [table]


def _digest(batches: Iterable[pa.Table]) -> str:
    """Of their rows in any order: a Dataset that is read again may give them in another one."""
    rows = (repr(row).encode() for batch in batches for row in batch.to_pylist())
    return (
        f"{sum(int.from_bytes(hashlib.sha256(row).digest(), 'big') for row in rows) % 2**256:064x}"
    )


def _stored(config: RunConfig, digest: str, batches: Callable[[], Iterable[pa.Table]]) -> str:
    """The path of what is in memory, which is written below the run's folder, once."""
    folder = storage.join(layout.output_folder(config), "input", digest[:16])
    if not storage.exists(storage.join(folder, _WHOLE)):
        storage.make_folder(layout.output_folder(config))  # its owner's alone
        storage.make_folder(folder)
        for number, batch in enumerate(batches()):
            storage.put(storage.join(folder, f"{number:06d}.parquet"), _parquet(batch))
        storage.put(storage.join(folder, _WHOLE), b"")
    return storage.join(glob.escape(folder), "*.parquet")


def _is_path(item: Any, surely: bool = False) -> bool:
    """Whether it may be a path. surely: it is there, or is one by its scheme, its ending or the
    signs of a glob.
    """
    if not isinstance(item, str):
        return isinstance(item, Path)
    marked = "://" in item or literal(item) != item or item.lower().endswith((*TEXT_FILES,))
    named = item.lower().endswith(_DATA) or ("/" in item and (marked or not surely))
    return os.path.exists(item) or (named and not any(map(str.isspace, item)))


def _table_of_rows(rows: Sequence[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        if not isinstance(row, (str, Mapping)) or isinstance(row, str) != isinstance(rows[0], str):
            if isinstance(row, (str, Mapping)):
                kinds = "texts or dicts, all alike"
            else:
                kinds = "paths, texts or dicts"
            raise ConfigError(f"source[{number}]: a list is of {kinds}, not {type(row).__name__}")
    named = [{"text": row} if isinstance(row, str) else row for row in rows]
    names = dict.fromkeys(name for row in named for name in row)
    try:
        # As pandas has it, NaN and NaT are missing values.
        columns = {
            name: pa.array([row.get(name) for row in named], from_pandas=True) for name in names
        }
        return pa.table(columns)
    except (pa.ArrowException, UnicodeError) as error:
        raise InputError(f"the list cannot be stored: {error}") from None


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _table_of(frame: Any) -> pa.Table:
    if not hasattr(frame, "columns"):
        kinds = (
            "a path, a list of paths, texts or dicts, a DataFrame, an Arrow table or a Ray Dataset"
        )
        raise ConfigError(f"source: {kinds}, not {type(frame).__name__}")
    names = [str(name) for name in frame.columns]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"the table has two columns {twice[0]!r}")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    except pa.ArrowException as error:  # a column of texts and numbers
        raise InputError(f"the table cannot be stored: {'; '.join(map(str, error.args))}") from None
