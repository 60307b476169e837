"""raypd as a stage of a Ray Data pipeline, in the shape of ray.data.llm:

    brands = ProcessorConfig(model="Qwen/Qwen3-1.7B", schema=[{"name": "Brand"}],
    text_columns=["title"]) processor = build_processor(brands)
    processor(ray.data.read_parquet("s3://bucket/products")).write_parquet("s3://bucket/answers")

A row keeps its columns and gets the answer's, or becomes an error row. A batch whose worker died is
done again: rows are written at least once, unless the sink commits. What is never lost, never
doubled and resumes is `raypd extract`.
"""

import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import data as ray_data

from raypd import storage
from raypd.answering.check import check_model
from raypd.answering.components import build
from raypd.answering.request_queue import EngineBroken, UnitState, end_process
from raypd.billing import prices
from raypd.billing.bill import MICRO
from raypd.billing.book import WorkersBill, models_of, token_usd
from raypd.cluster import ledger_actor, machines
from raypd.cluster.actor_pool import map_in_pool
from raypd.cluster.machines import Nodes
from raypd.cluster.ray_session import WorkerResources, worker_resources
from raypd.cluster.worker import EngineActor
from raypd.config import ExtractionConfig, RunConfig
from raypd.config.load import load_config, make_config, with_changes
from raypd.config.schema import task_of
from raypd.dataset import read_table, writer
from raypd.errors import ConfigError, RunError, raised_as
from raypd.estimation import bootstrap, sampling
from raypd.estimation.profile import Profiler, check_sample
from raypd.estimation.records import Figure
from raypd.tasks import columns
from raypd.tasks.base import Document
from raypd.tasks.documents import billed_as

Row = dict[str, Any]
RowMap = Callable[[Row], Row]
_RETRIES = 2  # of a batch whose worker died
_OVERLAP = 2  # batches of a worker at the same time, so that its engine does not drain between two
_POLL_SECONDS = 0.25
_COSTS = pa.schema(
    [
        ("prompt_tokens", pa.int64()),  # on the first row of a document that has several
        ("decoded_tokens", pa.int64()),
        ("seconds", pa.float64()),  # that the document kept its worker busy
        ("cost_usd", pa.float64()),  # of these; null where the machine has no price
    ]
)


@dataclass(kw_only=True)
class ProcessorConfig:
    """What a processor asks, of which model, and on how many workers."""

    # As of `raypd.extract`; answers are typed columns, with __confidence, __status and __span.
    schema: Any = None
    # In place of a schema, for any task; its output.columns counts.
    config: RunConfig | str | Path | None = None
    model: str | None = None  # model.name; None, here and below: as the configuration has it
    method: str | None = None  # decoding.method
    text_columns: Sequence[str] | None = None  # input.text_columns
    # Workers: a number, or the least (1 or more) and the most.
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64  # rows that a worker is given at once; it works on two such batches
    accelerator_type: str | None = None  # of the workers' GPU, as Ray calls it
    # Before the name of every column that is added, where the input has such names.
    prefix: str = ""
    # Any other key, dotted: {"engine.max_num_seqs": 64}.
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ProcessorEstimate:
    """What a dataset would take. seconds: of one worker with its model loaded. usd: None where
    there is no price.
    """

    documents: int
    prompt_tokens: Figure
    decoded_tokens: Figure
    seconds: Figure
    usd: Figure | None


def build_processor(
    config: ProcessorConfig, preprocess: RowMap | None = None, postprocess: RowMap | None = None
) -> "Processor":
    """Makes a processor: a function of a Dataset that returns one, and runs nothing itself.

    preprocess: makes the row that is asked about of a row; it goes on with the columns it returns.
    postprocess: makes the row of the result of an answered one. Raises ConfigError, ModelError.
    """
    return Processor(config, preprocess, postprocess)


