"""The families that the engine's own parts compute. `stock.py` computes all others."""

from typing import Any

from raypd.decoding.models.afmoe import AFMOE
from raypd.decoding.models.cohere import COHERE, COHERE2
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.ernie import ERNIE
from raypd.decoding.models.experts import EXPERTS, HUNYUAN_3, MINIMAX_M2, MIXTRAL
from raypd.decoding.models.falcon_h1 import FALCON_H1
from raypd.decoding.models.gemma import GEMMA, GEMMA2, GEMMA3
from raypd.decoding.models.gemma3n import GEMMA3N
from raypd.decoding.models.gemma4 import GEMMA4
from raypd.decoding.models.glm import GLM, GLM4, GLM4_MOE
from raypd.decoding.models.gpt_oss import GPT_OSS
from raypd.decoding.models.granite import GRANITE, GRANITE_SWA
from raypd.decoding.models.granite_hybrid import BAMBA, GRANITE_4, GRANITE_HYBRID
from raypd.decoding.models.hunyuan import HUNYUAN
from raypd.decoding.models.latent import AX_K1, DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, MISTRAL4
from raypd.decoding.models.lfm2 import LFM2, LFM2_MOE
from raypd.decoding.models.llama import LLAMA, MISTRAL
from raypd.decoding.models.ministral3 import MINISTRAL3
from raypd.decoding.models.nemotron_h import NEMOTRON_H
from raypd.decoding.models.olmo import EXAONE4, EXAONE_MOE, OLMO2, OLMO3, OLMOE
from raypd.decoding.models.phi3 import PHI3
from raypd.decoding.models.plain_mlp import APERTUS, ARCEE, STARCODER2
from raypd.decoding.models.qwen3_5 import QWEN3_5, QWEN3_NEXT
from raypd.decoding.models.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    EXPERTS,
    GPT_OSS,
    AFMOE,
    APERTUS,
    ARCEE,
    AX_K1,
    COHERE,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE,
    EXAONE4,
    EXAONE_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    GLM,
    GLM4,
    GLM4_MOE,
    GRANITE,
    GRANITE_4,
    GRANITE_SWA,
    HUNYUAN,
    HUNYUAN_3,
    MINICPM3,
    MINIMAX_M2,
    MINISTRAL3,
    MISTRAL4,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    SMOLLM3,
    STARCODER2,
    QWEN3_5,
    QWEN3_NEXT,
    GRANITE_HYBRID,
    BAMBA,
    NEMOTRON_H,
    FALCON_H1,
    LFM2,
    LFM2_MOE,
)


def find_family(model: Any) -> Family | None:
    """Return the family of a transformers model; None if `stock.py` computes it.

    A class of the same name that is not from transformers does not count.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return None
    for family in FAMILIES:
        if kind.__name__ in family.classes and family.takes(model.config.get_text_config()):
            return family
    return None
