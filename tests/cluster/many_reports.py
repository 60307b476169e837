"""How much of a core the ledger of a large run takes: python -m tests.cluster.many_reports
[WORKERS CATEGORIES SECONDS].

Simulated workers report every two seconds and end a unit of 256 documents every ten. The ledger
gets pickled reports, as Ray brings them, answers the driver every second and writes its bill every
three, as it does in a run.
"""

import json
import pickle
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raypd.billing import book
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import Meter
from raypd.cluster.ledger_actor import Ledger
from raypd.decoding.counts import TokenCounts
from tests.runs import run_config

WORKERS_PER_NODE = 8
UNIT_DOCUMENTS = 256
UNIT_SECONDS = 10
REPORT_SECONDS = 2
BILL_SECONDS = 3


class Clock:
    """The time of the simulation."""

    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


def ledger_of(output: str, workers: int, clock: Clock) -> Ledger:
    """A ledger without its thread, on a cluster of so many workers."""
    ledger = Ledger.__new__(Ledger)
    ledger._output = output
    config = run_config()
    models = book.models_of(config.model, config.cascade)
    ledger.book = book.Book(Bill("s", clock.now, 0.0), models)
    nodes = []
    for number in range(-(-workers // WORKERS_PER_NODE)):
        nodes.append(
            NodeTime(
                f"n{number}",
                clock.now,
                usd_per_hour=36.0,
                slots=WORKERS_PER_NODE,
            )
        )
    ledger.book.see(nodes, 1, clock.now)
    ledger._stored = False
    return ledger


def simulate(folder: Path, workers: int, categories: int, seconds: int) -> dict[str, Any]:
    """Let workers report for some simulated seconds, and measure the CPU seconds of the ledger."""
    clock = Clock()
    draw = random.Random(0)
    ledger = ledger_of(str(folder), workers, clock)
    meters = []
    for number in range(workers):
        meter = Meter(f"n{number // WORKERS_PER_NODE}", "hyper_parallel", clock=clock)
        meter.ready()
        meters.append(meter)
    names = [f"category-{number}" for number in range(categories)]
    spent = 0.0
    peak_before = 0
    for second in range(seconds):
        clock.now += 1
        reports = []
        for number, meter in enumerate(meters):
            if (second + number) % UNIT_SECONDS == 0:
                unit = f"u{number}-{second}"
                meter.begin(unit)
                documents = draw.choices(names, k=UNIT_DOCUMENTS)
                meter.documents(unit, documents)
                meter.tokens(unit, documents, TokenCounts(25_600, 0, 10_240, 1))
                meter.commit(unit, meter.end(unit), UNIT_DOCUMENTS, 0)
            if (second + number) % REPORT_SECONDS == 0:
                reports.append((meter, pickle.dumps(meter.report())))
        began = time.process_time()
        receipts = []
        for meter, report in reports:
            receipts.append((meter, pickle.dumps(ledger.report(pickle.loads(report)))))
        ledger.standing()
        if second % BILL_SECONDS == 0:
            bill = ledger.book.bill(clock.now)
            book.write(str(folder), bill)
            ledger.book.stored(bill)
        spent += time.process_time() - began
        for meter, receipt in receipts:
            meter.received(pickle.loads(receipt))
        if second == seconds // 2:
            peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bill = ledger.book.bill(clock.now)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "workers": workers,
        "categories": categories,
        "share_of_a_core": round(spent / seconds, 3),
        "documents": bill.totals["documents"],
        "category_documents": int(sum(row["documents"] for row in bill.categories.values())),
        "bill_bytes": (folder / "ledger" / "s.json").stat().st_size,
        "grown_mb": round((peak - peak_before) / 1024, 1),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="raypd-reports-") as folder:
        workers, categories, seconds = map(int, sys.argv[1:] or ("1024", "300", "60"))
        print(json.dumps(simulate(Path(folder), workers, categories, seconds)))
