"""Which methods can decode, and be trained on, a model with recurrent or convolution layers."""

import raypd.models.embedded as embedded
from raypd.config import RunConfig
from raypd.decoding import REGISTRY, has_recurrent_layers
from raypd.errors import ModelError
from raypd.models.source import find_source, read_config


def check_recurrence(config: RunConfig) -> None:
    """Check that the method suits a model with recurrent layers, if the model has any.

    Args:
        config: The configuration of a run of raypd's own engine, or of a training.

    Raises:
        ModelError: If its method, or its `decoding.isolate`, does not.
    """
    name = config.model.name
    if name == embedded.NAME:
        return
    base = read_config(find_source(config.model))
    if not has_recurrent_layers(base):
        return
    model = f"model {name!r} ({base.model_type}) has recurrent layers"
    decoding = config.decoding
    if decoding.method == "hyper_parallel" and decoding.isolate != "values":
        raise ModelError(
            f"decoding.isolate {decoding.isolate}: {model}, and a recurrence has no order for "
            "tokens of several values that arrive at the same time; set decoding.isolate: values"
        )
    if not REGISTRY[decoding.method].recurrent:
        able = [
            other
            for other, spec in REGISTRY.items()
            if spec.recurrent and config.task.kind in spec.answer_keys
        ]
        raise ModelError(
            f"decoding.method {decoding.method}: {model}, which cannot take tokens back or join "
            "threads; set decoding.method: " + " or ".join(able)
        )
