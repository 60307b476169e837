"""Control tokens of decoding methods: added to a tokenizer and a model, and found again.

Text that spells one becomes it, unless the tokenizer splits special tokens
(`split_special_tokens=True`, for the special ones).
"""

import shlex

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raypd.decoding import MASK, REGISTRY
from raypd.errors import ModelError
from raypd.models.vocabulary import token_bytes

CONTROL_TOKENS = {
    method: spec.control_tokens for method, spec in REGISTRY.items() if spec.control_tokens
}
_MARKUP = {token for spec in REGISTRY.values() if spec.markup for token in spec.control_tokens}


def control_token(tokenizer: PreTrainedTokenizerBase, name: str, model: str | None = None) -> int:
    """The id of a control token; `model`: its name for the message.

    Raises ModelError where the tokenizer lacks it.
    """
    id = tokenizer.get_vocab().get(name)
    if id is not None:
        return int(id)
    method = next((m for m, names in CONTROL_TOKENS.items() if name in names), None)
    where = model or getattr(tokenizer, "name_or_path", "") or "in use"
    todo = (
        f": `raypd model add-tokens {shlex.quote(where)} FOLDER --for {method}` writes a "
        "copy that has it, which must "
        "then be trained to use it; or choose another decoding.method"
    )
    raise ModelError(f"model {where!r} has no control token {name}{todo if method else ''}")


def add_control_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: str, seed: int = 0
) -> list[int]:
    """Adds the missing control tokens of a method in place; returns the ids of all.

    The embeddings grow where needed.

    New rows are drawn (`seed`) from the normal distribution of the existing rows, by coordinate,
    because rows that are the mean alone are not learnt. The input row of SPACE's mask token is
    normal with the model's initializer_range (its sec. 4.1). Raises ModelError: the method has no
    control tokens, or the weights are quantized.
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
    old = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [AddedToken(name, normalized=False, special=name not in _MARKUP) for name in names]
    )
    ids = [tokenizer.get_vocab()[name] for name in names]
    new = [id for name, id in zip(names, ids, strict=True) if name not in old]
    if new:
        # Many models have more rows than ids.
        if max(new) >= model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
        _draw_rows(model, new, sorted(id for id in old.values() if id not in new), seed)
        if MASK in names:
            _draw_mask(model, new[0], seed)
    return ids


def markup_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """`token_bytes` for PASTA's interpreter: tags have their text even as special tokens."""
    texts = list(token_bytes(tokenizer))
    vocabulary = tokenizer.get_vocab()
    for name in (*_MARKUP, "/>"):
        if name in vocabulary:
            texts[vocabulary[name]] = name.encode()
    return texts


@torch.no_grad()
def _draw_rows(model: PreTrainedModel, new: list[int], trained: list[int], seed: int) -> None:
    """Draws the rows `new` of the input and output embeddings, distributed as the rows
    `trained`.
    """
    draw = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    matrices = [embedding] if head is None or head.weight is embedding else [embedding, head.weight]
    for weight in matrices:
        spread, mean = torch.std_mean(weight[trained].float(), 0)  # [hidden]
        noise = torch.randn(len(new), weight.shape[1], generator=draw).to(weight.device)
        weight[new] = (mean + spread * noise).to(weight.dtype)
    if head is not None and getattr(head, "bias", None) is not None:
        head.bias[new] = head.bias[trained].float().mean().to(head.bias.dtype)


@torch.no_grad()
def _draw_mask(model: PreTrainedModel, id: int, seed: int) -> None:
    embedding = model.get_input_embeddings().weight
    spread = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    row = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(seed)) * spread
    embedding[id] = row.to(embedding.device, embedding.dtype)
