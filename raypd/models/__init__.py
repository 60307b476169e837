"""Model folders: finding, checking and loading weights, tokenizers, endpoints and drafts."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.models import (
        control_tokens as control_tokens,
        draft as draft,
        embedded as embedded,
        load as load,
        medusa_heads as medusa_heads,
        prepare as prepare,
        source as source,
    )
    from raypd.models.adapter import experts_are_parameters as experts_are_parameters
    from raypd.models.byte_prompt import byte_tokenizer as byte_tokenizer
    from raypd.models.cache import quiet as quiet
    from raypd.models.chat_completion import ENDPOINT_CONTEXT as ENDPOINT_CONTEXT
    from raypd.models.control_tokens import (
        CONTROL_TOKENS as CONTROL_TOKENS,
        control_token as control_token,
        markup_bytes as markup_bytes,
    )
    from raypd.models.device import (
        check_gpu as check_gpu,
        has_fp8 as has_fp8,
        resolve_device as resolve_device,
        resolve_dtype as resolve_dtype,
    )
    from raypd.models.draft import load_draft_model as load_draft_model
    from raypd.models.end_tokens import model_end_tokens as model_end_tokens
    from raypd.models.endpoint import (
        EndpointEngine as EndpointEngine,
        check_endpoint as check_endpoint,
    )
    from raypd.models.endpoint_batch import BatchEngine as BatchEngine
    from raypd.models.families import families_table as families_table
    from raypd.models.load import (
        LoadedModel as LoadedModel,
        Purpose as Purpose,
        check_model_config as check_model_config,
        context_length as context_length,
        load_model as load_model,
        load_tokenizer as load_tokenizer,
        quantization_notice as quantization_notice,
    )
    from raypd.models.medusa_heads import load_heads as load_heads, save_heads as save_heads
    from raypd.models.reasoning import (
        answer_range as answer_range,
        closing_of as closing_of,
        is_mark as is_mark,
        opens_reasoning as opens_reasoning,
    )
    from raypd.models.recurrence import check_recurrence as check_recurrence
    from raypd.models.source import (
        find_source as find_source,
        read_config as read_config,
        why_unavailable as why_unavailable,
    )
    from raypd.models.vllm_engine import VLLMEngine as VLLMEngine, check_vllm as check_vllm
    from raypd.models.vocabulary import token_bytes as token_bytes, token_texts as token_texts

__getattr__ = LazyExports(
    __name__,
    {
        "adapter": ("experts_are_parameters",),
        "byte_prompt": ("byte_tokenizer",),
        "cache": ("quiet",),
        "chat_completion": ("ENDPOINT_CONTEXT",),
        "control_tokens": ("CONTROL_TOKENS", "control_token", "markup_bytes"),
        "device": ("check_gpu", "has_fp8", "resolve_device", "resolve_dtype"),
        "draft": ("load_draft_model",),
        "end_tokens": ("model_end_tokens",),
        "endpoint": ("EndpointEngine", "check_endpoint"),
        "endpoint_batch": ("BatchEngine",),
        "families": ("families_table",),
        "load": (
            "LoadedModel",
            "Purpose",
            "check_model_config",
            "context_length",
            "load_model",
            "load_tokenizer",
            "quantization_notice",
        ),
        "medusa_heads": ("load_heads", "save_heads"),
        "reasoning": ("answer_range", "closing_of", "is_mark", "opens_reasoning"),
        "recurrence": ("check_recurrence",),
        "source": ("find_source", "read_config", "why_unavailable"),
        "vllm_engine": ("VLLMEngine", "check_vllm"),
        "vocabulary": ("token_bytes", "token_texts"),
    },
    modules=("control_tokens", "draft", "embedded", "load", "medusa_heads", "prepare", "source"),
)
