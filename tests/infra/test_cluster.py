"""infra/cluster.yaml against Ray's own validation and EC2's own request model, without a call to AWS."""

import copy
import subprocess
from unittest import mock

import jsonschema
import pytest

from tests.infra.filled import INFRA, SETTINGS, Handler, documents, policy, serving

WORKERS = ("gpu-spot", "gpu-on-demand")


@pytest.fixture
def cluster(monkeypatch):
    """The configuration as `ray up` has it before it first writes to AWS; EC2's answer on instance types is ours."""
    from ray.autoscaler._private.aws import node_provider
    from ray.autoscaler._private.util import prepare_config

    types = [
        {"InstanceType": "m7i.2xlarge", "VCpuInfo": {"DefaultVCpus": 8}, "MemoryInfo": {"SizeInMiB": 32 << 10}},
        {
            "InstanceType": "g6e.48xlarge",
            "VCpuInfo": {"DefaultVCpus": 192},
            "MemoryInfo": {"SizeInMiB": 1536 << 10},
            "GpuInfo": {"Gpus": [{"Name": "L40S", "Manufacturer": "NVIDIA", "Count": 8}]},
        },
    ]
    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *_: copy.deepcopy(types))
    prepared = prepare_config(documents("cluster.yaml")[0])
    return node_provider.AWSNodeProvider.fillout_available_node_types_resources(prepared)


def test_ray_accepts_it_and_would_refuse_a_key_that_it_does_not_know(cluster):
    from ray.autoscaler._private.util import validate_config

    validate_config(cluster)
    cluster["available_node_types"]["gpu-spot"]["max_worker"] = 3
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validate_config(cluster)


def test_head_takes_no_work_and_spot_workers_of_eight_gpus_come_first(cluster):
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    types = cluster["available_node_types"]
    assert types["head"]["resources"]["CPU"] == types["head"]["max_workers"] == 0
    spot, fallback = (types[name] for name in WORKERS)
    # A worker type that could do more than the other would win whatever its priority.
    assert spot["resources"] == fallback["resources"]
    assert (spot["resources"]["GPU"], spot["resources"]["CPU"]) == (8, 192)
    market = {
        name: one["node_config"].get("InstanceMarketOptions", {}).get("MarketType") for name, one in types.items()
    }
    assert market == {"head": None, "gpu-spot": "spot", "gpu-on-demand": None}
    config = AutoscalingConfig(cluster, skip_content_hash=True)
    assert config.get_node_type_configs()["gpu-spot"].labels == {"ray.io/market-type": "spot"}
    assert (config.get_idle_timeout_s(), config.get_max_num_worker_nodes()) == (600, 8)


def _asked_for(cluster, actors, **availability):
    """What Ray's autoscaler launches for so many actors of a GPU and a CPU each, on a cluster without workers."""
    from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    config = AutoscalingConfig(cluster, skip_content_hash=True)
    one = ResourceRequestUtil.make({"CPU": 1.0, "GPU": 1.0})
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_worker_nodes(),  # Ray's own count has the head in it, and here is none
        resource_requests=ResourceRequestUtil.group_by_count([one] * actors),
        **availability,
    )
    reply = ResourceDemandScheduler(mock.Mock(AutoscalerEventLogger)).schedule(request)
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def test_autoscaler_asks_for_spot_and_after_a_failure_for_on_demand(cluster):
    """Ray's own scheduler on the configuration; what it is told of a failed launch comes from its launch monitor."""
    assert _asked_for(cluster, 0) == {}
    assert _asked_for(cluster, 8) == {"gpu-spot": 1}
    assert _asked_for(cluster, 17) == {"gpu-spot": 3}
    failed = {"gpu-spot": 0.0}
    assert _asked_for(cluster, 8, recoverable_resource_availabilities=failed) == {"gpu-on-demand": 1}
    assert sum(_asked_for(cluster, 1000).values()) == cluster["max_workers"]


