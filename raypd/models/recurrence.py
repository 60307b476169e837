"""Which methods can decode, and be trained on, a model with recurrent or convolution layers."""

import raypd.models.embedded as embedded
from raypd.config import DecodingConfig, ModelConfig
from raypd.decoding import REGISTRY, has_recurrent_layers
from raypd.errors import ModelError
from raypd.models.source import find_source, read_config


def check_recurrence(model: ModelConfig, decoding: DecodingConfig, task_kind: str) -> None:
    """Check that the method suits a model with recurrent layers, if the model has any.

    Args:
        model: The section `model` of a run of raypd's own engine, or of a training.
        decoding: The section `decoding`.
        task_kind: The kind of the task, such as extraction.

    Raises:
        ModelError: If its method, or its `decoding.isolate`, does not.
    """
    if model.name == embedded.NAME:
        return
    base = read_config(find_source(model))
    if not has_recurrent_layers(base):
        return
    reason = f"model {model.name!r} ({base.model_type}) has recurrent layers"
    if decoding.method == "hyper_parallel" and decoding.isolate != "values":
        raise ModelError(
            f"decoding.isolate {decoding.isolate}: {reason}, and a recurrence has no order for "
            "tokens of several values that arrive at the same time; set decoding.isolate: values"
        )
    if not REGISTRY[decoding.method].recurrent:
        able = [
            other
            for other, spec in REGISTRY.items()
            if spec.recurrent and task_kind in spec.answer_keys
        ]
        raise ModelError(
            f"decoding.method {decoding.method}: {reason}, which cannot take tokens back or join "
            "threads; set decoding.method: " + " or ".join(able)
        )
