"""One fault tried on one run: the run as a process that can be killed, and the count of what came
out.
"""

import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from raypd import storage
from raypd.dataset import writer
from tests.processes import ended, start, wait_for
from tests.runs import TITLES, run_config, write_jsonl

WORKERS = "ray::DecodeWorker"  # what the processes of workers are called
READERS = "ray::ReadDocuments"  # what the processes of readers are called


@dataclass
class Outcome:
    """What became of a corpus under a fault. `note`: what else there is to say, in a few words."""

    done: str
    documents: int
    rows: int
    lost: int
    doubled: int
    note: str = ""


class Trial:
    """A corpus of one document a title (they steer tests/cluster/fakes.py) in `folder`, a
    configuration, and runs.
    """

    def __init__(
        self, folder: Path, titles: Sequence[str], unit_documents: int = 10, **keys: dict[str, Any]
    ) -> None:
        self.folder, self.count = folder, len(titles)
        corpus = write_jsonl(folder / "corpus.jsonl", titles)
        cluster = {
            "address": "local",
            "max_workers": 1,
            "unit_documents": unit_documents,
            "units_in_flight": 1,
        }
        sections: dict[str, Any] = {"input": TITLES, "engine": {"max_num_seqs": 4}}
        sections["cluster"] = cluster
        sections |= {name: {**sections.get(name, {}), **values} for name, values in keys.items()}
        self.config = run_config(sections.pop("task", None), corpus, folder / "out", **sections)
        self.output = self.config.output.path
        self.words: tuple[str, ...] = ()  # ("retry",): the next starts try error rows again
        self.file = folder / "run.yaml"
        self.file.write_text(self.config.model_dump_json())  # JSON is YAML

    def start(
        self, build: str = "tests.cluster.fakes:build", **environment: str
    ) -> subprocess.Popen[str]:
        """Starts the run as a process; `build` makes a worker's engine and task."""
        return start("-m", "tests.faults.run", str(self.file), build, *self.words, **environment)

    def finish(self, build: str = "tests.cluster.fakes:build", **environment: str) -> str:
        """Runs to the end, which must be a good one; what it printed."""
        return ended(self.start(build, **environment))

    def committed(self) -> int:
        return len(writer.committed(self.output))

    def wait(self, units: int) -> None:
        """Until so many units are committed."""
        wait_for(lambda: self.committed() >= units, f"no {units} units")

    def go(self, name: str) -> None:
        """Lets the units go on that wait for a file; see `gated`."""
        (Path(self.output) / name).touch()

    def worker(self) -> int:
        """The process id of the newest worker."""
        marks = sorted(
            (p.stat().st_mtime, int(p.name.split("-")[1]))
            for p in Path(self.output).glob("worker-*")
        )
        return marks[-1][1]

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the output."""
        found: list[dict[str, Any]] = []
        for _, path in writer.objects(self.output):
            with storage.open_file(path) as file:
                found += pq.read_table(file).to_pylist()
        return found

    def outcome(self, done: str, note: str = "") -> Outcome:
        """Counts the output against the corpus."""
        rows = self.rows()
        ids = Counter(row["id"] for row in rows)
        wanted = {str(i) for i in range(self.count)}
        foreign = ids.keys() - wanted
        assert not foreign, f"rows of documents that were never there: {sorted(foreign)[:5]}"
        lost = len(wanted - ids.keys())
        doubled = sum(n - 1 for n in ids.values())
        return Outcome(done, self.count, len(rows), lost, doubled, note)


def gated(free: int, name: str, units: int) -> list[str]:
    """Titles of units of 10 documents, all of which but the first few wait for a file: see
    tests/cluster/fakes.py.
    """
    return ["a"] * 10 * free + [f"until {name}", *["a"] * 9] * (units - free)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
