"""What a local Ray listens on and leaves behind; and what a run shows where there is no
terminal.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import ray

from raypd.answering import progress
from raypd.answering.check import check_model
from raypd.cli import summary
from raypd.cluster import driver, machines, ray_private, ray_session
from raypd.config import ClusterConfig
from raypd.config.load import with_changes
from raypd.errors import ModelError, RunError
from raypd.run.usage import RunCost
from tests.faults.trial import Trial
from tests.processes import LONG, ROOT, end_all, ended, start
from tests.runs import FAKE, Clock, write_jsonl
from tests.s3 import free_ports
from tests.servers import Call, Reply, serving

SHELL = (
    "import subprocess, sys; sys.exit(subprocess.call(['bash', '-ec', sys.argv[1]], "
    "cwd=sys.argv[2]))"
)
CONNECTED = """
import ray
from ray.util.state import get_actor
from ray.util.state.exception import ServerUnavailable
from raypd.cluster import ray_session
from raypd.config import ClusterConfig
ray_session.connect(ClusterConfig(address="local"))
try:
    print(ray.get(ray.remote(get_actor).remote("ab" * 16, timeout=2)), flush=True)
except ServerUnavailable:  # which Ray Train waits for
    print("no dashboard", flush=True)
input()
"""

# More actors than the processes that Ray starts ahead.
TOKEN_FILE_DELETED = """
import os, sys
from pathlib import Path
import ray
from raypd.cluster import ray_session
from raypd.config import ClusterConfig

@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return 1

file = Path(sys.argv[1])
file.parent.mkdir()
file.write_text("ab" * 32)
with ray_session.connected(ClusterConfig(address="local")):
    file.unlink()
    actors = [Actor.remote() for _ in range(int(ray.cluster_resources()["CPU"]) + 3)]
    print(sum(ray.get([actor.answer.remote() for actor in actors], timeout=120)) == len(actors))
    file.write_text("cd" * 32)
    later = Actor.remote()
    print(ray.get(later.answer.remote(), timeout=120) == 1)
print(sorted({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys()), file.read_text()[:2])
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a machine on which no Ray ever ran; that of other tests is not seen."""
    # Ray's sockets need a short path.
    home = tmp_path / "home"
    sockets = Path("/tmp") / f"rs{os.getpid()}"
    home.mkdir()
    sockets.mkdir()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    yield {
        "HOME": str(home),
        "RAY_TMPDIR": str(sockets),
        "PATH": path,
    }
    end_all()  # or they go on writing there
    shutil.rmtree(sockets, ignore_errors=True)


def processes_of(home: str) -> dict[int, psutil.Process]:
    """All processes, Ray's too, that were started with this home."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or somebody else's
            if process.environ().get("HOME") == home:
                found[process.pid] = process
    return found


def test_a_local_ray_is_closed_to_others_and_leaves_no_token(
    fresh: dict[str, str],
) -> None:
    """Ray Train does ask while it trains, and what is unknown there it takes for dead."""
    asked = []

    def other(call: Call) -> Reply:
        if call.method == "GET":  # a Ray of somebody else on this machine may report events to it
            asked.append(call.path)
        return Reply(404)

    with serving(other, 8265):  # Ray's port
        process = start("-c", CONNECTED, **fresh)
        assert process.stdout
        assert process.stdout.readline() == "no dashboard\n"
        own = processes_of(fresh["HOME"])
        listening = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid in own
        ]
        servers = {own[c.pid].name(): own[c.pid] for c in listening if c.pid}
        assert {"gcs_server", "raylet"} <= servers.keys()
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        # Other users of the machine reach loopback, too.
        environment = servers["gcs_server"].environ()
        assert environment["RAY_AUTH_MODE"] == "token"
        assert re.fullmatch("[0-9a-f]{64}", environment["RAY_AUTH_TOKEN"])
        said = process.communicate("\n", timeout=LONG)
        assert process.returncode == 0, said
    assert not asked
    assert not Path(fresh["HOME"], ".ray").exists()


@pytest.mark.parametrize(
    "by_path", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.ci])]
)
def test_a_local_ray_does_not_read_the_token_file_of_the_user(
    tmp_path: Path, fresh: dict[str, str], by_path: bool
) -> None:
    """The file of a cluster is there when Ray starts, is deleted, and is made anew."""
    file = Path(fresh["HOME"], ".ray", "auth_token")
    if by_path:
        file = tmp_path / "tokens" / "token"
        fresh["RAY_AUTH_TOKEN_PATH"] = str(file)
    said = ended(start("-c", TOKEN_FILE_DELETED, str(file), **fresh))
    assert said.splitlines()[:3] == ["True", "True", "[] cd"], said


def cluster_lines() -> list[str]:
    """What the README says to type for a cluster."""
    lines = re.findall(
        "^    (.+)$", (ROOT / "README.md").read_text().partition("## On a cluster")[2], re.M
    )
    return lines[
        : next(number for number, line in enumerate(lines) if line.startswith("ray job submit")) + 1
    ]


