"""The files of infra/ against what reads them, which also has to refuse the same file with a mistake in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from raypd.cluster.metrics import COUNTERS, GAUGES
from tests.infra.filled import pods, policy, prepared, text

IAM = ("head", "storage", "prices")
OF_RAY = {"ray_node_gpus_utilization"}
TAGS = {f"ray_{name}_total": tag for name, (_, tag) in COUNTERS.items()}
TAGS |= {f"ray_{name}": tag for name, (_, tag) in GAUGES.items()}
CLUSTER, RAYJOB, BOARD = "cluster.yaml", "kuberay/rayjob.yaml", "grafana/raypd.json"
CRON, SERVICE = "kuberay/nightly-cronjob.yaml", "schedule/raypd-nightly.service"
# KubeRay's keys above the pods that rayjob.yaml uses: its resource definitions are not in any Python package.
KEYS = {"apiVersion", "kind", "metadata", "name", "namespace", "spec", "entrypoint", "jobId", "backoffLimit",
        "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "submitterPodTemplate",
        "rayClusterSpec", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "version", "idleTimeoutSeconds",
        "resources", "headGroupSpec", "rayStartParams", "template", "workerGroupSpecs", "groupName", "replicas",
        "minReplicas", "maxReplicas", "priority"}  # fmt: skip
FREE = {"submitterPodTemplate", "template", "resources", "rayStartParams"}  # Kubernetes' own, and Ray's options


def module(name):
    return pytest.importorskip(name, reason=f"needs {name}: pip install -e '.[dev]'")


def program(name, source):
    beside = Path(sys.executable).with_name(name)
    return (str(beside) if beside.exists() else shutil.which(name)) or pytest.skip(f"needs {name}: {source}")


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
            yield subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True).stderr


def hadolint(file):
    command = [program("hadolint", "pip install -e '.[dev]'"), "--no-color", "-"]
    yield subprocess.run(command, input=file, capture_output=True, text=True, timeout=60).stdout


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
        pytest.skip("needs a checkout of KubeRay: set RAYPD_KUBERAY_CRDS to its folder with ray.io_rayjobs.yaml")
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
        # Kubernetes takes numbers as quantities, and says so with a key that JSON schema does not have.
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
            parts = [{**pod, "metadata": {"name": name}, **template} for name, template in pods(document)]
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    yield from (line for line in done.stderr.splitlines() if "raypd-nightly" in line)


def grafana(file):
    """Grafana's own types lose nothing of a panel, and it asks for a source of data and a run."""
    dashboard, board = module("grafana_foundation_sdk.models.dashboard"), json.loads(file)
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
    parts = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param")]
    parts += list(getattr(node, "args", None) or [])
    return [selector for part in parts if part is not None for selector in selectors(part)]


def promql(file):
    """Expressions parse, ask for metrics that raypd and Ray export, and all of raypd's are drawn."""
    parse, drawn = module("promql_parser").parse, set()
    for expression in (target["expr"] for panel in json.loads(file)["panels"] for target in panel["targets"]):
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
        for label in set(re.findall(r"by \((\w+)\)", expression)) - {TAGS.get(s.name) for s in found}:
            yield f"{expression}: by {label}"
    yield from (f"{name} is not drawn" for name in TAGS.keys() - drawn)


def places(file):
    """Panels have an id each and fill rows of 24 columns without overlap."""
    panels = json.loads(file)["panels"]
    cells = [(x, y) for at in (panel["gridPos"] for panel in panels) for x in range(at["x"], at["x"] + at["w"])
             for y in range(at["y"], at["y"] + at["h"])]  # fmt: skip
    if set(cells) != {(x, y) for x in range(24) for y in range(1 + max(y for _, y in cells))}:
        yield "outside of the rows, or not filled"
    if len(set(cells)) < len(cells) or len({panel["id"] for panel in panels}) < len(panels):
        yield "two at one place"


@pytest.mark.parametrize(("file", "validator", "right", "wrong", "words"), [
    (CLUSTER, ray, "max_workers: 8", "max_worker: 8", "'max_worker' was unexpected"),
    (CLUSTER, ec2, "InstanceMarketOptions:", "InstanceMarketOption:", 'parameter in input: "InstanceMarketOption"'),
    (CLUSTER, ec2, "m7i.2xlarge", "m7i.3xlarge", "no instance type: m7i.3xlarge"),
    (CLUSTER, shell, "ulimit -n 65536;", "(ulimit -n 65536;", "syntax error"),
    ("docker/Dockerfile", hadolint, "FROM python:3.11-slim-bookworm", "FROM python", "DL3006"),
    (RAYJOB, rayjob, "minReplicas", "minReplica", "minReplica"),
    (RAYJOB, kuberay, "minReplicas", "minReplica", "minReplica"),
    (RAYJOB, kubernetes, "resources: *gpus", "resorces: *gpus", "resorces"),
    (CRON, kubernetes, "timeZone:", "timezone:", "timezone"),
    (CRON, kubernetes, "roleRef:", "roleref:", "'roleRef' is a required property"),
    (SERVICE, systemd, "Type=oneshot", "Type=oneshoot", "oneshoot"),
    (BOARD, grafana, '"fieldConfig"', '"fieldConfiguration"', "fieldConfiguration"),
    (BOARD, promql, "sum(", "sum((", "sum(("),
    (BOARD, promql, "ray_node_gpus_utilization", "ray_node_gpu_use", "no metric ray_node_gpu_use"),
    (BOARD, places, '"x": 12', '"x": 11', "two at one place")])  # fmt: skip
def test_it_is_accepted_and_with_a_mistake_refused(file, validator, right, wrong, words):
    assert [problem for problem in validator(text(file)) if problem] == []
    assert text(file).replace(right, wrong) != text(file)
    assert words in " ".join(validator(text(file).replace(right, wrong)))


def test_policies_against_awss_own_list_of_actions():
    """As managed policies of one template, as reading its rules is most of what cfn-lint does; with and without three
    mistakes: a typing error, a wrong resource, a wrong key."""
    cfnlint = module("cfnlint")
    from cfnlint.config import ManualArgs

    policies = {name: policy(name) for name in IAM} | {f"{name}Broken": policy(name) for name in IAM}
    statements = {statement["Sid"]: statement for statement in policies["headBroken"]["Statement"]}
    statements["SeeTheClustersNodes"]["Action"].append("ec2:DescribeInstanzes")
    statements["GiveWorkersTheirRoleAndNoOther"]["Resource"] = "arn:aws:s3:::bucket"
    policies["storageBroken"]["Statement"][0]["Effekt"] = "Allow"
    resources = {name: {"Type": "AWS::IAM::ManagedPolicy", "Properties": {"PolicyDocument": document}}
                 for name, document in policies.items()}  # fmt: skip
    resources["trust"] = {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": policy("trust")}}
    template = json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}, indent=1)
    matches = cfnlint.lint(template, config=ManualArgs(regions=["us-east-1"], include_checks=["I"]))
    where = [list(match.path or ["", ""])[1] for match in matches]
    assert [str(match) for match, name in zip(matches, where, strict=True) if not str(name).endswith("Broken")] == []
    found = " ".join(match.message for match in matches)
    assert [words for words in ("describeinstanzes", "iam:PassRole", "Effekt") if words not in found] == []
