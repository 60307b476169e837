"""Faults of an object store: a real S3 server behind a proxy that fails, hangs and cuts calls."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypd import storage
from raypd.config import StorageConfig
from tests import s3
from tests.fault_proxy import Faults, Proxy
from tests.faults.trial import Outcome, Trial

COUNT = 300


@contextmanager
def _bucket(folder: Path) -> Iterator[tuple[Proxy, Trial]]:
    """A server, a proxy before it, and a trial whose corpus and output lie on it."""
    with s3.behind_proxy(folder / "weed", "faults") as (server, proxy):
        sections = {
            "input": {"path": "s3://faults/in/*.jsonl"},
            "output": {"path": "s3://faults/run"},
        }
        trial = Trial(
            folder,
            ["a"] * COUNT,
            storage={"options": {"endpoint_url": proxy.url, "read_timeout": 3}},
            **sections,
        )
        for part in range(3):
            lines = [
                json.dumps({"id": i, "title": "a"}) + "\n"
                for i in range(part * 100, part * 100 + 100)
            ]
            server.client().put_object(
                Bucket="faults", Key=f"in/{part}.jsonl", Body="".join(lines).encode()
            )
        storage.configure(trial.config.storage)
        try:
            yield proxy, trial
        finally:
            storage.configure(StorageConfig())


def _run(folder: Path, faults: Faults, done: str, note: str) -> Outcome:
    with _bucket(folder) as (proxy, trial):
        proxy.faults = faults
        trial.finish()
        proxy.faults = Faults()
        failed = dict(proxy.failed)
        assert all(failed.get(kind) for kind in faults.kinds), failed
        return trial.outcome(
            f"{done}: {sum(failed.values())} of {sum(proxy.calls.values())} calls", note
        )


def s3_failing(folder: Path) -> Outcome:
    """S3 fails 5% of calls"""
    faults = Faults(
        share=0.05,
        kinds=("503", "500", "reset", "lost"),
        seed=3,
    )
    return _run(folder, faults, "503, 500, resets, lost answers", "retried")


def s3_hanging(folder: Path) -> Outcome:
    """S3 hangs"""
    faults = Faults(
        share=0.04,
        kinds=("hang",),
        seed=5,
        most=6,
    )
    return _run(folder, faults, "not a byte for 30 s", "given up after 3 s, retried")


def s3_cutting(folder: Path) -> Outcome:
    """S3 cuts bodies in the middle"""
    faults = Faults(share=0.1, kinds=("cut",), seed=7)
    return _run(folder, faults, "half a body, then a reset", "taken up where it broke off")
