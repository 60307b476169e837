"""What a night costs: python -m tests.nights.many_documents [DOCUMENTS].

A table of so many documents, then a night with nothing new, and one in which every object was
rewritten and 1% of the documents changed. Each night is a process of its own. Answers are made up
and committed as a worker commits them.
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import Plan, read_unit, writer
from raypd.nights import run_night
from raypd.run import Manifest, UnitSummary, manifest
from raypd.tasks import Record, columns_of
from tests.runs import extraction, run_config

ATTRIBUTES = ["power", "colour", "brand", "height", "width", "weight", "socket", "ean"]
FILE_DOCUMENTS = 5_000
ROW_GROUP = 1_000
CHANGED_EVERY = 100


def write_input(folder: Path, documents: int, night: int) -> None:
    """Write all objects; from the second night on, every hundredth document is another."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, documents, FILE_DOCUMENTS):
        numbers = range(start, min(documents, start + FILE_DOCUMENTS))
        titles = []
        for number in numbers:
            changed = night if number % CHANGED_EVERY == 0 else 0
            titles.append(f"Item {number}: a lamp of {number % 97} lumen, model {number}-{changed}")
        columns = {"id": [f"{number:09d}" for number in numbers], "title": titles}
        table = pa.table({**columns, "night": [night] * len(numbers)})
        pq.write_table(table, folder / f"{start:09d}.parquet", row_group_size=ROW_GROUP)


def configuration(folder: Path) -> RunConfig:
    return run_config(
        extraction(lamp=ATTRIBUTES),
        folder / "in",
        folder / "root",
        input={"text_columns": ["title"], "category_column": None},
        cluster={"address": "local"},
        model="fake",
    )


def extract(
    config: RunConfig, *, planned: Plan, verbose: bool = False, build: Any = None
) -> Manifest:
    """Commit answers to all documents of a plan, in place of `driver.run_extract`."""
    output = config.output.path
    manifest.claim(config, output)
    schema = columns_of(config)
    record = json.dumps(dict.fromkeys(ATTRIBUTES, "some value"))
    values = []
    for name in ATTRIBUTES:
        values.append(
            {
                "name": name,
                "value": "some value",
                "status": "ok",
                "confidence": 0.9,
            }
        )
    answer = {"category": "lamp", "record": record, "values": values, "truncated": False}
    for unit in planned:
        documents = read_unit(unit, config)
        records = [Record(document.index, answer) for document in documents]
        table = writer.make_table(documents, records, schema, 1)
        count = len(documents)
        fingerprint = config.fingerprint()
        summary = UnitSummary(unit.id, fingerprint, "s", unit.name, 0, count, count, 0, 1.0)
        writer.commit(output, table, summary)
    return driver.finish(config, output, planned)


def night(folder: Path) -> dict[str, Any]:
    """Run a night in this process, and measure it."""
    began = time.monotonic()
    cpu = time.process_time()
    extraction_cpu = 0.0

    def timed(*arguments: Any, **keys: Any) -> Manifest:
        nonlocal extraction_cpu
        start = time.process_time()
        result = extract(*arguments, **keys)
        extraction_cpu += time.process_time() - start
        return result

    driver.run_extract = timed
    made = run_night(configuration(folder))
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu - extraction_cpu, 1),
        "extraction_cpu_seconds": round(extraction_cpu, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "documents": made.documents,
        "extracted": made.extracted,
        "nothing_new": made.nothing_new,
    }


def in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(folder: Path, documents: int) -> dict[str, dict[str, Any]]:
    """Run three nights; returns what each of them took."""
    write_input(folder / "in", documents, 0)
    nights = {"first": in_process(night, folder)}
    nights["nothing new"] = in_process(night, folder)
    write_input(folder / "in", documents, 1)
    nights["all objects rewritten"] = in_process(night, folder)
    storage.delete_folder(str(folder / "in"))
    return nights


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="raypd-nights-") as directory:
        found = measure(Path(directory), int(sys.argv[1]) if sys.argv[1:] else 1_000_000)
        for name, figures in found.items():
            print(f"{name}: {json.dumps(figures)}")
