"""Separates tensors of a checkpoint that a model can do without from those that change its answers.

transformers leaves out every tensor that the model has no place for, and only warns. A scale, a
bias or an adapter that is left out makes all answers wrong.
"""

import re
from collections.abc import Iterable

from transformers import PretrainedConfig

# If such a part of a name stands between dots, the tensor is not in the text model's layers.
_OTHER_PARTS = re.compile(
    r"^(visual|vision|image|audio|speech|video|multi_modal|multimodal|mm)($|_)"  # other inputs
    r"|^embed_(vision|audio)$|^connector$"
    r"|^(mtp|nextn|eagle|medusa)($|_)"  # heads that draft tokens
    r"|^(v_head|value_head)$"  # of reinforcement learning
)
# Numbers that the model computes for itself, or that only concern a cache in 8 bits.
_DERIVED = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|masked_bias|rotary_emb\.(cos|sin)_cached)$"
    r"|(^|\.)(attn|attention)\.bias$"  # causal masks of GPT-2, GPT-Neo and GPT-NeoX
    r"|\.(k_scale|v_scale|kv_scale|q_scale|prob_scale)$"
)
_SCALES = re.compile(
    r"(scale|scales|scale_inv|zero_point|zeros|qzeros|qweight|weight_packed|g_idx|absmax"
    r"|quant_map|SCB|quant_state\.\w+|amax)$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def important_keys(keys: Iterable[str], config: PretrainedConfig) -> list[str]:
    """Return the tensors that a model needs but has no place for, scales of weights first.

    Args:
        keys: Names of tensors that transformers left out.
        config: The configuration of the model.
    """
    selected = [key for key in keys if not _is_unimportant(key, config)]
    return sorted(selected, key=lambda key: (not is_scale(key), key))


def is_scale(key: str) -> bool:
    """Return whether a tensor looks like part of a quantized weight."""
    return _SCALES.search(key) is not None


def is_other_part(key: str) -> bool:
    """Return whether a tensor belongs to a part of a model that sees, hears or drafts."""
    return any(_OTHER_PARTS.search(part) for part in key.split("."))


def _is_unimportant(key: str, config: PretrainedConfig) -> bool:
    if is_other_part(key):
        return True
    return _DERIVED.search(key) is not None or _drafts(key, config)


def _drafts(key: str, config: PretrainedConfig) -> bool:
    """Return whether a tensor is in an extra last layer that predicts tokens further ahead."""
    text = config.get_text_config()
    layer = _LAYER.search(key)
    drafting = getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is None or not drafting:
        return False
    first = int(text.num_hidden_layers)
    return first <= int(layer[1]) < first + int(drafting)
