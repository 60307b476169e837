"""Reads decoded answers of an extraction: from tokens to checked values with confidences."""

import codecs
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding import Continuation, Value, Vocabulary
from raypd.schema import (
    Attribute,
    NumberType,
    asks_for_an_end,
    asks_for_multiples,
    is_end_of_range,
    is_misread,
    lacks_multiplier,
)
from raypd.tasks.base import Record, confidence
from raypd.tasks.calibration import calibration_of
from raypd.tasks.columns import value_row
from raypd.tasks.extraction_prompt import CategoryPrompt, DocumentText
from raypd.tasks.prompting import decode_answer, end_tokens
from raypd.tasks.record import record_of
from raypd.tasks.values import (
    CheckedValue,
    Rated,
    check,
    find_value,
    is_number,
    span_of,
    span_source,
)

# The number of characters that are kept of an answer without any value.
_MAX_NO_RECORD = 400
# Types whose values are single numbers.
_NUMBER_TYPES = ("number", "integer")


class ValueSource(NamedTuple):
    """A value of an attribute and its source.

    Attributes:
        text: The document, or a window of it.
        window: The number of the window; None for a document without windows.
        rated: The value and its confidence.
    """

    text: DocumentText
    window: int | None
    rated: Rated


class ExtractionAnswers:
    """Reads the answers of all categories."""

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
    ) -> None:
        """Read the model's calibration, if it has one.

        Raises:
            ModelError: If the calibration cannot be read.
        """
        self.decode = partial(decode_answer, tokenizer, end_tokens(tokenizer))
        self._vocabulary = vocabulary
        self._decoding = config.decoding
        self._categories = config.extraction.categories
        self._text_columns = list(config.input.text_columns)
        self._calibration = calibration_of(config.model, config.decoding.method)
        self._min_confidence = config.output.min_confidence

    def read_slots(
        self, category: CategoryPrompt, documents: int, values: Sequence[Value]
    ) -> list[list[Rated]]:
        """Read the slots of a prompt.

        Args:
            category: The category.
            documents: The number of documents of the prompt.
            values: The decoded value of each slot, document by document.

        Returns:
            Per document, the value of each attribute.
        """
        count = len(category.attributes)
        rated = []
        for number in range(documents):
            slots = values[number * count : (number + 1) * count]
            pairs = zip(category.attributes, slots, strict=True)
            rated.append([self._read_slot(attribute, value) for attribute, value in pairs])
        return rated

    def _read_slot(self, attribute: Attribute, value: Value) -> Rated:
        choice = value.completion
        if choice is None:
            text = self.decode(value.tokens)
        else:
            # Automata read the bytes of a text as latin-1.
            text = choice.encode("latin-1").decode()
        # A list that used all tokens of its slot may have been forced to end early.
        is_full = len(value.tokens) == self._decoding.max_value_tokens
        closed = value.closed and not (attribute.many and is_full)
        checked = check(attribute, text, closed, self._decoding.bare)
        return checked, confidence(value.logprobs, choice=choice is not None)

    def read_json(self, category: CategoryPrompt, answer: Continuation) -> list[Rated]:
        """Read a record that the model wrote as JSON, which may be invalid or cut.

        Returns:
            The value of each attribute.
        """
        text = self.decode(answer.tokens)
        starts = self._token_starts(answer.tokens, len(text))
        spans = [find_value(text, attribute.name) for attribute in category.attributes]
        missing = CheckedValue("invalid", None, "")
        if not any(spans):
            # An answer without any key is not a record, but an excuse or a question.
            missing = CheckedValue("invalid", None, text[:_MAX_NO_RECORD])
        elif not answer.stopped:
            missing = CheckedValue("truncated", None, "")
        rated: list[Rated] = []
        for attribute, span in zip(category.attributes, spans, strict=True):
            if span is None:
                rated.append((missing, None))
                continue
            begin, end, closed = span
            if text[begin : begin + 1] != '"':
                # A value that no comma or brace ends is complete if the answer is complete.
                closed = answer.stopped or text[end:].strip(" ") not in ("", ",")
            checked = check(attribute, text[begin:end], closed)
            logprobs = []
            token_spans = zip(answer.logprobs, starts, starts[1:], strict=False)
            for logprob, token_begin, token_end in token_spans:
                if token_begin < end and token_end > begin:
                    logprobs.append(logprob)
            rated.append((checked, confidence(logprobs)))
        return rated

    def _token_starts(self, tokens: Sequence[int], length: int) -> list[int]:
        """Return where the text of each token begins in the decoded answer, in characters.

        Args:
            tokens: The ids of the answer.
            length: The number of characters of the decoded answer.

        Returns:
            One offset per token, and the end of the answer.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = [0]
        end = 0
        for token in tokens:
            end += len(decoder.decode(self._vocabulary.texts[token].encode("latin-1")))
            # An incomplete character is shown as one character.
            is_incomplete = bool(decoder.getstate()[0])
            starts.append(end + is_incomplete)
        # Some tokenizers omit the blank before a text.
        missing = max(0, starts[-1] - length)
        return [max(0, start - missing) for start in starts]

    def record(self, category: CategoryPrompt, values: Sequence[ValueSource]) -> Record:
        """Return the record of a document; its column `record` has nested objects (`rows_of`).

        Args:
            category: The category.
            values: The value of each attribute.
        """
        first = values[0].text
        source = span_source(first.document, self._text_columns)
        # The model reads the text without its leading blanks.
        blanks = len(source) - len(source.lstrip())
        rows = []
        value_of = {}
        ambiguous = _ambiguous_numbers(category.attributes, values)
        for attribute, (text, window, rated) in zip(category.attributes, values, strict=True):
            checked, probability = rated
            if attribute.name in ambiguous:
                checked = CheckedValue("ambiguous", None, checked.raw)
            begin = blanks + text.begin
            boxes = first.document.boxes
            span = span_of(checked.value, text.text, begin, source, boxes)
            if probability is not None and self._calibration is not None:
                probability = self._calibration.confidence(
                    category.name,
                    attribute.name,
                    probability,
                    null=checked.value is None,
                    in_document=span["span"] is not None,
                    is_number=is_number(checked.value),
                )
            if checked.value is not None and self._is_unsure(probability):
                checked = CheckedValue("unsure", None, checked.raw)
            row = value_row(attribute.name, checked.value, checked.status, probability, checked.raw)
            rows.append({**row, **span, "window": window})
            value_of[attribute.name] = checked.value
        record = record_of(self._categories[category.name], value_of)
        columns = {
            "category": category.name,
            "record": record,
            "values": rows,
            "truncated": first.truncated,
        }
        return Record(first.document.index, columns)

    def _is_unsure(self, probability: float | None) -> bool:
        return probability is not None and probability < self._min_confidence


def _ambiguous_numbers(attributes: Sequence[Attribute], values: Sequence[ValueSource]) -> set[str]:
    """Return the attributes whose number is only a part of what the document says.

    Such a number is an end of a range although nothing asks for this end, has the digits of a
    number with another value, or precedes a "k".
    """
    numbers: dict[str, float] = {}
    for attribute, source in zip(attributes, values, strict=True):
        number = source.rated[0].value
        if number is not None and attribute.type in _NUMBER_TYPES and not attribute.many:
            numbers[attribute.name] = number
    ambiguous = set()
    for attribute, source in zip(attributes, values, strict=True):
        number = numbers.get(attribute.name)
        if number is None:
            continue
        document = source.text.text
        is_of_multiples = asks_for_multiples(attribute.name, attribute.description)
        raw = source.rated[0].raw
        others = [other for name, other in numbers.items() if name != attribute.name]
        value_type = attribute.value_type
        assert isinstance(value_type, NumberType)
        if is_misread(
            number,
            raw,
            document,
            of_multiples=is_of_multiples,
            allows=value_type.allows,
            others=others,
        ):
            ambiguous.add(attribute.name)
        if not is_of_multiples and lacks_multiplier(number, document):
            ambiguous.add(attribute.name)
        if asks_for_an_end(attribute.name, attribute.description):
            continue
        if is_end_of_range(number, document, others):
            ambiguous.add(attribute.name)
    return ambiguous
