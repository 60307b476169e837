"""What `estimate`, `tune` and `suggest` share: a changed configuration, and a check after a measurement."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from raypd.config import RunConfig
from raypd.config.load import set_key
from raypd.errors import ConfigError, RunError
from raypd.estimation.profile import Profile
from raypd.run.text import counted


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with some keys (dotted) changed. Raises ConfigError where they do not fit together."""
    tree = config.model_dump()
    for key, value in changes.items():
        set_key(tree, key, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        why = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
        raise ConfigError("; ".join(f"{key}: {reason}" if key else reason for key, reason in why)) from None


def check_sample(profiled: Profile) -> None:
    """Raises RunError where the sample gave nothing to go by."""
    done = [cost for cost in profiled.costs if cost is not None]
    failed = [cost for cost in done if cost.error is not None]
    if not done or profiled.seconds <= 0:
        advice = "raise --minutes (of a fit: fit.sample_minutes) or lower engine.max_num_seqs"
        raise RunError(f"not one of {counted(len(profiled.costs), 'document')} was done in the time given: {advice}")
    if len(failed) == len(done):
        raise RunError(f"every document of the sample failed, the first because: {failed[0].error}")
