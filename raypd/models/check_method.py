"""What a decoding method needs of its model, checked before any weights are loaded or a worker starts."""

from raypd.config import RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.models.control_tokens import control_token
from raypd.models.load import load_tokenizer
from raypd.models.medusa_heads import check_fit, read_sizes
from raypd.models.source import find_source, read_config


def check_method(config: RunConfig) -> None:
    """Raises ModelError where the model lacks control tokens, or heads are missing or do not fit."""
    decoding, model = config.decoding, config.model
    spec = REGISTRY[decoding.method]
    if required := spec.required_tokens(decoding):
        tokenizer = load_tokenizer(model)
        for name in required:
            control_token(tokenizer, name, model.name)
    if spec.heads:
        heads = str(decoding.heads)
        text = read_config(find_source(model)).get_text_config()
        check_fit(heads, read_sizes(heads), model.name, text.hidden_size, text.vocab_size)
