"""What a decoding method needs of its model, checked before any weights are loaded or a worker starts."""

from __future__ import annotations

from transformers.utils import is_sklearn_available

from raypd.config import ModelConfig, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.errors import ModelError
from raypd.models.control_tokens import control_token
from raypd.models.load import check_model_config, load_tokenizer
from raypd.models.medusa_heads import check_fit, read_sizes
from raypd.models.source import find_source, read_config


def check_method(config: RunConfig) -> None:
    """Raises ModelError where the model lacks control tokens, or heads or a draft model are missing or do not fit."""
    decoding, model = config.decoding, config.model
    spec = REGISTRY[decoding.method]
    if required := spec.required_tokens(decoding):
        tokenizer = load_tokenizer(model)
        for name in required:
            control_token(tokenizer, name, model.name)
    if spec.heads:
        heads = str(decoding.heads)
        check_fit(heads, read_sizes(heads), model.name, *_sizes(model))
    if spec.draft_model:
        if decoding.draft_tokens is None and not is_sklearn_available():
            raise ModelError(
                "decoding.draft_tokens is null, and drafts that end where the draft model is unsure need scikit-learn: "
                "pip install 'raypd[speculative]', or give a number of tokens"
            )
        draft = model.model_copy(update={"name": str(decoding.draft_model), "revision": None, "adapter": None})
        check_model_config(draft, machine=False)
        vocabulary, draft_vocabulary = _sizes(model)[1], _sizes(draft)[1]
        if vocabulary != draft_vocabulary:
            raise ModelError(
                f"decoding.draft_model {decoding.draft_model}: has a vocabulary of {draft_vocabulary} tokens and "
                f"{model.name!r} one of {vocabulary}: both must share a tokenizer; choose a smaller model of the same "
                "family"
            )


def _sizes(model: ModelConfig) -> tuple[int, int]:
    """(hidden size, vocabulary) by config.json."""
    text = read_config(find_source(model)).get_text_config()
    return int(text.hidden_size), int(text.vocab_size)
