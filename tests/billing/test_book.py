"""What the book makes of workers' reports, however they come, and of sessions that died."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import book
from raypd.billing.book import Book
from raypd.billing.meter import zero
from raypd.run.records import Bill, NodeTime, Seconds, UnitSummary, WorkerTime, from_json

NODE = NodeTime("n", 100.0, usd_per_hour=36.0, slots=1, price_source="test")


def new(session: str = "s") -> Book:
    own = Book(Bill(session, 100.0, 0.0))
    own.see([NODE], 1, 100.0)
    return own


def report(sequence: int, worker: str = "w", heard: float = 110.0, documents: int = 0, **busy: float) -> WorkerTime:
    own = {**zero(), "documents": documents, "prefill_tokens": 10 * documents, "seconds": sum(busy.values())}
    return WorkerTime(worker, "n", 100.0, heard, sequence=sequence, seconds=Seconds(**busy), categories={"a": own},
                      method="hyper_parallel", ok=documents)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=40))
def test_a_ledger_that_is_killed_loses_nothing_that_was_written_and_doubles_nothing(events) -> None:
    """Workers report late and again; the ledger dies now and then and goes on from what it last wrote."""
    own, written, latest = new(), {}, {}
    own.see([NODE, NodeTime("h", 90.0, head=True, usd_per_hour=1.0)], 2, 101.0)
    file = own.bill(101.0)
    for worker, sequence, dies in events:
        before = own.workers[worker].sequence if worker in own.workers else -1
        assert own.take(report(sequence, worker, documents=sequence, decode=sequence / 10)) == (sequence > before)
        latest[worker] = max(latest.get(worker, -1), sequence)
        if dies:
            own = Book(from_json(Bill, json.loads(json.dumps(asdict(file))), "s.json"))
            assert own.bill(101.0) == file
        else:
            file, written = own.bill(101.0), {w.worker: w.sequence for w in own.workers.values()}
        for name, number in written.items():
            assert own.workers[name].sequence >= number
    for worker, sequence in latest.items():  # a worker says all it did with every report
        own.take(report(sequence, worker, documents=sequence, decode=sequence / 10))
    assert own.totals()["documents"] == sum(latest.values())


def test_the_series_keeps_its_ends_and_its_size() -> None:
    own = new()
    for i in range(100, 9000):
        at = [point[0] for point in own.bill(float(i)).series]
    assert len(at) <= 2001
    assert (at[0], at[-1], at) == (100.0, 8999.0, sorted({*at}))


def test_a_session_that_died_is_closed_when_the_run_is_summed(tmp_path) -> None:
    own, lost = new(), report(1, heard=109.0, documents=4, decode=8.0)
    lost.open = {"u": (0.0, 8.0)}
    own.take(lost)
    book.write(str(tmp_path), own.bill(110.0))
    (tmp_path / "ledger/broken.json").write_text("{")
    (left,) = book.bills(str(tmp_path))
    assert (left.final, left.parts["lost"], left.totals["documents"]) == (False, 0, 4)
    whole = book.of_run(str(tmp_path), [unit(4), unit(6)])  # the report of the second was lost
    assert (whole.usd, whole.documents, whole.usd_per_1000_documents) == (0.1, 10, 10.0)
    (dead,) = book.bills(str(tmp_path))
    assert (dead.final, dead.until, dead.usd, dead.totals["documents"]) == (True, 110.0, 0.1, 10)
    assert dead.parts["lost"] == pytest.approx(0.08)


def unit(documents: int, seconds: float = 1.0) -> UnitSummary:
    own = {**zero(), "documents": documents, "decode_tokens": 5 * documents, "seconds": seconds}
    tokens = {"prefill_tokens": 0, "shared_tokens": 0, "decode_tokens": 5 * documents}
    return UnitSummary("u", "f", "s", "x", 0, documents, documents, 0, 1.0, counts=tokens, categories={"a": own})


def closed(session: str, documents: int, decode: float) -> Bill:
    own = new(session)
    own.take(report(1, documents=documents, decode=decode))
    own.close(110.0)
    return own.bill(110.0)


def test_what_was_committed_counts_even_when_its_report_was_lost() -> None:
    bill = closed("s", 7, 3.0)
    assert book.reconcile(bill, [unit(7), unit(3)])
    assert (bill.totals["documents"], bill.categories["a"]["documents"]) == (10, 10)
    assert bill.categories["a"]["usd"] == bill.usd == bill.methods["hyper_parallel"]["usd"]
    assert not book.reconcile(bill, [unit(7), unit(3)])


def test_a_run_s_bill_is_its_sessions_together() -> None:
    whole = book.summed([closed("s", 4, 9.0), closed("t", 6, 9.0)])
    assert (whole.usd, whole.documents, whole.usd_per_1000_documents) == (0.2, 10, 20.0)
    assert (round(sum(whole.parts.values()), 6), book.summed([])) == (whole.usd, None)