class Processor:
    """Made by `build_processor`."""

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
        """The dataset with the answers, lazy.

        Raises ConfigError: a column missing or twice, no node for a worker.
        """
        share = self._share()
        if self._ledger is None:
            self._ledger = ledger_actor.start_for_pipeline(self.run, self._nodes(share))
        dataset = self._prepared(dataset)
        schema = dataset.schema(fetch_if_missing=False)
        if schema is not None:
            _check_columns(schema.names, self.run, self.config.prefix)
        workers = self.config.concurrency
        # Ray 2.60 has no other place for the two retries, and says that it will.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ray_remote_args")
            dataset = map_in_pool(
                dataset,
                AnswerStage,
                (self.run, share, self.config.prefix, self._ledger, self._nodes(share)),
                share,
                workers if isinstance(workers, tuple) else (workers, workers),
                _OVERLAP,
                2 * _OVERLAP,  # below 1.75 times as many the pool does not grow
                batch_size=self.config.batch_size,
                accelerator_type=self.config.accelerator_type,
                # With an end to them, Ray Data leaves the place of a dead worker empty.
                max_restarts=-1,
                # Else a row that kills its worker would do so without end.
                max_task_retries=_RETRIES,
            )
        return dataset if self._postprocess is None else dataset.map(self._postprocess)

    def estimate(self, dataset: ray_data.Dataset, sample: int = 64) -> ProcessorEstimate:
        """What a dataset would take; reads it for about `sample` rows.

        Raises RunError where none can be answered.
        """
        share = self._share()
        dataset = self._prepared(dataset)
        count = dataset.count()
        if not count:
            raise RunError("the dataset is empty: there is nothing to estimate")
        if sample >= count:
            drawn = dataset
        else:
            drawn = dataset.random_sample(sample / count, seed=sampling.SEED)
        try:
            rows = drawn.take_batch(count, batch_format="pyarrow")
        except ValueError:  # of so few rows, none was drawn
            rows = dataset.take_batch(sample, batch_format="pyarrow")
        _check_columns(rows.column_names, self.run, self.config.prefix)
        sizes = {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            "accelerator_type": self.config.accelerator_type,
        }
        profiler = (
            ray.remote(_Measurer).options(**sizes).remote(share.threads, self.run.model.has_weights)
        )
        try:
            profile, node = ray.get(profiler.measure.remote(self.run, read_table(rows, self.run)))
        finally:
            ray.kill(profiler)
        check_sample(profile)
        costs = [cost for cost in profile.costs if cost is not None]
        rng = np.random.default_rng(sampling.SEED)
        ones = [1.0] * len(costs)

        def whole(values: list[float], times: float = 1.0) -> Figure:
            return bootstrap.figure(times * count * bootstrap.ratio(values, ones, rng, count))

        price = _usd_per_second(self._nodes(share), node)
        seconds = [cost.seconds for cost in costs]
        return ProcessorEstimate(
            count,
            whole([cost.prefill_tokens + cost.shared_tokens for cost in costs]),
            whole([cost.decode_tokens for cost in costs]),
            whole(seconds),
            None if price is None else whole(seconds, price),
        )

    def bill(self) -> WorkersBill:
        """What all pipelines' workers have metered until now.

        Raises RunError where the actor that keeps it is gone.
        """
        with raised_as(
            RunError, "the bill is lost with the actor that kept it", ray.exceptions.RayError
        ):
            if self._ledger is None:
                return ledger_actor.PipelineLedger(self.run, lambda _: []).bill()
            bill: WorkersBill = ray.get(self._ledger.bill.remote())
            return bill

    def _prepared(self, dataset: ray_data.Dataset) -> ray_data.Dataset:
        return dataset if self._preprocess is None else dataset.map(self._preprocess)

    def _share(self) -> WorkerResources:
        """What a worker takes: one core unless the configuration says more, so that reads and
        writes have some too.
        """
        if not ray.is_initialized():
            ray.init()
        keys: dict[str, Any] = {"cluster.cpus_per_worker": self.run.cluster.cpus_per_worker or 1.0}
        if self.config.accelerator_type is not None and self.run.cluster.gpus_per_worker is None:
            keys["cluster.gpus_per_worker"] = 1.0  # though no node may have one yet
        return worker_resources(with_changes(self.run, keys))

    def _nodes(self, share: WorkerResources) -> Nodes:
        return partial(machines.look, self.run.cost, prices.table(), share.cpus, share.gpus)


