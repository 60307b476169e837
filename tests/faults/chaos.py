"""`make chaos MINUTES=60 SEED=n`: runs under faults drawn at random, verified after each.

With readers and without, on disk or a real S3 server, with a fake engine, a real one or a server
that lies; kills, interrupts, two starts, storage away. A run is started again until it ends well,
and most error rows are retried: nothing is lost or doubled, `raypd verify` passes, the bill adds
up, and `raypd status` agrees. `make chaos SEED=n ROUND=k` draws that round again.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import SkipTest

import psutil

from raypd import storage
from raypd.billing import book
from raypd.config import StorageConfig
from raypd.report.status import Watch
from raypd.run import layout, records
from raypd.run.manifest import Manifest
from raypd.verify.verification import verify
from tests import s3
from tests.fault_proxy import Faults, Proxy
from tests.faults import on_cluster, one_machine
from tests.faults.trial import WORKERS, Trial
from tests.processes import LONG, children, end_all
from tests.servers import Call, Reply, serving
from tests.tiny import save_tiny

_RETRIED = 0.7  # of the rounds that have error rows
_STARTS = 6  # of a run with faults; the ones after these have none
_WHOLE = [
    on_cluster.node_removed,
    on_cluster.spot_handed_back,
    on_cluster.spot_finished,
    one_machine.disk_full,
]
_PROCESSES = (
    "worker killed",
    "driver killed",
    "ledger killed",
    "interrupted",
    "terminated",
    "started twice",
)
_OF_S3 = ("S3 away", "S3 failing", "S3 cutting")
_BROKEN = ("reset", "cut")
_LIES = (
    "prompt_tokens",
    "completion_tokens",
    "content",
    "page",
    "elsewhere",
    "later",
    "failing",
    *_BROKEN,
)


@dataclass
class Round:
    """What a round came to; `problems` in words."""

    what: str
    documents: int = 0
    lost: int = 0
    doubled: int = 0
    starts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Notes a figure that is not what it has to be."""
        if found != wanted:
            self.problems.append(f"{what}: {found!r}, not {wanted!r}")


def run_round(draw: random.Random, folder: Path) -> Round:
    """Draws a round and runs it."""
    readers = draw.choice((0, 1, 2))
    if draw.random() < 0.15:
        fault = draw.choice(_WHOLE)
        found = fault(folder)
        counts = (found.documents, found.lost, found.doubled, 1, Counter([fault.__name__]))
        return Round(str(fault.__doc__), *counts)
    on_s3 = draw.random() < 0.5
    engine = draw.choices(("fake", "real", "server"), (5, 3, 2))[0]
    odd = ["", "program", "kill", "sleep 1"] if engine == "fake" else ["", "program"]
    titles = [
        draw.choice(odd) if draw.random() < 0.03 else f"sleep 0.0{draw.randint(1, 9)}"
        for _ in range(200)
    ]
    cluster = {
        "max_workers": draw.randint(1, 2),
        "cpus_per_worker": 0.5,
        "units_in_flight": draw.randint(1, 3),
        "readers": readers,
    }
    keys: dict[str, Any] = {"cluster": cluster, "cost": {"prices": {"local": 36.0}}}
    with ExitStack() as stack:
        proxy = stack.enter_context(s3.behind_proxy(folder / "weed", "chaos"))[1] if on_s3 else None
        if proxy is not None:
            keys |= {
                "output": {"path": "s3://chaos/run"},
                "storage": {"options": {"endpoint_url": proxy.url, "read_timeout": 3}},
            }
        if engine == "server":
            url = stack.enter_context(serving(lying(draw.randrange(1 << 30))))
            keys |= {
                "model": {"name": "gpt", "endpoint": {"url": f"{url}/v1", "key_variable": "PATH"}}
            }
            keys |= {"decoding": {"method": "autoregressive"}}
        if engine == "real":
            model = str(save_tiny(folder / "model"))
            keys |= {
                "model": {"name": model, "device": "cpu", "dtype": "float32"},
                "decoding": {"max_value_tokens": 8},
            }
        trial = Trial(folder, titles, draw.choice((5, 10, 40)), **keys)
        storage.configure(trial.config.storage)
        stack.callback(storage.configure, StorageConfig())
        made = Round(f"{engine} on {'S3' if on_s3 else 'disk'}, {readers} readers", len(titles))
        if engine == "fake":
            build = "tests.cluster.fakes:build"
        else:
            build = "raypd.answering.components:build"
        _to_its_end(trial, build, draw, made, proxy)
        if (
            not made.problems
            and any(row["error"] for row in trial.rows())
            and draw.random() < _RETRIED
        ):
            trial.words = ("retry",)
            made.starts = 0
            _to_its_end(trial, build, draw, made, proxy)
            made.faults["retried"] += 1
    return made


