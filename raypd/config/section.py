"""What all parts of the configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are checked."""

    # Values are not repeated in errors by pydantic: a misplaced secret would be among them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )
