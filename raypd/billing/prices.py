"""What a machine costs an hour, and what is in it: AWS instance types with GPUs, in USD.
`cost.prices` comes first, then the newer of `raypd prices refresh`'s file and `price_lists/*.csv`
(on-demand, Linux, shared tenancy).
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
from pydantic.dataclasses import dataclass as checked_dataclass

from raypd import storage
from raypd.config import CostConfig
from raypd.errors import ConfigError
from raypd.run.records import HostedPrice, from_json

Market = Literal["on-demand", "spot", "local"]
DEFAULT_REGION = "us-east-1"
LOCAL = "local"  # the key in cost.prices for a machine that has no instance type


class PriceUnknown(ConfigError):
    """No table has the price."""


@checked_dataclass(frozen=True)  # which makes numbers of a table's texts
class Instance:
    type: str
    gpus: int
    # Tells it from its kin: of the A100, the one with more memory is also faster; "" where there is
    # none.
    gpu: str
    gpu_memory_gib: float  # of one
    vcpus: int
    memory_gib: float


@dataclass(frozen=True)
class Price:
    usd_per_hour: float
    source: str  # where it is from, in words
    date: str = ""  # when it was read there, YYYY-MM[-DD]; "" for the configuration's


# (instance type, region or availability zone, market) -> price
Table = dict[tuple[str, str, str], Price]

_SOURCES = {
    "price-list": "AWS price list",
    "catalogue": "a public catalogue of AWS's price list, not before this date",
    "as-us-east-1": "AWS price list of us-east-1, which this region shared wherever it was compared",  # noqa: E501
}


def _csv(name: str) -> list[dict[str, str]]:
    text = (
        resources.files("raypd.billing").joinpath("price_lists", name).read_text(encoding="utf-8")
    )
    return list(csv.DictReader(text.splitlines()))


INSTANCES = {row["instance_type"]: Instance(*row.values()) for row in _csv("instances.csv")}  # type: ignore[arg-type]


def is_old(day: str) -> bool:
    """Whether a price of a day, YYYY-MM[-DD], is of more than six months ago."""
    return bool(day) and date.today() - date.fromisoformat(f"{day}-01"[:10]) > timedelta(183)


def hosted(cost: CostConfig) -> list[HostedPrice]:
    """What is listed, or configured in its place."""
    prices = {
        model: HostedPrice(model, sent, written, "", f"cost.hosted_prices.{model}")
        for model, (sent, written) in cost.hosted_prices.items()
    }
    for row in _csv("hosted_batch.csv"):
        prices.setdefault(row["model"], from_json(HostedPrice, row, "hosted_batch.csv"))
    return list(prices.values())


@cache
def shipped() -> Table:
    table: Table = {}
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
    """The file of `raypd prices refresh`; the environment variable RAYPD_PRICES names another."""
    named = os.environ.get("RAYPD_PRICES")
    return Path(named) if named else user_cache_path("raypd") / "prices.json"


def refreshed() -> Table:
    """What `raypd prices refresh` has written; nothing where it never ran.

    Raises ConfigError at a damaged file.
    """
    path = refreshed_path()
    try:
        rows = json.loads(path.read_bytes())["prices"]
        return {(r["type"], r["region"], r["market"]): Price(**r["price"]) for r in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a price file ({error}); `raypd prices refresh` writes it anew"
        ) from None


def write_refreshed(table: Table) -> Path:
    """Adds prices to the refreshed file, in place of those it has for the same keys; the file.

    Raises ConfigError.
    """
    with contextlib.suppress(ConfigError):  # a damaged file is written anew
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
            f"{path}: cannot be written ({error.strerror}); RAYPD_PRICES names another file"
        ) from None
    return path


def table() -> Table:
    """Shipped and refreshed prices; of two for one key the newer.

    Raises ConfigError at a damaged refreshed file.
    """
    prices = shipped()
    newer = {
        key: row
        for key, row in refreshed().items()
        if key not in prices or row.date >= prices[key].date
    }
    return prices | newer


def price(
    instance_type: str | None,
    region: str | None,
    market: Market | None,
    cost: CostConfig,
    *,
    zone: str | None = None,
    rows: Table | None = None,
) -> Price:
    """The price of one machine for one hour.

    Raises PriceUnknown, which says what to do. instance_type None: a machine of your own
    (cost.prices.local or 0). region, market None: of `cost`, else us-east-1 and on-demand. zone:
    its spot price counts before the region's. rows: in place of `table()`.
    """
    market = market or cost.market or "on-demand"
    for key in (
        (f"{instance_type}/{market}", instance_type) if instance_type is not None else (LOCAL,)
    ):
        if key in cost.prices:
            return Price(cost.prices[key], f"cost.prices.{key}")
    if instance_type is None:
        return Price(0.0, "a machine of your own; cost.prices.local gives it a price")
    region = region or cost.region or DEFAULT_REGION
    rows = table() if rows is None else rows
    for place in (zone, region):
        if place is not None and (instance_type, place, market) in rows:
            listed = rows[instance_type, place, market]
            if is_old(listed.date):
                advice = "; more than six months ago: `raypd prices refresh`"
            else:
                advice = ""
            return replace(listed, source=f"{listed.source}{advice}")
    raise PriceUnknown(
        f"no {market} price is known for {instance_type} in {region}: `raypd prices "
        f"refresh --region {region}` asks "
        f"AWS for it, or set cost.prices.{instance_type} (or "
        f"cost.prices.{instance_type}/{market}) in USD per hour"
    )


def price_or_bound(
    instance_type: str | None,
    region: str | None,
    market: Market | None,
    cost: CostConfig,
    **where: Any,
) -> Price | None:
    """As `price`; for an unknown spot price its bound, the on-demand price; None: neither. where:
    `zone`, `rows`.
    """
    with contextlib.suppress(PriceUnknown):
        return price(instance_type, region, market, cost, **where)
    if (market or cost.market) == "spot":
        bound = price_or_bound(instance_type, region, "on-demand", cost, **where)
        return bound and replace(
            bound, source=f"on-demand price, as no spot price is known ({bound.source})"
        )
    return None
