"""Hourly prices in USD and the hardware of machines: AWS instance types with GPUs.

A price in `cost.prices` takes precedence. Otherwise the newer price from two tables is used: the
file that `raypd prices refresh` writes, and `price_lists/*.csv` (on-demand, Linux, shared tenancy).
"""

import contextlib
import csv
import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path

from raypd import storage
from raypd.config import CostConfig
from raypd.errors import ConfigError
from raypd.run import from_json

Market = Literal["on-demand", "spot", "local"]
DEFAULT_REGION = "us-east-1"
LOCAL = "local"  # the key in cost.prices for a machine that has no instance type


@dataclass
class HostedPrice:
    """The list price of a service's batch API, in USD per million tokens."""

    model: str
    input: float
    output: float
    date: str  # when it was read
    source: str  # an address, or a key of `cost`


class PriceUnknown(ConfigError):
    """The price is neither configured nor in a table."""


@dataclass(frozen=True)
class Instance:
    """The hardware of an instance type."""

    type: str
    gpus: int
    # The name distinguishes variants: the A100 with more memory is also faster. "" if no GPU.
    gpu: str
    gpu_memory_gib: float  # of each GPU
    vcpus: int
    memory_gib: float


@dataclass(frozen=True)
class Price:
    """A price and its origin."""

    usd_per_hour: float
    source: str  # in words
    date: str = ""  # when it was read, YYYY-MM[-DD]; "" for a configured price


# (instance type, region or availability zone, market) -> price
PriceTable = dict[tuple[str, str, str], Price]

_SOURCES = {
    "price-list": "AWS price list",
    "catalogue": "a public catalogue of AWS's price list, not before this date",
    "as-us-east-1": "AWS price list of us-east-1; all prices that were compared are the same here",
}


def _csv(name: str) -> list[dict[str, str]]:
    text = (
        resources.files("raypd.billing").joinpath("price_lists", name).read_text(encoding="utf-8")
    )
    return list(csv.DictReader(text.splitlines()))


def _instances() -> dict[str, Instance]:
    """Read the instance types that raypd knows."""
    instances = {}
    for row in _csv("instances.csv"):
        instance_type = row.pop("instance_type")
        instances[instance_type] = from_json(
            Instance, {"type": instance_type, **row}, "instances.csv"
        )
    return instances


INSTANCES = _instances()


def is_old(day: str) -> bool:
    """Return whether a date, YYYY-MM[-DD], is more than six months ago; False for ""."""
    if not day:
        return False
    first_day = date.fromisoformat(f"{day}-01"[:10])
    return date.today() - first_day > timedelta(183)


def hosted(cost: CostConfig) -> list[HostedPrice]:
    """Return the prices of hosted services: configured ones, then the shipped list."""
    prices = {}
    for model, (input_usd, output_usd) in cost.hosted_prices.items():
        source = f"cost.hosted_prices.{model}"
        prices[model] = HostedPrice(model, input_usd, output_usd, "", source)
    for row in _csv("hosted_batch.csv"):
        prices.setdefault(row["model"], from_json(HostedPrice, row, "hosted_batch.csv"))
    return list(prices.values())


@cache
def shipped() -> PriceTable:
    """Return the prices that raypd ships."""
    table: PriceTable = {}
    for row in _csv("on_demand.csv"):
        mark = "" if row["verified"] == "yes" else ", one source only"
        price = Price(
            float(row["usd_per_hour"]),
            f"raypd's table: {_SOURCES[row['source']]}{mark}",
            row["date"],
        )
        table[row["instance_type"], row["region"], "on-demand"] = price
    return table


def refreshed_path() -> Path:
    """Return the path of the refreshed prices, which RAYPD_PRICES can change."""
    configured = os.environ.get("RAYPD_PRICES")
    if configured:
        return Path(configured)
    return user_cache_path("raypd") / "prices.json"


def refreshed() -> PriceTable:
    """Return the prices that `raypd prices refresh` wrote, or none if it never ran.

    Raises:
        ConfigError: If the file is damaged.
    """
    path = refreshed_path()
    try:
        rows = json.loads(path.read_bytes())["prices"]
        return {(r["type"], r["region"], r["market"]): Price(**r["price"]) for r in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a price file ({error}); `raypd prices refresh` replaces it"
        ) from None


def write_refreshed(table: PriceTable) -> Path:
    """Add prices to the refreshed file, and return its path.

    Raises:
        ConfigError: If the file cannot be written.
    """
    # A damaged file is replaced.
    with contextlib.suppress(ConfigError):
        table = refreshed() | table
    rows = [
        {"type": type, "region": region, "market": market, "price": asdict(price)}
        for (type, region, market), price in sorted(table.items())
    ]
    path = refreshed_path()
    try:
        storage.put(str(path), (json.dumps({"prices": rows}, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); set RAYPD_PRICES to another path"
        ) from None
    return path


def table() -> PriceTable:
    """Return shipped and refreshed prices; the newer of two is used.

    Raises:
        ConfigError: If the refreshed file is damaged.
    """
    prices = dict(shipped())
    for key, price in refreshed().items():
        if key not in prices or price.date >= prices[key].date:
            prices[key] = price
    return prices


def price(
    instance_type: str | None,
    region: str | None,
    market: Market | None,
    cost: CostConfig,
    *,
    zone: str | None = None,
    rows: PriceTable | None = None,
) -> Price:
    """Return the price of one machine for one hour.

    Args:
        instance_type: The instance type; None for a machine of your own (cost.prices.local, or 0).
        region: None uses cost.region, or else us-east-1.
        market: None uses cost.market, or else on-demand.
        cost: The section `cost` of the configuration.
        zone: The availability zone, whose spot price takes precedence over the region's.
        rows: The prices; None for `table()`.

    Raises:
        PriceUnknown: If there is no price. The message says how to set one.
    """
    market = market or cost.market or "on-demand"
    keys = [LOCAL]
    if instance_type is not None:
        keys = [f"{instance_type}/{market}", instance_type]
    for key in keys:
        if key in cost.prices:
            return Price(cost.prices[key], f"cost.prices.{key}")
    if instance_type is None:
        return Price(0.0, "your own machine; set its price with cost.prices.local")
    region = region or cost.region or DEFAULT_REGION
    if rows is None:
        rows = table()
    for area in (zone, region):
        if area is None or (instance_type, area, market) not in rows:
            continue
        listed = rows[instance_type, area, market]
        if is_old(listed.date):
            advice = "older than six months; `raypd prices refresh` updates it"
            return replace(listed, source=f"{listed.source}; {advice}")
        return listed
    raise PriceUnknown(
        f"no {market} price is known for {instance_type} in {region}: `raypd prices refresh "
        f"--region {region}` asks AWS for it, or set cost.prices.{instance_type} (or "
        f"cost.prices.{instance_type}/{market}) in USD per hour"
    )


def price_or_bound(
    instance_type: str | None,
    region: str | None,
    market: Market | None,
    cost: CostConfig,
    **options: Any,
) -> Price | None:
    """Return the price as `price` does, or the on-demand price if the spot price is unknown.

    Args:
        instance_type: As for `price`.
        region: As for `price`.
        market: As for `price`.
        cost: As for `price`.
        options: `zone` and `rows` of `price`.

    Returns:
        None if neither price is known.
    """
    with contextlib.suppress(PriceUnknown):
        return price(instance_type, region, market, cost, **options)
    if (market or cost.market) != "spot":
        return None
    bound = price_or_bound(instance_type, region, "on-demand", cost, **options)
    if bound is None:
        return None
    source = f"on-demand price, because no spot price is known ({bound.source})"
    return replace(bound, source=source)
