"""What the bill needs to know about the machines of a cluster: lifetime, resources, type and price.

On EC2, infra/docker/node-environment.sh sets the labels that are read here; on Kubernetes, the pod
does. The section `cost` of the configuration supplies what is missing.
"""

import math
from collections.abc import Callable
from typing import Any

import raypd.cluster.ray_private as ray_private
from raypd.billing import NodeTime, prices
from raypd.config import CostConfig

# Returns the nodes of the cluster with prices.
Nodes = Callable[[], list[NodeTime]]
NAMESPACE = "raypd"
LEDGER = "ledger-"  # prefix of the names of ledgers
UNKNOWN = "unknown"  # prefix of the source of a price that is unknown
_MARKETS = {
    "spot": "spot",
    "on-demand": "on-demand",
    "ondemand": "on-demand",
    "on_demand": "on-demand",
}


def look(cost: CostConfig, table: prices.PriceTable, cpus: float, gpus: float) -> list[NodeTime]:
    """Return all nodes, dead ones included, with their prices.

    Args:
        cost: The section `cost` of the configuration.
        table: The prices of instance types.
        cpus: CPUs of a worker.
        gpus: GPUs of a worker.
    """
    return [_node(info, cost, table, cpus, gpus) for info in ray_private.node_infos()]


def _node(
    info: dict[str, Any], cost: CostConfig, table: prices.PriceTable, cpus: float, gpus: float
) -> NodeTime:
    labels = info["labels"]
    instance_type = (
        info["type"] or labels.get("node.kubernetes.io/instance-type") or cost.instance_type
    )
    region = labels.get("ray.io/availability-region") or cost.region
    zone = labels.get("ray.io/availability-zone")
    market_label = labels.get("ray.io/market-type", "").lower()
    market: Any = _MARKETS.get(market_label) or cost.market or "on-demand"
    price = prices.price_or_bound(instance_type, region, market, cost, zone=zone, rows=table)
    if price is None:
        usd_per_hour = 0.0
        source = f"{UNKNOWN}: no {market} price of {instance_type} in {region or 'its region'}"
    else:
        usd_per_hour = price.usd_per_hour
        source = f"{price.source} ({price.date})" if price.date else price.source
    node = NodeTime(
        node=info["node"],
        began=info["began"],
        ended=info["ended"],
        head=info["head"],
        usd_per_hour=usd_per_hour,
        price_source=source,
        gpus=info["resources"].get("GPU", 0.0),
        slots=_slots(info["resources"], cpus, gpus),
    )
    if instance_type:
        node.instance_type = instance_type
        node.market = market
        node.region = region or prices.DEFAULT_REGION
    return node


def _slots(resources: dict[str, float], cpus: float, gpus: float) -> int:
    """Return how many workers fit on a node."""
    fits = []
    for name, per_worker in (("CPU", cpus), ("GPU", gpus)):
        if per_worker > 0:
            fits.append(resources.get(name, 0.0) / per_worker)
    return math.floor(min(fits, default=0.0) + 1e-6)


def runs() -> int:
    """Return how many raypd runs are on the cluster now, including this one."""
    from ray.util import list_named_actors

    ledgers = [
        actor
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(LEDGER)
    ]
    return max(1, len(ledgers))
