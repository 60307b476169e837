"""The files of infra/ with the values of the example settings in their placeholders."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml

from tests.processes import ROOT

INFRA = ROOT / "infra"


def load_module(path: Path) -> SimpleNamespace:
    """The functions of a script of infra/, which is no package."""
    return SimpleNamespace(**runpy.run_path(str(path)))


FILL = load_module(INFRA / "fill.py")
SETTINGS: dict[str, str] = FILL.read_settings(INFRA / "settings.example.env")


def text(name: str) -> str:
    return FILL.fill((INFRA / name).read_text(), SETTINGS)


def documents(name: str) -> list[Any]:
    return list(yaml.load_all(text(name), yaml.CSafeLoader))


def policy(name: str) -> dict[str, Any]:
    return json.loads(text(f"iam/{name}.json"))


def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    """A cluster as `ray up` has it before it first writes to AWS; EC2's answer on instance types is
    ours.
    """
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config

    gpus = {
        "Gpus": [
            {
                "Name": "L40S",
                "Manufacturer": "NVIDIA",
                "Count": 8,
            }
        ]
    }
    known = ("m7i.2xlarge", 8, 32, {}), ("g6e.48xlarge", 192, 1536, {"GpuInfo": gpus})
    types = [
        {
            "InstanceType": name,
            "VCpuInfo": {"DefaultVCpus": cpus},
            "MemoryInfo": {"SizeInMiB": gib << 10},
            **more,
        }
        for name, cpus, gib, more in known
    ]
    with mock.patch(
        "ray.autoscaler._private.aws.node_provider.list_ec2_instances", return_value=types
    ):
        return AWSNodeProvider.fillout_available_node_types_resources(prepare_config(cluster))


def pods(job: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, template) of every pod of a RayJob."""
    cluster = job["spec"]["rayClusterSpec"]
    yield "submitter", job["spec"]["submitterPodTemplate"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]
