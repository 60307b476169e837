"""Prices from AWS itself; needs pricing:GetProducts and ec2:DescribeSpotPriceHistory, and keeps no
credentials.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as Grid

from raypd.billing import prices as pricing
from raypd.billing.prices import INSTANCES, Price, Table
from raypd.config import CostConfig
from raypd.errors import ConfigError
from raypd.run.text import iso

SHIPPED_REGIONS = ("us-east-1", "us-west-2", "eu-west-1")
_PRICE_LIST_REGION = "us-east-1"  # AWS's price list is served from few regions, this one among them
_SPOT_PAGE = 20  # instance types asked for at once


def refresh(regions: Sequence[str] = SHIPPED_REGIONS) -> Path:
    """Asks AWS for prices of all known types; the file written.

    Raises ConfigError: no credentials, right, network.
    """
    table: Table = {}
    for region in regions:
        on_demand = _on_demand(region)
        spot = _spot(region)
        if not on_demand and not spot:
            raise ConfigError(
                f"--region {region}: AWS lists no price of any instance type there; is it a region?"
            )
        print(
            f"{region}: {len(on_demand)} on-demand prices, {len({key[0] for key in spot})} "
            "types with a spot price"
        )
        table |= on_demand | spot
    return pricing.write_refreshed(table)


def _client(service: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        service, region_name=region, config=Config(retries={"mode": "standard", "max_attempts": 5})
    )


def _asked(action: str, call: Callable[[], Any]) -> Any:
    """The answer of AWS, or a ConfigError in the user's terms."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        return call()
    except NoCredentialsError:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise ConfigError(
            f"no AWS credentials found: `aws configure`, a role, or {keys}; or set cost.prices"
        ) from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "an error")
        raise ConfigError(
            f"AWS refuses {action}: {code}; the credentials in use need that right"
        ) from None
    except BotoCoreError as error:
        raise ConfigError(
            f"AWS does not answer {action}: {type(error).__name__}: {error}"
        ) from None


def _on_demand(region: str) -> Table:
    """Linux without further software, on shared hardware."""
    client = _client("pricing", _PRICE_LIST_REGION)
    fixed = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
    }
    fixed |= {"capacitystatus": "Used", "marketoption": "OnDemand"}
    table: Table = {}
    for instance_type in INSTANCES:
        criteria = [*fixed.items(), ("instanceType", instance_type)]
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in criteria
        ]
        answer = _asked(
            "pricing:GetProducts",
            partial(client.get_products, ServiceCode="AmazonEC2", Filters=filters),
        )
        prices = {usd for text in answer["PriceList"] for usd in _hourly(json.loads(text))}
        # An offer of 0 stands for hardware that is paid elsewhere; the filters leave one above it.
        if prices:
            table[instance_type, region, "on-demand"] = Price(
                max(prices), "AWS price list", iso()[:10]
            )
    return table


def _hourly(product: dict[str, Any]) -> list[float]:
    terms = product.get("terms", {}).get("OnDemand", {}).values()
    dimensions = [
        d for term in terms for d in term["priceDimensions"].values() if d.get("unit") == "Hrs"
    ]
    return [
        float(d["pricePerUnit"]["USD"])
        for d in dimensions
        if float(d["pricePerUnit"].get("USD", 0)) > 0
    ]


def _spot(region: str) -> Table:
    """The present spot prices: of every zone, and of the region as the mean of its zones."""
    client = _client("ec2", region)
    names = list(INSTANCES)
    newest: dict[tuple[str, str], tuple[Any, float]] = {}
    for start in range(0, len(names), _SPOT_PAGE):
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=names[start : start + _SPOT_PAGE],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),  # the price that holds now is the last one before it
        )
        for page in _asked("ec2:DescribeSpotPriceHistory", partial(list, pages)):
            for row in page["SpotPriceHistory"]:
                key = (row["InstanceType"], row["AvailabilityZone"])
                offer = (row["Timestamp"], float(row["SpotPrice"]))
                newest[key] = max(newest.get(key, offer), offer)
    table: Table = {}
    zones: dict[str, list[float]] = {}
    for (instance_type, zone), (_, usd) in newest.items():
        table[instance_type, zone, "spot"] = Price(usd, f"AWS spot price in {zone}", iso()[:10])
        zones.setdefault(instance_type, []).append(usd)
    for instance_type, prices in zones.items():
        source = f"AWS spot price, mean of {len(prices)} zones"
        table[instance_type, region, "spot"] = Price(round(fmean(prices), 6), source, iso()[:10])
    return table


def _day(date: str) -> str:
    return f"{date} (more than six months ago)" if pricing.is_old(date) else date


def show(region: str, instance_type: str | None = None) -> None:
    """Prints the known prices of an AWS region. Raises ConfigError where none is known."""
    table = pricing.table()
    types = [t for t in INSTANCES if instance_type is None or t == instance_type]
    if not types:
        raise ConfigError(
            f"{instance_type}: raypd does not know this instance type; cost.prices can give "
            "its price"
        )
    if not any(place == region and name in types for name, place, _ in table):
        ask = f"`raypd prices refresh --region {region}` asks AWS"
        raise ConfigError(
            f"no price is known for {instance_type or 'any instance type'} in {region}: {ask}"
        )
    heads = [Column(head, no_wrap=True) for head in ("instance", "GPUs")]
    heads += [Column(head, justify="right", no_wrap=True) for head in ("on-demand $/h", "spot $/h")]
    grid = Grid(
        *heads,
        Column("from", overflow="fold"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name in types:
        instance = INSTANCES[name]
        prices = [table.get((name, region, market)) for market in ("on-demand", "spot")]
        if instance.gpus:
            gpus = f"{instance.gpus} x {instance.gpu} {instance.gpu_memory_gib:g} GiB"
        else:
            gpus = "none"
        source = next(
            (f"{_day(price.date)} {price.source}" for price in prices if price is not None), ""
        )
        grid.add_row(
            name,
            gpus,
            *(f"{p.usd_per_hour:.4f}" if p is not None else "unknown" for p in prices),
            source,
        )
    console = Console(highlight=False)
    console.print(grid)
    if instance_type is None:
        console.print(
            "\nhosted batch services, list prices in $ per million tokens; check before you "
            "rely on them:"
        )
        for service in pricing.hosted(CostConfig()):
            asks = (
                f"{service.input:g} in, {service.output:g} out; {_day(service.date)} "
                f"{service.source}"
            )
            console.print(f"{service.model}: {asks}", soft_wrap=True)