@pytest.mark.slow
@pytest.mark.parametrize("with_token", [True, False])
def test_the_commands_of_the_readme_work_after_a_local_run(
    tmp_path: Path, fresh: dict[str, str], with_token: bool
) -> None:
    """As they stand but for ports and the output.

    Without a token: start and submit alone, as Ray's own pages.
    """
    clone, (port, agent) = tmp_path / "clone", free_ports(2)
    for folder in ("raypd", "jobs"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run = Trial(tmp_path, ["a"] * 10, model=FAKE)
    shutil.copy(run.file, clone / "tickets.yaml")
    ended(
        start(
            "-m",
            "raypd",
            "extract",
            str(run.file),
            "output.path=" + str(tmp_path / "local"),
            **fresh,
        )
    )
    lines = [
        line for line in cluster_lines() if with_token or line.startswith(("ray start", "ray job"))
    ]
    script = "\n".join(lines).replace(
        "s3://bucket/runs/tickets", f"{run.output} cluster.address=null"
    )
    # The input is named as in the README, by a path that the node has.
    assert isinstance(run.config.input.path, str)
    script = script.replace("s3://bucket/tickets.jsonl", run.config.input.path)
    assert "ray start --head\n" in script
    # Other tests have Rays, too.
    ports = f"--port=0 --dashboard-port={port} --dashboard-agent-listen-port={agent}"
    script = script.replace("ray start --head", f"ray start --head {ports} --num-cpus=2")
    fresh["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    assert "succeeded" in ended(start("-c", SHELL, script, str(clone), **fresh))
    assert run.outcome("").lost == 0
    if not with_token:
        return
    # The shell of another day has no RAY_AUTH_MODE: a cluster that is found here is shown the token
    # that lies here, ...
    words = ["-m", "raypd", "extract", str(run.file)]
    ended(start(*words, f"output.path={tmp_path}/found", "cluster.address=auto", **fresh))
    # ... one that is named is not, since it may be anybody's.
    address = Path(fresh["RAY_TMPDIR"], "ray/ray_current_cluster").read_text()
    fresh["RAY_gcs_server_port_wait_time_s"] = "5"
    said = ended(
        start(*words, f"output.path={tmp_path}/named", f"cluster.address={address}", **fresh), 1
    )
    assert f"no connection to Ray at {address}" in said
    assert "set RAY_AUTH_MODE=token here" in said


@pytest.mark.parametrize(
    ("raised", "seen"), [(SystemExit(15), KeyboardInterrupt), (Exception("too slow"), RunError)]
)
def test_an_error_while_ray_starts_is_an_interrupt_or_a_message_of_one_line(
    monkeypatch, raised, seen
) -> None:
    """Ray's handler of SIGTERM ends the process, and on a busy machine Ray raises bare
    exceptions.
    """
    slow = Exception("The current node timed out during startup.")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=[raised, slow, slow, slow, None]))
    for error in (seen, RunError):  # the second after two that were slow
        with pytest.raises(error):
            ray_session.connect(ClusterConfig(address="local"))
    assert ray_session.connect(ClusterConfig(address="local"))  # slow once


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_ray_that_never_starts_times_out_and_leaves_no_process(monkeypatch, interrupted) -> None:
    started = []
    ended_child = subprocess.Popen(["sleep", "300"])
    gone = psutil.Process(ended_child.pid)  # a grandchild that ends while the others are killed
    ended_child.kill()
    ended_child.wait()
    children = ray_private.children
    monkeypatch.setattr(
        ray_private, "children", lambda: children() | ({gone} if started else set())
    )

    def init(**_):
        started.append(subprocess.Popen(["sleep", "300"]))
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_session, "_START_SECONDS", LONG if interrupted else 1.0)
    error: type[BaseException] = RunError
    words = "did not answer within 1 s"
    if interrupted:
        error = KeyboardInterrupt
        words = ""
    with pytest.raises(error, match=words):
        ray_session.connect(ClusterConfig(address="local"))
    assert started[0].wait(LONG) == -signal.SIGKILL


