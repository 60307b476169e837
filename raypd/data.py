"""raypd as a stage of a Ray Data pipeline, with an interface like that of ray.data.llm:

    brands = ProcessorConfig(
        model="Qwen/Qwen3-1.7B", schema=[{"name": "Brand"}], text_columns=["title"]
    )
    processor = build_processor(brands)
    products = ray.data.read_parquet("s3://bucket/products")
    processor(products).write_parquet("s3://bucket/answers")

`read` reads any input of raypd instead, with the same readers as a run:

    products = read("s3://bucket/catalogues/*.pdf")

A row keeps its columns and gets those of its answer, or becomes an error row. A batch whose worker
died is processed again, so rows are written at least once, unless the sink commits. Use `raypd
extract` for runs that can resume and in which no document is lost or duplicated.
"""

import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import data as ray_data

from raypd import storage
from raypd.answering import EngineBroken, UnitState, build, check_model, end_process
from raypd.billing import MICRO, WorkersBill, models_of, prices, token_usd
from raypd.cluster import (
    DocumentSource,
    EngineActor,
    Nodes,
    WorkerResources,
    ledger_actor,
    machines,
    map_in_pool,
    worker_resources,
)
from raypd.config import (
    ExtractionConfig,
    RunConfig,
    load_config,
    make_config,
    task_of,
    with_changes,
)
from raypd.dataset import planner, read_table, writer
from raypd.errors import ConfigError, InputError, RunError, raised_as
from raypd.estimation import Figure, Profile, Profiler, bootstrap, check_sample, sampling
from raypd.tasks import Document, billed_as, columns

Row = dict[str, Any]
RowMap = Callable[[Row], Row]
# The number of retries of a batch whose worker died.
_RETRIES = 2
# The number of batches that a worker processes at the same time, so that its engine never runs
# empty.
_OVERLAP = 2
_POLL_SECONDS = 0.25
# The columns of a document's cost. If a document has several rows, only the first row has them.
_COSTS = pa.schema(
    [
        ("prompt_tokens", pa.int64()),
        ("decoded_tokens", pa.int64()),
        # The seconds for which the document kept its worker busy.
        ("seconds", pa.float64()),
        # The price of these seconds; null if the machine has no price.
        ("cost_usd", pa.float64()),
    ]
)


@dataclass(kw_only=True)
class ProcessorConfig:
    """The task of a processor, its model and its number of workers.

    Attributes:
        schema: What to extract, as in `raypd.extract`. Answers are typed columns, with columns
            __confidence, __status and __span.
        config: A configuration instead of a schema, for any task; its output.columns applies.
        model: The value of model.name; here and below, None keeps the value of the configuration.
        method: The value of decoding.method.
        text_columns: The value of input.text_columns.
        concurrency: The number of workers, or the smallest (at least 1) and the largest number.
        batch_size: Rows per batch. A worker processes two batches at the same time.
        accelerator_type: The workers' GPU, by Ray's name for it.
        prefix: A prefix for the names of all added columns; needed if the input has such names.
        settings: Further dotted keys of the configuration: {"engine.max_num_seqs": 64}.
    """

    schema: Any = None
    config: RunConfig | str | Path | None = None
    model: str | None = None
    method: str | None = None
    text_columns: Sequence[str] | None = None
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    accelerator_type: str | None = None
    prefix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ProcessorEstimate:
    """The expected time and cost of a dataset."""

    documents: int
    prompt_tokens: Figure
    decoded_tokens: Figure
    # The seconds of one worker with its model loaded.
    seconds: Figure
    # The price in USD; None if the machine has no price.
    usd: Figure | None


