"""The prompts of an extraction: a category's instruction, the documents, and the answer's skeleton.

The skeleton is the JSON of a record with all keys and no values. With `hyper_parallel` and
`guided`, every value is a slot after its key; other methods let the model write the record.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding import REGISTRY, UNREACHABLE, Grammar, Prompt, Slot, SlottedPrompt, Vocabulary
from raypd.errors import ConfigError, raised_as
from raypd.schema import Attribute, record_pattern, record_schema
from raypd.tasks.automata import automaton_of, vocabulary_of
from raypd.tasks.base import Document
from raypd.tasks.documents import text_of
from raypd.tasks.few_shot import LabelledExamples
from raypd.tasks.prompting import DOCUMENTS, encode, messages, pieces
from raypd.tasks.windows import windows

# The fields of an attribute that determine which values its slot permits.
_GRAMMAR_FIELDS = {
    "type",
    "values",
    "many",
    "max_items",
    "min_items",
    "columns",
    "pattern",
    "required",
}
# The minimum number of a document's tokens that must fit in addition to the rest of a prompt.
_MIN_DOCUMENT_TOKENS = 16
# The tokens of the number in <document id="12">, and of the key "12" in the answer.
_DOCUMENT_NUMBER_TOKENS = 4
_DOCUMENT_KEY_TOKENS = 8


@dataclass
class CategoryPrompt:
    """The parts of a category's prompt, as token ids.

    Attributes:
        name: The name of the category.
        attributes: Its attributes, in the order of the answer.
        before: The ids before the documents.
        behind: The ids after the documents.
        keys: The part of the skeleton before each value. The first one opens the object.
        grammars: The values that the slot of each attribute permits.
        pattern: For an engine that restricts the whole answer by itself, the regular expression or
            the JSON Schema of the answer; otherwise None.
    """

    name: str
    attributes: list[Attribute]
    before: list[int]
    behind: list[int]
    keys: list[list[int]]
    grammars: list[Grammar]
    pattern: str | dict[str, Any] | None = None

    def answer_tokens(self, value_tokens: int) -> int:
        """Return the number of tokens of an answer whose values have `value_tokens` tokens each."""
        return sum(map(len, self.keys)) + len(self.keys) * value_tokens


@dataclass
class DocumentText:
    """A document, or a window of one, that is ready for a prompt.

    Attributes:
        document: The document.
        text: The text that the model reads.
        tokens: The ids of the text.
        examples: The ids of the solved examples for this document, which precede it.
        truncated: Whether the text is only the beginning of the document's text.
        begin: The offset of the text in the document's text, in characters.
    """

    document: Document
    text: str
    tokens: list[int]
    examples: list[int] = field(default_factory=list)
    truncated: bool = False
    begin: int = 0


class ExtractionPrompts:
    """Builds prompts for the categories of a configuration.

    Attributes:
        categories: The parts of each category's prompt.
        vocabulary: The tokenizer's vocabulary, in the form that grammars read.
        writes_record: Whether the model writes the whole record, including the keys.
        uses_pattern: Whether the engine restricts the record to a pattern instead of using slots.
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
    ) -> None:
        """Build the parts of all categories' prompts.

        Raises:
            ConfigError: The prompt of a category leaves no room for a document, an attribute cannot
                be decoded, or an example or a template cannot be used.
        """
        self.writes_record = REGISTRY[config.decoding.method].whole_record
        self.uses_pattern = config.engine.kind == "vllm" and not self.writes_record
        self.vocabulary = vocabulary_of(tokenizer)
        self._task = config.extraction
        self._decoding = config.decoding
        self._text_columns = list(config.input.text_columns)
        self._tokenizer = tokenizer
        self._context_length = context_length
        server = config.model.endpoint
        self._uses_schema = server is not None and server.response_format == "json_schema"
        self._examples = LabelledExamples(config.extraction, config.input)
        self._grammars: dict[str, Grammar] = {}
        # With `skeleton: slots`, documents follow the header of the answer as plain text.
        self._is_plain = config.decoding.bare and not config.decoding.stacked
        self._opening = self.encode("" if self._is_plain else "<document>\n")
        self._closing = self.encode("\n" if self._is_plain else "\n</document>\n")
        self.categories: dict[str, CategoryPrompt] = {}
        for name, message in messages(config.extraction, config.model).items():
            category = self._category_prompt(name, message)
            self._check_room(category)
            self.categories[name] = category

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with control strings as plain text."""
        return encode(self._tokenizer, text, special=False)

    def texts_of(self, document: Document, category: CategoryPrompt) -> list[DocumentText]:
        """Return a document's text, cut to the available length or into several windows.

        Raises:
            ValueError: If the document has no text, or is too long and must not be cut.
        """
        text = text_of(document, self._text_columns)
        tokens = self.encode(text)
        limit = self.remaining_tokens(category)
        examples = self._examples.nearest(category.name, text, self.encode, limit // 2)
        limit -= len(examples)
        if self._task.max_document_tokens is not None:
            limit = min(limit, self._task.max_document_tokens)
        if len(tokens) <= limit:
            return [DocumentText(document, text, tokens, examples)]
        if self._task.long_documents == "reject":
            raise ValueError(
                f"too long: {len(tokens)} tokens, at most {limit} fit "
                "(task.long_documents is reject)"
            )
        if self._task.long_documents == "split":
            return [
                DocumentText(document, window, window_tokens, examples, begin=begin)
                for begin, window, window_tokens in windows(text, self.encode, limit)
            ]
        return [DocumentText(document, text, tokens[:limit], examples, truncated=True)]

    def remaining_tokens(self, category: CategoryPrompt, documents: int = 1) -> int:
        """Return how many tokens the texts of all documents of a prompt may have in total.

        Args:
            category: The category.
            documents: The number of documents of the prompt.
        """
        instruction = len(category.before) + len(category.behind)
        frame = len(self._opening) + len(self._closing) + _DOCUMENT_NUMBER_TOKENS
        available = self._context_length - instruction
        if self.writes_record:
            return available - frame - len(category.keys[0]) - self._decoding.max_new_tokens
        answer = category.answer_tokens(self._decoding.max_value_tokens)
        return available - documents * (frame + answer + _DOCUMENT_KEY_TOKENS)

    def record_prompt(self, category: CategoryPrompt, texts: Sequence[DocumentText]) -> Prompt:
        """Return the prompt after which the model writes the record."""
        tokens = [*self._tokens(category, texts), *self.encode("{\n")]
        return Prompt(tokens, len(category.before))

    def slotted_prompt(
        self, category: CategoryPrompt, texts: Sequence[DocumentText]
    ) -> SlottedPrompt:
        """Return the prompt, followed by the skeleton of every document.

        HPD describes it in section 4.3.1, and several documents per prompt in section 4.3.5.
        """
        tokens = self._tokens(category, texts)
        slots: list[Slot] = []
        for number in range(1, len(texts) + 1):
            if len(texts) > 1:
                opening = "{" if number == 1 else "},"
                tokens += self.encode(f'{opening}\n"{number}": ')
            for key, grammar in zip(category.keys, category.grammars, strict=True):
                tokens += key
                slots.append(Slot(len(tokens) - 1, grammar))
        return SlottedPrompt(tokens, slots, len(category.before))

    def _tokens(self, category: CategoryPrompt, texts: Sequence[DocumentText]) -> list[int]:
        """Return the ids of the instruction and the documents."""
        tokens = list(category.before)
        for number, text in enumerate(texts, 1):
            tokens += text.examples
            if len(texts) == 1:
                tokens += self._opening
            else:
                tokens += self.encode(f'<document id="{number}">\n')
            tokens += text.tokens
            tokens += self._closing
        return tokens + category.behind

    def _category_prompt(self, name: str, message: str) -> CategoryPrompt:
        """Build the parts of a category's prompt.

        Args:
            name: The name of the category.
            message: The user's message, with the mark DOCUMENTS instead of the documents.
        """
        attributes = self._task.categories[name].attributes
        before, behind = pieces(self._tokenizer, message, [DOCUMENTS])
        before += self.encode(self._examples.first(name))
        if self._is_plain:
            before += behind
            behind = []
        category = CategoryPrompt(
            name=name,
            attributes=attributes,
            before=before,
            behind=behind,
            keys=self._keys([attribute.name for attribute in attributes]),
            grammars=[self._grammar(name, attribute) for attribute in attributes],
        )
        if self._uses_schema:
            category.pattern = record_schema(attributes)
        elif self.uses_pattern:
            category.pattern = record_pattern(attributes)
        return category

    def _keys(self, names: Sequence[str]) -> list[list[int]]:
        """Return the part of the skeleton before each value."""
        if self._decoding.bare:
            colon = self.encode(":")
            shortest = shortest_keys([self.encode(f" {name}") for name in names])
            # The token that asks for a value follows the ones that name it.
            return [key + colon for key in shortest]
        keys = []
        for number, name in enumerate(names):
            opening = "," if number else "{"
            keys.append(self.encode(f"{opening}\n{json.dumps(name, ensure_ascii=False)}:"))
        return keys

    def _grammar(self, category: str, attribute: Attribute) -> Grammar:
        """Return what an attribute's slot permits. Attributes with the same rules share the
        result.
        """
        key = attribute.model_dump_json(include=_GRAMMAR_FIELDS)
        if key not in self._grammars:
            where = f"task.categories.{category}: {attribute.name!r}"
            with raised_as(ConfigError, where, ValueError):
                automaton = automaton_of(attribute, self._decoding.bare)
                grammar = Grammar(automaton, self.vocabulary)
            if not self.writes_record:
                limit = self._decoding.max_value_tokens
                _check_length(attribute, grammar, self.vocabulary, limit, where)
            self._grammars[key] = grammar
        return self._grammars[key]

    def _check_room(self, category: CategoryPrompt) -> None:
        """Raise ConfigError if the prompt of a category leaves no room for a document."""
        if self.remaining_tokens(category) >= _MIN_DOCUMENT_TOKENS:
            return
        key = "max_new_tokens" if self.writes_record else "max_value_tokens"
        raise ConfigError(
            f"task.categories.{category.name}: instruction, {len(category.keys)} attributes and "
            "their answers leave no room for a document in the model's context of "
            f"{self._context_length} tokens; lower decoding.{key} "
            f"({getattr(self._decoding, key)}) or split the category"
        )


def shortest_keys(names: Sequence[list[int]]) -> list[list[int]]:
    """Return the shortest beginning of each name that no other name shares.

    A name that another name begins with is returned whole.

    Args:
        names: The token ids of each name.
    """
    keys = []
    for number, name in enumerate(names):
        others = [*names[:number], *names[number + 1 :]]
        keys.append(_shortest_key(name, others))
    return keys


def _shortest_key(name: list[int], others: Sequence[list[int]]) -> list[int]:
    for length in range(1, len(name)):
        beginning = name[:length]
        if all(other[:length] != beginning for other in others):
            return beginning
    return name


def _check_length(
    attribute: Attribute, grammar: Grammar, vocabulary: Vocabulary, limit: int, where: str
) -> None:
    """Raise ConfigError if the longest value of an attribute does not fit into its slot.

    Args:
        attribute: The attribute.
        grammar: The values that its slot permits.
        vocabulary: The tokenizer's vocabulary.
        limit: `decoding.max_value_tokens`.
        where: The attribute's key in the configuration, for the message.
    """
    if attribute.many:
        # A list that exceeds its minimum of items is cut after a complete item, so only the minimum
        # must fit, with the longest text in each item.
        shortest = attribute.model_copy(update={"max_items": attribute.min_items or 1})
        grammar = Grammar(automaton_of(shortest), vocabulary)
    needed = grammar.needed()
    if needed >= UNREACHABLE:
        raise ConfigError(
            f"{where}: no value of its pattern {attribute.pattern!r} can be written without quotes"
        )
    if needed > limit:
        raise ConfigError(
            f"{where} needs {needed} tokens for its longest value, but decoding.max_value_tokens "
            f"is {limit}; raise it"
        )
