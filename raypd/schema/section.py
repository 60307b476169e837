"""What all parts of the configuration have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are checked."""

    # pydantic does not repeat values in its errors, because one of them may be a misplaced secret.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_column_names(cls, tree: Any) -> Any:
        """Strip the white space around column names, as readers do with those of the input."""
        if not isinstance(tree, dict):
            return tree
        stripped = dict(tree)
        for key, value in tree.items():
            if not str(key).endswith(("_column", "_columns")):
                continue
            if isinstance(value, str):
                stripped[key] = value.strip()
            elif isinstance(value, list):
                names = [name.strip() if isinstance(name, str) else name for name in value]
                stripped[key] = names
        return stripped