class AnswerStage(EngineActor):
    """A worker of the pool: an engine, to which two batches at a time are given, each in a thread
    of its own.
    """

    def __init__(
        self, config: RunConfig, share: WorkerResources, prefix: str, ledger: Any, nodes: Nodes
    ) -> None:
        super().__init__(config, share.gpus, ledger)
        self.prefix, self.usd_per_second = prefix, _usd_per_second(nodes, self.node)
        storage.configure(config.storage)
        self.load(build, share.threads)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """The rows of a batch in their order, as soon as they are answered."""
        _check_columns(batch.column_names, self.config, self.prefix, missing=False)
        documents = read_table(batch, self.config)
        unit = uuid.uuid4().hex
        try:
            with self.request_queue.unit(unit) as state:
                self.request_queue.count(
                    state, {row.index: billed_as(row, self.config) for row in documents}
                )
                with self.request_queue.answering(state, documents) as answering:
                    for begin, end in self._ready(documents, state, answering):
                        yield self._rows(batch, documents[begin:end], state)
                spent = self.meter.end(unit)
                ok = len(
                    state.answered
                    - {record.index for record in state.records if record.error is not None}
                )
                self.meter.commit(unit, spent, ok, len(documents) - ok)
        except EngineBroken as error:  # Ray tries the batch in a new process
            end_process(error)
        finally:
            self.report()

    def _ready(
        self, documents: Sequence[Document], state: UnitState, answering: Future[None]
    ) -> Iterator[tuple[int, int]]:
        """Ranges of documents that are answered, in the order of the batch: done again, it gives
        the same blocks.
        """
        begin = 0
        while begin < len(documents):
            end = len(documents)
            if wait([answering], timeout=_POLL_SECONDS).done:
                answering.result()
            else:
                # Tasks other than extraction may plan more requests of a document whose first are
                # answered.
                planned = isinstance(self.config.task, ExtractionConfig) or not state.has_more
                answered = state.answered if planned else set()
                end = next(n for n in range(begin, end + 1) if n == end or n not in answered)
            if end > begin:
                yield begin, end
                begin = end

    def _rows(self, batch: pa.Table, documents: Sequence[Document], state: UnitState) -> pa.Table:
        indices = {document.index for document in documents}
        records = [record for record in state.records if record.index in indices]
        table = writer.make_table(documents, columns.rows_of(records, self.config), self.schema, 1)
        prefill, decode, prefilled, decoded = self.meter.totals()
        rates = prefill / max(1, prefilled), decode / max(1, decoded)
        models = models_of(self.config)
        usage_by_row = dict(state.usage_by_row)
        costs = []
        rows = table["row"].to_pylist()
        for row in rows:
            tokens: Counter[str] = Counter()
            server_usd = 0.0
            for name, model in models.items():
                # The first row of a document gets its usage, and later rows get none.
                usage = usage_by_row.pop((row, name), Counter())
                tokens.update(usage)
                server_usd += token_usd(usage, model) / MICRO
            prefill_tokens = tokens["prefill_tokens"]
            decode_tokens = tokens["decode_tokens"]
            seconds = prefill_tokens * rates[0] + decode_tokens * rates[1]
            usd = None if self.usd_per_second is None else seconds * self.usd_per_second
            if server_usd:
                usd = (usd or 0.0) + server_usd
            costs.append(
                {
                    "prompt_tokens": prefill_tokens + tokens["shared_tokens"],
                    "decoded_tokens": decode_tokens,
                    "seconds": seconds,
                    "cost_usd": usd,
                }
            )
        answers = table.select(_answer_columns(self.config))
        result = batch.take(rows)
        for part in (answers, pa.Table.from_pylist(costs, _COSTS)):
            for name in part.column_names:
                result = result.append_column(self.prefix + name, part[name])
        return result


class _Measurer(Profiler):
    def measure(self, config: RunConfig, documents: Sequence[Document]) -> tuple[Any, str]:
        return self.profile(config, documents), ray.get_runtime_context().get_node_id()


def _usd_per_second(nodes: Nodes, node: str) -> float | None:
    """What a worker's place on a node costs; None where the node has no price."""
    node_time = next((candidate for candidate in nodes({node}) if candidate.node == node), None)
    if node_time and node_time.usd_per_hour:
        return node_time.usd_per_hour / 3600 / max(1, node_time.slots)
    return None


def _configuration(config: ProcessorConfig) -> RunConfig:
    texts = None if config.text_columns is None else list(config.text_columns)
    settings: Row = {
        "model.name": config.model,
        "decoding.method": config.method,
        "input.text_columns": texts,
    }
    keys = {key: value for key, value in settings.items() if value is not None}
    if (config.schema is None) == (config.config is None):
        raise ConfigError("ProcessorConfig: give either schema or config")
    if config.config is None:
        task = task_of(config.schema)
        where = {"path": "(a dataset)"}
        column = {"category_column": None} if len(task.get("categories", [1])) == 1 else {}
        run = make_config(
            {"input": {**where, **column}, "output": {**where, "columns": "typed"}, "task": task}
        )
    else:
        run = config.config if isinstance(config.config, RunConfig) else load_config(config.config)
    return with_changes(run, {**keys, **config.settings})


def _answer_columns(config: RunConfig) -> list[str]:
    """The columns of an answer.

    A document's category is in the input already, where there is more than one.
    """
    return [name for name in columns.columns_of(config).names if name != "category"] + [
        "status",
        "error",
    ]


def _check_columns(
    names: Sequence[str], config: RunConfig, prefix: str, missing: bool = True
) -> None:
    """Raises ConfigError where columns that are added are there already, or where columns to be
    read are missing.
    """
    both = [
        name
        for name in (prefix + column for column in [*_answer_columns(config), *_COSTS.names])
        if name in names
    ]
    if both:
        raise ConfigError(
            f"the input has columns {', '.join(both)}, as the answers do: give ProcessorConfig "
            "a prefix"
        )
    gone = {key: name for key, name in config.wanted_columns().items() if name not in names}
    gone.pop("input.id_column", None)
    if missing and gone:
        key, name = next(iter(gone.items()))
        raise ConfigError(f"{key}: the dataset has no column {name!r}; it has {', '.join(names)}")
