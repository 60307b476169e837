"""Small inputs, configurations for runs over them, and such a run as a process."""

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd.config import RunConfig
from raypd.config.model import METHOD_OPTIONS
from raypd.dataset import planner, writer
from raypd.dataset.plan import Plan
from raypd.dataset.reader import read_unit
from raypd.decoding.counts import Finished
from raypd.errors import RunError
from raypd.run import manifest
from raypd.run.lease import RunLease
from raypd.run.retry_policy import Attempt
from raypd.run.unit import UnitSummary
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import GENERATION
from tests.processes import start

# Section `input` over what `write_jsonl` writes.
TITLES = {"text_columns": ["title"], "category_column": None}
# Section `model` of a run whose answers are made up in almost no time.
FAKE = {
    "name": "fake",
    "fake": {
        "step_seconds": 0.001,
        "prefill_tokens_per_second": 10_000_000,
        "decode_tokens_per_second": 10_000_000,
    },
}
_CLUSTER_KEYS = (
    "readers",
    "cpus_per_worker",
    "unit_documents",
    "units_in_flight",
    "unit_bytes",
    "min_workers",
    "max_workers",
    "max_failed_share",
)


def extraction(**categories: Sequence[str | dict[str, Any]]) -> dict[str, Any]:
    """Section `task`: extraction(shoes=["Brand", {"name": "Size", "type": "number"}])."""
    return {
        "categories": {
            category: {
                "attributes": [{"name": one} if isinstance(one, str) else one for one in named]
            }
            for category, named in categories.items()
        }
    }


def config_tree(
    task: str | dict[str, Any] | None = None,
    path: Any = "in.jsonl",
    folder: Any = "out",
    **sections: Any,
) -> dict[str, Any]:
    """A configuration as YAML has it. task: its section, or its kind; None: an extraction of the
    attribute a in the category c. path, folder: of input and run. sections: others; of `input`,
    `output` and `task` more keys.
    """
    task = {"kind": task} if isinstance(task, str) else task or extraction(c=["a"])
    tree: dict[str, Any] = {
        "input": {"path": path if isinstance(path, list) else str(path)},
        "output": {"path": str(folder)},
        "task": task,
    }
    return tree | {
        name: {**tree[name], **keys} if name in tree else keys for name, keys in sections.items()
    }


def run_config(
    task: str | dict[str, Any] | None = None, *places: Any, **sections: Any
) -> RunConfig:
    """`config_tree`, checked."""
    return RunConfig.model_validate(config_tree(task, *places, **sections))


def decoding_section(method: str, **keys: Any) -> dict[str, Any]:
    """A section `decoding` of a method: options of the method are put into `options`, and those of
    other methods alone are left out.
    """
    section: dict[str, Any] = {"method": method, "options": {}}
    known = {name for options in METHOD_OPTIONS.values() for name in options.model_fields}
    for name, value in keys.items():
        if name in METHOD_OPTIONS[method].model_fields:
            section["options"][name] = value
        elif name not in known:
            section[name] = value
    return section


