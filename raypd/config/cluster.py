"""Settings of workers, money and nights, none of which changes an answer."""

import re
from datetime import date, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raypd.config.secrets import Address
from raypd.schema import Section

_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
)

# The limits of `units_in_flight: auto`.
_FIRST_UNITS = 2
_MAX_UNITS = 8


class ClusterConfig(Section, use_attribute_docstrings=True):
    """Workers and units."""

    address: Address | None = Field(
        None,
        description="Address of the Ray cluster; auto: the one on this machine; local: a Ray of "
        "raypd's own, which ends with the run; null: RAY_ADDRESS, then a cluster on this machine, "
        "then local",
    )
    min_workers: int = Field(1, ge=0)
    """Minimum number of workers: idle workers above this number are released, and with
    cost.deadline a run begins with this many (at least one)
    """
    max_workers: int = Field(
        1, ge=1, description="Maximum number of workers, which a run requests at its start"
    )
    cpus_per_worker: float | None = Field(
        None,
        gt=0,
        description="CPU cores of a worker; null: 1 with a GPU, otherwise all cores / max_workers, "
        "but at least 1 (a training may take less)",
    )
    gpus_per_worker: float | None = Field(
        None, ge=0, description="GPUs of a worker; null: 1 if the cluster has GPUs, otherwise 0"
    )
    unit_documents: int = Field(256, ge=1)
    """Maximum documents of a unit, which is committed as a whole (JSON Lines: about this many)"""
    unit_bytes: int = Field(
        64 << 20, ge=1, description="Maximum bytes of a unit, for large documents"
    )
    max_failed_share: float = Field(1.0, ge=0, le=1)
    """A run ends early if more than this share of its documents has failed, checked after the
    first hundred documents; 1.0: only if all have failed
    """
    readers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Maximum tasks that read and parse input ahead of the workers; auto: one for each CPU that
    workers leave free; 0: workers read their input themselves
    """
    read_ahead_mb: int = Field(
        256, ge=1, description="Maximum megabytes of documents that are read ahead per worker"
    )
    units_in_flight: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Units that a worker processes at the same time, so that its engine never runs empty; auto: 2,
    and up to 8 if its engine waits for input that the worker reads itself
    """

    @property
    def first_units_in_flight(self) -> int:
        """The number of units that a worker overlaps at first."""
        return _FIRST_UNITS if self.units_in_flight == "auto" else self.units_in_flight

    @property
    def max_units_in_flight(self) -> int:
        """The number of units that a worker overlaps at most."""
        return _MAX_UNITS if self.units_in_flight == "auto" else self.units_in_flight

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("min_workers is above max_workers")
        return self


def _prices_fit(prices: dict[str, float]) -> dict[str, float]:
    for key in prices:
        if "/" in key and key.rpartition("/")[2] not in ("spot", "on-demand"):
            raise ValueError(f"{key}: the part after the slash must be a market, spot or on-demand")
    return prices


def _hosted_prices_fit(prices: dict[str, list[float]]) -> dict[str, list[float]]:
    for model, pair in prices.items():
        if len(pair) != 2 or not all(0 <= price < float("inf") for price in pair):
            raise ValueError(
                f"{model}: {pair} are not two prices in USD per million tokens, input and output"
            )
    return prices


def _is_a_time(deadline: Any) -> Any:
    """Turn the date that YAML reads in 2026-11-30 back into text."""
    deadline = deadline.isoformat() if isinstance(deadline, date) else deadline
    if isinstance(deadline, str):
        deadline_at(deadline, 0.0)
    return deadline


class CostConfig(Section, use_attribute_docstrings=True):
    """What machines cost, how much a run may cost, and when it has to be done; nothing here changes
    an answer.
    """

    budget_usd: float | None = Field(None, gt=0)
    """Limit of the bill over all sessions of the run, in USD; the run ends before it is exceeded"""
    deadline: Annotated[str | None, BeforeValidator(_is_a_time)] = None
    """When the run must be done: a time (2026-11-30T18:00; a date alone means its beginning) or
    a duration from the start of the session (8h, 90m)
    """
    prices: Annotated[dict[str, Annotated[float, Field(ge=0)]], AfterValidator(_prices_fit)] = (
        Field({})
    )
    """Your own prices in USD per hour, by instance type (g6e.48xlarge), by type and market
    (g6e.48xlarge/spot), or for `local`, a machine without an instance type
    """
    hosted_prices: Annotated[dict[str, list[float]], AfterValidator(_hosted_prices_fit)] = Field({})
    """Prices of hosted batch services with which `raypd estimate` compares; they replace those that
    come with raypd: model -> [USD per million input tokens, USD per million output tokens]
    """
    instance_type: str | None = Field(
        None,
        description="Instance type of nodes that do not report theirs; null: they are `local`",
    )
    region: str | None = Field(
        None, description="AWS region of nodes that do not report theirs; null: us-east-1"
    )
    market: Literal["on-demand", "spot"] | None = None
    """Market of nodes that do not report theirs; null: on-demand"""


def deadline_at(deadline: str, now: float) -> float:
    """Return the unix second of a time (local without a zone) or of a duration from `now`.

    Args:
        deadline: The value of `cost.deadline`.
        now: The unix second from which a duration counts.

    Raises:
        ValueError: The text is neither a time nor a duration.
    """
    deadline = deadline.strip()
    duration = _DURATION.fullmatch(deadline)
    if deadline and duration is not None:
        seconds = 0.0
        for part, unit_seconds in zip(duration.groups(), (86400, 3600, 60, 1), strict=True):
            seconds += float(part or 0) * unit_seconds
        return now + seconds
    try:
        return datetime.fromisoformat(deadline).timestamp()
    except ValueError:
        raise ValueError(
            f"{deadline!r} is neither a time (2026-11-30T18:00) nor a duration (8h, 1h30m)"
        ) from None


class NightlyConfig(Section, use_attribute_docstrings=True):
    """How `raypd nightly` recognizes what is new; other commands ignore this section."""

    hash_column: str | None = None
    """Column that changes whenever its document changes (a hash, an etag, a time); null: raypd
    hashes the columns that it reads
    """
    removed: Literal["drop", "keep"] = "drop"
    """What happens to documents that are no longer in the input. drop: they leave the table; keep:
    they stay, for an input.path that holds only new documents
    """
    delta: bool = False
    """Also write a Delta table into output.path, with a version per night (pip install
    'raypd[delta]')
    """
