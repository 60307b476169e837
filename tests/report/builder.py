"""Makes a run's folder as a finished or broken-off run leaves it, with as many units as wanted, in a second or two.

The files follow what raypd writes (run.json, sessions, units with their summaries, ledger); the figures fit together:
parts of the bill add up to it, and the timelines of the workers are those of the units.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

VALUE = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.string()),
        ("number", pa.float64()),
        ("boolean", pa.bool_()),
        ("confidence", pa.float32()),
        ("status", pa.string()),
        ("raw", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        ("category", pa.string()),
        ("record", pa.string()),
        ("values", pa.list_(VALUE)),
        ("truncated", pa.bool_()),
    ]
)
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
    "women",
    "trail",
    "750",
]
ERRORS = [
    "products-{n}.jsonl:{n}: not JSON: Expecting ',' delimiter: line 1 column {n} (char {n})",
    "the document has {n} tokens; with its answers the model's context of 2048 has room for 1890",
    "category 'gadget-{n}' is not in task.categories",
]
Rows = Callable[[int, int], list[dict[str, Any]]]  # (first row, how many) -> rows of a unit
START = 1_790_000_000.0


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
    unit: str
    worker: int
    session: int
    began: float
    ended: float
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


def _value(name: str, draw: random.Random) -> dict[str, Any]:
    value: dict[str, Any] = {"name": name, "value": draw.choice(WORDS), "number": None, "boolean": None, "raw": None}
    value |= {"confidence": draw.betavariate(6, 1.2), "status": "ok"}
    if draw.random() < 0.2:
        value |= {"value": None, "status": "null"}
    elif draw.random() < 0.02:
        value |= {"value": None, "status": "invalid", "raw": "12 to"}
    return value


def build(root: Path, plan: Plan) -> Path:
    """Writes the folder; its path."""
    draw = random.Random(7)
    (root / "units").mkdir(parents=True)
    done = list(_schedule(plan, draw))
    spans = _sessions(plan, done)
    shift = 0.0 if plan.now is None else plan.now - max((d.ended for d in done), default=START)
    for unit in done:
        unit.began, unit.ended = unit.began + shift, unit.ended + shift
        _write_unit(root, plan, unit)
    spans = [(began + shift, ended + shift) for began, ended in spans]
    _write(root / "run.json", _run(plan))
    for number, (began, ended) in enumerate(spans):
        own = [d for d in done if d.session == number]
        _write_session(root, plan, number, began, ended)
        if plan.ledger:
            _write(root / "ledger" / f"{session_id(number)}.json", bill(plan, number, began, ended, own))
    if plan.how == "complete" and not plan.missing:
        _write(root / "manifest.json", {"units": len(done), "units_planned": plan.units, "fake": plan.model == "fake"})
    return root


def session_id(number: int) -> str:
    return f"20260921T1111{number:02d}-a1b2c{number}"


def _write(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def _run(plan: Plan) -> dict[str, Any]:
    config = {
        "input": {"path": "s3://corpus/products/*.parquet", "id_column": "id"},
        "output": {"path": "s3://corpus/runs/products"},
        "task": {"kind": "extraction", "categories": {c: {"attributes": a} for c, a in plan.categories.items()}},
        "model": {"name": plan.model, "dtype": "auto"},
        "decoding": {"method": "hyper_parallel", "max_value_tokens": 30},
        "engine": {"max_num_batched_tokens": 2048, "cache_tokens": None},
        "cluster": {"max_workers": plan.workers, "unit_documents": plan.documents},
        **plan.config,
    }
    versions = {"raypd": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
    return {
        "fingerprint": "0123456789ab",
        "created": "2026-09-21T11:11:00+00:00",
        "versions": versions,
        "config": config,
    }


def _schedule(plan: Plan, draw: random.Random) -> Sequence[_Done]:
    """Which worker did which unit when: 40 s of loading, units one after the other, an idle moment now and then."""
    done: list[_Done] = []
    each = -(-(plan.units - plan.missing) // plan.sessions)
    began, row = START, 0
    for session in range(plan.sessions):
        free = [began + 40 + draw.random() * 8 for _ in range(plan.workers)]
        for number in range(session * each, min((session + 1) * each, plan.units - plan.missing)):
            worker = free.index(min(free))
            start = free[worker] + (draw.random() * 60 if draw.random() < 0.03 else 0.2)
            end = start + plan.unit_seconds * draw.uniform(0.8, 1.25)
            free[worker] = end
            rows = _rows(plan, row, draw)
            row += len(rows)
            done.append(_Done(plan.name.format(unit=number), worker, session, start, end, rows))
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


def _write_unit(root: Path, plan: Plan, unit: _Done) -> None:
    table = pa.Table.from_pylist(unit.rows, SCHEMA)
    failed = sum(row["status"] != "ok" for row in unit.rows)
    summary: dict[str, Any] = {
        "unit": unit.unit,
        "fingerprint": "0123456789ab",
        "session": session_id(unit.session),
        "source": "products.jsonl",
        "start": unit.rows[0]["row"] if unit.rows else 0,
        "documents": len(unit.rows),
        "ok": len(unit.rows) - failed,
        "failed": failed,
        "seconds": unit.ended - unit.began,
        "committed_at": unit.ended,
        "counts": _counts(unit),
    }
    if plan.workers_kept:
        summary |= {"worker": _worker(unit.worker), "began": unit.began, "busy_seconds": unit.ended - unit.began}
    table = table.replace_schema_metadata({b"raypd": json.dumps(summary)})
    pq.write_table(table, root / "units" / f"{unit.unit}.parquet", compression="zstd")


def _counts(unit: _Done) -> dict[str, int]:
    n = len(unit.rows)
    return {"prefill_tokens": 310 * n, "shared_tokens": 400 * n, "decode_tokens": 24 * n, "steps": 5 * n}


def _worker(number: int) -> str:
    return f"{number:02d}f3c{number * 7919 % 65536:04x}9d"


def _write_session(root: Path, plan: Plan, number: int, began: float, ended: float) -> None:
    last = number == plan.sessions - 1
    how: str | None = plan.how if last else "interrupted"
    tree = {"id": session_id(number), "began": began, "heartbeat": ended, "ended": ended, "seconds": ended - began}
    if how == "running":
        how, tree["ended"], tree["seconds"] = None, None, None  # type: ignore[assignment]
    _write(root / "sessions" / f"{session_id(number)}.json", {**tree, "how": how})


def _sessions(plan: Plan, done: Sequence[_Done]) -> list[tuple[float, float]]:
    spans = []
    for number in range(plan.sessions):
        own = [d for d in done if d.session == number]
        began = min((d.began for d in own), default=START + 48) - 48
        spans.append((began, max((d.ended for d in own), default=began) + 2))
    return spans


def bill(plan: Plan, number: int, began: float, ended: float, done: Sequence[_Done]) -> dict[str, Any]:
    """A session's ledger file: every worker is a machine of its own, the head is one more at a tenth of the price."""
    price, seconds = plan.usd_per_hour, ended - began
    workers = [_timeline(plan, w, began, ended, [d for d in done if d.worker == w]) for w in range(plan.workers)]
    machine = {"region": "us-east-1", "price_source": "table 2026-11-01", "began": began, "ended": ended}
    nodes = [
        {"node": f"n{w}", "instance_type": "g6e.xlarge", "market": "spot" if w % 2 else "on-demand", "gpus": 1,
         "usd_per_hour": price, "seconds": seconds, "usd": price * seconds / 3600, **machine}
        for w in range(plan.workers)
    ]  # fmt: skip
    head = {"node": "head", "instance_type": "m7i.large", "market": "on-demand", "gpus": 0, "usd_per_hour": price / 10}
    nodes.append({**head, "seconds": seconds, "usd": price / 10 * seconds / 3600, **machine})
    usd = sum(n["usd"] for n in nodes)
    time_of = {k: sum(e - b for w in workers for b, e, kind, _ in w["spans"] if kind == k) for k in ("startup", "busy")}
    parts = {"startup": time_of["startup"] * price / 3600, "lost": 0.0, "other": 0.0, "head": nodes[-1]["usd"]}
    parts |= {"decode": time_of["busy"] * 0.6 * price / 3600, "prefill": time_of["busy"] * 0.4 * price / 3600}
    parts["idle"] = max(0.0, usd - sum(parts.values()))
    ordered = sorted(done, key=lambda d: d.ended)
    series, documents, failed = [], 0, 0
    for unit in ordered[:: max(1, len(ordered) // 400)]:
        documents = sum(len(d.rows) for d in ordered if d.ended <= unit.ended) if len(ordered) < 500 else documents + 1
        series.append([unit.ended, usd * (unit.ended - began) / seconds, documents, failed, 24 * documents])
    series.append([ended, usd, sum(len(d.rows) for d in done), failed, 0])
    return {
        "session": session_id(number), "began": began, "until": ended, "final": plan.how != "running",
        "currency": "USD", "budget_usd": plan.budget_usd, "deadline": None, "nodes": nodes, "usd": usd,
        "parts": parts, "categories": _categories(plan, usd, done), "workers": workers, "series": series,
        "methods": {"hyper_parallel": {"documents": sum(len(d.rows) for d in done), "usd": usd}},
        "energy": {"kwh": 0.31 * seconds / 3600 * plan.workers, "co2e_kg": None}, "totals": _totals(done),
        "notes": [],
    }  # fmt: skip


def _totals(done: Sequence[_Done]) -> dict[str, int]:
    rows = [row for d in done for row in d.rows]
    ok = sum(row["status"] == "ok" for row in rows)
    tokens = {k: sum(_counts(d)[k] for d in done) for k in ("prefill_tokens", "shared_tokens", "decode_tokens")}
    return {"documents": len(rows), "ok": ok, "failed": len(rows) - ok, **tokens}


def _categories(plan: Plan, usd: float, done: Sequence[_Done]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for d in done:
        for row in d.rows:
            counts[row["category"] or ""] = counts.get(row["category"] or "", 0) + 1
    whole = sum(counts.values())
    return {
        name: {"documents": n, "usd": usd * n / whole, "prefill_tokens": 310 * n, "decode_tokens": 24 * n}
        for name, n in counts.items()
    }


def _timeline(plan: Plan, worker: int, began: float, ended: float, done: Sequence[_Done]) -> dict[str, Any]:
    spans: list[tuple[float, float, str, str | None]] = []
    at = began + 2
    for d in sorted(done, key=lambda d: d.began):
        spans.append((at, d.began, "startup" if not spans else "idle", None))
        if worker == 1 and len(spans) == 9:  # this one died once: what it had in hand was lost
            spans.append((d.began, d.began + (d.ended - d.began) / 2, "lost", d.unit))
            spans.append((d.began + (d.ended - d.began) / 2, d.ended, "busy", d.unit))
        elif spans[-1][1] - spans[-1][0] < 1 and len(spans) > 1:  # adjacent spans are merged
            spans.pop()
            spans[-1] = (spans[-1][0], d.ended, "busy", None)
        else:
            spans.append((d.began, d.ended, "busy", d.unit))
        at = d.ended
    if ended > at:
        spans.append((at, ended, "idle" if done else "startup", None))
    return {"worker": _worker(worker), "node": f"n{worker}", "began": began + 2, "ended": ended, "spans": spans}