def test_the_message_names_an_address_at_which_no_ray_answers(monkeypatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match=r"cluster.address 127.0.0.1:1: no Ray cluster answers"):
        ray_session.connect(ClusterConfig(address="127.0.0.1:1"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_progress_is_printed_at_once_then_every_ten_seconds_if_it_changed(clock, capsys) -> None:
    display = progress.RunDisplay(130, 0)
    with display:
        for second in range(35):  # the model is loaded
            clock.now = second
            display.update(0, 0)
        assert capsys.readouterr().err == "0/130 documents, loading the model\n"
        display.begin()
        for second in range(35, 80):
            clock.now = second
            display.update(20 if second < 60 else 90, 1)
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert lines[0] == "20/130 documents, 20/s, 5.5 s left, 1 failed"
    assert last == "90/130 documents, 2.2/s, 18 s left, 1 failed"


def test_the_number_of_documents_is_marked_as_an_estimate_until_all_are_counted(
    clock, capsys
) -> None:
    display = progress.RunDisplay(1800, 0, exact=False)
    with display:
        display.begin()
        clock.now = 20
        display.update(20, 0)
        display.total = 1790
        display.exact = True
        clock.now = 40
        display.update(1790, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0/about 1800 documents, loading the model"
    assert lines[1].split(",")[0] == "20/about 1800 documents"
    assert lines[2].split(",")[0] == "1790/1790 documents"


@pytest.mark.parametrize("committed", [1, 4])
def test_the_estimate_of_documents_follows_the_units_that_have_ended(committed: int) -> None:
    display = SimpleNamespace(update=lambda *_: None)
    counts = {
        "done_units": committed,
        "units": 4,
        "done_documents": 10 * committed,
        "failed_documents": 0,
    }
    own = SimpleNamespace(
        planned=SimpleNamespace(exact=False),
        _display=display,
        **counts,
    )
    driver.DriverSession._update_display(own)  # type: ignore[arg-type]
    assert display.total == 40
    assert display.exact == (committed == 4)


def test_a_run_without_progress_says_so_once_and_shows_no_rate(clock, capsys) -> None:
    display = progress.RunDisplay(130, 0)
    with display:
        display.begin()
        for second in range(100):
            clock.now = second
            display.update(0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["0/130 documents, loading the model", "0/130 documents, 0/s, 0 failed"]
    clock.now = 0
    display = progress.RunDisplay(1536, 0)
    with display:
        clock.now = 20
        display.begin()
        display.update(2, 0)
    assert capsys.readouterr().err.splitlines()[-1] == "2/1536 documents, 0 failed"


@pytest.mark.parametrize(
    ("documents", "few", "enough"),
    [(1_000_000, 99, 100), (327, 16, 17), (100, 9, 10)],
)
def test_no_time_left_is_shown_before_it_can_be_known(
    clock, capsys, documents, few, enough
) -> None:
    """The first documents say nothing, and after ten minutes one slow document says much."""
    display = progress.RunDisplay(documents, 0)
    with display:
        display.begin()
        for answered, end, is_known in ((few, 100, False), (enough, 120, True)):
            clock.now = end
            display.update(answered, 0)
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith(f"{answered}/{documents} documents")
            assert ("left" in line) == is_known
    slow = progress.RunDisplay(documents, 0)
    with slow:
        slow.begin()
        for seconds, is_known in ((590, False), (610, True)):
            clock.now = 120 + seconds
            slow.update(1 + is_known, 0)
            assert ("left" in capsys.readouterr().err.splitlines()[-1]) == is_known


def test_a_summary_says_that_there_is_no_price_and_uses_the_singular() -> None:
    cost = RunCost(
        0.0,
        notes=["a machine of your own; cost.prices.local gives it a price"],
        seconds={"decode": 3.0},
    )
    assert summary._cost_lines(cost, 3.0) == [
        f"cost:   no price ({cost.notes[0]})",
        "time:   decode 3.0 s",
    ]
    # Two places for workers: their times together are longer than the run.
    cost.seconds["idle"] = 3.0
    assert summary._cost_lines(cost, 3.0)[1] == (
        "time:   decode 3.0 s, idle 3.0 s (summed over all workers)"
    )
    own = SimpleNamespace(done_units=0, units=1)
    assert driver.DriverSession.state(own) == "0 of 1 unit committed"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "workers", "cpus", "places"),
    [
        # More workers than cores: each has a core, and the bill counts a place for each core.
        ([2], 8, 1.0, 2),
        ([2, 2], 8, 1.0, 2),
        ([0.5], 8, 0.5, 1),
        ([16], 8, 2.0, 8),
    ],
)
def test_a_worker_has_a_core_and_a_node_has_no_more_places_than_cores(
    monkeypatch, config, cores, workers, cpus, places
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": count}} for count in cores]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    run = with_changes(config("in"), {"cluster.max_workers": workers})
    share = ray_session.worker_resources(run)
    assert share == ray_session.WorkerResources(cpus, 0.0, max(1, int(cpus)))
    assert machines._slots({"CPU": cores[0]}, share.cpus, share.gpus) == places
    # All workers of a training begin together.
    together = ray_session.worker_resources(run, share_cpus=True)
    assert together.cpus * workers <= sum(cores)


def test_slow_steps_are_announced_before_they_begin(monkeypatch, capsys, config, tmp_path) -> None:
    """The first words come before torch and transformers are imported, and before Ray is there."""
    said: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: said.append(capsys.readouterr().err))
    monkeypatch.setattr(ray_session, "_answers", lambda address: True)
    assert ray_session.connect(ClusterConfig(address="local"))
    assert ray_session.connect(ClusterConfig(address="10.0.0.1:6379"))
    assert said == ["starting Ray\n", "connecting to Ray\n"]
    write_jsonl(tmp_path / "in/a.jsonl", ["a"])
    run = with_changes(config(str(tmp_path / "in")), {"model.name": str(tmp_path / "nowhere")})
    for begin in (driver.run_extract, check_model):
        with pytest.raises(ModelError):
            begin(run)
        assert capsys.readouterr().err.startswith("checking the model\n")
