"""The draft model of speculative decoding, loaded in addition to the main model."""

from collections.abc import Callable

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from raypd.config import DecodingConfig, EngineConfig, ModelConfig
from raypd.decoding import DraftModel, Engine, has_recurrent_layers, pack_model
from raypd.errors import ModelError, raised_as
from raypd.models.load import LoadedModel, check_model_config, load_tokenizer
from raypd.models.source import find_source, read_config

_KEY = "decoding.options.draft_model"


def draft_model_config(model: ModelConfig, name: str) -> ModelConfig:
    """Return the section `model` of the draft model: that of the model, with other weights.

    Args:
        model: The section `model` of the run.
        name: The draft model.
    """
    return model.model_copy(update={"name": name, "revision": None, "adapter": None})


def check_draft_model(model: ModelConfig, name: str) -> None:
    """Check the draft model before weights are loaded.

    Args:
        model: The section `model` of the run.
        name: The draft model.

    Raises:
        ModelError: If it is missing or has another tokenizer than the model.
    """
    draft = draft_model_config(model, name)
    check_model_config(draft, machine=False)
    if has_recurrent_layers(read_config(find_source(draft))):
        raise ModelError(
            f"{_KEY} {draft.name}: it has recurrent layers, which cannot undo rejected drafts; "
            "choose a model that has only attention layers, or null for prompt lookup"
        )
    _check_tokenizers(model.name, name, load_tokenizer(model), load_tokenizer(draft))


def load_draft_model(
    model: ModelConfig,
    decoding: DecodingConfig,
    sizes: EngineConfig,
    main: LoadedModel,
    load: Callable[[ModelConfig], LoadedModel],
    memory_share: float,
) -> DraftModel:
    """Load the draft model with its own engine.

    Args:
        model: The section `model` of the run.
        decoding: The section `decoding`, which names the draft model.
        sizes: The section `engine`.
        main: The model that verifies.
        load: Loads a model.
        memory_share: Share of a GPU's free memory that the caches of both models may take.

    Raises:
        ModelError: If it is missing or does not fit the model.
    """
    name = str(decoding.draft_model)
    loaded = load(draft_model_config(model, name))
    _check_tokenizers(model.name, name, main.tokenizer, loaded.tokenizer)
    loaded.packed = loaded.packed or pack_model(loaded.model)
    # Both caches hold the same texts, so both get memory for as many tokens.
    draft_bytes = _cache_bytes(loaded.model.config)
    draft_share = draft_bytes / (draft_bytes + _cache_bytes(main.model.config))
    with raised_as(ModelError, _KEY, ValueError):
        engine = Engine(
            loaded.packed,
            max_num_seqs=sizes.most_seqs,
            max_num_batched_tokens=sizes.batched_tokens(loaded.device.type == "cuda"),
            cache_tokens=sizes.cache_tokens,
            memory_share=memory_share * draft_share,
            attention=sizes.attention,
            cuda_graphs=sizes.cuda_graphs,
            kv_cache=model.kv_cache,
        )
    return DraftModel(
        engine,
        vocabulary=main.model.config.get_text_config().vocab_size,
        context_length=loaded.context_length,
        min_confidence=decoding.method_options.min_confidence,
    )


def _cache_bytes(config: PretrainedConfig) -> int:
    """Return a number that is proportional to a model's keys and values of one token."""
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    if getattr(text, "kv_lora_rank", None):
        # The keys and values of a layer are computed from one latent and a rotated key.
        return layers * int(text.kv_lora_rank + text.qk_rope_head_dim)
    numbers = 0
    sharing = getattr(text, "kv_sharing_modes", None) or [None] * layers
    for layer in range(layers):
        if sharing[layer] == "reuse":
            # It reads the keys and values of an earlier layer.
            continue
        # Layers may differ, and then the whole configuration does not say their sizes.
        of_layer = text.per_layer_config[layer]
        heads = of_layer.num_attention_heads
        kv_heads = getattr(of_layer, "num_key_value_heads", None) or heads
        head_dim = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // heads
        numbers += 2 * kv_heads * head_dim
    return numbers


def _check_tokenizers(
    name: str, draft_name: str, main: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> None:
    """Raise ModelError if the draft model has other tokens than the model."""
    vocabulary = main.get_vocab()
    draft_vocabulary = draft.get_vocab()
    if vocabulary == draft_vocabulary:
        return
    differing = [
        token
        for token in vocabulary.keys() | draft_vocabulary.keys()
        if vocabulary.get(token) != draft_vocabulary.get(token)
    ]
    token = min(differing)
    raise ModelError(
        f"{_KEY} {draft_name}: its tokenizer differs from that of "
        f"{name}: {token!r} has the id {draft_vocabulary.get(token)} instead of "
        f"{vocabulary.get(token)}; "
        "choose a smaller model of the same family"
    )
