"""Ask AWS for prices, and print the known ones.

The credentials need pricing:GetProducts and ec2:DescribeSpotPriceHistory. They are not stored.
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
from rich.table import Column, Table as Grid

import raypd.billing.prices as pricing
from raypd.billing.prices import INSTANCES, Price, PriceTable
from raypd.config import CostConfig
from raypd.errors import ConfigError
from raypd.text import iso

SHIPPED_REGIONS = ("us-east-1", "us-west-2", "eu-west-1")
# AWS serves its price list from only a few regions, including this one.
_PRICE_LIST_REGION = "us-east-1"
_SPOT_PAGE = 20  # instance types per request
# Linux without further software, on shared hardware.
_ON_DEMAND_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def refresh(regions: Sequence[str] = SHIPPED_REGIONS) -> Path:
    """Ask AWS for the prices of all known instance types, and return the file with them.

    Raises:
        ConfigError: If credentials or permissions are missing, if AWS does not respond, or if a
            region has no prices.
    """
    table: PriceTable = {}
    for region in regions:
        on_demand = _on_demand(region)
        spot = _spot(region)
        if not on_demand and not spot:
            raise ConfigError(
                f"--region {region}: AWS lists no price of any instance type there; is this the "
                "name of a region?"
            )
        spot_types = {instance_type for instance_type, _, _ in spot}
        print(
            f"{region}: {len(on_demand)} on-demand prices, {len(spot_types)} types with a spot "
            "price"
        )
        table |= on_demand
        table |= spot
    return pricing.write_refreshed(table)


def _client(service: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    retries = Config(retries={"mode": "standard", "max_attempts": 5})
    return boto3.client(service, region_name=region, config=retries)


def _ask(action: str, call: Callable[[], Any]) -> Any:
    """Return AWS's answer, or raise a ConfigError that says what to do."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        return call()
    except NoCredentialsError:
        variables = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise ConfigError(
            f"no AWS credentials found: run `aws configure`, use a role, or set {variables}; or "
            "set cost.prices"
        ) from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "an error")
        raise ConfigError(
            f"AWS refuses {action}: {code}; the credentials need that permission"
        ) from None
    except BotoCoreError as error:
        raise ConfigError(
            f"AWS does not answer {action}: {type(error).__name__}: {error}"
        ) from None


def _on_demand(region: str) -> PriceTable:
    """Return the on-demand prices of a region."""
    client = _client("pricing", _PRICE_LIST_REGION)
    table: PriceTable = {}
    for instance_type in INSTANCES:
        criteria = {"regionCode": region, **_ON_DEMAND_FILTERS, "instanceType": instance_type}
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in criteria.items()
        ]
        request = partial(client.get_products, ServiceCode="AmazonEC2", Filters=filters)
        answer = _ask("pricing:GetProducts", request)
        hourly_prices: list[float] = []
        for text in answer["PriceList"]:
            hourly_prices += _hourly_prices(json.loads(text))
        # The filters leave one offer with a price. An offer of 0 is for hardware that is paid for
        # elsewhere.
        if hourly_prices:
            price = Price(max(hourly_prices), "AWS price list", iso()[:10])
            table[instance_type, region, "on-demand"] = price
    return table


def _hourly_prices(product: dict[str, Any]) -> list[float]:
    """Return the hourly prices above 0 of a product in AWS's price list."""
    prices = []
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            usd = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension.get("unit") == "Hrs" and usd > 0:
                prices.append(usd)
    return prices


def _spot(region: str) -> PriceTable:
    """Return the current spot prices of each zone, and their means for the region."""
    client = _client("ec2", region)
    instance_types = list(INSTANCES)
    # The newest (time, price) of each (instance type, zone).
    newest: dict[tuple[str, str], tuple[Any, float]] = {}
    for start in range(0, len(instance_types), _SPOT_PAGE):
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=instance_types[start : start + _SPOT_PAGE],
            ProductDescriptions=["Linux/UNIX"],
            # The current price is the last one before this time.
            StartTime=datetime.now(UTC),
        )
        for page in _ask("ec2:DescribeSpotPriceHistory", partial(list, pages)):
            for row in page["SpotPriceHistory"]:
                key = (row["InstanceType"], row["AvailabilityZone"])
                offer = (row["Timestamp"], float(row["SpotPrice"]))
                newest[key] = max(newest.get(key, offer), offer)
    table: PriceTable = {}
    zone_prices: dict[str, list[float]] = {}
    today = iso()[:10]
    for (instance_type, zone), (_, usd) in newest.items():
        table[instance_type, zone, "spot"] = Price(usd, f"AWS spot price in {zone}", today)
        zone_prices.setdefault(instance_type, []).append(usd)
    for instance_type, prices in zone_prices.items():
        source = f"AWS spot price, mean of {len(prices)} zones"
        mean = round(fmean(prices), 6)
        table[instance_type, region, "spot"] = Price(mean, source, today)
    return table


def _day(date: str) -> str:
    return f"{date} (more than six months ago)" if pricing.is_old(date) else date


def show(region: str, instance_type: str | None = None) -> None:
    """Print the known prices of a region.

    Args:
        region: An AWS region.
        instance_type: The only instance type to print; None for all, and for hosted services.

    Raises:
        ConfigError: If no price is known.
    """
    table = pricing.table()
    instance_types = list(INSTANCES)
    if instance_type is not None:
        if instance_type not in INSTANCES:
            raise ConfigError(
                f"{instance_type}: raypd does not know this instance type; cost.prices can set its "
                "price"
            )
        instance_types = [instance_type]
    priced_types = {name for name, area, _ in table if area == region}
    if not priced_types & set(instance_types):
        raise ConfigError(
            f"no price is known for {instance_type or 'any instance type'} in {region}: `raypd "
            f"prices refresh --region {region}` asks AWS"
        )
    console = Console(highlight=False)
    console.print(_grid(table, region, instance_types))
    if instance_type is None:
        _print_hosted(console)


def _grid(table: PriceTable, region: str, instance_types: Sequence[str]) -> Grid:
    """Lay out the prices of a region."""
    grid = Grid(
        Column("instance", no_wrap=True),
        Column("GPUs", no_wrap=True),
        Column("on-demand $/h", justify="right", no_wrap=True),
        Column("spot $/h", justify="right", no_wrap=True),
        Column("from", overflow="fold"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name in instance_types:
        instance = INSTANCES[name]
        gpus = "none"
        if instance.gpus:
            gpus = f"{instance.gpus} x {instance.gpu} {instance.gpu_memory_gib:g} GiB"
        cells = []
        sources = []
        for market in ("on-demand", "spot"):
            price = table.get((name, region, market))
            if price is None:
                cells.append("unknown")
            else:
                cells.append(f"{price.usd_per_hour:.4f}")
                sources.append(f"{_day(price.date)} {price.source}")
        grid.add_row(name, gpus, *cells, sources[0] if sources else "")
    return grid


def _print_hosted(console: Console) -> None:
    """Print the prices of hosted batch services."""
    console.print(
        "\nhosted batch services, list prices in $ per million tokens; check before you rely on "
        "them:"
    )
    for service in pricing.hosted(CostConfig()):
        console.print(
            f"{service.model}: {service.input:g} in, {service.output:g} out; {_day(service.date)} "
            f"{service.source}",
            soft_wrap=True,
        )
