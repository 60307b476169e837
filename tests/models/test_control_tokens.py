"""Control tokens added to a model and its tokenizer, saved, loaded and found again."""

import re

import pytest
import torch

from raypd.decoding.methods.registry import CLOSE, FORK, MASK
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS, add_control_tokens, control_token, markup_bytes
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer


def test_refused_without_them():
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "some/model"
    for token, name, named, method in ((FORK, None, "some/model", "apar"), (MASK, "mine", "mine", "space")):
        words = f"'{named}' has no control token {re.escape(token)}.*add-tokens {named} FOLDER --for {method}"
        with pytest.raises(ModelError, match=words):
            control_token(tokenizer, token, name)
    with pytest.raises(ModelError, match="no control tokens; those of apar, pasta, space, apar_medusa"):
        add_control_tokens(tiny_model("llama"), tokenizer, "hyper_parallel")


@pytest.mark.parametrize("method", CONTROL_TOKENS)
@pytest.mark.parametrize("tied", [False, True])
def test_new_rows(method, tied):
    model, tokenizer = tiny_model("llama", tie_word_embeddings=tied), tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, method)
    names = CONTROL_TOKENS[method]
    assert ids == list(range(VOCABULARY, VOCABULARY + len(names)))
    assert [control_token(tokenizer, name) for name in names] == ids
    after, head_after = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert after.shape[0] == head_after.shape[0] == model.config.vocab_size == VOCABULARY + len(names)
    assert torch.equal(torch.stack([after, head_after])[:, :VOCABULARY], torch.stack([before, head]))
    assert (after is head_after) == tied
    if method == "space":  # normal with the model's initializer_range, 0.02
        assert 0.01 < after[ids[0]].std() < 0.03
    matrices = [] if method == "space" else [(after, before)]
    for rows, old in matrices if tied else [*matrices, (head_after, head)]:
        away = (rows[ids] - old.mean(0)) / old.std(0)  # as far from the mean as an old row, and each its own way
        assert 0.7 < away.square().mean().sqrt() < 1.3
        assert len(torch.unique(rows[ids], dim=0)) == len(ids)
    # text that was there reads the same, and a control token is one token
    assert tokenizer.encode("ab[c", add_special_tokens=False) == list(b"ab[c")
    assert tokenizer.encode("a" + names[-1] + "b", add_special_tokens=False) == [ord("a"), ids[-1], ord("b")]
    assert tokenizer.decode([ids[0], 97], skip_special_tokens=True) == (names[0] if method == "pasta" else "") + "a"


def test_adding_twice_and_two_methods():
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    fork, child = add_control_tokens(model, tokenizer, "apar")
    with torch.no_grad():
        model.get_input_embeddings().weight[fork] = 7  # trained since
    assert add_control_tokens(model, tokenizer, "apar") == [fork, child]
    mask = add_control_tokens(model, tokenizer, "space", seed=1)[0]
    assert mask == VOCABULARY + 2
    assert (model.get_input_embeddings().weight[fork] == 7).all()
    fresh = tiny_model("qwen3")
    drawn = fresh.get_input_embeddings().weight[add_control_tokens(fresh, tiny_tokenizer(), "space", seed=1)[0]]
    assert torch.equal(drawn, model.get_input_embeddings().weight[mask]), "the seed alone decides"


def test_rows_beyond_the_vocabulary_are_used_and_kept():
    """Many models have more rows than their tokenizer has ids."""
    model, tokenizer = tiny_model("llama", vocab_size=320), tiny_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    ids = add_control_tokens(model, tokenizer, "apar")
    after = model.get_input_embeddings().weight
    assert after.shape == before.shape
    assert torch.equal(after[VOCABULARY + 2 :], before[VOCABULARY + 2 :])
    assert not torch.equal(after[ids[0]], before[ids[0]]), "a new token's row is drawn"


def test_markup_is_text_whether_special_or_not():
    tokenizer = tiny_tokenizer()
    ids = add_control_tokens(tiny_model("llama"), tokenizer, "pasta")
    assert [markup_bytes(tokenizer)[id] for id in ids] == [name.encode() for name in CONTROL_TOKENS["pasta"]]
    special = tiny_tokenizer()
    special.add_special_tokens({"additional_special_tokens": [CLOSE]})
    assert markup_bytes(special)[control_token(special, CLOSE)] == CLOSE.encode()
    assert markup_bytes(special)[ord("a")] == b"a"
