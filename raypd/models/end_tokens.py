"""What a model's files say that its tokenizer does not: all tokens that end an answer, and ids
beyond the vocabulary.

Many models end an answer with one of several tokens, which only generation_config.json or
config.json list, such as <|user|> and <|observation|> of GLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

# A worker without weights imports this file and does without torch and transformers.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raypd.models.source import ModelSource


@dataclass(frozen=True)
class _ModelFacts:
    end_tokens: tuple[int, ...]
    vocabulary_size: int  # rows of the output embeddings, of which the last may have no token


_NOTHING_KNOWN = _ModelFacts((), 0)
_facts: WeakKeyDictionary[PreTrainedTokenizerBase, _ModelFacts] = WeakKeyDictionary()


def remember_model(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> None:
    """Read what the functions below return about the model of a tokenizer.

    Raises:
        ModelError: A file is not JSON.
    """
    config = _read_json(source, "config.json")
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = {}
    of_generation = _ids(_read_json(source, "generation_config.json").get("eos_token_id"))
    of_config = [*_ids(config.get("eos_token_id")), *_ids(text_config.get("eos_token_id"))]
    if of_generation:
        # transformers then no longer asks config.json, where an id of another vocabulary may have
        # been left. A special token is meant, while a word would cut answers.
        special = tokenizer.added_tokens_decoder
        of_config = [id for id in of_config if id in special]
    size = config.get("vocab_size", text_config.get("vocab_size"))
    if not isinstance(size, int):
        size = 0
    # As dictionary keys, ids occur once and in order.
    end_tokens = tuple(dict.fromkeys([*of_generation, *of_config]))
    _facts[tokenizer] = _ModelFacts(end_tokens, size)


def model_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end an answer, by generation_config.json and config.json of the model.

    They are in the order of the files, where the first is the one that most answers end with.
    Empty for a tokenizer that `load_tokenizer` did not load.
    """
    return _facts.get(tokenizer, _NOTHING_KNOWN).end_tokens


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids that the tokenizer's model can predict; 0 if it is unknown."""
    return _facts.get(tokenizer, _NOTHING_KNOWN).vocabulary_size


def _ids(value: Any) -> list[int]:
    """Return the ids of `eos_token_id`, which is one id, a list or null."""
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def _read_json(source: ModelSource, name: str) -> dict[str, Any]:
    """Read a file of the model; empty if there is none.

    transformers' classes would fill in their own end token where the file names none.
    """
    from transformers.utils.hub import cached_file

    from raypd.models.source import explained

    with explained(source, f"its {name} cannot be read"):
        path = cached_file(
            source.location,
            name,
            revision=source.arguments["revision"],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            return {}
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    return content if isinstance(content, dict) else {}
