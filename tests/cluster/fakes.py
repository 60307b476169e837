"""An engine and a task that cost milliseconds and behave as the real ones.

Titles steer them: `sleep 0.1` (seconds of decoding), `until NAME` (the engine stands still until
the output folder, or a whole path NAME, holds that file), `kill` (the process dies), `engine` (it
raises), `finish` (reading the answer raises), `plan` (planning raises), `program` (the program
fails), `twice` (two records).
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.answering.components import WorkerComponents
from raypd.config import RunConfig
from raypd.decoding.counts import Finished, TokenCounts
from raypd.tasks.base import Document, Record, Request
from tests.processes import wait_for


class FakeEngine:
    """Ends every program at the step after the one that began it; notes how full it was."""

    patience: float | None = None
    waiting = ""

    def __init__(self, batch: int, folder: Path | None = None) -> None:
        self.batch = batch
        self.folder = folder
        self.queue: list[tuple[list[str], Any]] = []
        self.sequences: list[Any] = []
        self.fill: list[int] = []

    @property
    def pending(self) -> int:
        return len(self.queue)

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> None:
        if program == ["submit"]:
            raise ValueError("the engine does not take it")
        self.queue.append((program, tag))

    def step(self) -> list[Finished]:
        running = self.queue[: self.batch]
        self.queue = self.queue[self.batch :]
        self.fill.append(len(running))
        ended = []
        for titles, tag in running:
            error = None
            for title in titles:
                if title.startswith("sleep"):
                    time.sleep(float(title.split()[1]))
                if title.startswith("until"):
                    file = Path(self.folder or "/", title.split()[1])
                    file.with_name(f"waiting-{file.name}").touch()
                    wait_for(file.exists, f"nobody made {file}")
                if title == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if title == "kill once" and storage.put_new(f"{self.folder}/killed", b""):
                    os.kill(os.getpid(), signal.SIGKILL)
                if title == "engine":
                    raise RuntimeError("the device is gone")
                if title == "program":
                    error = ValueError("the program failed")
            ended.append(
                Finished(tag, [t.upper() for t in titles], error, TokenCounts(10, 4, 3, 2))
            )
        return ended


class FakeTask:
    """Answers a document with its title in capitals, in the column `category` of an extraction; two
    a program.
    """

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        pair: list[Document] = []
        for document in documents:
            if document.error is not None:
                yield Record(document.index, error=document.error)
                continue
            if document.fields["title"] == "plan":
                raise ValueError("the plan failed")
            pair.append(document)
            if len(pair) == 2:
                yield _work(pair)
                pair = []
        if pair:
            yield _work(pair)


def _work(pair: list[Document]) -> Request:
    rows = [d.index for d in pair]

    def finish(answer: list[str]) -> list[Record]:
        if "FINISH" in answer:
            raise ValueError("the answer cannot be read")
        return [Record(row, {"category": text}) for row, text in zip(rows, answer, strict=True)]

    return Request(rows, [d.fields["title"] for d in pair], finish)  # type: ignore[arg-type]


def build(config: RunConfig, threads: int | None) -> WorkerComponents:
    """What a test's worker is built from; it tells its process id in the output folder, if that is
    local.
    """
    if "://" in config.output.path:
        return WorkerComponents(
            FakeEngine(config.engine.most_seqs), FakeTask(), None, config.engine.max_num_seqs
        )
    folder = Path(config.output.path)
    (folder / f"worker-{os.getpid()}").touch()
    return WorkerComponents(
        FakeEngine(config.engine.most_seqs, folder), FakeTask(), None, config.engine.max_num_seqs
    )