def _to_its_end(
    trial: Trial, build: str, draw: random.Random, made: Round, proxy: Proxy | None
) -> None:
    """Starts a run, or a retry of its error rows, until it ends well, and checks what it came
    to.
    """
    while _start(trial, build, draw, made, proxy) != 0:
        if made.starts > 2 * _STARTS:
            made.problems.append("it does not end")
            break
    _check(trial, made)


def lying(seed: int) -> Callable[[Call], Reply]:
    """A server with OpenAI's chat API; one answer in ten is none, or says what is not so."""
    draw = random.Random(seed)

    def reply(call: Call) -> Reply:
        if call.body == b"{}":  # whether it redirects, before a run
            return Reply(400)
        usage = {"prompt_tokens": 50, "completion_tokens": 4}
        content: Any = '{"Brand": "Acme"}'
        kind = draw.choice(_LIES) if draw.random() < 0.1 else ""
        if kind in usage:
            usage[kind] = draw.choice((-7, 10**27))
        elif kind == "content":
            content = draw.choice((None, ["a", 1], "x" * 30_000_000))
        elif kind == "page":
            return Reply(200, b"<html>Sign in</html>")
        elif kind == "elsewhere":
            return Reply(307, headers={"Location": "http://127.0.0.1:9/v1/chat/completions"})
        elif kind == "later":
            return Reply(429, headers={"Retry-After": "1"})
        elif kind == "failing":
            return Reply(draw.choice((400, 500, 503)), call.headers["Authorization"].encode())
        tree = {
            "choices": [{"message": {"content": content}, "finish_reason": "stop"}],
            "usage": usage,
        }
        return Reply(200, json.dumps(tree).encode(), broken=kind if kind in _BROKEN else "")

    return reply


def _start(trial: Trial, build: str, draw: random.Random, made: Round, proxy: Proxy | None) -> int:
    """Starts the run, does to it what is drawn, and waits for its end; its exit code."""
    kinds = _PROCESSES + (_OF_S3 if proxy else ())
    drawn = [
        (draw.uniform(1, 8), draw.choice(kinds), draw.random()) for _ in range(draw.randint(0, 4))
    ]
    process = trial.start(build)
    allowed = {0}
    made.starts += 1
    for delay, kind, chance in drawn if made.starts <= _STARTS else ():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
            break
        allowed |= _do(kind, chance, process, trial, build, proxy)
        made.faults[kind] += 1
    out, err = process.communicate(timeout=LONG)
    # Within the imports of tests.faults.run: Python says where.
    early = process.returncode == -signal.SIGINT
    if process.returncode not in allowed or ("Traceback" in err and not early):
        made.problems.append(
            f"exit code {process.returncode} after {drawn}: {err[-2000:]}{out[-500:]}"
        )
    return process.returncode


def _do(
    kind: str,
    chance: float,
    process: subprocess.Popen[str],
    trial: Trial,
    build: str,
    proxy: Proxy | None,
) -> set[int]:
    """A fault; the exit codes that it may end a run with. chance: 0 to 1, what there is to
    choose.
    """
    if kind == "started twice":
        second = trial.start(build)
        out, err = second.communicate(timeout=LONG)
        # 0: the first one had ended, and this one did the rest.
        assert second.returncode in (0, 1), out + err
        return set()
    if kind in _OF_S3 and proxy is not None:
        kinds = {
            "S3 away": ("503", "reset"),
            "S3 failing": ("500", "lost"),
            "S3 cutting": ("cut",),
        }[kind]
        proxy.faults = Faults(
            share=1.0 if kind == "S3 away" else 0.1, kinds=kinds, seed=int(1e6 * chance)
        )
        time.sleep(1 + 3 * chance)
        proxy.faults = Faults()
        return {1}
    if kind in ("interrupted", "terminated"):
        process.send_signal(signal.SIGINT if kind == "interrupted" else signal.SIGTERM)
        # The latter two before it has begun, within imports.
        return {130, -signal.SIGTERM, -signal.SIGINT}
    if kind == "driver killed":
        process.kill()
        return {-signal.SIGKILL}
    if found := children(process.pid, "ray::Ledger" if kind == "ledger killed" else WORKERS):
        with contextlib.suppress(psutil.Error):
            found[int(chance * len(found))].kill()
    return set()


