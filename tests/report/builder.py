"""Makes a run's folder of drawn documents and times, by raypd's own meter, book, writer and
records, in a second.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.book import Book
from raypd.billing.meter import Meter, WorkerTime
from raypd.dataset import writer
from raypd.run.lease import Session
from raypd.run.manifest import Manifest, RunRecord
from raypd.run.records import write
from raypd.run.unit import UnitSummary
from raypd.run.usage import GpuUse
from raypd.tasks.columns import EXTRACTION

CATEGORIES = {
    "headphones": ["Brand", "Fit", "Connection", "Noise cancelling", "Battery life in h", "Color"],
    "running shoes": ["Brand", "Audience", "Surface", "Weight in g", "Waterproof"],
    "coffee": ["Brand", "Form", "Roast", "Origin", "Net weight in g"],
    "backpacks": ["Brand", "Volume in l", "Laptop size in inches", "Material"],
}
WORDS = [
    "Auralis",
    "over-ear",
    "wireless",
    "true",
    "40",
    "graphite black",
    "Ethiopia",
    "nylon",
    "trail",
    "750",
]
ERRORS = [
    "products-{n}.jsonl:{n}: not JSON: Expecting ',' delimiter: line 1 column {n} (char {n})",
    ("the document has {n} tokens; with its answers the model's context of 2048 has room for 1890"),
    "category 'gadget-{n}' is not in task.categories",
]
START = 1_790_000_000.0
FINGERPRINT = "0123456789ab"
VERSIONS = {"raypd": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
_Done = tuple[UnitSummary, list[dict[str, Any]]]  # a unit and its rows


@dataclass
class Plan:
    """What the run to be made is like. Times are seconds, money is USD."""

    units: int = 40
    documents: int = 25  # of a unit
    workers: int = 4
    sessions: int = 1
    how: str = "complete"  # of the last session; "running": it has no end
    ledger: bool = True
    budget_usd: float | None = 40.0
    usd_per_hour: float = 2.25  # of one machine with one worker
    missing: int = 0  # units of the plan that were not done
    model: str = "Qwen/Qwen3-1.7B"
    categories: dict[str, list[str]] = field(default_factory=lambda: CATEGORIES)
    # (first row, how many) -> rows of a unit.
    rows: Callable[[int, int], list[dict[str, Any]]] | None = None
    now: float | None = None  # end of the run; default: START + what it took
    config: dict[str, Any] = field(default_factory=dict)


def document(
    number: int, draw: random.Random, categories: dict[str, list[str]] = CATEGORIES
) -> dict[str, Any]:
    """A row as the extraction task writes it: most are ok, some are errors."""
    row: dict[str, Any] = {
        "id": f"B0{number:08d}",
        "source": "products.jsonl",
        "row": number,
        "attempts": 1,
    }
    row |= {
        "status": "ok",
        "error": None,
        "category": None,
        "record": None,
        "values": None,
        "truncated": None,
    }
    if draw.random() < 0.02:
        return {
            **row,
            "status": "error",
            "error": draw.choice(ERRORS).format(n=draw.randrange(100, 99999)),
        }
    category = draw.choices(list(categories), range(len(categories), 0, -1))[0]
    values = [_value(name, draw) for name in categories[category]]
    found = {v["name"]: v["value"] for v in values}
    more = {
        "category": category,
        "record": json.dumps(found),
        "values": values,
        "truncated": draw.random() < 0.03,
    }
    return {
        **row,
        **more,
        "attempts": 2 if draw.random() < 0.01 else 1,
    }


def value(
    name: str,
    shown: str | None,
    confidence: float = 0.5,
    status: str = "ok",
    raw: str | None = None,
) -> Any:
    """A value of a row."""
    return {
        "name": name,
        "value": shown,
        "number": None,
        "boolean": None,
        "confidence": confidence,
        "status": status,
        "raw": raw,
    }


def _value(name: str, draw: random.Random) -> dict[str, Any]:
    found = value(name, draw.choice(WORDS), draw.betavariate(6, 1.2))
    null = {"value": None, "status": "null"}
    if draw.random() < 0.2:
        return found | null
    return found | null | {"status": "invalid", "raw": "12 to"} if draw.random() < 0.02 else found


def build(root: Path, plan: Plan) -> Path:
    """Writes the folder; its path."""
    done = _schedule(plan, random.Random(7))
    if plan.now is None:
        shift = 0.0
    else:
        shift = plan.now - max((unit.committed_at for unit, _ in done), default=START)
    for unit, rows in done:
        unit.began += shift
        unit.committed_at += shift
        table = pa.Table.from_pylist(rows, writer.output_schema(EXTRACTION))
        storage.put(writer.unit_path(str(root), unit.unit), writer._encoded(table, unit))
    task = {
        "kind": "extraction",
        "categories": {c: {"attributes": a} for c, a in plan.categories.items()},
    }
    config = {
        "input": {"path": "s3://corpus/products/*.parquet", "id_column": "id"},
        "task": task,
        "output": {"path": "s3://corpus/runs/products"},
        "model": {"name": plan.model, "dtype": "auto"},
        "decoding": {"method": "hyper_parallel", "max_value_tokens": 30},
        "engine": {"max_num_batched_tokens": 2048, "cache_tokens": None},
        "cluster": {"max_workers": plan.workers, "unit_documents": plan.documents},
        **plan.config,
    }
    write(f"{root}/run.json", RunRecord(FINGERPRINT, config, "2026-09-21T11:11:00+00:00", VERSIONS))
    for number in range(plan.sessions):
        id = f"20260921T1111{number:02d}-a1b2c{number}"
        own = [(unit, rows) for unit, rows in done if unit.session == id]
        began = min((unit.began for unit, _ in own), default=START + 48 + shift) - 48
        ended = max((unit.committed_at for unit, _ in own), default=began) + 2
        how = plan.how if number == plan.sessions - 1 else "interrupted"
        session = Session(began, id, ended, ended, ended - began, how)
        write(
            f"{root}/sessions/{id}.json", Session(began, id, ended) if how == "running" else session
        )
        if plan.ledger:
            write(f"{root}/ledger/{id}.json", _bill(plan, id, began, ended, own))
    if plan.how == "complete" and not plan.missing:
        documents = sum(unit.documents for unit, _ in done)
        write(
            f"{root}/manifest.json",
            Manifest(
                documents=documents,
                units=len(done),
                units_planned=plan.units,
            ),
        )
    return root


def edit_bill(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the file of every bill of a run."""
    for file in (root / "ledger").iterdir():
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))