@pytest.mark.parametrize("name", ["head", *WORKERS])
def test_ec2_knows_every_parameter_and_instance_type(cluster, name):
    """Against the request model of RunInstances that boto3 ships; which refuses a parameter that it does not know."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.Session().get_service_model("ec2")
    shape = model.operation_model("RunInstances").input_shape
    request = {**cluster["available_node_types"][name]["node_config"], "MinCount": 1, "MaxCount": 1}
    problems = ParamValidator().validate(request, shape)
    assert not problems.has_errors(), problems.generate_report()
    assert request["InstanceType"] in model.shape_for("InstanceType").enum
    assert ParamValidator().validate({**request, "InstanceMarketOption": {}}, shape).has_errors()


def test_permissions_are_about_this_cluster(cluster):
    """The head may start only what cluster.yaml asks for, under the cluster's name, with the workers' role."""
    statements = {s["Sid"]: s for s in policy("head")["Statement"]}
    start = statements["StartWorkersOfTheClusterOnly"]["Condition"]["StringEquals"]
    assert start["aws:RequestTag/ray-cluster-name"] == cluster["cluster_name"]
    end = statements["RetagAndEndNodesOfTheClusterOnly"]["Condition"]["StringEquals"]
    assert end["aws:ResourceTag/ray-cluster-name"] == cluster["cluster_name"]
    for name in WORKERS:
        node = cluster["available_node_types"][name]["node_config"]
        assert node["InstanceType"] == start["ec2:InstanceType"]
        assert node["IamInstanceProfile"] == {"Name": SETTINGS["RAYPD_WORKER_PROFILE"]}


def test_every_command_is_shell_and_nodes_start_with_the_script_of_the_image(cluster):
    dockerfile = (INFRA / "docker/Dockerfile").read_text()
    assert "WORKDIR /opt/raypd\n" in dockerfile
    assert "COPY infra/docker/node-environment.sh infra/docker/node-environment.sh" in dockerfile
    assert "-v /tmp/ray:/tmp/ray" in cluster["docker"]["run_options"]  # where Prometheus finds Ray's list of nodes
    for key, commands in cluster.items():
        if key.endswith("start_ray_commands"):
            assert ". /opt/raypd/infra/docker/node-environment.sh;" in commands[-1]
        for command in commands if key.endswith("_commands") else []:
            done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
            assert not done.returncode, f"{key}: {done.stderr}"


METADATA = {
    "instance-life-cycle": "spot",
    "placement/availability-zone": "us-east-1b",
    "placement/region": "us-east-1",
    "instance-type": "g6e.48xlarge",
}


class _Metadata(Handler):
    """EC2's instance metadata service, version 2."""

    def do_PUT(self):
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.say(200, "a-token")

    def do_GET(self):
        answer = METADATA.get(self.path.removeprefix("/latest/meta-data/"))
        right = self.headers["X-aws-ec2-metadata-token"] == "a-token"
        self.say(200 if right and answer else 401, answer or "")


def _source(endpoint):
    """(the variables that a node has, what its script writes about them)"""
    script = f'. {INFRA}/docker/node-environment.sh; env | grep "^RAY_\\|^raypd" | sort'
    environment = {"PATH": "/usr/bin:/bin", "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment, timeout=30)
    return dict(line.split("=") for line in done.stdout.split()), done.stderr


def test_ray_makes_labels_of_what_a_node_learns_and_it_starts_without_metadata_all_the_same(monkeypatch):
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    with serving(_Metadata) as url:
        variables, _ = _source(f"{url}/")
    assert variables.pop("RAY_CLOUD_INSTANCE_TYPE_NAME") == "g6e.48xlarge"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanted = {"market-type": "spot", "availability-zone": "us-east-1b", "availability-region": "us-east-1"}
    labels = ResourceAndLabelSpec._get_default_labels(None)
    assert {f"ray.io/{label}": value for label, value in wanted.items()}.items() <= labels.items()
    variables, warning = _source(url)  # nobody listens there any more
    assert variables == {}
    assert "no EC2 metadata" in warning
