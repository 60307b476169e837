"""What decoding used and cost, in the terms that units, bills and manifests share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic.aliases import AliasChoices

# The models of a cascade. A run without a cascade has only the first.
FIRST = "first"
SECOND = "second"
_SECOND_SUFFIX = " (second model)"
# The user is told if engines waited for input for at least this share of the time.
_SHOWN_INPUT_BOUND = 0.05
# The parts of a bill that are workers' time after startup.
_ANSWERING = ("decode", "prefill", "idle", "lost")
# If these parts have fewer seconds in total, the share says little.
_SHORT_SECONDS = 60.0

# Documents, prefill_tokens, shared_tokens, decode_tokens and seconds; on a bill also usd.
Counts = dict[str, int | float]


class UsageKey(NamedTuple):
    """What usage is counted by: the category of the documents and the model that answered them."""

    category: str
    model: str = FIRST

    def __str__(self) -> str:
        return self.category if self.model == FIRST else f"{self.category}{_SECOND_SUFFIX}"


def _usage_of_file(value: Any) -> Any:
    """Convert usage from JSON to a mapping.

    A file contains a list of rows with the fields `category` and `model`. Files of earlier versions
    contain an object whose keys name the second model in a suffix.
    """
    if isinstance(value, list):
        usage = {}
        for row in value:
            counts = dict(row)
            key = UsageKey(counts.pop("category"), counts.pop("model"))
            usage[key] = counts
        return usage
    if isinstance(value, Mapping):
        return {_key_of_name(key) if isinstance(key, str) else key: value[key] for key in value}
    return value


def _key_of_name(name: str) -> UsageKey:
    if name.endswith(_SECOND_SUFFIX):
        return UsageKey(name.removesuffix(_SECOND_SUFFIX), SECOND)
    return UsageKey(name)


Usage = Annotated[dict[UsageKey, Counts], BeforeValidator(_usage_of_file)]


@dataclass
class GpuUse:
    """How GPUs were used according to NVML.

    All fields are means over the samples, except `memory_gib`, which is the maximum.
    """

    samples: int = 0
    busy: float = 0.0  # share of the time in which a kernel ran
    memory_gib: float = 0.0
    mhz: float = 0.0  # clock of the multiprocessors
    # The highest clock that the GPU allows.
    max_mhz: Annotated[float, Field(validation_alias=AliasChoices("max_mhz", "most_mhz"))] = 0.0

    def __str__(self) -> str:
        clock = f"{self.mhz:,.0f}"
        if self.max_mhz:
            clock += f" of {self.max_mhz:,.0f}"
        return f"GPUs {self.busy:.0%} busy, {self.memory_gib:.3g} GiB at most, {clock} MHz"

    def plus(self, other: "GpuUse") -> "GpuUse":
        """Combine two sets of samples."""
        samples = self.samples + other.samples

        def mean(mine: float, theirs: float) -> float:
            return (mine * self.samples + theirs * other.samples) / max(samples, 1)

        return GpuUse(
            samples=samples,
            busy=mean(self.busy, other.busy),
            memory_gib=max(self.memory_gib, other.memory_gib),
            mhz=mean(self.mhz, other.mhz),
            max_mhz=mean(self.max_mhz, other.max_mhz),
        )


# Earlier versions called the field `cards`.
OptionalGpuUse = Annotated[GpuUse | None, Field(validation_alias=AliasChoices("gpu_use", "cards"))]


@dataclass
class RunCost:
    """The bills of all sessions of a run together, as in its manifest."""

    usd: float
    usd_per_1000_documents: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # USD by `billing.bill.PARTS`
    seconds: dict[str, float] = field(default_factory=dict)  # worker seconds by the same parts
    sessions: int = 1
    documents: int = 0
    kwh: float | None = None
    gpu_use: OptionalGpuUse = None
    prices: list[str] = field(default_factory=list)  # where the prices are from
    notes: list[str] = field(default_factory=list)
    # Share of the workers' time after startup in which engines waited for input.
    input_bound: float = 0.0

    @property
    def input_bound_note(self) -> str:
        """Advice for the user if engines waited for input; "" if they hardly did."""
        answering = sum(self.seconds.get(part, 0.0) for part in _ANSWERING)
        if self.input_bound < _SHOWN_INPUT_BOUND or answering < _SHORT_SECONDS:
            return ""
        return f"input-bound {self.input_bound:.0%} of the time; add readers (cluster.readers)"
