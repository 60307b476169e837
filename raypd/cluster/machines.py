"""What Ray knows of a cluster's machines, as the bill needs it: when each came and went, its
resources and labels, which infra/docker/node-environment.sh sets on EC2, Kubernetes in the pod. The
section `cost` can have the rest.
"""

import math
from collections.abc import Callable
from typing import Any

from raypd.billing import prices
from raypd.cluster import ray_private
from raypd.config import CostConfig
from raypd.run.records import NodeTime

# Of the cluster, with their prices, given those where a worker was.
Nodes = Callable[[set[str]], list[NodeTime]]
NAMESPACE = "raypd"
LEDGER = "ledger-"  # the names of ledgers begin with this
UNKNOWN = "unknown"  # how the source of a price that nobody knows begins
_MARKETS = {
    "spot": "spot",
    "on-demand": "on-demand",
    "ondemand": "on-demand",
    "on_demand": "on-demand",
}


def look(
    cost: CostConfig, table: prices.Table, cpus: float, gpus: float, worked: set[str]
) -> list[NodeTime]:
    """All nodes, dead ones too, with prices; no head that is not billed. cpus, gpus: of a worker;
    worked: had some.
    """
    nodes = (_node(info, cost, table, cpus, gpus) for info in ray_private.node_infos())
    return [
        node for node in nodes if node and (cost.bill_head or not node.head or node.node in worked)
    ]


def _node(
    info: dict[str, Any], cost: CostConfig, table: prices.Table, cpus: float, gpus: float
) -> NodeTime:
    labels = info["labels"]
    resources = info["resources"]
    instance_type = (
        info["type"] or labels.get("node.kubernetes.io/instance-type") or cost.instance_type
    )
    region = labels.get("ray.io/availability-region") or cost.region
    zone = labels.get("ray.io/availability-zone")
    market = (
        _MARKETS.get(labels.get("ray.io/market-type", "").lower()) or cost.market or "on-demand"
    )
    price = prices.price_or_bound(instance_type, region, market, cost, zone=zone, rows=table)  # type: ignore[arg-type]
    fits = [
        resources.get(name, 0.0) / each for name, each in (("CPU", cpus), ("GPU", gpus)) if each > 0
    ]
    if price:
        source = price.source
    else:
        source = f"{UNKNOWN}: no {market} price of {instance_type} in {region or 'its region'}"
    return NodeTime(
        node=info["node"],
        began=info["began"],
        ended=info["ended"],
        head=info["head"],
        instance_type=instance_type,
        market=market if instance_type else "local",
        region=(region or prices.DEFAULT_REGION) if instance_type else None,
        usd_per_hour=price.usd_per_hour if price else 0.0,
        price_source=f"{source} ({price.date})" if price and price.date else source,
        gpus=resources.get("GPU", 0.0),
        slots=math.floor(min(fits, default=0.0) + 1e-6),
    )


def runs() -> int:
    """How many runs of raypd are on the cluster now, this one among them."""
    from ray.util import list_named_actors

    names = [
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE
    ]
    return max(1, sum(name.startswith(LEDGER) for name in names))