def read(
    path: str | Sequence[str] | None = None,
    *,
    config: RunConfig | str | Path | None = None,
    columns: Sequence[str] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> ray_data.Dataset:
    """Read any input of raypd as a Ray Dataset of documents, exactly as a run reads it.

    Args:
        path: The value of input.path: files, folders or globs of any format, local or in an object
            store.
        config: A configuration, of which only the sections `input` and `storage` are used; `path`
            replaces its input.path.
        columns: Columns to read in addition to `input.id_column`, `input.text_columns` and
            `input.category_column`.
        settings: Further dotted keys of the configuration: {"input.text_columns": ["title"]}.

    Returns:
        A lazy dataset with a row for each document: `id`, the columns, `read_error` (the reason why
        the document could not be read, or null), `source` and `row`.

    Raises:
        ConfigError: Neither a path nor a configuration is given, or a key is invalid.
        InputError: The input cannot be planned, or files cannot be read and `input.on_damaged` is
            `fail`.
    """
    if path is None and config is None:
        raise ConfigError("raypd.data.read: give a path or a configuration")
    if isinstance(config, RunConfig):
        run = config
    elif config is not None:
        run = load_config(config)
    else:
        source = {"path": path if isinstance(path, str) else list(path or ())}
        task = {"attributes": [{"name": "a"}]}
        run = make_config({"input": source, "output": {"path": "(a dataset)"}, "task": task})
    changes = dict(settings)
    if path is not None:
        changes["input.path"] = path if isinstance(path, str) else list(path)
    run = with_changes(run, changes)
    storage.configure(run.storage)
    planned = planner.plan(run)
    damaged = next(planned.damaged(), None)
    if damaged is not None and run.input.on_damaged == "fail":
        raise InputError(damaged.damaged)
    return ray_data.read_datasource(DocumentSource(planned, run, columns))


def build_processor(
    config: ProcessorConfig, preprocess: RowMap | None = None, postprocess: RowMap | None = None
) -> "Processor":
    """Create a processor: a lazy function from a Dataset to a Dataset.

    Args:
        config: The settings of the processor.
        preprocess: Maps a row of the input to the row that is processed. The result keeps the
            columns of that row.
        postprocess: Maps an answered row to a row of the result.

    Raises:
        ConfigError, ModelError: The configuration or the model is wrong.
    """
    return Processor(config, preprocess, postprocess)


class Processor:
    """A function from a Dataset to a Dataset with answers, which `build_processor` creates."""

    def __init__(
        self, config: ProcessorConfig, preprocess: RowMap | None, postprocess: RowMap | None
    ) -> None:
        self.config = config
        self._preprocess = preprocess
        self._postprocess = postprocess
        self.run = _configuration(config)
        check_model(self.run)
        self._ledger: Any = None

    def __call__(self, dataset: ray_data.Dataset) -> ray_data.Dataset:
        """Return the dataset with the answers, which is lazy.

        Raises:
            ConfigError: A column is missing or already exists, or no node fits a worker.
        """
        share = self._share()
        if self._ledger is None:
            self._ledger = ledger_actor.start_for_pipeline(self.run, self._nodes(share))
        dataset = self._prepared(dataset)
        schema = dataset.schema(fetch_if_missing=False)
        if schema is not None:
            _check_columns(schema.names, self.run, self.config.prefix)
        arguments = (self.run, share, self.config.prefix, self._ledger, self._nodes(share))
        workers = self.config.concurrency
        if isinstance(workers, int):
            workers = (workers, workers)
        # Ray 2.60 warns about `ray_remote_args`, but has no other parameter for the two retries.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ray_remote_args")
            answered = map_in_pool(
                dataset,
                AnswerStage,
                arguments,
                share,
                workers,
                _OVERLAP,
                # The pool does not grow if this is less than 1.75 times the overlap.
                2 * _OVERLAP,
                batch_size=self.config.batch_size,
                accelerator_type=self.config.accelerator_type,
                # With a limit, Ray Data would not replace a dead worker.
                max_restarts=-1,
                # Without a limit, a row that kills its worker would do so forever.
                max_task_retries=_RETRIES,
            )
        if self._postprocess is None:
            return answered
        return answered.map(self._postprocess)

    def estimate(self, dataset: ray_data.Dataset, sample: int = 64) -> ProcessorEstimate:
        """Estimate the time and cost of a dataset.

        Args:
            dataset: The dataset, which is read for the sample.
            sample: The approximate number of rows to process.

        Raises:
            RunError: The dataset is empty, or no row can be answered.
        """
        share = self._share()
        dataset = self._prepared(dataset)
        count = dataset.count()
        if not count:
            raise RunError("the dataset is empty: there is nothing to estimate")
        rows = _sampled_rows(dataset, count, sample)
        _check_columns(rows.column_names, self.run, self.config.prefix)
        profile, node = self._measure(rows, share)
        check_sample(profile, "sample")
        costs = [cost for cost in profile.costs if cost is not None]
        rng = np.random.default_rng(sampling.SEED)
        ones = [1.0] * len(costs)

        def total(values: list[float], factor: float = 1.0) -> Figure:
            return bootstrap.figure(factor * count * bootstrap.ratio(values, ones, rng, count))

        seconds = [cost.seconds for cost in costs]
        estimate = ProcessorEstimate(
            documents=count,
            prompt_tokens=total([cost.prefill_tokens + cost.shared_tokens for cost in costs]),
            decoded_tokens=total([cost.decode_tokens for cost in costs]),
            seconds=total(seconds),
            usd=None,
        )
        usd_per_second = _usd_per_second(self._nodes(share), node)
        if usd_per_second is not None:
            estimate.usd = total(seconds, usd_per_second)
        return estimate

    def _measure(self, rows: pa.Table, share: WorkerResources) -> tuple[Profile, str]:
        """Profile rows in a worker; return the profile and the worker's node."""
        options = {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            "accelerator_type": self.config.accelerator_type,
        }
        has_weights = self.run.model.has_weights
        profiler = ray.remote(_Measurer).options(**options).remote(share.threads, has_weights)
        try:
            documents = read_table(rows, self.run)
            result: tuple[Profile, str] = ray.get(profiler.measure.remote(self.run, documents))
        finally:
            ray.kill(profiler)
        return result

    def bill(self) -> WorkersBill:
        """Return what the workers of all pipelines have recorded so far.

        Raises:
            RunError: The actor that keeps the bill has died.
        """
        with raised_as(
            RunError, "the bill is lost with the actor that kept it", ray.exceptions.RayError
        ):
            if self._ledger is None:
                return ledger_actor.PipelineLedger(self.run, list).bill()
            bill: WorkersBill = ray.get(self._ledger.bill.remote())
            return bill

    def _prepared(self, dataset: ray_data.Dataset) -> ray_data.Dataset:
        """Return the dataset with preprocessed rows."""
        if self._preprocess is None:
            return dataset
        return dataset.map(self._preprocess)

    def _share(self) -> WorkerResources:
        """Return the resources of a worker.

        It takes one core unless the configuration says otherwise, so that reading and writing have
        cores as well.
        """
        if not ray.is_initialized():
            ray.init()
        cluster = self.run.cluster
        keys: dict[str, Any] = {"cluster.cpus_per_worker": cluster.cpus_per_worker or 1.0}
        if self.config.accelerator_type is not None and cluster.gpus_per_worker is None:
            # A node with such a GPU may have yet to be started.
            keys["cluster.gpus_per_worker"] = 1.0
        return worker_resources(with_changes(self.run, keys))

    def _nodes(self, share: WorkerResources) -> Nodes:
        return partial(machines.look, self.run.cost, prices.table(), share.cpus, share.gpus)


class AnswerStage(EngineActor):
    """A worker of the pool.

    It has an engine and gets two batches at the same time, each in its own thread.
    """

    def __init__(
        self, config: RunConfig, share: WorkerResources, prefix: str, ledger: Any, nodes: Nodes
    ) -> None:
        super().__init__(config, share.gpus, ledger)
        self.prefix = prefix
        self.usd_per_second = _usd_per_second(nodes, self.node)
        storage.configure(config.storage)
        self.load(build, share.threads)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Yield the rows of a batch in order, as soon as they are answered."""
        _check_columns(batch.column_names, self.config, self.prefix, missing=False)
        documents = read_table(batch, self.config)
        unit = uuid.uuid4().hex
        categories = {}
        for document in documents:
            categories[document.index] = billed_as(document, self.config.task, self.config.input)
        try:
            with self.request_queue.unit(unit) as state:
                self.request_queue.count(state, categories)
                with self.request_queue.answering(state, documents) as answering:
                    for begin, end in self._ready(documents, state, answering):
                        yield self._rows(batch, documents[begin:end], state)
                self._commit(unit, documents, state)
        except EngineBroken as error:
            # Ray processes the batch again in a new process.
            end_process(error)
        finally:
            self.report()

    def _commit(self, unit: str, documents: Sequence[Document], state: UnitState) -> None:
        """Add the tokens and seconds of a batch to the bill."""
        spent = self.meter.end(unit)
        failed = {record.index for record in state.records if record.error is not None}
        ok = len(state.answered - failed)
        self.meter.commit(unit, spent, ok, len(documents) - ok)

    def _ready(
        self, documents: Sequence[Document], state: UnitState, answering: Future[None]
    ) -> Iterator[tuple[int, int]]:
        """Yield ranges of answered documents in the order of the batch.

        A batch that is processed again yields the same blocks.
        """
        begin = 0
        while begin < len(documents):
            if wait([answering], timeout=_POLL_SECONDS).done:
                answering.result()
                end = len(documents)
            else:
                end = self._answered_until(begin, documents, state)
            if end > begin:
                yield begin, end
                begin = end

    def _answered_until(self, begin: int, documents: Sequence[Document], state: UnitState) -> int:
        """Return the index of the first document from `begin` that is not answered yet."""
        if state.has_more and not isinstance(self.config.task, ExtractionConfig):
            # Other tasks may plan further requests of a document after its first requests are
            # answered.
            return begin
        answered = state.answered
        end = begin
        while end < len(documents) and end in answered:
            end += 1
        return end

    def _rows(self, batch: pa.Table, documents: Sequence[Document], state: UnitState) -> pa.Table:
        """Return the rows of documents with the columns of their answers and costs."""
        indices = {document.index for document in documents}
        records = [record for record in state.records if record.index in indices]
        table = writer.make_table(documents, columns.rows_of(records, self.config), self.schema, 1)
        rows = table["row"].to_pylist()
        result = batch.take(rows)
        for added_columns in (
            table.select(_answer_columns(self.config)),
            self._costs(rows, state),
        ):
            for name in added_columns.column_names:
                result = result.append_column(self.prefix + name, added_columns[name])
        return result

    def _costs(self, rows: Sequence[int], state: UnitState) -> pa.Table:
        """Return the costs of rows, with the columns of _COSTS.

        The first row of a document has all of its costs, including those of a cascade's second
        model.
        """
        prefill_seconds, decode_seconds, prefilled, decoded = self.meter.totals()
        seconds_per_prefilled = prefill_seconds / max(1, prefilled)
        seconds_per_decoded = decode_seconds / max(1, decoded)
        models = models_of(self.config.model, self.config.cascade)
        usage_by_row = dict(state.usage_by_row)
        costs = []
        for row in rows:
            tokens: Counter[str] = Counter()
            server_micro_usd = 0.0
            for name, model in models.items():
                usage = usage_by_row.pop((row, name), Counter())
                tokens.update(usage)
                server_micro_usd += token_usd(usage, model)
            prefill_tokens = tokens["prefill_tokens"]
            decode_tokens = tokens["decode_tokens"]
            seconds = prefill_tokens * seconds_per_prefilled + decode_tokens * seconds_per_decoded
            usd = None
            if self.usd_per_second is not None:
                usd = seconds * self.usd_per_second
            if server_micro_usd:
                usd = (usd or 0.0) + server_micro_usd / MICRO
            cost = {
                "prompt_tokens": prefill_tokens + tokens["shared_tokens"],
                "decoded_tokens": decode_tokens,
                "seconds": seconds,
                "cost_usd": usd,
            }
            costs.append(cost)
        return pa.Table.from_pylist(costs, _COSTS)


class _Measurer(Profiler):
    """A profiler that reports the node it is on."""

    def measure(self, config: RunConfig, documents: Sequence[Document]) -> tuple[Profile, str]:
        return self.profile(config, documents), ray.get_runtime_context().get_node_id()


def _sampled_rows(dataset: ray_data.Dataset, count: int, sample: int) -> pa.Table:
    """Draw about `sample` of the `count` rows of a dataset."""
    drawn = dataset
    if sample < count:
        drawn = dataset.random_sample(sample / count, seed=sampling.SEED)
    try:
        return drawn.take_batch(count, batch_format="pyarrow")
    except ValueError:
        # If there are few rows, none of them may be drawn.
        return dataset.take_batch(sample, batch_format="pyarrow")


def _usd_per_second(nodes: Nodes, node: str) -> float | None:
    """Return the price of a worker on a node; None if the node has no price."""
    for node_time in nodes():
        if node_time.node == node:
            if not node_time.usd_per_hour:
                return None
            return node_time.usd_per_hour / 3600 / max(1, node_time.slots)
    return None


def _configuration(config: ProcessorConfig) -> RunConfig:
    """Return the configuration of a processor."""
    if (config.schema is None) == (config.config is None):
        raise ConfigError("ProcessorConfig: give either schema or config")
    if isinstance(config.config, RunConfig):
        run = config.config
    elif config.config is not None:
        run = load_config(config.config)
    else:
        run = _configuration_of_schema(config.schema)
    changes: dict[str, Any] = {}
    if config.model is not None:
        changes["model.name"] = config.model
    if config.method is not None:
        changes["decoding.method"] = config.method
    if config.text_columns is not None:
        changes["input.text_columns"] = list(config.text_columns)
    return with_changes(run, {**changes, **config.settings})


def _configuration_of_schema(schema: Any) -> RunConfig:
    """Return the configuration of an extraction with typed columns."""
    task = task_of(schema)
    source: dict[str, Any] = {"path": "(a dataset)"}
    if len(task.get("categories", [1])) == 1:
        # A document does not have to name the only category.
        source["category_column"] = None
    output = {"path": "(a dataset)", "columns": "typed"}
    return make_config({"input": source, "output": output, "task": task})


def _answer_columns(config: RunConfig) -> list[str]:
    """Return the columns of an answer.

    If there are several categories, the input already has a column for them.
    """
    names = [name for name in columns.columns_of(config).names if name != "category"]
    return [*names, "status", "error"]


def _check_columns(
    names: Sequence[str], config: RunConfig, prefix: str, missing: bool = True
) -> None:
    """Check the columns of the input.

    Args:
        names: The columns of the input.
        config: The configuration.
        prefix: The prefix of the names of added columns.
        missing: Whether to check that the input has the columns to be read.

    Raises:
        ConfigError: A column to be added already exists, or a column to be read is missing.
    """
    added_names = [prefix + name for name in [*_answer_columns(config), *_COSTS.names]]
    existing = [name for name in added_names if name in names]
    if existing:
        raise ConfigError(
            f"the input and the answers both have columns {', '.join(existing)}: give "
            "ProcessorConfig a prefix"
        )
    if not missing:
        return
    for key, name in config.wanted_columns().items():
        if name.partition(".")[0] not in names and name not in names and key != "input.id_column":
            raise ConfigError(
                f"{key}: the dataset has no column {name!r}; it has {', '.join(names)}"
            )
