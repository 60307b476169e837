"""The table of families of models that `raypd model list` prints and docs/models.md has."""

from collections.abc import Iterator

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raypd.decoding import FAMILIES, HYBRIDS, has_recurrent_layers

# What training does not compute.
SOFT_CAP = "a soft cap on attention logits"
WINDOWS = "layers with sliding-window attention"
RECURRENCE = "recurrent or convolution layers"
_HEADER = ("models", "classes of transformers", "layers", "methods", "training")
# The models of `HYBRIDS` by the beginnings of their classes.
_HYBRID_NAMES = {
    "Qwen3_5": "Qwen3.5, Qwen3.6, NuExtract3, with experts too",
    "Qwen3Next": "Qwen3-Next",
    "GraniteMoeHybrid": "Granite 4 with Mamba layers",
    "Bamba": "Bamba",
    "NemotronH": "Nemotron-H",
    "FalconH1": "Falcon-H1",
    "Lfm2": "LFM2, with experts too",
}
_HYBRID_METHODS = (
    "autoregressive, guided, intra_prompt, hyper_parallel with `decoding.isolate: values`"
)
# Families without a file of their own, and classes of transformers that have them.
_OTHERS = {
    "MiMo-V2-Flash, Granite with sliding windows": ("mimo_v2_flash", "granite_swa"),
    "Phi-3.5-MoE": ("phimoe",),
    "GPT-NeoX": ("gpt_neox",),
}


def families_table() -> str:
    """Return the families of models in Markdown, from the engine's registry."""
    rows = [_HEADER, tuple("---" for _ in _HEADER), *_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        classes = ", ".join(f"`{name}`" for name in family.classes)
        yield family.name, classes, "fast", "all", _training(_types_of(family.classes))
    for beginning, name in _HYBRID_NAMES.items():
        classes = ", ".join(f"`{kind}`" for kind in sorted(HYBRIDS) if kind.startswith(beginning))
        yield name, classes, "hybrid", _HYBRID_METHODS, "no"
    for name, types in _OTHERS.items():
        yield name, "", "transformers' own", "all", _training(types)


def _types_of(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return transformers' types of the models of some classes."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return tuple(kind for kind, name in names if name in classes)


def _training(types: tuple[str, ...]) -> str:
    """Say which of some types of model can be trained, by their default configurations."""
    reasons = {untrainable(AutoConfig.for_model(kind).get_text_config()) for kind in types}
    if reasons <= {None}:
        return "yes"
    if SOFT_CAP in reasons:
        return "no"
    return "without sliding windows"


def untrainable(text_config: PretrainedConfig) -> str | None:
    """Return the part of a model that training does not compute, or None.

    Args:
        text_config: The text configuration of the model.
    """
    if has_recurrent_layers(text_config):
        return RECURRENCE
    if getattr(text_config, "attn_logit_softcapping", None) is not None:
        return SOFT_CAP
    if _has_sliding_windows(text_config):
        return WINDOWS
    return None


def _has_sliding_windows(text_config: PretrainedConfig) -> bool:
    if not getattr(text_config, "use_sliding_window", True):
        return False
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        return "sliding_attention" in layer_types
    return bool(getattr(text_config, "sliding_window", None))