def _schedule(plan: Plan, draw: random.Random) -> list[_Done]:
    """Which worker did which unit when: 40 s of loading, units one after the other, an idle moment
    now and then.
    """
    done: list[_Done] = []
    each = -(-(plan.units - plan.missing) // plan.sessions)
    began = START
    row = 0
    for session in range(plan.sessions):
        free = [began + 40 + draw.random() * 8 for _ in range(plan.workers)]
        for number in range(session * each, min((session + 1) * each, plan.units - plan.missing)):
            worker = free.index(min(free))
            start = free[worker] + (draw.random() * 60 if draw.random() < 0.03 else 0.2)
            seconds = 31.0 * draw.uniform(0.8, 1.25)
            free[worker] = start + seconds
            first = row % (4000 - plan.documents)
            own = [
                {**one, "row": row + i}
                for i, one in enumerate(_documents()[first : first + plan.documents])
            ]
            rows = plan.rows(row, plan.documents) if plan.rows else own
            n = len(rows)
            failed = sum(row["status"] != "ok" for row in rows)
            counts = {
                "prefill_tokens": 310 * n,
                "shared_tokens": 400 * n,
                "decode_tokens": 24 * n,
                "steps": 5 * n,
            }
            summary = UnitSummary(
                f"products-1-{number:05d}",
                FINGERPRINT,
                f"20260921T1111{session:02d}-a1b2c{session}",
                "products.jsonl",
                row,
                n,
                n - failed,
                failed,
                seconds,
                start + seconds,
                counts,
                f"worker-{worker}",
                start,
                seconds,
            )
            done.append((summary, rows))
            row += n
        began = max(free) + 9 * 3600  # the next session is the next night's
    return done


@cache
def _documents() -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [document(n, draw) for n in range(4000)]


def _bill(plan: Plan, session: str, began: float, ended: float, done: Sequence[_Done]) -> Bill:
    """A session's bill: every worker is a machine of its own, the head is one more at a tenth of
    the price.
    """
    book = Book(Bill(session, began, 0.0, budget_usd=plan.budget_usd))
    price = plan.usd_per_hour
    nodes = [
        (f"n{w}", "g6e.xlarge", ("on-demand", "spot")[w % 2], price, 1) for w in range(plan.workers)
    ]
    book.see(
        [
            NodeTime(
                name,
                began,
                name == "head",
                kind,
                market,
                "us-east-1",
                usd,
                "table 2026-11-01",
                slots=slots,
            )
            for name, kind, market, usd, slots in (
                *nodes,
                ("head", "m7i.large", "on-demand", price / 10, 0),
            )
        ],
        1,
        began,
    )
    workers = [_Worker(number, began + 2) for number in range(plan.workers)]
    for i, (unit, rows) in enumerate(sorted(done, key=lambda pair: pair[0].committed_at)):
        book.take(workers[int(unit.worker.removeprefix("worker-"))].do(unit, rows))
        if i % max(1, len(done) // 100) == 0:
            book.bill(unit.committed_at)
    for worker in workers:
        worker.now = ended
        book.take(worker.meter.report())
    if plan.how != "running":
        book.close(ended)
    return book.bill(ended)


class _Worker:
    """A worker's meter under a clock of its own."""

    def __init__(self, number: int, began: float) -> None:
        self.now = began
        self.meter = Meter(
            f"n{number}",
            "hyper_parallel",
            1.0,
            lambda: self.now,
            lambda: 310.0 * (self.now - began),
            lambda: GpuUse(1, 0.7, 40.0, 1500.0, 2520.0),
        )
        self.meter._totals.worker = f"worker-{number}"

    def do(self, unit: UnitSummary, rows: list[dict[str, Any]]) -> WorkerTime:
        """Does a unit in one step; the report of it."""
        counts = SimpleNamespace(**unit.counts)
        categories = [row["category"] or "" for row in rows]

        def step():
            return setattr(self, "now", unit.committed_at) or [SimpleNamespace(counts=counts)]

        self.now = unit.began
        self.meter.ready()
        self.meter.begin(unit.unit)
        self.meter.documents(unit.unit, categories)
        self.meter.step(SimpleNamespace(step=step, sequences=[]), {unit.unit: 1})
        self.meter.tokens(unit.unit, categories, counts)
        self.meter.commit(unit.unit, self.meter.end(unit.unit), unit.ok, unit.failed)
        return self.meter.report()
