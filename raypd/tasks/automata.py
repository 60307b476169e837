"""The automata of slots and of JSON answers, over the bytes of a text as latin-1."""

from transformers import PreTrainedTokenizerBase

from raypd.decoding import Automaton, JsonObject, Vocabulary, one_of
from raypd.models import token_bytes
from raypd.schema import JSON_STRING, Attribute, NumberType, pattern_automaton
from raypd.tasks.prompting import encode

_JSON_NUMBER = NumberType.json_pattern + r"([eE][+-]?[0-9]+)?"


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Return a tokenizer's vocabulary in the form that these automata read."""

    def tokens_of(text: str) -> list[int]:
        return encode(tokenizer, text.encode("latin-1").decode(errors="ignore"), special=False)

    return Vocabulary([token.decode("latin-1") for token in token_bytes(tokenizer)], tokens_of)


def automaton_of(attribute: Attribute, bare: bool = False) -> Automaton:
    """Return the automaton of an attribute's slot.

    Args:
        attribute: The attribute.
        bare: Whether a text has no quotes and ends at a newline.

    Raises:
        ValueError: The attribute's pattern cannot be decoded.
    """
    return attribute.value_type.automaton(bare)


def json_object(pattern: str | None) -> Automaton:
    """Return the automaton of a JSON object.

    Args:
        pattern: The regular expression of the object's text; None permits any object.

    Raises:
        ValueError: The pattern cannot be decoded.
    """
    if pattern is not None:
        return pattern_automaton(pattern)
    numbers = pattern_automaton(_JSON_NUMBER, is_ours=True)
    constants = one_of(["true", "false", "null"])
    return JsonObject(pattern_automaton(JSON_STRING, is_ours=True), [numbers, constants])
