"""What the methods that write text are given of the model and its tokenizer."""

from __future__ import annotations

from functools import cache, partial
from pkgutil import resolve_name

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raypd.config import GenerationConfig, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.decoding.sampling import Sampling
from raypd.decoding.text import TextMethod, TextModel
from raypd.models.control_tokens import control_token, markup_bytes
from raypd.models.medusa_heads import load_heads
from raypd.tasks.prompting import encode, end_tokens, rendered


def text_method(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int, model: PreTrainedModel | None = None
) -> TextMethod:
    """The method `decoding.method`, ready for the prompts of task `generation`.

    Args:
        model: the one that Medusa heads must fit; None: heads stay as they were saved.

    Raises:
        ModelError: the tokenizer lacks control tokens of the method, or its heads do not fit the model.
    """
    options, spec = config.decoding, REGISTRY[config.decoding.method]
    around = cache(lambda: _around_a_turn(config, tokenizer))
    given = TextModel(
        options=options,
        sampling=Sampling(options.sampling.temperature, options.sampling.top_k, options.sampling.top_p),
        context_length=context_length,
        ends=end_tokens(tokenizer),
        control_tokens=tuple(control_token(tokenizer, t, config.model.name) for t in spec.required_tokens(options)),
        heads=load_heads(str(options.heads), model) if spec.heads else None,
        encode=partial(encode, tokenizer, special=True),
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        token_bytes=lambda: markup_bytes(tokenizer),
        next_turn=lambda content: [*around()[0], *encode(tokenizer, content, special=False), *around()[1]],
    )
    method: type[TextMethod] = resolve_name(spec.text_method)
    return method(given)


def _around_a_turn(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and behind the text of a user's turn that follows on text of the model."""
    first, second = "\u241efirst\u241e", "\u241esecond\u241e"
    text = f"{first}\n\n{second}\n\n"
    assert isinstance(config.task, GenerationConfig)
    if config.task.chat_template and tokenizer.chat_template:
        roles = (("user", "?"), ("assistant", first), ("user", second))
        turns = [{"role": role, "content": content} for role, content in roles]
        text = rendered(tokenizer, turns, thinking=config.task.thinking)
    between, _, behind = text.partition(first)[2].partition(second)
    return encode(tokenizer, between, special=True), encode(tokenizer, behind, special=True)