def with_keys(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with other keys in some sections: with_keys(config, output={"columns":
    "typed"}).
    """
    tree = config.model_dump()
    return RunConfig.model_validate(
        tree | {name: tree[name] | keys for name, keys in sections.items()}
    )


@pytest.fixture(name="config")
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a configuration: config("in/*.jsonl", unit_documents=10, text_columns=["title"],
    ...).
    """

    def make(
        path: Any, output: str = "out", storage: dict[str, Any] | None = None, **keys: Any
    ) -> RunConfig:
        cluster = {"address": "local", "unit_documents": 10, "max_workers": 1}
        engine = {"max_num_seqs": keys.pop("max_num_seqs", 4)}
        cluster |= {key: keys.pop(key) for key in _CLUSTER_KEYS if key in keys}
        output = output if "://" in output else str(tmp_path / output)
        sections = {
            "input": TITLES | keys,
            "engine": engine,
            "cluster": cluster,
            "storage": storage or {},
        }
        return run_config(None, path, output, **sections)

    return make


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Each as a line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_jsonl(path: Path, titles: Sequence[str]) -> Path:
    """One document a title, with ids 0, 1, 2, ..."""
    return write_rows(path, ({"id": i, "title": t} for i, t in enumerate(titles)))


def with_values(table: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    """The table with other values [rows] in one column, whose type stays."""
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.field(at), pa.array(values, table.field(at).type))


def parquet(table: Any, **how: Any) -> bytes:
    """A table as Parquet; a dict's values are its columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink, **how)
    return sink.getvalue().to_pybytes()


def read_all(run: RunConfig) -> list[Document]:
    """All documents of an input, in the order of its units."""
    return [document for unit in planner.plan(run) for document in read_unit(unit, run)]


def says(text: object, *parts: str) -> None:
    """All of these stand in a text, or in the words of an error."""
    assert [part for part in parts if part not in str(text)] == [], text


def run_process(config: RunConfig, tmp_path: Path) -> subprocess.Popen[str]:
    """Starts a run with the fake engine as a process of its own."""
    file = tmp_path / "run.yaml"
    file.write_text(config.model_dump_json())  # JSON is YAML
    return start("-m", "tests.faults.run", str(file))


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Does something behind a run's planning and before it reads."""
    real = planner.plan
    return lambda then: monkeypatch.setattr(
        planner, "plan", lambda *given: (real(*given), then())[0]
    )


def answer(
    task: Any, documents: Sequence[Any], engine: Any, **how: Any
) -> tuple[list[Record], list[Finished]]:
    """All records of some documents, as they come, and what ended in the engine."""
    records = []
    ended = []
    items = list(task.plan(documents))
    while items or engine.pending:
        records += [item for item in items if isinstance(item, Record)]
        for item in items:
            if not isinstance(item, Record):
                engine.submit(
                    item.program,
                    tag=item,
                    seed=item.seed,
                    **how,
                )
        done = engine.step() if engine.pending else []
        assert not [finished.error for finished in done if finished.error is not None]
        items = [item for finished in done for item in finished.tag.finish(finished.answer)]
        ended += done
    return records, ended


def run_here(
    config: RunConfig, build: Any = None, planned: Plan | None = None, most: int | None = None
) -> Plan:
    """A run without Ray, its worker in this process; what was planned. most: units, after which it
    is cut off.
    """
    from raypd.answering import components
    from raypd.cluster.worker import DecodeWorker, WorkerSpec
    from tests.cluster import fakes

    build = build or (components.build if config.model.is_fake else fakes.build)
    output = config.output
    manifest.claim(config, output.path)
    lease = RunLease(output.path)
    planned = planned or planner.plan(config, output.path)
    worker = DecodeWorker(WorkerSpec(config, output.path, lease.id, build=build))
    for number, unit in enumerate(planned):
        if number == most:
            lease.end("failed")
            raise RunError("cut off")
        if not writer.is_committed(output.path, unit.id, output.partition):
            worker.process(unit, Attempt())
    lease.end("complete")
    return planned


def committed(
    folder: Path,
    config: RunConfig,
    documents: Sequence[Document],
    records: Sequence[Record],
    schema: Any = GENERATION,
) -> str:
    """A run as a worker leaves it, one unit a document."""
    manifest.claim(config, str(folder))
    for document in documents:
        answers = [record for record in records if record.index == document.index]
        table = writer.make_table([document], answers, schema, 1)
        ok, failed = writer.count_documents(table)
        unit = f"unit-{document.index}"
        summary = UnitSummary(
            unit, config.fingerprint(), "s", "x.jsonl", document.index, 1, ok, failed, 1.0
        )
        assert writer.commit(str(folder), table, summary)
    return str(folder)


class Clock:
    """In place of the module `time`: it passes only while somebody sleeps, each time so many
    seconds too long.
    """

    def __init__(self, oversleeps: float = 0.0) -> None:
        self.now = 0.0
        self.oversleeps = oversleeps

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.oversleeps


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`driver.run_extract` as `run_here`.

    Returns a function that makes the next runs stop after n units.
    """
    from raypd.cluster import driver

    limit: dict[str, int | None] = {"units": None}

    def run_extract(
        config: RunConfig, *, verbose: bool = False, build: Any = None, planned: Any = None
    ) -> Any:
        return driver.finish(
            config, config.output.path, run_here(config, build, planned, limit["units"])
        )

    monkeypatch.setattr(driver, "run_extract", run_extract)
    return lambda units: limit.update(units=units)
