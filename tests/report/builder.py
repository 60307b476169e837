"""Makes a run's folder as a finished or broken-off run leaves it, with as many units as wanted, in a second or two.

The files follow what raypd writes (run.json, sessions, units with their summaries, ledger); the figures fit together:
parts of the bill add up to it, and the timelines of the workers are those of the units.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd.dataset.writer import output_schema
from raypd.run.records import (
    Bill,
    Energy,
    Manifest,
    NodeTime,
    RunRecord,
    Session,
    Spans,
    UnitSummary,
    WorkerTime,
    to_json,
)

_TYPES = {"name": "string", "value": "string", "number": "double", "boolean": "bool", "confidence": "float",
          "status": "string", "raw": "string"}  # fmt: skip
VALUE = pa.struct([(name, pa.type_for_alias(kind)) for name, kind in _TYPES.items()])
SCHEMA = output_schema(pa.schema([("category", pa.string()), ("record", pa.string()), ("values", pa.list_(VALUE)),
                                  ("truncated", pa.bool_())]))  # fmt: skip
CATEGORIES = {
    "headphones": ["Brand", "Fit", "Connection", "Noise cancelling", "Battery life in h", "Color"],
    "running shoes": ["Brand", "Audience", "Surface", "Weight in g", "Waterproof"],
    "coffee": ["Brand", "Form", "Roast", "Origin", "Net weight in g"],
    "backpacks": ["Brand", "Volume in l", "Laptop size in inches", "Material"],
}
WORDS = "Auralis|over-ear|wireless|true|40|graphite black|Ethiopia|nylon|women|trail|750".split("|")  # noqa: SIM905
ERRORS = [
    "products-{n}.jsonl:{n}: not JSON: Expecting ',' delimiter: line 1 column {n} (char {n})",
    "the document has {n} tokens; with its answers the model's context of 2048 has room for 1890",
    "category 'gadget-{n}' is not in task.categories",
]
Rows = Callable[[int, int], list[dict[str, Any]]]  # (first row, how many) -> rows of a unit
START = 1_790_000_000.0
FINGERPRINT = "0123456789ab"
VERSIONS = {"raypd": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}


@dataclass
class Plan:
    """What the run to be made is like. Times are seconds, money is USD."""

    units: int = 40
    documents: int = 25  # of a unit
    workers: int = 4
    sessions: int = 1
    how: str = "complete"  # of the last session; "running": it has no end
    ledger: bool = True
    workers_kept: bool = True  # summaries name their worker
    budget_usd: float | None = 40.0
    usd_per_hour: float = 2.25  # of one machine with one worker
    unit_seconds: float = 31.0
    missing: int = 0  # units of the plan that were not done
    model: str = "Qwen/Qwen3-1.7B"
    categories: dict[str, list[str]] = field(default_factory=lambda: CATEGORIES)
    rows: Rows | None = None
    now: float | None = None  # end of the run; default: START + what it took
    config: dict[str, Any] = field(default_factory=dict)
    name: str = "products-1-{unit:05d}"


@dataclass
class _Done:
    """A unit and its rows."""

    summary: UnitSummary
    number: int  # of its worker
    rows: list[dict[str, Any]]


def document(number: int, draw: random.Random, categories: dict[str, list[str]] = CATEGORIES) -> dict[str, Any]:
    """A row as the extraction task writes it: most are ok, some are errors."""
    row: dict[str, Any] = {"id": f"B0{number:08d}", "source": "products.jsonl", "row": number, "attempts": 1}
    row |= {"status": "ok", "error": None, "category": None, "record": None, "values": None, "truncated": None}
    if draw.random() < 0.02:
        return {**row, "status": "error", "error": draw.choice(ERRORS).format(n=draw.randrange(100, 99999))}
    category = draw.choices(list(categories), range(len(categories), 0, -1))[0]
    values = [_value(name, draw) for name in categories[category]]
    found = {v["name"]: v["value"] for v in values}
    more = {"category": category, "record": json.dumps(found), "values": values, "truncated": draw.random() < 0.03}
    return {**row, **more, "attempts": 2 if draw.random() < 0.01 else 1}


def value(name: str, shown: str | None, confidence: float = 0.5, status: str = "ok", raw: str | None = None) -> Any:
    """A value of a row."""
    return {"name": name, "value": shown, "number": None, "boolean": None, "confidence": confidence, "status": status,
            "raw": raw}  # fmt: skip


def _value(name: str, draw: random.Random) -> dict[str, Any]:
    found = value(name, draw.choice(WORDS), draw.betavariate(6, 1.2))
    if draw.random() < 0.2:
        found |= {"value": None, "status": "null"}
    elif draw.random() < 0.02:
        found |= {"value": None, "status": "invalid", "raw": "12 to"}
    return found


def build(root: Path, plan: Plan) -> Path:
    """Writes the folder; its path."""
    done = _schedule(plan, random.Random(7))
    shift = 0.0 if plan.now is None else plan.now - max((d.summary.committed_at for d in done), default=START)
    (root / "units").mkdir(parents=True)
    for unit in done:
        unit.summary.began += shift
        unit.summary.committed_at += shift
        tree = to_json(unit.summary)
        if not plan.workers_kept:  # as an older raypd left it
            tree = {key: kept for key, kept in tree.items() if key not in ("worker", "began", "busy_seconds")}
        table = pa.Table.from_pylist(unit.rows, SCHEMA).replace_schema_metadata({b"raypd": json.dumps(tree)})
        pq.write_table(table, root / "units" / f"{unit.summary.unit}.parquet", compression="zstd")
    _put(root / "run.json", RunRecord(FINGERPRINT, _config(plan), "2026-09-21T11:11:00+00:00", VERSIONS))
    for number in range(plan.sessions):
        id = session_id(number)
        own = [d for d in done if d.summary.session == id]
        began = min((d.summary.began for d in own), default=START + 48 + shift) - 48
        ended = max((d.summary.committed_at for d in own), default=began) + 2
        how = plan.how if number == plan.sessions - 1 else "interrupted"
        session = Session(began, id, ended, ended, ended - began, how)
        _put(root / "sessions" / f"{id}.json", Session(began, id, ended) if how == "running" else session)
        if plan.ledger:
            _put(root / "ledger" / f"{id}.json", bill(plan, id, began, ended, own))
    if plan.how == "complete" and not plan.missing:
        documents = sum(d.summary.documents for d in done)
        _put(root / "manifest.json", Manifest(documents=documents, units=len(done), units_planned=plan.units))
    return root


def edit_bill(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the file of every bill of a run."""
    for file in (root / "ledger").iterdir():
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))


