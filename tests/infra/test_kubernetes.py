"""infra/kuberay: what is plain Kubernetes against Kubernetes' own schemas, strictly; RayJob by hand.

KubeRay's resource definitions are not in any Python package. With RAYPD_KUBERAY_CRDS=<folder of KubeRay's
helm-chart/kuberay-operator/crds> the RayJob is also checked against KubeRay's own, unknown keys refused.
"""

import datetime
import json
import os
import re
import urllib.error
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.infra.filled import FILL, INFRA, SETTINGS, Handler, documents, load_module, serving

VERSION = "1.33"
SUBMIT = load_module(INFRA / "kuberay/submit_nightly.py")


# KubeRay's keys above the pods that rayjob.yaml uses.
KEYS = {
    "apiVersion", "kind", "metadata", "name", "namespace", "spec", "entrypoint", "jobId", "backoffLimit",
    "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "submitterPodTemplate",
    "rayClusterSpec", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "version", "idleTimeoutSeconds",
    "resources", "headGroupSpec", "rayStartParams", "template", "workerGroupSpecs", "groupName", "replicas",
    "minReplicas", "maxReplicas", "priority",
}  # fmt: skip
FREE = {"submitterPodTemplate", "template", "resources", "rayStartParams"}  # Kubernetes' own, and Ray's options


def unknown(tree):
    """Keys of a RayJob that KubeRay does not know."""
    if isinstance(tree, list):
        return [key for inner in tree for key in unknown(inner)]
    found = [key for key in tree if key not in KEYS] if isinstance(tree, dict) else []
    inner = [value for key, value in tree.items() if key not in FREE] if isinstance(tree, dict) else []
    return found + unknown(inner) if inner else found


@pytest.fixture
def job():
    (document,) = documents("kuberay/rayjob.yaml")
    return document


def pods(job):
    cluster = job["spec"]["rayClusterSpec"]
    yield "submitter", job["spec"]["submitterPodTemplate"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def test_rayjob(job):
    assert unknown(job) == []
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"], spec["shutdownAfterJobFinishes"]) == ("ray.io/v1", "RayJob", True)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])  # KubeRay's limit
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    groups[1]["minReplica"] = 1
    assert unknown(job) == ["minReplica"]


def test_rayjob_against_kuberays_own_definition(job):
    folder = os.environ.get("RAYPD_KUBERAY_CRDS")
    if not folder:
        pytest.skip("needs a checkout of KubeRay: set RAYPD_KUBERAY_CRDS to its folder with ray.io_rayjobs.yaml")
    definition = yaml.load((Path(folder) / "ray.io_rayjobs.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    _refuse_unknown(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(schema)
    # Kubernetes takes numbers as quantities, and says so with a key that JSON schema does not have.
    assert [f"{list(e.path)}: {e.message}"[:200] for e in validator.iter_errors(job)] == []
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    assert "minReplica" in next(validator.iter_errors(job)).message


def _refuse_unknown(schema):
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
        for value in schema.values():
            _refuse_unknown(value)
    elif isinstance(schema, list):
        for value in schema:
            _refuse_unknown(value)


@pytest.fixture
def validate():
    """Raises where a document is not of Kubernetes' own schema, strictly."""
    module = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install -e '.[dev]'")
    return lambda document: module.validate(document, VERSION, strict=True)


def test_pods_and_nightly_against_kubernetes(job, validate):
    for name, template in pods(job):
        metadata = {"name": name, **template.get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        validate(pod)
        pod["spec"]["containers"][0]["resorces"] = {}
        with pytest.raises(Exception, match="resorces"):
            validate(pod)
    found = documents("kuberay/nightly-cronjob.yaml")
    for document in found:
        validate(document)
    assert [document["kind"] for document in found] == ["ServiceAccount", "Role", "RoleBinding", "CronJob"]


def test_cluster_grows_from_nothing_and_spot_first_and_nodes_know_their_market_type(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (INFRA.parent / "constraints.txt").read_text().splitlines()
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    spot, fallback = cluster["workerGroupSpecs"]
    assert spot["priority"] > fallback["priority"]
    for group in (spot, fallback):
        container = group["template"]["spec"]["containers"][0]
        assert group["replicas"] == group["minReplicas"] == 0
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["resources"]["limits"] == container["resources"]["requests"]
    markets = {}
    for name, template in pods(job):
        spec = template["spec"]
        environment = {e["name"]: e["value"] for e in spec["containers"][0].get("env", [])}
        node = spec.get("nodeSelector", {}).get("karpenter.sh/capacity-type")
        markets[name] = environment.get("RAY_NODE_MARKET_TYPE"), node
    del markets["submitter"]
    assert markets == {
        "head": ("on-demand", None), "gpu-spot": ("spot", "spot"), "gpu-on-demand": ("on-demand", "on-demand")
    }  # fmt: skip


def test_no_pod_runs_as_root(job):
    (cron,) = [d for d in documents("kuberay/nightly-cronjob.yaml") if d["kind"] == "CronJob"]
    for _, template in [*pods(job), ("cron", cron["spec"]["jobTemplate"]["spec"]["template"])]:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["image"] == SETTINGS["RAYPD_IMAGE"]
        # Ray's autoscaler v2 starts a new pod, and never a pod's container again.
        assert template["spec"]["restartPolicy"] == "Never"


def template():
    kept = FILL.fill((INFRA / "kuberay/rayjob.yaml").read_text(), SETTINGS, frozenset({"RAYPD_RUN"}))
    assert "${RAYPD_RUN}" in kept
    return kept


def test_tonights_job_is_a_rayjob_with_the_date_in_name_and_id_and_one_folder_for_all_nights():
    job = SUBMIT.tonights_job(template(), datetime.date(2026, 3, 9))
    assert unknown(job) == []
    assert job["metadata"]["name"] == job["spec"]["jobId"] == "raypd-nightly-2026-03-09"
    program, script, _, *overrides = job["spec"]["entrypoint"].split()
    assert (program, script) == ("python", "/opt/raypd/jobs/nightly.py")
    assert (INFRA.parent / "jobs/nightly.py").exists()
    assert "output.path=/shared/nightly" in overrides
    with pytest.raises(ValueError, match="--keep RAYPD_RUN"):  # no place for the date
        SUBMIT.tonights_job(FILL.fill(template(), SETTINGS), datetime.date(2026, 3, 9))


def test_a_second_submission_of_the_night_is_no_second_run():
    names = []

    class Api(Handler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != "Bearer a-token":
                self.say(403)
            elif self.path != "/apis/ray.io/v1/namespaces/raypd/rayjobs":
                self.say(404)
            elif body["metadata"]["name"] in names:
                self.say(409)
            else:
                names.append(body["metadata"]["name"])
                self.say(201)

    job = SUBMIT.tonights_job(template(), datetime.date(2026, 3, 9))
    with serving(Api) as address:
        assert SUBMIT.create(job, address, "a-token") is True
        assert SUBMIT.create(job, address, "a-token") is False
        with pytest.raises(urllib.error.HTTPError, match="403"):
            SUBMIT.create(job, address, "another")
    assert names == ["raypd-nightly-2026-03-09"]