def _check(trial: Trial, made: Round) -> None:
    """Compares what raypd says of a run that has ended, here and there, and with its input."""
    found = trial.outcome("")
    verified = verify(trial.output, trial.config)
    made.lost, made.doubled = max(made.lost, found.lost), max(made.doubled, found.doubled)
    made.expect("verify", verified.passed, True)
    manifest = records.read(Manifest, storage.join(trial.output, layout.MANIFEST))
    made.expect(
        "documents of the manifest",
        (manifest.documents, manifest.failed),
        (verified.found, verified.failed),
    )
    endpoint = trial.config.storage.requests.endpoint_url
    overrides = [f"storage.options.endpoint_url={endpoint}"] if endpoint else []
    shown = Watch(trial.output, overrides).look()
    wanted = ("complete", verified.found, verified.failed, verified.objects, True)
    made.expect(
        "status", (shown.state, shown.documents, shown.failed, shown.units, shown.exact), wanted
    )
    texts = [str(row["error"]) for row in trial.rows()]
    made.expect("keys in errors", sum(os.environ["PATH"] in text for text in texts), 0)
    cost = manifest.cost
    if cost is None:
        made.problems.append("no bill")
        return
    made.expect("documents of the bill", cost.documents, verified.documents)
    price = 1000 * cost.usd / cost.documents
    if abs((cost.usd_per_1000_documents or 0.0) - price) > 1e-5:
        made.problems.append(f"price per 1,000: {cost.usd_per_1000_documents}, not {price}")
    made.expect("USD in status", round(shown.usd or 0.0, 6), cost.usd)
    for bill in book.bills(trial.output):
        for name, parts in {
            "nodes": [node.usd for node in bill.nodes],
            "parts": bill.parts.values(),
        }.items():
            if abs(sum(parts) - bill.usd) > 1e-6:
                made.problems.append(
                    f"session {bill.session}: its {name} are {sum(parts)}, its bill {bill.usd}"
                )
        time_billed = sum(node.seconds * node.usd_per_hour / 3600 for node in bill.nodes)
        if abs(time_billed - bill.usd) > 1e-4:
            made.problems.append(
                f"session {bill.session}: {time_billed} of time, a bill of {bill.usd}"
            )


def main() -> int:
    """Runs rounds until the time is over; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="this one alone")
    asked = parser.parse_args()
    ends = time.monotonic() + 60 * asked.minutes
    first = asked.round or 0
    rounds = list[Round]()
    while time.monotonic() < ends and (asked.round is None or not rounds):
        number = first + len(rounds)
        with tempfile.TemporaryDirectory(
            prefix="raypd-chaos-", ignore_cleanup_errors=True
        ) as folder:
            try:
                made = run_round(random.Random(f"{asked.seed} {number}"), Path(folder))
            except SkipTest as why:
                made = Round(f"left out: {why}")
            except Exception:
                made = Round("ended by an error", problems=[traceback.format_exc()])
            finally:
                end_all()
        rounds.append(made)
        faults = (
            ", ".join(f"{count} {kind}" for kind, count in sorted(made.faults.items()))
            or "no fault"
        )
        about = f"{made.what}: {made.documents} documents, {made.starts} starts; {faults}"
        print(f"round {number}: {about}; lost {made.lost}, doubled {made.doubled}", flush=True)
        for problem in made.problems:
            print(f"  WRONG (make chaos SEED={asked.seed} ROUND={number}): {problem}", flush=True)
    starts, lost, doubled = (
        sum(getattr(made, name) for made in rounds) for name in ("starts", "lost", "doubled")
    )
    wrong = sum(bool(made.problems or made.lost or made.doubled) for made in rounds)
    bills = sum(
        any(re.search("bill|USD|price", problem) for problem in made.problems) for made in rounds
    )
    faults = (
        f"{len(rounds)} runs, {starts} starts, {sum(made.faults.total() for made in rounds)} faults"
    )
    about = (
        f"lost {lost}, doubled {doubled}, bills that did not add up {bills}, rounds with "
        f"anything wrong {wrong}"
    )
    print(f"{faults}: {about}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
