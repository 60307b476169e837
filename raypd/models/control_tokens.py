"""Control tokens of decoding methods, which are added to a tokenizer and a model.

A text that spells a control token is read as that token, unless the tokenizer splits special tokens
(`split_special_tokens=True`) and the token is a special one.
"""

import shlex

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raypd.decoding import MASK, REGISTRY
from raypd.errors import ModelError
from raypd.models.vocabulary import token_bytes

# Control tokens by method, for the methods that have some.
CONTROL_TOKENS: dict[str, tuple[str, ...]] = {}
# Those that are text as well, such as the tags of PASTA.
_MARKUP: set[str] = set()
for _method, _spec in REGISTRY.items():
    if _spec.control_tokens:
        CONTROL_TOKENS[_method] = _spec.control_tokens
    if _spec.markup:
        _MARKUP.update(_spec.control_tokens)


def control_token(tokenizer: PreTrainedTokenizerBase, name: str, model: str | None = None) -> int:
    """Return the id of a control token.

    Args:
        tokenizer: The tokenizer.
        name: The token.
        model: The name of the model for the message; None for that of the tokenizer.

    Raises:
        ModelError: The tokenizer lacks the token.
    """
    id = tokenizer.get_vocab().get(name)
    if id is not None:
        return int(id)
    model = model or getattr(tokenizer, "name_or_path", "") or "in use"
    message = f"model {model!r} has no control token {name}"
    for method, names in CONTROL_TOKENS.items():
        if name in names:
            raise ModelError(
                f"{message}: `raypd model add-tokens {shlex.quote(model)} FOLDER --for {method}` "
                "writes a copy that has it, which must then be trained to use it; or choose "
                "another decoding.method"
            )
    raise ModelError(message)


def add_control_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: str, seed: int = 0
) -> list[int]:
    """Add the control tokens of a method that are missing, in place.

    The embeddings grow where needed. In each coordinate, a new row is drawn from a normal
    distribution with the mean and spread of the existing rows, because rows that equal the mean are
    not learnt. The input row of SPACE's mask token is normal with the model's initializer_range, as
    in sec. 4.1 of its paper.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        method: The method.
        seed: Of the draws.

    Returns:
        The ids of all control tokens of the method.

    Raises:
        ModelError: The method has no control tokens, or the weights are quantized.
    """
    if method not in CONTROL_TOKENS:
        raise ModelError(
            f"method {method!r} has no control tokens; those of {', '.join(CONTROL_TOKENS)} "
            "can be added"
        )
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"control tokens of {method} cannot be added to quantized weights: add them, then "
            "quantize"
        )
    names = CONTROL_TOKENS[method]
    old_ids = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [AddedToken(name, normalized=False, special=name not in _MARKUP) for name in names]
    )
    vocabulary = tokenizer.get_vocab()
    new_ids = [vocabulary[name] for name in names if name not in old_ids]
    if new_ids:
        # Many models have more embedding rows than ids.
        if max(new_ids) >= model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(max(new_ids) + 1, mean_resizing=False)
        trained_ids = sorted(set(old_ids.values()) - set(new_ids))
        _draw_rows(model, new_ids, trained_ids, seed)
        if MASK in names:
            _draw_mask(model, new_ids[0], seed)
    return [vocabulary[name] for name in names]


def markup_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return `token_bytes` for PASTA's interpreter: tags have their text, even special ones."""
    texts = list(token_bytes(tokenizer))
    vocabulary = tokenizer.get_vocab()
    for name in (*_MARKUP, "/>"):
        if name in vocabulary:
            texts[vocabulary[name]] = name.encode()
    return texts


@torch.no_grad()
def _draw_rows(
    model: PreTrainedModel, new_ids: list[int], trained_ids: list[int], seed: int
) -> None:
    """Draw the rows of new tokens in both embeddings, distributed as the rows of trained ones."""
    draws = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    matrices = [embedding]
    if head is not None and head.weight is not embedding:
        matrices.append(head.weight)
    for weight in matrices:
        spread, mean = torch.std_mean(weight[trained_ids].float(), 0)  # [hidden size]
        noise = torch.randn(len(new_ids), weight.shape[1], generator=draws).to(weight.device)
        weight[new_ids] = (mean + spread * noise).to(weight.dtype)
    if head is not None and getattr(head, "bias", None) is not None:
        head.bias[new_ids] = head.bias[trained_ids].float().mean().to(head.bias.dtype)


@torch.no_grad()
def _draw_mask(model: PreTrainedModel, id: int, seed: int) -> None:
    """Draw the input row of SPACE's mask token."""
    embedding = model.get_input_embeddings().weight
    spread = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    noise = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(seed))
    embedding[id] = (noise * spread).to(embedding.device, embedding.dtype)