def session_id(number: int) -> str:
    return f"20260921T1111{number:02d}-a1b2c{number}"


def _put(path: Path, record: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(to_json(record)))


def _config(plan: Plan) -> dict[str, Any]:
    return {
        "input": {"path": "s3://corpus/products/*.parquet", "id_column": "id"},
        "output": {"path": "s3://corpus/runs/products"},
        "task": {"kind": "extraction", "categories": {c: {"attributes": a} for c, a in plan.categories.items()}},
        "model": {"name": plan.model, "dtype": "auto"},
        "decoding": {"method": "hyper_parallel", "max_value_tokens": 30},
        "engine": {"max_num_batched_tokens": 2048, "cache_tokens": None},
        "cluster": {"max_workers": plan.workers, "unit_documents": plan.documents},
        **plan.config,
    }


def _schedule(plan: Plan, draw: random.Random) -> list[_Done]:
    """Which worker did which unit when: 40 s of loading, units one after the other, an idle moment now and then."""
    done: list[_Done] = []
    each = -(-(plan.units - plan.missing) // plan.sessions)
    began, row = START, 0
    for session in range(plan.sessions):
        free = [began + 40 + draw.random() * 8 for _ in range(plan.workers)]
        for number in range(session * each, min((session + 1) * each, plan.units - plan.missing)):
            worker = free.index(min(free))
            start = free[worker] + (draw.random() * 60 if draw.random() < 0.03 else 0.2)
            seconds = plan.unit_seconds * draw.uniform(0.8, 1.25)
            free[worker] = start + seconds
            rows = _rows(plan, row, draw)
            n, failed = len(rows), sum(row["status"] != "ok" for row in rows)
            counts = {"prefill_tokens": 310 * n, "shared_tokens": 400 * n, "decode_tokens": 24 * n, "steps": 5 * n}
            summary = UnitSummary(
                plan.name.format(unit=number), FINGERPRINT, session_id(session), "products.jsonl", row, n, n - failed,
                failed, seconds, start + seconds, counts, _worker(worker), start, seconds,
            )  # fmt: skip
            done.append(_Done(summary, worker, rows))
            row += n
        began = max(free) + 9 * 3600  # the next session is the next night's
    return done


_CACHE: list[dict[str, Any]] = []


def _rows(plan: Plan, first: int, draw: random.Random) -> list[dict[str, Any]]:
    if plan.rows is not None:
        return plan.rows(first, plan.documents)
    if len(_CACHE) < 4000:
        _CACHE.extend(document(n, draw) for n in range(len(_CACHE), 4000))
    start = first % (4000 - plan.documents)
    return [{**row, "row": first + i} for i, row in enumerate(_CACHE[start : start + plan.documents])]


def _worker(number: int) -> str:
    return f"{number:02d}f3c{number * 7919 % 65536:04x}9d"


def bill(plan: Plan, session: str, began: float, ended: float, done: Sequence[_Done]) -> Bill:
    """A session's bill: every worker is a machine of its own, the head is one more at a tenth of the price."""
    price, seconds = plan.usd_per_hour, ended - began
    workers = [_timeline(w, began, ended, [d.summary for d in done if d.number == w]) for w in range(plan.workers)]

    def node(name: str, kind: str, market: str, price: float, gpus: int) -> NodeTime:
        return NodeTime(name, began, name == "head", kind, market, "us-east-1", price, "table 2026-11-01", ended, gpus,
                        seconds=seconds, usd=price * seconds / 3600)  # fmt: skip

    nodes = [node(f"n{w}", "g6e.xlarge", "spot" if w % 2 else "on-demand", price, 1) for w in range(plan.workers)]
    nodes.append(node("head", "m7i.large", "on-demand", price / 10, 0))
    usd = sum(n.usd for n in nodes)
    busy, startup = (sum(w.spent(kind) for w in workers) * price / 3600 for kind in ("busy", "startup"))
    parts = {"startup": startup, "head": nodes[-1].usd, "decode": busy * 0.6, "prefill": busy * 0.4}
    parts["idle"] = max(0.0, usd - sum(parts.values()))
    units = sorted((d.summary for d in done), key=lambda unit: unit.committed_at)
    series, documents = [], 0
    for i, unit in enumerate(units):
        documents += unit.documents
        if i % max(1, len(units) // 400) == 0:
            series.append([unit.committed_at, usd * (unit.committed_at - began) / seconds, documents, 0, 0])
    totals = {name: sum(getattr(unit, name) for unit in units) for name in ("documents", "ok", "failed")}
    totals |= {k: sum(u.counts[k] for u in units) for k in ("prefill_tokens", "shared_tokens", "decode_tokens")}
    counts = Counter(row["category"] or "" for d in done for row in d.rows)
    return Bill(
        session, began, usd, ended, plan.how != "running", budget_usd=plan.budget_usd, nodes=nodes, parts=parts,
        categories={name: {"documents": n, "usd": usd * n / counts.total()} for name, n in counts.items()},
        methods={"hyper_parallel": {"documents": documents, "usd": usd}}, workers=workers,
        series=[*series, [ended, usd, documents, 0, 0]], energy=Energy(0.31 * seconds / 3600 * plan.workers),
        totals=totals,
    )  # fmt: skip


def _timeline(number: int, began: float, ended: float, done: Sequence[UnitSummary]) -> WorkerTime:
    spans: Spans = []
    at = began + 2
    for d in sorted(done, key=lambda d: d.began):
        spans.append((at, d.began, "startup" if not spans else "idle", None))
        end = d.committed_at
        if number == 1 and len(spans) == 9:  # this one died once: the unit that it had open was lost
            spans.append((d.began, d.began + (end - d.began) / 2, "lost", d.unit))
            spans.append((d.began + (end - d.began) / 2, end, "busy", d.unit))
        elif spans[-1][1] - spans[-1][0] < 1 and len(spans) > 1:  # adjacent spans are merged
            spans.pop()
            spans[-1] = (spans[-1][0], end, "busy", None)
        else:
            spans.append((d.began, end, "busy", d.unit))
        at = end
    if ended > at:
        spans.append((at, ended, "idle" if done else "startup", None))
    return WorkerTime(_worker(number), f"n{number}", began + 2, ended, ended, spans=spans)
