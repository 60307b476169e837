"""The table of model families that `raypd model list` prints and docs/models.md contains."""

from collections.abc import Iterator

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from raypd.decoding import FAMILIES

_HEADER = ("models", "classes of transformers", "layers", "methods", "training")
_HYBRID_METHODS = (
    "autoregressive, guided, intra_prompt, hyper_parallel with `decoding.isolate: values`"
)
# The number of experts of a layer, as configurations call it.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Families without their own file, and the transformers classes that have them.
_OTHERS = {
    "MiMo-V2-Flash": ("mimo_v2_flash",),
    "Phi-3.5-MoE, within 4,096 tokens": ("phimoe",),
    "GPT-NeoX": ("gpt_neox",),
}


def families_table() -> str:
    """Return the families of models in Markdown, from the engine's registry."""
    verbosity = transformers_logging.get_verbosity()
    # Default configurations of some families have odd token ids, which do not matter here.
    transformers_logging.set_verbosity_error()
    try:
        rows = [_HEADER, tuple("---" for _ in _HEADER), *_rows()]
    finally:
        transformers_logging.set_verbosity(verbosity)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        classes = ", ".join(f"`{name}`" for name in family.classes)
        methods = _HYBRID_METHODS if family.layer_types else "all"
        yield family.name, classes, "fast", methods, _training(_types_of(family.classes))
    for name, types in _OTHERS.items():
        yield name, "", "transformers' own", "all", _training(types)


def _types_of(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return transformers' types of the models of some classes."""
    # transformers does not list Mistral 4, because it is published with an image encoder.
    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4": "Mistral4ForCausalLM"}
    return tuple(kind for kind, name in names.items() if name in classes)


def _training(types: tuple[str, ...]) -> str:
    """Return how models of some types are trained, by their default configurations."""
    configs = [AutoConfig.for_model(kind).get_text_config() for kind in types]
    if any(hasattr(config, key) for config in configs for key in _EXPERTS):
        return "yes, with frozen routers"
    return "yes"
