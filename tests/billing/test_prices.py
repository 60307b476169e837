"""Prices: which source comes first, the error if none has a price, and requests to AWS."""

import json
import re
from datetime import UTC, date, datetime, timedelta

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws

from raypd.billing import prices, prices_aws
from raypd.billing.prices import INSTANCES, Price, PriceUnknown
from raypd.config import CostConfig
from raypd.errors import ConfigError
from tests.runs import says


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    nowhere = dict.fromkeys(
        ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / "none")
    )
    variables = {"RAYPD_PRICES": str(tmp_path / "prices.json"), "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in (nowhere | variables).items():
        monkeypatch.setenv(name, value)


def test_shipped_prices_are_of_known_instances_with_date_and_source() -> None:
    # The paper's machine.
    listed = prices.price("g6e.48xlarge", "us-east-1", "on-demand", CostConfig())
    assert listed.usd_per_hour == 30.13118
    assert listed.date == "2026-09-24"
    assert "price list" in listed.source
    assert INSTANCES["g6e.48xlarge"] == prices.Instance("g6e.48xlarge", 8, "L40S", 44, 192, 1536)
    table = prices.shipped()
    assert len(table) > 70
    for (instance_type, region, market), price in table.items():
        known = (
            instance_type in INSTANCES,
            region in prices_aws.SHIPPED_REGIONS,
            len(price.date) in (7, 10),
        )
        assert (*known, market, price.source != "") == (True, True, True, "on-demand", True), price
        assert 0.05 < price.usd_per_hour < 150
    # GPUs of one family cost about the same each, or a digit is wrong.
    for family in ("g5", "g6", "g6e"):
        each = [
            table[t, "us-east-1", "on-demand"].usd_per_hour / i.gpus
            for t, i in INSTANCES.items()
            if t.startswith(family + ".") and i.gpus > 1
        ]
        assert max(each) < 1.6 * min(each)
    assert {t.split(".")[0] for t, _, _ in table} >= {
        "g5",
        "g6",
        "g6e",
        "p4d",
        "p4de",
        "p5",
        "p5en",
        "p6-b200",
    }


def test_configured_prices_come_first_and_a_zone_before_its_region() -> None:
    cost = CostConfig(
        prices={
            "g6e.48xlarge": 20.0,
            "g6e.48xlarge/spot": 9.0,
            "local": 0.4,
        }
    )
    areas = (
        ("g6e.48xlarge", None, "spot", cost),
        (None, None, None, cost),
        (None, None, None, CostConfig()),
    )
    assert [prices.price(*area).usd_per_hour for area in areas] == [9.0, 0.4, 0.0]
    assert prices.price("g6e.48xlarge", None, None, cost) == Price(20.0, "cost.prices.g6e.48xlarge")
    areas = {"us-east-1": Price(0.5, "mean"), "us-east-1a": Price(0.4, "zone")}
    known = {("g5.xlarge", area, "spot"): price for area, price in areas.items()}
    for zone, source in (("us-east-1a", "zone"), ("us-east-1b", "mean")):
        assert (
            prices.price(
                "g5.xlarge", "us-east-1", "spot", CostConfig(), zone=zone, rows=known
            ).source
            == source
        )


def test_the_newer_price_counts_and_an_unknown_one_is_an_error_or_has_a_bound() -> None:
    with pytest.raises(PriceUnknown) as caught:
        prices.price("g6e.48xlarge", "eu-west-1", "on-demand", CostConfig())
    says(
        caught.value,
        "g6e.48xlarge",
        "eu-west-1",
        "raypd prices refresh --region eu-west-1",
        "cost.prices.g6e.48xlarge",
    )
    with pytest.raises(PriceUnknown, match="no spot price"):
        prices.price("g6e.48xlarge", "us-east-1", "spot", CostConfig())
    # Without a price, spot is bounded by on-demand.
    bound = prices.price_or_bound("g6e.48xlarge", None, "spot", CostConfig())
    assert bound.usd_per_hour == 30.13118
    assert "no spot price" in bound.source
    for market in ("on-demand", "spot"):
        assert prices.price_or_bound("x9.huge", None, market, CostConfig()) is None
    key = ("g6e.48xlarge", "us-east-1", "on-demand")
    spot = ("g6e.48xlarge", "us-east-1", "spot")
    for rows, usd in (
        ({key: Price(29.0, "AWS", "2026-01-01"), spot: Price(9.0, "AWS", "2026-01-01")}, 30.13118),
        ({key: Price(28.0, "AWS", "2026-12-01")}, 28.0),
    ):
        prices.write_refreshed(rows)
        table = prices.table()
        # What was asked before stays.
        assert table[key].usd_per_hour == usd
        assert table[spot].usd_per_hour == 9.0


@pytest.mark.parametrize("text", ["", "[]", '{"prices": [1]}', '{"prices": [{"type": "g"}]}'])
def test_the_message_names_a_damaged_price_file(text) -> None:
    prices.refreshed_path().write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.json: not a price file .*prices refresh"):
        prices.table()
    prices.write_refreshed({})
    assert prices.table() == prices.shipped()


@pytest.mark.parametrize(
    ("key", "usd"), [("g5.xlarge", -1), ("g5.xlarge", float("inf")), ("g5.xlarge/sport", 1)]
)
def test_configured_prices_are_validated(key, usd) -> None:
    with pytest.raises(ValueError, match=r"g5\.xlarge"):
        CostConfig(prices={key: usd})
    with pytest.raises(ValueError, match="finite number"):  # no record could hold it
        CostConfig(budget_usd=float("inf"))


def product(usd: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    return json.dumps({"terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}}})


@pytest.fixture
def stubbed(monkeypatch):
    """Replace one of the services of AWS by a stub."""

    def make(service: str) -> Stubber:
        keys = {"aws_access_key_id": "AKIAXX", "aws_secret_access_key": "testing"}
        client = boto3.client(service, region_name="us-east-1", **keys)
        real = prices_aws._client
        monkeypatch.setattr(
            prices_aws, "_client", lambda s, r: client if s == service else real(s, r)
        )
        stub = Stubber(client)
        stub.activate()
        return stub

    return make


@mock_aws
def test_refresh_asks_the_price_list_and_the_spot_history(stubbed, capsys) -> None:
    # Which moto does not have: one answer for each instance type that raypd knows.
    stub = stubbed("pricing")
    answers = {
        "g6e.48xlarge": [
            product("31.5"),
            product("0.0"),
            product("9", "Quantity"),
        ]
    }
    for name in INSTANCES:
        fields = {
            "regionCode": "us-east-1",
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
            "instanceType": name,
        }
        filters = [
            {
                "Type": "TERM_MATCH",
                "Field": f,
                "Value": v,
            }
            for f, v in fields.items()
        ]
        expected = {"ServiceCode": "AmazonEC2", "Filters": filters}
        stub.add_response("get_products", {"PriceList": answers.get(name, [])}, expected)
    path = prices_aws.refresh(["us-east-1"])
    stub.assert_no_pending_responses()
    table = prices.table()
    listed = table["g6e.48xlarge", "us-east-1", "on-demand"]
    assert listed.usd_per_hour == 31.5
    assert listed.date == datetime.now(UTC).strftime("%Y-%m-%d")
    # Moto invents prices for all types.
    spot = prices.price("g5.xlarge", "us-east-1", "spot", CostConfig())
    zones = [
        p.usd_per_hour
        for k, p in table.items()
        if k[0] == "g5.xlarge" and re.fullmatch("us-east-1.", k[1])
    ]
    assert spot.usd_per_hour == pytest.approx(sum(zones) / len(zones), abs=1e-6)
    assert "us-east-1: 1 on-demand price" in capsys.readouterr().out
    assert "testing" not in path.read_text()


def test_the_newest_price_of_a_zone_counts(stubbed) -> None:
    stub = stubbed("ec2")
    rows = [
        {
            "InstanceType": "g5.xlarge",
            "AvailabilityZone": zone,
            "SpotPrice": usd,
            "Timestamp": datetime(2026, 1, day, tzinfo=UTC),
        }
        for zone, usd, day in (
            ("us-east-1a", "0.9", 1),
            ("us-east-1a", "0.4", 3),
            ("us-east-1a", "0.8", 2),
            ("us-east-1b", "0.6", 1),
        )
    ]
    for answer in (rows, [])[: -(-len(INSTANCES) // prices_aws._SPOT_PAGE)]:
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": answer})
    listed = prices_aws._spot("us-east-1")
    assert listed["g5.xlarge", "us-east-1a", "spot"].usd_per_hour == 0.4
    assert listed["g5.xlarge", "us-east-1", "spot"].usd_per_hour == 0.5


def test_the_message_says_which_credentials_or_permissions_are_missing(stubbed) -> None:
    with pytest.raises(ConfigError, match="no AWS credentials found"):
        prices_aws.refresh(["us-east-1"])
    assert not prices.refreshed_path().exists()
    stubbed("pricing").add_client_error(
        "get_products", "AccessDeniedException", "user AKIAXX may not"
    )
    with pytest.raises(ConfigError, match="pricing:GetProducts: AccessDeniedException") as caught:
        prices_aws.refresh(["us-east-1"])
    assert not re.search("AKIAXX|testing", str(caught.value))


def test_show_prints_prices_with_their_sources(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    prices_aws.show("us-west-2")
    out = capsys.readouterr().out
    parts = ("8 x L40S 44 GiB", "30.1312", "unknown", "2025-04-14 (more than six months ago)")
    assert [part for part in parts if part not in out] == []
    for area, message in (
        (["mars-1"], "raypd prices refresh --region mars-1"),
        (["us-east-1", "x9.huge"], "x9.huge"),
    ):
        with pytest.raises(ConfigError, match=message):
            prices_aws.show(*area)


def test_the_source_of_an_old_price_says_so() -> None:
    today = date.today()
    days = {"g5.xlarge": today - timedelta(30), "g5.2xlarge": today - timedelta(200)}
    known = {
        (name, "us-east-1", "on-demand"): Price(1.0, "a list", str(day))
        for name, day in days.items()
    }
    new, old = (
        prices.price(name, "us-east-1", None, CostConfig(), rows=known).source for name in days
    )
    assert new == "a list"
    assert old == "a list; older than six months; `raypd prices refresh` updates it"
    assert [prices.is_old(day) for day in ("", "2025-04", "2025-04-14", str(today)[:7])] == [
        False,
        True,
        True,
        False,
    ]
